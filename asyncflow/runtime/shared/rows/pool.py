"""The rows of a pooled loop: the activations that are stepped or wait, and the places of their variables.

The module has no event loop.

Values stand in slabs, one for each input that activations have of their own, the rows that are stepped first. A row
that ends is replaced by the last row, so a step works on a prefix and nothing is gathered. Joining costs one row that
is copied in. Leaving costs one row that is copied out, and another that takes its place. For example, rows 0 to 2 hold
`a`, `b` and `c`, and `b` ends: `c` moves to row 1, and the next step is of rows 0 and 1. If `d` joins, it has row 2.

Activations whose values have other shapes stand in slabs of their own, a group, which is a step of its own. If the body
stacks or slices stores, the rows of a group also have stores with equally many entries. Where values grow with each
step, activations that begin together stay together, and no later activation ever has their length. So new ones begin
once as many wait as there are rows. Then there are few groups: each is at least as large as all before it, less the
rows that have ended.

======================== =============================================================================================
event                    action
======================== =============================================================================================
`join`                   the activation waits
`admit`                  waiting ones become rows behind the others, as far as there is room: the lowest priority
                         number, but for a share of the rows for each other one; of one number, the first due
`settle`                 rows that do not go on leave, with their variables as results
`advance`                all rows of a group have their next variables; then as `settle`; rows that have become as
                         large as rows of another group join it
`give_up`                an activation is not wanted any more: it leaves with the next `drop`, without results
`park`                   a row leaves with all its values, and waits to `join` again
`single_out`             the only one there is needs no row: its values stay its inputs until others wait, too
======================== =============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat
from typing import Generic, Protocol, TypeVar

import numpy as np

from asyncflow.errors import InternalError
from asyncflow.graph.values.shapes import Shape
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.values import Array, Value

_FIRST_ROWS = 4
"""Rows for which the slabs of a new group have room; each time that they are full, the room doubles."""


_IN_SLABS = np.empty(0)
"""Stands for a value of an activation that is in the slabs of its group."""


class Activation(Protocol):
    """An activation of the loop.

    Attributes:
        inputs: values of its variables, and captured values; while it has a row, captured values alone.
        number: of its arrival, the last time that it joined.
        priority: activations with a lower number get rows first.
        due_s: of one priority, activations with a lower number get rows first.
        is_gone: True if its results are not wanted any more.
        is_checked: True if it is known to go on.
        since: number of steps that the pool has made without it; for a waiting one, minus the steps that it has made.
    """

    inputs: Sequence[Array]
    number: int
    priority: int
    due_s: float
    is_gone: bool
    is_checked: bool
    since: int


A = TypeVar("A", bound=Activation)


class RowGroup(Generic[A]):
    """Activations whose values have equal shapes.

    Args:
        has_rows: of each input, whether each activation has its own.
        n_vars: how many inputs are variables; they come first.
        most: rows that it will have at most.
        is_watched: rows carry the number of their owner, which is looked at when they leave.

    Invariant: ``rows[k]`` is the activation whose values stand in row k of every slab.
    """

    key: Hashable = None
    """The extents of a row, by which the pool finds the group; see `PoolRows.groups`."""
    is_counted = False
    """True if the memory of the slabs has been counted."""

    def __init__(self, has_rows: Sequence[bool], n_vars: int, most: int, *, is_watched: bool) -> None:
        self.rows: list[A] = []
        self._own = [place for place, own in enumerate(has_rows) if own]
        self._n_vars, self._most = n_vars, most
        self._slabs: list[Array] = []
        self._lent: list[Array] = []
        self._stores: list[Array] = []
        self._room = self._row_size = 0
        self._owners: Array | None = np.empty(0, np.int64) if is_watched else None

    def inputs(self, first: int, end: int) -> list[Array]:
        """The inputs of a range of rows: parts of slabs, which a step or the next change of rows may write to."""
        self._lent = [slab[first:end] for slab in self._slabs]
        return self.with_rows(self.rows[first], self._lent)

    def values(self, row: int) -> list[Array]:
        """Copies of the inputs of one row."""
        return self.with_rows(self.rows[row], [_taken(slab, row) for slab in self._slabs])

    def with_rows(self, activation: A, own: Sequence[Array]) -> list[Array]:
        """Return the inputs of an activation, with `own` as the values of the inputs that have rows."""
        found = list(activation.inputs)
        for place, value in zip(self._own, own, strict=True):
            found[place] = value
        return found

    def variables(self, row: int) -> list[Array]:
        """Copies of the variables of one row."""
        return [slab[row] if slab.dtype == object else slab[row, ...].copy() for slab in self._slabs[: self._n_vars]]

    def size(self) -> int:
        """Return the number of elements of its rows."""
        return len(self.rows) * self._row_size

    def extents(self, row: int, *, by_size: bool) -> Hashable:
        """Return the extents of the values of a row; see `_extents`."""
        return tuple(
            [_extents(slab[row] if slab.dtype == object else slab[0], by_size=by_size) for slab in self._slabs]
        )

    def add(self, activation: A, values: Sequence[Array]) -> None:
        """Add a row behind the others."""
        row = len(self.rows)
        if row == self._room:
            self._grow(values)
        for place, slab in zip(self._own, self._slabs, strict=True):
            slab[row] = values[place]
        if self._owners is not None:
            self._owners[row] = activation.number
        # Its slabs have them now: to keep them too would take twice the memory of its caches.
        activation.inputs = self.with_rows(activation, [_IN_SLABS] * len(self._own))
        self.rows.append(activation)

    def remove(self, row: int) -> A:
        """Remove a row; the last one takes its place."""
        removed, last = self.rows[row], self.rows.pop()
        if self._owners is not None and self._owners[row] != removed.number:
            raise InternalError(f"row {row} of a pooled loop holds the values of another activation")
        if last is not removed:
            self.rows[row] = last
            for slab in self._slabs if self._owners is None else (*self._slabs, self._owners):
                slab[row] = slab[len(self.rows)]
        for slab in self._stores:
            slab[len(self.rows)] = None  # drop the removed row's store now, not when another row joins
        return removed

    def write(self, following: Sequence[Array]) -> bool:
        """Take the next variables of all rows; return True if they have other shapes than before."""
        rows, fresh = len(self.rows), []
        for place, (values, mine) in enumerate(zip(following, self._lent or repeat(None), strict=False)):
            # A body that works in place returns the slab parts lent by `inputs`: they already hold the next values.
            if values is not mine or len(values) != rows:
                # Copy views: a body that swaps two variables returns views of slabs, which may be overwritten first.
                fresh.append((place, values if values.base is None else values.copy()))
        has_changed = False
        for place, values in fresh:
            slab = self._slabs[place]
            if values.shape[1:] == slab.shape[1:]:
                slab[:rows] = values
            else:
                # The results become the new slab, without spare room: the next row to join makes all slabs grow.
                self._slabs[place], self._room, has_changed = values, rows, True
        if has_changed:
            self._row_size, self.is_counted = sum(math.prod(slab.shape[1:]) for slab in self._slabs), False
        return has_changed

    def _grow(self, values: Sequence[Array]) -> None:
        rows = len(self.rows)
        self._room = min(max(2 * rows, _FIRST_ROWS), self._most)
        specs = [
            (np.shape(x), x.dtype) if hasattr(x, "dtype") else ((), object) for x in map(values.__getitem__, self._own)
        ]
        slabs = [np.empty((self._room, *shape), dtype) for shape, dtype in specs]
        for larger, slab in zip(slabs, self._slabs, strict=False):  # empty at first
            larger[:rows] = slab[:rows]
        self._slabs, self.is_counted = slabs, False
        self._row_size = sum(math.prod(shape) for shape, _ in specs)
        self._stores = [slab for slab in slabs if slab.dtype == object]
        if self._owners is not None:
            self._owners = np.resize(self._owners, self._room)  # further numbers are set when their rows join


def _extents(value: Value, *, by_size: bool) -> Hashable:
    """Return the shape of an array; of a store its number of entries, or () unless `by_size`."""
    shape: Hashable = getattr(value, "shape", None)
    if shape is not None:
        return shape
    return getattr(value, "size", ()) if by_size else ()


def _taken(slab: Array, row: int) -> Array:
    """Return a copy of a row: the slab goes on changing."""
    return slab[row] if slab.dtype == object else slab[row, ...].copy()


class PoolRows(Generic[A]):
    """Activations whose shared inputs are equal.

    Args:
        capacity: most rows.
        n_vars: number of inputs that are variables; they come first.
        has_rows: of each input, whether each activation has its own.
        is_watched: True if rows carry the number of their owner, which is checked when they leave.
        by_size: True if rows of one group have stores of equal sizes.
    """

    def __init__(
        self,
        capacity: int,
        n_vars: int,
        has_rows: Sequence[bool],
        *,
        is_watched: bool = False,
        by_size: bool = False,
    ) -> None:
        self.groups: dict[Hashable, RowGroup[A]] = {}
        """Groups by the extents of their values."""
        self.live = 0
        """Number of rows."""
        self.steps = 0
        """Number of steps made."""
        self.group_type: type[RowGroup[A]] = RowGroup
        """Type of the groups, by the place of their rows."""
        self.alone: A | None = None
        """The activation that was singled out."""
        self.alone_owns: dict[int, Array] = {}
        """Its variables that nothing else refers to, so that steps may write to them, by place."""
        self.line: PriorityLine[float, A] = PriorityLine()  # type arguments cost as much as the rest
        """By priority, the activation that is due first in front."""
        self._arrivals = 0
        self._capacity, self._n_vars, self._has_rows, self._is_watched = capacity, n_vars, has_rows, is_watched
        self._own = [place for place, own in enumerate(has_rows) if own]
        self.is_growing = False
        """True if values have grown with the last step: rows that begin at different steps never have equal shapes."""
        self._has_gone = False
        self._by_size = by_size

    @property
    def is_empty(self) -> bool:
        """Return whether the pool has no activation."""
        return not (self.live or self.line.by_priority or self.alone is not None)

    def shapes_apart(self, place: int) -> list[Shape]:
        """Return the shapes of one captured input among groups whose variables have equal shapes."""
        at, found = self._own.index(place), dict[Hashable, set[Shape]]()
        for key in self.groups:
            assert isinstance(key, tuple)
            found.setdefault(key[: self._n_vars], set()).add(key[at])
        most: set[Shape] = max(found.values(), key=len)
        return sorted(most, key=str)

    def everybody(self) -> Iterator[A]:
        """Return rows and waiting activations."""
        if self.alone is not None:
            yield self.alone
        for group in self.groups.values():
            yield from group.rows
        yield from self.line

    def join(self, activation: A) -> None:
        """Add an activation that waits for its first step, or for its next."""
        activation.number = self._arrivals
        self._arrivals += 1
        self.line.add(activation.priority, activation.due_s, activation)

    def give_up(self, activation: A) -> None:
        """Note that an activation's results are not wanted any more."""
        activation.is_gone = self._has_gone = True

    def single_out(self) -> A | None:
        """Return the only activation, which then has no row and does not wait; None if there are several."""
        if self.alone is None and self.live + len(self.line) == 1:
            for group in self.groups.values():
                self.join(self.park(group, 0))
            # `since` counted from the activation's own steps; now it counts the pool's steps without the activation.
            if not (activation := self.line.pop()).is_gone:
                activation.since += self.steps
                self.alone, self.alone_owns = activation, {}
        return None if self.line.by_priority else self.alone

    def has_returned(self) -> bool:
        """Return True if an activation that is the next of its priority had a row before."""
        return any(first.is_checked for first in self.line.firsts())

    def admit(self, most: int | None = None) -> list[tuple[RowGroup[A], int]]:
        """Groups with rows that are new and not known to go on, and the first of these.

        Args:
            most: number of activations that become rows at most; None for any number.
        """
        fresh: dict[Hashable, list[A]] = {}
        if self.alone is not None:
            self._seat(self.alone, fresh)
            self.alone, self.alone_owns = None, {}
        # Counted after the lone activation gets its row, so that it does not count against new rows.
        full = self._capacity if most is None else min(self._capacity, self.live + most)
        while self.line.by_priority and self.live < full:
            activation = self.line.pop()
            if not activation.is_gone:
                activation.since += self.steps
                self._seat(activation, fresh)
        found = []
        for key, activations in fresh.items():
            group = self._group(key)
            # New rows go behind old ones, so that the predicate is computed only for new rows.
            found.append((group, len(group.rows)))
            for activation in activations:
                activation.is_checked = True
                group.add(activation, activation.inputs)
        return found

    def _seat(self, activation: A, fresh: dict[Hashable, list[A]]) -> None:
        """Give an activation a row, now or with others of its shapes that are not known to go on."""
        self.live += 1
        by_size, own = self._by_size, [activation.inputs[place] for place in self._own]
        key = tuple([x.shape if hasattr(x, "shape") else _extents(x, by_size=by_size) for x in own])
        if activation.is_checked:
            self._group(key).add(activation, activation.inputs)
        else:
            fresh.setdefault(key, []).append(activation)

    def settle(self, group: RowGroup[A], first: int, goes_on: Array) -> list[tuple[A, list[Array]]]:
        """Remove rows that do not go on.

        Args:
            group: whose rows.
            first: the first row that the flags are about.
            goes_on: flags of that row and the rows behind it.

        Returns:
            The activations that have left, and their results.
        """
        if b"\0" not in goes_on.tobytes():  # most steps end no row; four times as fast as `all`
            return []
        ended = [first + row for row in np.logical_not(goes_on).nonzero()[0].tolist()]
        found = [(group.rows[row], group.variables(row)) for row in ended]
        for row in reversed(ended):  # backwards: the last row, which fills the gap, goes on or has left already
            self.remove(group, row)
        return found

    def advance(
        self, group: RowGroup[A], following: Sequence[Array], goes_on: Array, steps: int = 1
    ) -> list[tuple[A, list[Array]]]:
        """Set the variables of all rows of a group after `steps` steps; see `settle`."""
        self.steps += steps
        for other in self.groups.values():
            for activation in other.rows if other is not group else ():
                activation.since += steps  # these steps were not the activation's
        has_changed = group.write(following)
        if self._by_size and not has_changed:
            has_changed = any(group.extents(row, by_size=True) != group.key for row in range(len(group.rows)))
        self.is_growing = has_changed
        ended = self.settle(group, 0, goes_on)
        if has_changed and group.rows:
            self._regroup(group)
        return ended

    def part(
        self, group: RowGroup[A], parts: Sequence[tuple[int, Sequence[Array], Array]]
    ) -> list[tuple[A, list[Array]]]:
        """Set the variables of all rows of a group after a step that was made in parts; see `settle`.

        Their shapes may differ from part to part, so rows that go on join anew; rows that are in no part leave.

        Args:
            group: whose rows.
            parts: the first row of each, the variables of its rows, and the flags of rows that go on.
        """
        made = {
            group.rows[first + row]: ([_taken(values, row) for values in following], goes_on[row])
            for first, following, goes_on in parts
            for row in range(len(goes_on))
        }
        ended = []
        for row in reversed(range(len(group.rows))):
            activation = self.park(group, row)
            following, goes_on = made.get(activation, ([], False))
            if goes_on:
                activation.inputs = [*following, *activation.inputs[self._n_vars :]]
                activation.since -= 1  # a step of its own, which `steps` does not count
                self.join(activation)
            elif following:
                ended.append((activation, following))
        return ended

    def advance_alone(self, following: Sequence[Array], *, goes_on: bool, steps: int) -> None:
        """Set the variables of the single activation after `steps` steps; it leaves if it does not go on."""
        assert self.alone is not None
        self.steps += steps
        self.alone.inputs = [*following, *self.alone.inputs[self._n_vars :]]
        self.alone.is_checked = True
        if not goes_on:
            self.alone = None

    def park_alone(self) -> None:
        """Set the single activation aside, to wait to `join` again."""
        assert self.alone is not None
        self.alone.since -= self.steps
        self.alone, self.alone_owns = None, {}

    def drop(self) -> None:
        """Remove activations that are not wanted any more, rows and waiting ones."""
        if self._has_gone:
            self._has_gone = False
            self.remove_where(lambda activation: activation.is_gone)
            for activation in [each for each in self.line if each.is_gone]:
                self.line.discard(activation.priority, activation.due_s, activation)

    def remove_where(self, leaves: Callable[[A], bool]) -> list[A]:
        """Remove rows without results, and return them."""
        removed = [
            self.remove(group, row)
            for group in list(self.groups.values())
            for row in reversed(range(len(group.rows)))
            if leaves(group.rows[row])
        ]
        if self.alone is not None and leaves(self.alone):
            removed.append(self.alone)
            self.alone = None
        return removed

    def park(self, group: RowGroup[A], row: int) -> A:
        """Remove a row with all its values."""
        activation = group.rows[row]
        activation.inputs = group.values(row)
        activation.since -= self.steps
        return self.remove(group, row)

    def remove(self, group: RowGroup[A], row: int) -> A:
        """Remove a row; forget its group if that was the last one."""
        removed = group.remove(row)
        self.live -= 1
        if not group.rows:
            self.groups = {key: other for key, other in self.groups.items() if other is not group}
        return removed

    def _group(self, key: Hashable) -> RowGroup[A]:
        group = self.groups.get(key)
        if group is None:
            group = self.group_type(self._has_rows, self._n_vars, self._capacity, is_watched=self._is_watched)
            self.groups[key], group.key = group, key
        return group

    def _regroup(self, group: RowGroup[A]) -> None:
        """Move the rows of a group whose values have become of other extents to the groups of these."""
        self.groups = {key: other for key, other in self.groups.items() if other is not group}
        rows = len(group.rows) if self._by_size else 1  # rows of an array have one shape, stores may differ by row
        keys = [group.extents(row, by_size=self._by_size) for row in range(rows)]
        if len(set(keys)) == 1:
            other = self.groups.setdefault(keys[0], group)
            group.key = keys[0]
            if other is group:
                return
        for row, activation in enumerate(group.rows):
            self._group(keys[row % rows]).add(activation, group.values(row))
        group.rows.clear()
