"""`batch_norm`: channels with the mean and variance of a batch while training, and with running statistics afterwards.

Training has two ops: the first finds the statistics, the second normalises with them. The running statistics are
updated between the two, so a run of the result or of a gradient alone updates them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, identity, is_symbolic
from asyncflow.graph.building.scopes import control_dependencies
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, Op, define, derivative, not_differentiable
from asyncflow.graph.values.dtypes import DType, dtype_name, float32
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.nn.images.layouts import Layout, channel_axis
from asyncflow.ops.arithmetic.elementwise import add, divide, multiply, sqrt, square, subtract
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.cost import several_passes
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.reductions.statistical import mean as mean_of
from asyncflow.ops.searching.searching import where
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Array, Kernel, Namespace

BLOCK_BYTES = 1 << 18
"""Bytes of the examples that a CPU looks at together: they stay in a cache from one pass to the next."""


def _blocks(xp: Namespace, x: Array) -> Iterator[slice]:
    """Yield slices of the first axis; a card has one for all."""
    one = max(1, x.nbytes // max(1, len(x)))
    size = max(1, BLOCK_BYTES // one) if xp is np else max(1, len(x))
    return (slice(first, first + size) for first in range(0, len(x), size))


def _by_channel(x: Array, axis: int) -> Array:
    """View `x` as ``[before, channels, behind]``."""
    return x.reshape(math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :]))


def _total(x: Array) -> Array:
    """Sum over all but channels. Sums of rows are float64, as many rows are added up one by one."""
    # NumPy sums neighbours pairwise, but rows in turn.
    rows = x[:, :, 0] if x.shape[2] == 1 else x.sum(axis=2)
    total: Array = rows.sum(axis=0, dtype=np.float64)
    return total


def _widened(x: Array) -> Array:
    return x.astype(_wide_dtype(x.dtype), copy=False)


def _statistics(xp: Namespace, given: Array, *, axis: int) -> tuple[Array, Array, Array]:
    """Return the mean, the variance, and the variance as estimated for all examples there are."""
    x = _by_channel(given, axis)
    count, dtype = x.shape[0] * x.shape[2], _widened(x[:0]).dtype
    if count == 1:
        raise ValueError(f"training needs more than 1 value for each channel; the input is {list(given.shape)}")
    sums, squares = (xp.zeros(x.shape[1], np.float64) for _ in range(2))
    for part in _blocks(xp, x):
        sums += _total(_widened(x[part]))
    mean = (sums / max(1, count)).astype(dtype)
    # Two passes: a mean of squares less the square of the mean would cancel.
    for part in _blocks(xp, x):
        centred = _widened(x[part]) - mean[:, None]
        squares += _total(xp.square(centred, out=centred))
    return mean, (squares / max(1, count)).astype(dtype), (squares / max(1, count - 1)).astype(dtype)


def _normalized(
    xp: Namespace, given: Array, mean: Array, variance: Array, *affine: Array, axis: int, eps: float, scaled: bool
) -> Array:
    x, found = _by_channel(given, axis), xp.empty(given.shape, given.dtype)
    y, scale = _by_channel(found, axis), 1 / xp.sqrt(variance + eps)
    if scaled:
        scale = (scale * affine[0]).astype(scale.dtype)
    for part in _blocks(xp, x):
        # In this order no digits are lost where the mean is much larger than the deviation.
        centred = _widened(x[part]) - mean[:, None]
        centred *= scale[:, None]
        if len(affine) > scaled:
            centred += affine[-1][:, None]
        y[part] = centred
    return found


def _gradient(
    xp: Namespace,
    grad: Array,
    x: Array,
    mean: Array,
    variance: Array,
    *affine: Array,
    axis: int,
    eps: float,
    scaled: bool,
) -> tuple[Array, ...]:
    found = xp.empty(x.shape, x.dtype)
    reached, x, y = (_by_channel(each, axis) for each in (grad, x, found))
    sums, along = (xp.zeros(x.shape[1], np.float64) for _ in range(2))
    # Sums of products with centred values: a sum with the values themselves would cancel.
    for part in _blocks(xp, x):
        centred, g = _widened(x[part]) - mean[:, None], _widened(reached[part])
        sums += _total(g)
        centred *= g
        along += _total(centred)
    count, inverse = max(1, x.shape[0] * x.shape[2]), 1 / xp.sqrt(variance + eps)
    scale = (inverse * affine[0]).astype(inverse.dtype) if scaled else inverse
    common = (sums / count).astype(scale.dtype)
    slope = (along / count * inverse * inverse * scale).astype(scale.dtype)
    # With centred values c: scale * (g - mean(g)) - c * scale / deviation**2 * mean(g * c).
    for part in _blocks(xp, x):
        by_x = _widened(reached[part]) - common[:, None]
        by_x *= scale[:, None]
        centred = _widened(x[part]) - mean[:, None]
        centred *= slope[:, None]
        by_x -= centred
        y[part] = by_x
    of_affine = [along * inverse] * scaled + [sums] * (len(affine) > scaled)
    return (found, *(of.astype(like.dtype) for of, like in zip(of_affine, affine, strict=True)))


def _statistics_spec(x: Spec, *, axis: int) -> tuple[Spec, ...]:
    return (Spec(_wide_dtype(x.dtype), None if x.shape is None else (x.shape[axis],)),) * 3


def _define(name: str, spec: Callable[..., Spec | tuple[Spec, ...]], function: Kernel, passes: int) -> Op:
    return define(
        name,
        spec,
        lambda xp, **attrs: partial(function, xp, **attrs),
        flops=lambda inputs, outputs, **attrs: passes * several_passes(inputs, outputs),
        rows="row by row",
        traits=KERNELS,
    )


STATISTICS = _define("batch_statistics", _statistics_spec, _statistics, 1)
BATCH_NORM = _define("batch_norm", lambda x, *rest, **attrs: x, _normalized, 1)
BATCH_NORM_GRADIENT = _define(
    "batch_norm_gradient", lambda grad, x, mean, variance, *affine, **attrs: (x, *affine), _gradient, 2
)
not_differentiable(STATISTICS, because="the gradient of batch_norm contains the part that goes through them")


@derivative(BATCH_NORM)
def _batch_norm(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    by_x, *by_affine = apply(BATCH_NORM_GRADIENT, grad, *node.inputs, **node.attrs)
    return [by_x, None, None, *by_affine]


@derivative(BATCH_NORM_GRADIENT)
def _batch_norm_gradient(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    # Separate identities: paths between the inputs before this node do not belong to this derivative.
    grad, x, *affine = (identity(each) for place, each in enumerate(node.inputs) if place not in (2, 3))
    y = _of_ops(x, affine, **node.attrs)
    firsts = gradients([y], [x, *affine], [grad])
    reached = [(first, g) for first, g in zip(firsts, grads, strict=True) if first is not None and g is not None]
    by_grad, by_x, *by_affine = gradients([first for first, _ in reached], [grad, x, *affine], [g for _, g in reached])
    return [by_grad, by_x, None, None, *by_affine]


def _of_ops(given: Tensor, affine: Sequence[Tensor], *, axis: int, eps: float, scaled: bool) -> Tensor:
    """The same by ordinary ops, with the statistics as functions of the input."""
    x, rank = _wide(given), len(given.shape or ())
    others = tuple(each for each in range(rank) if each != axis)
    centred = subtract(x, mean_of(x, axis=others, keepdims=True))
    y = divide(centred, sqrt(mean_of(square(centred), axis=others, keepdims=True) + eps))
    if scaled:
        y = multiply(y, _column(astype(affine[0], x.dtype), axis, rank))
    if len(affine) > scaled:
        y = add(y, _column(astype(affine[-1], x.dtype), axis, rank))
    return astype(y, given.dtype)


def _column(x: Tensor, axis: int, rank: int) -> Tensor:
    return reshape(x, (-1, *[1] * (rank - 1 - axis)))


def _wide(x: Tensor) -> Tensor:
    return astype(x, _wide_dtype(x.dtype))


def _wide_dtype(dtype: DType) -> DType:
    return dtype if dtype.itemsize >= float32.itemsize else float32


def batch_norm(
    input: TensorLike,
    running_mean: TensorLike | None,
    running_var: TensorLike | None,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    layout: Layout = "NCHW",
) -> Tensor:
    """``(input - mean) / sqrt(variance + eps) * weight + bias``, for each channel.

    While training, mean and variance are computed over the batch. A run that needs the result, or its gradient, first
    changes each running statistic: ``running = (1 - momentum) * running + momentum * found``, atomically. The variance
    that it keeps is divided by the number of values less 1. Otherwise, mean and variance are the running statistics.

    Args:
        input: floats, ``(batch, channels, ...)``, or ``(batch, ..., channels)`` for channels last.
        running_mean: ``(channels,)``: a `Variable` that training changes. None: training keeps no statistics.
        running_var: likewise.
        weight: ``(channels,)``, of the dtype of `input` or float32; None for none.
        bias: likewise.
        training: True in the graph that trains.
        momentum: share of the new statistics in the running statistics; a number.
        eps: added to the variance.
        layout: ``"NHWC"`` if channels come last, for any number of axes.

    Returns:
        A tensor like `input`. Statistics of values of 16 bits are computed in float32. An empty batch gives an empty
        result, and changes no statistics.

    Raises:
        DTypeError, ShapeError: inputs do not fit; training has one value for each channel.
        GraphError: training has running statistics that are no variables, or there are none without training.
        ValueError: (in the run, as the cause of a KernelError) training has one value for each channel.
    """
    if not isinstance(training, bool):
        raise GraphError(
            f"batch_norm: training is True or False; got {brief(training)}; choose in the run with af.cond, or build "
            f"two graphs"
        )
    # PyTorch's module takes momentum=None, for a mean over all batches: it would have to count them.
    for name, number in (("momentum", momentum), ("eps", eps)):
        if not isinstance(number, int | float):
            raise GraphError(f"batch_norm: {name} is a number; got {brief(number)}")
    if (running_mean is None) != (running_var is None):
        raise GraphError("batch_norm: takes running_mean and running_var together, or neither")
    with graph_for(input, running_mean, running_var, weight, bias):
        x = as_tensor(input)
        if kind_of(x.dtype) != "f":
            raise DTypeError(f"batch_norm: takes floats, not {dtype_name(x.dtype)}; convert with af.astype first")
        axis = channel_axis("batch_norm", x, layout)
        assert x.shape is not None
        channels, wide = x.shape[axis], _wide_dtype(x.dtype)
        affine = [
            _per_channel(name, value, channels, [x.dtype, wide])
            for name, value in (("weight", weight), ("bias", bias))
            if value is not None
        ]
        if training:
            mean, variance = _of_batch(x, axis, running_mean, running_var, float(momentum))
            scaled = weight is not None
            return apply(BATCH_NORM, x, mean, variance, *affine, axis=axis, eps=float(eps), scaled=scaled)[0]
        if running_mean is None or running_var is None:
            raise GraphError("batch_norm: without training it needs running_mean and running_var")
        mean, variance = (
            astype(_per_channel(name, value, channels), wide)
            for name, value in (("running_mean", running_mean), ("running_var", running_var))
        )
        # Computed from statistics only: a loop, or a graph with constant statistics, computes them once.
        scale = divide(np.asarray(1, wide), sqrt(variance + float(eps)))
        if weight is not None:
            scale = multiply(scale, astype(affine[0], wide))
        shift = multiply(mean, scale)
        shift = subtract(np.asarray(0, wide) if bias is None else astype(affine[-1], wide), shift)
        rank = len(x.shape)
        found = add(multiply(_wide(x), _column(scale, axis, rank)), _column(shift, axis, rank))
        return astype(found, x.dtype)


def _per_channel(name: str, value: TensorLike, channels: int | None, dtypes: Sequence[DType] | None = None) -> Tensor:
    """Return `value` as a tensor of a number for each channel, of one of `dtypes`, the first if Python gives none."""
    found = as_tensor(value) if dtypes is None or is_symbolic(value) else as_tensor(value, dtypes[0])
    _check_channels(name, found.spec, found, channels, dtypes)
    return found


def _check_channels(
    name: str, spec: Spec, value: object, channels: int | None, dtypes: Sequence[DType] | None = None
) -> None:
    if kind_of(spec.dtype) != "f" or (dtypes is not None and spec.dtype not in dtypes):
        kinds = "floats" if dtypes is None else " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
        raise DTypeError(f"batch_norm: {name} is {kinds}; got {value!r}")
    if not is_compatible(spec.shape, (channels,)):
        raise ShapeError(f"batch_norm: {name} has shape {format_shape((channels,))}; got {value!r}")


def _of_batch(
    x: Tensor, axis: int, running_mean: TensorLike | None, running_var: TensorLike | None, momentum: float
) -> list[Tensor]:
    """Return the batch's mean and variance, which are there once the running ones have changed."""
    assert x.shape is not None
    extents = [extent_of(x, each) for each in range(len(x.shape)) if each != axis]
    known = [extent for extent in extents if isinstance(extent, int)]
    if len(known) == len(extents) and math.prod(known) == 1:
        raise ShapeError(f"batch_norm: training needs more than 1 value for each channel; got {x!r}")
    # The kernel asks again, for extents that only a run knows.
    mean, variance, estimate = apply(STATISTICS, x, axis=axis)
    if running_mean is None:
        return [mean, variance]
    # A batch without values has no statistics.
    share: TensorLike = momentum if math.prod(known) else 0.0
    if math.prod(known) and len(known) < len(extents):
        count = math.prod([extent for extent in extents if not isinstance(extent, int)], start=1)
        share = where(count > 0, momentum, 0.0)
    done = [
        _changed(name, running, share, found)
        for name, running, found in (("running_mean", running_mean, mean), ("running_var", running_var, estimate))
    ]
    with control_dependencies(done):
        return [identity(mean), identity(variance)]


def _changed(name: str, running: TensorLike, share: TensorLike, found: Tensor) -> Tensor:
    if not isinstance(running, Variable):
        raise GraphError(
            f"batch_norm: training changes {name}, so it is an af.Variable, or None to keep no statistics; "
            f"got {brief(running)}"
        )
    _check_channels(name, running.spec, running, None if found.shape is None else found.shape[0])

    # A product and a sum in the dtype of the statistics: a float16 variable would lose what a small share adds.
    def mixed(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
        part = astype(share, new.dtype)
        return astype((1 - part) * astype(old, new.dtype) + part * new, old.dtype)

    return running.update(mixed, found, as_tensor(share))
