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
from asyncflow.runtime.shared.call_sizes import size_in_time
from tests.cells import SEEDS
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
            given_up_ns = min(member.deadline_ns for lane in batcher.lanes.values() for member in lane.everybody())
            now_ns = int(min(next_ns, given_up_ns, max(batcher.wake_ns(now_ns), now_ns + 1)))
    return found


def best_constant(
    arrivals_ns: list[int],
    timeout_ns: Callable[[int], int],
    cost_ns: Callable[[int], int],
    taken_ns: Callable[[int], int] | None = None,
) -> int:
    """The most answers in time by calls of at most one size, of members that are answered in time, first due first.

    Calls are expected to take `cost_ns`, and take `taken_ns` if that differs.
    """
    given = arrivals_ns, timeout_ns, cost_ns, taken_ns or cost_ns
    return max(_by_calls_of(size, *given) for size in (1, 2, 4, 8, 12, 16, 20, 24, 32, 48))


def _by_calls_of(
    most: int,
    arrivals_ns: list[int],
    timeout_ns: Callable[[int], int],
    cost_ns: Callable[[int], int],
    taken_ns: Callable[[int], int],
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
        now_ns += taken_ns(size) if called else 0
        found += len(called) - bisect_left(called, now_ns)
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


KINDS: dict[str, tuple[list[tuple[float, float]] | None, list[tuple[float, float]]]] = {
    "any timeouts": (None, [(20, 4), (5, 0.2), (1, 4), (40, 1)]),
    "large fixed costs": (None, [(50, 0.05), (100, 1), (30, 0.3)]),
    "large costs of each": (None, [(0.5, 10), (0.1, 1), (1, 20)]),
    "two classes of timeouts": ([(1.5, 20), (2, 10), (3, 30), (1.5, 5)], [(20, 4), (5, 0.2), (1, 4), (40, 1)]),
    "bursts": (None, [(20, 4), (5, 0.2), (1, 4), (40, 1)]),
}
"""Pairs of timeouts, as multiples of the time of one request alone; costs of a call, and of each member, in ms."""


@pytest.mark.parametrize("seed", range(4 * SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_any_timeouts_and_calls_of_any_costs(kind: str, seed: int) -> None:
    """Calls differ by a fifth, and half to four times as many requests come as calls of 16 can answer."""
    dice, noise = Random(f"{kind} {seed}"), Random(seed + 1)
    classes, costs = KINDS[kind]
    fixed_ms, each_ms = dice.choice(costs)
    short, long = dice.choice(classes) if classes else (0, 0)
    part = dice.choice((0.1, 0.5, 0.9))
    times = [(short if dice.random() < part else long) or dice.choice((1.5, 3, 8, 20)) for _ in range(20_000)]
    capacity = 16 / (fixed_ms + 16 * each_ms) * 1000
    rate, seconds = dice.choice((0.5, 1.5, 4)) * capacity, 300 / capacity
    if kind == "bursts":
        size = dice.choice((8, 30, 100))
        arrivals_ns = [
            at for at in poisson(rate / size, 20 * size / rate, seed) for _ in range(dice.randint(1, 2 * size))
        ]
    else:
        arrivals_ns = poisson(rate, seconds, seed)

    def timeout_ns(number: int) -> int:
        return int(times[number] * (fixed_ms + each_ms) * MS)

    def cost_ns(size: int) -> int:
        return int((fixed_ms + each_ms * size) * MS)

    def taken_ns(size: int) -> int:
        return int(cost_ns(size) * noise.uniform(0.9, 1.1))

    best = best_constant(arrivals_ns, timeout_ns, cost_ns, taken_ns)
    found = len(answered(arrivals_ns, timeout_ns, taken_ns))
    assert found >= 0.8 * best, (found, best)


def test_important_requests_are_in_time_though_calls_are_small_for_them() -> None:
    """An important request is not sacrificed for nine others, whose calls would be longer than its time."""

    def cost_ns(size: int) -> float:
        return 20.0 + 4 * size

    flood = [float(deadline_ns) for deadline_ns in range(60, 260, 2)]
    assert size_in_time([flood], 0.0, MOST, cost_ns) == 36
    assert size_in_time([[100.0], flood], 0.0, MOST, cost_ns) == 20
    # If it cannot be met whatever is done, it does not count.
    assert size_in_time([[10.0], flood], 0.0, MOST, cost_ns) == 36
    # Where all can be met, calls are as large as they can be.
    assert size_in_time([[100.0], [300.0] * 8], 0.0, MOST, cost_ns) == 9
    assert size_in_time([[10.0]], 0.0, MOST, cost_ns) == 0
    assert size_in_time([[inf] * 3, [inf] * 90], 0.0, MOST, cost_ns) == MOST


def test_time_has_a_cost_under_overload() -> None:
    """With 100 ms and 1 ms each, a call of 64 is worth more than a few answers that smaller calls would still give."""

    def cost_ns(size: int) -> float:
        return 100.0 + size

    due = [140.0] * 2 + [262.0] * 60
    assert size_in_time([due], 0.0, MOST, cost_ns) == 40  # all in time: 2 with 38 others, then the other 22
    assert size_in_time([[140.0] * 2 + [262.0] * 300], 0.0, MOST, cost_ns) == MOST


def test_of_members_that_cannot_be_met_few_are_called_to_learn_whether_that_holds() -> None:
    def first_size(seed: int, *, is_ending: bool = False) -> int:
        costs, batcher = CallCosts(), Batcher[Named](seed)
        for size, taken_ns in ((1, 100.0), (8, 120.0)):
            for _ in range(3):
                costs.observe(size, taken_ns)
        for name in range(4):
            batcher.offer("lane", costs, af.Batch(MOST), Named(name, deadline_ns=50.0))
        batcher.is_ending = is_ending
        found = sum(len(call.members) for call in batcher.take(0, is_idle=True))
        assert batcher.count() == 4 - found
        return found

    sizes = [first_size(seed) for seed in range(40)]
    assert set(sizes) == {0, 1}
    assert 1 <= sum(sizes) <= 15
    assert first_size(sizes.index(0), is_ending=True) == 1  # as nothing comes that would ask again


def test_unknown_sizes_are_told_from_known_ones() -> None:
    costs = CallCosts()
    assert costs.likely_ns(8) == 0.0
    costs.observe(7, 48.0)
    assert [costs.likely_ns(size) for size in (1, 7, 14, 28)] == [48.0, 48.0, 48.0, 96.0]
    costs.observe(1, 24.0)
    assert [costs.likely_ns(size) for size in (1, 4, 7, 13)] == [24.0, 36.0, 48.0, 72.0]
    costs = CallCosts()
    for size, taken_ns in ((1, 24.0), (11, 64.0), (21, 104.0)):
        for _ in range(3):
            costs.observe(size, taken_ns)
    assert [costs.likely_ns(size) for size in (1, 6, 11, 16, 21, 31)] == [24.0, 44.0, 64.0, 84.0, 104.0, 144.0]


def test_larger_calls_are_tried_where_their_times_are_old_ones() -> None:
    """Calls of 8 once took as long as 80 calls of one, which is too late here: only a try tells that they do not."""

    def first_size(seed: int, each_ns: float) -> int:
        costs, batcher = CallCosts(), Batcher[Named](seed)
        for size, taken_ns in ((1, 3.0 * MS), (8, 3.0 * MS + 7 * each_ns)):
            for _ in range(3):
                costs.observe(size, taken_ns)
        for name in range(8):
            batcher.offer("lane", costs, af.Batch(MOST), Named(name, deadline_ns=10.0 * MS))
        return sum(len(call.members) for call in batcher.take(0, is_idle=True))

    assert {first_size(seed, 35.0 * MS) for seed in range(100)} == {1, 2}
    assert {first_size(seed, 2.5 * MS) for seed in range(100)} == {3}  # such times may well hold
