"""Functions of neural networks: activations, normalisations, and looking up rows.

Each is one op, stable where the formula would overflow. Half-precision values are computed in float32 and rounded
once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import KERNELS, NEW, OPAQUE, Op, define, inputs_from
from asyncflow.graph.values.dtypes import DType, DTypeLike, as_dtype, dtype_name, float32
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, is_compatible, normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import Extent, shape_reader, split_extents, template_shape
from asyncflow.ops.axes import Axes, as_axes, normalize_axes, reduced, static_int
from asyncflow.ops.cost import PASS, elements, several_passes
from asyncflow.ops.cuda.source import UfuncLoop, rounded_once
from asyncflow.ops.promotion import kind_of, require_kind
from asyncflow.values import Array, Kernel, Namespace, Value


def _wide(function: Kernel, *, takes_out: bool = False) -> Kernel:
    """A kernel that computes in float32 at least and gives back the dtype of its first input."""

    def run(x: Array, *rest: Array, out: Array | None = None) -> Value:
        if x.dtype.itemsize >= float32.itemsize:
            return function(x, *rest) if out is None else function(x, *rest, out=out)
        # `out` has half precision, so no step in float32 can use it.
        narrowed = function(x.astype(float32), *(item.astype(float32) for item in rest)).astype(x.dtype)
        if out is None:
            return narrowed
        out[...] = narrowed
        return out

    run.takes_out = takes_out  # type: ignore[attr-defined]
    return run


def _float_spec(x: Spec) -> Spec:
    require_kind(x, "f", "floats")
    return x


def activation(
    name: str, function: Callable[[Namespace, Array], Value], flops: float, cuda: Callable[[UfuncLoop, str], str]
) -> Op:
    """Define an op of floats that goes element by element.

    Args:
        name: of the op.
        function: ``function(xp, x)`` computes it, in float32 at least.
        flops: operations an element.
        cuda: ``cuda(loop, x)`` writes it in CUDA C++.
    """

    def cost(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
        return flops * PASS * elements(outputs[0])

    return define(
        name,
        _float_spec,
        lambda xp: _wide(partial(function, xp), takes_out=function is _sigmoid),
        is_total=True,
        flops=cost,
        rows="elementwise",
        cuda=rounded_once(cuda),
        is_composite=True,
        traits=NEW,
    )


# -- activations -----------------------------------------------------------------------------------------------------


def _sigmoid(xp: Namespace, x: Array, out: Array | None = None) -> Array:
    # Both tails keep their precision. Where the exponential overflows, the result is below the smallest normal number.
    if not x.ndim:
        return 1 / (1 + xp.exp(xp.negative(x)))
    grown = xp.negative(x, out=out)
    xp.exp(grown, out=grown)
    grown += 1
    return xp.divide(1, grown, out=grown)


def _sigmoid_source(loop: UfuncLoop, x: str) -> str:
    return f"{loop.number(1)} / ({loop.number(1)} + exp{loop.suffix}(-{x}))"


def _softplus_source(loop: UfuncLoop, x: str) -> str:
    f, positive = loop.suffix, f"asyncflow_maximum<{loop.type}>({x}, {loop.number(0)})"
    return f"{positive} + log1p{f}(exp{f}(-fabs{f}({x})))"


FARTHEST = -3e38
"""Stands for -inf where that would be multiplied by a 0: a float32 can hold it, and the factor is 0 long before."""


def _silu_source(loop: UfuncLoop, x: str) -> str:
    return f"asyncflow_maximum<{loop.type}>({x}, {loop.number(FARTHEST)}) * ({_sigmoid_source(loop, x)})"


def _gelu(xp: Namespace, x: Array) -> Value:
    # At -inf the second factor is 0. FARTHEST makes the product 0, its limit; -inf would make it NaN.
    return 0.5 * xp.maximum(x, FARTHEST) * (1 + xp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _gelu_source(loop: UfuncLoop, x: str) -> str:
    half, one, slope, cubic, far = map(loop.number, (0.5, 1.0, 0.7978845608028654, 0.044715, FARTHEST))
    factor = f"{half} * asyncflow_maximum<{loop.type}>({x}, {far})"
    return f"{factor} * ({one} + tanh{loop.suffix}({slope} * ({x} + {cubic} * {x} * {x} * {x})))"


def _relu_spec(x: Spec) -> Spec:
    require_kind(x, "iuf", "real numbers")
    return x


def _relu_kernel(xp: Namespace) -> Kernel:
    def relu(x: Array, out: Array | None = None) -> Value:
        return xp.maximum(x, x.dtype.type(0), out=out)

    relu.takes_out = True  # type: ignore[attr-defined]
    return relu


def _relu_source(attrs: Attrs, inputs: Sequence[DType], output: DType, operands: Sequence[str]) -> str:
    loop = UfuncLoop(output)
    return f"asyncflow_maximum<{loop.type}>({operands[0]}, {loop.number(0)})"


RELU = define("relu", _relu_spec, _relu_kernel, is_total=True, rows="elementwise", cuda=_relu_source, traits=NEW)
SIGMOID = activation("sigmoid", _sigmoid, 4, _sigmoid_source)
SILU = activation("silu", lambda xp, x: xp.maximum(x, FARTHEST) * _sigmoid(xp, x), 6, _silu_source)
SOFTPLUS = activation("softplus", lambda xp, x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))), 8, _softplus_source)
GELU = activation("gelu", _gelu, 13, _gelu_source)


def relu(x: TensorLike, /) -> Tensor:
    """``maximum(x, 0)`` of real numbers; NaN stays NaN."""
    return apply(RELU, x)[0]


def sigmoid(x: TensorLike, /) -> Tensor:
    """Logistic function ``1 / (1 + exp(-x))`` of floats."""
    return apply(SIGMOID, x)[0]


def silu(x: TensorLike, /) -> Tensor:
    """``x * sigmoid(x)`` of floats, also called swish."""
    return apply(SILU, x)[0]


def softplus(x: TensorLike, /) -> Tensor:
    """``log(1 + exp(x))`` of floats."""
    return apply(SOFTPLUS, x)[0]


def gelu(x: TensorLike, /) -> Tensor:
    """Gaussian error linear unit of floats, in its usual approximation by tanh (error below 0.0005)."""
    return apply(GELU, x)[0]


# -- over an axis ----------------------------------------------------------------------------------------------------


def _softmax_spec(x: Spec, *, axis: int) -> Spec:
    _float_spec(x)
    if x.rank is not None:
        normalize_axis(axis, x.rank)
    return x


def _softmax(xp: Namespace, axis: int, x: Array) -> Value:
    if not x.size:
        return x
    # With the maximum shifted to 0 nothing overflows, and the sum is at least 1, so no division is by 0.
    weights = xp.exp(x - x.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def _log_softmax(xp: Namespace, axis: int, x: Array) -> Value:
    if not x.size:
        return x
    # The logarithm of `_softmax` would be -inf where a weight rounds to 0; here the shift stays outside the logarithm.
    shifted = x - x.max(axis=axis, keepdims=True)
    return shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))


def _along_axis(name: str, function: Callable[[Namespace, int, Array], Value]) -> Op:
    def kernel(xp: Namespace, *, axis: int) -> Kernel:
        return _wide(partial(function, xp, axis))

    return define(name, _softmax_spec, kernel, flops=several_passes, rows="axis", traits=NEW)


SOFTMAX = _along_axis("softmax", _softmax)
LOG_SOFTMAX = _along_axis("log_softmax", _log_softmax)


def softmax(x: TensorLike, /, *, axis: int = -1) -> Tensor:
    """``exp(x)`` scaled to sum to 1 along `axis`. Floats; the shape stays."""
    return apply(SOFTMAX, x, axis=static_int(axis, "axis"))[0]


def log_softmax(x: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Logarithm of `softmax`, exact where that is close to 0."""
    return apply(LOG_SOFTMAX, x, axis=static_int(axis, "axis"))[0]


