"""Arguments called ``axis``, and their effect on shapes."""

from __future__ import annotations

import math
import operator
from typing import TypeAlias

from asyncflow.errors import AxisError, GraphError, ShapeError, brief
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.shapes import Shape, format_shape, normalize_axis

Axes: TypeAlias = int | tuple[int, ...] | None
"""An axis, several axes, or None for all; negative numbers count from the back."""


def static_int(value: object, what: str) -> int:
    """`value` as a Python int.

    Raises:
        GraphError: it is a tensor or no integer.
    """
    if not isinstance(value, Tensor | bool) and hasattr(value, "__index__"):
        try:
            return operator.index(value)
        except TypeError:
            pass  # an array of several integers
    raise GraphError(f"{what} must be an int known while the graph is built, got {brief(value)}")


def check_flag(value: object, what: str) -> None:
    """Raises GraphError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise GraphError(f"{what} is True or False, got {brief(value)}")


def as_axes(axis: object) -> Axes:
    """`axis` as plain ints.

    Raises:
        GraphError: it is a tensor or holds something else than ints.
    """
    if axis is None:
        return None
    if isinstance(axis, tuple | list):
        return tuple(static_int(item, "an axis") for item in axis)
    return static_int(axis, "axis")


def normalize_axes(axis: Axes, rank: int) -> tuple[int, ...]:
    """The axes meant, counted from the front; all of them for None.

    Raises:
        AxisError: one is out of range or named twice.
    """
    if axis is None:
        return tuple(range(rank))
    axes = tuple(normalize_axis(item, rank) for item in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(axes)) < len(axes):
        raise AxisError(f"axis {axis} names an axis twice for a value of rank {rank}")
    return axes


def reduced(shape: Shape, axis: Axes, keepdims: bool) -> Shape:
    """The shape after reducing over `axis`.

    Raises:
        ShapeError: `axis` does not fit `shape`.
    """
    if shape is None:
        return () if axis is None and not keepdims else None
    axes = normalize_axes(axis, len(shape))
    if keepdims:
        return tuple(1 if i in axes else dim for i, dim in enumerate(shape))
    return tuple(dim for i, dim in enumerate(shape) if i not in axes)


def replaced(shape: Shape, axis: int, extent: int | None) -> Shape:
    """`shape` with another extent along `axis`.

    Raises:
        ShapeError: `axis` is out of range.
    """
    if shape is None:
        return None
    at = normalize_axis(axis, len(shape))
    return (*shape[:at], extent, *shape[at + 1 :])


def require_elements(shape: Shape, axis: Axes) -> None:
    """Raises ShapeError if a reduction over `axis` that has no identity is sure to meet no elements."""
    if shape is None:
        return
    axes = normalize_axes(axis, len(shape))
    rest = [dim for i, dim in enumerate(shape) if i not in axes]
    if any(shape[i] == 0 for i in axes) and 0 not in rest:
        raise ShapeError(f"nothing to choose from: a value of shape {format_shape(shape)} is empty along axis {axis}")


def flat_extent(shape: Shape) -> int | None:
    """Number of elements, or None if unknown; an extent of 0 settles it."""
    if shape is None:
        return None
    if 0 in shape:
        return 0
    known = [dim for dim in shape if dim is not None]
    return math.prod(known) if len(known) == len(shape) else None
