"""Runs that pass the memory limit together wait for one another."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.gates.memory_turns import MemoryTurns
from tests.conftest import OpenSession
from tests.faults.kernels import DEADLINES_S, SLOW, CoroutineGate, ThreadGate, ticks, until
from tests.patience import PATIENCE_S

LARGE = np.ones(100_000, np.float32)
BESIDE = "runs that it does not fit into memory with did not end"
LIMIT = 1_000_000
"""Room for two arrays of that size, and not for three."""


def holds(x: af.Tensor, turns: int = 300) -> af.Tensor:
    """Holds twice `x`, and then goes through a loop, before it needs room for the result."""
    held = x * 2.0
    count, _ = af.while_loop(lambda i, v: i < turns, lambda i, v: (i + 1, af.tanh(v)), (0, held[0]))
    with af.control_dependencies([count]):
        return held + 0.0 * af.astype(count, "float32")


async def test_runs_that_fit_one_by_one_all_end(graph: af.Graph) -> None:
    """Runs that begin meanwhile queue behind the runs that wait."""
    x = af.placeholder("float32", (None,))
    y = holds(x)
    async with af.Session(graph, memory_limit=LIMIT, regions=False) as session, asyncio.timeout(PATIENCE_S):
        sums = await asyncio.gather(*(_sum_of(session, y, {x: LARGE * k}) for k in range(1, 9)))
        assert sums == [200_000.0 * k for k in range(1, 9)]
        assert session.statistics().used_bytes["cpu:0"] == 0
        assert not session._runs.memory_turns._waiting  # type: ignore[union-attr]


async def test_feeds_of_waiting_runs_take_no_room(graph: af.Graph) -> None:
    """An array of the first attempt held it, and so it counted: then no run found room, whoever was alone."""
    x = af.placeholder("float32", (None,))
    rows = af.TensorArray("float32", 1).write(0, x)
    total = af.sum(holds(x)) + af.sum(rows.read(0))
    async with af.Session(graph, memory_limit=4 * LIMIT // 3, regions=False) as session, asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*(session.run(total, {x: LARGE}) for _ in range(4))) == [300_000.0] * 4
        assert session._runs.in_flight.begun > 4
        assert session.statistics().used_bytes["cpu:0"] == 0


async def test_what_a_run_draws_does_not_depend_on_whether_it_is_done_again() -> None:
    """Nor does what later ones draw: there they went by how many runs had been done again."""
    with af.Graph(seed=7) as graph:
        x = af.placeholder("float32", (None,))
        y = holds(x + af.random.uniform((100_000,), dtype="float32"))
    found, begun = [], 0
    for limit in (None, 2 * LIMIT):
        session = af.Session(graph, memory_limit=limit, regions=False, max_runs=None)
        async with session, asyncio.timeout(PATIENCE_S):
            runs = [_sum_of(session, y, {x: LARGE}) for _ in range(8)]
            found.append([*await asyncio.gather(*runs), await _sum_of(session, y, {x: LARGE})])
            begun = session._runs.in_flight.begun
    assert begun > len(found[0])
    assert len(set(found[0])) == len(found[0])
    assert found[1] == found[0]


async def test_a_run_that_is_done_again_is_alone() -> None:
    """The last that waits, too: what begins meanwhile queues behind it."""
    turns, order = MemoryTurns(), []

    async def attempt(name: str, gate: asyncio.Event) -> list[Any]:
        order.append(name)
        if order == ["first", "second"]:
            raise af.OutOfMemoryError("beside the first", requested=2, used=1, limit=2, node="x", op="add")
        await gate.wait()
        order.append(f"{name} ended")
        return []

    def start(name: str, gate: asyncio.Event) -> asyncio.Task[list[Any]]:
        return asyncio.ensure_future(turns.values(lambda: attempt(name, gate), nullcontext))

    gates = [asyncio.Event() for _ in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        tasks = [start("first", gates[0]), start("second", gates[1])]
        await until(lambda: "second" in order)
        gates[0].set()
        await until(lambda: order.count("second") == 2)
        tasks.append(start("third", gates[2]))
        await ticks(5)
        gates[1].set()
        gates[2].set()
        await asyncio.gather(*tasks)
    assert order == ["first", "second", "first ended", "second", "second ended", "third", "third ended"]


async def _sum_of(session: af.Session, y: af.Tensor, feeds: Any) -> float:
    return float((await session.run(y, feeds)).sum())


async def test_what_does_not_fit_alone_fails(graph: af.Graph) -> None:
    """Beside others too, which are right."""
    x = af.placeholder("float32", (None,))
    y, much = holds(x), [holds(x * float(k)) for k in range(4)]
    async with af.Session(graph, memory_limit=LIMIT, regions=False) as session, asyncio.timeout(PATIENCE_S):
        with pytest.raises(af.OutOfMemoryError):
            await session.run(much, {x: LARGE})
        results = await asyncio.gather(
            *(_sum_of(session, y, {x: LARGE}) for _ in range(3)), session.run(much, {x: LARGE}), return_exceptions=True
        )
        assert results[:3] == [200_000.0] * 3
        assert isinstance(results[3], af.OutOfMemoryError)


@pytest.mark.usefixtures("work")
async def test_a_run_with_visible_repetition_fails_as_ever(graph: af.Graph) -> None:
    """The run is not retried."""
    x = af.placeholder("float32", (None,))
    calls = []

    # Short, as far as is known: both firings are in one drive of the event loop, and the second passes the limit. On
    # threads the other run could get through its loop meanwhile, and pass the limit first: beside a run of this kind,
    # which nobody waits for, that would be its end.
    @af.op(outputs=lambda spec: spec, cost=lambda *shapes: 1.0)
    def noted(v: Any) -> Any:
        calls.append(1)
        return v + 1.0

    y, z = holds(x, turns=3000), noted(noted(x))
    async with af.Session(graph, memory_limit=LIMIT, regions=False) as session, asyncio.timeout(PATIENCE_S):
        other = asyncio.ensure_future(_sum_of(session, y, {x: LARGE}))
        await until(lambda: session.statistics().used_bytes["cpu:0"])
        with pytest.raises(af.OutOfMemoryError):
            await session.run(z, {x: LARGE})
        assert await other == 200_000.0
    assert len(calls) == 2


@pytest.mark.parametrize("regions", [False, True])
async def test_a_failed_run_holds_nothing_while_its_error_is_kept(graph: af.Graph, regions: bool) -> None:
    """The error keeps no results either: the next run finds all the room."""
    x = af.placeholder("float32", (None,))
    much, y = [x * float(k) for k in range(2, 6)], holds(x)
    async with af.Session(graph, memory_limit=LIMIT, regions=regions) as session, asyncio.timeout(PATIENCE_S):
        with pytest.raises(af.OutOfMemoryError) as kept:
            await session.run(much, {x: LARGE})
        assert session.statistics().used_bytes["cpu:0"] == 0
        assert await _sum_of(session, y, {x: LARGE}) == 200_000.0
        del kept


async def test_no_run_waits_for_a_run_that_may_wait_for_it(graph: af.Graph) -> None:
    """A coroutine in one holds memory until the other has ended."""
    x, ticket, gate = af.placeholder("float32", (None,)), af.placeholder("int64", ()), CoroutineGate()
    held = x * 2.0
    with af.control_dependencies([held.node]):
        opened = gate.op(ticket)  # by then, what the run holds is there
    with af.control_dependencies([opened.node]):
        waits = [held + 1.0]
    async with af.Session(graph, memory_limit=LIMIT, regions=False) as session, asyncio.timeout(PATIENCE_S):
        task = asyncio.ensure_future(session.run(waits, {x: LARGE, ticket: 1}))
        await until(lambda: gate.started)
        with pytest.raises(af.OutOfMemoryError):
            await session.run([x * 3.0, x * 4.0], {x: LARGE})
        gate.opened.set()
        await task


async def test_a_waiting_run_may_be_cancelled_or_late(graph: af.Graph) -> None:
    """The run waits behind a run that ends on request: how far another run has come meanwhile depends on the
    machine.
    """
    x, opened, attempts = af.placeholder("float32", (None,)), asyncio.Event(), []
    y = holds(x, turns=20)

    async def holding() -> list[Any]:
        await opened.wait()
        return []

    async def too_large_at_first() -> list[Any]:
        attempts.append(opened.is_set())
        if len(attempts) == 1:
            raise af.OutOfMemoryError("beside another", requested=2, used=1, limit=2, node="x", op="add")
        return []

    async with af.Session(graph, memory_limit=LIMIT, regions=False) as session, asyncio.timeout(PATIENCE_S):
        turns = session._runs.memory_turns
        assert turns is not None
        others = [asyncio.ensure_future(turns.values(each, nullcontext)) for each in (holding, too_large_at_first)]
        await until(lambda: len(turns._waiting) == 1)
        tasks = [asyncio.ensure_future(_sum_of(session, y, {x: LARGE})) for _ in range(5)]
        await until(lambda: len(turns._waiting) == 6)
        told = ""
        for timeout in DEADLINES_S:
            with pytest.raises(af.DeadlineExceeded) as caught:
                await session.run(y, {x: LARGE}, timeout=timeout)
            told = str(caught.value)
            if told.startswith(BESIDE):
                break
        assert told.startswith(BESIDE)
        tasks[-1].cancel()
        opened.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:-1] == [200_000.0] * 4
        assert isinstance(results[-1], asyncio.CancelledError)
        await asyncio.gather(*others)
        assert (attempts, len(turns._waiting)) == ([False, True], 0)


async def test_on_cards_too(open_session: OpenSession) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,))
        y = holds(x, turns=20)
    async with open_session(graph, memory_limit=4 * LIMIT) as session:
        assert await asyncio.gather(*(_sum_of(session, y, {x: LARGE}) for _ in range(12))) == [200_000.0] * 12


@pytest.mark.parametrize("regions", [False, True])
async def test_what_callers_keep_of_results_takes_no_room(graph: af.Graph, regions: bool) -> None:
    """Kept results are the caller's, like feeds: requests of which many results were kept failed one after the
    other.
    """
    x, v = af.placeholder("float32", (None,)), af.Variable(LARGE, name="v")
    alone, y, kept = x * 3.0, holds(x), []
    async with af.Session(graph, memory_limit=LIMIT, regions=regions) as session, asyncio.timeout(PATIENCE_S):
        kept += [await session.run(fetches, {x: LARGE}) for fetches in (alone, y, [y, x]) * 2]
        kept += await asyncio.gather(*(session.run(y, {x: LARGE}) for _ in range(4)))
        assert session.statistics().used_bytes["cpu:0"] == 0
        kept.append(await session.run(v))
        assert session.statistics().used_bytes["cpu:0"] == LARGE.nbytes  # the variable, and not its copy
    assert len(kept) == 11


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("is_map", [False, True])
async def test_computation_for_a_gone_run_is_waited_for(graph: af.Graph, is_map: bool) -> None:
    """The computation holds memory until its thread is done: the next run, alone but for that, failed for good."""
    gate = ThreadGate()

    @af.op(outputs=lambda v, w: v, pure=True, rows=True, cost=SLOW)
    def slow(v: Any, w: Any) -> Any:
        return gate.block(v) + w

    def grown(v: af.Tensor) -> af.Tensor:
        return slow(v * 2.0, v * 3.0)

    @af.vertex_function(state=af.spec("float32", LARGE.shape), children=1)
    def cell(v: af.Vertex) -> None:
        v.scatter(grown(v.pull() + v.gather(0)))

    trees, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, LARGE.size))
    if is_map:
        first = second = af.sum(af.vertex_map(cell, trees, x, initial=0.0, share=True).roots)
    else:
        first, second = (af.batched(lambda v: af.sum(grown(v)), cost="none")(x[0]) for _ in range(2))
    structure = trees.feeds(af.InputGraph.chain([1])) if is_map else {}
    feeds: Any = {x: LARGE[None], **structure}

    async def peak_of(limit: int, *, is_beside: bool) -> int:
        async with af.Session(graph, memory_limit=limit, regions=False) as session, asyncio.timeout(PATIENCE_S):
            if is_beside:
                gone = asyncio.ensure_future(session.run(first, feeds))
                await until(gate.entered.is_set)
                gone.cancel()
                await asyncio.wait([gone])
            found = asyncio.ensure_future(session.run(second, feeds))
            await until(lambda: found.done() or session.statistics().memory["cpu:0"].peak > limit)
            gate.opened.set()
            assert await found == 5 * LARGE.size
            return session.statistics().memory["cpu:0"].peak

    gate.opened.set()
    # Before the gate opens a second call needs one array more than one alone, and a second set three; a set that starts
    # while another ends may itself need one more.
    limit = await peak_of(1 << 30, is_beside=False) + (3 if is_map else 1) * LARGE.nbytes // 2
    gate.opened.clear()
    gate.entered.clear()
    assert await peak_of(limit, is_beside=True) > limit