def _logsumexp_spec(x: Spec, *, axis: Axes, keepdims: bool) -> Spec:
    _float_spec(x)
    return Spec(x.dtype, reduced(x.shape, axis, keepdims))


def _logsumexp(xp: Namespace, axis: Axes, keepdims: bool, x: Array) -> Array:
    x = xp.asarray(x)
    axes = normalize_axes(axis, x.ndim)
    if any(x.shape[i] == 0 for i in axes):  # an empty axis has no `max`
        shape = reduced(x.shape, axis, keepdims)
        return xp.full(shape, -np.inf, dtype=x.dtype)
    peak = x.max(axis=axes, keepdims=True)
    # An infinite peak would give inf - inf.
    peak = xp.where(xp.isfinite(peak), peak, x.dtype.type(0))
    # log(0) is intended: a sum of exp(-inf) is 0.
    with np.errstate(divide="ignore"):
        total = xp.log(xp.exp(x - peak).sum(axis=axes, keepdims=True)) + peak
    return total if keepdims else total.reshape(reduced(x.shape, axis, False))


def _logsumexp_kernel(xp: Namespace, *, axis: Axes, keepdims: bool) -> Kernel:
    return _wide(partial(_logsumexp, xp, axis, keepdims))


LOGSUMEXP = define("logsumexp", _logsumexp_spec, _logsumexp_kernel, flops=several_passes, rows="axes", traits=KERNELS)


