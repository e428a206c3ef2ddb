"""Convolution, and its derivatives by the input and by the weights, which are one another's derivatives, too.

The sum over all ``y[n, o, i] * x[n, c, stride * i + dilation * k - before] * w[o, c, k]`` has a derivative by each of
the three. `CONV` is the one by y, `CONV_INPUT` by x, and `CONV_WEIGHT` by w. Each is linear in the two others, so that
these three are all that gradients of any order need. `CONV_INPUT` is the transposed convolution as well.

A kernel unfolds windows to columns, a block at a time that fits into a cache of the second level, for one product. The
unfolded batch is never there as a whole: of 3 by 3 windows, it would be nine times as large as the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.op import NEW_UNCAPTURED, define, inputs_from
from asyncflow.graph.values.dtypes import DType, dtype_name, summed_in
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import shape_reader, template_shape
from asyncflow.ops.cost import PASS, elements
from asyncflow.ops.promotion import require_kind
from asyncflow.ops.windows.geometry import Extents, Slices, Windows, tiles
from asyncflow.values import Array, Index, Kernel, Namespace

BLOCK_BYTES = 1 << 20
"""Bytes of the columns of one block on a CPU: with the product they fit into a cache of the second level."""
CARD_BLOCK_BYTES = 1 << 28
"""The same on a card, where few large products are fast."""

Known = tuple[int | None, ...]


# -- shapes ----------------------------------------------------------------------------------------------------------


def _fitted(x: Shape, w: Shape, y: Shape, windows: Windows, groups: int | None) -> Known:
    """Return channels and extents of the result, given the shapes of input, weight and result as far as known.

    Raises:
        ShapeError: they do not fit one another.
    """
    rank = windows.rank
    if x is not None and len(x) <= rank:
        raise ShapeError(f"takes channels and {rank} spatial axes, behind any others; got {format_shape(x)}")
    if w is not None and len(w) != 2 + rank:
        raise ShapeError(f"takes weights of filters, channels, and {rank} axes of a window; got {format_shape(w)}")
    channels, *sizes = (None,) * (1 + rank) if x is None else x[-1 - rank :]
    filters, own, *kernel = (None,) * (2 + rank) if w is None else w
    if groups is None and channels and own:
        groups = channels // own
    if groups is not None and channels is not None and own is not None and channels != groups * own:
        raise ShapeError(f"{channels} channels of the input are not {groups} groups of {own} that each filter takes")
    if groups and filters is not None and filters % groups:
        raise ShapeError(f"{filters} filters are not divided into {groups} groups of one size")
    found = (filters, *windows.counts(sizes, kernel))
    if y is not None and (len(y) <= rank or not is_compatible(y[-1 - rank :], found)):
        raise ShapeError(f"{format_shape(x)} and {format_shape(w)} make {format_shape(found)}; got {format_shape(y)}")
    return found


def _behind(x: Spec, rank: int, found: Shape) -> Spec:
    """Return the spec of a result with the batch axes of `x`."""
    return Spec(x.dtype, None if x.shape is None or found is None else (*x.shape[: -1 - rank], *found))


def _floats(x: Spec, other: Spec) -> None:
    require_kind(x, "f", "floats")
    if x.dtype != other.dtype:
        raise DTypeError(f"takes two values of one dtype, not {dtype_name(x.dtype)} and {dtype_name(other.dtype)}")


def _conv_spec(x: Spec, w: Spec, *, windows: Windows, groups: int | None) -> Spec:
    _floats(x, w)
    return _behind(x, windows.rank, _fitted(x.shape, w.shape, None, windows, groups))


def _input_spec(y: Spec, w: Spec, *sizes: Spec, shape: Shape, windows: Windows, groups: int | None) -> Spec:
    _floats(y, w)
    found = template_shape(shape, sizes)
    _fitted(found, w.shape, y.shape, windows, groups)
    return _behind(y, windows.rank, found)


def _weight_spec(x: Spec, y: Spec, *sizes: Spec, shape: Shape, windows: Windows, groups: int | None) -> Spec:
    _floats(x, y)
    filters = None if y.shape is None or len(y.shape) <= windows.rank else y.shape[-1 - windows.rank]
    found = (filters, *(template_shape(shape, sizes) or ()))
    _fitted(x.shape, found, y.shape, windows, groups)
    return Spec(x.dtype, found)


def _flops(shapes: Callable[[Sequence[Shape], Sequence[Shape]], tuple[Shape, Shape]]) -> Callable[..., float]:
    """Return the cost of an op, given a rule for the shapes of weights and of the convolution's result."""

    def cost(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
        # The sum has a term for each element of the result and each weight of its filter.
        w, y = shapes(inputs, outputs)
        filters = (w or (1,))[0] or 1
        terms = elements(y) * elements(w) / filters
        return 2 * terms + PASS * (terms / filters + elements(y))

    return cost


# -- kernels ---------------------------------------------------------------------------------------------------------


def _at(images: slice, *behind: Index) -> tuple[Index, ...]:
    return (images, slice(None), *behind)  # all channels


class _Layer:
    """The axes of one call: images ``(n, channels, *extents)``, groups, and blocks of unfolded windows.

    Attributes:
        images: number of examples.
        wide: the dtype of sums.
        is_empty: there is nothing to sum.
    """

    def __init__(self, xp: Namespace, windows: Windows, groups: int | None, x: Extents, w: Extents, dtype: DType):
        rank = windows.rank
        found = _fitted(x, w, None, windows, groups)
        self.xp, self.windows, self.wide = xp, windows, summed_in(dtype)
        self.images, (self.channels, *sizes) = math.prod(x[: -1 - rank]), x[-1 - rank :]
        self.filters, self.own, *kernel = w
        self.groups = max(1, groups or self.channels // max(1, self.own))
        self.sizes, self.kernel = tuple(sizes), tuple(kernel)
        self.outputs = tuple(each for each in found[1:] if each is not None)
        self.is_empty = 0 in (self.images, self.channels, self.filters, *self.outputs)

    def blocks(self) -> Iterator[Slices]:
        """Yield parts of images and outputs."""
        if self.is_empty:
            return iter(())
        each = max(1, self.channels * math.prod(self.kernel) * self.wide.itemsize)
        room = (BLOCK_BYTES if self.xp is np else CARD_BLOCK_BYTES) // each
        return tiles((self.images, *self.outputs), room)

    def columns(self, x: Array) -> Iterator[tuple[Slices, Array]]:
        """Yield blocks, with the windows of each unfolded to ``(images, groups, weights of a filter, outputs)``."""
        buffer, part = None, None
        for block in self.blocks():
            extents = [each.stop - each.start for each in block]
            # Outside the input the buffer has zeros, which later images do not overwrite.
            if buffer is None or block[1:] != part:
                shape = (extents[0], self.channels, *self.kernel, *extents[1:])
                buffer, part = self.xp.zeros(shape, self.wide), block[1:]
            found = buffer[: extents[0]]
            for place, there, inner in self.windows.places(self.kernel, self.sizes, block[1:]):
                found[_at(slice(None), *place, *there)] = x[_at(block[0], *inner)]
            yield block, found.reshape(extents[0], self.groups, -1, math.prod(extents[1:]))

    def grouped(self, w: Array) -> Array:
        """Return weights as a matrix for each group."""
        size = self.own * math.prod(self.kernel)
        return w.reshape(self.groups, self.filters // self.groups, size).astype(self.wide, copy=False)

    def results(self, y: Array, block: Slices) -> Array:
        """Return the part of a result that belongs to a block, as ``(images, groups, filters, outputs)``."""
        found = y[_at(*block)]
        extents = found.shape[0], self.groups, self.filters // self.groups, math.prod(found.shape[2:])
        return found.reshape(extents).astype(self.wide, copy=False)

    def of_images(self, x: Array) -> Array:
        """Return values with one axis for all examples."""
        return x.reshape(self.images, *x.shape[-1 - self.windows.rank :])


def _conv(xp: Namespace, windows: Windows, groups: int | None, x: Array, w: Array) -> Array:
    layer = _Layer(xp, windows, groups, x.shape, w.shape, x.dtype)
    y = (xp.zeros if layer.is_empty else xp.empty)((layer.images, layer.filters, *layer.outputs), x.dtype)
    filters = layer.grouped(w)
    for block, columns in layer.columns(layer.of_images(x)):
        part = y[_at(*block)]
        part[...] = xp.matmul(filters, columns).reshape(part.shape)
    return y.reshape(*x.shape[: -1 - windows.rank], *y.shape[1:])


def _conv_input(xp: Namespace, windows: Windows, groups: int | None, y: Array, w: Array, shape: Extents) -> Array:
    batch = y.shape[: -1 - windows.rank]
    layer = _Layer(xp, windows, groups, (*batch, *shape), w.shape, y.dtype)
    _fitted((*batch, *shape), w.shape, y.shape, windows, groups)
    x = xp.zeros((layer.images, *shape), layer.wide)
    filters, results = layer.grouped(w).swapaxes(-1, -2), layer.of_images(y)
    for block in layer.blocks():
        columns = xp.matmul(filters, layer.results(results, block))
        columns = columns.reshape(-1, layer.channels, *layer.kernel, *(each.stop - each.start for each in block[1:]))
        for place, there, inner in windows.places(layer.kernel, layer.sizes, block[1:]):
            x[_at(block[0], *inner)] += columns[_at(slice(None), *place, *there)]
    return x.astype(y.dtype, copy=False).reshape(*batch, *shape)


def _conv_weight(xp: Namespace, windows: Windows, groups: int | None, x: Array, y: Array, shape: Extents) -> Array:
    found = (y.shape[-1 - windows.rank], *shape)
    layer = _Layer(xp, windows, groups, x.shape, found, x.dtype)
    _fitted(x.shape, found, y.shape, windows, groups)
    w = xp.zeros((layer.groups, layer.filters // layer.groups, math.prod(shape)), layer.wide)
    results = layer.of_images(y)
    for block, columns in layer.columns(layer.of_images(x)):
        w += xp.matmul(layer.results(results, block), columns.swapaxes(-1, -2)).sum(axis=0)
    return w.reshape(found).astype(x.dtype, copy=False)


def _kernel(xp: Namespace, *, windows: Windows, groups: int | None) -> Kernel:
    return partial(_conv, xp, windows, groups)


def _sized(find: Callable[..., Array]) -> Callable[..., Kernel]:
    """Return the kernel of an op that is told the shape of its result."""

    def kernel(xp: Namespace, *, shape: Shape, windows: Windows, groups: int | None) -> Kernel:
        read = shape_reader(shape)
        return lambda one, other, *sizes: find(xp, windows, groups, one, other, read(sizes))

    return kernel


CONV = define(
    "conv",
    _conv_spec,
    _kernel,
    flops=_flops(lambda inputs, outputs: (inputs[1], outputs[0])),
    traits=NEW_UNCAPTURED,
)
CONV_INPUT = define(
    "conv_input",
    _input_spec,
    _sized(_conv_input),
    flops=_flops(lambda inputs, outputs: (inputs[1], inputs[0])),
    host_inputs=inputs_from(2),
    traits=NEW_UNCAPTURED,
)
CONV_WEIGHT = define(
    "conv_weight",
    _weight_spec,
    _sized(_conv_weight),
    flops=_flops(lambda inputs, outputs: (outputs[0], inputs[1])),
    host_inputs=inputs_from(2),
    traits=NEW_UNCAPTURED,
)
