"""Fault F18, F37, F50: elements of queues above 1 MiB are copied on threads, and what graphs have made not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.state import queues
from asyncflow.state.elements import queue_ops
from asyncflow.state.elements.queue_arrays import stacked
from asyncflow.state.variables.immutable import immutable, is_immutable
from tests.faults.kernels import ticks, until
from tests.patience import PATIENCE_S

COUNT = (1 << 18) + 1
"""Number of elements of a float32 array of more than 1 MiB."""

SPEC = af.spec("float32", (COUNT,))


class Gate:
    """Calls a function once it is opened, and notes on which threads; at once where it would not copy."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, *args: Any) -> Any:
        if self.function is immutable and is_immutable(args[0]):
            return args[0]
        self.threads.append(threading.current_thread())
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        return self.function(*args)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Hold up copies of elements that are put."""
    gate = Gate(immutable)
    monkeypatch.setattr(queue_ops, "immutable", gate)
    yield gate
    gate.opened.set()


@pytest.fixture
def stacking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Hold up batches of elements that are taken."""
    gate = Gate(stacked)
    monkeypatch.setattr(queue_ops, "stacked", gate)
    monkeypatch.setattr(queues, "stacked", gate)
    yield gate
    gate.opened.set()


def fifo(capacity: int = 3) -> af.FIFOQueue:
    return af.FIFOQueue(capacity, SPEC, name="q")


def full(value: float) -> np.ndarray[Any, Any]:
    return np.full(COUNT, value, np.float32)


async def begun(gate: Gate, awaitable: Any) -> asyncio.Future[Any]:
    """A task that copies."""
    task = asyncio.ensure_future(awaitable)
    await until(gate.entered.is_set)
    await ticks(3)
    assert not task.done()
    return task


def _enqueued(session: af.Session, queue: af.Queue) -> Any:
    x = af.placeholder("float32", (COUNT,))
    return session.run(queue.enqueue((x * 2)[::-1]), {x: full(0.5)})


PUTS: dict[str, Callable[[af.Session, af.Queue], Any]] = {
    "put": lambda session, queue: queue.put(full(1)),
    "put_many": lambda session, queue: queue.put_many([full(1)]),
    "enqueue": _enqueued,
}


@pytest.mark.parametrize("way", PUTS)
async def test_the_event_loop_goes_on_while_an_element_is_copied(
    session: af.Session, graph: af.Graph, copying: Gate, way: str
) -> None:
    """Fault F37: and a later put or take does not overtake."""
    queue = fifo()
    task = await begun(copying, PUTS[way](session, queue))
    small = asyncio.ensure_future(queue.put(immutable(full(2))))
    await ticks(3)
    assert queue.size_nowait() == 0
    copying.opened.set()
    await asyncio.gather(task, small)
    assert [float((await queue.get())[0]) for _ in range(2)] == [1, 2]
    assert copying.threads[0] is not threading.main_thread()


async def test_rows_are_copied_on_a_thread(session: af.Session, graph: af.Graph) -> None:
    """Fault F37."""
    queue = fifo()
    x = af.placeholder("float32", (None, COUNT))
    await session.run(queue.enqueue_many(x), {x: np.stack([full(1), full(2)])})
    rows = session.state.lookup(queue).capture().elements
    assert [float(row[-1]) for (row,) in rows] == [1, 2]
    assert all(row.base is None and not row.flags.writeable for (row,) in rows)


