"""Fault F15, F18, F22-F24, F43 and F46 where runs wait for others: whoever leaves the queue leaves nothing in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.conftest import assert_baseline
from tests.faults.kernels import DEADLINES_S, INT, CoroutineGate, in_flight, ticks, until
from tests.patience import PATIENCE_S

every_loop = pytest.mark.every_loop


def assert_nobody_waits(session: af.Session) -> None:
    """Nothing is counted as in flight, or as waiting, and nothing reserved."""
    assert session._runs.admission is not None
    queue = session._runs.admission.queues[0]
    assert (queue.in_flight, queue.waiting(), queue.queued, queue.queued_bytes) == ({}, [], 0, 0)
    assert (queue.has_waiting, queue._refused, queue._reserved) == (False, [], 0)
    assert_baseline(session)


class Steps:
    """A loop of coroutines that give way; `x` is how many there are, and `started` which runs have begun."""

    def __init__(self) -> None:
        self.started: list[int] = []

        @af.op(outputs=INT)
        async def step(i: Any, name: Any) -> Any:
            if i == 0:
                self.started.append(int(name))
            await asyncio.sleep(0)
            return i + 1

        with af.Graph() as self.graph:
            self.name = af.placeholder("int64", ())
            self.seen: list[af.Tensor] = []

            def body(i: af.Tensor) -> af.Tensor:
                self.seen.append(step(i, self.name))
                return self.seen[0]

            self.last = af.while_loop(lambda i: i < 3, body, 0)


async def _streamed(session: af.Session, steps: Steps, name: int) -> Any:
    return [item async for item in session.stream(steps.seen[0], {steps.name: name})][-1]


async def _from_prepared(session: af.Session, steps: Steps, name: int) -> Any:
    return await session.prepare(steps.last, [steps.name])(name, priority=1)


WAYS: dict[str, Callable[[af.Session, Steps, int], Any]] = {
    "run": lambda session, steps, name: session.run(steps.last, {steps.name: name}),
    "atomic": lambda session, steps, name: session.run(steps.last, {steps.name: name}, atomic=True),
    "with a deadline": lambda session, steps, name: session.run(steps.last, {steps.name: name}, timeout=PATIENCE_S),
    "prepared": _from_prepared,
    "stream": _streamed,
}


@every_loop
@pytest.mark.parametrize("way", WAYS)
async def test_a_cancel_in_every_tick_of_a_run_that_waits(way: str) -> None:
    """Fault F18: the others have their turns, in order, whenever it goes; its result is never delivered after that."""
    steps = Steps()
    passes = 0
    has_ended = False
    async with af.Session(steps.graph, max_runs=1, max_queued_bytes=1000) as session:
        while not has_ended:
            steps.started.clear()
            before, victim, after = (asyncio.ensure_future(WAYS[way](session, steps, name)) for name in range(3))
            await ticks(passes)
            has_ended = not victim.cancel()
            assert await before == await after == 3
            if has_ended:
                assert victim.result() == 3
            else:
                with pytest.raises(asyncio.CancelledError):
                    await victim
            assert steps.started in ([0, 2], [0, 1, 2])
            assert_nobody_waits(session)
            passes += 1
    assert passes > 8


@pytest.mark.real_time
@every_loop
async def test_an_endless_run_makes_room_when_its_time_is_up() -> None:
    """Fault F15: for the next one, which waits for it."""
    with af.Graph() as graph:
        endless = af.while_loop(lambda i: i >= 0, lambda i: i * 1, 0)
        gate = CoroutineGate()
        y = gate.op(af.constant(1))
    gate.opened.set()
    async with af.Session(graph, max_runs=1) as session:
        told = ""
        for timeout in DEADLINES_S:
            first = asyncio.ensure_future(session.run(endless, timeout=timeout))
            await ticks(2)
            assert await session.run(y) == 1
            with pytest.raises(af.DeadlineExceeded) as caught:
                await first
            told = str(caught.value)
            if "did not end" in told:
                break
        assert "did not end" in told
        assert_nobody_waits(session)


@every_loop
async def test_a_timeout_of_asyncio_around_a_run_that_waits() -> None:
    """Fault F22: raises at its own scope, and no DeadlineExceeded."""
    gate = CoroutineGate()
    with af.Graph() as graph:
        y = gate.op(af.constant(1))
    async with af.Session(graph, max_runs=1) as session:
        async with in_flight(session.run(y), lambda: gate.started) as first:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(PATIENCE_S) as scope:
                    loop = asyncio.get_running_loop()
                    loop.call_soon(lambda: scope.reschedule(loop.time()))  # by then it waits
                    await session.run(y, timeout=PATIENCE_S)
            assert not isinstance(caught.value, af.DeadlineExceeded)
            with pytest.raises((af.DeadlineExceeded, af.OverloadedError)):
                await session.run(y, timeout=0)
            gate.opened.set()
            assert await first == 1
        assert gate.started == [1]
        assert_nobody_waits(session)


@every_loop
@pytest.mark.parametrize("what", ["its turn", "a refusal", "closing", "draining"])
async def test_a_cancel_together_with_what_ends_the_wait(what: str) -> None:
    """Fault F23: in the same pass of the event loop; it is cancelled, and the next one has the turn that it had."""
    gate = CoroutineGate()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = gate.op(x)
    async with af.Session(graph, max_runs=1, max_queued=1) as session:

        async def ask_first() -> Any:
            try:
                return await session.run(y, {x: 1})
            finally:  # the victim has its turn by now, and has not run yet
                if what == "its turn":
                    victim.cancel()

        first = asyncio.ensure_future(ask_first())
        await until(lambda: gate.started)
        victim = asyncio.ensure_future(session.run(y, {x: 2}, priority=1))
        await until(lambda: session.statistics().queued)
        beside: list[asyncio.Future[Any]] = []
        if what == "its turn":
            gate.opened.set()
            await asyncio.wait([first])
        else:
            if what == "a refusal":
                other = session.run(y, {x: 3})
                beside.append(asyncio.ensure_future(other))
                beside[0].get_loop().call_soon(victim.cancel)
            else:
                closing = session.aclose() if what == "closing" else session.drain(0)
                beside.append(asyncio.ensure_future(closing))
                beside[0].get_loop().call_soon(victim.cancel)
            await ticks(1)
            gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await victim
        await asyncio.wait([first, *beside])
        assert 2 not in gate.started
        if what in ("its turn", "a refusal"):
            assert first.result() == 1
            assert await session.run(y, {x: 4}) == 4
            assert gate.started == [1, *[3] * len(beside), 4]
        else:
            assert isinstance(first.exception(), af.SessionClosedError) or first.result() == 1
        assert_nobody_waits(session)


@every_loop
async def test_a_double_cancel_and_a_shield_of_a_run_that_waits() -> None:
    """Fault F24: one cancel is enough; a shielded run has its turn."""
    gate = CoroutineGate()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = gate.op(x)
    async with af.Session(graph, max_runs=1) as session:
        async with in_flight(session.run(y, {x: 1}), lambda: gate.started) as first:
            twice, run = (asyncio.ensure_future(session.run(y, {x: k})) for k in (2, 3))
            waiter = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(run), PATIENCE_S))
            await until(lambda: session.statistics().queued == 2)
            twice.cancel()
            twice.cancel()
            waiter.cancel()
            await asyncio.wait([twice, waiter])
            assert twice.cancelled()
            assert waiter.cancelled()
            gate.opened.set()
            assert [await first, await run] == [1, 3]
        assert gate.started == [1, 3]
        assert_nobody_waits(session)


@every_loop
async def test_a_thousand_runs_two_at_a_time() -> None:
    """Fault F43: all correct, and never more than two."""
    running: set[int] = set()
    most = 0

    @af.op(outputs=INT)
    async def slow(x: Any) -> Any:
        nonlocal most
        running.add(int(x))
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.discard(int(x))
        return x + 1

    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = slow(x)
    async with af.Session(graph, max_runs=2) as session:
        results = await asyncio.gather(*(session.run(y, {x: k}, priority=k % 3) for k in range(1000)))
        assert results == list(range(1, 1001))
        assert most == 2
        assert_nobody_waits(session)


@pytest.mark.slow
def test_low_priority_flood_and_high_priority_trickle() -> None:
    """Fault F46, F44: at five times the capacity, the few important runs take 1.2 times as long as alone."""
    served: dict[int, list[float]] = {}
    with af.Graph() as graph:
        seconds = af.placeholder("float64", ())

        @af.op(outputs=af.spec("float64", ()))
        async def serve(seconds: Any) -> Any:
            await asyncio.sleep(float(seconds))
            return seconds

        y = serve(seconds)

    async def main(flood: float) -> tuple[float, float]:
        served.clear()
        loop = asyncio.get_running_loop()
        useful_s = 0.0

        async def client(session: af.Session, rate: float, priority: int) -> None:
            dice = Random(priority)

            async def ask(takes_s: float) -> None:
                nonlocal useful_s
                asked_s = loop.time()
                try:
                    await session.run(y, {seconds: np.float64(takes_s)}, priority=priority, timeout=20.0)
                except (af.OverloadedError, af.DeadlineExceeded):
                    assert priority == 1
                else:
                    served.setdefault(priority, []).append(loop.time() - asked_s)
                    useful_s += takes_s

            async with asyncio.TaskGroup() as group:
                while loop.time() < began_s + 100:
                    await asyncio.sleep(dice.expovariate(rate))
                    group.create_task(ask(dice.expovariate(1)))

        async with af.Session(graph, max_runs=8, max_queued=32) as session:
            began_s = loop.time()
            async with asyncio.TaskGroup() as group:
                group.create_task(client(session, 1.6, 0))
                if flood:
                    group.create_task(client(session, flood, 1))
            assert_nobody_waits(session)
        return float(np.quantile(served[0], 0.99)), useful_s

    with virtual_clock() as clock:
        alone_s, _ = clock.run(main(0))
        flooded_s, useful_s = clock.run(main(8 * 4.8))
    assert flooded_s <= 1.2 * alone_s
    assert useful_s >= 0.9 * 8 * 100
