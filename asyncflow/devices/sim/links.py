"""Resources that copies share: links between devices and copy engines, each used by one copy at a time."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence


class CopyLane:
    """A resource that one copy at a time can use.

    Copies are given in the order in which the host launches them. The host runs ahead of virtual time, so the copies
    can begin in another order. So a lane is no queue: a copy takes the first gap that is long enough.
    """

    __slots__ = ("_busy", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._busy: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"<CopyLane {self.name} {self._busy}>"

    def first_gap(self, earliest_ns: int, duration_ns: int) -> int:
        """Return the time at which a copy could begin, not before `earliest_ns`."""
        start, busy = earliest_ns, self._busy
        for index in range(bisect_right(busy, earliest_ns, key=_until), len(busy)):
            busy_from, busy_until = busy[index]
            if start + duration_ns <= busy_from:
                break
            start = max(start, busy_until)
        return start

    def occupy(self, started_ns: int, ended_ns: int, now_ns: int) -> None:
        """Take the lane for a copy; what ended before `now_ns` is forgotten."""
        del self._busy[: bisect_right(self._busy, now_ns, key=_until)]
        if ended_ns > started_ns:
            insort(self._busy, (started_ns, ended_ns))


def _until(busy: tuple[int, int]) -> int:
    return busy[1]


def first_common_gap(lanes: Sequence[CopyLane], earliest_ns: int, duration_ns: int) -> int:
    """Return the time at which a copy could begin that needs all `lanes` together."""
    start = earliest_ns
    while (later := max((lane.first_gap(start, duration_ns) for lane in lanes), default=start)) > start:
        start = later
    return start
