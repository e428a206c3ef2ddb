"""Elements as arrays: some of them as one batch; all of a queue, which checkpoints are made of, and back.

In a checkpoint, for each value of an element there are all of them behind one another, their ranks, and their extents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.errors import CheckpointError, ShapeError
from asyncflow.graph.values.shapes import format_shape, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.state.elements.element_orders import Element
from asyncflow.values import Array

Pads: TypeAlias = "tuple[int | float | complex | str, ...]"
"""Padding for open extents, for each leaf of an element."""


def open_axes(spec: Spec) -> list[int]:
    """The axes of an element whose extents are not the same for all."""
    return [axis for axis, extent in enumerate(spec.shape or ()) if extent is None]


def stacked(specs: Sequence[Spec], pads: Pads | None, elements: Sequence[Element]) -> tuple[Array, ...]:
    """Return a batch of each leaf, followed by the original lengths of padded leaves.

    Args:
        specs: of the leaves of an element.
        pads: what open extents are filled up with, to the longest of the batch; None where they have to be equal.
        elements: any number.

    Raises:
        ShapeError: the elements differ in shape, and there is no padding.
    """
    batches: list[Array] = []
    lengths: list[Array] = []
    columns = zip(*elements, strict=True) if elements else ((),) * len(specs)
    for place, (spec, values) in enumerate(zip(specs, columns, strict=True)):
        axes = open_axes(spec)
        if not values:
            batches.append(np.empty((0, *(extent or 0 for extent in spec.shape or ())), spec.dtype))
            if pads is not None and axes:
                lengths.append(np.empty((0,) if len(axes) == 1 else (0, len(axes)), np.int64))
            continue
        if pads is None or not axes:
            try:
                batches.append(np.stack(values) if spec.shape else np.array(values, spec.dtype))
            except ValueError:
                seen = " and ".join(map(format_shape, sorted({np.shape(value) for value in values})[:2]))
                raise ShapeError(f"elements of one batch have shapes {seen}; fill them up with pad=0") from None
            continue
        shapes = np.array([value.shape for value in values], np.int64)
        batch = np.full((len(values), *shapes.max(axis=0)), pads[place], spec.dtype)
        for row, value in zip(batch, values, strict=True):
            row[tuple(map(slice, value.shape))] = value
        batches.append(batch)
        lengths.append(shapes[:, axes[0] if len(axes) == 1 else axes])
    return (*batches, *lengths)


def as_arrays(elements: Sequence[Element], specs: Sequence[Spec]) -> dict[str, Array]:
    """Arrays that hold all elements."""
    arrays: dict[str, Array] = {}
    for place, spec in enumerate(specs):
        values = [np.asarray(element[place]) for element in elements]
        flat = [value.ravel() for value in values]
        arrays[f"{place}.values"] = np.concatenate([np.empty(0, spec.dtype), *flat]).astype(spec.dtype, copy=False)
        arrays[f"{place}.ranks"] = np.array([value.ndim for value in values], np.int64)
        arrays[f"{place}.extents"] = np.array([extent for value in values for extent in value.shape], np.int64)
    return arrays


def as_elements(arrays: Mapping[str, Array], specs: Sequence[Spec]) -> list[Element]:
    """Return the elements in such arrays, read-only.

    Raises:
        CheckpointError: the arrays lack them, or have elements of another spec.
    """
    columns = []
    for place, spec in enumerate(specs):
        values, ranks, extents = (arrays.get(f"{place}.{part}") for part in ("values", "ranks", "extents"))
        if values is None or ranks is None or extents is None or values.dtype != spec.dtype:
            raise CheckpointError(f"value {place} of its elements is not {spec} there, or is missing")
        columns.append(_parted(values, ranks.tolist(), extents.tolist(), spec, place))
    if len({len(column) for column in columns}) > 1:
        raise CheckpointError("its elements have not all of their values there")
    return list(zip(*columns, strict=True))


def _parted(values: Array, ranks: list[int], extents: list[int], spec: Spec, place: int) -> list[Array]:
    parts: list[Array] = []
    begin = first = 0
    for rank in ranks:
        shape = tuple(extents[first : first + rank])
        end = begin + int(np.prod(shape, dtype=np.int64))
        if len(shape) < rank or end > len(values) or not is_subshape(shape, spec.shape):
            raise CheckpointError(f"value {place} of an element is no {spec} there")
        part = values[begin:end].reshape(shape).copy()
        part.flags.writeable = False
        parts.append(part if rank else part[()])
        begin, first = end, first + rank
    return parts
