"""F44 on virtual time: with the places of `max_runs="auto"`, runs share processors and still end in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

import pytest

import asyncflow as af
from asyncflow.compiler.run_cost import Crowd, RunCost
from asyncflow.runtime.gates.run_queue import QueuedRun, RunQueue
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.testing import virtual_clock
from tests.faults.kernels import INT

SECONDS = 100.0
PATIENCE = 10
"""An answer is of use within this multiple of the time of one request alone."""

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
        """Let requests come until then, and work them off."""
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


class Database:
    """An op that waits, `places` at a time, in a session on virtual time."""

    def __init__(self, places: int, took_s: Callable[[int], float]) -> None:
        free = asyncio.Semaphore(places)

        @af.op(outputs=INT)
        async def ask(number: Any) -> Any:
            async with free:
                await asyncio.sleep(took_s(int(number)))
            return number

        with af.Graph() as self.graph:
            self.x = af.placeholder("int64", ())
            self.answer = ask(self.x)

    async def ends(self, rate: float, seconds: float, timeout_s: float, **options: Any) -> Counter[str]:
        """Return the ends of requests that come at this rate."""
        found: Counter[str] = Counter()
        dice = Random(7)
        async with af.Session(self.graph, **options) as session:

            async def request(number: int) -> None:
                try:
                    await session.run(self.answer, {self.x: number}, timeout=timeout_s)
                    found["in time"] += 1
                except af.AsyncflowError as error:
                    found[type(error).__name__] += 1

            async with asyncio.TaskGroup() as group:
                for number in range(int(rate * seconds)):
                    group.create_task(request(number))
                    await asyncio.sleep(dice.expovariate(rate))
            assert session.load().queued == 0
            assert session.plan(self.answer, [self.x]).cost.crowd.count == 0
        return found


def on_virtual_time(places: int, took_s: Callable[[int], float], *args: float, **options: Any) -> Counter[str]:
    with virtual_clock("1 x v100") as clock:

        async def main() -> Counter[str]:
            return await Database(places, took_s).ends(*args, **options)

        return clock.run(main())


@pytest.mark.slow
def test_runs_that_wait_for_something_that_is_too_slow() -> None:
    """Four at a time, 20 ms each, of use within 200 ms, five times too many: 85 % of the capacity is in time."""
    found = on_virtual_time(4, lambda _: 0.02, 1000.0, 2.5, 0.2)
    assert found["in time"] >= 0.85 * 2.5 * 4 / 0.02, found
    found = on_virtual_time(4, lambda _: 0.02, 1000.0, 1.0, 0.2, max_runs=None)
    assert found["in time"] <= 0.6 * 1.0 * 4 / 0.02, found


def test_a_crowd_is_bounded_once_most_of_it_is_late() -> None:
    crowd = Crowd(count=80)
    for _ in range(40):
        crowd.end()
    for _ in range(10):
        crowd.miss(0, 1.0)
    assert not crowd.is_full(1.0)
    crowd.miss(0, 1.0)
    assert crowd.most == 20
    assert crowd.is_full(1.0)
    crowd.count = 19
    assert not crowd.is_full(1.0)
    crowd.end()
    assert crowd.most == pytest.approx(20.05)
    crowd.count = 100
    crowd.miss(crowd.ended, 2.0)
    assert crowd.most == 8
    assert not crowd.is_full(12.1)
    assert crowd.most == inf
    # A few are never bounded, however late they are.
    few = Crowd(count=8)
    for _ in range(40):
        few.miss(0, 1.0)
    assert few.most == inf


def test_runs_of_which_none_ends_in_time_are_not_bounded() -> None:
    """The runs wait for a rare event, such as a message that mostly does not come: clients poll so."""
    crowd = Crowd(count=80)
    crowd.end()
    for _ in range(100):
        crowd.miss(1, 1.0)
    assert crowd.most == inf


def test_runs_that_just_take_long_are_not_refused() -> None:
    """Hundreds at a time, nearly as long as they may be, and one in twenty longer: none of the others is refused."""
    found = on_virtual_time(1000, lambda number: 11.0 if number % 20 == 0 else 8.0, 10.0, 20.0, 10.0)
    assert found == {"in time": 190, "DeadlineExceeded": 10}


def test_polls_of_queues_that_sometimes_succeed_are_not_refused() -> None:
    """As many elements come as a crowd of runs would be bounded to, and yet the runs wait in a line of the session."""
    queue = af.FIFOQueue(100, af.spec("int64", ()))
    with af.Graph() as graph:
        item = af.placeholder("int64", ())
        put, taken = queue.enqueue(item), queue.dequeue()
    found = Counter[str]()

    async def poll(session: af.Session) -> None:
        for _ in range(8):
            try:
                await session.run(taken, timeout=1.0)
                found["in time"] += 1
            except af.AsyncflowError as error:
                found[type(error).__name__] += 1

    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"]) as session, asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(poll(session))
            for _ in range(40):
                await asyncio.sleep(0.15)
                await session.run(put, {item: 1})

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())
    assert found == {"in time": 40, "DeadlineExceeded": 200}
