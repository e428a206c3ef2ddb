"""Arithmetic and mathematical functions of the Array API standard, elementwise with broadcasting.

Dtypes follow NumPy's ufuncs (integers passed to `sqrt` and its like give floats); Python scalars are weak.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from asyncflow.errors import DTypeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, identity
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import KERNELS, VIEW, Op, define
from asyncflow.graph.values.dtypes import DType
from asyncflow.graph.values.operators import install
from asyncflow.graph.values.shapes import broadcast
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import zeros_like
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.cost import free
from asyncflow.ops.cuda import source as cuda
from asyncflow.ops.promotion import (
    UnaryFunction,
    binary,
    binary_op,
    is_weak,
    kind_of,
    promote_for,
    promote_operands,
    promoted_dtype,
    published,
    real_dtype,
    require_kind,
    ufunc_op,
    unary_op,
)
from asyncflow.values import Kernel, Namespace

_COMPLEX = "complex numbers have no expressions"


def _power(loop: cuda.UfuncLoop, a: str, b: str) -> str:
    if loop.kind in "iu":
        return f"asyncflow_integer_power<{loop.type}, {loop.unsigned}>({a}, {b})"
    return f"pow{loop.suffix}({a}, {b})"


def _next_after(loop: cuda.UfuncLoop, a: str, b: str) -> str | None:
    # The neighbours of a half differ from the neighbours of the float that holds it.
    return None if loop.dtype.name in cuda.HALVES else f"nextafter{loop.suffix}({a}, {b})"


def _absolute(loop: cuda.UfuncLoop, a: str) -> str:
    if loop.kind in ("b", "u"):
        return a
    return f"({a} < 0 ? {_negative(loop, a)} : {a})" if loop.kind == "i" else f"fabs{loop.suffix}({a})"


def _negative(loop: cuda.UfuncLoop, a: str) -> str:
    return f"-{a}" if loop.kind == "f" else loop.wrap(f"0u - {loop.bits(a)}")


def _reciprocal(loop: cuda.UfuncLoop, a: str) -> str:
    return f"{loop.number(1)} / {a}" if loop.kind == "f" else loop.wrap(f"{a} == 0 ? 0 : 1 / {a}")


def _sign(loop: cuda.UfuncLoop, a: str) -> str:
    sign = loop.wrap(f"({a} > 0) - ({a} < 0)")
    return f"({a} != {a} ? {a} : {sign})" if loop.kind == "f" else sign


def _square(loop: cuda.UfuncLoop, a: str) -> str:
    return f"{a} * {a}" if loop.kind == "f" else loop.wrap(f"{loop.bits(a)} * {loop.bits(a)}")


def _rounding(name: str, doc: str, ufunc: np.ufunc) -> tuple[Op, UnaryFunction]:
    op = ufunc_op(name, cuda.rounding(ufunc.__name__), ufunc=ufunc)

    def function(x: TensorLike, /) -> Tensor:
        x = as_tensor(x)
        # Integers are round; NumPy's `rint` would make floats of them.
        return identity(x) if x.dtype.kind in "biu" else apply(op, x)[0]

    return op, published(function, __name__, name, doc)


_unary, _binary = partial(unary_op, __name__), partial(binary_op, __name__)

# Plain Python operators on NumPy scalars give the same dtype and bits for these; for `pow` and `abs` they do not.
ADD, add = _binary("add", "Sum of `x1` and `x2`.", cuda.arithmetic("+", "|"), operator.add)
ATAN2, atan2 = _binary("atan2", "Angle of the point (`x2`, `x1`) in radians, -pi to pi.")
COPYSIGN, copysign = _binary("copysign", "Magnitude of `x1` with the sign of `x2`.")
DIVIDE, divide = _binary(
    "divide", "True quotient of `x1` and `x2`; integers give floats.", cuda.infix("/"), operator.truediv
)
FLOOR_DIVIDE, floor_divide = _binary(
    "floor_divide",
    "Quotient rounded towards minus infinity; an integer divided by zero gives 0.",
    cuda.division("floor_divide", "/"),
    operator.floordiv,
)
HYPOT, hypot = _binary("hypot", "Length of the vector (`x1`, `x2`), without overflow on the way.")
LOGADDEXP, logaddexp = _binary(
    "logaddexp", "``log(exp(x1) + exp(x2))`` without overflow on the way.", cuda.function("asyncflow_logaddexp")
)
MAXIMUM, maximum = _binary("maximum", "The larger of `x1` and `x2`; NaN if either is NaN.", cuda.extreme("maximum"))
MINIMUM, minimum = _binary("minimum", "The smaller of `x1` and `x2`; NaN if either is NaN.", cuda.extreme("minimum"))
MULTIPLY = ufunc_op("multiply", cuda.arithmetic("*", "&"), operator.mul)
NEXTAFTER, nextafter = _binary("nextafter", "The next value after `x1` in the direction of `x2`.", _next_after)
REMAINDER, remainder = _binary(
    "remainder",
    "Remainder with the sign of `x2`; an integer divided by zero gives 0.",
    cuda.division("remainder", "%"),
    operator.mod,
)
SUBTRACT, subtract = _binary(
    "subtract", "Difference of `x1` and `x2`; not defined for booleans.", cuda.arithmetic("-", "^"), operator.sub
)
COMPLEX_MULTIPLY = ufunc_op("complex_multiply", _COMPLEX, ufunc=np.multiply)
# Integers have no negative powers.
POW = ufunc_op("pow", _power, is_total=False)

ABS, abs = _unary("abs", "Magnitude; of a complex tensor, a real one.", _absolute)
ACOS, acos = _unary("acos", "Inverse cosine in radians, 0 to pi.")
ACOSH, acosh = _unary("acosh", "Inverse hyperbolic cosine.")
ASIN, asin = _unary("asin", "Inverse sine in radians, -pi/2 to pi/2.")
ASINH, asinh = _unary("asinh", "Inverse hyperbolic sine.")
ATAN, atan = _unary("atan", "Inverse tangent in radians, -pi/2 to pi/2.")
ATANH, atanh = _unary("atanh", "Inverse hyperbolic tangent.")
COS, cos = _unary("cos", "Cosine of an angle in radians.")
COSH, cosh = _unary("cosh", "Hyperbolic cosine.")
EXP, exp = _unary("exp", "Exponential.")
EXPM1, expm1 = _unary("expm1", "``exp(x) - 1``, exact near zero.")
LOG, log = _unary("log", "Natural logarithm.")
LOG1P, log1p = _unary("log1p", "``log(1 + x)``, exact near zero.")
LOG10, log10 = _unary("log10", "Logarithm to base 10.")
LOG2, log2 = _unary("log2", "Logarithm to base 2.")
NEGATIVE, negative = _unary("negative", "``-x``; not defined for booleans.", _negative, operator.neg)
POSITIVE, positive = _unary("positive", "``+x``; not defined for booleans.", lambda loop, a: a, operator.pos)
RECIPROCAL, reciprocal = _unary(
    "reciprocal", "``1 / x`` in the dtype of `x`: integers give 0 but for 1 and -1.", _reciprocal
)
SIGN, sign = _unary("sign", "-1, 0 or 1; of a complex tensor, ``x / abs(x)``. Not defined for booleans.", _sign)
SIN, sin = _unary("sin", "Sine of an angle in radians.")
SINH, sinh = _unary("sinh", "Hyperbolic sine.")
SQRT, sqrt = _unary("sqrt", "Square root.")
SQUARE, square = _unary("square", "``x * x``.", _square)
TAN, tan = _unary("tan", "Tangent of an angle in radians.")
TANH, tanh = _unary("tanh", "Hyperbolic tangent.")

CEIL, ceil = _rounding("ceil", "The least integer not below `x`, in the dtype of `x`.", np.ceil)
FLOOR, floor = _rounding("floor", "The greatest integer not above `x`, in the dtype of `x`.", np.floor)
ROUND, round = _rounding("round", "The nearest integer, halves to even, in the dtype of `x`.", np.rint)
TRUNC, trunc = _rounding("trunc", "The nearest integer towards zero, in the dtype of `x`.", np.trunc)
CONJ = ufunc_op("conj", lambda loop, a: a)


def _part_spec(x: Spec) -> Spec:
    require_kind(x, "c", "complex numbers")
    return Spec(real_dtype(x.dtype), x.shape)


def _part(name: str, kernel: Callable[[Namespace], Kernel]) -> Op:
    return define(name, _part_spec, kernel, is_total=True, flops=free, rows="elementwise", cuda=_COMPLEX, traits=VIEW)


REAL = _part("real", lambda xp: xp.real)
IMAG = _part("imag", lambda xp: xp.imag)


def _clip_spec(x: Spec, *bounds: Spec, low: bool, high: bool, dtype: DType) -> Spec:
    require_kind(x, "biuf", "real numbers")
    return Spec(dtype, broadcast(operand.shape for operand in (x, *bounds)))


def _clip_kernel(xp: Namespace, *, low: bool, high: bool, dtype: DType) -> Kernel:
    # Not `xp.clip`: it knows no bfloat16, and maximum and minimum cost less on small values.
    if not high:
        return lambda x, least: xp.maximum(x, least).astype(dtype, copy=False)
    if not low:
        return lambda x, most: xp.minimum(x, most).astype(dtype, copy=False)
    return lambda x, least, most: xp.minimum(xp.maximum(x, least), most).astype(dtype, copy=False)


def _clip_source(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str | None:
    text: str | None = operands[0]
    dtype = inputs[0]
    steps = [(np.maximum, "maximum")] * attrs["low"] + [(np.minimum, "minimum")] * attrs["high"]
    for (ufunc, name), bound, limit in zip(steps, inputs[1:], operands[1:], strict=True):
        dtypes = cuda.ufunc_loop(ufunc, (dtype, bound))
        if dtypes is None or text is None:
            return None
        text = cuda.write_ufunc(ufunc, cuda.extreme(name), (dtype, bound), (text, limit))
        dtype = dtypes[-1]
    return None if text is None else cuda.convert(text, dtype, output)


CLIP = define(
    "clip",
    _clip_spec,
    _clip_kernel,
    is_total=True,
    rows="elementwise",
    cuda=_clip_source,
    is_composite=True,
    traits=KERNELS,
)


def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """`x` limited to at least `min` and at most `max`; `max` wins where they cross, and NaN stays NaN.

    Bounds broadcast with `x`. The result has the dtype of `x` if the bounds are of its kind, else the promoted one. A
    bound that the dtype of `x` cannot hold limits nothing, or to the value of that dtype next to it.

    Args:
        x: real numbers.
        min: the least value, which broadcasts with `x`; None for no bound.
        max: the largest value, likewise.
    """
    if not is_weak(x):  # a Python number has no dtype yet whose range could limit the bounds
        x = as_tensor(x)
        min, max = _within(min, x.dtype, lowest=True), _within(max, x.dtype, lowest=False)
    bounds = [bound for bound in (min, max) if bound is not None]
    x, *limits = promote_operands(x, *bounds)
    if not bounds:  # only now, as a Python number is a tensor after promotion
        return identity(x)
    if all(kind_of(limit.dtype) == kind_of(x.dtype) for limit in limits):
        dtype = x.dtype
        limits = [_bound(limit, dtype) for limit in limits]
    else:
        dtype = promoted_dtype(operand.dtype for operand in (x, *limits))
    return apply(CLIP, x, *limits, low=min is not None, high=max is not None, dtype=dtype)[0]


def _within(bound: TensorLike | None, dtype: DType, *, lowest: bool) -> TensorLike | None:
    """Return `bound`, or the end of an integer `dtype`'s range for a Python integer beyond it."""
    if dtype.kind not in "iu" or type(bound) is not int:
        return bound
    # Promotion refuses a number that the dtype cannot hold; as a bound it only limits nothing, or all to the end.
    end = int(np.iinfo(dtype).min if lowest else np.iinfo(dtype).max)
    return end if (bound < end if lowest else bound > end) else bound


