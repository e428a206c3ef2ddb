"""Fault F43-F46, without an event loop: no run is lost, started twice, or waits while there is room, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import pytest

import asyncflow as af
from asyncflow.compiler.run_cost import RunCost
from asyncflow.runtime.gates.run_queue import QueuedRun, RunQueue


def cost(taken_s: float = 1.0, nbytes: int = 0) -> RunCost:
    found = RunCost(nbytes=nbytes)
    found.observe(taken_s)
    return found


@dataclass(slots=True, eq=False)
class Caller(QueuedRun):
    """A run whose caller may leave before the queue has noticed."""

    left: bool = False

    @property
    def is_gone(self) -> bool:
        return self.left


@dataclass
class World:
    """A queue, its runs, and the end of each."""

    queue: RunQueue[Caller]
    runs: list[Caller]
    now_s: float = 0.0
    states: list[str] = field(default_factory=list)
    asides: list[int] = field(default_factory=list)
    """Times that each run may step aside."""
    has_stepped_aside: bool = False

    def __post_init__(self) -> None:
        self.states = ["new"] * len(self.runs)
        self.asides = self.asides or [0] * len(self.runs)

    def events(self) -> Iterator[tuple[str, int]]:
        for index, state in enumerate(self.states):
            if state == "new":
                yield "offer", index
                break  # by symmetry they come in this order
        for index, state in enumerate(self.states):
            if state == "waiting":
                yield "withdraw", index
                yield "leave", index
            if state == "left":
                yield "withdraw", index
            if state == "running":
                yield "end", index
                if self.asides[index]:
                    yield "step_aside", index
            if state == "aside":
                yield "come_back", index
            if state in ("aside", "back"):
                yield "end", index
        if self.now_s < 2:
            yield "tick", 0

    def do(self, event: str, index: int) -> None:
        run = self.runs[index]
        if event == "offer":
            refusal = self.queue.refusal(Caller(None, run.priority), self.now_s)
            self.states[index] = "refused"
            with suppress(af.OverloadedError):
                self.states[index] = "running" if self.queue.offer(run, self.now_s) else "waiting"
            is_refused = self.states[index] == "refused"
            assert is_refused or not refusal
            if not (run.nbytes or run.reserved or self.queue.aside) and run.deadline_s == inf:
                assert is_refused == bool(refusal)
        elif event == "withdraw":
            self.queue.withdraw(run)
            self.queue.withdraw(run)  # the second time nothing happens
            self.states[index] = "withdrawn"
        elif event == "leave":
            run.left = True
            self.states[index] = "left"
        elif event == "end":
            self.queue.end(run)
            self.states[index] = "ended"
        elif event == "step_aside":
            self.queue.step_aside(run, self.now_s)
            self.asides[index] -= 1
            self.has_stepped_aside = True
            self.states[index] = "aside"
        elif event == "come_back":
            self.states[index] = "running" if self.queue.come_back(run, self.now_s) else "back"
        else:
            self.now_s += 1
        for told, error in self.queue.decide(self.now_s):
            which = self.runs.index(told)
            assert self.states[which] in ("waiting", "back") or error is not None
            assert self.states[which] != "back" or error is None  # it is never refused
            if self.states[which] in ("waiting", "back"):
                self.states[which] = "running" if error is None else type(error).__name__
        self.check()

    def check(self) -> None:
        queue = self.queue
        waiting = queue.waiting()
        counts = Counter(self.states)
        back = [run for run in waiting if run.is_aside]
        assert len(waiting) == queue.queued + len(back) == len(set(waiting))
        assert len(back) == counts["back"]
        assert len(queue.aside) == counts["aside"] + counts["back"] == sum(queue._kinds_aside.values())
        assert counts["waiting"] <= queue.queued <= counts["waiting"] + counts["left"]
        assert {self.runs[k] for k, state in enumerate(self.states) if state == "running"} == set(queue.in_flight)
        assert len(queue.in_flight) <= queue.max_runs
        assert queue.max_queued is None or queue.queued <= queue.max_queued
        assert queue.queued_bytes == sum(run.nbytes for run in waiting if not run.is_aside)
        assert queue.max_queued_bytes is None or queue.queued_bytes <= queue.max_queued_bytes
        reserved = sum(run.reserved for run in (*queue.in_flight, *queue.aside))
        assert reserved == queue._reserved
        if not self.has_stepped_aside:
            assert queue.memory_limit is None or reserved <= queue.memory_limit or len(queue.in_flight) == 1
        if counts["waiting"] + counts["back"] and len(queue.in_flight) < queue.max_runs:
            assert queue.memory_limit is not None
            assert queue.in_flight
            assert any(reserved + run.reserved > queue.memory_limit for run in waiting)
        places = [(run.priority, run.deadline_s, run.arrival) for run in waiting]
        assert places == sorted(places)
        if not waiting and queue.is_idle:
            assert (queue.queued, queue.queued_bytes, queue.reserved_by_others(Caller(None))) == (0, 0, 0)


LIMITS = [
    {"max_runs": 1},
    {"max_runs": 1, "max_queued": 0},
    {"max_runs": 1, "max_queued": 1},
    {"max_runs": 2, "max_queued": 2},
    {"max_runs": 1, "max_queued_bytes": 10},
    {"max_runs": 3, "memory_limit": 8, "max_queued": 3},
]
KINDS: dict[str, list[dict[str, Any]]] = {
    "alike": [{}] * 4,
    "priorities": [{"priority": 2}, {"priority": 1}, {"priority": 1}, {"priority": 0}],
    "deadlines": [{}, {"deadline_s": 2.5}, {"deadline_s": 1.5}, {"deadline_s": 3.5, "priority": 1}],
    "bytes": [{"nbytes": 4}, {"nbytes": 5}, {"nbytes": 6, "priority": -1}, {"nbytes": 11}],
    "memory": [{"cost": cost(1, 5)}, {"cost": cost(1, 4)}, {"cost": cost(1, 9)}, {"cost": cost(1, 1), "priority": -1}],
}


def made(
    limits: dict[str, Any], kinds: list[dict[str, Any]], events: tuple[tuple[str, int], ...], asides: int = 0
) -> World:
    runs = [Caller(**({"cost": cost()} | kind)) for kind in kinds]
    world = World(RunQueue(**limits), runs, asides=[asides] * len(runs))
    for event in events:
        world.do(*event)
    return world


@pytest.mark.parametrize("limits", range(len(LIMITS)))
@pytest.mark.parametrize("kinds", KINDS)
def test_every_interleaving_of_four_runs(limits: int, kinds: str) -> None:
    """Fault F43-F45: each state that four runs can come to, by offers, ends, withdrawals and time, keeps the rules."""
    seen: set[Any] = set()
    ends: Counter[str] = Counter()
    paths: list[tuple[tuple[str, int], ...]] = [()]
    while paths:
        path = paths.pop()
        world = made(LIMITS[limits], KINDS[kinds], path)
        following = list(world.events())
        if {"new", "waiting", "running", "left"}.isdisjoint(world.states):
            ends.update(world.states)
        for event in following:
            after = made(LIMITS[limits], KINDS[kinds], (*path, event))
            state = (*after.states, after.now_s)
            if state not in seen:
                seen.add(state)
                paths.append((*path, event))
    assert set(ends) <= {"ended", "refused", "withdrawn", "OverloadedError", "DeadlineExceeded"}
    assert ends["ended"]


@pytest.mark.parametrize(("limits", "kinds"), [(0, "priorities"), (2, "alike"), (3, "priorities"), (5, "memory")])
def test_every_interleaving_of_three_runs_that_step_aside(limits: int, kinds: str) -> None:
    """Each run is served once: the same rules hold, a returning run is never refused, and none waits for ever."""
    seen: set[Any] = set()
    paths: list[tuple[tuple[str, int], ...]] = [()]
    while paths:
        path = paths.pop()
        world = made(LIMITS[limits], KINDS[kinds][:3], path, 1)
        following = [event for event in world.events() if event[0] not in ("tick", "leave")]
        assert following or {"waiting", "running", "aside", "back"}.isdisjoint(world.states)
        if set(world.states) <= {"waiting", "back"} and world.states:
            raise AssertionError("all wait, and nobody runs")
        for event in following:
            after = made(LIMITS[limits], KINDS[kinds][:3], (*path, event), 1)
            state = (*after.states, *after.asides)
            if state not in seen:
                seen.add(state)
                paths.append((*path, event))
    assert any("back" in state for state in seen) == (LIMITS[limits]["max_runs"] < 3)


def test_a_refusal_is_told_ahead_for_runs_that_come_behind_others_and_changes_nothing() -> None:
    queue: RunQueue[Caller] = RunQueue(max_runs=2, max_queued=1)
    assert [queue.refusal(Caller(None), 0.0, coming) is None for coming in range(4)] == [True, True, True, False]
    runs = [Caller(cost(4.0)) for _ in range(3)]
    assert [queue.offer(run, 0.0) for run in runs] == [True, True, False]
    queue._mean_s = 4.0
    refusal = queue.refusal(Caller(None), 1.0)
    assert refusal is not None and "max_queued=1" in str(refusal) and refusal.retry_after_s == (3 + 3 + 4) / 2
    assert queue.refusal(Caller(None, -1), 1.0) is None  # the one that waits would give way
    assert queue.waiting() == [runs[2]]
    queue.withdraw(runs[2])
    assert queue.refusal(Caller(None, deadline_s=8.0), 1.0) is None  # after 3 s, for 4 s
    late = queue.refusal(Caller(None, deadline_s=7.5), 1.0)
    assert late is not None and "in time" in str(late)
    queue.end(runs[0])
    assert queue.refusal(Caller(None, deadline_s=1.5), 1.0) is None  # a run that starts at once shows what it takes


def test_runs_aside_hold_their_memory_and_no_places() -> None:
    """A run that fits beside their memory starts; if none is in flight any run starts, or all would wait for each
    other.
    """
    queue: RunQueue[Caller] = RunQueue(max_runs=2, memory_limit=100)
    large, small, other = cost(nbytes=60), cost(nbytes=30), cost(nbytes=70)
    first, second, third, fourth = Caller(large), Caller(small), Caller(other), Caller(small)
    assert queue.offer(first, 0.0)
    queue.step_aside(first, 1.0)
    assert queue.offer(second, 1.0)
    assert not queue.offer(third, 1.0)
    queue.step_aside(second, 2.0)
    assert [run for run, _ in queue.decide(2.0)] == [third]
    assert not queue.offer(fourth, 2.0)
    assert not queue.come_back(first, 3.0)  # it was there before the fourth, which does not fit
    assert [run for run, _ in queue.decide(3.0)] == [first]
    assert first.spent_s == 1.0


def test_runs_that_take_too_long_make_room() -> None:
    """Too long is eight times the time of their kind, or of the time that earlier runs had if none has ended since."""
    queue: RunQueue[Caller] = RunQueue(max_runs=2)
    known, unknown = cost(), cost()
    known.observe(1.0)
    first, *others = (Caller(known if k < 3 else unknown) for k in range(5))
    assert queue.offer(first, 0.0)
    for run in others:
        queue.offer(run, 1.0)
    assert queue.next_overdue_s() == 8.0
    queue.let_go(7.9)
    assert list(queue.overdue) == []
    queue.let_go(8.0)
    assert [run for run, _ in queue.decide(8.0)] == others[1:2]
    assert list(queue.overdue) == [first]
    # The second came at 1.0, and gets eight times the 8.0 that the first had.
    assert queue.next_overdue_s() == 65.0
    queue.end(others[0], 1.0)
    assert [run for run, _ in queue.decide(9.0)] == others[2:3]
    assert queue.next_overdue_s() == 16.0
    for run in (first, *others[1:3]):
        assert queue.has_started(run)
        queue.end(run)
    assert [run for run, _ in queue.decide(9.0)] == others[3:]
    queue.step_aside(others[3], 9.0)
    queue.end(others[3])
    assert queue.is_idle and not queue.overdue


def test_a_loop_that_comes_back_again_and_again_leaves_others_their_share() -> None:
    """Fault F46: what a stay takes is charged, so a run of a thousand stays gets no more than a thousand runs."""
    queue: RunQueue[Caller] = RunQueue(max_runs=1)
    loops = [Caller(cost()) for _ in range(3)]
    for run in loops:
        queue.offer(run, 0.0)
    queue.offer(Caller(cost(), 1), 0.0)
    spent: Counter[int] = Counter()
    now_s = 0.0
    for _ in range(800):
        (run,) = queue.in_flight
        now_s += 1.0
        spent[run.priority] += 1
        if run.priority:
            queue.end(run)
            queue.offer(Caller(cost(), 1), now_s)
        else:
            queue.step_aside(run, now_s)
            queue.come_back(run, now_s)
        for _ in queue.decide(now_s):
            pass
    assert 0.115 <= spent[1] / 800 <= 0.135, spent


@pytest.mark.parametrize("seed", range(30))
def test_many_runs_in_any_order(seed: int) -> None:
    """Forty runs of all kinds, which step aside at times: the same rules hold, and no run is left."""
    dice = Random(seed)
    limits = LIMITS[seed % len(LIMITS)]
    kinds = [dice.choice(KINDS[dice.choice(list(KINDS))]) for _ in range(40)]
    world = made(limits, kinds, (), seed % 4)
    while not {"new", "waiting", "running", "left", "aside", "back"}.isdisjoint(world.states):
        world.do(*dice.choice([event for event in world.events() if event[0] != "tick" or dice.random() < 0.01]))
    assert world.queue.queued == len(world.queue.in_flight) == 0
    assert (world.queue.has_waiting, world.queue.aside, world.queue._kinds_aside) == (False, {}, {})


def served(queue: RunQueue[Caller], classes: dict[int, float], until_s: float) -> Counter[int]:
    """The time that each class of runs gets of one server, while each always has runs waiting; and their costs."""
    spent: Counter[int] = Counter()
    now_s = 0.0

    def offered(priority: int) -> Caller:
        run = Caller(cost(classes[priority]), priority)
        queue.offer(run, now_s)
        return run

    for priority in classes:
        for _ in range(3):
            offered(priority)
    while now_s < until_s:
        (run,) = queue.in_flight
        now_s += classes[run.priority]
        spent[run.priority] += round(1000 * classes[run.priority])
        queue.end(run)
        offered(run.priority)
        for _ in queue.decide(now_s):
            pass
    return spent


@pytest.mark.parametrize("classes", [{0: 1.0, 1: 1.0}, {0: 0.1, 5: 10.0}, {0: 10.0, 5: 0.1}, {-3: 1.0, 0: 2.0, 9: 0.5}])
def test_no_priority_gets_less_than_an_eighth_of_the_time(classes: dict[int, float]) -> None:
    """Fault F46: and the priorities behind the first get no more, whatever one of their runs takes."""
    spent = served(RunQueue(1), classes, 4000)
    total = sum(spent.values())
    first, *others = classes
    for priority in others:
        assert 0.115 <= spent[priority] / total <= 0.135, spent
    assert spent[first] / total == pytest.approx(1 - len(others) / 8, abs=0.02)


def test_more_than_eight_priorities_share_equally() -> None:
    """Fault F46."""
    spent = served(RunQueue(1), dict.fromkeys(range(10), 1.0), 4000)
    total = sum(spent.values())
    assert all(0.08 <= spent[priority] / total <= 0.12 for priority in range(10)), spent


def test_nothing_is_owed_to_absent_runs() -> None:
    """Fault F46: a line that has just begun to wait waits its seven."""
    queue: RunQueue[Caller] = RunQueue(1)
    runs = [Caller(cost(), 0) for _ in range(20)]
    for run in runs:
        queue.offer(run, 0)
    started = [runs[0]]

    def ended() -> None:
        queue.end(started[-1])
        started.extend(run for run, error in queue.decide(0) if error is None)

    for _ in range(8):
        ended()
    queue.offer(low := Caller(cost(), 1), 0)
    for _ in range(9):
        ended()
    assert started.index(low) in (8 + 8, 8 + 9)


def waits(queue: RunQueue[Caller], run: Caller) -> float:
    """Offers a run and works the queue off, as each run's cost says; when it starts."""
    now_s = 0.0
    queue.offer(run, now_s)
    ends = {other: other.started_s + other.charge_s for other in queue.in_flight}
    while run not in queue.in_flight:
        other = min(ends, key=lambda each: ends[each])
        now_s = ends.pop(other)
        queue.end(other)
        for started, _ in queue.decide(now_s):
            ends[started] = now_s + started.charge_s
    return now_s


