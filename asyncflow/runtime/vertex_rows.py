"""Vertices of several runs whose sets are computed together: where their rows are, and which come next. No event loop.

All that vertices have or get stands in slabs, of which each run has a range: a row for a child that is not there, and
one for each of its vertices, in execution order. A step takes the next set of each run, whatever its number, and finds
the states of children by their rows. Ranges are given out one behind the other; when the end is reached, those of
runs that are still there move to the front of slabs with room for as many again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from asyncflow.vertex.levels import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncflow.graph.spec import Spec
    from asyncflow.values import Array
    from asyncflow.vertex.shared import InputCounts


@dataclass(slots=True)
class RunOfSets:
    """The vertices of one run.

    Attributes:
        set_starts: how many vertices are before each set, and all.
        ranks: of children: of each vertex in execution order by slot, or of all, one behind the other.
        child_starts: where those of each vertex begin among all; None where there are slots.
        initial: the parts of the state of a child that is not there.
        own: what the vertices have.
        base: the row of that child.
        done: how many sets have been computed.
    """

    set_starts: Sequence[int]
    ranks: Array
    child_starts: Array | None
    initial: Sequence[Array]
    own: Sequence[Array]
    base: int = 0
    done: int = 0

    @classmethod
    def of(cls, inputs: Sequence[Array], counts: InputCounts) -> RunOfSets:
        """From the inputs of its node."""
        starts, ranks, *more = inputs[: counts.schedule]
        states = counts.schedule + counts.states
        initial, own = inputs[counts.schedule : states], inputs[states : states + counts.own]
        return cls(starts.tolist(), ranks, more[0] if more else None, initial, own)

    @property
    def size(self) -> int:
        """Number of vertices."""
        return self.set_starts[-1]

    @property
    def is_done(self) -> bool:
        """Whether all sets have been computed."""
        return self.done == len(self.set_starts) - 1


class HasSets(Protocol):
    """Who is in a `VertexRows`.

    Attributes:
        sets: the vertices.
        is_gone: nobody wants their states any more.
    """

    sets: RunOfSets
    is_gone: bool


R = TypeVar("R", bound=HasSets)


@dataclass(slots=True)
class VertexRows(Generic[R]):
    """The runs whose sets are computed together.

    Attributes:
        specs: of the rows that sets give: states, and what else is asked for.
        members: the runs.
        waiting: those that join with the next step.
    """

    specs: Sequence[Spec]
    members: list[R] = field(default_factory=list)
    waiting: list[R] = field(default_factory=list)
    _results: list[Array] = field(default_factory=list)
    _own: list[Array] = field(default_factory=list)
    _end: int = 0
    _room: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there."""
        return not (self.members or self.waiting)

    def admit(self) -> None:
        """Takes in those that wait, and lets go of those that nobody wants any more."""
        self.members = [member for member in self.members if not member.is_gone]
        waiting, self.waiting = self.waiting, []
        for member in waiting:
            if not member.is_gone:
                self._add(member)

    def remove(self, members: Iterable[R]) -> None:
        """These are there no more."""
        left = set(members)
        self.members = [member for member in self.members if member not in left]
        if not self.members:
            self._end = 0

    def ended(self) -> list[tuple[R, list[Array]]]:
        """Those whose sets are all computed leave, with copies of their rows."""
        found = []
        for member in self.members:
            sets = member.sets
            if sets.is_done:
                own = slice(sets.base + 1, sets.base + 1 + sets.size)
                found.append((member, [slab[own].copy() for slab in self._results]))
        self.remove(member for member, _ in found)
        return found

    def rows(self, members: Sequence[R]) -> Array:
        """The rows of the next set of each."""
        sets = [member.sets for member in members]
        spans = [(each.base + 1, *each.set_starts[each.done : each.done + 2]) for each in sets]
        return ranges(np.array([base + a for base, a, _ in spans]), np.array([b - a for _, a, b in spans]))

    def inputs(self, members: Sequence[R], rows: Array) -> list[Array]:
        """Values of the vertices of these rows, and of their children; see `SharedSets.program`."""
        own = [slab.take(rows, axis=0) for slab in self._own]
        ranks, counts = [], []
        for member in members:
            sets = member.sets
            first, last = sets.set_starts[sets.done : sets.done + 2]
            if sets.child_starts is None:
                ranks.append(sets.ranks[first:last] + sets.base)
                continue
            starts = sets.child_starts[first : last + 1]
            ranks.append(sets.ranks[starts[0] : starts[-1]] + sets.base)
            counts.append(starts[1:] - starts[:-1])
        at = np.concatenate(ranks)
        n_states = len(members[0].sets.initial)
        children = [slab.take(at, axis=0) for slab in self._results[:n_states]]
        if not counts:
            return [*own, *children]
        count = np.concatenate(counts)
        starts = np.zeros(len(rows) + 1, np.int64)
        count.cumsum(out=starts[1:])
        return [*own, *children, np.repeat(np.arange(len(rows)), count), starts]

    def advance(self, members: Iterable[R], rows: Array, found: Sequence[Array]) -> None:
        """The next set of each has been computed."""
        for slab, values in zip(self._results, found, strict=True):
            slab[rows] = values
        for member in members:
            member.sets.done += 1

    def _add(self, member: R) -> None:
        sets = member.sets
        count = sets.size + 1
        if self._end + count > self._room:
            self._move(sets.own, count)
        sets.base, self._end = self._end, self._end + count
        for slab, initial in zip(self._results, sets.initial, strict=False):
            slab[sets.base] = initial
        for slab, values in zip(self._own, sets.own, strict=True):
            slab[sets.base + 1 : self._end] = values
        self.members.append(member)

    def _move(self, own: Sequence[Array], count: int) -> None:
        """To slabs with room for twice as much as there is, and for `count` rows more."""
        ordered = [member.sets for member in self.members]
        kept = ranges(
            np.array([each.base for each in ordered], int), np.array([each.size + 1 for each in ordered], int)
        )
        self._room = 2 * (len(kept) + count)
        wanted = [(spec.dtype, spec.shape) for spec in self.specs] + [(x.dtype, x.shape) for x in own]
        slabs = [
            np.zeros((self._room, *(extent or 0 for extent in (shape or ())[1:])), dtype) for dtype, shape in wanted
        ]
        for slab, before in zip(slabs, [*self._results, *self._own], strict=False):  # there are none at first
            slab[: len(kept)] = before.take(kept, axis=0)
        self._results, self._own = slabs[: len(self.specs)], slabs[len(self.specs) :]
        self._end = 0
        for each in ordered:
            each.base, self._end = self._end, self._end + each.size + 1


__all__ = ["HasSets", "RunOfSets", "VertexRows"]
