"""Behaviour 22, 34-37, 70-72, 77 and 78 for queues: effects in branches, loops and runs that overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession
from tests.faults.kernels import late

Run = Callable[..., Awaitable[Any]]

INT = af.spec("int64", ())


def fifo(capacity: int = 100) -> af.FIFOQueue:
    return af.FIFOQueue(capacity, INT, name="q")


async def drained(queue: af.Queue) -> list[int]:
    """All that is in it."""
    count = queue.size_nowait()
    return [int(x) for x in await queue.get_many(count)] if count else []


async def test_an_untaken_branch_does_not_wait(session: af.Session, run: Run, graph: af.Graph) -> None:
    """Behaviour 22: a dequeue from an empty queue waits on the branch taken, and holds up nothing on the other one."""
    queue = fifo()
    pred = af.placeholder("bool", ())
    y = af.cond(pred, queue.dequeue, lambda: af.constant(7))
    assert await run(y, {pred: False}) == 7
    assert "dequeue" in await late(session, y, {pred: True})
    await queue.put(5)
    assert await run(y, {pred: True}) == 5


async def test_an_enqueue_outside_runs_once(run: Run, graph: af.Graph) -> None:
    """Behaviour 34: the enqueue runs once, although a body waits for it."""
    queue = fifo()
    put = queue.enqueue(1)

    def body(i: Any) -> Any:
        with af.control_dependencies([put]):
            return i + 1

    assert await run(af.while_loop(lambda i: i < 5, body, (0,))[0]) == 5
    assert await drained(queue) == [1]


async def test_control_edges_order_what_puts_and_takes(run: Run, graph: af.Graph) -> None:
    """Behaviour 35: within a body, where nothing else orders the two."""
    queue = fifo()

    def body(i: Any, s: Any) -> Any:
        with af.control_dependencies([queue.enqueue(i)]):
            size = queue.size()
        return i + 1, s + size * 0 + queue.dequeue()

    assert (await run(af.while_loop(lambda i, s: i < 10, body, (0, 0))))[1] == 45


async def test_enqueues_run_in_program_order(open_session: OpenSession) -> None:
    """Behaviour 36: around and in a loop, A B C D A B C D A; in an unordered graph, only the fetched ones."""

    def build(queue: af.Queue) -> Any:
        def body(i: Any) -> Any:
            queue.enqueue(2)
            queue.enqueue(3)
            return i + 1

        queue.enqueue(1)
        total = af.while_loop(lambda i: i < 2, body, (0,))[0]
        return [total, queue.enqueue(4)]

    for graph, expected in ((af.Graph(), [2, 3, 2, 3, 4]), (af.Graph(effects="unordered"), [4])):
        with graph:
            queue = fifo()
            fetch = build(queue)
        async with open_session(graph) as session:
            await session.run(fetch)
            assert await drained(queue) == expected


@pytest.mark.parametrize("parallel_iterations", [1, 32])
async def test_enqueues_of_a_loop_come_in_order(run: Run, graph: af.Graph, parallel_iterations: int) -> None:
    """Behaviour 37: 0 to 9 in order, however many iterations overlap, and though the queue holds three."""
    queue = fifo(3)

    def put(i: Any) -> Any:
        queue.enqueue(i)
        return i + 1

    def take(i: Any, found: Any) -> Any:
        return i + 1, found.write(i, queue.dequeue())

    loop = af.while_loop(lambda i: i < 10, put, (np.int64(0),), parallel_iterations=parallel_iterations)
    array = af.TensorArray("int64", 10, element_shape=())
    taken = af.while_loop(lambda i, a: i < 10, take, (0, array), parallel_iterations=parallel_iterations)[1].stack()
    assert (await run((loop, taken)))[1].tolist() == list(range(10))


async def test_a_loop_that_puts_and_takes(run: Run, graph: af.Graph) -> None:
    """Behaviour 37: an enqueue waits for room, and for no consumer."""
    queue = fifo(1)

    def body(i: Any, s: Any) -> Any:
        taken = queue.dequeue()  # written first, and served by what is written behind it
        queue.enqueue(i)
        return i + 1, s + taken

    assert (await run(af.while_loop(lambda i, s: i < 20, body, (np.int64(0), np.int64(0)))))[1] == 190


async def test_the_order_of_puts_and_of_takes(run: Run, graph: af.Graph) -> None:
    """Behaviour 37: an enqueue that waits for room does not hold up the dequeue written behind it, which makes it."""
    queue = fifo(1)
    puts = [queue.enqueue(k) for k in range(4)]
    takes = [queue.dequeue() for _ in range(4)]
    assert await run((puts, takes)) == ([None] * 4, [0, 1, 2, 3])
    sizes = [queue.size()]
    puts.append(queue.enqueue(9))
    sizes.append(queue.size())
    assert (await run((sizes, puts[-1])))[0] == [0, 1]


async def test_effects_in_branches_keep_their_place(run: Run, graph: af.Graph) -> None:
    """Behaviour 37: of a branch taken in a loop, too."""
    queue = fifo()

    def body(i: Any) -> Any:
        def even() -> Any:
            queue.enqueue(i)
            return i + 1

        n = af.cond(af.equal(i % 2, 0), even, lambda: i + 1)
        queue.enqueue(-i)
        return n

    await run(af.while_loop(lambda i: i < 4, body, (np.int64(0),)))
    assert await drained(queue) == [0, 0, -1, 2, -2, -3]


async def test_each_element_goes_to_one_of_many_runs(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 70: 200 runs that put in and 200 that take out, at once."""
    queue = fifo(5)
    x = af.placeholder("int64", ())
    put, take = queue.enqueue(x), queue.dequeue()
    runs = [session.run(take) if k % 2 else session.run(put, {x: k // 2}) for k in range(400)]
    found = await asyncio.gather(*runs)
    assert sorted(x for x in found if x is not None) == list(range(200))
    assert queue.size_nowait() == 0


async def test_an_element_that_is_not_fetched_is_not_put_in(run: Run, graph: af.Graph) -> None:
    """Behaviour 71: unless a control edge asks for it."""
    queue = fifo()
    put = queue.enqueue(1)
    with af.control_dependencies([put]):
        size = queue.size()
    assert await run(af.constant(1) + 1) == 2
    assert queue.size_nowait() == 0
    assert await run(size) == 1


async def test_a_failing_input_puts_nothing_in(run: Run, graph: af.Graph) -> None:
    """Behaviour 72: and the first error is raised, not an error of the waiting nodes."""

    @af.op(outputs=INT)
    def failing(x: Any) -> Any:
        raise LookupError("no")

    queue = fifo()
    with pytest.raises(af.KernelError, match="LookupError"):
        await run((queue.enqueue(failing(1)), queue.dequeue()))
    assert queue.size_nowait() == 0


async def test_equal_takes_are_not_merged(run: Run, graph: af.Graph) -> None:
    """Behaviour 77: nor left out, nor moved out of a loop."""
    queue = fifo()
    await queue.put_many([1, 2, 3, 4, 5])
    assert await run([queue.dequeue(), queue.dequeue()]) == [1, 2]
    total = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * 10 + queue.dequeue()), (0, np.int64(0)))[1]
    assert await run(total) == 345


async def test_capacity_holds_in_a_loop(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 78: a loop that fills goes on as consumers take; a close in between ends it with the remaining
    elements.
    """
    queue = fifo(4)

    def fill(i: Any) -> Any:
        queue.enqueue(i)
        return i + 1

    task = asyncio.ensure_future(session.run(af.while_loop(lambda i: i < 100, fill, (np.int64(0),))))
    seen = []
    for _ in range(50):
        seen.append(int(await queue.get()))
        assert queue.size_nowait() <= 4
    assert seen == list(range(50))
    queue.close_nowait(cancel_pending=True)
    with pytest.raises(af.QueueClosedError, match="in iteration while/"):
        await task
    left = await drained(queue)
    assert left == list(range(50, 50 + len(left)))


def test_no_gradient_goes_through_a_queue(graph: af.Graph) -> None:
    x = af.placeholder("float64", ())
    queue = af.FIFOQueue(10, af.spec("float64", ()), name="q")
    queue.enqueue(x * 2)
    y = queue.dequeue()
    assert af.gradients(y * y, y) is not None
    with pytest.raises(af.GraphError, match=r"queue 'q'.*no gradient goes through a queue"):
        af.gradients(y * y, x)
    assert af.gradients(y * y, x, unconnected="zero") is not None
    assert af.gradients(y * x, x) is not None
