"""Values of a computation to keep, so that others can be computed again, at the least cost: a minimum cut.

Each value can be kept, at a cost, or computed again from its inputs, at a price, or it is not needed. A cut of a
network chooses: there is an arc through each value, which is cut if the value is kept. Behind the cut are the values
that are computed again. The greatest flow is as large as the smallest cut (Ford and Fulkerson 1956); it is found along
shortest paths, many at a time (Dinic 1970).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """The numbers of the kept values, and of the values computed again."""

    kept: frozenset[int]
    again: frozenset[int]


def smallest_cut(
    costs: Sequence[int], prices: Sequence[int | None], inputs: Sequence[Collection[int]], needed: Collection[int]
) -> Cut:
    """Return the cut of least cost; of several, the cut that computes as little as possible again.

    Args:
        costs: of keeping each value.
        prices: of computing each again, once its inputs are there; None where that cannot be done.
        inputs: the values that each is computed from, except values that are there anyway.
        needed: the values that have to be there.
    """
    count = len(costs)
    source, sink = 2 * count, 2 * count + 1
    without_end = sum(costs) + sum(price or 0 for price in prices) + 1
    network = _Network(2 * count + 2)
    for value, cost in enumerate(costs):
        price = prices[value]
        network.connect(source, 2 * value, without_end if price is None else price)
        network.connect(2 * value, 2 * value + 1, cost)
        for given in inputs[value]:
            network.connect(2 * given + 1, 2 * value, without_end)
    for value in needed:
        network.connect(2 * value + 1, sink, without_end)
    network.fill(source, sink)
    behind = network.leading_to(sink)
    kept = (value for value in range(count) if 2 * value + 1 in behind and 2 * value not in behind)
    return Cut(frozenset(kept), frozenset(value for value in range(count) if 2 * value in behind))


class _Network:
    """Arcs with room for a flow; the arc number `k` and its way back, number ``k ^ 1``, share theirs."""

    def __init__(self, count: int) -> None:
        self.leaving: list[list[int]] = [[] for _ in range(count)]
        self.ends: list[int] = []
        self.room: list[int] = []

    def connect(self, start: int, end: int, room: int) -> None:
        """Adds an arc."""
        for here, there, free in ((start, end, room), (end, start, 0)):
            self.leaving[here].append(len(self.ends))
            self.ends.append(there)
            self.room.append(free)

    def fill(self, source: int, sink: int) -> None:
        """Lets as much flow as can."""
        while (depths := self._depths(source))[sink] >= 0:
            tried = [0] * len(self.leaving)
            while path := self._path(source, sink, depths, tried):
                least = min(self.room[arc] for arc in path)
                for arc in path:
                    self.room[arc] -= least
                    self.room[arc ^ 1] += least

    def leading_to(self, sink: int) -> set[int]:
        """The points from which more could flow to `sink`."""
        found, open_ = {sink}, [sink]
        while open_:
            for arc in self.leaving[open_.pop()]:
                start = self.ends[arc]
                if self.room[arc ^ 1] and start not in found:
                    found.add(start)
                    open_.append(start)
        return found

    def _depths(self, source: int) -> list[int]:
        depths = [-1] * len(self.leaving)
        depths[source] = 0
        reached = [source]
        for point in reached:
            for arc in self.leaving[point]:
                end = self.ends[arc]
                if self.room[arc] and depths[end] < 0:
                    depths[end] = depths[point] + 1
                    reached.append(end)
        return depths

    def _path(self, source: int, sink: int, depths: list[int], tried: list[int]) -> list[int]:
        """The arcs of a shortest path with room; those `tried` before lead nowhere any more."""
        path: list[int] = []
        point = source
        while point != sink:
            leaving = self.leaving[point]
            while tried[point] < len(leaving):
                arc = leaving[tried[point]]
                if self.room[arc] and depths[self.ends[arc]] == depths[point] + 1:
                    break
                tried[point] += 1
            if tried[point] < len(leaving):
                path.append(leaving[tried[point]])
                point = self.ends[path[-1]]
            elif path:
                point = self.ends[path.pop() ^ 1]
                tried[point] += 1
            else:
                return path
        return path
