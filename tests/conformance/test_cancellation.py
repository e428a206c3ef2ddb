"""Behaviour 106, 107, Fault F72, F73: runs that are cancelled lose nothing, and start nothing more."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession
from tests.faults.kernels import INT, SLOW, late, ticks
from tests.patience import PATIENCE_S

PUTS, CANCELS = (0, 1, 3), (0, 1, 2, 3, 4, 6, 9, 21)
"""Turns of the event loop at which elements come, and at which a run is cancelled."""


def drained(queue: af.Queue) -> list[int]:
    """Take all elements that are left in a queue."""
    return [int(queue_take(queue)) for _ in range(queue.size_nowait())]


def queue_take(queue: af.Queue) -> Any:
    """An element that is there."""
    taking = queue.get()
    try:
        taking.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("an element that is there is not waited for")


def numbers(found: Any) -> list[int]:
    """All numbers in a result."""
    if isinstance(found, tuple | list):
        return [number for each in found for number in numbers(each)]
    return [] if found is None else [int(x) for x in found.ravel()] if found.ndim else [int(found)]


def at_turns() -> Iterator[tuple[int, int, bool]]:
    """Yield the turns at which elements come and the run is cancelled, and True if the cancel is first within one
    turn.
    """
    for put_at, cancel_at in itertools.product(PUTS, CANCELS):
        yield put_at, cancel_at, False
        if put_at == cancel_at:
            yield put_at, cancel_at, True


async def raced(asked: Awaitable[Any], put: Callable[[], object], put_at: int, cancel_at: int, is_early: bool) -> Any:
    """The result of a run beside which two things happen; None if it was cancelled."""
    task = asyncio.ensure_future(asked)
    for turn in range(max(CANCELS) + 1):
        if is_early and turn == cancel_at:
            task.cancel()
        if turn == put_at:
            put()
        if not is_early and turn == cancel_at:
            task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


def put_in(queue: af.Queue, *elements: int) -> None:
    """Puts elements in a queue that has room."""
    with suppress(StopIteration):
        queue.put_many(list(elements)).send(None)


TAKES: dict[str, Callable[[af.Queue, af.Queue], Any]] = {
    "dequeue": lambda q, p: q.dequeue(),
    "dequeue_many": lambda q, p: q.dequeue_many(2),
    "computed with": lambda q, p: q.dequeue() + 0,
    "of two queues": lambda q, p: (q.dequeue(), p.dequeue()),
    "in a branch": lambda q, p: af.cond(p.size() >= 0, q.dequeue, lambda: af.constant(0)),
    "in a loop": lambda q, p: af.while_loop(lambda i, _: i < 2, lambda i, s: (i + 1, s * 10 + q.dequeue()), (0, 0))[1],
}


@pytest.mark.parametrize("way", TAKES)
async def test_an_element_is_delivered_or_left_at_every_turn(open_session: OpenSession, way: str) -> None:
    """Behaviour 106: a run that is cancelled takes nothing, and the remaining elements keep their order."""
    q, p = af.FIFOQueue(9, INT, name="q"), af.FIFOQueue(9, INT, name="p")
    with af.Graph() as graph:
        fetch = TAKES[way](q, p)
    async with open_session(graph) as session:
        for turns in at_turns():
            put_in(p, 7)
            found = await raced(session.run(fetch), lambda: put_in(q, 1, 2, 3), *turns)
            got = numbers(found)
            if way == "in a loop" and got:
                got = [int(digit) for digit in str(got[0])]
            left = drained(q), drained(p)
            assert sorted([*got, *left[0], *left[1]]) == [1, 2, 3, 7], (turns, got, left)
            assert left[0] == sorted(left[0])


async def test_an_element_is_put_or_not_at_every_turn(open_session: OpenSession) -> None:
    """Behaviour 106: a run that waits for room, and is cancelled, puts nothing in; a run that returns has put its
    element in.
    """
    q = af.FIFOQueue(1, INT, name="q")
    with af.Graph() as graph:
        put = q.enqueue(2)
        with af.control_dependencies([put]):
            done = af.constant(5) + 0
    async with open_session(graph) as session:
        for turns in at_turns():
            put_in(q, 1)
            found = await raced(session.run(done), lambda: drained(q), *turns)
            # A device with a memory of its own, or one beside others, tells some turns later what it has put in.
            may_be_put = session.devices[0].asynchronous is not None or len(session.devices) > 1
            left = drained(q)
            assert left == [2] if found is not None else left in ([], [2] if may_be_put else []), turns


async def test_a_moved_element_is_in_one_queue_at_every_turn(open_session: OpenSession) -> None:
    """Behaviour 106: taken from one queue and put into another, which has room later; or it stays where it was."""
    q, p = af.FIFOQueue(9, INT, name="q"), af.FIFOQueue(1, INT, name="p")
    with af.Graph() as graph:
        move = p.enqueue(q.dequeue())
    async with open_session(graph) as session:
        for turns in at_turns():
            put_in(q, 1, 2)
            put_in(p, 7)
            await raced(session.run(move), lambda: drained(p), *turns)
            left, moved = drained(q), drained(p)
            assert (left, moved) in (([1, 2], []), ([2], [1])), turns


async def test_an_input_loses_nothing_at_any_turn(open_session: OpenSession) -> None:
    """Behaviour 106: what a cancelled run took of an input, the next one gets."""

    async def count() -> Any:
        for number in range(1000):
            yield number

    source = af.from_async_generator(count, INT, name="source")
    with af.Graph() as graph:
        element = source.next() + 0
    expected = 0
    async with open_session(graph) as session:
        for cancel_at in CANCELS:
            found = await raced(session.run(element), lambda: None, 0, cancel_at, False)
            expected += found is not None
            assert await session.run(element) == expected
            expected += 1


async def test_a_run_gives_back_no_more_than_it_has_not_used(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 106: what something depends on that outlasts the run stays taken; the rest goes back."""
    q, p = af.FIFOQueue(9, INT, name="q"), af.FIFOQueue(9, INT, name="p")
    total = af.Variable(0, name="total")
    with af.control_dependencies([total.assign_add(q.dequeue())]):
        waits = q.dequeue(), p.dequeue()
    put_in(q, 3, 5, 6)
    assert "dequeue" in await late(session, waits)
    used = await session.run(total.read())
    assert drained(q) == ([5, 6] if used else [3, 5, 6])  # a card may not have come so far
    assert used in (0, 3)


