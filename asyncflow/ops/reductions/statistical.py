"""Statistical functions: reductions to sums, extremes and moments, and running sums and products."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import KERNELS, NEW, Op, define
from asyncflow.graph.values.dtypes import DType, DTypeLike, as_dtype, dtype_name, float64, int64, summed_in, uint64
from asyncflow.graph.values.shapes import normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import Axes, as_axes, reduced, replaced, require_elements, static_int
from asyncflow.ops.cost import per_input_element, several_passes
from asyncflow.ops.promotion import kind_of, real_dtype, require_kind
from asyncflow.values import Array, Kernel, Namespace, Value

# -- sums and products -----------------------------------------------------------------------------------------------


def accumulator_dtype(dtype: DType) -> DType:
    """The dtype sums and products of `dtype` have unless told otherwise: 64 bits for integers and booleans."""
    kind = kind_of(dtype)
    return {"b": int64, "i": int64, "u": uint64}.get(kind, dtype)


def _accumulated(x: Spec, dtype: DType) -> DType:
    require_kind(x, "biufc", "numbers and booleans")
    if kind_of(dtype) not in "biufc":
        raise DTypeError(f"cannot accumulate in dtype {dtype_name(dtype)}; use a number dtype")
    if x.dtype.kind == "c" and dtype.kind != "c":
        raise DTypeError(f"dtype {dtype_name(dtype)} would drop the imaginary part of {dtype_name(x.dtype)}")
    return dtype


def _sum_spec(x: Spec, *, axis: Axes, dtype: DType, keepdims: bool) -> Spec:
    return Spec(_accumulated(x, dtype), reduced(x.shape, axis, keepdims))


def _in_dtype(method: str, dtype: DType, **options: object) -> Kernel:
    """Return a kernel that calls ``x.method(dtype=dtype)`` and accumulates as `summed_in` says."""
    accumulator = summed_in(dtype)
    wide = operator.methodcaller(method, dtype=accumulator, **options)
    return wide if accumulator == dtype else lambda x: wide(x).astype(dtype)


def _summing(method: str) -> Callable[..., Kernel]:
    def factory(xp: Namespace, *, axis: Axes, dtype: DType, keepdims: bool) -> Kernel:
        return _in_dtype(method, dtype, axis=axis, keepdims=keepdims)

    return factory


SUM = define("sum", _sum_spec, _summing("sum"), is_total=True, flops=per_input_element, rows="axes", traits=NEW)
PROD = define("prod", _sum_spec, _summing("prod"), is_total=True, flops=per_input_element, rows="axes", traits=KERNELS)


def sum(x: TensorLike, /, *, axis: Axes = None, dtype: DTypeLike | None = None, keepdims: bool = False) -> Tensor:
    """Sum of the elements, over `axis` or all axes; 0 where there are none.

    Args:
        x: numbers or booleans.
        axis: one axis, several, or None for all.
        dtype: of the result; None keeps floats as they are, and gives int64 or uint64 for integers and booleans.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return _accumulate(SUM, x, dtype, axis=as_axes(axis), keepdims=bool(keepdims))


def prod(x: TensorLike, /, *, axis: Axes = None, dtype: DTypeLike | None = None, keepdims: bool = False) -> Tensor:
    """Product of the elements, over `axis` or all axes; 1 where there are none. Arguments as for `sum`."""
    return _accumulate(PROD, x, dtype, axis=as_axes(axis), keepdims=bool(keepdims))


def _accumulate(op: Op, x: TensorLike, dtype: DTypeLike | None, **attrs: Any) -> Tensor:
    tensor = as_tensor(x)
    target = accumulator_dtype(tensor.dtype) if dtype is None else as_dtype(dtype)
    return apply(op, tensor, dtype=target, **attrs)[0]


# -- running sums and products ---------------------------------------------------------------------------------------