@pytest.mark.parametrize("priority", [0, 1, 2])
@pytest.mark.parametrize("servers", [1, 4])
def test_how_long_a_run_waits_is_foretold(priority: int, servers: int) -> None:
    """Fault F44: the prediction uses the runs in flight, the runs ahead, and the share of the other lines."""
    queue: RunQueue[Caller] = RunQueue(servers)
    for k in range(240):
        queue.offer(Caller(cost(1 + k % 3), k % 3), 0.0)
    run = Caller(cost(), priority, arrival=999)
    foretold_s = queue.wait_s(run, 0.0)
    assert waits(queue, run) == pytest.approx(foretold_s, rel=0.15)


def test_waits_are_predicted_for_unknown_kinds_of_runs() -> None:
    """The prediction is the mean of the runs that have ended."""
    queue: RunQueue[Caller] = RunQueue(1)

    def foretold_s() -> float:
        others = [Caller(None) for _ in range(11)]
        for other in others:
            queue.offer(other, 0.0)
        found = queue.wait_s(Caller(None, arrival=10**6), 0.0)
        for other in others[1:]:
            queue.withdraw(other)
        queue.end(others[0])
        return found

    assert foretold_s() < 1e-3
    for _ in range(60):
        queue.offer(known := Caller(cost()), 0.0)
        queue.end(known, 2.0)
    assert foretold_s() == pytest.approx(22, rel=0.01)