async def test_a_barrier_does_not_count_a_cancelled_run(graph: af.Graph) -> None:
    """Behaviour 106: a run that was cancelled in the turn in which the last one comes has not come."""
    barrier = af.Barrier(2, name="barrier")
    with af.control_dependencies([barrier.wait()]):
        passed = af.constant(1) + 0
    async with af.Session(graph, devices=["cpu:0"]) as session:
        first = asyncio.ensure_future(session.run(passed))
        await ticks(30)
        second = asyncio.ensure_future(session.run(passed))  # begins before the first learns that it is cancelled
        first.cancel()
        await asyncio.wait([first])
        await ticks(30)
        assert first.cancelled() and not second.done()
        assert await session.run(passed) == await second == 1


async def test_a_caller_on_a_thread_gets_the_element_or_has_cancelled(graph: af.Graph) -> None:
    """Behaviour 106: also where the caller cancels while the result is on its way to it."""
    q = af.FIFOQueue(9, INT, name="q")
    element = q.dequeue() + 0
    async with af.Session(graph) as session:
        for cancel_at in CANCELS:
            future = await asyncio.to_thread(session.run_threadsafe, element)
            for turn in range(max(CANCELS) + 1):
                if turn == 4:
                    put_in(q, 1)
                if turn == cancel_at:
                    future.cancel()
                await asyncio.sleep(0)
            assert drained(q) == ([1] if future.cancelled() else []), cancel_at
            assert future.cancelled() or future.result() == 1


async def test_a_consumer_that_leaves_a_stream_leaves_the_next_element(graph: af.Graph) -> None:
    """Behaviour 106: a loop with one iteration at a time takes no element beyond the elements that it handed over."""
    q = af.FIFOQueue(9, INT, name="q")
    items = []

    def body(i: Any) -> Any:
        items.append(q.dequeue())
        return i + 1

    af.while_loop(lambda i: i < 8, body, (0,), parallel_iterations=1)
    async with af.Session(graph) as session:
        put_in(q, *range(6))
        stream = session.stream(items[0])
        assert [int(await anext(stream)) for _ in range(3)] == [0, 1, 2]
        await stream.aclose()
        assert drained(q) == [3, 4, 5]


class Deeds:
    """A function with side effects, which waits on its thread until it is allowed to go on."""

    def __init__(self, **options: Any) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.done: list[int] = []
        self.op = af.op(outputs=INT, name="deed", cost=SLOW, **options)(self.call)

    def call(self, x: Any) -> Any:
        """Run the op."""
        self.done.extend(np.ravel(x).tolist())
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        return x


@pytest.mark.parametrize("options", [{"stateful": True}, {"batch": af.Batch(max_size=1)}], ids=["stateful", "batch"])
async def test_work_that_has_not_started_is_withdrawn(graph: af.Graph, options: dict[str, Any]) -> None:
    """Behaviour 107, Fault F73: its caller is told while earlier work goes on, and others have their turn."""
    deeds = Deeds(**options)
    x = af.placeholder("int64", ())
    y = deeds.op(x)
    async with af.Session(graph, devices=["cpu:0"]) as session:
        tasks = [asyncio.ensure_future(session.run(y, {x: 0}))]
        assert await asyncio.to_thread(deeds.entered.wait, PATIENCE_S)
        tasks += [asyncio.ensure_future(session.run(y, {x: k})) for k in (1, 2)]
        tasks.append(asyncio.ensure_future(session.run(y, {x: 3}, timeout=PATIENCE_S)))
        await ticks(9)
        tasks[1].cancel()
        (late_one,) = [run for run in session._runs.in_flight.runs if run.part.deadline_s < math.inf]
        late_one._expire(PATIENCE_S)
        await ticks(9)
        told = [task.done() for task in tasks]
        deeds.opened.set()
        assert told == [False, True, False, True]
        assert tasks[1].cancelled()
        assert isinstance(tasks[3].exception(), af.DeadlineExceeded)
        assert [await tasks[0], await tasks[2]] == [0, 2]
    assert deeds.done == [0, 2]
