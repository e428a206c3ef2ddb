"""Comparisons, tests, and logical and bitwise functions of the Array API standard, elementwise with broadcasting."""

from __future__ import annotations

import operator

import numpy as np

from asyncflow.graph.build import TensorLike, is_symbolic
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import NEW, Op, define
from asyncflow.graph.operators import install
from asyncflow.ops.cuda_source import UfuncLoop, Writer, compared, of_ufunc
from asyncflow.ops.promotion import binary, comparison, predicate, ufunc_op, unary
from asyncflow.values import Kernel


def _bitwise(sign: str) -> Writer:
    return lambda loop, a, b: loop.wrap(f"{a} {sign} {b}")


def _logical(sign: str) -> Writer:
    return lambda loop, a, b: f"({a} != 0) {sign} ({b} != 0)"


def _invert(loop: UfuncLoop, a: str) -> str:
    return f"!{a}" if loop.kind == "b" else loop.wrap(f"~{a}")


def _left_shift(loop: UfuncLoop, a: str, b: str) -> str:
    # All bits are shifted out by counts that are too large, or negative.
    return loop.wrap(f"{loop.bits(b)} < {loop.dtype.itemsize * 8} ? {loop.bits(a)} << {b} : 0")


def _right_shift(loop: UfuncLoop, a: str, b: str) -> str:
    rest = f"({a} < 0 ? -1 : 0)" if loop.kind == "i" else "0"
    return loop.wrap(f"{loop.bits(b)} < {loop.dtype.itemsize * 8} ? {a} >> {b} : {rest}")


def _comparison_op(name: str, scalar_kernel: Kernel) -> Op:
    # Strings compare too, which is why these do not take NumPy's rule for the ufunc.
    return define(
        name,
        predicate,
        lambda xp: getattr(xp, name),
        scalar_kernel=scalar_kernel,
        is_total=True,
        rows="elementwise",
        cuda=of_ufunc(getattr(np, name), compared(name)),
        traits=NEW,
    )


EQUAL = _comparison_op("equal", operator.eq)
GREATER = _comparison_op("greater", operator.gt)
GREATER_EQUAL = _comparison_op("greater_equal", operator.ge)
LESS = _comparison_op("less", operator.lt)
LESS_EQUAL = _comparison_op("less_equal", operator.le)
NOT_EQUAL = _comparison_op("not_equal", operator.ne)

BITWISE_AND = ufunc_op("bitwise_and", "bitwise_and", _bitwise("&"), operator.and_)
BITWISE_OR = ufunc_op("bitwise_or", "bitwise_or", _bitwise("|"), operator.or_)
BITWISE_XOR = ufunc_op("bitwise_xor", "bitwise_xor", _bitwise("^"), operator.xor)
BITWISE_LEFT_SHIFT = ufunc_op("bitwise_left_shift", "left_shift", _left_shift, operator.lshift)
BITWISE_RIGHT_SHIFT = ufunc_op("bitwise_right_shift", "right_shift", _right_shift, operator.rshift)
LOGICAL_AND = ufunc_op("logical_and", "logical_and", _logical("&&"))
LOGICAL_OR = ufunc_op("logical_or", "logical_or", _logical("||"))
LOGICAL_XOR = ufunc_op("logical_xor", "logical_xor", _logical("!="))

BITWISE_INVERT = ufunc_op("bitwise_invert", "invert", _invert, operator.invert)
ISFINITE = ufunc_op("isfinite", "isfinite", lambda loop, a: f"{a} - {a} == 0" if loop.kind == "f" else "true")
ISINF = ufunc_op("isinf", "isinf", lambda loop, a: f"{a} == {a} && {a} - {a} != 0" if loop.kind == "f" else "false")
ISNAN = ufunc_op("isnan", "isnan", lambda loop, a: f"{a} != {a}" if loop.kind == "f" else "false")
LOGICAL_NOT = ufunc_op("logical_not", "logical_not", lambda loop, a: f"{a} == 0")
SIGNBIT = ufunc_op("signbit", "signbit", lambda loop, a: f"copysign{loop.suffix}({loop.number(1)}, {a}) < 0")


def bitwise_and(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Bits set in both; ``and`` of booleans."""
    return binary(BITWISE_AND, x1, x2)


def bitwise_invert(x: TensorLike, /) -> Tensor:
    """Every bit flipped; ``not`` of booleans."""
    return unary(BITWISE_INVERT, x)


def bitwise_left_shift(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """`x1` shifted left by `x2` bits."""
    return binary(BITWISE_LEFT_SHIFT, x1, x2)


def bitwise_or(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Bits set in either; ``or`` of booleans."""
    return binary(BITWISE_OR, x1, x2)


def bitwise_right_shift(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """`x1` shifted right by `x2` bits, keeping the sign."""
    return binary(BITWISE_RIGHT_SHIFT, x1, x2)


def bitwise_xor(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Bits set in exactly one; ``xor`` of booleans."""
    return binary(BITWISE_XOR, x1, x2)


def equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where `x1` equals `x2`; NaN equals nothing."""
    return comparison(EQUAL, x1, x2)


def greater(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where `x1` is greater than `x2`."""
    return comparison(GREATER, x1, x2)


def greater_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where `x1` is greater than or equal to `x2`."""
    return comparison(GREATER_EQUAL, x1, x2)


def isfinite(x: TensorLike, /) -> Tensor:
    """True where the value is neither infinite nor NaN."""
    return unary(ISFINITE, x)


def isinf(x: TensorLike, /) -> Tensor:
    """True where the value is plus or minus infinity."""
    return unary(ISINF, x)


def isnan(x: TensorLike, /) -> Tensor:
    """True where the value is NaN."""
    return unary(ISNAN, x)


def less(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where `x1` is less than `x2`."""
    return comparison(LESS, x1, x2)


def less_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where `x1` is less than or equal to `x2`."""
    return comparison(LESS_EQUAL, x1, x2)


def logical_and(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where both are true; numbers are true unless 0."""
    return binary(LOGICAL_AND, x1, x2)


def logical_not(x: TensorLike, /) -> Tensor:
    """True where the value is false; numbers are true unless 0."""
    return unary(LOGICAL_NOT, x)


def logical_or(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where either is true; numbers are true unless 0."""
    return binary(LOGICAL_OR, x1, x2)


def logical_xor(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where exactly one is true; numbers are true unless 0."""
    return binary(LOGICAL_XOR, x1, x2)


def not_equal(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True where `x1` differs from `x2`."""
    return comparison(NOT_EQUAL, x1, x2)


def signbit(x: TensorLike, /) -> Tensor:
    """True where the sign bit is set, -0.0 included."""
    return unary(SIGNBIT, x)


def _is_comparable(x: TensorLike) -> bool:
    # What no tensor can hold, such as None, leaves `==` and `!=` to Python, which compares identities.
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
