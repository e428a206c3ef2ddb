"""Pooling: the largest element or the mean of each window, as in `torch.nn.functional`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import summed_in
from asyncflow.nn.images.layouts import Layout
from asyncflow.nn.images.windows import Images, Sizes, by_rank
from asyncflow.ops.arithmetic.elementwise import divide, maximum, minimum
from asyncflow.ops.arithmetic.logic import less
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import expand_dims, reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.axes import check_flag, static_int
from asyncflow.ops.indexing.indexing import take
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.ops.searching.searching import where
from asyncflow.ops.windows.geometry import Windows
from asyncflow.ops.windows.pool import MAX_POOL, SUM_POOL

OutputSizes: TypeAlias = int | Sequence[int | None] | None
"""An extent for all spatial axes, or an extent for each; None keeps the input's."""


def _max_pool(
    rank: int,
    /,
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    *,
    layout: Layout = "NCHW",
) -> Tensor:
    """Return the largest element of each window; NaN if one is there. The first of equal ones has the gradient.

    Args:
        input: real numbers, ``(batch, channels, height, width)``, or one example without the batch.
        kernel_size: extent of a window: an int, or one for each spatial axis.
        stride: distance of windows; None for `kernel_size`.
        padding: number of elements that windows reach beyond both ends, at most half a window.
        dilation: distance of the elements of a window.
        ceil_mode: a last window may reach further, if it begins before the end of the padded input.
        layout: ``"NHWC"`` if channels come last.

    Raises:
        DTypeError, ShapeError: the input has no real numbers, or is smaller than a window.
        GraphError: another argument is none of the above.
    """
    with graph_for(input):
        images = Images("max_pool", rank, input, layout, "iuf", "real numbers")
        kernel, windows = _windows(images, kernel_size, stride, padding, dilation, ceil_mode)
        return images.laid_out(apply(MAX_POOL, images.x, windows=windows, kernel=kernel)[0])


def _avg_pool(
    rank: int,
    /,
    input: TensorLike,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    layout: Layout = "NCHW",
) -> Tensor:
    """Return the mean of each window. Values of 16 bits are summed in float32.

    Args:
        input: floats, ``(batch, channels, height, width)``, or one example without the batch.
        kernel_size: extent of a window: an int, or one for each spatial axis.
        stride: distance of windows; None for `kernel_size`.
        padding: number of zeros at both ends, at most half a window.
        ceil_mode: a last window may reach further, if it begins before the end of the padded input.
        count_include_pad: zeros of the padding are counted.
        divisor_override: what sums are divided by, in place of the number of elements.
        layout: ``"NHWC"`` if channels come last.

    Raises:
        DTypeError, ShapeError: the input has no floats, or is smaller than a window.
        GraphError: another argument is none of the above.
    """
    with graph_for(input):
        images = Images("avg_pool", rank, input, layout)
        check_flag(count_include_pad, f"{images.name}: count_include_pad")
        kernel, windows = _windows(images, kernel_size, stride, padding, 1, ceil_mode)
        x = _wide(images.x)
        (y,) = apply(SUM_POOL, x, windows=windows, kernel=kernel)
        if divisor_override is not None:
            divisor = static_int(divisor_override, f"{images.name}: divisor_override")
            if not divisor:
                raise GraphError(f"{images.name}: divisor_override is not 0")
            y = divide(y, np.asarray(divisor, y.dtype))
        elif not ceil_mode and (count_include_pad or not any(windows.before)):
            y = divide(y, np.asarray(math.prod(kernel), y.dtype))
        else:
            for axis, size in enumerate(kernel):
                lengths = _lengths(x, y, windows, axis, size, count_include_pad)
                y = divide(y, astype(_along(lengths, axis - rank), y.dtype))
        return images.laid_out(astype(y, images.x.dtype))


def _windows(
    images: Images, kernel_size: Sizes, stride: Sizes | None, padding: Sizes, dilation: Sizes, ceil_mode: bool
) -> tuple[tuple[int, ...], Windows]:
    check_flag(ceil_mode, f"{images.name}: ceil_mode")
    kernel, added = images.sizes("kernel_size", kernel_size), images.sizes("padding", padding, 0)
    steps = images.sizes("stride", kernel if stride is None else stride)
    dilated = images.sizes("dilation", dilation)
    for width, size, gap in zip(added, kernel, dilated, strict=True):
        if 2 * width > gap * (size - 1) + 1:
            raise GraphError(
                f"{images.name}: padding {width} is more than half of a window over {gap * (size - 1) + 1}"
            )
    return kernel, Windows(steps, added, added, dilated, ceil_mode)


