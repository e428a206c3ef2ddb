"""Queues as users see them: nodes in runs, coroutines beside them, and the mistakes of a first day."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from benchmarks.walks import walk_of
from tests.conftest import OpenSession
from tests.faults.kernels import late, until
from tests.patience import PATIENCE_S
from tests.state.queue_kinds import KINDS

Run = Callable[..., Awaitable[Any]]

INT = af.spec("int64", ())


@pytest.fixture(autouse=True)
def _empty_container() -> Iterator[None]:
    yield
    af.reset_container("test")


def fifo(capacity: int = 10, spec: Any = INT, **options: Any) -> af.FIFOQueue:
    return af.FIFOQueue(capacity, spec, name="q", **options)


async def asleep(count: int = 5) -> None:
    """Let all other coroutines go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def started(session: af.Session, fetch: Any, runs: int = 1) -> asyncio.Task[Any]:
    """A run that has begun to wait."""
    task = asyncio.ensure_future(session.run(fetch))
    await until(lambda: session.statistics().runs >= runs)
    await asleep(20)
    assert not task.done()
    return task


# -- putting in and taking out ---------------------------------------------------------------------------------------


async def test_first_in_first_out(session: af.Session, graph: af.Graph) -> None:
    queue = fifo()
    fill = [queue.enqueue(k) for k in range(5)]
    drain = [queue.dequeue() for _ in range(5)]
    assert await session.run((fill, drain)) == ([None] * 5, [0, 1, 2, 3, 4])
    assert await session.run(queue.size()) == 0


