"""Partial shapes: shapes as far as known before the graph runs.

A shape is ``None`` (unknown rank) or a tuple whose items are ints, or ``None`` for an unknown extent. ``()`` is a
scalar. Shapes are plain values; these functions are all there is to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from asyncflow.errors import AxisError, ShapeError

Shape: TypeAlias = tuple[int | None, ...] | None
ShapeLike: TypeAlias = "Sequence[int | None] | int | None"


def as_shape(shape: ShapeLike) -> Shape:
    """The shape that an int, a sequence of ints and Nones, or None stands for."""
    if shape is None:
        return None
    try:
        dims = tuple(shape)  # type: ignore[arg-type]
    except TypeError:
        dims = (shape,)  # type: ignore[assignment]
    for dim in dims:
        if dim is not None and (isinstance(dim, bool) or not hasattr(dim, "__index__") or dim < 0):
            raise ShapeError(f"a shape holds non-negative ints, or None where unknown; got {dims!r}")
    return tuple(None if dim is None else int(dim) for dim in dims)


def format_shape(shape: Shape) -> str:
    """``[2,?]``, or ``[...]`` for unknown rank."""
    if shape is None:
        return "[...]"
    return "[" + ",".join("?" if dim is None else str(dim) for dim in shape) + "]"


def is_static(shape: Shape) -> bool:
    """Return True if rank and every extent are known."""
    return shape is not None and None not in shape


def size_of(shape: Shape) -> int | None:
    """Number of elements, or None if unknown."""
    return None if shape is None or None in shape else math.prod(shape)  # type: ignore[arg-type]


def is_compatible(a: Shape, b: Shape) -> bool:
    """Return True if one value could have both shapes."""
    if a is None or b is None or a == b:
        return True
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):  # noqa: SIM110 - every fed value comes here, and a generator is slow
        if x != y and x is not None and y is not None:
            return False
    return True


def is_subshape(specific: Shape, general: Shape) -> bool:
    """Return True if every value of shape `specific` also has shape `general`."""
    if general is None:
        return True
    if specific is None or len(specific) != len(general):
        return False
    return all(y is None or x == y for x, y in zip(specific, general, strict=True))


def merge(a: Shape, b: Shape) -> Shape:
    """Merge all facts of both: the shape of a value that has both.

    Raises:
        ShapeError: no value has both.
    """
    if a is None or b is None:
        return b if a is None else a
    if not is_compatible(a, b):
        raise ShapeError(f"shapes {format_shape(a)} and {format_shape(b)} cannot be of one value")
    return tuple(y if x is None else x for x, y in zip(a, b, strict=True))


def relax(a: Shape, b: Shape) -> Shape:
    """The most specific shape of a value that has shape `a` or shape `b`: ``[1,2]`` and ``[2,2]`` give ``[?,2]``."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape that `shapes` broadcast to.

    Raises:
        ShapeError: they do not broadcast together.
    """
    listed = list(shapes)
    if None in listed:
        return None
    if listed and listed.count(listed[0]) == len(listed):
        return listed[0]
    known = [shape for shape in listed if shape is not None]
    rank = max((len(shape) for shape in known), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in known]
    return tuple(_broadcast_dim(dims, known) for dims in zip(*padded, strict=True))


def _broadcast_dim(dims: Sequence[int | None], shapes: Sequence[Shape]) -> int | None:
    fixed = {dim for dim in dims if dim is not None and dim != 1}
    if len(fixed) > 1:
        seen = " and ".join(format_shape(shape) for shape in shapes)
        raise ShapeError(f"shapes {seen} do not broadcast: extents must be equal or 1, found {sorted(fixed)}")
    if fixed:
        return fixed.pop()
    return None if None in dims else 1


def normalize_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front.

    Raises:
        AxisError: it is not an axis of a value of that rank.
    """
    if not -rank <= axis < rank:
        raise AxisError(f"axis {axis} is out of range for a value of rank {rank}; use {-rank} to {rank - 1}")
    return axis % rank
