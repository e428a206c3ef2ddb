"""Convolution, and its derivatives by the input and by the weights, which are one another's derivatives, too.

The sum over all ``y[n, o, i] * x[n, c, stride * i + dilation * k - before] * w[o, c, k]`` has a derivative by each of
the three. `CONV` is the one by y, `CONV_INPUT` by x, and `CONV_WEIGHT` by w. Each is linear in the two others, so that
these three are all that gradients of any order need. `CONV_INPUT` is the transposed convolution as well.

A kernel unfolds windows to columns of a matrix, a block of images at a time. The unfolded batch is never there as a
whole: with 3 by 3 windows, it would be nine times as large as the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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

BLOCK_BYTES = 7 << 19
"""Bytes of the columns of one block and their results on a CPU: fewer are slower, as products are small then."""
CARD_BLOCK_BYTES = 1 << 28
"""The same on a card, where few large products are fast."""
FEW_TERMS = 8
"""Number of terms of a window's row below which all rows have one product: results would be added more often."""
FEW_OUTPUTS = 100
"""Number of outputs of an image up to which several images have one product."""

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

    Windows are unfolded along all axes but the first. Along the first, each row of a window has a product of its own,
    with columns that begin further on in the same buffer. For 3 by 3 windows that writes a third of the memory, and two
    results are added. With a stride of 2, even and odd rows are apart, so that columns of one product stay neighbours.

    Attributes:
        images: number of examples.
        wide: the dtype of sums.
        joins: images of a block are one matrix, since a single image has few outputs.
        shifts: for each product, which of every `stride` rows it takes, and the first of them.
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
        self.joins = math.prod(self.outputs) <= FEW_OUTPUTS
        self.shifts = [divmod(windows.dilation[0] * row, windows.stride[0])[::-1] for row in range(kernel[0])]

    def blocks(self, each: float, copies: float = 1) -> Iterator[Slices]:
        """Yield parts of images and outputs, given the elements in memory for each output, and copies of weights."""
        if 0 in (self.images, self.channels, self.filters, *self.outputs):
            return iter(())
        held = copies * self.filters * self.own * math.prod(self.kernel) * self.wide.itemsize
        most = BLOCK_BYTES if self.xp is np else CARD_BLOCK_BYTES
        room = max(most - held, most / 8) // (each * self.wide.itemsize)
        return tiles((self.images, *self.outputs), int(room))

    def columns(self, x: Array, copies: float = 1) -> Iterator[tuple[Slices, list[Array]]]:
        """Yield blocks, with the columns ``(images, groups, terms, outputs)`` of each product."""
        xp, behind = self.xp, self.kernel[1:]
        rows, more = (1 + max(each) for each in zip(*self.shifts, strict=True))
        windows = replace(self.windows, dilation=(1, *self.windows.dilation[1:]))
        unfolded = rows * self.channels * math.prod(behind) * (1 + (more - 1) / max(1, self.outputs[0]))
        has_all = self.sizes == self.outputs and self.kernel == self.windows.stride == (1,) * windows.rank
        memory, last = None, None
        for block in self.blocks(unfolded + self.filters * (1 + self.joins), copies):
            if has_all and not any(windows.before):
                yield block, [self.matrix(x, block, self.own)]
                continue
            images, height, *inner = (part.stop - part.start for part in block)
            # Rows of one remainder by the stride are neighbours, so a product's columns are one slice.
            shape = [rows, images, self.channels, *behind, height + more - 1, *inner]
            if self.joins:
                shape.insert(len(shape) - 1 - len(inner), shape.pop(1))
            if memory is None:  # no later block is larger
                memory = xp.empty(math.prod(shape), self.wide)
            buffer = memory[: math.prod(shape)].reshape(shape)
            # Outside the input the buffer has zeros, which later images do not overwrite.
            if (shape, block[1:]) != last:
                buffer[...], last = 0, (shape, block[1:])
            filled = xp.moveaxis(buffer, -1 - len(inner), 1) if self.joins else buffer
            outputs = (slice(block[1].start, block[1].stop + more - 1), *block[2:])
            for (row, *place), there, source in windows.places((rows, *behind), self.sizes, outputs):
                filled[(row, *_at(slice(None), *place, *there))] = x[_at(block[0], *source)]
            wide = math.prod(inner) * (images if self.joins else 1)
            parts = buffer.reshape(rows, 1 if self.joins else images, self.groups, -1, (height + more - 1) * wide)
            yield block, [parts[row][..., first * wide : (first + height) * wide] for row, first in self.shifts]

    def matrices(self, w: Array) -> Array:
        """Return weights as ``(products, groups, filters, terms)``."""
        each = self.filters // self.groups
        parts = w.reshape(self.groups, each, self.own, len(self.shifts), math.prod(self.kernel[1:]))
        return self.xp.moveaxis(parts, 3, 0).astype(self.wide, order="C").reshape(*self.terms())

    def terms(self) -> Extents:
        """Return the shape of such weights."""
        return len(self.shifts), self.groups, self.filters // self.groups, self.own * math.prod(self.kernel[1:])

    def matrix(self, x: Array, block: Slices, channels: int) -> Array:
        """Return the part of images that belongs to a block, as ``(images, groups, channels of a group, outputs)``."""
        found = x[_at(*block)]
        images = 1 if self.joins else found.shape[0]
        if self.joins:
            found = self.xp.moveaxis(found, 0, 2)
        return found.reshape(images, self.groups, channels, -1).astype(self.wide, copy=False)

    def target(self, y: Array, block: Slices) -> Array | None:
        """Return the part of a result as such a matrix in the result's memory; None where it is none."""
        is_whole = all(part.stop - part.start == n for part, n in zip(block[2:], self.outputs[1:], strict=True))
        if self.joins or not is_whole or y.dtype != self.wide:
            return None
        wide = math.prod(self.outputs[1:])
        whole = y.reshape(self.images, self.groups, self.filters // self.groups, -1)
        return whole[block[0], :, :, block[1].start * wide : block[1].stop * wide]

    def put(self, y: Array, block: Slices, results: Array) -> None:
        """Write such a matrix."""
        images, height, *inner = (part.stop - part.start for part in block)
        if self.joins:
            found = self.xp.moveaxis(results.reshape(self.filters, height, images, *inner), 2, 0)
        else:
            found = results.reshape(images, self.filters, height, *inner)
        y[_at(*block)] = found

    def turned(self) -> Windows:
        """Return the windows of results that an element of the input is part of, if windows have no stride."""
        reach = [gap * (n - 1) for gap, n in zip(self.windows.dilation, self.kernel, strict=True)]
        before = tuple(n - width for n, width in zip(reach, self.windows.before, strict=True))
        pairs = zip(self.sizes, self.outputs, reach, before, strict=True)
        return replace(self.windows, before=before, after=tuple(n + r - m - width for n, m, r, width in pairs))

    def flipped(self, w: Array) -> Array:
        """Return the weights of such windows."""
        parts = w.reshape(self.groups, -1, self.own, *self.kernel).swapaxes(1, 2)
        backwards: Index = (..., *[slice(None, None, -1)] * self.windows.rank)
        return parts[backwards].reshape(self.channels, -1, *self.kernel)

    def of_images(self, x: Array) -> Array:
        """Return values with one axis for all examples."""
        return x.reshape(self.images, *x.shape[-1 - self.windows.rank :])


def _conv(xp: Namespace, windows: Windows, groups: int | None, x: Array, w: Array) -> Array:
    batch, is_raised = x.shape[: -1 - windows.rank], False
    if groups == 1 and w.shape[2] > 1 and w.shape[1] * math.prod(w.shape[3:]) < FEW_TERMS:
        # Unfolded along a first axis of one element, windows have one product.
        x, w, is_raised = xp.expand_dims(x, -1 - windows.rank), xp.expand_dims(w, -1 - windows.rank), True
        windows = windows.raised()
    layer = _Layer(xp, windows, groups, x.shape, w.shape, x.dtype)
    make = xp.empty if x.size and w.size else xp.zeros
    # The result is no view, which the session would copy for whoever fetches it.
    y = make((*batch, layer.filters, *layer.outputs[is_raised:]), x.dtype)
    results, filters = y.reshape(layer.images, layer.filters, *layer.outputs), layer.matrices(w)
    for block, columns in layer.columns(layer.of_images(x)):
        # A product is written where it belongs, if NumPy's BLAS can: a copy of it would take as long as a sum.
        total = layer.target(results, block)
        found = xp.matmul(filters[0], columns[0], out=total)
        for place, each in enumerate(columns[1:], start=1):
            found += xp.matmul(filters[place], each)
        if total is None:
            layer.put(results, block, found)
    return y


def _conv_input(xp: Namespace, windows: Windows, groups: int | None, y: Array, w: Array, shape: Extents) -> Array:
    batch = y.shape[: -1 - windows.rank]
    layer = _Layer(xp, windows, groups, (*batch, *shape), w.shape, y.dtype)
    _fitted((*batch, *shape), w.shape, y.shape, windows, groups)
    # Such a gradient is a convolution itself: sums of products, in place of windows that are added one by one.
    if max(windows.stride) == 1 and y.size and layer.channels:
        return _conv(xp, layer.turned(), layer.groups, y, layer.flipped(w))
    layer.joins = False
    x = xp.zeros((*batch, *shape), layer.wide)
    images = layer.of_images(x)
    each, terms = layer.filters // layer.groups, layer.own * math.prod(layer.kernel)
    filters, results = w.reshape(layer.groups, each, terms).astype(layer.wide).swapaxes(-1, -2), layer.of_images(y)
    for block in layer.blocks(layer.channels * math.prod(layer.kernel)):
        columns = xp.matmul(filters, layer.matrix(results, block, each))
        columns = columns.reshape(-1, layer.channels, *layer.kernel, *(each.stop - each.start for each in block[1:]))
        for place, there, inner in windows.places(layer.kernel, layer.sizes, block[1:]):
            images[_at(block[0], *inner)] += columns[_at(slice(None), *place, *there)]
    return x.astype(y.dtype, copy=False)


def _conv_weight(xp: Namespace, windows: Windows, groups: int | None, x: Array, y: Array, shape: Extents) -> Array:
    found = (y.shape[-1 - windows.rank], *shape)
    layer = _Layer(xp, windows, groups, x.shape, found, x.dtype)
    _fitted(x.shape, found, y.shape, windows, groups)
    w = xp.zeros(layer.terms(), layer.wide)
    results = layer.of_images(y)
    for block, columns in layer.columns(layer.of_images(x), 1 + 1 / len(layer.shifts)):
        part = layer.matrix(results, block, layer.filters // layer.groups)
        for place, each in enumerate(columns):
            # NumPy's BLAS is faster with the larger matrix in front, as it is, of one image.
            if layer.joins:
                w[place] += xp.matmul(part, each.swapaxes(-1, -2))[0]
            else:
                w[place] += xp.matmul(each, part.swapaxes(-1, -2)).sum(axis=0).swapaxes(-1, -2)
    whole = xp.empty(found, x.dtype)
    parts = xp.moveaxis(w.reshape(*w.shape[:3], layer.own, math.prod(layer.kernel[1:])), 0, 3)
    whole.reshape(parts.shape)[...] = parts
    return whole


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
