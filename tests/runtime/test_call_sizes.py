"""F45 on virtual time: of more requests than can be answered, as many in time as with the best size of calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf
from random import Random

import pytest

import asyncflow as af
from asyncflow.runtime.shared.batcher import Batcher
from asyncflow.runtime.shared.call_costs import CallCosts
from asyncflow.runtime.shared.call_sizes import size_under_overload
from tests.runtime.test_batcher import Named

MS = 1_000_000
MOST = 64


def poisson(rate: float, seconds: float, seed: int) -> list[int]:
    """Times of requests that come at random, in nanoseconds."""
    dice, now_ns, found = Random(seed), 0.0, list[int]()
    while now_ns < seconds * 1e9:
        now_ns += dice.expovariate(rate) * 1e9
        found.append(int(now_ns))
    return found


def answered(arrivals_ns: list[int], timeout_ns: Callable[[int], int], cost_ns: Callable[[int], int]) -> set[int]:
    """Numbers of the requests that a batcher, which knows no costs at first, has answered in time."""
    costs, batcher, policy = CallCosts(), Batcher[Named](), af.Batch(MOST)
    coming = [
        Named(number, offered_ns=at_ns, deadline_ns=at_ns + timeout_ns(number))
        for number, at_ns in enumerate(arrivals_ns)
    ][::-1]
    found: set[int] = set()
    now_ns = 0
    while coming or batcher.lanes:
        if not batcher.lanes:
            now_ns = max(now_ns, coming[-1].offered_ns)
        while coming and coming[-1].offered_ns <= now_ns:
            batcher.offer("lane", costs, policy, coming.pop())
        calls = list(batcher.take(now_ns, is_idle=True))
        for call in calls:
            taken_ns = cost_ns(len(call.members))
            now_ns += taken_ns
            found.update(member.name for member in call.members if member.deadline_ns >= now_ns)
            batcher.ended(call, taken_ns, now_ns)
        if not calls and batcher.lanes:
            next_ns = coming[-1].offered_ns if coming else inf
            now_ns = int(min(next_ns, max(batcher.wake_ns(now_ns), now_ns + 1)))
    return found


def best_constant(arrivals_ns: list[int], timeout_ns: Callable[[int], int], cost_ns: Callable[[int], int]) -> int:
    """The most answers in time by calls of at most one size, of members that are answered in time, first due first."""
    return max(_by_calls_of(size, arrivals_ns, timeout_ns, cost_ns) for size in (1, 2, 4, 8, 12, 16, 20, 24, 32, 48))


def _by_calls_of(
    most: int, arrivals_ns: list[int], timeout_ns: Callable[[int], int], cost_ns: Callable[[int], int]
) -> int:
    now_ns = came = found = 0
    waiting: list[int] = []
    while came < len(arrivals_ns) or waiting:
        if not waiting:
            now_ns = max(now_ns, arrivals_ns[came])
        while came < len(arrivals_ns) and arrivals_ns[came] <= now_ns:
            waiting.append(arrivals_ns[came] + timeout_ns(came))
            came += 1
        waiting.sort()
        size = min(most, len(waiting))
        while size > 1 and len(waiting) - bisect_left(waiting, now_ns + cost_ns(size)) < size:
            size -= 1
        first = bisect_left(waiting, now_ns + cost_ns(size))
        called = waiting[first : first + size]
        waiting = waiting[first + size :]  # those before are too late for any call
        now_ns += cost_ns(size) if called else 0
        found += len(called)
    return found


@pytest.mark.parametrize(
    ("fixed_ms", "each_ms", "timeout_ms", "rate"),
    [
        *((20, 4, 200, rate) for rate in (120, 260, 400)),
        *((20, 4, timeout_ms, 400) for timeout_ms in (60, 500)),
        (20, 0.5, 60, 1000),
        (2, 4, 100, 400),
    ],
)
def test_as_many_are_answered_in_time_as_with_the_best_size(
    fixed_ms: float, each_ms: float, timeout_ms: int, rate: int
) -> None:
    """Within capacity all are; five times above it no fewer than 0.9 of what the best size gives, costs not known."""
    arrivals_ns = poisson(rate, 2.0, rate)

    def cost_ns(size: int) -> int:
        return int((fixed_ms + each_ms * size) * MS)

    def timeout_ns(_: int) -> int:
        return timeout_ms * MS

    best = best_constant(arrivals_ns, timeout_ns, cost_ns)
    found = len(answered(arrivals_ns, timeout_ns, cost_ns))
    assert found >= 0.9 * best, (found, best)
    if rate == 120:
        assert found == len(arrivals_ns)


@pytest.mark.parametrize("seed", range(6))
def test_requests_of_any_timeouts_and_calls_of_any_costs(seed: int) -> None:
    """Calls differ by a fifth, and requests have 1.5 to 20 times the time of one alone."""
    dice, noise = Random(seed), Random(seed + 1)
    fixed_ms, each_ms = dice.choice([(20, 4), (5, 0.2), (1, 4), (40, 1)])
    times = [dice.choice((1.5, 3, 8, 20)) for _ in range(5000)]
    capacity = 16 / (fixed_ms + 16 * each_ms) * 1000
    arrivals_ns = poisson(dice.choice((0.5, 1.5, 4)) * capacity, 200 / capacity, seed)

    def timeout_ns(number: int) -> int:
        return int(times[number] * (fixed_ms + each_ms) * MS)

    def cost_ns(size: int) -> int:
        return int((fixed_ms + each_ms * size) * MS * noise.uniform(0.9, 1.1))

    best = best_constant(arrivals_ns, timeout_ns, lambda size: int((fixed_ms + each_ms * size) * MS))
    found = len(answered(arrivals_ns, timeout_ns, cost_ns))
    assert found >= 0.8 * best, (found, best)


def test_important_requests_are_in_time_though_calls_are_small_for_them() -> None:
    """An important request is not sacrificed for nine others, whose calls would be longer than its time."""

    def cost_ns(size: int) -> float:
        return 20.0 + 4 * size

    flood = [float(deadline_ns) for deadline_ns in range(60, 260, 2)]
    assert size_under_overload([flood], 0.0, MOST, cost_ns) == 40
    assert size_under_overload([[100.0], flood], 0.0, MOST, cost_ns) == 20
    # If it cannot be met whatever is done, or all can, nothing changes.
    assert size_under_overload([[10.0], flood], 0.0, MOST, cost_ns) == 40
    assert size_under_overload([[100.0], [300.0] * 8], 0.0, MOST, cost_ns) is None
    assert size_under_overload([[10.0]], 0.0, MOST, cost_ns) is None
    assert size_under_overload([[inf] * 3, [inf] * 90], 0.0, MOST, cost_ns) is None


def test_unknown_sizes_are_told_from_known_ones() -> None:
    costs = CallCosts()
    assert costs.likely_ns(8) == 0.0
    for size, taken_ns in ((1, 24.0), (11, 64.0), (21, 104.0)):
        for _ in range(3):
            costs.observe(size, taken_ns)
    assert [costs.likely_ns(size) for size in (1, 6, 11, 16, 21, 31)] == [24.0, 44.0, 64.0, 84.0, 104.0, 144.0]
