"""Runs that wait for other runs give those their places in a session with `max_runs`, and come back for their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import asyncflow as af
from asyncflow.streams.virtual import VirtualClockLoop
from tests.conftest import OpenSession
from tests.faults.kernels import INT, CoroutineGate
from tests.patience import PATIENCE_S


def in_a_loop(take: Callable[[], af.Tensor]) -> af.Tensor:
    """The sum of two elements, taken by a loop."""
    return af.while_loop(lambda i, total: i < 2, lambda i, total: (i + 1, total + take()), (0, 0))[1]


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop go on until `condition` holds; on virtual time, let that pass."""
    pause_s = 1e-4 if isinstance(asyncio.get_running_loop(), VirtualClockLoop) else 0
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(pause_s)
    raise AssertionError("it never came to that")


async def aside(session: af.Session, *fetches: Any, feeds: Any = None, **options: Any) -> list[asyncio.Task[Any]]:
    """Runs that have stepped aside, one after the other."""
    tasks = []
    for fetch in fetches:
        count = session.statistics().aside + 1
        tasks.append(asyncio.ensure_future(session.run(fetch, feeds, **options)))
        await until(lambda count=count: session.statistics().aside == count)  # type: ignore[misc]
    return tasks


@pytest.mark.parametrize("where", ["alone", "before a sum", "in a loop"])
async def test_takers_make_room_for_putters(open_session: OpenSession, graph: af.Graph, where: str) -> None:
    queue = af.FIFOQueue(10, INT, name="q")
    x = af.placeholder("int64", ())
    found = {
        "alone": queue.dequeue,
        "before a sum": lambda: queue.dequeue() + queue.dequeue(),
        "in a loop": lambda: in_a_loop(queue.dequeue),
    }[where]()
    puts = [queue.enqueue(x + k) for k in range(1 if where == "alone" else 2)]
    async with open_session(graph, max_runs=2) as session:
        takers = await aside(session, found, found)
        assert session.statistics().runs == 2
        async with asyncio.timeout(PATIENCE_S):
            for k in (10, 20):
                await session.run(puts, {x: k})
            assert sum(await asyncio.gather(*takers)) == (30 if where == "alone" else 62)
        assert (session.statistics().queued, session.statistics().refused, session.statistics().aside) == (0, 0, 0)


async def test_putters_into_a_full_queue_make_room_for_takers(open_session: OpenSession, graph: af.Graph) -> None:
    queue = af.FIFOQueue(1, INT, name="q")
    x = af.placeholder("int64", ())
    put, take = queue.enqueue(x), queue.dequeue()
    async with open_session(graph, max_runs=1, max_queued=0) as session:
        await session.run(put, {x: 0})
        (waiting,) = await aside(session, put, feeds={x: 1})
        assert [await session.run(take) for _ in range(2)] == [0, 1]
        await waiting


async def test_a_barrier_a_mutex_and_an_input(open_session: OpenSession, graph: af.Graph) -> None:
    """Whatever a run waits for, the next one has its place meanwhile, in a session for one run at a time."""
    barrier, mutex, queue = af.Barrier(2, name="b"), af.Mutex(name="m"), af.FIFOQueue(1, INT, name="q")
    made: asyncio.Queue[int] = asyncio.Queue()

    async def elements() -> AsyncIterator[int]:
        yield await made.get()

    element = af.from_async_generator(elements, INT).next()
    meet = barrier.wait()
    total = af.Variable(0)
    with mutex:
        locked = total.assign_add(queue.dequeue())
    put = queue.enqueue(1)
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        (reading,) = await aside(session, element)
        (meeting,) = await aside(session, meet)
        first, second = await aside(session, locked, locked)  # one waits for the queue, and one for the mutex
        await session.run(put)
        assert await first == 1
        await session.run(put)
        assert await second == 2
        await session.run(meet)
        await meeting
        made.put_nowait(7)
        assert await reading == 7


async def test_a_run_that_comes_back_waits_for_a_place(open_session: OpenSession, graph: af.Graph) -> None:
    """The run has taken its element by then: the next in line is served, and the run computes in its turn."""
    queue = af.FIFOQueue(10, INT, name="q")
    x = af.placeholder("int64", ())
    gate = CoroutineGate()
    doubled, put, slow = queue.dequeue() * 2, queue.enqueue(x), gate.op(x)
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        (taker,) = await aside(session, doubled)
        in_its_place = asyncio.ensure_future(session.run(slow, {x: 5}))
        await until(lambda: gate.started)
        await queue.put(21)
        await until(lambda: queue.size_nowait() == 0)
        assert not taker.done()
        gate.opened.set()
        assert await taker == 42
        assert await in_its_place == 5
        await session.run(put, {x: 1})


@pytest.mark.parametrize("moment", ["in line", "in its place"])
async def test_a_cancel_of_a_run_that_is_aside_loses_nothing(
    open_session: OpenSession, graph: af.Graph, moment: str
) -> None:
    queue = af.FIFOQueue(10, INT, name="q")
    x = af.placeholder("int64", ())
    gate = CoroutineGate()
    doubled, slow = queue.dequeue() * 2, gate.op(x)
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        (taker,) = await aside(session, doubled)
        in_its_place = asyncio.ensure_future(session.run(slow, {x: 5}))
        await until(lambda: gate.started)
        if moment == "in its place":
            await queue.put(21)
            await until(lambda: queue.size_nowait() == 0)
        taker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taker
        if moment == "in line":
            await queue.put(21)
        gate.opened.set()
        assert await in_its_place == 5
        assert await session.run(doubled) == 42