def _cumulative_spec(x: Spec, *, axis: int | None, dtype: DType, include_initial: bool) -> Spec:
    result = _accumulated(x, dtype)
    if axis is None and x.rank != 1:
        raise ShapeError("axis may only be left out for a value of rank 1; give axis=")
    if x.shape is None:
        return Spec(result)
    at = normalize_axis(0 if axis is None else axis, len(x.shape))
    extent = x.shape[at]
    return Spec(result, replaced(x.shape, at, None if extent is None else extent + include_initial))


def _cumulating(method: str, initial: int) -> Callable[..., Kernel]:
    def factory(xp: Namespace, *, axis: int | None, dtype: DType, include_initial: bool) -> Kernel:
        at = 0 if axis is None else axis
        running = _in_dtype(method, dtype, axis=at)
        return partial(_with_initial, xp, running, at, initial) if include_initial else running

    return factory


def _with_initial(xp: Namespace, running: Kernel, axis: int, initial: int, x: Array) -> Array:
    result = running(x)
    shape = list(result.shape)
    shape[axis] = 1
    return xp.concatenate([xp.full(shape, initial, dtype=result.dtype), result], axis=axis)


CUMULATIVE_SUM = define("cumulative_sum", _cumulative_spec, _cumulating("cumsum", 0), rows="axis", traits=KERNELS)
CUMULATIVE_PROD = define("cumulative_prod", _cumulative_spec, _cumulating("cumprod", 1), rows="axis", traits=KERNELS)


def cumulative_sum(
    x: TensorLike, /, *, axis: int | None = None, dtype: DTypeLike | None = None, include_initial: bool = False
) -> Tensor:
    """Running sum along `axis`.

    Args:
        x: numbers or booleans, of rank 1 or higher.
        axis: may be left out for rank 1.
        dtype: as for `sum`.
        include_initial: begin with a 0, which makes the result one longer.
    """
    at = None if axis is None else static_int(axis, "axis")
    return _accumulate(CUMULATIVE_SUM, x, dtype, axis=at, include_initial=bool(include_initial))


def cumulative_prod(
    x: TensorLike, /, *, axis: int | None = None, dtype: DTypeLike | None = None, include_initial: bool = False
) -> Tensor:
    """Running product along `axis`; with `include_initial` it begins with a 1. Arguments as for `cumulative_sum`."""
    at = None if axis is None else static_int(axis, "axis")
    return _accumulate(CUMULATIVE_PROD, x, dtype, axis=at, include_initial=bool(include_initial))


# -- extremes --------------------------------------------------------------------------------------------------------


def _extreme_spec(x: Spec, *, axis: Axes, keepdims: bool) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    require_elements(x.shape, axis)
    return Spec(x.dtype, reduced(x.shape, axis, keepdims))


def method_reduction(name: str, infer: Callable[..., Spec]) -> Op:
    """Registers a reduction that is a method of arrays, which is quicker to call than the function of its name."""

    def kernel(xp: Namespace, **attrs: object) -> Kernel:
        return operator.methodcaller(name, **attrs)

    return define(name, infer, kernel, is_total=True, flops=per_input_element, rows="axes", traits=KERNELS)


MAX = method_reduction("max", _extreme_spec)
MIN = method_reduction("min", _extreme_spec)


