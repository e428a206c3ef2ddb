"""`max_runs="auto"`: runs that compute are bounded, and a run that waits, in whatever way, has no place."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, aclosing
from math import inf
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.plan import Plan
from asyncflow.runtime.calls.session_options import SessionOptions
from asyncflow.runtime.gates.admission import Admission, AdmissionTicket
from tests.clocks import WorkClock
from tests.faults.kernels import INT, SLOW, CoroutineGate, ThreadGate, until
from tests.patience import PATIENCE_S

MANY = 30


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("int64", ())


def places(session: af.Session) -> int:
    assert session._runs.admission is not None
    return session._runs.admission.max_runs


def occupied(admission: Admission, plan: Plan, mean_s: float, count: int) -> list[AdmissionTicket]:
    """Runs of a plan that is known to take so long, each of which has asked for a place."""
    plan.cost.mean_s = mean_s
    return [admission.apply(plan, inf, 0.0) for _ in range(count)]


async def test_it_is_the_default_and_counts_threads(graph: af.Graph) -> None:
    assert SessionOptions().max_runs == "auto"
    for count in (1, 3):
        async with af.Session(graph, devices=[f"cpu:{k}" for k in range(count)]) as session:
            assert places(session) == sum(device.threads for device in session.devices) + 2
    async with af.Session(graph, max_runs=None) as session:
        assert session._runs.admission is None


async def test_runs_in_coroutines_have_no_places(x: af.Tensor) -> None:
    gate = CoroutineGate()
    slow = gate.op(x) + 1
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):
        runs = [asyncio.ensure_future(session.run(slow, {x: k})) for k in range(MANY)]
        await until(lambda: len(gate.started) == MANY)
        found = session.statistics()
        assert (found.runs, found.queued, found.aside) == (MANY, 0, MANY)
        assert session.load() == af.SessionLoad()
        gate.opened.set()
        assert await asyncio.gather(*runs) == list(range(1, MANY + 1))
        assert session.statistics().aside == 0


async def test_runs_that_compute_have_places_and_others_wait(x: af.Tensor) -> None:
    gate = ThreadGate()
    slow = gate.op(x)
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):
        most = places(session)
        runs = [asyncio.ensure_future(session.run(slow, {x: k})) for k in range(most + 2)]
        await until(lambda: session.statistics().queued)
        assert session.load()[:2] == (most, 2)
        gate.opened.set()
        assert await asyncio.gather(*runs) == list(range(most + 2))
        assert session.load() == af.SessionLoad()


async def test_runs_within_runs_need_no_places(x: af.Tensor) -> None:
    """All places are taken by runs that compute what a run within them gives."""

    @af.op(outputs=INT, cost=SLOW)
    def double(k: Any) -> Any:
        return 2 * k

    @af.op(outputs=INT)
    async def outer(k: Any) -> Any:
        return await session.run(doubled, {x: k})

    asked, doubled = outer(x), double(x)
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*(session.run(asked, {x: k}) for k in range(MANY))) == [2 * k for k in range(MANY)]


async def test_streams_that_wait_for_their_consumers_have_no_places(x: af.Tensor) -> None:
    inside: list[af.Tensor] = []

    def body(i: af.Tensor) -> af.Tensor:
        inside.append(i * i)
        return i + 1

    af.while_loop(lambda i: i < 4, body, (x,), parallel_iterations=1)
    gate = ThreadGate()
    gate.opened.set()
    last = gate.op(x)
    async with af.Session() as session, AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        streams = [await stack.enter_async_context(aclosing(session.stream(inside[0], {x: 0}))) for _ in range(MANY)]
        assert [await anext(each) for each in streams] == [0] * MANY
        assert await session.run(last, {x: 5}) == 5
        assert [[int(item) async for item in each] for each in streams] == [[1, 4, 9]] * MANY
        assert session.statistics().aside == 0


async def test_a_run_that_waits_unseen_loses_its_place(x: af.Tensor) -> None:
    """Functions on all threads wait for what a later run of their kind does: in time, it starts."""
    done = threading.Event()
    entered: list[int] = []

    @af.op(outputs=INT, cost=SLOW)
    def wait(k: Any) -> Any:
        entered.append(int(k))
        assert done.wait(PATIENCE_S)
        return k

    @af.op(outputs=INT)
    async def tell(k: Any) -> Any:
        done.set()
        return k

    either = af.cond(x < 0, lambda: tell(x), lambda: wait(x))
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):
        waiting = [asyncio.ensure_future(session.run(either, {x: k})) for k in range(places(session))]
        await until(lambda: len(entered) >= session.devices[0].threads)
        assert await session.run(either, {x: -1}) == -1
        assert await asyncio.gather(*waiting) == list(range(places(session)))


async def test_runs_wait_for_runs_of_their_length_alone(graph: af.Graph) -> None:
    x = af.placeholder("float32", ())
    async with af.Session(max_runs=None) as session:
        long, short, new = (session.plan(x * k, [x]) for k in (2.0, 3.0, 4.0))
        admission = Admission(SessionOptions())
        most = admission.max_runs
        held = occupied(admission, long, 1.0, most + 2)
        assert [ticket.turn is None for ticket in held] == [True] * most + [False] * 2
        assert all(ticket.turn is None for ticket in occupied(admission, short, 0.005, most))
        first = occupied(admission, new, 0.0, most + 1)
        assert [ticket.turn is None for ticket in first] == [True] * most + [False]
        assert admission.load(0.0).queued == 3
        assert admission.load(0.0).wait_s == pytest.approx(1.0 * (most + 2) / most)
        for ticket in (*held, *first):
            admission.leave(ticket, 1.0)
        assert admission.counts()[0] == 0
        admission.close("the test ends")


async def test_an_error_names_the_chooser_of_the_limit(graph: af.Graph) -> None:
    x = af.placeholder("float32", ())
    async with af.Session(max_runs=None) as session:
        plan, admission = session.plan(x * 2.0, [x]), Admission(SessionOptions(max_queued=0))
        held = occupied(admission, plan, 1.0, admission.max_runs)
        assert admission.load(0.0).is_full
        said = rf'overloaded: {len(held)} runs in flight \(max_runs="auto", here {len(held)}\)'
        with pytest.raises(af.OverloadedError, match=said):
            admission.apply(plan, inf, 0.0)
    with pytest.raises(ValueError, match="max_runs is 'auto', an integer, or None for no limit; got 'all'"):
        af.Session(max_runs="all")  # type: ignore[arg-type]


@pytest.mark.parametrize("max_runs", ["auto", None])
async def test_runs_that_share_calls_are_not_held_back(work: WorkClock, graph: af.Graph, max_runs: Any) -> None:
    """Work of their own before a batch, and more of them than places: all are in one call."""
    x = af.placeholder("float32", ())

    @af.op(outputs=af.spec("float32", ()))
    def own(x: Any) -> Any:
        return x

    total = af.batched(lambda row: row * 2.0, max_size=64)(own(x)) + 1.0
    async with af.Session(graph, max_runs=max_runs) as session:
        for _ in range(3):
            found = await asyncio.gather(*(session.run(total, {x: np.float32(k)}) for k in range(64)))
            assert found == [2.0 * k + 1 for k in range(64)]
        (statistics,) = session.statistics().batches.values()
        assert statistics.largest == 64
        assert session.plan(total, [x]).survey.gathers
