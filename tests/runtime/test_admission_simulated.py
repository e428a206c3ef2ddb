"""F44 on virtual time: with the places of `max_runs="auto"`, runs share processors and still end in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

import pytest

import asyncflow as af
from asyncflow.compiler.run_cost import RunCost
from asyncflow.runtime.run_queue import QueuedRun, RunQueue

SECONDS = 100.0
PATIENCE = 10
"""An answer is of use within so many times what one takes alone."""

SERVICE: dict[str, Callable[[Random], float]] = {
    "constant": lambda _: 1.0,
    "exponential": lambda dice: dice.expovariate(1.0),
    "short and long": lambda dice: dice.choice((0.2, 1.8)),
}


@dataclass(slots=True, eq=False)
class Request(QueuedRun):
    """A run that needs so much of a processor, of which `left_s` is to be done."""

    needed_s: float = 0.0
    left_s: float = 0.0


@dataclass
class Kind:
    """Requests of one length, with places of their own; their mean length is one second times `scale`."""

    queue: RunQueue[Request]
    scale: float
    rate: float
    coming_s: float = 0.0
    useful_s: float = 0.0
    lost: int = 0

    def __post_init__(self) -> None:
        self.cost = RunCost()


class Machine:
    """Processors that all runs in flight share alike."""

    def __init__(self, cores: int, kinds: list[Kind], service: Callable[[Random], float], seed: int) -> None:
        self.cores, self.kinds, self.service, self.dice = cores, kinds, service, Random(seed)
        self.now_s = 0.0
        self.flight: dict[Request, Kind] = {}

    def serve(self, until_s: float) -> None:
        """Let requests come until then, and work off what has come."""
        for kind in self.kinds:
            kind.coming_s = self.dice.expovariate(kind.rate)
        while self.flight or any(kind.coming_s < until_s for kind in self.kinds):
            self._step(until_s)
        assert all(not kind.queue.has_waiting and kind.queue.is_idle for kind in self.kinds)

    def _step(self, until_s: float) -> None:
        share = min(1.0, self.cores / max(len(self.flight), 1))
        events: list[tuple[float, Callable[[], None]]] = []
        for run in self.flight:
            end_s = self.now_s + run.left_s / share
            events.append((min(end_s, run.deadline_s), lambda run=run: self._end(run)))  # type: ignore[misc]
        for kind in self.kinds:
            if kind.coming_s < until_s:
                events.append((kind.coming_s, lambda kind=kind: self._come(kind)))  # type: ignore[misc]
            if kind.queue.has_waiting:
                events.append((kind.queue.next_overdue_s(), lambda kind=kind: kind.queue.let_go(self.now_s)))  # type: ignore[misc]
        at_s, act = min(events, key=lambda event: event[0])
        at_s = max(at_s, self.now_s)
        for run in self.flight:
            run.left_s -= (at_s - self.now_s) * share
        self.now_s = at_s
        act()
        for kind in self.kinds:
            for run, error in kind.queue.decide(at_s):
                if error is None:
                    self._start(kind, run)
                else:
                    kind.lost += 1

    def _come(self, kind: Kind) -> None:
        kind.coming_s = self.now_s + self.dice.expovariate(kind.rate)
        needed_s = kind.scale * self.service(self.dice)
        run = Request(kind.cost, 0, self.now_s + PATIENCE * kind.scale, needed_s=needed_s, left_s=needed_s)
        try:
            if kind.queue.offer(run, self.now_s):
                self._start(kind, run)
        except af.OverloadedError:
            kind.lost += 1

    def _start(self, kind: Kind, run: Request) -> None:
        kind.queue.begin(run, kind.cost, self.now_s)
        self.flight[run] = kind

    def _end(self, run: Request) -> None:
        kind = self.flight.pop(run)
        taken_s = self.now_s - run.started_s
        is_whole = run.left_s < 1e-9
        kind.queue.end(run, taken_s if is_whole or taken_s > kind.cost.expected_s else None)
        kind.useful_s += run.needed_s if is_whole else 0.0
        kind.lost += not is_whole


def served(cores: int, places: int, times: float, service: str, scales: tuple[float, ...] = (1.0,)) -> list[Kind]:
    """Kinds of requests that have come for `SECONDS`, each its part of `times` what the cores can do."""
    kinds = [Kind(RunQueue(places, is_auto=True), scale, times * cores / scale / len(scales)) for scale in scales]
    Machine(cores, kinds, SERVICE[service], seed=cores).serve(SECONDS)
    return kinds


@pytest.mark.parametrize("service", SERVICE)
@pytest.mark.parametrize("cores", [1, 2, 4])
def test_of_five_times_what_can_be_done_most_is_done_in_time(cores: int, service: str) -> None:
    """At least 85 %, with two places more than cores; without a bound, 40 % at most."""
    (kind,) = served(cores, cores + 2, 5.0, service)
    assert kind.useful_s >= 0.85 * SECONDS * cores
    if cores == 1:
        (kind,) = served(cores, 100_000, 5.0, service)
        assert kind.useful_s <= 0.4 * SECONDS


@pytest.mark.parametrize("times", [0.5, 5.0])
def test_short_runs_beside_long_ones(times: float) -> None:
    """Within capacity nearly all are done, and under overload each length gets its part; in all, 85 % are."""
    short, long = served(2, 4, times, "constant", (0.1, 1.0))
    if times < 1:
        assert short.lost <= 0.01 * SECONDS * short.rate
    else:
        assert short.useful_s + long.useful_s >= 0.85 * SECONDS * 2
        assert min(short.useful_s, long.useful_s) >= 0.3 * SECONDS * 2


def test_a_run_that_never_ends_takes_no_place_for_ever() -> None:
    queue: RunQueue[Request] = RunQueue(1, is_auto=True)
    stuck, waiting = Request(RunCost()), Request(RunCost())
    assert queue.offer(stuck, 0.0)
    assert not queue.offer(waiting, 0.0)
    now_s = queue.next_overdue_s()
    assert now_s < inf
    queue.let_go(now_s)
    assert [run for run, _ in queue.decide(now_s)] == [waiting]