async def test_elements_are_nests(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(spec={"x": af.spec("float32", (2,)), "y": (INT, af.spec("bool", ()))})
    put = queue.enqueue({"y": (3, True), "x": np.ones(2, np.float32)})
    got = await session.run((put, queue.dequeue()))
    assert got[1]["y"] == (3, True)
    np.testing.assert_array_equal(got[1]["x"], [1, 1])


async def test_many_at_once(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(spec=(INT, af.spec("float64", (2,))))
    await session.run(queue.enqueue_many((np.arange(4), np.arange(8.0).reshape(4, 2))))
    numbers, vectors = await session.run(queue.dequeue_many(3))
    np.testing.assert_array_equal(numbers, [0, 1, 2])
    np.testing.assert_array_equal(vectors, [[0, 1], [2, 3], [4, 5]])
    assert queue.dequeue_many(3)[1].shape == (3, 2)
    last = await session.run(queue.dequeue())
    np.testing.assert_array_equal(last[1], [6, 7])


async def test_strings(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(spec=af.spec("string", ()))
    await session.run(queue.enqueue_many(["a", "bc"]))
    await session.run(queue.enqueue("def"))
    assert list(await session.run(queue.dequeue_many(3))) == ["a", "bc", "def"]


async def test_open_shapes_are_padded(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(spec=(af.spec("int64", (None,)), INT))
    for k in (1, 3, 2):
        await session.run(queue.enqueue((np.full(k, k), k)))
    (rows, numbers), (lengths, nothing) = await session.run(queue.dequeue_many(3, pad=-1))
    np.testing.assert_array_equal(rows, [[1, -1, -1], [3, 3, 3], [2, 2, -1]])
    np.testing.assert_array_equal(lengths, [1, 3, 2])
    np.testing.assert_array_equal(numbers, [1, 3, 2])
    assert nothing is None


async def test_two_open_extents_have_two_lengths(session: af.Session, graph: af.Graph) -> None:
    queue = af.PaddingQueue(4, af.spec("float32", (None, None)), pad=0.5)
    for shape in ((1, 3), (2, 0)):
        await session.run(queue.enqueue(np.ones(shape, np.float32)))
    batch, lengths = await session.run(queue.dequeue_up_to(2))
    assert batch.tolist() == [[[1, 1, 1], [0.5, 0.5, 0.5]], [[0.5] * 3] * 2]
    assert lengths.tolist() == [[1, 3], [2, 0]]


async def test_a_shuffle_queue_gives_each_once(session: af.Session, graph: af.Graph) -> None:
    """Any order, the same for one seed; a reserve is left until the queue is closed."""

    def order(seed: int | None) -> Any:
        queue = af.ShuffleQueue(50, INT, min_after_dequeue=10, seed=seed)
        return queue, queue.enqueue_many(np.arange(50)), queue.dequeue_many(40), queue.close(), queue.dequeue_up_to(40)

    found = []
    for queue, fill, most, close, rest in (order(7), order(7), order(8), order(None)):
        await session.run(fill)
        first = await session.run(most)
        told = await late(session, queue.dequeue())
        assert "10 of 50 elements, 10 of which a take leaves" in told or "ShuffleQueue(" in told
        await session.run(close)
        found.append([*first, *await session.run(rest)])
        assert sorted(found[-1]) == list(range(50))
        assert found[-1] != sorted(found[-1])
    assert found[0] == found[1] != found[2]


async def test_a_priority_queue_gives_the_smallest_first(session: af.Session, graph: af.Graph) -> None:
    queue = af.PriorityQueue(10, af.spec("string", ()))
    for priority, text in ((3, "c"), (1, "a"), (3, "d"), (2, "b")):
        await session.run(queue.enqueue((priority, text)))
    numbers, texts = await session.run(queue.dequeue_many(4))
    assert (list(numbers), list(texts)) == ([1, 2, 3, 3], ["a", "b", "c", "d"])


async def test_batches_are_of_one_bucket(session: af.Session, graph: af.Graph) -> None:
    queue = af.PaddingQueue(20, af.spec("int64", (None,)), bucket_by=lambda x: len(x) // 10)
    for length in (1, 15, 2, 12, 3):
        await session.run(queue.enqueue(np.zeros(length, np.int64)))
    assert (await session.run(queue.dequeue_many(3)))[1].tolist() == [1, 2, 3]
    assert (await session.run(queue.dequeue_many(2)))[1].tolist() == [15, 12]


async def test_a_bucket_function_that_fails_puts_nothing_in(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 72: a node that fails has no side effect."""
    queue = af.PaddingQueue(20, af.spec("int64", (None,)), bucket_by=lambda x: x[0])
    with pytest.raises(af.KernelError, match="IndexError"):
        await session.run(queue.enqueue(np.zeros(0, np.int64)))
    assert await session.run(queue.size()) == 0


async def test_elements_put_in_cannot_change(session: af.Session, graph: af.Graph) -> None:
    """Fault F37: an array of the caller's is copied, be it read-only, with gaps, or written to later."""
    queue = fifo(spec=af.spec("float64", (2, 3)))
    array = np.arange(12.0).reshape(4, 3)
    x = af.placeholder("float64", (2, 3))
    await session.run(queue.enqueue(x), {x: array[::2]})
    await queue.put(array[::2])
    array[:] = -1
    taken = await session.run(queue.dequeue())
    np.testing.assert_array_equal(taken, [[0, 1, 2], [6, 7, 8]])
    np.testing.assert_array_equal(await queue.get(), taken)


async def test_a_row_does_not_keep_its_batch(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(spec=af.spec("float64", (3,)))
    batch = np.ones((4, 3))
    await session.run(queue.enqueue_many(batch))
    rows = [await queue.get() for _ in range(4)]
    assert all(row.base is None and not row.flags.writeable for row in rows)


# -- waiting ---------------------------------------------------------------------------------------------------------


async def test_runs_wait_for_one_another(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 78: in the order in which they came."""
    queue = fifo(1)
    x = af.placeholder("int64", ())
    put, take = queue.enqueue(x), queue.dequeue()
    takers = [await started(session, take, count) for count in (1, 2, 3)]
    for k in range(3):
        await session.run(put, {x: k})
    assert await asyncio.gather(*takers) == [0, 1, 2]
    await session.run(put, {x: 3})
    putters = [asyncio.ensure_future(session.run(put, {x: k})) for k in (4, 5)]
    await asleep()
    assert [await session.run(take) for _ in range(3)] == [3, 4, 5]
    await asyncio.gather(*putters)


async def test_a_wait_holds_up_nothing_else(session: af.Session, graph: af.Graph) -> None:
    """A firing that waits suspends itself alone: the rest of its run, other runs, and the event loop go on."""
    queue = fifo()
    v = af.Variable(0, name="v")
    task = await started(session, (queue.dequeue(), v.assign_add(5)))
    assert await session.run(v) == 5
    assert await session.run(af.constant(1) + 1) == 2
    await session.run(queue.enqueue(7))
    assert await task == (7, 5)


async def test_a_batch_takes_all_or_nothing(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 78: a take of three leaves two elements, but no later take gets them: nothing overtakes."""
    queue = fifo()
    await session.run(queue.enqueue_many([1, 2]))
    batch = await started(session, queue.dequeue_many(3))
    behind = await started(session, queue.dequeue(), 2)
    assert queue.size_nowait() == 2
    await session.run(queue.enqueue(3))
    assert (await batch).tolist() == [1, 2, 3]
    assert not behind.done()
    await session.run(queue.enqueue(4))
    assert await behind == 4


@pytest.mark.parametrize("way", ["timeout", "cancel", "failure"])
async def test_a_run_that_ends_early_has_taken_nothing(session: af.Session, graph: af.Graph, way: str) -> None:
    """Behaviour 78, Fault F18: the queue is as it was, and works."""
    queue = fifo(2)
    wait, fill = queue.dequeue_many(2), queue.enqueue_many([8, 9])
    await session.run(queue.enqueue(1))
    if way == "timeout":
        told = await late(session, wait)
        assert "dequeue_many(2) of queue 'q' (1 of 2 elements" in told or "FIFOQueue('q')" in told
    elif way == "cancel":
        task = await started(session, (fill, queue.enqueue(3)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        @af.op(outputs=INT)
        async def failing() -> Any:
            await gate

        task = await started(session, (fill, failing()))
        gate.set_exception(LookupError("no"))
        with pytest.raises(af.KernelError, match="LookupError"):
            await task
    assert await session.run(queue.size()) == 1
    await session.run(queue.enqueue(2))
    assert (await session.run(wait)).tolist() == [1, 2]


async def test_two_that_wait_in_a_run_that_is_stopped_take_nothing(session: af.Session, graph: af.Graph) -> None:
    """Fault F18: what the first gives up does not go to the second, whichever device it is on."""
    queue = fifo()
    await session.run(queue.enqueue(1))
    task = await started(session, [queue.dequeue_many(2), queue.dequeue()])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert queue.size_nowait() == 1


async def test_a_run_that_waits_alone_says_for_what(session: af.Session, graph: af.Graph) -> None:
    queue = fifo()
    told = await late(session, queue.dequeue())
    assert re.search(r"while these waited:\n  q/dequeue: .*\n    built at .*test_queues.py", told)


async def test_closing_the_session_ends_all_waiting(open_session: OpenSession, graph: af.Graph) -> None:
    queue = fifo()
    take = queue.dequeue()
    async with open_session() as session:
        waiting = asyncio.ensure_future(queue.get())
        run = asyncio.ensure_future(session.run(take))
        await asleep()
        await session.aclose(grace_s=0)
    for each in (waiting, run):
        with pytest.raises(af.SessionClosedError):
            await each
    with pytest.raises(af.SessionClosedError):
        await queue.put(1, session=session)


# -- closing ---------------------------------------------------------------------------------------------------------


async def test_close(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 78: remaining elements can be taken; a take that can get nothing any more is woken, and its error has
    the number left.
    """
    queue = fifo()
    await session.run(queue.enqueue_many([1, 2, 3]))
    batch = await started(session, queue.dequeue_many(4))
    await session.run(queue.close())
    with pytest.raises(af.QueueClosedError, match="3 elements are left") as caught:
        await batch
    assert (caught.value.left, caught.value.queue, caught.value.op) == (3, "q", "dequeue_many")
    with pytest.raises(af.QueueClosedError, match="nothing more can be put in"):
        await session.run(queue.enqueue(4))
    assert (await session.run(queue.dequeue_up_to(5))).tolist() == [1, 2, 3]
    with pytest.raises(af.QueueClosedError, match="0 elements are left"):
        await session.run(queue.dequeue_up_to(5))


@pytest.mark.parametrize("cancel_pending", [False, True])
async def test_close_and_putters_waiting_for_room(session: af.Session, graph: af.Graph, cancel_pending: bool) -> None:
    """Behaviour 78: they go in, or fail."""
    queue = fifo(1)
    await session.run(queue.enqueue(1))
    waiting = await started(session, queue.enqueue(2))
    queue.close_nowait(cancel_pending)
    assert await session.run(queue.dequeue()) == 1
    if cancel_pending:
        with pytest.raises(af.QueueClosedError, match="cancel_pending"):
            await waiting
    else:
        assert await waiting is None
        assert await session.run(queue.dequeue()) == 2


# -- coroutines ------------------------------------------------------------------------------------------------------


async def test_coroutines_and_runs_share_a_queue(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(2, spec=(INT, af.spec("float32", (None,))))
    number, vector = queue.dequeue()
    total = af.astype(number, "float32") + af.sum(vector)

    async def produce() -> None:
        for k in range(20):
            await queue.put((k, np.ones(k, np.float32)))

    task = asyncio.ensure_future(produce())
    assert [await session.run(total) for _ in range(20)] == [2 * k for k in range(20)]
    await task
    await session.run(queue.enqueue((1, [2.0])))
    got = await queue.get()
    assert got[0] == 1
    assert got[1].tolist() == [2]
    await queue.put_many([(k, [0.5] * k) for k in range(2)])
    (numbers, rows), (nothing, lengths) = await queue.get_many(2, pad=0)
    assert (numbers.tolist(), rows.tolist(), nothing, lengths.tolist()) == ([0, 1], [[0], [0.5]], None, [0, 1])
    queue.close_nowait()
    with pytest.raises(af.QueueClosedError, match="get_up_to"):
        await queue.get_up_to(3, pad=0)


async def test_a_coroutine_that_is_cancelled_has_done_nothing(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 78: also in the moment between being called and going on."""
    queue = fifo(1)
    for wait, other in ((queue.get, lambda: queue.put(1)), (lambda: queue.put(2), queue.get)):
        before = queue.size_nowait()
        task = asyncio.ensure_future(wait())
        await asleep()
        await other()  # it is called now, and has not gone on
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queue.size_nowait() == 1 - before


async def test_a_queue_in_a_container(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 79: sessions share it by name; it outlives them, until the container is reset."""
    queue, same = fifo(container="test"), fifo(container="test")
    put, take = queue.enqueue(5), same.dequeue()
    async with open_session() as one, open_session() as two:
        task = await started(two, take)
        await one.run(put)
        assert await task == 5
        await one.run(put)
    assert await queue.get() == 5
    await queue.put(6)
    af.reset_container("test")
    assert queue.size_nowait() == 0
    other = af.FIFOQueue(10, af.spec("float32", ()), name="q", container="test")
    with pytest.raises(af.GraphError, match=r"already holds 'q' as FIFOQueue\(10, int64\[\]\)"):
        await other.get()
    with pytest.raises(af.GraphError, match="as a variable int64"):
        async with open_session() as session:
            await session.run(af.Variable(0, name="q", container="test").read())


async def test_a_reset_tells_coroutines_that_wait() -> None:
    """The coroutines' elements would come to the new queue."""
    queue = fifo(1, container="test")
    waiting = [asyncio.ensure_future(each) for each in (queue.get(), queue.get_many(1))]
    await asleep()
    af.reset_container("test")
    for task in waiting:
        with pytest.raises(af.QueueClosedError, match=r"get.* of queue 'q': container 'test' was reset .* again"):
            await asyncio.wait_for(task, PATIENCE_S)
    await queue.put(1)
    full = asyncio.ensure_future(queue.put(2))
    await asleep()
    af.reset_container("test")
    with pytest.raises(af.QueueClosedError, match="put of queue 'q': container 'test' was reset") as caught:
        await asyncio.wait_for(full, PATIENCE_S)
    assert caught.value.left == 1
    await queue.put(3)
    assert await queue.get() == 3


async def test_the_same_queue_in_two_sessions_is_two(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 79: outside containers."""
    queue = fifo()
    async with open_session() as one:
        await one.run(queue.enqueue(1))
        async with open_session() as two:
            assert await two.run(queue.size()) == 0
            assert queue.size_nowait() == 0  # of the block around
            assert queue.size_nowait(session=one) == 1


async def test_a_queue_dies_with_its_resource(session: af.Session) -> None:
    queue = fifo()
    await queue.put(1)
    watch = weakref.ref(session.state.lookup(queue))
    del queue
    gc.collect()
    assert watch() is None


async def test_threads_hand_over(session: af.Session) -> None:
    """Sessions of other threads, with event loops of their own, share a container's queue."""
    numbers, squares = fifo(3, container="test"), af.FIFOQueue(3, INT, name="squares", container="test")

    async def serve() -> None:
        with af.Graph() as graph:
            number = numbers.dequeue()
            step = squares.enqueue(number * number)
        async with af.Session(graph) as inner:
            for _ in range(30):
                await inner.run(step)

    worker = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(serve()))

    async def produce() -> None:
        for k in range(30):
            await numbers.put(k)

    produced = asyncio.ensure_future(produce())
    assert [await squares.get() for _ in range(30)] == [k * k for k in range(30)]
    await worker
    await produced


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_are_told_while_the_graph_is_built(graph: af.Graph) -> None:
    queue = fifo(spec=(INT, af.spec("float32", (2, None))))
    good = np.zeros((2, 3), np.float32)
    with pytest.raises(af.DTypeError, match=r"enqueue \[0\]: queue 'q' holds int64\[\], not float64\[\]; convert"):
        queue.enqueue((np.float64(1), good))
    with pytest.raises(af.DTypeError, match=r"enqueue \[0\]: queue 'q' holds int64\[\]: 1.5 does not fit dtype int64"):
        queue.enqueue((1.5, good))
    with pytest.raises(af.DTypeError, match=r"enqueue_many \[0\]: queue 'q' holds int64\[\?\]: \[1, 2.5\] does not"):
        queue.enqueue_many(([1, 2.5], np.stack([good, good])))
    with pytest.raises(af.ShapeError, match=r"holds float32\[2,\?\], not float32\[3,2\]"):
        queue.enqueue((1, good.T))
    with pytest.raises(af.GraphError, match=r"whose elements are .*: expected a tuple of 2 values"):
        queue.enqueue(1)
    with pytest.raises(af.ShapeError, match=r"enqueue_many \[0\]"):
        queue.enqueue_many((1, good))
    with pytest.raises(af.GraphError, match="may differ in shape; fill them up with pad="):
        queue.dequeue_many(3)
    for n in (-1, 2.5, True, "3"):
        with pytest.raises(af.GraphError, match=r"n is a whole number of at least 0; got"):
            queue.dequeue_many(n, pad=0)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match=r"n is an int or an integer scalar; got"):
        queue.dequeue_up_to(af.constant([2]), pad=0)
    with pytest.raises(af.DTypeError, match=r"'x'"):
        queue.dequeue_many(2, pad="x")
    with pytest.raises(af.GraphError, match="padding needs a known rank"):
        fifo(spec=af.spec("int64")).dequeue_many(2, pad=0)


def test_mistakes_in_declaring() -> None:
    with pytest.raises(af.GraphError, match="capacity is a whole number of at least 1; got 0"):
        af.FIFOQueue(0, INT)
    with pytest.raises(af.GraphError, match=r"described by af.spec\(dtype, shape\).*got 'int64'"):
        af.FIFOQueue(1, "int64")
    with pytest.raises(af.GraphError, match="an element has at least one value"):
        af.FIFOQueue(1, ())
    with pytest.raises(af.GraphError, match="needs a name"):
        af.FIFOQueue(1, INT, container="test")
    with pytest.raises(af.GraphError, match="would never give anything"):
        af.ShuffleQueue(5, INT, min_after_dequeue=5)
    with pytest.raises(af.GraphError, match="min_after_dequeue is a whole number of at least 0; got -1"):
        af.ShuffleQueue(5, INT, min_after_dequeue=-1)
    with pytest.raises(af.GraphError, match=r"make an af\.FIFOQueue"):
        af.Queue(5, INT)
    with pytest.raises(af.GraphError, match="seed='x'"):
        af.ShuffleQueue(5, INT, seed="x")  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="bucket_by=3"):
        af.PaddingQueue(5, INT, bucket_by=3)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="padding needs a known rank"):
        af.PaddingQueue(5, af.spec("int64"))


async def test_mistakes_outside_a_graph(open_session: OpenSession) -> None:
    queue = fifo()
    with pytest.raises(af.GraphError, match="no `async with"):
        await queue.put(1)
    async with open_session():
        with pytest.raises(
            af.DTypeError, match=r"put: queue 'q' holds int64\[\], not float32\[\]; convert it with .astype"
        ):
            await queue.put(np.float32(1))
        with pytest.raises(af.DTypeError, match=r"put: queue 'q' holds int64\[\]: 3.5 does not fit dtype int64"):
            await queue.put(3.5)
        with pytest.raises(af.DTypeError, match=r"put_many: queue 'q' holds int64\[\]: 3.5 does not fit"):
            await queue.put_many([1, 3.5])
        with pytest.raises(af.ShapeError, match=r"not int64\[2\]"):
            await queue.put([1, 2])
        with pytest.raises(af.GraphError, match=r"put_many of queue 'q' takes a list of elements; got 5"):
            await queue.put_many(5)  # type: ignore[arg-type]
        with af.Graph(), pytest.raises(af.GraphError, match="has no value yet; write enqueue in the graph"):
            await queue.put(queue.dequeue())
        with pytest.raises(af.GraphError, match=r"session= is an af.Session; got 5"):
            await queue.put(1, session=5)  # type: ignore[arg-type]
        pairs = af.PriorityQueue(3, {"x": INT})
        with pytest.raises(af.GraphError, match=r"elements are \(int64\[\], \{x: int64\[\]\}\): expected"):
            await pairs.put(5)
        assert queue.size_nowait() == 0


@pytest.mark.parametrize(
    ("build", "meant"),
    [
        (lambda queue: queue.enqueue(1), "put"),
        (lambda queue: queue.enqueue_many([1]), "put_many"),
        (lambda queue: queue.dequeue(), "get"),
        (lambda queue: queue.dequeue_many(2), "get_many"),
        (lambda queue: queue.dequeue_up_to(2), "get_up_to"),
        (lambda queue: queue.size(), "size_nowait"),
        (lambda queue: queue.close(), "close_nowait"),
    ],
)
def test_nodes_outside_a_graph_are_told_what_coroutines_call(
    build: Callable[[af.FIFOQueue], object], meant: str
) -> None:
    with pytest.raises(af.GraphError, match=rf"no graph is being built here; .*outside of graphs it is `{meant}`"):
        build(fifo())


def test_coroutines_in_a_graph_are_told_which_node_is_meant(graph: af.Graph) -> None:
    with pytest.raises(af.GraphError, match=r"Queue\.get\(\.\.\.\) is a coroutine, not a value: .* it is `dequeue`"):
        af.constant(1) + fifo().get()


async def test_shapes_that_only_a_run_knows(session: af.Session, graph: af.Graph) -> None:
    queue = fifo(spec=(INT, af.spec("int64", (2,))))
    x, y = af.placeholder("int64", (None,)), af.placeholder("int64", (None,))
    with pytest.raises(af.KernelError, match=r"queue 'q' holds int64\[2\]; a value of shape \[3\] does not fit"):
        await session.run(queue.enqueue((1, x)), {x: [1, 2, 3]})
    pairs = af.reshape(y, (-1, 2))
    with pytest.raises(af.KernelError, match="is given 3 and 2 rows"):
        await session.run(queue.enqueue_many((x, pairs)), {x: [1, 2, 3], y: [1, 2, 3, 4]})
    assert await session.run(queue.size()) == 0
    await session.run(queue.enqueue_many((x, pairs)), {x: np.zeros(0, np.int64), y: np.zeros(0, np.int64)})
    assert await session.run(queue.size()) == 0


def test_rows_do_not_share_a_queue(graph: af.Graph) -> None:
    """Lifting refuses by name; `map_fn` runs it as a loop over the rows, in order."""
    queue = fifo()
    x = af.constant([1, 2, 3])

    def body(row: Any) -> Any:
        with af.control_dependencies([queue.enqueue(row)]):
            return row + 0

    with pytest.raises(af.GraphError, match=r"FIFOQueue\('q'\), once for each row"):
        af.vmap(body)(x)
    with pytest.raises(af.GraphError, match=r"FIFOQueue\('q'\)"):
        af.map_fn(lambda row: row + queue.dequeue(), x, lift=True)


async def test_rows_put_in_by_a_loop(session: af.Session, graph: af.Graph) -> None:
    queue = fifo()
    mapped = af.map_fn(lambda row: row + queue.dequeue(), af.constant([10, 20, 30]))
    await session.run(queue.enqueue_many([1, 2, 3]))
    assert (await session.run(mapped)).tolist() == [11, 22, 33]


@pytest.mark.usefixtures("work")
async def test_a_hand_over_is_a_few_calls() -> None:
    """An operation that can be served at once costs neither a task nor a future, and in a loop nothing is
    interpreted.
    """
    queue, count = af.FIFOQueue(1000, INT, name="q"), 200
    with af.Graph() as graph:

        def fill(i: Any) -> Any:
            queue.enqueue(i)
            return i + 1

        filled = af.while_loop(lambda i: i < count, fill, (0,))[0]
        drained = af.while_loop(lambda i, s: i < count, lambda i, s: (i + 1, s + queue.dequeue()), (0, 0))[1]
        pairs = [(queue.enqueue(1), queue.dequeue()) for _ in range(count)]
        with af.control_dependencies([each for put, taken in pairs for each in (put, taken.node)]):
            last = af.constant(1) + 0
    async with af.Session(graph) as session:
        loops = await walk_of(lambda: session.run((filled, drained)))
        nodes = await walk_of(lambda: session.run(last))
    assert loops.total() < 10 * count
    assert nodes.total() < 21 * count
    for walk in (loops, nodes):
        assert not [name for name in walk if "granted" in name or "coroutines" in name or "Waits" in name]


async def test_a_firing_that_waits_for_its_own_runs_put_is_not_woken() -> None:
    """The firing takes its place, and asks again once the run has nothing else to do: this costs hardly more than being
    served.
    """
    queue, count = af.FIFOQueue(1000, INT, name="q"), 200
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        takes = [queue.dequeue() for _ in range(count)]
        puts = [queue.enqueue(x) for _ in range(count)]
        with af.control_dependencies([*puts, *(taken.node for taken in takes)]):
            last = x + 0
    async with af.Session(graph) as session:
        walk = await walk_of(lambda: session.run(last, {x: 1}))
    assert walk.total() < 23 * count
    assert sum(calls for name, calls in walk.items() if "wake_on" in name) < count / 10


@pytest.mark.parametrize("regions", [True, False])
async def test_a_waiting_firing_is_served_while_its_run_is_busy(regions: bool) -> None:
    """A loop in which something is always ready does not keep a firing of its run from what another run puts in."""
    queue, ends = fifo(), af.FIFOQueue(2, INT, name="ends")
    with af.Graph(effects="unordered") as graph:
        x = af.placeholder("int64", ())
        put, end = queue.enqueue(x), ends.enqueue(queue.dequeue())
        turns = af.while_loop(lambda i: af.equal(ends.size(), 0), lambda i: i + 1, (0,))[0]
    af.allow_races(ends)
    async with af.Session(graph, regions=regions) as session, asyncio.timeout(PATIENCE_S):
        busy = asyncio.ensure_future(session.run((end, turns)))
        await asleep(20)
        assert not busy.done()
        await session.run(put, {x: 1})
        assert (await busy)[1] > 0


async def test_two_that_wait_in_one_run_are_served_in_order(session: af.Session, graph: af.Graph) -> None:
    """Runs go in the order in which they came, though none had to be woken: a second take comes after the first."""
    queue, room = fifo(), fifo(1)
    takes = [queue.dequeue(), room.dequeue(), queue.dequeue()]
    puts = [queue.enqueue_many([1, 2]), room.enqueue(7)]
    assert (await session.run((takes, puts)))[0] == [1, 7, 2]
    first = await started(session, [takes[0], takes[2]])
    second = await started(session, queue.dequeue(), runs=2)
    await queue.put_many([1, 2, 3])
    assert list(await asyncio.gather(first, second)) == [[1, 3], 2]


@pytest.mark.parametrize(
    ("name", "use"),
    [("qsize", r"use size_nowait\(\), or size\(\)"), ("get_nowait", r"use get\(\)"), ("deque", "dequeue")],
)
def test_names_of_other_queues_are_told_ours(name: str, use: str) -> None:
    with pytest.raises(AttributeError, match=rf"a queue has no attribute '{name}'; .*{use}"):
        getattr(af.FIFOQueue(2, af.spec("int64", ())), name)


def test_every_kind_of_queue_is_looked_at() -> None:
    def kinds_below(kind: type[af.Queue]) -> Iterator[type[af.Queue]]:
        for each in kind.__subclasses__():
            yield each
            yield from kinds_below(each)

    ours = {each for each in kinds_below(af.Queue) if each.__module__.startswith("asyncflow.")}
    assert {type(kind.make(9, INT, "q")) for kind in KINDS.values()} == ours, "a new kind joins KINDS"


@pytest.mark.parametrize("kind", KINDS)
async def test_elements_of_every_kind_come_out_once(kind: str) -> None:
    queue = KINDS[kind].make(9, INT, "q")
    with af.Graph() as graph:
        taken = KINDS[kind].value(queue.dequeue())
    async with af.Session(graph) as session:
        await queue.put_many([KINDS[kind].element(each, each) for each in (3, 1, 2)])
        queue.close_nowait()
        assert sorted([int(await session.run(taken)) for _ in range(3)]) == [1, 2, 3]
