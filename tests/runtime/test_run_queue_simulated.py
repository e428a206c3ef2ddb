"""Fault F43-F46 on virtual time: an hour of requests at random, held against queueing theory; and floods."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import factorial, inf, log
from random import Random

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.run_cost import RunCost
from asyncflow.runtime.gates.run_queue import QueuedRun, RunQueue

pytestmark = pytest.mark.slow

HOUR_S = 3600.0


@dataclass(slots=True, eq=False)
class Request(QueuedRun):
    """A run that takes so long, whoever knows it."""

    arrived_s: float = field(kw_only=True)
    service_s: float = field(kw_only=True)


@dataclass
class Outcome:
    """The results of an hour, by priorities: latencies of requests that ended in time, and the number of the others."""

    latencies_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    others: Counter[tuple[int, str]] = field(default_factory=Counter)
    useful_s: float = 0.0
    busy_s: float = 0.0

    def mean_s(self, priority: int = 0) -> float:
        return float(np.mean(self.latencies_s[priority]))

    def p99_s(self, priority: int = 0) -> float:
        return float(np.quantile(self.latencies_s[priority], 0.99))


def poisson(
    dice: Random, rate: float, mean_s: float, *, priority: int = 0, timeout_s: float = inf, cost: RunCost | None = None
) -> Iterator[Request]:
    """An hour of requests, whose times between them and of service are exponential."""
    now_s = dice.expovariate(rate)
    while now_s < HOUR_S:
        yield Request(cost, priority, now_s + timeout_s, arrived_s=now_s, service_s=dice.expovariate(1 / mean_s))
        now_s += dice.expovariate(rate)


def simulate(queue: RunQueue[Request], requests: Iterator[Request]) -> Outcome:
    """Work requests off, in order of the events' times; requests in flight are stopped at their deadline."""
    found = Outcome()
    events: list[tuple[float, int, Request]] = []
    number = 0
    coming = next(requests, None)

    def start(run: Request, now_s: float) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (min(now_s + run.service_s, run.deadline_s), number, run))

    while coming is not None or events:
        if coming is not None and (not events or coming.arrived_s <= events[0][0]):
            now_s = coming.arrived_s
            try:
                if queue.offer(coming, now_s):
                    start(coming, now_s)
            except af.OverloadedError:
                found.others[coming.priority, "refused"] += 1
            coming = next(requests, None)
        else:
            now_s, _, run = heapq.heappop(events)
            taken_s = now_s - run.started_s
            is_known = run.cost is not None and (now_s < run.deadline_s or taken_s > run.cost.expected_s)
            queue.end(run, taken_s if is_known else None)
            found.busy_s += taken_s
            if now_s < run.deadline_s:
                found.useful_s += taken_s
                found.latencies_s[run.priority].append(now_s - run.arrived_s)
            else:
                found.others[run.priority, "stopped"] += 1
        if queue.queued or queue._refused:
            for run, error in queue.decide(now_s):
                if error is None:
                    start(run, now_s)
                else:
                    found.others[run.priority, type(error).__name__] += 1
    assert (queue.queued, queue.queued_bytes, len(queue.in_flight), queue.has_waiting) == (0, 0, 0, False)
    return found


