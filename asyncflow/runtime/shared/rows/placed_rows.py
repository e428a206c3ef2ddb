"""The rows of a pooled loop in the memory of a device: the slabs there, and which activation is in which row.

As in `PoolRows`, but a row that comes or goes moves nothing yet: the new set of rows is written down, and one launch
makes slabs of them before the next step (`PlacedRows.exchanged`). Slabs are never written to, so slabs of an earlier
step exist as long as they are referenced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from asyncflow.errors import InternalError
from asyncflow.runtime.shared.rows.pool import A, RowGroup
from asyncflow.values import Array, Value

_NEW = -1
"""Place of a row that is in no slab: its values are the values that it has joined with."""


class PlacedRows(RowGroup[A]):
    """Activations whose values are in the memory of a device.

    Invariant: ``places[k]`` is where the values of ``rows[k]`` stand in every slab, unless it is new.
    """

    def __init__(self, has_rows: Sequence[bool], n_vars: int, most: int, *, is_watched: bool) -> None:
        super().__init__(has_rows, n_vars, most, is_watched=is_watched)
        self.slabs: list[Value] = []
        """Of the inputs that have rows."""
        self.places: list[int] = []
        self._width = 0
        """Number of rows of the slabs."""

    def inputs(self, first: int, end: int) -> list[Array]:
        """The inputs of a range of rows that are all new."""
        new = [np.stack([activation.inputs[place] for activation in self.rows[first:end]]) for place in self._own]
        return self.with_rows(self.rows[first], new)

    def values(self, row: int) -> list[Array]:
        """The inputs of a row that is new."""
        if self.places[row] != _NEW:
            raise InternalError("the values of a row on a device are asked for on the host")
        return list(self.rows[row].inputs)

    def variables(self, row: int) -> list[Array]:
        """The variables of a row that is new."""
        return self.values(row)[: self._n_vars]

    def add(self, activation: A, values: Sequence[Array]) -> None:
        """A row behind the others."""
        self.rows.append(activation)
        self.places.append(_NEW)

    def remove(self, row: int) -> A:
        """A row leaves; the last one takes its place."""
        removed, last, place = self.rows[row], self.rows.pop(), self.places.pop()
        if last is not removed:
            self.rows[row], self.places[row] = last, place
        return removed

    def exchanged(self) -> list[Value] | None:
        """Return feeds of the loop's `exchange`, which makes slabs of the present rows; None if the slabs have these
        rows.

        Rows that stay come first, so the order may change.
        """
        if self.places == list(range(self._width)):
            return None
        order = sorted(range(len(self.rows)), key=lambda row: self.places[row] == _NEW)
        self.rows[:] = [self.rows[row] for row in order]
        self.places[:] = [self.places[row] for row in order]
        keep = np.array([place for place in self.places if place != _NEW], np.int64)
        fresh = [activation.inputs for activation in self.rows[len(keep) :]]
        own = [np.asarray(self.rows[0].inputs[place]) for place in self._own]
        empty = [np.empty((0, *value.shape), value.dtype) for value in own]
        new = [np.stack([inputs[place] for inputs in fresh]) for place in self._own] if fresh else empty
        return [keep, *(self.slabs or empty), *new]

    def settled(self, slabs: Sequence[Value]) -> None:
        """Set the slabs, made of the rows at the time of `exchanged`, all of which are still there."""
        self.slabs = list(slabs)
        self._width = len(self.rows)
        self.places = list(range(self._width))

    def all_inputs(self) -> Sequence[Value]:
        """The inputs of all rows, in the order of the slabs."""
        return self.with_rows(self.rows[0], cast("list[Array]", self.slabs))

    @property
    def width(self) -> int:
        """Return the number of slabs."""
        return len(self._own)
