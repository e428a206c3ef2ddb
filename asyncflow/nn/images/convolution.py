"""Convolution and transposed convolution, as in `torch.nn.functional`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, is_symbolic
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.nn.images.layouts import Layout
from asyncflow.nn.images.windows import Images, Sizes, by_rank
from asyncflow.ops.arithmetic.elementwise import add, minimum
from asyncflow.ops.arrays.extents import apply_to_shape
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.axes import static_int
from asyncflow.ops.windows.conv import CONV, CONV_INPUT
from asyncflow.ops.windows.geometry import Windows

Padding: TypeAlias = Sizes | Literal["same", "valid"]


def _conv(
    rank: int,
    /,
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    layout: Layout = "NCHW",
) -> Tensor:
    """Return the sums of products of filters with the windows of images, as PyTorch's `conv2d` does.

    CPUs unfold windows a block at a time, and never a whole batch. Values of 16 bits are summed in float32.

    Args:
        input: floats, ``(batch, channels, height, width)``, or one example without the batch.
        weight: ``(filters, channels / groups, height, width)`` in every layout, of the dtype of `input`.
        bias: ``(filters,)``, of that dtype; None for none.
        stride: distance of windows: an int, or one for each spatial axis.
        padding: zeros at both ends of each axis, likewise; ``"valid"`` for none, ``"same"`` for as many as keep the
            extents, with an odd one at the end.
        dilation: distance of the elements of a window.
        groups: number of parts of the channels, each of which has filters of its own.
        layout: ``"NHWC"`` if channels of `input` and result come last; both names stand for any number of axes.

    Returns:
        ``(batch, filters, height, width)``, with a window's place for each place of the result. Empty images give
        empty results.

    Raises:
        DTypeError, ShapeError: inputs do not fit one another. Extents that only the run knows make it a `KernelError`.
        GraphError: another argument is none of the above.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     images = af.placeholder("float32", (None, 3, 32, 32))
    ...     af.nn.conv2d(images, af.ones((8, 3, 5, 5), dtype="float32"), stride=2, padding=2)
    <Tensor conv:0 float32[?,8,16,16]>
    """
    with graph_for(input, weight, bias):
        images, w = Images("conv", rank, input, layout), as_tensor(weight)
        steps, dilated = images.sizes("stride", stride), images.sizes("dilation", dilation)
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise GraphError(f"conv{rank}d: padding is 'same', 'valid', or numbers of elements; got {padding!r}")
        if padding == "same":
            before, after = _same(images, w, steps, dilated)
        else:
            before = after = images.sizes("padding", 0 if padding == "valid" else padding, 0)
        windows = Windows(steps, before, after, dilated)
        (y,) = apply(CONV, images.x, w, windows=windows, groups=_groups(images, groups))
        return images.laid_out(_with_bias(images, y, bias))


def _conv_transpose(
    rank: int,
    /,
    input: TensorLike,
    weight: TensorLike,
    bias: TensorLike | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    layout: Layout = "NCHW",
) -> Tensor:
    """Return the transpose of `conv2d`: what its gradient does to its input, as PyTorch's `conv_transpose2d` does.

    Args:
        input: floats, ``(batch, channels, height, width)``, or one example without the batch.
        weight: ``(channels, filters / groups, height, width)`` in every layout, of the dtype of `input`.
        bias: ``(filters,)``, of that dtype; None for none.
        stride: distance of the windows in the result.
        padding: rows and columns of the result that are left out at both ends.
        output_padding: rows and columns that are added at the end, fewer than `stride` or `dilation`.
        groups: number of parts of the channels, each of which has filters of its own.
        dilation: distance of the elements of a window.
        layout: ``"NHWC"`` if channels of `input` and result come last; both names stand for any number of axes.

    Returns:
        ``(batch, filters, height, width)``, with ``(n - 1) * stride - 2 * padding + dilation * (window - 1) +
        output_padding + 1`` elements for n of the input.

    Raises:
        DTypeError, ShapeError, GraphError: as for `conv2d`.
    """
    with graph_for(input, weight, bias):
        images, w = Images("conv_transpose", rank, input, layout), as_tensor(weight)
        steps, dilated = images.sizes("stride", stride), images.sizes("dilation", dilation)
        before, added = images.sizes("padding", padding, 0), images.sizes("output_padding", output_padding, 0)
        if any(more >= max(step, gap) for more, step, gap in zip(added, steps, dilated, strict=True)):
            raise GraphError(
                f"{images.name}: output_padding is below the stride or the dilation; got {brief(output_padding)}"
            )
        count = _groups(images, groups)
        if w.ndim not in (None, rank + 2):
            raise ShapeError(f"{images.name}: weight has {rank + 2} axes, with the channel axes in front; got {w!r}")
        channels = [None if each.shape is None else each.shape[at] for each, at in ((images.x, -1 - rank), (w, 0))]
        if None not in channels and channels[0] != channels[1]:
            raise ShapeError(f"{images.name}: the input has {channels[0]} channels, and weight is for {channels[1]}")
        shape = [count * extent_of(w, -1 - rank)]
        for axis, (step, gap, left_out, more) in enumerate(zip(steps, dilated, before, added, strict=True)):
            n, size = extent_of(images.x, axis - rank), extent_of(w, axis - rank)
            extent = (n - 1) * step - 2 * left_out + gap * (size - 1) + more + 1
            if isinstance(extent, int) and extent < 1 and n != 0:
                raise ShapeError(
                    f"{images.name}: nothing is left of spatial axis {axis}: it would have {extent} elements"
                )
            # An empty axis has no windows.
            shape.append(extent * (min(n, 1) if isinstance(n, int) else minimum(n, 1)))
        after = tuple(left_out - more for left_out, more in zip(before, added, strict=True))
        windows = Windows(steps, before, after, dilated)
        y = apply_to_shape(CONV_INPUT, shape, images.x, w, windows=windows, groups=count)
        return images.laid_out(_with_bias(images, y, bias))


def _groups(images: Images, groups: object) -> int:
    found = static_int(groups, f"{images.name}: groups")
    if found < 1:
        raise GraphError(f"{images.name}: groups is 1 or more; got {found}")
    return found


def _same(
    images: Images, w: Tensor, stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the zeros at both ends that keep the extents."""
    if any(step != 1 for step in stride):
        raise GraphError(f"{images.name}: padding='same' keeps the extents, so stride is 1; got {stride}")
    kernel = [] if w.shape is None else [extent for extent in w.shape[-images.rank :] if extent is not None]
    if len(kernel) != images.rank:
        raise ShapeError(f"{images.name}: with padding='same' the extents of a window are known; got {w!r}")
    whole = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    return tuple(each // 2 for each in whole), tuple(each - each // 2 for each in whole)


def _with_bias(images: Images, y: Tensor, bias: TensorLike | None) -> Tensor:
    if bias is None:
        return y
    added = as_tensor(bias) if is_symbolic(bias) else as_tensor(bias, y.dtype)
    if added.dtype != y.dtype:
        raise DTypeError(f"{images.name}: bias has the dtype of the input, {dtype_name(y.dtype)}; got {added!r}")
    filters = None if y.shape is None else y.shape[-1 - images.rank]
    if not is_compatible(added.shape, (filters,)):
        raise ShapeError(f"{images.name}: bias has shape {format_shape((filters,))}; got {added!r}")
    return add(y, reshape(added, (extent_of(added, 0), *[1] * images.rank)))


conv1d, conv2d, conv3d = by_rank(_conv)
conv_transpose1d, conv_transpose2d, conv_transpose3d = by_rank(_conv_transpose)