def _lengths(x: Tensor, y: Tensor, windows: Windows, axis: int, size: int, with_padding: bool) -> Tensor:
    """Return the number of elements of each window along an axis, which are fewer at the ends."""
    place, added = axis - windows.rank, windows.before[axis]
    extent = extent_of(x, place)
    starts = arange(extent_of(y, place)) * windows.stride[axis] - added
    stops = minimum(starts + size, extent + added if with_padding else extent)
    return stops - (starts if with_padding else maximum(starts, 0))


def _along(x: Tensor, axis: int) -> Tensor:
    """Return a vector as values along an axis, which counts from the back."""
    return expand_dims(x, axis=tuple(range(1, -axis))) if axis < -1 else x


def _wide(x: Tensor) -> Tensor:
    return astype(x, summed_in(x.dtype))


def _adaptive_avg_pool(rank: int, /, input: TensorLike, output_size: OutputSizes, *, layout: Layout = "NCHW") -> Tensor:
    """Return means of as many windows as `output_size` says, which together are the whole image.

    Of n elements, window i of m reaches from ``floor(i * n / m)`` to ``ceil((i + 1) * n / m)``.

    Args:
        input: floats, ``(batch, channels, height, width)``, or one example without the batch.
        output_size: number of windows: an int, or one for each spatial axis; None keeps an axis as it is.
        layout: ``"NHWC"`` if channels come last.

    Raises:
        DTypeError, ShapeError: the input has no floats, or no elements.
        GraphError: another argument is none of the above.
    """
    with graph_for(input):
        images = Images("adaptive_avg_pool", rank, input, layout)
        listed = list(output_size) if isinstance(output_size, list | tuple) else [output_size] * rank
        if len(listed) != rank:
            raise GraphError(f"{images.name}: output_size is an int or None, or {rank} of them; got {output_size!r}")
        y = _wide(images.x)
        if y.ndim is None:
            raise ShapeError(f"{images.name}: the rank of the input is known; got {images.x!r}")
        for axis, asked in enumerate(listed):
            if asked is not None:
                y = _means(images.name, y, y.ndim - rank + axis, images.sizes("output_size", asked)[axis])
        return images.laid_out(astype(y, images.x.dtype))


def _means(name: str, x: Tensor, axis: int, count: int) -> Tensor:
    """Return the means of `count` windows along an axis."""
    n = extent_of(x, axis)
    if isinstance(n, int) and n == 0:
        raise ShapeError(f"{name}: an axis without elements has no means; got {x!r}")
    if isinstance(n, int) and n % count == 0:
        parts, lengths = _split(x, axis, count, n // count), np.asarray(n // count, x.dtype)
        return divide(sum_of(parts, axis=axis + 1), lengths)
    numbers = arange(count)
    starts, stops = numbers * n // count, ((numbers + 1) * n + count - 1) // count
    # No window is longer; what a shorter one does not have counts as 0.
    longest = n // count + 2
    places = expand_dims(starts, axis=1) + arange(longest)
    seen = less(places, expand_dims(stops, axis=1))
    parts = _split(take(x, reshape(minimum(places, n - 1), (-1,)), axis=axis), axis, count, longest)
    behind = tuple(range(2, 1 + x.ndim - axis)) if x.ndim is not None else ()
    total = sum_of(where(expand_dims(seen, axis=behind) if behind else seen, parts, 0), axis=axis + 1)
    return divide(total, astype(_along(stops - starts, axis - (x.ndim or 0)), x.dtype))


def _split(x: Tensor, axis: int, first: int, second: int | Tensor) -> Tensor:
    """Return `x` with an axis as two."""
    extents = [extent_of(x, place) for place in range(x.ndim or 0)]
    return reshape(x, (*extents[:axis], first, second, *extents[axis + 1 :]))


max_pool1d, max_pool2d, max_pool3d = by_rank(_max_pool)
avg_pool1d, avg_pool2d, avg_pool3d = by_rank(_avg_pool)
adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = by_rank(_adaptive_avg_pool)
