"""CUDA C++ expressions, with which one kernel does the work of many elementwise ops: tools for `cuda=` of an op.

An expression has the values, dtypes and special cases of NumPy's ufunc: it converts its operands to the dtypes of the
ufunc's loop, integers wrap around, and division by an integer zero gives 0. Half-precision values are held as `float`
and rounded after each op, as if they had been stored in between. The source names nothing but CUDA's math functions and
the functions in `functions.py`, and means the same to a C++ compiler.

On GPUs nothing is raised: an integer to a negative power is 0, but for 1 and -1. Subnormal floats are whatever the
kernel's compiler makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from asyncflow.graph.ir import Attrs
from asyncflow.graph.op import CudaRule, Op
from asyncflow.graph.values.dtypes import DType, bool_

_C_TYPES = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "float",
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
}

HALVES = frozenset({"float16", "bfloat16"})
"""Names of the dtypes that are computed in `float`; C++ types of these names store them."""


# -- dtypes ----------------------------------------------------------------------------------------------------------


def has_c_type(dtype: DType) -> bool:
    """Return True if values of this dtype can be in expressions; complex numbers, strings and variants cannot."""
    return dtype.name in _C_TYPES


def c_type(dtype: DType) -> str:
    """The C++ type in which values of `dtype` are computed."""
    return _C_TYPES[dtype.name]


def stored_type(dtype: str) -> str:
    """Return the C++ type in which arrays hold values of the dtype of that name."""
    return dtype if dtype in HALVES else _C_TYPES[dtype]


def convert(text: str, source: DType, target: DType) -> str:
    """`text`, of dtype `source`, as `target`."""
    if source == target:
        return text
    if target == bool_:
        return f"({text} != 0)"
    if target.name not in HALVES:
        return text if c_type(source) == c_type(target) else f"static_cast<{c_type(target)}>({text})"
    return rounded(text if _is_float(source) else f"static_cast<float>({text})", target)


def _is_float(dtype: DType) -> bool:
    return c_type(dtype) in ("float", "double")


def rounded(text: str, dtype: DType) -> str:
    """`text`, computed for `dtype`, with the digits that `dtype` has."""
    return f"static_cast<float>(static_cast<{dtype.name}>({text}))" if dtype.name in HALVES else text


@dataclass(frozen=True, slots=True)
class UfuncLoop:
    """The dtype that a ufunc computes in."""

    dtype: DType

    @property
    def kind(self) -> str:
        """NumPy's kind character; bfloat16 is a float, too."""
        return "f" if _is_float(self.dtype) else self.dtype.kind

    @property
    def type(self) -> str:
        """The C++ type."""
        return c_type(self.dtype)

    @property
    def unsigned(self) -> str:
        """The type in which integers wrap around; signed overflow is undefined in C++, so is that of promoted ones."""
        return "unsigned long long" if self.dtype.itemsize == 8 else "unsigned int"

    @property
    def suffix(self) -> str:
        """The letter behind the names of C math functions."""
        return "" if self.type == "double" else "f"

    def number(self, value: float) -> str:
        """A literal."""
        if self.kind != "f":
            return f"static_cast<{self.type}>({int(value)})"
        return repr(float(value)) if self.type == "double" else f"{float(np.float32(value))!r}f"

    def wrap(self, text: str) -> str:
        """Cast an integer expression back to its own type."""
        return f"static_cast<{self.type}>({text})"

    def bits(self, text: str) -> str:
        """Cast an integer expression to a type that wraps around."""
        return f"static_cast<{self.unsigned}>({text})"


# -- expressions -----------------------------------------------------------------------------------------------------