def logsumexp(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """``log(sum(exp(x)))`` over `axis` (None: all), without overflow. Floats; -inf where there is nothing to sum.

    Args:
        x: floats.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return apply(LOGSUMEXP, x, axis=as_axes(axis), keepdims=keepdims)[0]


def _layer_norm_spec(x: Spec, *affine: Spec, axis: Axes, epsilon: float, scaled: bool, shifted: bool) -> Spec:
    _float_spec(x)
    if x.rank is not None:
        normalize_axes(axis, x.rank)
    for item in affine:
        if item.dtype != x.dtype:
            raise DTypeError(
                f"scale and bias have the dtype of the values, {dtype_name(x.dtype)}, not {dtype_name(item.dtype)}"
            )
        whole = broadcast([x.shape, item.shape])
        if not is_compatible(whole, x.shape):
            raise ShapeError(f"scale and bias broadcast to shape {format_shape(x.shape)}; got {item}")
    return x


def _layer_norm(
    xp: Namespace, axis: Axes, epsilon: float, scaled: bool, shifted: bool, x: Array, *affine: Array
) -> Array:
    if not x.size:
        return x
    result = _normal(xp, axis, epsilon, x)
    if scaled:
        result *= affine[0]
    if shifted:
        result += affine[-1]
    return result


def _normal(xp: Namespace, axis: Axes, epsilon: float, x: Array) -> Array:
    """`x` with mean 0 and variance 1, though the squares of its values may be larger than any number."""
    if xp is np:  # checking is free on the host
        centred: Array = x - _mean(axis, x)
        variance = _mean(axis, centred * centred)
        if np.isfinite(variance).all():
            centred /= np.sqrt(variance + epsilon)
            return centred
    limit, factor, least = scale_of_squares(x.dtype)
    is_large = xp.abs(x).sum(axis=axis, keepdims=True) > limit
    x = x * xp.where(is_large, x.dtype.type(factor), x.dtype.type(1))
    centred = x - x.mean(axis=axis, keepdims=True)
    variance = (centred * centred).mean(axis=axis, keepdims=True)
    return centred / xp.sqrt(variance + xp.where(is_large, x.dtype.type(least), x.dtype.type(epsilon)))


def _mean(axis: Axes, x: Array) -> Array:
    """The bits of ``x.mean(axis, keepdims=True)``, which takes twice as long for a few rows."""
    total: Array = np.add.reduce(x, axis=axis, keepdims=True)
    total /= x.size // total.size
    return total


def scale_of_squares(dtype: DType) -> tuple[float, float, float]:
    """The sum of magnitudes from which values are scaled before they are squared, the factor, and epsilon then."""
    info = np.finfo(dtype)
    half = info.maxexp // 2
    return 2.0 ** (half - 12), 2.0 ** -(half + 16), float(info.tiny)


def _layer_norm_kernel(xp: Namespace, *, axis: Axes, epsilon: float, scaled: bool, shifted: bool) -> Kernel:
    return _wide(partial(_layer_norm, xp, axis, epsilon, scaled, shifted))


LAYER_NORM = define("layer_norm", _layer_norm_spec, _layer_norm_kernel, traits=KERNELS)


def layer_norm(
    x: TensorLike,
    /,
    scale: TensorLike | None = None,
    bias: TensorLike | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    epsilon: float = 1e-5,
) -> Tensor:
    """`x` with mean 0 and variance 1 over `axis`, times `scale`, plus `bias`.

    Args:
        x: floats.
        scale: of the dtype of `x`, broadcasts to its shape; None for none.
        bias: likewise.
        axis: what to normalise over.
        epsilon: added to the variance.
    """
    affine = [item for item in (scale, bias) if item is not None]
    return apply(
        LAYER_NORM,
        x,
        *affine,
        axis=as_axes(axis),
        epsilon=float(epsilon),
        scaled=scale is not None,
        shifted=bias is not None,
    )[0]


# -- rows ------------------------------------------------------------------------------------------------------------


def _one_hot_spec(indices: Spec, *size: Spec, depth: Shape, dtype: DType, axis: int) -> Spec:
    require_kind(indices, "iu", "integers")
    if indices.shape is None:
        return Spec(dtype, None)
    at = normalize_axis(axis, len(indices.shape) + 1)
    (extent,) = template_shape(depth, size) or (None,)
    return Spec(dtype, (*indices.shape[:at], extent, *indices.shape[at:]))


def _one_hot_kernel(xp: Namespace, *, depth: Shape, dtype: DType, axis: int) -> Kernel:
    read = shape_reader(depth)

    def run(indices: Array, *size: Array) -> Value:
        at = normalize_axis(axis, indices.ndim + 1)
        classes = xp.arange(*read(size)).reshape((-1,) + (1,) * (indices.ndim - at))
        return (xp.expand_dims(indices, at) == classes).astype(dtype)

    return run


ONE_HOT = define("one_hot", _one_hot_spec, _one_hot_kernel, host_inputs=inputs_from(1), traits=KERNELS)


def one_hot(indices: TensorLike, /, depth: Extent, *, axis: int = -1, dtype: DTypeLike = float32) -> Tensor:
    """1 at each index along a new axis of extent `depth`, 0 elsewhere; all 0 for an index outside.

    Args:
        indices: integers.
        depth: an int or an integer tensor of rank 0.
        axis: where the new axis goes in the result.
        dtype: of the result.
    """
    found = as_dtype(dtype)
    if kind_of(found) not in "biufc":
        raise DTypeError(f"one_hot: takes a dtype of numbers, not {dtype_name(found)}")
    template, size = split_extents((depth,))
    return apply(ONE_HOT, indices, *size, depth=template, dtype=found, axis=static_int(axis, "axis"))[0]


def _embedding_spec(table: Spec, ids: Spec) -> Spec:
    require_kind(table, "biufc", "a table of numbers")
    require_kind(ids, "iu", "integer ids")
    if table.rank == 0:
        raise ShapeError(f"takes a table of rank 1 or more, not {table}")
    if table.shape is None or ids.shape is None:
        return Spec(table.dtype, None)
    return Spec(table.dtype, ids.shape + table.shape[1:])


def _embedding_kernel(xp: Namespace) -> Kernel:
    def look_up(table: Array, ids: Array) -> Array:
        # On a GPU a negative id counts from the end: checking would make the host wait for the card.
        if xp is np and ids.size and ids.min() < 0:
            raise IndexError(f"id {ids.min()} is below 0: ids are rows, counted from 0")
        return table[ids]

    return look_up


EMBEDDING = define("embedding", _embedding_spec, _embedding_kernel, traits=OPAQUE)


def embedding(table: TensorLike, ids: TensorLike, /) -> Tensor:
    """Row ``ids[...]`` of `table` at each position: shape ``ids.shape + table.shape[1:]``, the dtype of `table`.

    On the CPU an id below 0 or past the last row fails the run; GPUs wrap it around.
    """
    return apply(EMBEDDING, table, as_tensor(ids))[0]