async def test_a_deadline_of_a_run_that_comes_back(open_session: OpenSession, graph: af.Graph) -> None:
    """The run is stopped as any other, and its element is the next one's."""
    queue = af.FIFOQueue(10, INT, name="q")
    x = af.placeholder("int64", ())
    gate = CoroutineGate()
    doubled, slow = queue.dequeue() * 2, gate.op(x)
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        (taker,) = await aside(session, doubled, timeout=PATIENCE_S / 2)
        in_its_place = asyncio.ensure_future(session.run(slow, {x: 5}))
        await until(lambda: gate.started)
        await queue.put(21)
        await until(lambda: queue.size_nowait() == 0)
        (run,) = [each for each in session._runs.in_flight.runs if each.ticket is not None and each.ticket.is_aside]
        run._expire(PATIENCE_S)
        with pytest.raises(af.DeadlineExceeded):
            await taker
        gate.opened.set()
        assert await in_its_place == 5
        assert await session.run(doubled) == 42


async def test_runs_wait_for_a_waiting_atomic_run(open_session: OpenSession, graph: af.Graph) -> None:
    """Runs also wait if elements will be put into the queue, and hold up no run that would put them."""
    queue, v = af.FIFOQueue(10, INT, name="q"), af.Variable(0)
    x = af.placeholder("int64", ())
    taken = v.assign_add(queue.dequeue())
    put, read = queue.enqueue(x), v.read() * 10
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        (atomic,) = await aside(session, taken, atomic=True)
        readers = await aside(session, read, read)
        await session.run(put, {x: 3})
        assert await atomic == 3
        assert await asyncio.gather(*readers) == [30, 30]


async def test_a_stream_that_takes_elements(open_session: OpenSession, graph: af.Graph) -> None:
    queue = af.FIFOQueue(10, INT, name="q")
    x = af.placeholder("int64", ())
    seen: list[af.Tensor] = []

    def body(i: af.Tensor) -> af.Tensor:
        seen.append(queue.dequeue() + 0)
        return i + 1

    af.while_loop(lambda i: i < 3, body, 0)
    put = queue.enqueue(x)
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        items = session.stream(seen[0])
        for k in range(3):
            item = asyncio.ensure_future(anext(items))
            await until(lambda: session.statistics().aside)
            await session.run(put, {x: k})
            assert await item == k
        with pytest.raises(StopAsyncIteration):
            await anext(items)


async def test_two_sessions_share_a_queue(open_session: OpenSession) -> None:
    """Each has its own places; what one puts in, a run of the other comes back for."""
    with af.Graph() as taking:
        taken = af.FIFOQueue(2, INT, name="shared", container="waits").dequeue() + 1
    with af.Graph() as putting:
        x = af.placeholder("int64", ())
        put = af.FIFOQueue(2, INT, name="shared", container="waits").enqueue(x)
    async with (
        open_session(taking, max_runs=1) as one,
        open_session(putting, max_runs=1) as other,
        asyncio.timeout(PATIENCE_S),
    ):
        takers = await aside(one, taken, taken)
        for k in range(2):
            await other.run(put, {x: k})
        assert await asyncio.gather(*takers) == [1, 2]
    af.reset_container("waits")


async def test_drain_and_close_end_runs_that_are_aside(open_session: OpenSession, graph: af.Graph) -> None:
    queue = af.FIFOQueue(10, INT, name="q")
    doubled = queue.dequeue() * 2
    async with open_session(graph, max_runs=1) as session, asyncio.timeout(PATIENCE_S):
        served, stopped = await aside(session, doubled, doubled)
        draining = asyncio.ensure_future(session.drain(grace_s=0.5))
        await asyncio.sleep(0)
        await queue.put(21)
        assert await served == 42
        await draining
        with pytest.raises(af.SessionClosedError):
            await stopped


async def test_max_queued_counts_runs_of_one_kind_that_are_aside(open_session: OpenSession, graph: af.Graph) -> None:
    """As many as if they had kept their places; runs of other kinds find the places free."""
    queue = af.FIFOQueue(10, INT, name="q")
    x = af.placeholder("int64", ())
    doubled, put = queue.dequeue() * 2, queue.enqueue(x)
    async with open_session(graph, max_runs=2, max_queued=1) as session, asyncio.timeout(PATIENCE_S):
        await session.run(put, {x: 0})
        assert await session.run(doubled) == 0
        takers = await aside(session, doubled, doubled, doubled)
        with pytest.raises(af.OverloadedError, match=r"as 0 wait and 3 of its kind \(max_queued=1\)"):
            await session.run(doubled)
        for k in range(3):
            await session.run(put, {x: k})
        assert sum(await asyncio.gather(*takers)) == 6
        assert session.statistics().refused == 1