def expression(op: Op, attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str | None:
    """The expression for one element of the output of `op`, of type ``c_type(output)``.

    Args:
        op: any op.
        attrs: of the node.
        inputs: dtypes of the inputs.
        output: dtype of the output.
        operands: variables that hold the inputs' elements, of type ``c_type`` of their dtypes.

    Returns:
        None if the op has no expression, or none for these dtypes.
    """
    if not callable(op.cuda) or not all(has_c_type(dtype) for dtype in (*inputs, output)):
        return None
    return op.cuda(attrs, inputs, output, operands)


# -- ufuncs ----------------------------------------------------------------------------------------------------------

Writer: TypeAlias = Callable[..., str | None]
"""``writer(loop, *operands)``, with operands of the loop's dtype; gives the result unrounded."""


def ufunc_loop(ufunc: np.ufunc, inputs: Sequence[DType]) -> tuple[DType, ...] | None:
    """Dtypes of the inputs and the output of the loop that `ufunc` takes for `inputs`; None if there is none."""
    try:
        return ufunc.resolve_dtypes((*inputs, None))
    except TypeError:
        return None


def write_ufunc(ufunc: np.ufunc, writer: Writer, inputs: Sequence[DType], operands: Sequence[str]) -> str | None:
    """Return the expression for `ufunc`, of the result's dtype; None if `ufunc` does not take `inputs`."""
    dtypes = ufunc_loop(ufunc, inputs)
    if dtypes is None or not all(map(has_c_type, dtypes)):
        return None
    *wanted, result = dtypes
    if len(wanted) == 2 and wanted[0] != wanted[1]:
        return _compared_exactly(_SIGNS[ufunc.__name__], wanted, operands) if ufunc.__name__ in _SIGNS else None
    converted = [convert(text, have, want) for text, have, want in zip(operands, inputs, wanted, strict=True)]
    text = writer(UfuncLoop(wanted[0]), *converted)
    return None if text is None else rounded(text, result)


def of_ufunc(ufunc: np.ufunc, writer: Writer) -> CudaRule:
    """The rule of an op whose kernel is `ufunc`."""

    def rule(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str | None:
        dtypes = ufunc_loop(ufunc, inputs)
        return None if dtypes is None or dtypes[-1] != output else write_ufunc(ufunc, writer, inputs, operands)

    return rule


def arithmetic(sign: str, of_booleans: str) -> Writer:
    """Return a writer for an operator of numbers, and another operator for booleans; integers wrap around."""

    def write(loop: UfuncLoop, a: str, b: str) -> str:
        if loop.kind == "b":
            return f"{a} {of_booleans} {b}"
        if loop.kind in "iu":
            return loop.wrap(f"{loop.bits(a)} {sign} {loop.bits(b)}")
        return f"{a} {sign} {b}"

    return write


def infix(sign: str) -> Writer:
    """An operator between two operands."""
    return lambda loop, a, b: f"{a} {sign} {b}"


_SIGNS = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}


def _compared_exactly(sign: str, dtypes: Sequence[DType], operands: Sequence[str]) -> str:
    """A signed and an unsigned integer, of which neither holds all values of the other."""
    (first, second), (a, b) = dtypes, operands
    wide = "static_cast<unsigned long long>"
    if first.kind == "i":
        return f"({a} < 0 ? -1 {sign} 0 : {wide}({a}) {sign} {wide}({b}))"
    assert second.kind == "i"
    return f"({b} < 0 ? 0 {sign} -1 : {wide}({a}) {sign} {wide}({b}))"


def compared(name: str) -> Writer:
    """The comparison that is NumPy's ufunc of that name."""
    return infix(_SIGNS[name])


def division(name: str, sign: str) -> Writer:
    """Division with remainder: a function of `functions.py`, and the sign of it for unsigned integers."""

    def write(loop: UfuncLoop, a: str, b: str) -> str:
        if loop.kind == "u":
            return loop.wrap(f"{b} == 0 ? 0 : {a} {sign} {b}")
        if loop.kind == "i":
            return f"asyncflow_integer_{name}<{loop.type}>({a}, {b})"
        return f"asyncflow_{name}{loop.suffix}({a}, {b})"

    return write


def extreme(name: str) -> Writer:
    """``maximum`` or ``minimum``; NaN if either is NaN."""
    return lambda loop, a, b: f"asyncflow_{name}<{loop.type}>({a}, {b})"


def function(name: str) -> Callable[..., str]:
    """A C math function; its name has an ``f`` behind for `float`."""
    return lambda loop, *operands: f"{name}{loop.suffix}({', '.join(operands)})"


def rounding(name: str) -> Writer:
    """A C math function that leaves integers as they are."""
    return lambda loop, a: a if loop.kind in "biu" else f"{name}{loop.suffix}({a})"


def rounded_once(writer: Callable[[UfuncLoop, str], str]) -> CudaRule:
    """Return the rule of an op of one input that keeps the dtype; halves are rounded only at the end."""
    return lambda attrs, inputs, output, operands: rounded(writer(UfuncLoop(output), operands[0]), output)
