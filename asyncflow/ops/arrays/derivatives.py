"""Derivatives of making arrays, casting them, and of manipulation.

An array that was filled passes the sum to its value. An input that was reshaped, joined or repeated gets gradients in
its own shape and order. Shapes, ranges and identity matrices have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER, PLACEHOLDER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, define, derivative, gradient_of_first, inputs_from, not_differentiable
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape, normalize_axis
from asyncflow.ops.arithmetic.elementwise import negative
from asyncflow.ops.arrays import manipulation as m
from asyncflow.ops.arrays.creation import (
    ARANGE,
    EYE,
    FULL,
    FULL_LIKE,
    LINSPACE,
    TRIL,
    TRIU,
    arange,
    linspace,
    tril,
    triu,
    zeros_like,
)
from asyncflow.ops.arrays.datatypes import ASTYPE, BROADCAST_ARRAYS, BROADCAST_TO, astype
from asyncflow.ops.arrays.extents import apply_to_shape, in_given_shape, shape_reader
from asyncflow.ops.arrays.padding import PAD, inner_key
from asyncflow.ops.arrays.shape import RANK, SHAPE, SIZE
from asyncflow.ops.arrays.splitting import SPLIT
from asyncflow.ops.cost import per_input_element
from asyncflow.ops.derivatives.dtypes import in_dtype_of
from asyncflow.ops.derivatives.shapes import (
    Extents,
    carries_gradient,
    ensure_shape,
    extent_of,
    shape_of,
    sum_to_like,
    summed,
    zeros_of,
)
from asyncflow.ops.indexing.indexing import at_position, sliced
from asyncflow.ops.indexing.keys import along
from asyncflow.ops.indexing.scatter import scatter_to
from asyncflow.ops.promotion import real_dtype
from asyncflow.ops.reductions.statistical import prod
from asyncflow.ops.reductions.statistical import sum as sum_
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.values import Array, Kernel, Namespace

not_differentiable(RANK, SHAPE, SIZE, because="they are integers")

# -- joining ---------------------------------------------------------------------------------------------------------


@derivative(m.CONCAT)
def _concat(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    axis = node.attrs["axis"]
    starts: list[int | Tensor] = [0]
    for x in node.inputs[:-1]:
        starts.append(starts[-1] + (_size(x) if axis is None else extent_of(x, axis)))
    grads: list[Tensor | None] = []
    for x, start, stop in zip(node.inputs, starts, [*starts[1:], None], strict=True):
        part = in_dtype_of(sliced(grad, axis or 0, start, stop), x) if carries_gradient(x.spec) else None
        grads.append(m.reshape(part, shape_of(x)) if axis is None and part is not None else part)
    return grads


def _size(x: Tensor) -> int | Tensor:
    extents = shape_of(x)
    return math.prod(extents) if isinstance(extents, tuple) else prod(extents)


@derivative(m.STACK)
def _stack(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    axis, inputs = node.attrs["axis"], node.inputs
    if grad.shape is not None and grad.shape[axis] == len(inputs):
        parts = m.unstack(grad, axis=axis)
    else:
        parts = tuple(at_position(grad, axis, place) for place in range(len(inputs)))
    return [in_dtype_of(part, x) for part, x in zip(parts, inputs, strict=True)]


@derivative(m.UNSTACK)
def _unstack(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    # All outputs have one shape: take it from a gradient, so that no forward value is needed.
    missing = zeros_like(next(grad for grad in grads if grad is not None))
    return [m.stack([missing if grad is None else grad for grad in grads], axis=node.attrs["axis"])]


@derivative(SPLIT)
def _split(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    pairs = zip(grads, node.outputs, strict=True)
    parts = [zeros_of(output) if grad is None else grad for grad, output in pairs]
    return [ensure_shape(m.concat(parts, axis=node.attrs["axis"]), node.inputs[0].shape)]


@derivative(PAD)
def _pad(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, value = node.inputs
    inner = ensure_shape(grad[inner_key(node.attrs["widths"])], x.shape)
    return [inner, None if value.node.op is CONSTANT else sum_(grad) - sum_(inner)]


# -- axes and order --------------------------------------------------------------------------------------------------


gradient_of_first(m.EXPAND_DIMS, lambda node, grad: m.squeeze(grad, node.attrs["axis"]))


gradient_of_first(m.SQUEEZE, lambda node, grad: m.expand_dims(grad, axis=node.attrs["axis"]))


@derivative(m.PERMUTE_DIMS)
def _permute_dims(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    axes = [axis % len(node.attrs["axes"]) for axis in node.attrs["axes"]]
    return [m.permute_dims(grad, [axes.index(axis) for axis in range(len(axes))])]


gradient_of_first(m.FLIP, lambda node, grad: m.flip(grad, axis=node.attrs["axis"]))


@derivative(m.ROLL)
def _roll(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, *by = node.inputs
    shift, axis = node.attrs["shift"], node.attrs["axis"]
    if by:
        # An unsigned shift has no negative.
        return [m.roll(grad, negative(astype(by[0], int64)), axis=axis), None]
    back = tuple(-places for places in shift) if isinstance(shift, tuple) else -shift
    return [m.roll(grad, back, axis=axis)]


gradient_of_first(m.RESHAPE, lambda node, grad: m.reshape(grad, shape_of(node.inputs[0])))


gradient_of_first(m.RESHAPE_TO, lambda node, grad: m.reshape(grad, shape_of(node.inputs[0])))


# -- repeating -------------------------------------------------------------------------------------------------------


def _sum_tiles_kernel(xp: Namespace, *, repetitions: tuple[int, ...], shape: Shape) -> Kernel:
    read = shape_reader(shape)

    def sum_tiles(x: Array, *sizes: Array) -> Array:
        target = read(sizes)
        rank = max(len(target), len(repetitions))
        counts = (1,) * (rank - len(repetitions)) + repetitions
        dims = (1,) * (rank - len(target)) + target
        apart = x.reshape([extent for pair in zip(counts, dims, strict=True) for extent in pair])
        return summed(apart, tuple(range(0, 2 * rank, 2))).reshape(target)

    return sum_tiles


SUM_TILES = define(
    "sum_tiles", in_given_shape, _sum_tiles_kernel, flops=per_input_element, host_inputs=inputs_from(1), traits=OPAQUE
)


def sum_tiles(x: Tensor, repetitions: tuple[int, ...], shape: Extents) -> Tensor:
    """The sum of the tiles of `x`, each of `shape`: the transpose of `tile`."""
    return apply_to_shape(SUM_TILES, shape, x, repetitions=repetitions)


gradient_of_first(m.TILE, lambda node, grad: sum_tiles(grad, node.attrs["repetitions"], shape_of(node.inputs[0])))


gradient_of_first(SUM_TILES, lambda node, grad: m.tile(grad, node.attrs["repetitions"]))


@derivative(m.REPEAT)
def _repeat(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *counts = node.inputs
    found = ensure_shape(_repeatssummed(x, grad, counts[0] if counts else None, **node.attrs), x.shape)
    return [found, *[None] * len(counts)]


def _repeatssummed(x: Tensor, grad: Tensor, counts: Tensor | None, *, repeats: int | None, axis: int | None) -> Tensor:
    """The sum of what reaches the repeats of each element of `x`, along `axis`; None if it was flattened."""
    if repeats is not None and (axis is None or x.ndim is not None):
        dims = [_size(x)] if axis is None else [extent_of(x, at) for at in range(x.ndim or 0)]
        behind = 1 + normalize_axis(axis or 0, len(dims))
        apart = m.reshape(grad, (*dims[:behind], repeats, *dims[behind:]))
        return m.reshape(sum_(apart, axis=behind), shape_of(x))
    sources = m.repeat(arange(_size(x) if axis is None else extent_of(x, axis)), repeats if counts is None else counts)
    if axis is None:
        return m.reshape(scatter_to(grad, along(0, ("input", 0)), [sources], _size(x)), shape_of(x))
    return scatter_to(grad, along(axis, ("input", 0)), [sources], shape_of(x), known=x.shape)


# -- creation --------------------------------------------------------------------------------------------------------


not_differentiable(ARANGE, because="its bounds say how many values there are, which jumps")
not_differentiable(EYE, because="it is made of sizes alone")


gradient_of_first(FULL, lambda node, grad: sum_of(grad))


@derivative(FULL_LIKE)
def _full_like(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [None, sum_of(grad)]


@derivative(LINSPACE)
def _linspace(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Each value lies between the bounds; the nearer one gets the more of its gradient."""
    start, stop, *size = node.inputs
    num = size[0] if size else node.attrs["num"][0]
    weights = linspace(0.0, 1.0, num, dtype=real_dtype(grad.dtype), endpoint=node.attrs["endpoint"])
    own = in_dtype_of(sum_of(grad * (1 - weights)), start), in_dtype_of(sum_of(grad * weights), stop)
    return [*own, *[None] * len(size)]


gradient_of_first(TRIL, lambda node, grad: tril(grad, k=node.attrs["k"]))


gradient_of_first(TRIU, lambda node, grad: triu(grad, k=node.attrs["k"]))


# -- casts and broadcasting ------------------------------------------------------------------------------------------


gradient_of_first(ASTYPE, lambda node, grad: in_dtype_of(grad, node.inputs[0]))
gradient_of_first(BROADCAST_TO, lambda node, grad: sum_to_like(grad, node.inputs[0]))


@derivative(BROADCAST_ARRAYS)
def _broadcast_arrays(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    pairs = zip(grads, node.inputs, strict=True)
    return [None if grad is None else sum_to_like(grad, x) for grad, x in pairs]


# -- the ops that every graph needs ----------------------------------------------------------------------------------


gradient_of_first(IDENTITY, lambda node, grad: in_dtype_of(grad, node.inputs[0]))


not_differentiable(CONSTANT, PARAMETER, PLACEHOLDER, because="it has no inputs")
not_differentiable(NO_OP, because="it has no outputs")