def merged(*streams: Iterator[Request]) -> Iterator[Request]:
    return heapq.merge(*streams, key=lambda run: run.arrived_s)


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that a request waits in M/M/c; `load` is the load of all servers together."""
    waits = load**servers / factorial(servers) * servers / (servers - load)
    return waits / (sum(load**k / factorial(k) for k in range(servers)) + waits)


@pytest.mark.parametrize(("servers", "part", "rate"), [(1, 0.2, 20), (1, 0.5, 40), (1, 0.8, 60), (4, 0.8, 40)])
def test_latencies_follow_queueing_theory(servers: int, part: float, rate: float) -> None:
    """M/M/1 and M/M/c: mean latency within 5 %; of one server the 99th percentile too."""
    mean_s = part * servers / rate
    found = simulate(RunQueue(servers), poisson(Random(7), rate, mean_s))
    wait_s = erlang_c(servers, part * servers) / (servers / mean_s - rate)
    assert found.mean_s() == pytest.approx(mean_s + wait_s, rel=0.05)
    assert found.busy_s / servers / HOUR_S == pytest.approx(part, rel=0.05)
    if servers == 1 and part < 0.8:
        assert found.p99_s() == pytest.approx(log(100) * (mean_s + wait_s), rel=0.05)


@pytest.mark.parametrize(("servers", "times"), [(1, 2.0), (2, 5.0)])
def test_losses_follow_queueing_theory(servers: int, times: float) -> None:
    """M/M/c/K above its capacity: refusals, and the times of the others, within 5 %."""
    places, mean_s = 10, 0.5
    rate = times * servers / mean_s
    found = simulate(RunQueue(servers, max_queued=places), poisson(Random(3), rate, mean_s))
    load = times * servers
    weights = [
        load**k / factorial(min(k, servers)) / servers ** max(0, k - servers) for k in range(servers + places + 1)
    ]
    chances = [weight / sum(weights) for weight in weights]
    offered = len(found.latencies_s[0]) + found.others[0, "refused"]
    assert found.others[0, "refused"] / offered == pytest.approx(chances[-1], rel=0.05)
    latency_s = sum(k * chance for k, chance in enumerate(chances)) / (rate * (1 - chances[-1]))
    assert found.mean_s() == pytest.approx(latency_s, rel=0.05)


def test_two_priorities_follow_queueing_theory() -> None:
    """M/M/1 without preemption (Cobham 1954), where the share of the second makes no difference: within 5 %."""
    mean_s, rates = 0.02, (10.0, 25.0)
    dice = Random(5)
    streams = (poisson(dice, rate, mean_s, priority=k) for k, rate in enumerate(rates))
    found = simulate(RunQueue(1), merged(*streams))
    first, both = rates[0] * mean_s, sum(rates) * mean_s
    left_s = both * mean_s
    assert found.mean_s(0) == pytest.approx(mean_s + left_s / (1 - first), rel=0.05)
    assert found.mean_s(1) == pytest.approx(mean_s + left_s / (1 - first) / (1 - both), rel=0.05)


@pytest.mark.parametrize("times", [0.2, 0.8, 2.0, 5.0])
def test_goodput_under_load(times: float) -> None:
    """Fault F44: of use within ten times the mean: 0.9 of the offered requests, or of the capacity, end in time."""
    servers, mean_s = 4, 1.0
    rate = times * servers / mean_s
    requests = poisson(Random(11), rate, mean_s, timeout_s=10 * mean_s, cost=RunCost())
    found = simulate(RunQueue(servers, max_queued=64), requests)
    assert found.useful_s >= 0.9 * min(1.0, times) * servers * HOUR_S
    assert found.p99_s() <= 10 * mean_s


def test_a_flood_beside_a_trickle() -> None:
    """Fault F46: at five times capacity the first priority's 99th percentile is at most 1.2 times an idle server's."""
    servers, mean_s = 8, 2.0
    capacity = servers / mean_s
    dice = Random(13)
    few = poisson(dice, 0.2 * capacity, mean_s, priority=0, timeout_s=20 * mean_s, cost=RunCost())
    many = poisson(dice, 4.8 * capacity, mean_s, priority=1, timeout_s=20 * mean_s, cost=RunCost())
    found = simulate(RunQueue(servers, max_queued=64), merged(few, many))
    assert found.p99_s(0) <= 1.2 * log(100) * mean_s
    assert not found.others[0, "refused"] + found.others[0, "OverloadedError"] + found.others[0, "DeadlineExceeded"]
    assert found.useful_s >= 0.9 * servers * HOUR_S


def test_a_flood_of_the_first_priority_starves_no_run() -> None:
    """Fault F46: the second still gets an eighth."""
    servers, mean_s = 8, 2.0
    capacity = servers / mean_s
    dice = Random(17)
    many = poisson(dice, 3 * capacity, mean_s, priority=0, timeout_s=20 * mean_s, cost=RunCost())
    few = poisson(dice, 1 * capacity, mean_s, priority=1, timeout_s=40 * mean_s, cost=RunCost())
    found = simulate(RunQueue(servers, max_queued=64), merged(many, few))
    assert len(found.latencies_s[1]) >= 0.9 * capacity / 8 * HOUR_S
    assert len(found.latencies_s[0]) >= 0.9 * capacity * 7 / 8 * HOUR_S
