"""Runs of one session beside each other: small ones never wait for large ones, and ordered work stays in order.

Large runs are held by a `threading.Event` until a test lets them go, so order is seen and no time is measured.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.watch.trace import WHOLE
from tests.clocks import WorkClock
from tests.conftest import OpenSession, assert_baseline
from tests.faults.kernels import INT, SLOW, ThreadGate, in_flight, until
from tests.patience import PATIENCE_S
from tests.runtime.test_sliced_region import Probe, counting

BUSY_NS = 500_000
"""A step that is too long for the event loop, of which a few are still a short run."""

MANY = 12
"""More large runs than a session has threads for them."""


def _gates(count: int) -> list[ThreadGate]:
    return [ThreadGate() for _ in range(count)]


@pytest.mark.parametrize("large", [1, MANY])
async def test_a_small_run_beside_large_ones(work: WorkClock, graph: af.Graph, large: int) -> None:
    """Fault F69, Behaviour 95: it ends while they have every thread that they can get."""
    probe, gates = Probe(work, busy_ns=BUSY_NS), _gates(large)
    small = counting(probe, 3)
    x = af.placeholder("int64", ())
    held = [gate.op(x) for gate in gates]
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        assert await session.run(small) == 3  # alone, and measured
        waiting = [asyncio.ensure_future(session.run(fetch, {x: 7})) for fetch in held]
        try:
            await asyncio.to_thread(gates[0].entered.wait, PATIENCE_S)
            for _ in range(5):
                assert await session.run(small) == 3
            assert not any(run.done() for run in waiting)
            assert len(set(probe.threads)) > 1  # it really needs one
        finally:
            for gate in gates:
                gate.opened.set()
        assert await asyncio.gather(*waiting) == [7] * large
        assert_baseline(session)


async def test_a_first_run_beside_large_ones(graph: af.Graph) -> None:
    """Fault F69, Behaviour 95: a run that was never measured does not wait for runs that are known to be long
    either.
    """
    gate = ThreadGate()
    x = af.placeholder("int64", ())
    long, new = gate.op(x), af.op(outputs=INT, name="new")(lambda v: v + 1)(x)
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        async with in_flight(session.run(long, {x: 1}), gate.entered.is_set) as run:
            assert await session.run(new, {x: 1}) == 2
            gate.opened.set()
            assert await run == 1


async def test_different_runs_of_one_function_overlap(graph: af.Graph) -> None:
    """Two firings of a function without state meet inside it."""
    entered = [threading.Event(), threading.Event()]

    @af.op(outputs=INT, cost=SLOW)
    def meets(v: Any) -> Any:
        entered[v].set()
        assert entered[1 - v].wait(PATIENCE_S)
        return v

    x = af.placeholder("int64", ())
    fetch = meets(x)
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*(session.run(fetch, {x: k}) for k in range(2))) == [0, 1]


async def test_a_stateful_function_is_never_on_two_threads(graph: af.Graph) -> None:
    """Not even the event loop's, which it would be on as soon as it is known to be short; other runs go on."""
    inside, most, threads = 0, 0, []
    gate = threading.Event()

    @af.op(outputs=INT, stateful=True)
    def counts(v: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threads.append(threading.current_thread().name)
        if v < 0:
            gate.wait(PATIENCE_S)
        inside -= 1
        return v

    x = af.placeholder("int64", ())
    fetch = counts(x)
    async with af.Session(graph, max_runs=None) as session, asyncio.timeout(PATIENCE_S):
        for _ in range(100):
            if await session.run(fetch, {x: 1}) == 1 and threads[-1] == threading.current_thread().name:
                break  # from now on it runs inline
        node = next(node for node in session.plan(fetch, [x]).partitions[0].nodes if node.conduct.is_user)
        node.times.cost = None  # and is unmeasured again
        async with in_flight(session.run(fetch, {x: -1}), lambda: inside) as held:
            others = [asyncio.ensure_future(session.run(fetch, {x: k})) for k in range(20)]
            assert await session.run(x + 1, {x: 1}) == 2
            lanes = session.devices[0].lanes.streams  # type: ignore[attr-defined]
            await until(lambda: sum(lane.pending for lane in lanes) == 21)
            gate.set()
            assert await held == -1
            assert await asyncio.gather(*others) == list(range(20))
    assert most == 1
    assert threads[-20:] == [threads[-21]] * 20


@pytest.mark.parametrize("seed", [None, 0])
async def test_effects_keep_their_order_on_any_threads(
    open_session: OpenSession, graph: af.Graph, seed: int | None
) -> None:
    """Behaviour 95: reads and writes of a variable in one run, each behind kernels of other lengths, on threads."""
    threads: set[str] = set()

    @af.op(outputs=INT, cost=SLOW)
    def twos(v: Any, *, length: int) -> Any:
        threads.add(threading.current_thread().name)
        return np.int64(2 + 0 * sum(range(length)))

    variable = af.Variable(np.int64(1), name="v")
    x = af.placeholder("int64", ())
    fetches, wanted, now = [], [], 1
    for step in range(12):
        factor = twos(x, length=step % 5 * 2_000)
        fetches += [variable.assign(variable.read() * factor + step), variable.read()]
        now = now * 2 + step
        wanted += [now, now]
    async with open_session(graph, seed=seed) as session, asyncio.timeout(PATIENCE_S):
        assert await session.run(fetches, {x: 1}) == wanted
    assert len(threads) > 1
    assert threading.current_thread().name not in threads


async def test_runs_that_add_to_one_variable_lose_nothing(graph: af.Graph) -> None:
    """Many at once, on all the threads there are."""
    total = af.Variable(np.zeros(2_000), name="total")
    slow = af.op(outputs=af.spec("float64", (2_000,)), cost=SLOW, name="slow")(lambda v: v + 1.0)
    x = af.placeholder("float64", (2_000,))
    add = total.assign_add(slow(x))
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(session.run(add, {x: np.zeros(2_000)}) for _ in range(100)))
        assert np.array_equal(await session.run(total), np.full(2_000, 100.0))


