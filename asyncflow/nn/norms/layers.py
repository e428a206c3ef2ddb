"""Normalisation of layers: `rms_norm` and `group_norm`; `asyncflow.layer_norm` is an op."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for, is_symbolic
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import dtype_name, float32
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.ops.arithmetic.elementwise import add, divide, multiply, sqrt, square
from asyncflow.ops.arrays.datatypes import astype, finfo
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import extent_of, shape
from asyncflow.ops.axes import static_int
from asyncflow.ops.layers.nn import layer_norm
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.reductions.statistical import mean
from asyncflow.values import Array


def rms_norm(
    input: TensorLike,
    normalized_shape: int | Sequence[int],
    weight: TensorLike | None = None,
    eps: float | None = None,
) -> Tensor:
    """``input / sqrt(mean(input**2) + eps) * weight``, with the mean over the last axes.

    Args:
        input: floats; values of 16 bits are squared and summed in float32.
        normalized_shape: extents of the last axes.
        weight: of that shape and of the dtype of `input`; None for none.
        eps: added to the mean; None for the rounding of the dtype.

    Raises:
        DTypeError, ShapeError: `input` is no float, or shapes do not fit.
    """
    with graph_for(input, weight):
        x = _floats("rms_norm", input)
        extents = _extents(normalized_shape)
        rank = len(extents)
        if x.shape is not None and not (len(x.shape) >= rank and is_compatible(x.shape[-rank:], extents)):
            raise ShapeError(f"rms_norm: the last axes have extents {format_shape(extents)}; got {x!r}")
        wide = _wide(x)
        added = float(finfo(x.dtype).eps) if eps is None else float(eps)
        scale = sqrt(add(mean(square(wide), axis=tuple(range(-rank, 0)), keepdims=True), _like(added, wide)))
        normal = astype(divide(wide, scale), x.dtype)
        return normal if weight is None else multiply(normal, _affine("rms_norm: weight", weight, x, extents))


def group_norm(
    input: TensorLike,
    num_groups: int,
    weight: TensorLike | None = None,
    bias: TensorLike | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`input` with mean 0 and variance 1 over each group of channels, times `weight`, plus `bias`.

    Args:
        input: floats, ``(batch, channels, ...)``.
        num_groups: divides the number of channels.
        weight: ``(channels,)``, of the dtype of `input`; None for none.
        bias: likewise.
        eps: added to the variance.

    Raises:
        DTypeError, ShapeError: `input` is no float, has no channels, or shapes do not fit.
        GraphError: the number of channels is not known.
    """
    with graph_for(input, weight, bias):
        x, groups = _floats("group_norm", input), static_int(num_groups, "num_groups")
        if x.shape is None or (x.ndim or 0) < 2:
            raise ShapeError(f"group_norm: input is (batch, channels, ...); got {x!r}")
        channels = x.shape[1]
        if channels is None:
            raise GraphError(f"group_norm: the number of channels is known while the graph is built; got {x!r}")
        if groups < 1 or channels % groups:
            raise ShapeError(f"group_norm: {channels} channels are not divided into {groups} groups of one size")
        # One axis for all that a group has, which `layer_norm` then sums at once.
        inner = math.prod([extent_of(x, axis) for axis in range(2, len(x.shape))], start=channels // groups)
        normal = layer_norm(reshape(x, (extent_of(x, 0), groups, inner)), epsilon=float(eps))
        found = reshape(normal, shape(x))
        column = (channels, *[1] * (len(x.shape) - 2))
        for name, operation, affine in (("weight", multiply, weight), ("bias", add, bias)):
            if affine is not None:
                found = operation(found, reshape(_affine(f"group_norm: {name}", affine, x, (channels,)), column))
        return found


def _floats(what: str, value: TensorLike) -> Tensor:
    x = as_tensor(value)
    if kind_of(x.dtype) != "f":
        raise DTypeError(f"{what}: takes floats, not {dtype_name(x.dtype)}; convert with af.astype first")
    return x


def _extents(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    listed = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    found = tuple(static_int(extent, "normalized_shape") for extent in listed)
    if not found:
        raise ShapeError("rms_norm: normalized_shape has the extent of one axis or more")
    return found


def _affine(what: str, value: TensorLike, x: Tensor, extents: tuple[int, ...]) -> Tensor:
    found = as_tensor(value) if is_symbolic(value) else as_tensor(value, x.dtype)
    if found.dtype != x.dtype:
        raise DTypeError(f"{what} has the dtype of the input, {dtype_name(x.dtype)}; got {found!r}")
    if not is_compatible(found.shape, extents):
        raise ShapeError(f"{what} has shape {format_shape(extents)}; got {found!r}")
    return found


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= float32.itemsize else astype(x, float32)


def _like(value: float, x: Tensor) -> Array:
    return np.asarray(value, x.dtype)
