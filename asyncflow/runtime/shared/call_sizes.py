"""The size of a call when not all deadlines can be met: the size with the most answers in time per time.

Small calls meet the first deadline, and cost more for each member. That pays while every waiting member can be answered
in time so. Under overload other members are late for it, and more of them the smaller calls are. For example, a call
takes 20 ms and 4 ms for each member, 260 requests come a second, and each is of use within 200 ms. Calls that meet
every first deadline have two members and answer 65 requests a second; calls of 22 answer 200, and drop members that
they would answer late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

_EACH = 8
"""Every size up to this is tried; of larger sizes, four in each doubling."""


def size_under_overload(
    lines: Sequence[Sequence[float]], now_ns: float, most: int, cost_ns: Callable[[int], float]
) -> int | None:
    """Return how many members to call; None if all deadlines can be met, or none of them.

    Members that are more important are not sacrificed for others: if all of them can be met, the call is small enough.

    Args:
        lines: deadlines of the members that wait, the most important priority first.
        now_ns: the time.
        most: how many may share a call.
        cost_ns: returns the time of a call by its size.
    """
    sizes = list(_sizes(min(most, sum(map(len, lines)))))
    taken_ns = {size: cost_ns(size) for size in sizes}
    reachable_ns = now_ns + taken_ns[1]
    met: list[float] = []
    for line in lines:
        both = sorted([*met, *(deadline_ns for deadline_ns in line if deadline_ns >= reachable_ns)])
        if not _can_meet(both, now_ns, taken_ns):
            break
        met = both
    else:
        return None
    if met:
        sizes = [size for size in sizes if size == 1 or now_ns + taken_ns[size] <= met[0]]
    deadlines_ns = sorted(deadline_ns for line in lines for deadline_ns in line)

    def rate(size: int) -> float:
        in_time = len(deadlines_ns) - bisect_left(deadlines_ns, now_ns + taken_ns[size])
        return min(size, in_time) / max(taken_ns[size], 1.0)

    best = max(reversed(sizes), key=rate)
    return best if rate(best) else None


def _sizes(most: int) -> Iterator[int]:
    yield from range(1, min(most, _EACH) + 1)
    step = _EACH // 4
    size = _EACH + step
    while size < most:
        yield size
        step *= 1 + (size == 8 * step)
        size += step
    if most > _EACH:
        yield most


def _can_meet(deadlines_ns: Sequence[float], now_ns: float, taken_ns: dict[int, float]) -> bool:
    """Return True if calls that are small enough for the first deadline, one after the other, meet all deadlines."""
    start = 0
    while start < len(deadlines_ns):
        left_ns = deadlines_ns[start] - now_ns
        size = max((each for each in taken_ns if each == 1 or taken_ns[each] <= left_ns), default=1)
        size = min(size, len(deadlines_ns) - start)
        if size not in taken_ns:  # the last call
            size = max(each for each in taken_ns if each <= size)
        if taken_ns[size] > left_ns:
            return False
        now_ns += taken_ns[size]
        start += size
    return True
