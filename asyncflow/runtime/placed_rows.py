"""The rows of a pooled loop in the memory of a device: slabs that are there, and who is in which row of them.

As in `asyncflow.runtime.pool`, but a row that comes or goes moves nothing yet: what rows there are to be is written
down, and one launch makes slabs of them before the next step (`PlacedRows.exchanged`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.errors import InternalError
from asyncflow.runtime.pool import A, RowGroup

if TYPE_CHECKING:
    from asyncflow.values import Array, Value


class PlacedRows(RowGroup[A]):
    """Activations whose values are in the memory of a device.

    Invariant: ``places[k]`` is where the values of ``rows[k]`` stand in every slab, or among the new rows, which are
    counted from -1 downwards.
    """

    def __init__(self, has_rows: Sequence[bool], n_vars: int, most: int, *, is_watched: bool) -> None:
        super().__init__(has_rows, n_vars, most, is_watched=is_watched)
        self.slabs: list[Value] = []
        """Of the inputs that have rows."""
        self.places: list[int] = []
        self._fresh: list[list[Array]] = []
        self._width = 0
        """How many rows the slabs have."""

    def inputs(self, first: int, end: int) -> list[Array]:
        """The inputs of a range of rows that are all new."""
        found = list(self.rows[first].inputs)
        rows = [self._fresh[-1 - place] for place in self.places[first:end]]
        for index, place in enumerate(self._own):
            found[place] = np.stack([values[index] for values in rows])
        return found

    def values(self, row: int) -> list[Array]:
        """The inputs of a row that is new."""
        place = self.places[row]
        if place >= 0:
            raise InternalError("the values of a row on a device are asked for on the host")
        found = list(self.rows[row].inputs)
        for index, own in enumerate(self._own):
            found[own] = self._fresh[-1 - place][index]
        return found

    def variables(self, row: int) -> list[Array]:
        """The variables of a row that is new."""
        return self.values(row)[: self._n_vars]

    def add(self, activation: A, values: Sequence[Array]) -> None:
        """A row behind the others."""
        self.rows.append(activation)
        self.places.append(-1 - len(self._fresh))
        self._fresh.append([np.asarray(values[place]) for place in self._own])

    def remove(self, row: int) -> A:
        """A row leaves; the last one takes its place."""
        removed, last, place = self.rows[row], self.rows.pop(), self.places.pop()
        if last is not removed:
            self.rows[row], self.places[row] = last, place
        return removed

    def exchanged(self) -> list[Value] | None:
        """Feeds of the loop's `exchange`, which makes slabs of the rows that there are now; None if they are those.

        Rows that stay come first, so the order may change.
        """
        if self.places == list(range(self._width)):
            return None
        order = sorted(range(len(self.rows)), key=lambda row: self.places[row] < 0)
        self.rows[:] = [self.rows[row] for row in order]
        places = [self.places[row] for row in order]
        keep = np.array([place for place in places if place >= 0], np.int64)
        fresh = [self._fresh[-1 - place] for place in places if place < 0]
        own = [np.asarray(self.rows[0].inputs[place]) for place in self._own]
        empty = [np.empty((0, *value.shape), value.dtype) for value in own]
        new = [np.stack([values[index] for values in fresh]) for index in range(len(own))] if fresh else empty
        return [keep, *(self.slabs or empty), *new]

    def settled(self, slabs: Sequence[Value]) -> None:
        """The slabs are those of the rows that there were at the time of `exchanged`, who are still there."""
        self.slabs, self._fresh = list(slabs), []
        self._width = len(self.rows)
        self.places = list(range(self._width))

    def all_inputs(self) -> list[Value]:
        """The inputs of all rows, in the order of the slabs."""
        found: list[Value] = list(self.rows[0].inputs)
        for place, slab in zip(self._own, self.slabs, strict=True):
            found[place] = slab
        return found

    @property
    def width(self) -> int:
        """How many slabs there are."""
        return len(self._own)

    def brought(self, found: Sequence[Array]) -> list[tuple[A, list[Array]]]:
        """All rows with their inputs, given the rows of the slabs that are among them, in their order."""
        brought, placed = [], 0
        for activation, place in zip(self.rows, self.places, strict=True):
            values = list(activation.inputs)
            for index, own in enumerate(self._own):
                values[own] = found[index][placed, ...] if place >= 0 else self._fresh[-1 - place][index]
            placed += place >= 0
            brought.append((activation, values))
        return brought

    def ended(self, goes_on: Array) -> list[int]:
        """The rows that do not go on, given flags in the order of the slabs."""
        return [row for row, place in enumerate(self.places) if not goes_on[place]]


__all__ = ["PlacedRows"]
