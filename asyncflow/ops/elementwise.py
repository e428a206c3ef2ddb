"""Arithmetic and mathematical functions of the Array API standard, elementwise with broadcasting.

Dtypes follow NumPy's ufuncs (integers passed to `sqrt` and its like give floats); Python scalars are weak.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from asyncflow.errors import DTypeError
from asyncflow.graph.build import TensorLike, apply, as_tensor, identity
from asyncflow.graph.dtypes import DType
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import KERNELS, Op, define
from asyncflow.graph.operators import install
from asyncflow.graph.shapes import broadcast
from asyncflow.graph.spec import Spec
from asyncflow.ops.creation import zeros_like
from asyncflow.ops.cuda_source import (
    HALVES,
    UfuncLoop,
    arithmetic,
    convert,
    division,
    extreme,
    function,
    infix,
    rounding,
    ufunc_loop,
    write_ufunc,
)
from asyncflow.ops.datatypes import astype
from asyncflow.ops.promotion import (
    binary,
    is_weak,
    kind_of,
    promote_for,
    promote_operands,
    promoted_dtype,
    real_dtype,
    require_kind,
    ufunc_op,
    unary,
)
from asyncflow.values import Kernel, Namespace

_COMPLEX = "complex numbers have no expressions"


def _power(loop: UfuncLoop, a: str, b: str) -> str:
    if loop.kind in "iu":
        return f"asyncflow_integer_power<{loop.type}, {loop.unsigned}>({a}, {b})"
    return f"pow{loop.suffix}({a}, {b})"


def _next_after(loop: UfuncLoop, a: str, b: str) -> str | None:
    # The neighbours of a half are not those of the float that holds it.
    return None if loop.dtype.name in HALVES else f"nextafter{loop.suffix}({a}, {b})"


def _absolute(loop: UfuncLoop, a: str) -> str:
    if loop.kind in ("b", "u"):
        return a
    return f"({a} < 0 ? {_negative(loop, a)} : {a})" if loop.kind == "i" else f"fabs{loop.suffix}({a})"


def _negative(loop: UfuncLoop, a: str) -> str:
    return f"-{a}" if loop.kind == "f" else loop.wrap(f"0u - {loop.bits(a)}")


def _reciprocal(loop: UfuncLoop, a: str) -> str:
    return f"{loop.number(1)} / {a}" if loop.kind == "f" else loop.wrap(f"{a} == 0 ? 0 : 1 / {a}")


def _sign(loop: UfuncLoop, a: str) -> str:
    sign = loop.wrap(f"({a} > 0) - ({a} < 0)")
    return f"({a} != {a} ? {a} : {sign})" if loop.kind == "f" else sign


def _square(loop: UfuncLoop, a: str) -> str:
    return f"{a} * {a}" if loop.kind == "f" else loop.wrap(f"{loop.bits(a)} * {loop.bits(a)}")


# Plain Python operators on NumPy scalars give the same dtype and bits for these; for `pow` and `abs` they do not.
ADD = ufunc_op("add", "add", arithmetic("+", "|"), operator.add)
ATAN2 = ufunc_op("atan2", "arctan2")
COPYSIGN = ufunc_op("copysign", "copysign")
DIVIDE = ufunc_op("divide", "true_divide", infix("/"), operator.truediv)
FLOOR_DIVIDE = ufunc_op("floor_divide", "floor_divide", division("floor_divide", "/"), operator.floordiv)
HYPOT = ufunc_op("hypot", "hypot")
LOGADDEXP = ufunc_op("logaddexp", "logaddexp", function("asyncflow_logaddexp"))
MAXIMUM = ufunc_op("maximum", "maximum", extreme("maximum"))
MINIMUM = ufunc_op("minimum", "minimum", extreme("minimum"))
MULTIPLY = ufunc_op("multiply", "multiply", arithmetic("*", "&"), operator.mul)
NEXTAFTER = ufunc_op("nextafter", "nextafter", _next_after)
REMAINDER = ufunc_op("remainder", "remainder", division("remainder", "%"), operator.mod)
SUBTRACT = ufunc_op("subtract", "subtract", arithmetic("-", "^"), operator.sub)
COMPLEX_MULTIPLY = ufunc_op("complex_multiply", "multiply", _COMPLEX)
# Integers have no negative powers.
POW = ufunc_op("pow", "power", _power, is_total=False)

ABS = ufunc_op("abs", "absolute", _absolute)
ACOS = ufunc_op("acos", "arccos")
ACOSH = ufunc_op("acosh", "arccosh")
ASIN = ufunc_op("asin", "arcsin")
ASINH = ufunc_op("asinh", "arcsinh")
ATAN = ufunc_op("atan", "arctan")
ATANH = ufunc_op("atanh", "arctanh")
COS = ufunc_op("cos", "cos")
COSH = ufunc_op("cosh", "cosh")
EXP = ufunc_op("exp", "exp")
EXPM1 = ufunc_op("expm1", "expm1")
LOG = ufunc_op("log", "log")
LOG1P = ufunc_op("log1p", "log1p")
LOG10 = ufunc_op("log10", "log10")
LOG2 = ufunc_op("log2", "log2")
NEGATIVE = ufunc_op("negative", "negative", _negative, operator.neg)
POSITIVE = ufunc_op("positive", "positive", lambda loop, a: a, operator.pos)
RECIPROCAL = ufunc_op("reciprocal", "reciprocal", _reciprocal)
SIGN = ufunc_op("sign", "sign", _sign)
SIN = ufunc_op("sin", "sin")
SINH = ufunc_op("sinh", "sinh")
SQRT = ufunc_op("sqrt", "sqrt")
SQUARE = ufunc_op("square", "square", _square)
TAN = ufunc_op("tan", "tan")
TANH = ufunc_op("tanh", "tanh")

CEIL = ufunc_op("ceil", "ceil", rounding("ceil"))
FLOOR = ufunc_op("floor", "floor", rounding("floor"))
ROUND = ufunc_op("round", "rint", rounding("rint"))
TRUNC = ufunc_op("trunc", "trunc", rounding("trunc"))
CONJ = ufunc_op("conj", "conjugate", lambda loop, a: a)


def _part_spec(x: Spec) -> Spec:
    require_kind(x, "c", "complex numbers")
    return Spec(real_dtype(x.dtype), x.shape)


REAL = define("real", _part_spec, lambda xp: xp.real, is_total=True, rows="elementwise", cuda=_COMPLEX, traits=KERNELS)
IMAG = define("imag", _part_spec, lambda xp: xp.imag, is_total=True, rows="elementwise", cuda=_COMPLEX, traits=KERNELS)


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
        dtypes = ufunc_loop(ufunc, (dtype, bound))
        if dtypes is None or text is None:
            return None
        text = write_ufunc(ufunc, extreme(name), (dtype, bound), (text, limit))
        dtype = dtypes[-1]
    return None if text is None else convert(text, dtype, output)


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


def _rounded(op: Op, x: TensorLike) -> Tensor:
    x = as_tensor(x)
    return identity(x) if x.dtype.kind in "biu" else unary(op, x)


def abs(x: TensorLike, /) -> Tensor:
    """Magnitude; of a complex tensor, a real one."""
    return unary(ABS, x)


def acos(x: TensorLike, /) -> Tensor:
    """Inverse cosine in radians, 0 to pi."""
    return unary(ACOS, x)


def acosh(x: TensorLike, /) -> Tensor:
    """Inverse hyperbolic cosine."""
    return unary(ACOSH, x)


def add(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Sum of `x1` and `x2`."""
    return binary(ADD, x1, x2)


