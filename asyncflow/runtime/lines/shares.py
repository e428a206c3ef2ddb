"""Shares of several priorities in one resource: a pure state machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping

SHARE = 1 / 8
"""Of all that is given away, that is each priority's own; an equal part, where more than eight wait."""

PATIENCE_S = 1.0
"""Seconds after which an entry without a deadline is due, so that entries with deadlines do not go before it for
ever.
"""


def share_of(count: int) -> float:
    """Return the share of each priority, when `count` of them wait."""
    return min(SHARE, 1 / count)


class PriorityShares:
    """The turns of priorities: the lowest number goes first, except for the shares of other waiting priorities.

    Of every cost that a priority takes, a share is owed to each other waiting priority. The next priority is owed at
    least its cost less its own share: the most owed first, then the lowest number.
    """

    __slots__ = ("_owed",)

    def __init__(self) -> None:
        self._owed: dict[int, float] = {}

    def next(self, costs: Mapping[int, float]) -> int:
        """Return the priority whose turn it is, given the cost of each waiting priority's first entry."""
        if not self._owed:
            return min(costs)
        own = 1 - share_of(len(costs))
        # Of priorities owed the same, the most important goes first: a burst with one request each keeps its order.
        left = {each: self._owed.get(each, 0.0) - own * cost for each, cost in costs.items()}
        most = max(left.values())
        return min(costs) if most < 0 else min(each for each, owed in left.items() if owed == most)

    def took(self, priority: int, cost: float, waiting: Collection[int]) -> None:
        """Record a turn of a priority, with the priorities that waited, including itself."""
        if len(waiting) == 1:
            self._owed.clear()
            return
        share, owed = share_of(len(waiting)), self._owed
        left = max(0.0, owed.get(priority, 0.0) - cost * (1 - share))
        self._owed = {each: owed.get(each, 0.0) + cost * share for each in waiting}
        self._owed[priority] = left

    def pick(self, waiting: Collection[int]) -> int:
        """Return the priority whose turn it is if all cost the same, and record the turn."""
        if len(waiting) == 1:
            return next(iter(waiting))
        priority = self.next(dict.fromkeys(waiting, 1.0))
        self.took(priority, 1.0, waiting)
        return priority
