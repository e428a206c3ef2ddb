"""The elements of a queue as arrays, which checkpoints are made of, and back.

For each value of an element there are all of them behind one another, their ranks, and their extents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from asyncflow.errors import CheckpointError
from asyncflow.graph.shapes import is_subshape
from asyncflow.graph.spec import Spec
from asyncflow.state.waiting.element_orders import Element
from asyncflow.values import Array


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
    """The elements in such arrays, which nobody can write to.

    Raises:
        CheckpointError: there are none in them, or others.
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


__all__ = ["as_arrays", "as_elements"]
