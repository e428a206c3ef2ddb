"""The rows of a pooled loop: who is stepped, who waits, and where each one's variables stand. No event loop in here.

Values stand in slabs, one for each input that activations have of their own, the rows that are stepped first. One that
ends is replaced by the last of them, so a step works on a prefix and nothing is gathered: joining costs a row that is
copied in, leaving one that is copied out, and one that takes its place.

======================== =============================================================================================
event                    what happens
======================== =============================================================================================
`join`                   the activation waits
`admit`                  those that wait are rows behind the others, as far as there is room, first come first served
`settle`                 rows that do not go on leave, with their variables as results
`advance`                all rows have their next variables; then as `settle`
`remove`                 a row leaves, without results: it failed, or nobody wants it any more
======================== =============================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from asyncflow.values import Array

_FIRST_ROWS = 4


@dataclass(slots=True, eq=False)
class Activation:
    """One activation of the loop.

    Attributes:
        inputs: initial values of its variables, and what it captures.
        is_gone: nobody wants its results any more.
        since: how many steps the pool had made when it joined.
    """

    inputs: Sequence[Array]
    is_gone: bool = False
    since: int = 0


A = TypeVar("A", bound=Activation)


class PoolRows(Generic[A]):
    """Activations that share what is the same for all of them.

    Args:
        capacity: most rows.
        n_vars: how many inputs are variables; they come first.
        has_rows: of each input, whether each activation has its own.

    Invariant: ``rows[k]`` is whose values stand in row k of every slab.
    """

    def __init__(self, capacity: int, n_vars: int, has_rows: Sequence[bool]) -> None:
        self.rows: list[A] = []
        self.steps = 0
        """How many there have been."""
        self.waiting: deque[A] = deque()
        self._capacity, self._n_vars, self._has_rows = capacity, n_vars, has_rows
        self._slabs: list[Array] = []

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there."""
        return not (self.rows or self.waiting)

    def join(self, activation: A) -> None:
        """One waits for its first step."""
        self.waiting.append(activation)

    def admit(self) -> int:
        """How many rows were there before those that are new now."""
        before = len(self.rows)
        while self.waiting and len(self.rows) < self._capacity:
            activation = self.waiting.popleft()
            if not activation.is_gone:
                self._write(activation)
        return before

    def inputs(self, first: int, end: int) -> list[Array]:
        """The inputs of a range of rows: parts of slabs, which the next change of rows may write to."""
        some = self.rows[first].inputs
        pairs = zip(self._slabs, self._has_rows, some, strict=True)
        return [slab[first:end] if has_rows else same for slab, has_rows, same in pairs]

    def settle(self, first: int, goes_on: Array) -> list[tuple[A, list[Array]]]:
        """Has rows leave that do not go on.

        Args:
            first: the first row that the flags are about.
            goes_on: flags of it and those behind it.

        Returns:
            Those that have left, and their results.
        """
        if goes_on.all():
            return []
        ended = [first + int(row) for row in np.flatnonzero(~np.asarray(goes_on))]
        # A row's copy: the slab goes on changing.
        found = [(self.rows[row], [slab[row, ...].copy() for slab in self._slabs[: self._n_vars]]) for row in ended]
        for row in reversed(ended):
            self.remove(row)
        return found

    def advance(self, following: Sequence[Array], goes_on: Array) -> list[tuple[A, list[Array]]]:
        """Takes the next variables of all rows; see `settle`."""
        count = len(self.rows)
        for slab, values in zip(self._slabs, following, strict=False):
            slab[:count] = values
        self.steps += 1
        return self.settle(0, goes_on)

    def remove(self, row: int) -> A:
        """One leaves; the last row takes its place."""
        removed, last = self.rows[row], self.rows.pop()
        if last is not removed:
            self.rows[row] = last
            for slab, has_rows in zip(self._slabs, self._has_rows, strict=True):
                if has_rows:
                    slab[row] = slab[len(self.rows)]
        return removed

    def _write(self, activation: A) -> None:
        row = len(self.rows)
        if not self._slabs:
            self._slabs = [self._slab(value, _FIRST_ROWS) for value in activation.inputs]
        elif row == len(self._slabs[0]):
            grown = [self._slab(value, min(2 * row, self._capacity)) for value in activation.inputs]
            for slab, larger, has_rows in zip(self._slabs, grown, self._has_rows, strict=True):
                if has_rows:
                    larger[:row] = slab
            self._slabs = grown
        for slab, value, has_rows in zip(self._slabs, activation.inputs, self._has_rows, strict=True):
            if has_rows:
                slab[row] = value
        activation.since = self.steps
        self.rows.append(activation)

    def _slab(self, value: Array, count: int) -> Array:
        array = np.asarray(value)
        return np.empty((min(count, self._capacity), *array.shape), array.dtype)


__all__ = ["Activation", "PoolRows"]