def test_an_urgent_run_is_not_refused_for_runs_behind_it() -> None:
    queue: RunQueue[Caller] = RunQueue(1)
    for _ in range(100):
        queue.offer(Caller(cost(), deadline_s=1000), 0)
    queue.offer(urgent := Caller(cost(), deadline_s=3), 0)
    assert queue.waiting()[0] is urgent
    with pytest.raises(af.OverloadedError, match="would have to wait too long to end in time") as refused:
        queue.offer(Caller(cost(), deadline_s=1.5), 0)
    assert refused.value.retry_after_s == pytest.approx(1)
    with pytest.raises(af.OverloadedError) as refused:
        queue.offer(Caller(cost(), 1, deadline_s=8), 0)
    assert refused.value.retry_after_s == pytest.approx(8, rel=0.2)


def test_expectations_of_a_kind_are_corrected_while_others_are_in_flight() -> None:
    """As after a pause of the whole machine, which its runs had to do with by chance."""
    queue: RunQueue[Caller] = RunQueue(10)
    queue.offer(Caller(cost(1000)), 0)
    kind = cost(12)
    first = Caller(kind, deadline_s=2)
    assert queue.offer(first, 0)
    with pytest.raises(af.OverloadedError, match="would take too long to end in time"):
        queue.offer(Caller(kind, deadline_s=2), 0)  # one is enough to find out
    for _ in range(60):
        queue.begin(first, kind, 0)
        queue.end(first, 0.01)
        queue.offer(first := Caller(kind, deadline_s=2), 0)
    assert queue.offer(Caller(kind, deadline_s=2), 0)