async def test_what_a_graph_has_made_is_not_copied(
    session: af.Session, graph: af.Graph, copying: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array is locked; a fetch of it gets a copy of its own."""
    made, put = list[Any](), queue_ops.put

    def noted(queue: Any, elements: Any, *rest: Any) -> Any:
        made.extend(elements)
        return put(queue, elements, *rest)

    monkeypatch.setattr(queue_ops, "put", noted)
    copying.opened.set()
    queue = fifo()
    x = af.placeholder("float32", (COUNT,))
    y = x * 2
    _, fetched = await session.run((queue.enqueue(y), y), {x: full(1)})
    fetched[:] = 7
    got = await queue.get()
    assert got is made[0][0]
    assert float(got.max()) == 2


@pytest.mark.parametrize("way", PUTS)
async def test_cancelled_while_it_copies_it_has_put_nothing_in(
    session: af.Session, graph: af.Graph, copying: Gate, way: str
) -> None:
    """Fault F18."""
    queue = fifo()
    task = await begun(copying, PUTS[way](session, queue))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    copying.opened.set()
    await queue.put(full(2))
    assert queue.size_nowait() == 1
    assert float((await queue.get())[0]) == 2


@pytest.mark.parametrize("cancel_pending", [False, True])
async def test_closed_while_an_element_is_copied(
    session: af.Session, graph: af.Graph, copying: Gate, cancel_pending: bool
) -> None:
    """Behaviour 78: the element counts as waiting to be put in."""
    queue = fifo()
    task = await begun(copying, queue.put(full(1)))
    queue.close_nowait(cancel_pending)
    with pytest.raises(af.QueueClosedError, match="nothing more can be put in"):
        await queue.put(full(2))
    copying.opened.set()
    if cancel_pending:
        with pytest.raises(af.QueueClosedError, match="cancel_pending=True"):
            await task
        assert queue.size_nowait() == 0
    else:
        await task
        assert float((await queue.get())[0]) == 1


TAKES: dict[str, Callable[[af.Session, af.Queue], Any]] = {
    "get_many": lambda session, queue: queue.get_many(2),
    "dequeue_many": lambda session, queue: session.run(queue.dequeue_many(2)),
}


@pytest.mark.parametrize("way", TAKES)
async def test_a_batch_that_is_being_made_takes_when_it_is_there(
    session: af.Session, graph: af.Graph, stacking: Gate, way: str
) -> None:
    """Fault F18, F50: elements leave the queue with the batch; a cancel before leaves them, in order, for the next."""
    queue = fifo(2)
    await queue.put_many([full(1), full(2)])
    task = await begun(stacking, TAKES[way](session, queue))
    behind, room = asyncio.ensure_future(queue.get()), asyncio.ensure_future(queue.put(full(3)))
    await ticks(3)
    assert queue.size_nowait() == 2
    assert not behind.done()
    assert not room.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert float((await behind)[0]) == 1
    await room
    stacking.opened.set()
    assert (await TAKES[way](session, queue))[:, 0].tolist() == [2, 3]
    assert queue.size_nowait() == 0
    assert threading.main_thread() not in stacking.threads


async def test_a_batch_that_cannot_be_made_takes_nothing(
    session: af.Session, graph: af.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*args: Any) -> Any:
        raise MemoryError("no room for a batch")

    queue = fifo()
    await queue.put_many([full(1), full(2)])
    with monkeypatch.context() as patched:
        patched.setattr(queues, "stacked", too_large)
        with pytest.raises(MemoryError):
            await queue.get_many(2)
    assert (await queue.get_many(2))[:, 0].tolist() == [1, 2]


async def test_a_loop_that_hands_large_elements_over(session: af.Session, graph: af.Graph) -> None:
    """Each in its place, though a thread copies it, as they look into other memory."""
    queue = fifo(2)
    rows = af.constant(np.stack([full(0), full(1)]) + 0) * 1

    def fill(i: Any) -> Any:
        queue.enqueue(rows[i % 2] + af.astype(i, "float32"))
        queue.enqueue(rows[i % 2])
        return i + 1

    def drain(i: Any, s: Any) -> Any:
        return i + 1, s * 3 + af.sum(queue.dequeue_many(2)[:, 0])

    filled = af.while_loop(lambda i: i < 6, fill, (np.int64(0),))[0]
    drained = af.while_loop(lambda i, s: i < 6, drain, (0, np.float32(0)))[1]
    expected = 0
    for k in range(6):
        expected = expected * 3 + 2 * (k % 2) + k
    assert await session.run((filled, drained)) == (6, expected)
    assert queue.size_nowait() == 0


async def test_a_bucket_function_that_fails_on_a_thread(session: af.Session, graph: af.Graph) -> None:
    """Nothing was put in, and the next in line goes on."""

    def bucket(x: Any) -> int:
        if x[0] < 0:
            raise LookupError("no bucket")
        return 0

    queue = af.PaddingQueue(3, SPEC, bucket_by=bucket, name="q")
    first, second = asyncio.ensure_future(queue.put(full(-1))), asyncio.ensure_future(queue.put(full(2)))
    with pytest.raises(LookupError, match="no bucket"):
        await first
    await second
    assert float((await queue.get())[0]) == 2