# -- what traces show of it ------------------------------------------------------------------------------------------


def _assert_one_after_the_other(trace: af.Trace) -> Counter[str]:
    """No thread computes two things at once; the number of firings by thread."""
    lanes: dict[str, list[Any]] = {}
    for firing in trace.firings:
        lanes.setdefault(firing.stream, []).append(firing)
    for firings in lanes.values():
        firings.sort(key=lambda firing: firing.started_ns)
        for earlier, later in pairwise(firings):
            assert earlier.ended_ns <= later.started_ns
    return Counter({stream: len(firings) for stream, firings in lanes.items()})


async def test_waiting_for_a_thread_is_not_computing(work: WorkClock, graph: af.Graph) -> None:
    """Behaviour 101: of runs that queue for threads, each computes in its own time, and its wait has a name."""
    probe = Probe(work, busy_ns=BUSY_NS)
    n = af.placeholder("int64", ())
    count = counting(probe, n)
    trace = af.Trace(detail="region")
    async with af.Session(graph, max_runs=None) as session:
        await session.run(count, {n: 2})
        threads = session.devices[0].lanes.streams  # type: ignore[attr-defined]
        probe.gate.clear()
        runs = [asyncio.ensure_future(session.run(count, {n: 3}, trace=trace)) for _ in range(MANY)]
        await until(lambda: sum(thread.pending for thread in threads) == MANY)
        probe.gate.set()
        assert await asyncio.gather(*runs) == [3] * MANY
    lanes = _assert_one_after_the_other(trace)
    regions = [firing for firing in trace.firings if firing.op in WHOLE]
    assert lanes["inline"] <= len(trace.firings) - MANY
    for firing in regions:
        assert firing.queued_ns is not None
        assert firing.scheduled_ns <= firing.queued_ns <= firing.started_ns < firing.ended_ns
        parts = firing.pending_ns, firing.queueing_ns, firing.computing_ns, firing.awaiting_ns
        assert sum(parts) == firing.ended_ns - firing.scheduled_ns
    first_end_ns = min(firing.ended_ns for firing in regions)
    queued = [f for f in regions if f.queued_ns is not None and f.queued_ns < first_end_ns <= f.started_ns]
    assert len(queued) >= MANY - len(threads) > 0


async def test_taking_turns_is_not_computing(work: WorkClock, graph: af.Graph) -> None:
    """Behaviour 101: loops that share the event loop compute one after the other, in parts."""
    n = af.placeholder("int64", ())
    count = counting(Probe(work, busy_ns=50_000, flops=1.0), n)
    trace = af.Trace(detail="region")
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(count, {n: 60}, trace=trace) for _ in range(3)))
    assert set(_assert_one_after_the_other(trace)) == {"inline"}
    regions = [firing for firing in trace.firings if firing.op in WHOLE]
    assert len({firing.run for firing in regions}) == 3
    for run in {firing.run for firing in regions}:
        parts = [firing for firing in regions if firing.run == run]
        assert [part.part for part in parts] == list(range(len(parts)))
        assert [part.outputs for part in parts[:-1]] == [""] * (len(parts) - 1)
        assert parts[-1].outputs == "int64[]"
    assert max(firing.part for firing in regions) > 0


async def test_awaiting_is_not_computing(graph: af.Graph) -> None:
    """Behaviour 101."""

    @af.op(outputs=INT)
    async def later(v: Any) -> Any:
        await asyncio.sleep(0)
        return v

    x = af.placeholder("int64", ())
    trace = af.Trace()
    async with af.Session(graph) as session:
        await session.run(later(x), {x: 1}, trace=trace)
    (firing,) = [firing for firing in trace.firings if firing.node == "later"]
    assert (firing.computing_ns, firing.queueing_ns) == (0, 0)
    assert firing.awaiting_ns == firing.ended_ns - firing.started_ns > 0
