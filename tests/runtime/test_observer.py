"""Observers of runs: told once of every run and batch, whatever becomes of it, and never in its way (Fault F60)."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any
from weakref import ref

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.watch.observer import ObservedBatch, ObservedRun
from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import INT, CoroutineGate, raising, until


class Log:
    """An observer that keeps its notifications."""

    def __init__(self) -> None:
        self.began: list[ObservedRun] = []
        self.ended: list[ObservedRun] = []
        self.batches: list[ObservedBatch] = []
        self.steps: list[tuple[str, int]] = []

    def run_began(self, run: ObservedRun) -> None:
        assert run.status == "running"
        self.began.append(run)

    def run_ended(self, run: ObservedRun) -> None:
        assert run.ended_s is not None and run.status != "running"
        self.ended.append(run)

    def batch_ended(self, batch: ObservedBatch) -> None:
        self.batches.append(batch)

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        self.steps.extend([(function, size)] * steps)

    @property
    def statuses(self) -> list[str]:
        assert sorted(map(id, self.began)) == sorted(map(id, self.ended))
        return [run.status for run in self.ended]


async def test_every_end_of_a_run_is_told_once() -> None:
    gate = CoroutineGate()
    log = Log()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        quick, slow, bad = x + 1, gate.op(x), raising(lambda: ValueError("no"))(x)
    one = {x: np.int64(1)}
    async with af.Session(graph, max_runs=1, max_queued=0) as session:
        await session.run(quick, one)
        session.observe(log)
        assert await session.run(quick, one) == 2
        assert await session.prepare(quick, [x])(np.int64(2)) == 3
        with pytest.raises(af.FeedError):
            await session.run(quick, {x: np.float32(1)})
        with pytest.raises(af.KernelError):
            await session.run(bad, one)
        waiting = asyncio.ensure_future(session.run(slow, one))
        await until(lambda: gate.started)
        with pytest.raises(af.OverloadedError):
            await session.run(slow, one)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert log.statuses == ["ok", "ok", "invalid", "error", "refused", "cancelled"]
    assert [run.label for run in log.ended] == [quick.name, quick.name, quick.name, bad.name, slow.name, slow.name]
    assert [run.started_s is None for run in log.ended] == [False, False, True, False, True, False]
    assert isinstance(log.ended[3].error, af.KernelError)


def test_times_are_of_asking_starting_and_ending() -> None:
    log = Log()

    @af.op(outputs=INT)
    async def second(x: Any) -> Any:
        await asyncio.sleep(1)
        return x

    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = second(x)

    async def main() -> None:
        async with af.Session(graph, max_runs=1) as session:
            session.observe(log)
            await asyncio.gather(*(session.run(y, {x: np.int64(n)}) for n in range(3)))
            with pytest.raises(af.DeadlineExceeded):
                await session.run(y, {x: np.int64(0)}, timeout=0.5)

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())
    times = [(run.asked_s, run.started_s, run.ended_s) for run in log.ended]
    assert times == [(0.0, 0.0, 1.0), (0.0, 1.0, 2.0), (0.0, 2.0, 3.0), (3.0, 3.0, 3.5)]
    assert log.statuses[-1] == "deadline"


@pytest.mark.every_loop
@pytest.mark.parametrize("shares", [False, True])
async def test_times_go_on_within_a_round_of_the_event_loop(shares: bool) -> None:
    """As uvloop's own do not: a run that is over at once has begun after it was asked for, and ended after that."""
    log = Log()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = af.batched(lambda x: x + 1)(x) if shares else x + 1
    async with af.Session(graph) as session:
        session.observe(log)
        for _ in range(3):
            await session.run(y, {x: 1})
    for run in log.ended:
        assert run.started_s is not None and run.ended_s is not None
        assert run.asked_s < run.started_s < run.ended_s


async def test_a_stream_is_one_run() -> None:
    log = Log()
    inside: Any = None

    def body(i: Any) -> Any:
        nonlocal inside
        inside = i
        return i + 1

    with af.Graph() as graph:
        af.while_loop(lambda i: i < 5, body, af.constant(0))
    async with af.Session(graph) as session:
        session.observe(log)
        assert [int(item) async for item in session.stream(inside)] == [0, 1, 2, 3, 4]
        async with aclosing(session.stream(inside)) as items:
            assert await anext(items) == 0
    assert log.statuses == ["ok", "cancelled"]
    assert all(run.started_s is not None and run.label == inside.name for run in log.ended)


