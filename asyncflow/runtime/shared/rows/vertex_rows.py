"""Vertices of several runs whose sets are computed together: the places of their rows, and the next sets. The module
has no event loop.

Runs that join at the same time are a group. Their graphs are ordered as one batch, and their rows stand side by side in
arrays of the group, in execution order. Row 0 is for an absent child. A step takes the next set of each group, whatever
its number, and finds the states of children by their ranks. A run ends with its own last set.

For example, two runs join, each with one graph: a root with two leaves, and a lone leaf. Set 0 has the three leaves in
rows 1 to 3, and set 1 the root in row 4, whose children have ranks 1 and 2. The second run ends after set 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.calls.batched import identity_of
from asyncflow.values import Array
from asyncflow.vertex.shared import InputCounts


@dataclass(frozen=True, slots=True)
class RunOfSets:
    """The vertices of one run.

    Attributes:
        graph: offsets, children, samples, and more arrays with an element for each vertex: types, heights.
        initial: the parts of the state of a child that is not there.
        own: inputs of the vertices, by number.
        size: number of vertices.
    """

    graph: Sequence[Array]
    initial: Sequence[Array]
    own: Sequence[Array]
    size: int

    @classmethod
    def of(cls, inputs: Sequence[Array], counts: InputCounts, pulls: Sequence[str | None]) -> RunOfSets:
        """Return the run of the inputs of its node.

        Raises:
            ShapeError: the number of rows is not the number of vertices.
        """
        states = counts.graph + counts.states
        graph, own = inputs[: counts.graph], inputs[states : states + counts.own]
        size = max(len(graph[0]) - 1, 0)
        for x, name in zip(own, [*pulls, None], strict=False):
            if len(x) != size:
                what = "a value computed before the sets" if name is None else f"pulls[{name!r}]"
                raise ShapeError(
                    f"{what} has a row for each vertex: the graph has {size} vertices, and this is of "
                    f"shape {format_shape(x.shape)}"
                )
        return cls(graph, inputs[counts.graph : states], own, size)

    @property
    def may_be_joined(self) -> bool:
        """Return whether other graphs may stand behind this one; its other faults are found with theirs."""
        offsets, children, samples, *more = self.graph
        # Such a fault would shift the vertex numbers of the next graph, and appear as a fault of that run.
        return bool(
            len(offsets)
            and len(samples)
            and offsets[0] == samples[0] == 0
            and offsets[-1] == len(children)
            and samples[-1] == self.size
            and all(len(x) == self.size for x in more)
        )

    @property
    def kind(self) -> Hashable:
        """Return a key that is equal for runs that may be in one group: their row 0 is the same."""
        return tuple(map(identity_of, self.initial))


class HasSets(Protocol):
    """A member of `VertexRows`.

    Attributes:
        sets: the vertices.
        is_gone: True if its states are not wanted any more.
    """

    sets: RunOfSets
    is_gone: bool


R = TypeVar("R", bound=HasSets)


def joined(graphs: Sequence[RunOfSets]) -> list[Array]:
    """Return the arrays of several graphs as the arrays of a single graph."""
    if len(graphs) == 1:
        return list(graphs[0].graph)
    arrays: list[list[Array]] = [[np.zeros(1, np.int64)], [], [np.zeros(1, np.int64)]]
    arrays += [[] for _ in graphs[0].graph[3:]]
    vertices = edges = 0
    for each in graphs:
        offsets, children, samples, *more = each.graph
        # Offsets count edges; children and samples count vertices. The first 0 of the offsets and samples stays once.
        moved = offsets[1:] + edges, children + vertices, samples[1:] + vertices, *more
        for parts, x in zip(arrays, moved, strict=True):
            parts.append(x)
        vertices, edges = vertices + each.size, edges + len(children)
    return list(map(np.concatenate, arrays))


@dataclass(frozen=True, slots=True)
class RunInGroup(Generic[R]):
    """A run in a group.

    Attributes:
        member: the run.
        first: number of its first vertex within the group.
        sets: number of sets that its vertices are in.
        roots: ranks of its roots.
    """

    member: R
    first: int
    sets: int
    roots: Array

    @property
    def vertices(self) -> slice:
        """Return its own vertices among the group's."""
        return slice(self.first, self.first + self.member.sets.size)