def asin(x: TensorLike, /) -> Tensor:
    """Inverse sine in radians, -pi/2 to pi/2."""
    return unary(ASIN, x)


def asinh(x: TensorLike, /) -> Tensor:
    """Inverse hyperbolic sine."""
    return unary(ASINH, x)


def atan(x: TensorLike, /) -> Tensor:
    """Inverse tangent in radians, -pi/2 to pi/2."""
    return unary(ATAN, x)


def atan2(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Angle of the point (`x2`, `x1`) in radians, -pi to pi."""
    return binary(ATAN2, x1, x2)


def atanh(x: TensorLike, /) -> Tensor:
    """Inverse hyperbolic tangent."""
    return unary(ATANH, x)


def ceil(x: TensorLike, /) -> Tensor:
    """The least integer not below `x`, in the dtype of `x`."""
    return _rounded(CEIL, x)


def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
    """`x` limited to at least `min` and at most `max`; `max` wins where they cross, and NaN stays NaN.

    Bounds broadcast with `x`. The result has the dtype of `x` if the bounds are of its kind, else the promoted one. A
    bound that the dtype of `x` cannot hold limits nothing, or to the value of that dtype next to it.

    Args:
        x: real numbers.
        min: the least value, which broadcasts with `x`; None for no bound.
        max: the largest value, likewise.
    """
    if not is_weak(x):
        x = as_tensor(x)
        min, max = _within(min, x.dtype, lowest=True), _within(max, x.dtype, lowest=False)
    bounds = [bound for bound in (min, max) if bound is not None]
    x, *limits = promote_operands(x, *bounds)
    if not bounds:
        return identity(x)
    if all(kind_of(limit.dtype) == kind_of(x.dtype) for limit in limits):
        dtype = x.dtype
        limits = [_bound(limit, dtype) for limit in limits]
    else:
        dtype = promoted_dtype(operand.dtype for operand in (x, *limits))
    return apply(CLIP, x, *limits, low=min is not None, high=max is not None, dtype=dtype)[0]


def _within(bound: TensorLike | None, dtype: DType, *, lowest: bool) -> TensorLike | None:
    """`bound`, or the end of the range of an integer `dtype` where a Python integer beyond it limits nothing."""
    if dtype.kind not in "iu" or type(bound) is not int:
        return bound
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
    return identity(x) if kind_of(x.dtype) in "biuf" else unary(CONJ, x)


def copysign(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Magnitude of `x1` with the sign of `x2`."""
    return binary(COPYSIGN, x1, x2)


def cos(x: TensorLike, /) -> Tensor:
    """Cosine of an angle in radians."""
    return unary(COS, x)


def cosh(x: TensorLike, /) -> Tensor:
    """Hyperbolic cosine."""
    return unary(COSH, x)


def divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """True quotient of `x1` and `x2`; integers give floats."""
    return binary(DIVIDE, x1, x2)


def exp(x: TensorLike, /) -> Tensor:
    """Exponential."""
    return unary(EXP, x)


def expm1(x: TensorLike, /) -> Tensor:
    """``exp(x) - 1``, exact near zero."""
    return unary(EXPM1, x)


def floor(x: TensorLike, /) -> Tensor:
    """The greatest integer not above `x`, in the dtype of `x`."""
    return _rounded(FLOOR, x)


def floor_divide(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Quotient rounded towards minus infinity; an integer divided by zero gives 0."""
    return binary(FLOOR_DIVIDE, x1, x2)


def hypot(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Length of the vector (`x1`, `x2`), without overflow on the way."""
    return binary(HYPOT, x1, x2)


def imag(x: TensorLike, /) -> Tensor:
    """Imaginary part; zeros for a real tensor."""
    x = as_tensor(x)
    return zeros_like(x) if kind_of(x.dtype) in "biuf" else unary(IMAG, x)


def log(x: TensorLike, /) -> Tensor:
    """Natural logarithm."""
    return unary(LOG, x)


def log10(x: TensorLike, /) -> Tensor:
    """Logarithm to base 10."""
    return unary(LOG10, x)


def log1p(x: TensorLike, /) -> Tensor:
    """``log(1 + x)``, exact near zero."""
    return unary(LOG1P, x)


def log2(x: TensorLike, /) -> Tensor:
    """Logarithm to base 2."""
    return unary(LOG2, x)


def logaddexp(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """``log(exp(x1) + exp(x2))`` without overflow on the way."""
    return binary(LOGADDEXP, x1, x2)


def maximum(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """The larger of `x1` and `x2`; NaN if either is NaN."""
    return binary(MAXIMUM, x1, x2)


def minimum(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """The smaller of `x1` and `x2`; NaN if either is NaN."""
    return binary(MINIMUM, x1, x2)


def multiply(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Product of `x1` and `x2`."""
    x1, x2 = promote_for(MULTIPLY, x1, x2)
    # NumPy fuses multiplication and addition in complex products of arrays, but not of scalars.
    is_complex = "c" in (x1.dtype.kind, x2.dtype.kind)
    return apply(COMPLEX_MULTIPLY if is_complex else MULTIPLY, x1, x2)[0]


def negative(x: TensorLike, /) -> Tensor:
    """``-x``; not defined for booleans."""
    return unary(NEGATIVE, x)


def nextafter(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """The next value after `x1` in the direction of `x2`."""
    return binary(NEXTAFTER, x1, x2)


def positive(x: TensorLike, /) -> Tensor:
    """``+x``; not defined for booleans."""
    return unary(POSITIVE, x)


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
    if x2 == 2 and kind_of(base.dtype) != "b" and exponent.dtype == base.dtype:
        return square(base)
    return binary(POW, base, exponent)


def real(x: TensorLike, /) -> Tensor:
    """Real part; a real tensor is its own."""
    x = as_tensor(x)
    return identity(x) if kind_of(x.dtype) in "biuf" else unary(REAL, x)


def reciprocal(x: TensorLike, /) -> Tensor:
    """``1 / x`` in the dtype of `x`: integers give 0 but for 1 and -1."""
    return unary(RECIPROCAL, x)


def remainder(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Remainder with the sign of `x2`; an integer divided by zero gives 0."""
    return binary(REMAINDER, x1, x2)


def round(x: TensorLike, /) -> Tensor:
    """The nearest integer, halves to even, in the dtype of `x`."""
    return _rounded(ROUND, x)


def sign(x: TensorLike, /) -> Tensor:
    """-1, 0 or 1; of a complex tensor, ``x / abs(x)``. Not defined for booleans."""
    return unary(SIGN, x)


def sin(x: TensorLike, /) -> Tensor:
    """Sine of an angle in radians."""
    return unary(SIN, x)


def sinh(x: TensorLike, /) -> Tensor:
    """Hyperbolic sine."""
    return unary(SINH, x)


def sqrt(x: TensorLike, /) -> Tensor:
    """Square root."""
    return unary(SQRT, x)


def square(x: TensorLike, /) -> Tensor:
    """``x * x``."""
    return unary(SQUARE, x)


def subtract(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Difference of `x1` and `x2`; not defined for booleans."""
    return binary(SUBTRACT, x1, x2)


def tan(x: TensorLike, /) -> Tensor:
    """Tangent of an angle in radians."""
    return unary(TAN, x)


def tanh(x: TensorLike, /) -> Tensor:
    """Hyperbolic tangent."""
    return unary(TANH, x)


def trunc(x: TensorLike, /) -> Tensor:
    """The nearest integer towards zero, in the dtype of `x`."""
    return _rounded(TRUNC, x)


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
