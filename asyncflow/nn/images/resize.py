"""`resize`: images of another height and width, by the nearest pixel or between pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import DType, dtype_name, float32, float64, int64
from asyncflow.nn.images.layouts import Layout, channel_axis
from asyncflow.ops.arithmetic.elementwise import add, divide, floor, maximum, minimum, multiply, subtract
from asyncflow.ops.arithmetic.logic import equal
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.axes import check_flag, static_int
from asyncflow.ops.indexing.indexing import take
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.searching.searching import where

Mode: TypeAlias = Literal["nearest", "nearest-exact", "linear", "bilinear", "trilinear"]

_LINEAR = ("linear", "bilinear", "trilinear")
"""Modes between pixels, by the number of axes less 1."""


def resize(
    input: TensorLike,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: Mode = "nearest",
    align_corners: bool | None = None,
    *,
    layout: Layout = "NCHW",
) -> Tensor:
    """Resize images, as ``torch.nn.functional.interpolate`` does.

    Args:
        input: ``(batch, channels, ...)`` with 1 to 3 axes of pixels; floats, and for the nearest pixel any dtype.
        size: extents of the result, or one extent for all axes.
        scale_factor: factors in place of `size`, or one factor for all axes.
        mode: ``"nearest"``, ``"nearest-exact"`` (the pixel whose centre is nearest, where ``"nearest"`` rounds down),
            and by the number of axes ``"linear"``, ``"bilinear"`` or ``"trilinear"``.
        align_corners: the centres of the outermost pixels stay, rather than their edges; of linear modes alone.
        layout: ``"NHWC"`` if channels come last, for any number of axes.

    Returns:
        A tensor of the dtype of `input`. Values of 16 bits are mixed in float32.

    Raises:
        DTypeError, ShapeError: the input does not fit, or an extent is below 0.
        GraphError: both or none of `size` and `scale_factor`; `align_corners` with a nearest pixel.
        IndexError: (in the run, as the cause of a KernelError) there are no pixels to make some of.
    """
    with graph_for(input):
        x = as_tensor(input)
        channel = channel_axis("resize", x, layout)
        axes = [axis for axis in range(1, len(x.shape or ())) if axis != channel]
        is_linear = _check_mode(x, mode, align_corners, len(axes))
        if (size is None) == (scale_factor is None):
            raise GraphError("resize: takes size or scale_factor, and not both")
        sizes = _per_axis("size", size, len(axes))
        factors = _per_axis("scale_factor", scale_factor, len(axes))
        wide = x.dtype if x.dtype.itemsize >= float32.itemsize else float32
        found = astype(x, wide) if is_linear else x
        for axis, extent, factor in zip(axes, sizes, factors, strict=True):
            old = extent_of(x, axis)
            new = _new_extent(extent, factor, old)
            if isinstance(old, int) and isinstance(new, int) and new > old == 0:
                raise ShapeError(f"resize: there are no pixels along axis {axis} of {x!r} to make {new} of")
            if is_linear:
                found = _between(found, axis, old, _sources(old, new, factor, align_corners or False, mode, wide))
            else:
                # In float32 as PyTorch's, which decides some pixels at the edge between two.
                ratio = _ratio(old, new, factor, mode, float32)
                shift = np.float32(0.5 if mode == "nearest-exact" else 0)
                places = floor(multiply(add(astype(arange(new), float32), shift), ratio))
                found = take(found, minimum(astype(places, int64), subtract(old, 1)), axis=axis)
        return astype(found, x.dtype)


def _check_mode(x: Tensor, mode: str, align_corners: bool | None, rank: int) -> bool:
    """Return True if the mode is linear."""
    if mode not in get_args(Mode):
        raise GraphError(f"resize: mode is one of {', '.join(get_args(Mode))}; got {brief(mode)}")
    if not 1 <= rank <= 3 or (mode in _LINEAR and mode != _LINEAR[rank - 1]):
        raise ShapeError(f"resize: {mode!r} does not fit {rank} axes of pixels; got {x!r}")
    if align_corners is not None:
        check_flag(align_corners, "align_corners")
        if mode not in _LINEAR:
            raise GraphError(f"resize: align_corners is for linear modes, not for {mode!r}")
    if mode in _LINEAR and kind_of(x.dtype) != "f":
        raise DTypeError(f"resize: {mode!r} takes floats, not {dtype_name(x.dtype)}; convert with af.astype first")
    return mode in _LINEAR


def _per_axis(what: str, given: object, rank: int) -> list[float | None]:
    if given is None:
        return [None] * rank
    listed: list[object] = list(given) if isinstance(given, Sequence | np.ndarray) else [given] * rank
    if len(listed) != rank:
        raise ShapeError(f"resize: {what} is a number, or one for each of {rank} axes; got {brief(given)}")
    if what == "size":
        found: list[float] = [static_int(extent, "size") for extent in listed]
    else:
        found = [float(each) for each in listed if isinstance(each, int | float)]
    if len(found) < rank:
        raise GraphError(f"resize: scale_factor is a number; got {brief(given)}")
    if not all(each >= 0 if what == "size" else 0 < each < math.inf for each in found):
        raise ShapeError(f"resize: {what} is {'at least' if what == 'size' else 'above'} 0; got {brief(given)}")
    return [*found]


def _new_extent(extent: float | None, factor: float | None, old: int | Tensor) -> int | Tensor:
    if factor is None:
        assert extent is not None
        return int(extent)
    return int(old * factor) if isinstance(old, int) else astype(floor(astype(old, float64) * factor), int64)


def _ratio(old: int | Tensor, new: int | Tensor, factor: float | None, mode: str, dtype: DType) -> Tensor:
    """Return how many old pixels a new pixel takes."""
    found = divide(astype(as_tensor(old), dtype), astype(maximum(new, 1), dtype))
    if factor is None:
        return found
    # As in PyTorch, a factor of 1.01 that changes no extent moves no pixel.
    exact = equal(new, old) if mode in _LINEAR else False
    return where(exact, found, np.asarray(1 / factor, dtype))


def _sources(
    old: int | Tensor, new: int | Tensor, factor: float | None, align_corners: bool, mode: str, dtype: DType
) -> Tensor:
    """Return the place of each new pixel among the old pixels."""
    places = astype(arange(new), dtype)
    if align_corners:
        steps = divide(astype(subtract(old, 1), dtype), astype(maximum(subtract(new, 1), 1), dtype))
        return multiply(places, steps)
    half = np.asarray(0.5, dtype)
    return maximum(
        subtract(multiply(add(places, half), _ratio(old, new, factor, mode, dtype)), half), np.asarray(0, dtype)
    )


def _between(x: Tensor, axis: int, old: int | Tensor, places: Tensor) -> Tensor:
    """Mix the two pixels on both sides of each place."""
    lower = floor(places)
    share = reshape(subtract(places, lower), (-1, *[1] * (len(x.shape or ()) - 1 - axis)))
    last, first = subtract(old, 1), astype(lower, int64)
    before, behind = take(x, minimum(first, last), axis=axis), take(x, minimum(add(first, 1), last), axis=axis)
    return add(multiply(before, subtract(np.asarray(1, x.dtype), share)), multiply(behind, share))