@dataclass(slots=True, eq=False)
class VertexGroup(Generic[R]):
    """The vertices of runs that joined together.

    Attributes:
        places: runs that are still there.
        positions: of vertices in execution order, by number.
        set_starts: where each set begins in that order, and where the last one ends.
        ranks: ranks of children, of each vertex in execution order by slot, or of all vertices, one behind the other.
        child_starts: where the children of each vertex begin among all; None where there are slots.
        own: inputs of the vertices, in execution order.
        found: results of the sets, behind a row 0.
        done: number of sets that have been computed.
    """

    places: list[RunInGroup[R]]
    positions: Array
    set_starts: list[int]
    ranks: Array
    child_starts: Array | None
    own: list[Array]
    found: list[Array]
    done: int = 0
    _edges: list[int] = field(init=False)
    """Positions at which the children of each set begin among all."""
    _counts: Array | None = None
    """Number of children of each vertex."""

    def __post_init__(self) -> None:
        self._edges = [] if self.child_starts is None else self.child_starts[self.set_starts].tolist()
        self._counts = None if self.child_starts is None else self.child_starts[1:] - self.child_starts[:-1]

    @classmethod
    def of(cls, members: Sequence[R], schedule: Sequence[Array], specs: Sequence[Spec]) -> VertexGroup[R]:
        """Return the group of members with vertices, in the order that `SharedSets.order` gives for all of their
        graphs.
        """
        order, positions, set_starts, root_ranks, ranks, *child_starts = schedule
        sizes = np.array([member.sets.size for member in members])
        firsts = sizes.cumsum() - sizes
        # The vertex of a run that is last in execution order tells how many sets the run needs. `reduceat` has no empty
        # parts: members without vertices never get here (`sorted_out`).
        sets = set_starts.searchsorted(np.maximum.reduceat(positions, firsts), side="right").tolist()
        # Roots ascend by number, so a run's roots stand together. Ranks are positions plus 1, as row 0 is reserved.
        roots = order[root_ranks - 1].searchsorted(firsts).tolist()
        places = [
            RunInGroup(member, first, count, root_ranks[start:end])
            for member, first, count, start, end in zip(
                members, firsts.tolist(), sets, roots, [*roots[1:], len(root_ranks)], strict=True
            )
        ]
        own = [np.concatenate(rows).take(order, axis=0) for rows in zip(*(x.sets.own for x in members), strict=True)]
        found = [np.empty((len(order) + 1, *(extent or 0 for extent in (x.shape or ())[1:])), x.dtype) for x in specs]
        # Only row 0 is set: each set writes its rows before the parents' set reads them.
        for slab, initial in zip(found, members[0].sets.initial, strict=False):
            slab[0] = initial
        return cls(places, positions, set_starts.tolist(), ranks, child_starts[0] if child_starts else None, own, found)

    @property
    def members(self) -> list[R]:
        """Return the members that are still there."""
        return [place.member for place in self.places]

    def arrays(self) -> Iterable[Array]:
        """Return the group's rows."""
        return chain(self.own, self.found)

    @property
    def next_rows(self) -> slice:
        """The next set, in execution order."""
        return slice(*self.set_starts[self.done : self.done + 2])

    def next_inputs(self, n_states: int) -> list[Array]:
        """Rows of the vertices of the next set, states of children, and, without slots, how many each has."""
        rows, counts = self.next_rows, []
        if self._counts is None:
            ranks = self.ranks[rows]
        else:
            ranks = self.ranks[slice(*self._edges[self.done : self.done + 2])]
            counts = [self._counts[rows]]
        return [*[x[rows] for x in self.own], *[x.take(ranks, axis=0) for x in self.found[:n_states]], *counts]

    def ended(self) -> list[RunInGroup[R]]:
        """Remove and return the runs whose sets are all computed."""
        done = self.done
        ended = [place for place in self.places if place.sets == done]
        if ended:
            self.places = [place for place in self.places if place.sets != done]
        return ended

    def alone(self, place: RunInGroup[R]) -> VertexGroup[R]:
        """Return the group of a single run: this group, if it never had another."""
        if place.member.sets.size == len(self.positions):
            return self
        kept = np.sort(self.positions[place.vertices])
        # Map old ranks to new ones. Rank 0 stays 0, as do ranks of other runs, which no child here refers to.
        ranks = np.zeros(len(self.positions) + 1, np.int64)
        ranks[kept + 1] = np.arange(1, len(kept) + 1)
        starts, chosen = None, kept
        if self.child_starts is not None:
            first, counts = self.child_starts[kept], self.child_starts[kept + 1] - self.child_starts[kept]
            starts = np.concatenate([[0], counts.cumsum()])
            chosen = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
        behind = np.concatenate([[0], kept + 1])
        return VertexGroup(
            [RunInGroup(place.member, 0, place.sets, ranks[place.roots])],
            ranks[self.positions[place.vertices] + 1] - 1,
            kept.searchsorted(self.set_starts[: place.sets + 1]).tolist(),
            ranks[self.ranks[chosen]],
            starts,
            [x.take(kept, axis=0) for x in self.own],
            [x.take(behind, axis=0) for x in self.found],
            self.done,
        )

    def results(self, place: RunInGroup[R], n_states: int, *, of_all: bool) -> list[Array]:
        """Return the states of a run's roots and, if asked for, all results of its vertices."""
        roots = [x.take(place.roots, axis=0) for x in self.found[:n_states]]
        if not of_all:
            return roots
        ranks = self.positions[place.vertices] + 1
        return [*roots, *(x.take(ranks, axis=0) for x in self.found)]


