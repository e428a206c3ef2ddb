"""CUDA C++ expressions for elementwise ops, so that one kernel can do the work of many.

An expression has the values, dtypes and special cases of NumPy's ufunc: it converts its operands to the dtypes of the
ufunc's loop, integers wrap around, and division by an integer zero gives 0. Half-precision values are held as `float`
and rounded after each op, as if they had been stored in between. The source names nothing but CUDA's math functions and
those of `cuda_functions`, and means the same to a C++ compiler.

On GPUs nothing is raised: an integer to a negative power is 0, but for 1 and -1. Subnormal floats are whatever the
kernel's compiler makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from asyncflow.graph.builtin import IDENTITY
from asyncflow.graph.dtypes import DType, bool_
from asyncflow.ops import elementwise as e
from asyncflow.ops import logic, nn
from asyncflow.ops.datatypes import ASTYPE
from asyncflow.ops.erf import ERF
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.searching import WHERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Attrs
    from asyncflow.graph.op import Op

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
    """Whether values of this dtype can be in expressions; complex numbers, strings and variants cannot."""
    return dtype.name in _C_TYPES


def c_type(dtype: DType) -> str:
    """The C++ type in which values of `dtype` are computed."""
    return _C_TYPES[dtype.name]


def convert(text: str, source: DType, target: DType) -> str:
    """`text`, of dtype `source`, as `target`."""
    if source == target:
        return text
    if target == bool_:
        return f"({text} != 0)"
    if target.name not in HALVES:
        return text if c_type(source) == c_type(target) else f"static_cast<{c_type(target)}>({text})"
    return rounded(text if kind_of(source) == "f" else f"static_cast<float>({text})", target)


def rounded(text: str, dtype: DType) -> str:
    """`text`, computed for `dtype`, with the digits that `dtype` has."""
    return f"static_cast<float>(static_cast<{dtype.name}>({text}))" if dtype.name in HALVES else text


@dataclass(frozen=True, slots=True)
class _UfuncLoop:
    """The dtype that a ufunc computes in."""

    dtype: DType

    @property
    def kind(self) -> str:
        return kind_of(self.dtype)

    @property
    def type(self) -> str:
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
        """An integer expression back in its own type."""
        return f"static_cast<{self.type}>({text})"

    def bits(self, text: str) -> str:
        """An integer as one that wraps around."""
        return f"static_cast<{self.unsigned}>({text})"


# -- the table -------------------------------------------------------------------------------------------------------

Rule: TypeAlias = Callable[..., str | None]
"""``rule(attrs, inputs, output, operands)``: the expression, or None where there is none for these dtypes."""

_rules: dict[Op, Rule] = {}
_composite: set[Op] = set()
_not_fused: dict[Op, str] = {}


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
    rule = _rules.get(op)
    if rule is None or not all(has_c_type(dtype) for dtype in (*inputs, output)):
        return None
    return rule(attrs, inputs, output, operands)


def has_source(op: Op) -> bool:
    """Whether the op has an expression for some dtypes."""
    return op in _rules


def is_composite(op: Op) -> bool:
    """Whether the op's own kernel launches several, so that one of generated source pays for the op alone."""
    return op in _composite


def not_fused(*ops: Op, because: str) -> None:
    """Marks elementwise `ops` that have no expression."""
    _not_fused.update(dict.fromkeys(ops, because))


def why_not_fused(op: Op) -> str | None:
    """The reason given with `not_fused`; None if the op was not marked."""
    return _not_fused.get(op)


# -- ufuncs ----------------------------------------------------------------------------------------------------------

Writer: TypeAlias = Callable[..., str | None]
"""``writer(loop, *operands)``, with operands of the loop's dtype; gives the result unrounded."""


def _loop(ufunc: np.ufunc, inputs: Sequence[DType]) -> tuple[DType, ...] | None:
    """Dtypes of the inputs and the output of the loop that `ufunc` takes for `inputs`; None if there is none."""
    try:
        return ufunc.resolve_dtypes((*inputs, None))
    except TypeError:
        return None


