"""The size of a call whose members have deadlines: the size that answers the most of them in time.

Small calls meet the first deadline, and cost more for each member. That pays while every waiting member can be answered
in time so. Under overload other members are late for it, and more of them the smaller calls are. For example, a call
takes 20 ms and 4 ms for each member, 260 requests come a second, and each is of use within 200 ms. Calls that meet
every first deadline have two members and answer 65 requests a second; calls of 22 answer 200, and drop members that
they would answer late.

The rule has five lines:

1. Play each size through: calls of at most that size, one after the other, for all members that wait.
2. In a play the members due first go first, late members are dropped, and a call is small enough for its own members.
3. Prefer plays that answer all members of the most important priority, then all members of the next priority.
4. Take the play with the most answers in time. Time costs a quarter of what the best play answers in that time.
5. Make the first call of that play.

Time has a cost because further members may come. It has not the full cost because they may not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from typing import NamedTuple

_MOST_PLAYED = 128
"""Number of members that are played through, the most important and first due ones: more would take too long."""

_TIME = 0.25
"""Price of time, as a part of the best rate of answers. With 0, calls are too small for long overload."""


class _Play(NamedTuple):
    """Calls for all members that wait.

    Attributes:
        answered: number of answers in time, by line.
        taken_ns: time of all calls.
        first: size of the first call; 0 if no member can be answered in time.
    """

    answered: Sequence[int]
    taken_ns: float
    first: int


def size_in_time(lines: Sequence[Sequence[float]], now_ns: float, most: int, cost_ns: Callable[[int], float]) -> int:
    """Return the size of the next call; 0 if no member can be answered in time.

    Args:
        lines: deadlines of the members that wait, the most important priority first.
        now_ns: the time.
        most: how many may share a call.
        cost_ns: returns the time of a call by its size.
    """
    cost_ns = cache(cost_ns)
    left, played = max(_MOST_PLAYED, most), list[list[float]]()
    for line in lines:
        first = sorted(line)[:left]
        played.append(first[bisect_left(first, now_ns + cost_ns(1)) :])
        left -= len(played[-1])
    count = sum(map(len, played))
    plays: list[_Play] = []
    for size in reversed(list(_sizes(min(most, count)))) if count else ():
        plays.append(_play(played, now_ns, size, cost_ns))
        if sum(plays[-1].answered) == count:
            break  # smaller calls answer no more members
    if not plays:
        return 0
    price = _TIME * max(sum(play.answered) / max(play.taken_ns, 1.0) for play in plays)

    def worth(play: _Play) -> tuple[int, float]:
        whole = takewhile(lambda pair: pair[0] == len(pair[1]), zip(play.answered, played, strict=True))
        return sum(1 for _ in whole), sum(play.answered) - price * play.taken_ns

    return max(plays, key=worth).first


def _sizes(most: int) -> Iterator[int]:
    """Give sizes up to `most`: all small ones, and of larger ones four in each doubling."""
    yield from (size for size in (1, 2, 3, 4, 6) if size < most)
    size, step = 8, 2
    while size < most:
        yield size
        step *= 1 + (size == 8 * step)
        size += step
    yield most


def _play(lines: Sequence[Sequence[float]], now_ns: float, most: int, cost_ns: Callable[[int], float]) -> _Play:
    """Play calls of at most one size through."""
    answered, places, count = [0] * len(lines), [0] * len(lines), sum(map(len, lines))
    end_ns, first, left = now_ns, 0, count
    while left:
        size = min(most, left)
        while True:
            call_ns = end_ns + cost_ns(size)
            reachable = [bisect_left(line, call_ns, place) for line, place in zip(lines, places, strict=True)]
            left = count - sum(reachable)
            if left >= size or size == 1:
                break
            size = max((size + left) // 2, 1)
        places = reachable
        if not left:
            break
        first, end_ns, left = first or size, call_ns, left - size
        for place, line in enumerate(lines):
            taken = min(size, len(line) - places[place])
            answered[place] += taken
            places[place] += taken
            size -= taken
    return _Play(answered, end_ns - now_ns, first)