@dataclass(slots=True)
class VertexRows(Generic[R]):
    """The runs whose sets are computed together.

    Attributes:
        specs: of the rows that sets give: states, and other requested values.
        n_states: number of these that are states.
        gives_rows: True if runs get rows of all their vertices, False for states of roots alone.
        groups: groups of runs.
    """

    specs: Sequence[Spec]
    n_states: int
    gives_rows: bool
    groups: list[VertexGroup[R]] = field(default_factory=list)

    @property
    def members(self) -> list[R]:
        """Return the runs that have joined."""
        return list(chain.from_iterable(group.members for group in self.groups))

    @property
    def is_for_one(self) -> bool:
        """Return whether a single run is there."""
        return len(self.groups) == 1 and len(self.groups[0].places) == 1

    def sorted_out(self, waiting: Iterable[R]) -> tuple[list[list[R]], list[tuple[R, list[Array]]]]:
        """Return waiting members in lists to put in order together, and, with results, empty members."""
        together: dict[Hashable, list[R]] = {}
        apart, empty = [], []
        for member in waiting:
            sets = member.sets
            if member.is_gone:
                continue
            if not sets.may_be_joined:
                apart.append([member])  # scheduled alone, to report its own fault
            elif sets.size:
                together.setdefault(sets.kind, []).append(member)
            else:
                empty.append((member, self._nothing()))
        return [*apart, *together.values()], empty

    def _nothing(self) -> list[Array]:
        # With no rows, unknown extents may have any value.
        rows = [np.empty((0, *(extent or 0 for extent in (x.shape or ())[1:])), x.dtype) for x in self.specs]
        return [*rows[: self.n_states], *(rows if self.gives_rows else ())]

    def drop(self) -> list[VertexGroup[R]]:
        """Remove runs that are not wanted any more; return the groups of the staying runs."""
        return self.part([group for group in self.groups if any(member.is_gone for member in group.members)])

    def part(self, groups: Sequence[VertexGroup[R]]) -> list[VertexGroup[R]]:
        """Make a group of each wanted run in these groups."""
        parted = [group.alone(place) for group in groups for place in group.places if not place.member.is_gone]
        if groups:
            self.remove(groups)
            self.groups += parted
        return parted

    def remove(self, groups: Iterable[VertexGroup[R]]) -> None:
        """Remove these groups."""
        left = set(groups)  # groups compare by identity: equal arrays would be compared element by element
        self.groups = [group for group in self.groups if group not in left]

    def inputs(self, groups: Sequence[VertexGroup[R]]) -> list[Array]:
        """Values of the vertices of the next set of each, and of their children; see `SharedSets.program`."""
        parts = [group.next_inputs(self.n_states) for group in groups]
        found = parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]
        if groups[0].child_starts is None:
            return found
        # Numbers within this step, not in the schedule, as the step joins rows of several groups.
        count = found.pop()
        starts = np.zeros(len(count) + 1, np.int64)
        count.cumsum(out=starts[1:])
        return [*found, np.arange(len(count)).repeat(count), starts]

    def advance(self, groups: Iterable[VertexGroup[R]], found: Sequence[Array]) -> None:
        """Note the results of the next set of each group."""
        first = 0
        for group in groups:
            rows = group.next_rows
            last = first + rows.stop - rows.start
            for slab, values in zip(group.found, found, strict=True):
                slab[rows.start + 1 : rows.stop + 1] = values[first:last]
            group.done += 1
            first = last

    def ended(self) -> Iterator[tuple[R, list[Array]]]:
        """Remove runs whose sets are all computed, and yield them with their results."""
        for group in self.groups:
            for place in group.ended():
                yield place.member, group.results(place, self.n_states, of_all=self.gives_rows)
        self.groups = [group for group in self.groups if group.places]
