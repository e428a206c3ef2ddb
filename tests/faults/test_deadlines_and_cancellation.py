"""Fault F15, F17, F18 and F22-F24: runs that are stopped, and loops of any length."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import asyncflow as af
from tests.conftest import assert_baseline
from tests.faults.kernels import DEADLINES_S, INT, SLOW, CoroutineGate, ThreadGate, in_flight, raising, ticks, until
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.every_loop

Run = Callable[..., Awaitable[Any]]


def _nested() -> Any:
    def outer(i: Any) -> Any:
        return af.while_loop(lambda j: j < 3, lambda j: j + 1, (0,))[0] * 0 + i

    return af.while_loop(lambda i: i >= 0, outer, (0,))[0]


def _without_kernels() -> Any:
    always = af.constant(True)
    return af.while_loop(lambda i: always, lambda i: i, (0,))[0]


def _of_coroutines() -> Any:
    @af.op(outputs=INT)
    async def step(i: Any) -> Any:
        await asyncio.sleep(0)
        return i

    return af.while_loop(lambda i: i >= 0, step, (0,))[0]


def _of_threads() -> Any:
    step = af.op(outputs=INT, cost=SLOW, name="step")(lambda i: i)
    return af.while_loop(lambda i: i >= 0, step, (0,))[0]


ENDLESS: dict[str, Callable[[], Any]] = {
    "kernels": lambda: af.while_loop(lambda i: i >= 0, lambda i: i * 1, (0,))[0],
    "no kernels": _without_kernels,
    "nested": _nested,
    "coroutines": _of_coroutines,
    "threads": _of_threads,
}


@pytest.mark.real_time
@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_endless_loop_with_a_deadline(session: af.Session, graph: af.Graph, kind: str) -> None:
    """Fault F15: stopped on time, other tasks keep running meanwhile, and the session runs again."""
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    endless = ENDLESS[kind]()
    session.plan(endless)
    beside = asyncio.ensure_future(bystander())
    for timeout in DEADLINES_S:
        with pytest.raises(af.DeadlineExceeded, match=rf"timeout={timeout} ") as caught:
            await session.run(endless, timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
        if turns > 1:
            break
    assert turns > 1
    beside.cancel()
    await asyncio.gather(beside, return_exceptions=True)
    assert_baseline(session)
    assert await session.run(af.constant(1) + 1) == 2


async def test_a_deadline_waits_for_the_kernel_in_flight(session: af.Session, graph: af.Graph) -> None:
    """Fault F15: one kernel longer, because nothing outlives the await."""
    gate = ThreadGate()
    fetch = gate.op(1)
    session.plan(fetch)
    for timeout in DEADLINES_S:
        async with in_flight(session.run(fetch, timeout=timeout), gate.entered.is_set) as task:
            if gate.entered.is_set():
                passed = asyncio.Event()
                asyncio.get_running_loop().call_later(timeout, passed.set)
                await passed.wait()
                assert not task.done()
            gate.opened.set()
            with pytest.raises(af.DeadlineExceeded):
                await task
        if gate.entered.is_set():
            break
        gate.opened.clear()
    assert gate.entered.is_set()


@pytest.mark.parametrize("trips", [0, 1, 2, 5000])
async def test_loops_of_any_length(run: Run, graph: af.Graph, trips: int) -> None:
    """Fault F17: zero trips, one, and many."""
    count, total = af.while_loop(lambda i, _: i < trips, lambda i, t: (i + 1, t + i), (0, 0))
    assert await run([count, total]) == [trips, trips * (trips - 1) // 2]


async def test_a_million_trips(graph: af.Graph) -> None:
    """Fault F17: a million iterations of a tiny body."""
    count, total = af.while_loop(lambda i, _: i < 1_000_000, lambda i, t: (i + 1, t + i), (0, 0))
    async with af.Session() as session:
        assert await session.run([count, total]) == [1_000_000, 499_999_500_000]


async def test_memory_does_not_grow_with_the_trips(graph: af.Graph) -> None:
    """Fault F17: ten times the iterations need the same memory."""
    limit = af.placeholder("int64", ())
    (count,) = af.while_loop(lambda i: i < limit, lambda i: i + 1, (0,))
    peaks = []
    async with af.Session(graph) as session:
        await session.run(count, {limit: 10})
        for trips in (300, 3000):
            tracemalloc.start()
            assert await session.run(count, {limit: trips}) == trips
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + 50_000  # 18 bytes an iteration


def everything() -> Any:
    """A program with nested loops, a branch, coroutine ops and thread kernels; its value is 27."""

    @af.op(outputs=INT)
    async def later(x: Any) -> Any:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return x

    on_thread = af.op(outputs=INT, cost=SLOW, name="on_thread")(lambda x: x + 1)

    def outer(i: Any, total: Any) -> Any:
        _, inner = af.while_loop(lambda j, _: j < 3, lambda j, t: (j + 1, later(t) + i), (0, total))
        return i + 1, af.cond(i % 2 < 1, lambda: on_thread(inner), lambda: inner + 0)

    _, total = af.while_loop(lambda i, _: i < 4, outer, (0, 0), parallel_iterations=2)
    return on_thread(later(total)) + 6


EVERYTHING = 27


async def _cancel_after(session: af.Session, fetch: Any, passes: int) -> bool:
    """Cancel a run after `passes` passes of the event loop; return True if it had ended before."""
    task = asyncio.ensure_future(session.run(fetch))
    for _ in range(passes):
        # Makes thread kernels deterministic: each ends in the pass in which it was given to its stream.
        session.devices[0].compute.record().block(PATIENCE_S)  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        if task.done():
            break
    if not task.cancel():
        assert task.result() == EVERYTHING
        return True
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    return False


async def test_a_cancel_in_every_tick(session: af.Session, graph: af.Graph) -> None:
    """Fault F18: before the first node, at each await point and in the last tick: CancelledError once, then baseline.

    A result that is ready is never delivered after a cancel; the session runs correctly after each.
    """
    fetch = everything()
    passes = 0
    while not await _cancel_after(session, fetch, passes):
        assert_baseline(session)
        if passes % 7 == 0:
            assert await session.run(fetch) == EVERYTHING
        passes += 1
    assert passes > 20
    assert_baseline(session)
    assert await session.run(fetch) == EVERYTHING


async def test_a_cancel_waits_for_the_kernel_in_flight(session: af.Session, graph: af.Graph) -> None:
    """Fault F18: in a kernel on the stream thread; what follows it does not start."""
    gate, started = ThreadGate(), []

    @af.op(outputs=INT)
    def follower(x: Any) -> Any:
        started.append(x)
        return x

    async with in_flight(session.run(follower(gate.op(1))), gate.entered.is_set) as task:
        task.cancel()
        await ticks(10)
        assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert started == []


@pytest.mark.parametrize(
    ("limits", "late"),
    [((None, PATIENCE_S), "inner"), ((PATIENCE_S, PATIENCE_S), "inner"), ((PATIENCE_S, PATIENCE_S), "outer")],
    ids=["one", "inner", "outer"],
)
async def test_asyncio_timeout(
    session: af.Session, graph: af.Graph, limits: tuple[float | None, float], late: str
) -> None:
    """Fault F22: the scope whose time is up, once the run has begun, raises TimeoutError, and no other."""
    gate, loop = CoroutineGate(), asyncio.get_running_loop()
    scopes: list[str] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(limits[0]) as outer:
            try:
                async with asyncio.timeout(limits[1]) as inner:
                    scope = inner if late == "inner" else outer
                    gate.on_start = lambda: scope.reschedule(loop.time())
                    await session.run(gate.op(1))
            finally:
                scopes += ["inner"] * inner.expired() + ["outer"] * outer.expired()
    assert scopes == [late]
    assert gate.cancelled == [1]
    assert_baseline(session)


async def test_no_time_at_all(session: af.Session, graph: af.Graph) -> None:
    """Fault F22: a timeout of 0, on either side; nothing runs."""
    gate = CoroutineGate()
    for timeout in (0, 0.0):
        with pytest.raises(af.DeadlineExceeded):
            await session.run(gate.op(1), timeout=timeout)
    for timeout in (-1, -0.1):  # what is left until a deadline that has passed
        with pytest.raises(af.DeadlineExceeded, match=rf"timeout={timeout} had passed before .* pass None"):
            await session.run(gate.op(1), timeout=timeout)
    assert gate.started == []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await session.run(gate.op(1))
    assert_baseline(session)


async def test_a_task_that_was_cancelled_before(session: af.Session, graph: af.Graph) -> None:
    """Fault F22: a cancel that the task caught earlier does not stop later runs: cleaning up may use the session."""

    async def stubborn() -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await session.run(af.constant(20) + 1)

    task = asyncio.ensure_future(stubborn())
    await ticks(1)
    task.cancel()
    assert await task == 21
    assert task.cancelling() == 1


async def test_a_cancel_after_an_error(session: af.Session, graph: af.Graph) -> None:
    """Fault F23: the error stopped the run, so it is raised."""
    gate, failing = ThreadGate(), raising(LookupError)
    async with in_flight(session.run([gate.op(1), failing(2)]), gate.entered.is_set) as task:
        task.cancel()
        await ticks(3)
        gate.opened.set()
        with pytest.raises(af.KernelError, match="LookupError"):
            await task


async def test_an_error_after_a_cancel(session: af.Session, graph: af.Graph) -> None:
    """Fault F23: the cancel stopped the run, so it is raised; the error is its note."""
    gate = ThreadGate(error=LookupError("too late"))
    async with in_flight(session.run(gate.op(1)), gate.entered.is_set) as task:
        task.cancel()
        await ticks(3)
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
    assert any("too late" in note for note in caught.value.__notes__)
    assert task.cancelled()


async def test_a_double_cancel(session: af.Session, graph: af.Graph) -> None:
    """Fault F24: idempotent; the kernel in flight is still waited for."""
    gate = ThreadGate()
    async with in_flight(session.run(gate.op(1)), gate.entered.is_set) as task:
        for _ in range(3):
            task.cancel()
            await ticks(2)
            assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert_baseline(session)


async def test_a_shielded_run(session: af.Session, graph: af.Graph) -> None:
    """Fault F24: the waiting task is cancelled, the run is not, and can be awaited."""
    gate = CoroutineGate()
    run = asyncio.ensure_future(session.run(gate.op(5)))
    waiter = asyncio.ensure_future(asyncio.wait_for(asyncio.shield(run), PATIENCE_S))
    await until(lambda: gate.started)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    gate.opened.set()
    assert await run == 5
    assert gate.cancelled == []