def _write(ufunc: np.ufunc, writer: Writer, inputs: Sequence[DType], operands: Sequence[str]) -> str | None:
    dtypes = _loop(ufunc, inputs)
    if dtypes is None or not all(map(has_c_type, dtypes)):
        return None
    *wanted, result = dtypes
    if len(wanted) == 2 and wanted[0] != wanted[1]:
        return _COMPARISONS[ufunc.__name__](wanted, operands) if ufunc.__name__ in _COMPARISONS else None
    converted = [convert(text, have, want) for text, have, want in zip(operands, inputs, wanted, strict=True)]
    text = writer(_UfuncLoop(wanted[0]), *converted)
    return None if text is None else rounded(text, result)


def _ufunc(op: Op, writer: Writer) -> None:
    """Gives `op`, whose kernel is a ufunc, the expression of `writer`."""
    assert op.kernel is not None
    ufunc = cast("np.ufunc", op.kernel(np))

    def rule(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str | None:
        dtypes = _loop(ufunc, inputs)
        return None if dtypes is None or dtypes[-1] != output else _write(ufunc, writer, inputs, operands)

    _rules[op] = rule


def _arithmetic(sign: str, of_booleans: str) -> Writer:
    def write(loop: _UfuncLoop, a: str, b: str) -> str:
        if loop.kind == "b":
            return f"{a} {of_booleans} {b}"
        if loop.kind in "iu":
            return loop.wrap(f"{loop.bits(a)} {sign} {loop.bits(b)}")
        return f"{a} {sign} {b}"

    return write


def _bitwise(sign: str) -> Writer:
    return lambda loop, a, b: loop.wrap(f"{a} {sign} {b}")


def _infix(sign: str) -> Writer:
    return lambda loop, a, b: f"{a} {sign} {b}"


def _compared_exactly(sign: str) -> Callable[[Sequence[DType], Sequence[str]], str]:
    """A signed and an unsigned integer, of which neither holds all values of the other."""

    def write(dtypes: Sequence[DType], operands: Sequence[str]) -> str:
        (first, second), (a, b) = dtypes, operands
        wide = "static_cast<unsigned long long>"
        if first.kind == "i":
            return f"({a} < 0 ? -1 {sign} 0 : {wide}({a}) {sign} {wide}({b}))"
        assert second.kind == "i"
        return f"({b} < 0 ? 0 {sign} -1 : {wide}({a}) {sign} {wide}({b}))"

    return write


_SIGNS = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
_COMPARISONS = {name: _compared_exactly(sign) for name, sign in _SIGNS.items()}


def _integer_or_float(name: str, sign: str) -> Writer:
    """Division with remainder."""

    def write(loop: _UfuncLoop, a: str, b: str) -> str:
        if loop.kind == "u":
            return loop.wrap(f"{b} == 0 ? 0 : {a} {sign} {b}")
        if loop.kind == "i":
            return f"asyncflow_integer_{name}<{loop.type}>({a}, {b})"
        return f"asyncflow_{name}{loop.suffix}({a}, {b})"

    return write


def _power(loop: _UfuncLoop, a: str, b: str) -> str:
    if loop.kind in "iu":
        return f"asyncflow_integer_power<{loop.type}, {loop.unsigned}>({a}, {b})"
    return f"pow{loop.suffix}({a}, {b})"


def _extreme(name: str) -> Writer:
    return lambda loop, a, b: f"asyncflow_{name}<{loop.type}>({a}, {b})"


def _function(name: str) -> Writer:
    """A C math function; its name has a suffix for `float`."""
    return lambda loop, *operands: f"{name}{loop.suffix}({', '.join(operands)})"


def _rounding(name: str) -> Writer:
    return lambda loop, a: a if loop.kind in "biu" else f"{name}{loop.suffix}({a})"


def _next_after(loop: _UfuncLoop, a: str, b: str) -> str | None:
    # The neighbours of a half are not those of the float that holds it.
    return None if loop.dtype.name in HALVES else f"nextafter{loop.suffix}({a}, {b})"


def _absolute(loop: _UfuncLoop, a: str) -> str:
    if loop.kind in ("b", "u"):
        return a
    return f"({a} < 0 ? {_negative(loop, a)} : {a})" if loop.kind == "i" else f"fabs{loop.suffix}({a})"


def _negative(loop: _UfuncLoop, a: str) -> str:
    return f"-{a}" if loop.kind == "f" else loop.wrap(f"0u - {loop.bits(a)}")


def _reciprocal(loop: _UfuncLoop, a: str) -> str:
    return f"{loop.number(1)} / {a}" if loop.kind == "f" else loop.wrap(f"{a} == 0 ? 0 : 1 / {a}")


def _sign(loop: _UfuncLoop, a: str) -> str:
    sign = loop.wrap(f"({a} > 0) - ({a} < 0)")
    return f"({a} != {a} ? {a} : {sign})" if loop.kind == "f" else sign


def _square(loop: _UfuncLoop, a: str) -> str:
    return f"{a} * {a}" if loop.kind == "f" else loop.wrap(f"{loop.bits(a)} * {loop.bits(a)}")


def _logical(sign: str) -> Writer:
    return lambda loop, a, b: f"({a} != 0) {sign} ({b} != 0)"


def _invert(loop: _UfuncLoop, a: str) -> str:
    return f"!{a}" if loop.kind == "b" else loop.wrap(f"~{a}")


def _left_shift(loop: _UfuncLoop, a: str, b: str) -> str:
    # All bits are shifted out by counts that are too large, or negative.
    return loop.wrap(f"{loop.bits(b)} < {loop.dtype.itemsize * 8} ? {loop.bits(a)} << {b} : 0")


def _right_shift(loop: _UfuncLoop, a: str, b: str) -> str:
    rest = f"({a} < 0 ? -1 : 0)" if loop.kind == "i" else "0"
    return loop.wrap(f"{loop.bits(b)} < {loop.dtype.itemsize * 8} ? {a} >> {b} : {rest}")


def _is_finite(loop: _UfuncLoop, a: str) -> str:
    return f"{a} - {a} == 0" if loop.kind == "f" else "true"


def _is_infinite(loop: _UfuncLoop, a: str) -> str:
    return f"{a} == {a} && {a} - {a} != 0" if loop.kind == "f" else "false"


def _is_nan(loop: _UfuncLoop, a: str) -> str:
    return f"{a} != {a}" if loop.kind == "f" else "false"


def _signbit(loop: _UfuncLoop, a: str) -> str:
    return f"copysign{loop.suffix}({loop.number(1)}, {a}) < 0"


_WRITERS: dict[Op, Writer] = {
    e.ADD: _arithmetic("+", "|"),
    e.SUBTRACT: _arithmetic("-", "^"),
    e.MULTIPLY: _arithmetic("*", "&"),
    e.DIVIDE: _infix("/"),
    e.FLOOR_DIVIDE: _integer_or_float("floor_divide", "/"),
    e.REMAINDER: _integer_or_float("remainder", "%"),
    e.POW: _power,
    e.MAXIMUM: _extreme("maximum"),
    e.MINIMUM: _extreme("minimum"),
    e.ATAN2: _function("atan2"),
    e.COPYSIGN: _function("copysign"),
    e.HYPOT: _function("hypot"),
    e.LOGADDEXP: _function("asyncflow_logaddexp"),
    e.NEXTAFTER: _next_after,
    e.ABS: _absolute,
    e.NEGATIVE: _negative,
    e.POSITIVE: lambda loop, a: a,
    e.CONJ: lambda loop, a: a,
    e.RECIPROCAL: _reciprocal,
    e.SIGN: _sign,
    e.SQUARE: _square,
    e.CEIL: _rounding("ceil"),
    e.FLOOR: _rounding("floor"),
    e.ROUND: _rounding("rint"),
    e.TRUNC: _rounding("trunc"),
    **{
        op: _function(op.name)
        for op in (
            *(e.ACOS, e.ACOSH, e.ASIN, e.ASINH, e.ATAN, e.ATANH, e.COS, e.COSH, e.EXP, e.EXPM1, e.LOG, e.LOG1P),
            *(e.LOG10, e.LOG2, e.SIN, e.SINH, e.SQRT, e.TAN, e.TANH),
        )
    },
    logic.EQUAL: _infix("=="),
    logic.NOT_EQUAL: _infix("!="),
    logic.LESS: _infix("<"),
    logic.LESS_EQUAL: _infix("<="),
    logic.GREATER: _infix(">"),
    logic.GREATER_EQUAL: _infix(">="),
    logic.BITWISE_AND: _bitwise("&"),
    logic.BITWISE_OR: _bitwise("|"),
    logic.BITWISE_XOR: _bitwise("^"),
    logic.BITWISE_LEFT_SHIFT: _left_shift,
    logic.BITWISE_RIGHT_SHIFT: _right_shift,
    logic.BITWISE_INVERT: _invert,
    logic.LOGICAL_AND: _logical("&&"),
    logic.LOGICAL_OR: _logical("||"),
    logic.LOGICAL_XOR: _logical("!="),
    logic.LOGICAL_NOT: lambda loop, a: f"{a} == 0",
    logic.ISFINITE: _is_finite,
    logic.ISINF: _is_infinite,
    logic.ISNAN: _is_nan,
    logic.SIGNBIT: _signbit,
}
for _op, _writer in _WRITERS.items():
    _ufunc(_op, _writer)

_OTHERWISE_IN_CUPY = frozenset((e.FLOOR_DIVIDE, e.REMAINDER))


def is_otherwise_in_cupy(op: Op, dtype: DType) -> bool:
    """Whether CuPy's ufunc with that result answers otherwise than NumPy's does: to it ``1.0 // 0.2`` is 5, not 4."""
    return op in _OTHERWISE_IN_CUPY and dtype.kind not in "biu"


# -- other ops -------------------------------------------------------------------------------------------------------


def _astype(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str:
    return convert(operands[0], inputs[0], output)


def _where(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str:
    condition, x1, x2 = operands
    return f"{condition} ? {x1} : {x2}"


def _clip(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str | None:
    text: str | None = operands[0]
    dtype = inputs[0]
    steps = [(np.maximum, "maximum")] * attrs["low"] + [(np.minimum, "minimum")] * attrs["high"]
    for (ufunc, name), bound, limit in zip(steps, inputs[1:], operands[1:], strict=True):
        dtypes = _loop(ufunc, (dtype, bound))
        if dtypes is None or text is None:
            return None
        text = _write(ufunc, _extreme(name), (dtype, bound), (text, limit))
        dtype = dtypes[-1]
    return None if text is None else convert(text, dtype, output)


def _relu(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str:
    loop = _UfuncLoop(output)
    return f"asyncflow_maximum<{loop.type}>({operands[0]}, {loop.number(0)})"


def _activation(writer: Callable[[_UfuncLoop, str], str]) -> Rule:
    """Half-precision values are rounded once, at the end."""

    def rule(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str:
        return rounded(writer(_UfuncLoop(output), operands[0]), output)

    return rule


def _sigmoid(loop: _UfuncLoop, x: str) -> str:
    return f"{loop.number(1)} / ({loop.number(1)} + exp{loop.suffix}(-{x}))"


def _silu(loop: _UfuncLoop, x: str) -> str:
    return f"asyncflow_maximum<{loop.type}>({x}, {loop.number(nn.FARTHEST)}) * ({_sigmoid(loop, x)})"


def _softplus(loop: _UfuncLoop, x: str) -> str:
    f, positive = loop.suffix, f"asyncflow_maximum<{loop.type}>({x}, {loop.number(0)})"
    return f"{positive} + log1p{f}(exp{f}(-fabs{f}({x})))"


def _gelu(loop: _UfuncLoop, x: str) -> str:
    half, one, slope, cubic, far = map(loop.number, (0.5, 1.0, 0.7978845608028654, 0.044715, nn.FARTHEST))
    factor = f"{half} * asyncflow_maximum<{loop.type}>({x}, {far})"
    return f"{factor} * ({one} + tanh{loop.suffix}({slope} * ({x} + {cubic} * {x} * {x} * {x})))"


_rules.update(
    {
        ASTYPE: _astype,
        WHERE: _where,
        e.CLIP: _clip,
        nn.RELU: _relu,
        nn.SIGMOID: _activation(_sigmoid),
        nn.SILU: _activation(_silu),
        nn.SOFTPLUS: _activation(_softplus),
        nn.GELU: _activation(_gelu),
        ERF: _activation(lambda loop, x: f"erf{loop.suffix}({x})"),
    }
)
_composite.update((e.CLIP, nn.SIGMOID, nn.SILU, nn.SOFTPLUS, nn.GELU, ERF))
not_fused(e.COMPLEX_MULTIPLY, e.REAL, e.IMAG, because="complex numbers have no expressions")
not_fused(IDENTITY, because="its value is its input's: there is nothing to launch")