def test_a_full_queue_makes_way_for_more_important_runs() -> None:
    """The last of the line with the highest number goes; each keeps an eighth, and may claim as much."""
    queue: RunQueue[Caller] = RunQueue(1, max_queued=16)

    def offer(priority: int) -> Caller:
        queue.offer(run := Caller(cost(), priority), 0)
        return run

    def gone() -> list[Caller]:
        found = list(queue.decide(0))
        for _, error in found:
            assert isinstance(error, af.OverloadedError)
            assert "this run had to give way to a run of priority" in str(error)
        return [run for run, _ in found]

    offer(0)
    low = [offer(5) for _ in range(16)]
    for k in range(14):
        offer(0)
        assert gone() == [low[15 - k]]
    with pytest.raises(af.OverloadedError, match=r"found the queue full, as 16 wait \(max_queued=16\)"):
        offer(0)
    with pytest.raises(af.OverloadedError):
        offer(5)
    claims = [offer(9) for _ in range(2)]
    assert [run.priority for run in gone()] == [0, 0]
    with pytest.raises(af.OverloadedError):
        offer(9)
    assert queue.waiting()[-2:] == claims
    assert Counter(run.priority for run in queue.waiting()) == {0: 12, 5: 2, 9: 2}


def test_one_place_is_for_the_more_important() -> None:
    queue: RunQueue[Caller] = RunQueue(1, max_queued=1)
    queue.offer(Caller(None), 0)
    queue.offer(low := Caller(None, 1), 0)
    queue.offer(high := Caller(None, 0), 0)
    assert [run for run, _ in queue.decide(0)] == [low]
    assert queue.waiting() == [high]


