"""Fault F29, the part of the session: it starts nothing more, lets accepted runs end, and then stops the rest."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import assert_baseline
from tests.faults.kernels import CoroutineGate, in_flight, ticks, until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.every_loop

DRAINED = "is being drained and starts no more runs"
FOR_EVER_S = 1e6


@pytest.fixture
def gate() -> CoroutineGate:
    return CoroutineGate()


def gated(gate: CoroutineGate) -> tuple[af.Tensor, af.Tensor]:
    x = af.placeholder("int64", ())
    return x, gate.op(x)


async def test_accepted_runs_end_and_nothing_new_starts(graph: af.Graph, gate: CoroutineGate) -> None:
    """Fault F29: accepted are runs in flight, and runs that wait for their turn."""
    x, y = gated(gate)
    with graph:
        quick = x + 1
    async with af.Session(graph, max_runs=1) as session:
        runs = [asyncio.create_task(session.run(y, {x: k})) for k in range(3)]
        await until(lambda: gate.started and session.statistics().queued == 2)
        draining = asyncio.create_task(session.drain(FOR_EVER_S))
        await ticks(3)
        prepared = session.prepare(y, [x])
        for ask in (
            lambda: session.run(y, {x: 9}),
            lambda: session.run(quick, {x: 9}),
            lambda: prepared(9),
            lambda: anext(session.stream(y, {x: 9})),
        ):
            with pytest.raises(af.SessionClosedError, match=DRAINED):
                await ask()
        assert not draining.done()
        gate.opened.set()
        await draining
        assert [run.result() for run in runs] == [0, 1, 2]
        assert gate.started == [0, 1, 2]
        assert_baseline(session)
        await session.drain(FOR_EVER_S)  # at once: there is nothing left


@pytest.mark.parametrize("max_runs", [None, 1])
async def test_what_does_not_end_in_time_is_stopped(graph: af.Graph, gate: CoroutineGate, max_runs: int | None) -> None:
    """Fault F29."""
    x, y = gated(gate)
    async with af.Session(graph, max_runs=max_runs) as session:
        runs = [asyncio.create_task(session.run(y, {x: k})) for k in range(3)]
        await until(lambda: len(gate.started) + session.statistics().queued == 3)
        await session.drain(0.01)
        for run in runs:
            with pytest.raises(af.SessionClosedError):
                await run
        assert sorted(gate.cancelled) == sorted(gate.started)
        assert_baseline(session)


async def test_a_run_may_ask_for_others_while_the_session_is_drained(graph: af.Graph, gate: CoroutineGate) -> None:
    """Fault F29: they are part of it."""
    x, y = gated(gate)
    async with af.Session(graph) as session:

        @af.op(outputs=af.spec("int64", ()))
        async def ask(k: Any) -> Any:
            return await session.run(y, {x: int(k)}) + await session.run(x * 1, {x: int(k)})

        with graph:
            both = ask(ask(x))
        async with in_flight(session.run(both, {x: 1}), lambda: gate.started) as outer:
            draining = asyncio.create_task(session.drain(FOR_EVER_S))
            await ticks(3)
            gate.opened.set()
            await draining
            assert outer.result() == 4
        assert gate.started == [1, 2]


async def test_a_call_that_is_compiled_when_draining_begins_runs(graph: af.Graph, gate: CoroutineGate) -> None:
    """Fault F29: it was asked for, though no run is in flight yet; `drain` waits for it."""
    gate.opened.set()
    x, y = gated(gate)
    async with af.Session(graph) as session:
        asked = asyncio.create_task(session.run(y, {x: np.zeros(1, np.int64)[0]}))
        large = asyncio.create_task(session.run(af.sum(af.constant(np.ones(3))) + 1))
        await asyncio.sleep(0)
        await session.drain(FOR_EVER_S)
        assert await asked == 0
        assert await large == 4


async def test_a_run_whose_trace_cannot_be_written_is_over(graph: af.Graph, tmp_path: Path) -> None:
    """Fault F29: `drain` does not wait for it; and a refused run writes no trace."""
    x = af.placeholder("int64", ())
    async with af.Session(graph) as session:
        with pytest.raises(FileNotFoundError):
            await session.run(x + 1, {x: 1}, trace=tmp_path / "nowhere" / "trace.json")
        with pytest.raises(af.FeedError):
            await session.run(x + 1, {x: "one"}, trace=tmp_path / "trace.json")
        assert os.listdir(tmp_path) == []
        await asyncio.wait_for(session.drain(FOR_EVER_S), PATIENCE_S)


async def test_state_is_saved_after_draining(graph: af.Graph, tmp_path: Any) -> None:
    """Fault F29."""
    with graph:
        v = af.Variable(1.0, name="v")
        changed = v.assign(2.0)
    async with af.Session(graph) as session:
        await session.run(changed)
        await session.drain(0)
        await session.save(tmp_path)
    async with af.Session(graph, restore=tmp_path) as session:
        assert await session.run(v) == 2.0


async def test_a_stream_is_handed_out_to_its_end(graph: af.Graph) -> None:
    """Fault F29: also to a consumer that is busy when draining begins."""
    seen: list[af.Tensor] = []

    def body(i: af.Tensor) -> af.Tensor:
        seen.append(i + 1)
        return seen[0]

    with graph:
        af.while_loop(lambda i: i < 4, body, 0, parallel_iterations=1)
    async with af.Session(graph) as session:
        stream = session.stream(seen[0])
        assert await anext(stream) == 1
        draining = asyncio.create_task(session.drain(FOR_EVER_S))
        await ticks(5)
        assert [item async for item in stream] == [2, 3, 4]
        await draining


async def test_an_abandoned_stream_is_stopped_after_the_grace(graph: af.Graph) -> None:
    """Fault F29."""
    seen: list[af.Tensor] = []

    def body(i: af.Tensor) -> af.Tensor:
        seen.append(i + 1)
        return seen[0]

    with graph:
        af.while_loop(lambda i: i < 1000, body, 0, parallel_iterations=1)
    async with af.Session(graph) as session:
        stream = session.stream(seen[0])
        assert await anext(stream) == 1
        await session.drain(0.01)
        with pytest.raises(af.SessionClosedError):
            await anext(stream)
        assert_baseline(session)


@pytest.mark.parametrize("close", [False, True])
async def test_a_lone_member_of_a_batch_does_not_hold_the_session(graph: af.Graph, close: bool) -> None:
    """A member that waits for others to join its batch is computed at once: no more come."""
    with graph:
        x = af.placeholder("float32", (4,))
        y = af.batched(lambda row: row * 2, max_delay_s=FOR_EVER_S, max_size=8)(x)
    async with af.Session(graph) as session:
        runs = [asyncio.create_task(session.run(y, {x: np.full(4, k, np.float32)})) for k in range(2)]
        await until(lambda: session.statistics().runs == 2)
        await ticks(3)
        assert not any(run.done() for run in runs)
        await (session.aclose(FOR_EVER_S) if close else session.drain(FOR_EVER_S))
        assert [run.result()[0] for run in runs] == [0, 2]


async def test_closing_while_it_is_drained(graph: af.Graph, gate: CoroutineGate) -> None:
    """Fault F29: ends both at once."""
    x, y = gated(gate)
    async with af.Session(graph, max_runs=1) as session:
        runs = [asyncio.create_task(session.run(y, {x: k})) for k in range(2)]
        await until(lambda: gate.started)
        draining = asyncio.create_task(session.drain(FOR_EVER_S))
        await ticks(3)
        await session.aclose(0)
        await draining
        for run in runs:
            with pytest.raises(af.SessionClosedError):
                await run


async def test_draining_twice_and_cancelled(graph: af.Graph, gate: CoroutineGate) -> None:
    """A cancelled drain stops nothing; another one goes on."""
    x, y = gated(gate)
    async with af.Session(graph) as session:
        async with in_flight(session.run(y, {x: 1}), lambda: gate.started) as run:
            one, two = (asyncio.create_task(session.drain(FOR_EVER_S)) for _ in range(2))
            await ticks(3)
            one.cancel()
            await asyncio.wait([one])
            assert one.cancelled()
            assert not run.done()
            with pytest.raises(af.SessionClosedError, match=DRAINED):
                await session.run(y, {x: 2})
            gate.opened.set()
            await two
            assert run.result() == 1
    with pytest.raises(af.SessionClosedError, match="the session is closed"):
        await session.drain()