def max(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Largest element, over `axis` or all axes; NaN if there is one. Complex numbers compare by real part first.

    Args:
        x: numbers or booleans.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.

    Raises:
        ShapeError: there are no elements to choose from.
    """
    return apply(MAX, x, axis=as_axes(axis), keepdims=bool(keepdims))[0]


def min(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Smallest element, over `axis` or all axes; NaN if there is one. Complex numbers compare by real part first.

    Args:
        x: numbers or booleans.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.

    Raises:
        ShapeError: there are no elements to choose from.
    """
    return apply(MIN, x, axis=as_axes(axis), keepdims=bool(keepdims))[0]


# -- moments ---------------------------------------------------------------------------------------------------------


def _mean_dtype(dtype: DType) -> DType:
    return float64 if kind_of(dtype) in "biu" else dtype


def _mean_spec(x: Spec, *, axis: Axes, keepdims: bool, dtype: DType) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    return Spec(dtype, reduced(x.shape, axis, keepdims))


def _mean_kernel(xp: Namespace, *, axis: Axes, keepdims: bool, dtype: DType) -> Kernel:
    return partial(_moment_or_nan, xp, _moment_of("mean", dtype, axis=axis, keepdims=keepdims), axis, keepdims, dtype)


def _moment_of(method: str, dtype: DType, **options: object) -> Kernel:
    is_narrow = summed_in(dtype) != dtype
    return _in_dtype(method, dtype, **options) if is_narrow else operator.methodcaller(method, **options)


def _moment_or_nan(xp: Namespace, kernel: Kernel, axis: Axes, keepdims: bool, dtype: DType, x: Array) -> Value:
    """``kernel(x)``; NaNs where NumPy would warn of an empty slice: the number of elements is the program's affair."""
    if x.size:
        return kernel(x)
    nan = complex("nan+nanj") if dtype.kind == "c" else float("nan")
    return xp.full(reduced(x.shape, axis, keepdims), nan, dtype=dtype)[()]


def _spread_spec(x: Spec, *, axis: Axes, correction: float, keepdims: bool, dtype: DType) -> Spec:
    return Spec(real_dtype(dtype), _mean_spec(x, axis=axis, keepdims=keepdims, dtype=dtype).shape)


def _spread(name: str) -> Callable[..., Kernel]:
    def factory(xp: Namespace, *, axis: Axes, correction: float, keepdims: bool, dtype: DType) -> Kernel:
        kernel = _moment_of(name, dtype, axis=axis, ddof=correction, keepdims=keepdims)
        return partial(_moment_or_nan, xp, kernel, axis, keepdims, real_dtype(dtype))

    return factory


MEAN = define("mean", _mean_spec, _mean_kernel, is_total=True, flops=per_input_element, rows="axes", traits=NEW)
STD = define("std", _spread_spec, _spread("std"), is_total=True, flops=several_passes, rows="axes", traits=KERNELS)
VAR = define("var", _spread_spec, _spread("var"), is_total=True, flops=several_passes, rows="axes", traits=KERNELS)


def mean(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Arithmetic mean, over `axis` or all axes; float64 for integers and booleans, NaN where there are no elements.

    Args:
        x: numbers or booleans.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    tensor = as_tensor(x)
    return apply(MEAN, tensor, axis=as_axes(axis), keepdims=bool(keepdims), dtype=_mean_dtype(tensor.dtype))[0]


def std(x: TensorLike, /, *, axis: Axes = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Standard deviation, over `axis` or all axes: the square root of `var`.

    Args:
        x: numbers or booleans.
        axis: one axis, several, or None for all.
        correction: as for `var`.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return _moment(STD, x, axis, correction, keepdims)


def var(x: TensorLike, /, *, axis: Axes = None, correction: float = 0.0, keepdims: bool = False) -> Tensor:
    """Variance, over `axis` or all axes; real also for complex numbers.

    Args:
        x: numbers or booleans; integers and booleans give float64.
        axis: one axis, several, or None for all.
        correction: subtracted from the number of elements in the divisor; 1 for an unbiased estimate.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return _moment(VAR, x, axis, correction, keepdims)


def _moment(op: Op, x: TensorLike, axis: Axes, correction: float, keepdims: bool) -> Tensor:
    try:
        correction = float(correction)
    except (TypeError, ValueError):
        message = f"{op.name}: correction is a number known while the graph is built, got {correction!r}"
        raise GraphError(message) from None
    tensor = as_tensor(x)
    return apply(
        op, tensor, axis=as_axes(axis), correction=correction, keepdims=bool(keepdims), dtype=_mean_dtype(tensor.dtype)
    )[0]