@pytest.mark.usefixtures("work")
async def test_a_batch_names_the_runs_of_its_members() -> None:
    log = Log()
    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))
        y = af.batched(lambda row: row * 2, cost="none")(x)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    async with af.Session(graph) as session:
        session.observe(log)
        found = await asyncio.gather(*(session.run(y, {x: row}) for row in rows))
    assert np.array_equal(found, rows * 2)
    (batch,) = log.batches
    assert batch.size == 4 and batch.error is None and batch.started_s <= batch.ended_s
    assert set(batch.runs) == set(log.ended) and len(log.ended) == 4


@pytest.mark.usefixtures("work")
async def test_steps_of_a_pool_are_told() -> None:
    log = Log()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = af.while_loop(lambda i: i < 4, lambda i: i + 1, x, pool=af.Pool(4))
    async with af.Session(graph) as session:
        session.observe(log)
        await asyncio.gather(*(session.run(y, {x: np.int64(n)}) for n in (0, 2)))
    assert [size for _, size in log.steps][:2] == [2, 2] and len(log.steps) == 4


async def test_an_inner_run_is_told_by_itself_and_variables_of_an_observer_hold_inside() -> None:
    seen: list[str] = []
    variable: ContextVar[str] = ContextVar("variable", default="outside")

    class Sets(Log):
        def run_began(self, run: ObservedRun) -> None:
            super().run_began(run)
            run.context.run(variable.set, run.label)

    log = Sets()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        inner = x + 1

        @af.op(outputs=INT)
        async def asks(value: Any) -> Any:
            seen.append(variable.get())
            return await session.run(inner, {x: value})

        outer = asks(x)
    async with af.Session(graph) as session:
        session.observe(log)
        assert await session.run(outer, {x: np.int64(1)}) == 2
        assert variable.get() == "outside"
    assert seen == [outer.name]
    assert [run.label for run in log.ended] == [inner.name, outer.name] and log.statuses == ["ok", "ok"]


@pytest.mark.parametrize(
    ("observer", "wrong"), [(None, "got NoneType None, without run_began"), (Log, "got type .*Log")]
)
async def test_a_wrong_observer_is_refused_at_once(observer: Any, wrong: str) -> None:
    async with af.Session() as session:
        with pytest.raises(
            TypeError, match=f"with the methods run_began, run_ended, batch_ended, pool_stepped.*{wrong}"
        ):
            session.observe(observer)


async def test_an_observer_that_raises_touches_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """Fault F60."""

    class Raises(Log):
        def run_began(self, run: ObservedRun) -> None:
            raise RuntimeError("the observer is broken")

        def run_ended(self, run: ObservedRun) -> None:
            raise RuntimeError("it is still broken")

    log = Log()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = x + 1
    async with af.Session(graph) as session:
        remove = session.observe(Raises())
        session.observe(log)
        with caplog.at_level(logging.WARNING):
            for number in range(5):
                assert await session.run(y, {x: np.int64(number)}) == number + 1
        assert len(caplog.records) == 1 and "the observer is broken" in str(caplog.records[0].exc_info)
        remove()
        remove()  # again does nothing
        await session.run(y, {x: np.int64(0)})
    assert log.statuses == ["ok"] * 6


@pytest.mark.usefixtures("no_collector")
async def test_what_an_observed_run_had_is_freed_with_it() -> None:
    """However it ends: its error has a traceback, which leads to all that the run had."""

    class Forgetful(Log):
        def run_began(self, run: ObservedRun) -> None:
            runs.append(ref(run))

        def run_ended(self, run: ObservedRun) -> None:
            """Keeps nothing."""

        def batch_ended(self, batch: ObservedBatch) -> None:
            """Keeps nothing."""

    runs: list[ref[ObservedRun]] = []
    gate = CoroutineGate()
    with af.Graph() as graph:
        n = af.placeholder("int64", ())
        quick, slow, bad = n + 1, gate.op(n), raising(lambda: ValueError("no"))(n)
        batch = af.batched(lambda k: af.constant([1, 2])[k])(n)
        pooled = af.while_loop(lambda i: i < n, lambda i: i + 1, 0, pool=af.Pool(4))
    async with af.Session(graph) as session:
        session.observe(Forgetful())
        for fetch in (quick, batch, pooled):
            assert await session.run(fetch, {n: 1}) == {quick: 2, batch: 2, pooled: 1}[fetch]
        for fetch in (bad, batch):
            with pytest.raises(af.KernelError):
                await session.run(fetch, {n: 9})
        for fetch in (slow, pooled):
            with pytest.raises(af.DeadlineExceeded):
                await session.run(fetch, {n: 10**12}, timeout=0.01)
            task = asyncio.ensure_future(session.run(fetch, {n: 10**12}))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            del task
        await until(lambda: not session.statistics().runs)
        assert len(runs) == 9
        await until(lambda: all(run() is None for run in runs))
