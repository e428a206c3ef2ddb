"""`PriorityLine`: members that wait, by priority, by deadline and by arrival. It has no clock and no event loop.

These wait in such lines: runs for admission, members of batched calls, activations for rows of a pool, runs of shared
vertex maps, and calls of functions with limits. Two others do not. Elements of a queue with `order="priority"` leave
strictly by priority, without shares, and each may have a priority of its own: a heap holds them, in a room below the
runtime. Steps of shared work have turns by time in each place (`asyncflow.runtime.shared.step_turns`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from asyncflow.runtime.lines.shares import PriorityShares

M = TypeVar("M")
P = TypeVar("P", float, tuple[float, int])
"""A place: when the member is due, or also its number among members that are due then."""


class PriorityLine(Generic[P, M]):
    """Members that wait, ordered by priority and place.

    The lowest priority number goes first, but every other priority that waits has its share (`PriorityShares`). Within
    a priority, the lowest place goes first. Members with equal places go in the order in which they were added.

    For example, three members wait that take the same time::

        >>> line = PriorityLine[float, str]()
        >>> _ = line.add(0, 5.0, "due at 5")
        >>> _ = line.add(0, 2.0, "due at 2")
        >>> _ = line.add(7, 1.0, "background")
        >>> [line.pop(), line.pop(), line.pop()]
        ['due at 2', 'due at 5', 'background']

    In a longer line, one of the first eight members would have priority 7: its share is an eighth.

    What not to do: keep one list that is sorted by priority and place. Priorities take turns, so each turn would search
    such a list for the first member of every priority.

    Attributes:
        by_priority: the members of each priority that has any, the next one in front; change it by methods only.
        shares: whose turn it is.
    """

    __slots__ = ("_places", "by_priority", "shares")

    def __init__(self, shares: PriorityShares | None = None) -> None:
        self.by_priority: dict[int, list[M]] = {}
        self.shares = PriorityShares() if shares is None else shares
        self._places: dict[int, list[P]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.by_priority.values()))

    def __bool__(self) -> bool:
        return bool(self.by_priority)

    def __iter__(self) -> Iterator[M]:
        return chain.from_iterable(self.by_priority.values())

    def add(self, priority: int, place: P, member: M) -> int:
        """Add a member, and return how many of its priority go before it."""
        places = self._places.get(priority)
        if places is None:
            self._places[priority], self.by_priority[priority] = [place], [member]
            return 0
        index = bisect_right(places, place)
        places.insert(index, place)
        self.by_priority[priority].insert(index, member)
        return index

    def discard(self, priority: int, place: P, member: M) -> int | None:
        """Remove a member; return how many of its priority went before it, or None if it did not wait."""
        places = self._places.get(priority)
        if places is None:
            return None
        members = self.by_priority[priority]
        for index in range(bisect_left(places, place), len(places)):
            if members[index] is member:
                self.remove(priority, index)
                return index
            if places[index] != place:
                break
        return None

    def count_before(self, priority: int, place: P) -> int:
        """Return how many members of a priority go before such a place."""
        return bisect_left(self._places.get(priority, ()), place)

    def firsts(self) -> Iterator[M]:
        """Give the first member of each priority."""
        return (members[0] for members in self.by_priority.values())

    def next(self, cost: Callable[[M], float]) -> M:
        """Return the member whose turn it is, which goes on waiting, where members take different times."""
        lines = self.by_priority
        if len(lines) == 1:
            return next(iter(lines.values()))[0]
        return lines[self.shares.next({each: cost(members[0]) for each, members in lines.items()})][0]

    def take_turn(self) -> M:
        """Return the member whose turn it is, where all take the same. It goes on waiting, but has had its turn."""
        return self.by_priority[self.shares.pick(self.by_priority)][0]

    def pop(self) -> M:
        """Remove and return the member whose turn it is, where all take the same."""
        return self.remove(self.shares.pick(self.by_priority))

    def remove(self, priority: int, index: int = 0) -> M:
        """Remove and return the member of a priority at an index of its line."""
        members = self.by_priority[priority]
        member = members.pop(index)
        del self._places[priority][index]
        if not members:
            del self.by_priority[priority], self._places[priority]
        return member
