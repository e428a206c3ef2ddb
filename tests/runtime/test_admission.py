"""Conformance 97, Fault F43-F45: admitted runs end in time, others are refused at once, and refusing costs nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.memory import MemoryAccount
from asyncflow.runtime.calls.session_options import SessionOptions
from asyncflow.runtime.gates.admission import Admission
from asyncflow.testing import virtual_clock
from benchmarks.walks import walk_of
from tests.faults.kernels import DEADLINES_S, INT, CoroutineGate, in_flight

MATRIX = np.zeros((1024, 1024), np.float32)
MATRIX.flags.writeable = False


class Program:
    """A run that waits until it is released, and a run that needs no scheduler."""

    def __init__(self) -> None:
        self.gate = CoroutineGate()
        with af.Graph() as self.graph:
            self.x = af.placeholder("int64", ())
            self.slow = self.gate.op(self.x)
            self.quick = self.x + 1

    def run(self, session: af.Session, number: int, **options: Any) -> Any:
        return session.run(self.slow, {self.x: np.int64(number)}, **options)


@pytest.fixture
def program() -> Program:
    return Program()


async def until(condition: Any) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to that")


def test_overload() -> None:
    """Behaviour 97: F44: five times as many runs as a card can compute, each of use only within six times its own
    time.
    """
    with af.Graph() as graph:
        x = af.placeholder("float32", (1024, 1024))
        y = af.sum(x @ x @ x)

    async def serve(**limits: Any) -> tuple[float, Counter[str], int]:
        loop = asyncio.get_running_loop()
        async with af.Session(graph, devices=["sim:0"], **limits) as session:
            prepared = session.prepare(y, [x])
            await prepared(MATRIX)
            asked_s = loop.time()
            await prepared(MATRIX)
            alone_s = loop.time() - asked_s
            started = session.statistics().completed
            ends: Counter[str] = Counter()

            async def ask() -> None:
                try:
                    await prepared(MATRIX, timeout=6 * alone_s)
                    ends["in time"] += 1
                except af.AsyncflowError as error:
                    ends[type(error).__name__] += 1

            begun_s = loop.time()
            async with asyncio.TaskGroup() as group:
                for _ in range(60):
                    group.create_task(ask())
                    await asyncio.sleep(alone_s / 5)
                capacity = (loop.time() - begun_s) / alone_s
            return capacity, ends, session.statistics().completed - started

    for limits in ({"max_runs": 1}, {"max_runs": 2, "max_queued": 3}, {}):
        with virtual_clock("1 x v100", shapes_only=True) as clock:
            capacity, ends, computed = clock.run(serve(**limits))
        assert ends["in time"] >= 0.9 * capacity, (limits, ends)
        assert computed - ends["in time"] <= 0.1 * capacity, (limits, ends)
        assert ends["OverloadedError"] >= 30
    with virtual_clock("1 x v100", shapes_only=True) as clock:
        _, ends, computed = clock.run(serve(max_runs=None))
    assert ends["in time"] <= 5  # the card worked for all sixty, and for nobody
    assert computed == 60


@pytest.mark.parametrize(("spread", "timeout"), [(0.5, 1.5), (0.8, 3.0)])
def test_what_runs_take_is_not_known_exactly(spread: float, timeout: float) -> None:
    """Behaviour 97: F44: runs that take more or less, each of use within `timeout` times what most take, five times
    too many."""
    random = Random(97)
    taken: dict[int, float] = {}
    in_time: list[int] = []
    with af.Graph() as graph:
        number = af.placeholder("int64", ())

        @af.op(outputs=INT)
        async def serve(number: Any) -> Any:
            began_s = asyncio.get_running_loop().time()
            try:
                await asyncio.sleep(random.uniform(1 - spread, 1 + spread))
            finally:
                taken[int(number)] = asyncio.get_running_loop().time() - began_s
            return number

        answer = serve(number)

    async def main() -> None:
        async with af.Session(graph, max_runs=2) as session:

            async def ask(k: int) -> None:
                with suppress(af.OverloadedError, af.DeadlineExceeded):
                    in_time.append(await session.run(answer, {number: np.int64(k)}, timeout=timeout))

            async with asyncio.TaskGroup() as group:
                for k in range(200):
                    group.create_task(ask(k))
                    await asyncio.sleep(0.1)

    with virtual_clock("1 x v100") as clock:
        clock.run(main())
    useful = sum(taken[k] for k in in_time) / sum(taken.values())
    assert useful >= 0.85, useful
    assert sum(taken.values()) >= 0.9 * 2 * 20, "it was idle"


async def test_a_refusal_comes_at_once_and_says_when_to_ask_again(program: Program) -> None:
    """Behaviour 97: F44: nothing is waited for, nothing is computed."""
    async with af.Session(max_runs=1, max_queued=1) as session:
        session.plan(program.slow, [program.x]).cost.observe(1.5)
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as first:
            async with in_flight(program.run(session, 2), lambda: session.statistics().queued) as second:
                asked = program.run(session, 3)
                with pytest.raises(af.OverloadedError, match=r"overloaded: 1 run in flight \(max_runs=1\)") as caught:
                    asked.send(None)
                assert "this run found the queue full, as 1 wait (max_queued=1); it did not start" in str(caught.value)
                assert (caught.value.runs, caught.value.queued) == (1, 1)
                assert 1.5 <= caught.value.retry_after_s <= 3
                with pytest.raises(af.OverloadedError):  # what is fed is neither looked at nor copied
                    await session.run(program.slow, {program.x: "no number"})
                assert session.statistics()[5:7] == (1, 2)
                program.gate.opened.set()
                assert [await first, await second] == [1, 2]
        assert program.gate.started == [1, 2]
        assert await program.run(session, 4) == 4


async def test_a_refusal_is_as_short_with_a_thousand_that_wait(program: Program) -> None:
    """Behaviour 97: F44: it walks through as many functions, however many wait."""
    walks = []
    for queued in (10, 1000):
        async with af.Session(max_runs=1, max_queued=queued) as session:
            plan = session.plan(program.slow, [program.x])
            plan.cost.observe(1.0)
            admission = session._runs.admission
            assert admission is not None
            tickets = [admission.apply(plan, inf, 0.0) for _ in range(queued + 1)]

            async def refused(session: af.Session = session) -> None:
                for options in ({}, {"timeout": 2.0}):
                    with pytest.raises(af.OverloadedError):
                        await program.run(session, 1, **options)

            walks.append((await walk_of(refused)).total())
            for ticket in tickets:
                admission.leave(ticket, 0.0)
    assert walks[1] <= walks[0] + 40  # where in the line it would stand is looked up by halving
    assert walks[1] <= 130


async def test_runs_wait_their_turn_in_order(program: Program) -> None:
    async with af.Session(max_runs=2) as session:
        tasks = [asyncio.create_task(program.run(session, k)) for k in range(6)]
        await until(lambda: session.statistics().queued == 4 and len(program.gate.started) == 2)
        program.gate.opened.set()
        assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4, 5]
        assert program.gate.started == [0, 1, 2, 3, 4, 5]


async def test_runs_start_by_priority_deadline_and_arrival(program: Program) -> None:
    """Fault F46: whatever way they are asked for."""
    async with af.Session(program.graph, max_runs=1) as session:
        prepared = session.prepare(program.slow, [program.x])
        session.plan(program.slow, [program.x]).cost.observe(1.0)
        first = asyncio.create_task(program.run(session, 0))
        await until(lambda: program.gate.started)
        asked = [
            asyncio.create_task(ask)
            for ask in (
                program.run(session, 6, priority=1),
                program.run(session, 5, priority=1, timeout=1e6),
                program.run(session, 3),
                prepared(4),
                prepared(2, timeout=2e6),
                program.run(session, 1, timeout=1e6, priority=np.int64(0)),
                from_a_thread(program, session, 7, priority=2),
            )
        ]
        await until(lambda: session.statistics().queued == len(asked))
        program.gate.opened.set()
        assert await asyncio.gather(first, *asked) == [0, 6, 5, 3, 4, 2, 1, 7]
        assert program.gate.started == list(range(8))
        with pytest.raises(TypeError, match="priority is an integer, and lower ones go first; got str 'high'"):
            await program.run(session, 1, priority="high")


async def from_a_thread(program: Program, session: af.Session, number: int, **options: Any) -> Any:
    fed = {program.x: np.int64(number)}
    return await asyncio.wrap_future(await asyncio.to_thread(session.run_threadsafe, program.slow, fed, **options))


async def test_nothing_is_computed_for_a_caller_that_has_left(program: Program) -> None:
    """Behaviour 97: cancelled while it waits, also in the very pass in which its turn comes."""
    async with af.Session(max_runs=1) as session:
        first, second, third = (asyncio.create_task(program.run(session, k)) for k in (1, 2, 3))
        await until(lambda: session.statistics().queued == 2)
        second.cancel()
        await asyncio.wait([second])
        assert session.statistics().queued == 1
        program.gate.opened.set()
        first.add_done_callback(lambda _: third.cancel())
        await asyncio.wait([first, third])
        assert second.cancelled()
        assert third.cancelled()
        assert await program.run(session, 4) == 4
        assert 2 not in program.gate.started


async def test_a_deadline_that_passes_in_the_queue(program: Program) -> None:
    """Fault F45: not executed, and counted."""
    async with af.Session(max_runs=1) as session:
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as first:
            refused: list[str] = []
            for timeout in DEADLINES_S:
                with pytest.raises((af.DeadlineExceeded, af.OverloadedError)) as caught:
                    await program.run(session, 2, timeout=timeout)
                refused.append(str(caught.value))
                assert session.statistics()[5:7] == (0, len(refused))
                if caught.type is af.DeadlineExceeded:  # else its time was up before it could queue
                    break
            assert "waited too long for others" in refused[-1]
            program.gate.opened.set()
            await first
        assert program.gate.started == [1]


async def test_a_run_that_cannot_end_in_time_is_not_started(program: Program) -> None:
    """Behaviour 97: the runs before it decide when it is asked for; its own time decides when its turn comes."""
    async with af.Session(max_runs=1) as session:
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as first:
            plan = session.plan(program.slow, [program.x])
            async with in_flight(program.run(session, 2, timeout=60), lambda: session.statistics().queued) as second:
                plan.cost.recent_s.extend([1e6] * 4)
                with pytest.raises(af.OverloadedError, match="would have to wait too long to end in time"):
                    await program.run(session, 3, timeout=60)
                program.gate.opened.set()
                await first
                with pytest.raises(af.DeadlineExceeded, match="waited too long for others"):
                    await second
        assert program.gate.started == [1]


async def test_an_expectation_that_is_wrong_is_put_right(program: Program) -> None:
    """While nothing is in flight, a run starts whatever is expected of it."""
    program.gate.opened.set()
    async with af.Session(max_runs=2) as session:
        await program.run(session, 1)
        plan = session.plan(program.slow, [program.x])
        plan.cost.recent_s[0] = 1e6
        assert await program.run(session, 2, timeout=60) == 2
        assert plan.cost.expected_s <= 0.8e6


async def test_one_slow_run_refuses_no_others(program: Program) -> None:
    """Behaviour 97: the expected time is the time of most of the last runs."""
    program.gate.opened.set()
    async with af.Session(max_runs=1) as session:
        plan = session.plan(program.slow, [program.x])
        for number in range(3):
            await program.run(session, number)
        plan.cost.observe(1e6)
        await program.run(session, 3)
        assert plan.cost.expected_s < 1e3


async def test_a_run_that_is_stopped_late_counts(program: Program) -> None:
    """Else a plan that has become slow would go on to be tried for ever."""
    async with af.Session(max_runs=2) as session:
        plan = session.plan(program.slow, [program.x])
        for timeout in DEADLINES_S:
            plan.cost.recent_s.clear()
            with pytest.raises(af.DeadlineExceeded, match="did not end within"):
                await program.run(session, 1, timeout=timeout)
            if plan.cost.expected_s > timeout / 5:  # else it began late, and was stopped soon
                break
        assert plan.cost.expected_s > timeout / 5


async def test_what_needs_no_scheduler_does_not_wait(program: Program) -> None:
    async with af.Session(max_runs=1, max_queued=0) as session:
        session.plan(program.quick, [program.x])
        prepared = session.prepare(program.quick, [program.x])
        await prepared(1)
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as first:
            await asyncio.sleep(0)
            assert await prepared(np.int64(2)) == 3
            program.gate.opened.set()
            await first


async def test_a_run_that_fails_makes_room(program: Program) -> None:
    with program.graph:
        negative = af.constant([1.0])[program.x]
    async with af.Session(max_runs=1, max_queued=0) as session:
        for _ in range(3):
            with pytest.raises(af.KernelError):
                await session.run(negative, {program.x: np.int64(7)})
            with pytest.raises(af.FeedError):
                await session.run(program.slow)
        program.gate.opened.set()
        assert await program.run(session, 1) == 1


async def test_a_run_inside_a_run_does_not_wait_for_it() -> None:
    """The inner run is part of the outer one, which would wait for itself."""
    inner = Program()
    inner.gate.opened.set()
    async with af.Session(max_runs=1, max_queued=0) as session:

        @af.op(outputs=INT)
        async def ask(x: Any) -> Any:
            return await inner.run(session, int(x))

        with af.Graph():
            y = ask(af.constant(5))
        assert await session.run(y) == 5


async def test_a_stream_has_a_place_but_while_it_waits_for_its_consumer() -> None:
    """The consumer may itself wait for runs of the session, which would else wait for the stream."""
    opened = asyncio.Event()

    @af.op(outputs=INT, stateful=True)
    async def gated(x: Any) -> Any:
        if x == 2:
            await opened.wait()
        return x

    with af.Graph():
        seen: list[af.Tensor] = []

        def body(i: af.Tensor) -> af.Tensor:
            seen.append(gated(i + 1))
            return seen[0]

        last = af.while_loop(lambda i: i < 4, body, 0)
        other = af.constant(5) * 2
    async with af.Session(max_runs=1, max_queued=0) as session:
        async for item in session.stream(seen[0]):
            if item == 1:
                with pytest.raises(af.OverloadedError):
                    await session.run(other)
                opened.set()
            elif item == 2:
                await until(lambda: session.statistics().aside == 1)
                assert await session.run(other) == 10
        assert await session.run(last) == 4


async def test_closing_ends_the_wait(program: Program) -> None:
    session = af.Session(max_runs=1)
    async with session:
        first, second = (asyncio.create_task(program.run(session, k)) for k in (1, 2))
        await until(lambda: session.statistics().queued == 1)
        closing = asyncio.create_task(session.aclose())
        with pytest.raises(af.SessionClosedError):
            await second
        program.gate.opened.set()
        assert await first == 1
        await closing
    assert program.gate.started == [1]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_runs is at least 1; got 0"):
        af.Session(max_runs=0)
    with pytest.raises(ValueError, match="max_queued is at least 0; got -1"):
        af.Session(max_runs=1, max_queued=-1)
    with pytest.raises(ValueError, match="without max_runs none ever does"):
        af.Session(max_runs=None, max_queued=1)
    with pytest.raises(TypeError, match=r"max_runs is an integer; got float 1\.5"):
        af.Session(max_runs=1.5)  # type: ignore[arg-type]


async def test_a_run_that_never_began_says_nothing_of_its_plan(graph: af.Graph) -> None:
    """Its wait after it was let in is not time that runs of the plan take."""
    x = af.placeholder("float32", ())
    async with af.Session(graph) as session:
        plan, admission = session.plan(x * 2.0, [x]), Admission(SessionOptions(max_runs=1))
        ticket = admission.apply(plan, inf, 1.0)
        admission.leave(ticket, 2.0)
        assert not plan.cost.recent_s
        ticket = admission.apply(plan, inf, 2.0)
        admission.queues[0].begin(ticket, plan.cost, 3.0)
        admission.leave(ticket, 3.5, is_whole=True)
        assert list(plan.cost.recent_s) == [0.5]


async def test_learnt_times_outlast_a_growing_graph(program: Program) -> None:
    program.gate.opened.set()
    async with af.Session(max_runs=1) as session:
        for number in range(3):
            await program.run(session, number)
        learnt = session.plan(program.slow, [program.x]).cost
        with program.graph:
            af.constant(1)
        await program.run(session, 3)
        assert session.plan(program.slow, [program.x]).cost is learnt
        assert len(learnt.recent_s) == 4


async def test_runs_wait_for_as_much_memory_as_their_kind_needed_before(graph: af.Graph) -> None:
    """Of 1 MB, each needs 400 kB: two at a time once one has run, and a small one beside them."""
    gate = CoroutineGate()
    x, number = af.placeholder("float32", (100_000,)), af.placeholder("int64", ())
    held = x * 2
    with af.control_dependencies([held]):
        opened = gate.op(number)
    with af.control_dependencies([opened]):
        total = af.sum(held)
    small = gate.op(number)
    fed = np.ones(100_000, np.float32)
    fed.flags.writeable = False
    async with af.Session(graph, max_runs=8, memory_limit=1_000_000) as session:
        gate.opened.set()
        assert await session.run(total, {x: fed, number: 0}) == 200_000
        assert session.plan(total, [x, number]).cost.nbytes == 400_000
        gate.opened.clear()
        runs = [asyncio.create_task(session.run(total, {x: fed, number: k})) for k in range(1, 6)]
        await until(lambda: len(gate.started) == 3)
        first = asyncio.create_task(session.run(small, {number: 6}, priority=-1))
        await until(lambda: len(gate.started) == 4)
        assert session.statistics()[0:1] + session.statistics()[5:6] == (3, 3)
        gate.opened.set()
        assert await asyncio.gather(*runs) == [200_000] * 5
        assert await first == 6
        assert session.plan(total, [x, number]).cost.nbytes >= 300_000
        assert session.statistics().memory["cpu:0"].peak <= 1_000_000


async def test_feeds_of_waiting_runs_are_limited(program: Program) -> None:
    """The limit is in bytes; runs that start at once need no place."""
    with program.graph:
        fed = af.placeholder("float32", (None,))
        with af.control_dependencies([program.slow]):
            total = af.sum(fed)

    def ask(session: af.Session, count: int, value: Any = None) -> Any:
        return session.run(total, {program.x: 1, fed: np.ones(count, np.float32) if value is None else value})

    async with af.Session(max_runs=1, max_queued_bytes=1000) as session:
        async with in_flight(ask(session, 1000), lambda: program.gate.started) as first:
            second = asyncio.create_task(ask(session, 200))
            await until(lambda: session.statistics().queued)
            assert session.statistics().queued_bytes == 808
            for value in (np.ones(100, np.float32), [1.0] * 100, tuple([1.0] * 100)):
                with pytest.raises(af.OverloadedError, match=r"as 1 wait \(max_queued_bytes=1000, of 808 \+ [48]08\)"):
                    await ask(session, 0, value)
            third = asyncio.create_task(ask(session, 10))
            await until(lambda: session.statistics().queued == 2)
            assert session.statistics().queued_bytes == 856
            third.cancel()
            await asyncio.wait([third])
            assert session.statistics().queued_bytes == 808
            program.gate.opened.set()
            assert [await first, await second] == [1000, 200]
        assert session.statistics().queued_bytes == 0


async def test_what_runs_leave_behind_is_not_reserved_for_ever(graph: af.Graph) -> None:
    """The memory counts for the run that made it, and by and by for none."""
    x = af.placeholder("float32", ())
    account = MemoryAccount("cpu:0")
    options = SessionOptions(max_runs=2, memory_limit=1_000_000)
    admission = Admission(options, [account])
    async with af.Session(graph) as session:
        plan = session.plan(x * 2.0, [x])

        def run(nbytes: int, beside: int = 0) -> np.ndarray[Any, Any]:
            ticket = admission.apply(plan, inf, 0.0)
            admission.queues[0].begin(ticket, plan.cost, 0.0)
            made, kept = np.empty(nbytes, np.uint8), np.empty(beside, np.uint8)
            account.track(made)
            account.track(kept)
            del made
            admission.leave(ticket, 1.0, is_whole=True)
            return kept

        run(400_000)
        assert plan.cost.nbytes == 400_000
        kept = run(400_000, 500_000)
        assert plan.cost.nbytes == 900_000
        for _ in range(40):
            run(400_000)
        assert plan.cost.nbytes == pytest.approx(400_000, rel=0.02)
        assert account.used == kept.nbytes == 500_000


async def test_with_auto_a_request_is_refused_where_runs_of_all_lengths_would_be(program: Program) -> None:
    admission = Admission(SessionOptions(max_runs="auto", max_queued=0))
    async with af.Session() as session:
        plans = [session.plan(fetch, [program.x]) for fetch in (program.slow, program.quick)]
    for plan, taken_s in zip(plans, (1.0, 0.001), strict=True):
        plan.cost.observe(taken_s)
        admission.leave(admission.apply(plan, inf, 0.0), 0.0)
    slow = [admission.apply(plans[0], inf, 0.0) for _ in range(admission.max_runs)]
    with admission.expect(inf, 1.0):
        assert not admission.expected, "it may be a quick one, and may need no place"
    with pytest.raises(af.OverloadedError, match='max_runs="auto"'):
        admission.expect(inf, 11.0)  # none was quick of late
    quick = [admission.apply(plans[1], inf, 11.0) for _ in range(admission.max_runs)]
    with pytest.raises(af.OverloadedError, match='max_runs="auto"'):
        admission.expect(inf, 12.0)
    assert admission.refused == 2
    for ticket in (slow[0], quick[0]):
        admission.leave(ticket, 12.0)
        admission.expect(inf, 12.0)
        admission.apply(plans[ticket is quick[0]], inf, 12.0)
