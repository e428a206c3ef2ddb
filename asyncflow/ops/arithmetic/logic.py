"""Comparisons, tests, and logical and bitwise functions of the Array API standard, elementwise with broadcasting."""

from __future__ import annotations

import operator
from functools import partial

import numpy as np

from asyncflow.graph.building.build import TensorLike, is_symbolic
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import NEW, Op, define
from asyncflow.graph.values.operators import install
from asyncflow.ops.cuda.source import UfuncLoop, Writer, compared, of_ufunc
from asyncflow.ops.promotion import BinaryFunction, binary_op, comparison, predicate, published, unary_op
from asyncflow.values import Kernel


def _bits(sign: str) -> Writer:
    return lambda loop, a, b: loop.wrap(f"{a} {sign} {b}")


def _truth(sign: str) -> Writer:
    return lambda loop, a, b: f"({a} != 0) {sign} ({b} != 0)"


def _float_test(text: str, of_others: str) -> Writer:
    return lambda loop, a: text.format(a) if loop.kind == "f" else of_others


def _invert(loop: UfuncLoop, a: str) -> str:
    return f"!{a}" if loop.kind == "b" else loop.wrap(f"~{a}")


def _left_shift(loop: UfuncLoop, a: str, b: str) -> str:
    # Counts that are too large or negative shift out all bits.
    return loop.wrap(f"{loop.bits(b)} < {loop.dtype.itemsize * 8} ? {loop.bits(a)} << {b} : 0")


def _right_shift(loop: UfuncLoop, a: str, b: str) -> str:
    rest = f"({a} < 0 ? -1 : 0)" if loop.kind == "i" else "0"
    return loop.wrap(f"{loop.bits(b)} < {loop.dtype.itemsize * 8} ? {a} >> {b} : {rest}")


def _comparison(name: str, doc: str, scalar_kernel: Kernel) -> tuple[Op, BinaryFunction]:
    # Not NumPy's rule for the ufunc, as strings compare, too.
    op = define(
        name,
        predicate,
        lambda xp: getattr(xp, name),
        scalar_kernel=scalar_kernel,
        is_total=True,
        rows="elementwise",
        cuda=of_ufunc(getattr(np, name), compared(name)),
        traits=NEW,
    )

    def applied(x1: TensorLike, x2: TensorLike, /) -> Tensor:
        return comparison(op, x1, x2)

    return op, published(applied, __name__, name, doc)


_unary, _binary = partial(unary_op, __name__), partial(binary_op, __name__)

EQUAL, equal = _comparison("equal", "True where `x1` equals `x2`; NaN equals nothing.", operator.eq)
GREATER, greater = _comparison("greater", "True where `x1` is greater than `x2`.", operator.gt)
GREATER_EQUAL, greater_equal = _comparison(
    "greater_equal", "True where `x1` is greater than or equal to `x2`.", operator.ge
)
LESS, less = _comparison("less", "True where `x1` is less than `x2`.", operator.lt)
LESS_EQUAL, less_equal = _comparison("less_equal", "True where `x1` is less than or equal to `x2`.", operator.le)
NOT_EQUAL, not_equal = _comparison("not_equal", "True where `x1` differs from `x2`.", operator.ne)

BITWISE_AND, bitwise_and = _binary("bitwise_and", "Bits set in both; ``and`` of booleans.", _bits("&"), operator.and_)
BITWISE_OR, bitwise_or = _binary("bitwise_or", "Bits set in either; ``or`` of booleans.", _bits("|"), operator.or_)
BITWISE_XOR, bitwise_xor = _binary(
    "bitwise_xor", "Bits set in exactly one; ``xor`` of booleans.", _bits("^"), operator.xor
)
BITWISE_LEFT_SHIFT, bitwise_left_shift = _binary(
    "bitwise_left_shift", "`x1` shifted left by `x2` bits.", _left_shift, operator.lshift
)
BITWISE_RIGHT_SHIFT, bitwise_right_shift = _binary(
    "bitwise_right_shift", "`x1` shifted right by `x2` bits, keeping the sign.", _right_shift, operator.rshift
)
LOGICAL_AND, logical_and = _binary("logical_and", "True where both are true; numbers are true unless 0.", _truth("&&"))
LOGICAL_OR, logical_or = _binary("logical_or", "True where either is true; numbers are true unless 0.", _truth("||"))
LOGICAL_XOR, logical_xor = _binary(
    "logical_xor", "True where exactly one is true; numbers are true unless 0.", _truth("!=")
)

BITWISE_INVERT, bitwise_invert = _unary(
    "bitwise_invert", "Every bit flipped; ``not`` of booleans.", _invert, operator.invert
)
ISFINITE, isfinite = _unary(
    "isfinite", "True where the value is neither infinite nor NaN.", _float_test("{0} - {0} == 0", "true")
)
ISINF, isinf = _unary(
    "isinf", "True where the value is plus or minus infinity.", _float_test("{0} == {0} && {0} - {0} != 0", "false")
)
ISNAN, isnan = _unary("isnan", "True where the value is NaN.", _float_test("{0} != {0}", "false"))
LOGICAL_NOT, logical_not = _unary(
    "logical_not", "True where the value is false; numbers are true unless 0.", lambda loop, a: f"{a} == 0"
)
SIGNBIT, signbit = _unary(
    "signbit",
    "True where the sign bit is set, -0.0 included.",
    lambda loop, a: f"copysign{loop.suffix}({loop.number(1)}, {a}) < 0",
)


def _is_comparable(x: TensorLike) -> bool:
    # For values that no tensor can hold, such as None, leave `==` and `!=` to Python, which compares identities.
    return is_symbolic(x) or isinstance(x, np.ndarray | np.generic | int | float | complex | str | list | tuple)


install(
    equal=lambda x1, x2: equal(x1, x2) if _is_comparable(x2) else NotImplemented,
    not_equal=lambda x1, x2: not_equal(x1, x2) if _is_comparable(x2) else NotImplemented,
    greater=greater,
    greater_equal=greater_equal,
    less=less,
    less_equal=less_equal,
    bitwise_and=bitwise_and,
    bitwise_or=bitwise_or,
    bitwise_xor=bitwise_xor,
    bitwise_left_shift=bitwise_left_shift,
    bitwise_right_shift=bitwise_right_shift,
    bitwise_invert=bitwise_invert,
)