def _bound(limit: Tensor, dtype: DType) -> Tensor:
    """`limit`, of the kind of `dtype`, as one of that; an integer out of its range does not wrap around."""
    if limit.dtype == dtype:
        return limit
    if dtype.kind in "iu":
        limit = clip(limit, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return astype(limit, dtype)


def conj(x: TensorLike, /) -> Tensor:
    """Complex conjugate; a real tensor is its own."""
    x = as_tensor(x)
    return identity(x) if kind_of(x.dtype) in "biuf" else apply(CONJ, x)[0]


def imag(x: TensorLike, /) -> Tensor:
    """Imaginary part; zeros for a real tensor."""
    x = as_tensor(x)
    return zeros_like(x) if kind_of(x.dtype) in "biuf" else apply(IMAG, x)[0]


def multiply(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Product of `x1` and `x2`."""
    x1, x2 = promote_for(MULTIPLY, x1, x2)
    # NumPy fuses multiplication and addition in complex products of arrays, but not of scalars.
    is_complex = "c" in (x1.dtype.kind, x2.dtype.kind)
    return apply(COMPLEX_MULTIPLY if is_complex else MULTIPLY, x1, x2)[0]


def pow(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """`x1` to the power `x2`. The Python exponent 2 squares, as ``**`` does in NumPy.

    Raises:
        DTypeError: integers to a negative Python exponent.
    """
    if not is_weak(x2):
        return binary(POW, x1, x2)
    base, exponent = promote_operands(x1, x2)
    if kind_of(base.dtype) in "biu" and isinstance(x2, int) and x2 < 0:
        raise DTypeError(
            f"pow: {base!r} holds integers, which have no power {x2}; convert it to a float dtype with af.astype"
        )
    # Also on a card, where `pow` may be off in the last bits, and a product is not.
    if x2 == 2 and kind_of(base.dtype) != "b" and exponent.dtype == base.dtype:
        return square(base)
    return binary(POW, base, exponent)


def real(x: TensorLike, /) -> Tensor:
    """Real part; a real tensor is its own."""
    x = as_tensor(x)
    return identity(x) if kind_of(x.dtype) in "biuf" else apply(REAL, x)[0]


install(
    add=add,
    subtract=subtract,
    multiply=multiply,
    divide=divide,
    floor_divide=floor_divide,
    remainder=remainder,
    pow=pow,
    negative=negative,
    positive=positive,
    abs=abs,
)