def test_bytes_make_way_too() -> None:
    queue: RunQueue[Caller] = RunQueue(1, max_queued_bytes=100)
    queue.offer(Caller(None), 0)
    for _ in range(3):
        queue.offer(Caller(None, 1, nbytes=30), 0)
    queue.offer(Caller(None, 0, nbytes=60), 0)
    assert len(list(queue.decide(0))) == 2
    assert queue.queued_bytes == 90
    with pytest.raises(af.OverloadedError, match=r"as 2 wait \(max_queued_bytes=100, of 90 \+ 80\)"):
        queue.offer(Caller(None, 0, nbytes=80), 0)
    assert queue.queued_bytes == 90


def test_what_a_run_needs_counts_once_its_plan_is_known() -> None:
    """A run of an unknown kind is let in without a claim; with its plan, others wait for the memory that it needs."""
    queue: RunQueue[Caller] = RunQueue(max_runs=4, memory_limit=100)
    first, second, third = Caller(None), Caller(cost(nbytes=60)), Caller(cost(nbytes=40))
    assert queue.offer(first, 0.0)
    queue.begin(first, cost(nbytes=60), 0.0)
    assert not queue.offer(second, 0.0)
    assert not queue.offer(third, 0.0)  # it would fit, and waits for its turn
    queue.end(first)
    assert [run for run, _ in queue.decide(0.0)] == [second, third]
    assert queue.reserved_by_others(second) == 40
