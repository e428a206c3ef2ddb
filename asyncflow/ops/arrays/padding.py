"""`pad`: more elements around a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, constant, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, define
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import static_int
from asyncflow.values import Array, Kernel, Namespace

Widths: TypeAlias = tuple[tuple[int, int], ...]


def _pad_spec(x: Spec, value: Spec, *, widths: Widths) -> Spec:
    if value.dtype != x.dtype:
        raise DTypeError(f"the value has the dtype of the padded array, not {value} beside {x}")
    if value.rank not in (0, None):
        raise ShapeError(f"takes one value for all that is added, of rank 0; got {value}")
    if x.shape is None:
        return Spec(x.dtype, (None,) * len(widths))
    if len(x.shape) != len(widths):
        raise ShapeError(f"{len(widths)} pairs of widths need a value of that rank, not {format_shape(x.shape)}")
    pairs = zip(x.shape, widths, strict=True)
    return Spec(x.dtype, tuple(None if dim is None else before + dim + after for dim, (before, after) in pairs))


def _pad_kernel(xp: Namespace, *, widths: Widths) -> Kernel:
    def kernel(x: Array, value: Array) -> Array:
        x = xp.asarray(x)
        dims = [before + dim + after for dim, (before, after) in zip(x.shape, widths, strict=True)]
        result = xp.full(tuple(dims), value, dtype=x.dtype)
        result[inner_key(widths)] = x
        return result

    return kernel


PAD = define("pad", _pad_spec, _pad_kernel, traits=OPAQUE)


def inner_key(widths: Widths) -> tuple[slice, ...]:
    """Return the key of the value within the padded one."""
    return tuple(slice(before, -after if after else None) for before, after in widths)


def pad(x: TensorLike, widths: int | Sequence[int | Sequence[int]], /, *, value: TensorLike | None = None) -> Tensor:
    """Return `x` with more elements before and behind its own along each axis.

    Args:
        x: any tensor.
        widths: number of added elements: an int for both ends of every axis; a pair ``(before, after)`` for every axis,
            or a sequence with an int or a pair for each axis.
        value: a scalar of the dtype of `x` for the added elements; None for zeros (false, empty strings).

    Raises:
        ShapeError: the rank of `x` is not known and `widths` does not say it either, or they differ.
        GraphError: a width is below 0.
    """
    with graph_for(x):
        tensor = as_tensor(x)
        filling = constant(np.zeros((), tensor.dtype)) if value is None else as_tensor(value, tensor.dtype)
        return apply(PAD, tensor, filling, widths=_pairs(widths, tensor))[0]


def _pairs(widths: int | Sequence[int | Sequence[int]], x: Tensor) -> Widths:
    listed: Sequence[int | Sequence[int | Sequence[int]]] = (
        list(widths) if isinstance(widths, tuple | list) else [widths]
    )
    is_pair = len(listed) == 2 and not any(isinstance(item, tuple | list) for item in listed)
    pairs = [_pair(listed)] if is_pair else [_pair(item) for item in listed]
    if is_pair or not isinstance(widths, tuple | list):
        if x.ndim is None:
            raise ShapeError(f"pad: the rank of {x!r} is not known; give a pair of widths for each axis")
        pairs *= x.ndim
    if any(width < 0 for pair in pairs for width in pair):
        raise GraphError(f"pad: widths are 0 or more, got {widths}; to take elements away, index: x[1:-1]")
    return tuple(pairs)


def _pair(item: object) -> tuple[int, int]:
    if not isinstance(item, tuple | list):
        width = static_int(item, "a width")
        return width, width
    if len(item) != 2:
        raise GraphError(f"pad: an axis has two widths, before and after; got {item!r}")
    return static_int(item[0], "a width"), static_int(item[1], "a width")
