"""`Session.stream`: the values inside a running loop, one item an iteration."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af

pytestmark = pytest.mark.every_loop


class Item(NamedTuple):
    i: Any
    square: Any


class Loop:
    """A counting loop, with its variable and its square as seen inside."""

    def __init__(self, limit: Any, *, after: Any = None, **options: Any) -> None:
        self.i: Any = None
        self.square: Any = None

        def body(i: Any) -> Any:
            step = i if after is None else after(i)
            self.i, self.square = i, step * step
            return step + 1

        self.result = af.while_loop(lambda i: i < limit, body, (0,), **options)[0]


async def collect(session: af.Session, fetches: Any, feeds: Any = None, **options: Any) -> list[Any]:
    return [value async for value in session.stream(fetches, feeds, **options)]


async def ticks(n: int) -> None:
    """Lets everything that can go on, go on."""
    for _ in range(n):
        await asyncio.sleep(0)


# -- values and order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 32])
async def test_items_come_in_the_order_of_the_iterations(session: af.Session, graph: af.Graph, window: int) -> None:
    loop = Loop(20, parallel_iterations=window)
    assert await collect(session, loop.square) == [i * i for i in range(20)]


@pytest.mark.parametrize("seed", range(3))
async def test_the_order_does_not_depend_on_the_schedule(graph: af.Graph, seed: int) -> None:
    """Later iterations may be ready first: their items wait."""

    @af.op(outputs=af.spec("int64", ()))
    async def slower_when_even(i: Any) -> Any:
        await ticks(3 if i % 2 == 0 else 0)
        return i

    seen = []

    def body(i: Any) -> Any:
        seen.append(slower_when_even(i))
        return i + 1

    af.while_loop(lambda i: i < 10, body, (0,))
    async with af.Session(graph, debug=True, seed=seed) as session:
        assert await collect(session, seen[0]) == list(range(10))


async def test_no_iteration_no_items(session: af.Session, graph: af.Graph) -> None:
    assert await collect(session, Loop(0).i) == []


async def test_several_tensors_come_as_a_nest(session: af.Session, graph: af.Graph) -> None:
    loop = Loop(3)
    assert await collect(session, Item(loop.i, {"twice": [loop.square, loop.square]})) == [
        Item(i, {"twice": [i * i, i * i]}) for i in range(3)
    ]


async def test_feeds_and_outer_tensors(session: af.Session, graph: af.Graph) -> None:
    limit = af.placeholder("int64", ())
    loop = Loop(limit * 2)
    assert await collect(session, loop.i, {limit: 2}) == [0, 1, 2, 3]
    assert await collect(session, loop.i, {limit: 1}) == [0, 1]


async def test_tensors_by_name(graph: af.Graph) -> None:
    loop = Loop(2)
    async with af.Session(graph, debug=True) as session:
        assert await collect(session, loop.square.name) == [0, 1]


async def test_a_streamed_array_belongs_to_the_consumer(session: af.Session, graph: af.Graph) -> None:
    seen = []

    def body(i: Any, x: Any) -> Any:
        seen.append(x)
        return i + 1, x + 1

    af.while_loop(lambda i, x: i < 3, body, (0, np.zeros(2)))
    items = []
    async for x in session.stream(seen[0]):
        items.append(x.copy())
        x[:] = -100
    np.testing.assert_array_equal(items, [[0, 0], [1, 1], [2, 2]])


async def test_a_constant_inside_the_body(session: af.Session, graph: af.Graph) -> None:
    """The constant does not change, and still there is an item for each iteration."""
    seen = []

    def body(i: Any) -> Any:
        seen.append(af.constant(7) * 2)
        return i + 1

    af.while_loop(lambda i: i < 3, body, (0,))
    assert await collect(session, seen[0]) == [14, 14, 14]


# -- nesting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effects", ["ordered", "unordered"])
@pytest.mark.parametrize("seed", [None, 1, 2])
async def test_an_inner_loop(effects: Any, seed: int | None) -> None:
    """Items of all activations, outer iteration by outer iteration, whatever the mode and schedule."""
    seen = []

    def body(i: Any) -> Any:
        def inner(j: Any) -> Any:
            seen.append(i * 10 + j)
            return j + 1

        af.while_loop(lambda j: j < i, inner, (0,))
        return i + 1

    with af.Graph(effects=effects) as graph:
        af.while_loop(lambda i: i < 4, body, (0,))
    async with af.Session(graph, debug=True, seed=seed) as session:
        assert await collect(session, seen[0]) == [10, 20, 21, 30, 31, 32]


async def test_the_loops_of_map_fn_and_foldl(session: af.Session, graph: af.Graph) -> None:
    seen = []

    def twice(x: Any) -> Any:
        seen.append(x * 2)
        return x

    def add(total: Any, x: Any) -> Any:
        seen.append(total + x)
        return seen[-1]

    af.map_fn(twice, np.arange(4), lift=False)
    af.foldl(add, np.arange(4), 100)
    assert await collect(session, seen[0]) == [0, 2, 4, 6]
    assert await collect(session, seen[1]) == [100, 101, 103, 106]


async def test_a_branch_inside_a_loop(session: af.Session, graph: af.Graph) -> None:
    """An item only where the branch is taken."""
    seen = []

    def branch(i: Any) -> Any:
        seen.append(i * 100)
        return seen[0]

    af.while_loop(lambda i: i < 6, lambda i: i + 1 + 0 * af.cond(i % 2 == 1, lambda: branch(i), lambda: i), (0,))
    assert await collect(session, seen[0]) == [100, 300, 500]


async def test_items_see_the_effects_before_them(session: af.Session, graph: af.Graph) -> None:
    """A read behind an inner loop's writes, in a branch."""
    v = af.Variable(0)
    seen = []

    def branch(i: Any) -> Any:
        (end,) = af.while_loop(lambda j: j < i, lambda j: (v.assign_add(1), j + 1)[1], (0,))
        seen.append(v.read())
        return end

    af.while_loop(lambda i: i < 6, lambda i: i + 1 + 0 * af.cond(i % 2 == 0, lambda: branch(i), lambda: i), (0,))
    assert await collect(session, seen[0]) == [0, 2, 2 + 4]


async def test_a_loop_on_a_branch_not_taken(session: af.Session, graph: af.Graph) -> None:
    loops = []
    pred = af.placeholder("bool", ())

    def branch() -> Any:
        loops.append(Loop(3))
        return loops[0].result

    af.cond(pred, branch, lambda: af.constant(0))
    assert await collect(session, loops[0].i, {pred: True}) == [0, 1, 2]
    assert await collect(session, loops[0].i, {pred: False}) == []


# -- back-pressure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5])
async def test_the_loop_runs_at_most_parallel_iterations_ahead(
    session: af.Session, graph: af.Graph, window: int
) -> None:
    started = []

    @af.op(outputs=af.spec("int64", ()))
    async def counted(i: Any) -> Any:
        started.append(int(i))
        return i

    loop = Loop(30, after=counted, parallel_iterations=window)
    ahead = []
    async with aclosing(session.stream(loop.i)) as items:
        async for i in items:
            await ticks(30)
            ahead.append(len(started) - (int(i) + 1))
    assert len(started) == 30
    assert max(ahead) <= window
    assert ahead[0] >= window - 1, "the loop goes ahead as far as it may"


async def test_a_consumer_that_waits_long_costs_nothing(session: af.Session, graph: af.Graph) -> None:
    """While it is away the run neither ends nor goes on."""
    loop = Loop(10, parallel_iterations=2)
    async with aclosing(session.stream(loop.i)) as items:
        assert await anext(items) == 0
        await ticks(50)
        assert session.statistics().runs == 1
        assert [i async for i in items] == list(range(1, 10))
    assert session.statistics().runs == 0


# -- ending early ----------------------------------------------------------------------------------------------------


async def test_leaving_early_stops_the_run(session: af.Session, graph: af.Graph) -> None:
    """An endless loop, and a coroutine in flight that is cancelled."""
    cancelled = []

    @af.op(outputs=af.spec("int64", ()))
    async def stuck_at_three(i: Any) -> Any:
        if i == 3:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                cancelled.append(int(i))
                raise
        return i

    loop = Loop(10**9, after=stuck_at_three)
    async with aclosing(session.stream(loop.square)) as items:
        async for square in items:
            await ticks(10)
            if square == 4:
                break
    assert cancelled == [3]
    assert session.statistics().runs == 0


async def test_dropping_the_iterator_stops_the_run(session: af.Session, graph: af.Graph) -> None:
    async for i in session.stream(Loop(10**9).i):
        if i == 2:
            break
    while session.statistics().runs:  # noqa: ASYNC110 - Python closes a dropped iterator in a later tick
        await asyncio.sleep(0)
    assert session.statistics().completed == 1


async def test_cancelling_the_consumer(session: af.Session, graph: af.Graph) -> None:
    got = asyncio.Event()
    loop = Loop(10**9, parallel_iterations=1)

    async def consume() -> None:
        async for i in session.stream(loop.i):
            if i == 5:
                got.set()

    task = asyncio.create_task(consume())
    await got.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await ticks(3)
    assert session.statistics().runs == 0


async def test_a_stream_never_started_holds_nothing(session: af.Session, graph: af.Graph) -> None:
    await session.stream(Loop(3).i).aclose()
    assert session.statistics().completed == 0


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 32])
async def test_an_error_mid_stream(session: af.Session, graph: af.Graph, window: int) -> None:
    """The error comes after items in order: all before it with one iteration at a time, else the items taken until
    then.
    """

    @af.op(outputs=af.spec("int64", ()))
    def fails_at_four(i: Any) -> Any:
        if i == 4:
            raise LookupError("four")
        return i

    loop = Loop(10, after=fails_at_four, parallel_iterations=window)
    items = []
    with pytest.raises(af.KernelError, match="four") as caught:
        async for square in session.stream(loop.square):
            items.append(square)  # noqa: PERF401 - what came before the error is kept
    assert items == [0, 1, 4, 9][: len(items)]
    assert len(items) == 4 or window > 1
    assert caught.value.tag.endswith("/4")
    assert await session.run(Loop(3).result) == 3


async def test_a_deadline(session: af.Session, graph: af.Graph) -> None:
    """Items until then, then the error."""
    loop = Loop(10**9)
    items = []
    with pytest.raises(af.DeadlineExceeded, match=r"timeout=0\.01"):
        async for i in session.stream(loop.i, timeout=0.01):
            items.append(i)  # noqa: PERF401 - what came before the error is kept
    assert items == list(range(len(items)))


async def test_an_error_in_the_consumer_stops_the_run(session: af.Session, graph: af.Graph) -> None:
    loop = Loop(10**9)
    with pytest.raises(ZeroDivisionError):
        async with aclosing(session.stream(loop.i)) as items:
            async for i in items:
                1 / (2 - int(i))
    assert session.statistics().runs == 0


async def test_two_streams_of_one_loop_at_a_time(session: af.Session, graph: af.Graph) -> None:
    loop = Loop(50, parallel_iterations=2)
    a, b = await asyncio.gather(collect(session, loop.i), collect(session, loop.square))
    assert (a, b) == (list(range(50)), [i * i for i in range(50)])


REFUSED = {
    "outside a loop": (lambda loop: loop.result, "is not inside a loop; fetch it with session.run"),
    "nothing": (lambda loop: (), "got none, or tensors of several bodies"),
    "no tensor": (lambda loop: 3.0, "stream takes tensors inside a loop body; got float 3.0"),
    "two loops": (lambda loop: (loop.i, Loop(3).i), "got none, or tensors of several"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_streamed(session: af.Session, graph: af.Graph, case: str) -> None:
    pick, message = REFUSED[case]
    with pytest.raises(af.FetchError, match=message):
        await collect(session, pick(Loop(3)))


@pytest.mark.parametrize("capacity", [1, 4])
async def test_a_pooled_loop_streams_as_many_values_as_it_makes_steps(graph: af.Graph, capacity: int) -> None:
    """None of a loop without iterations, whether the request is alone or a row beside others."""
    n, x = af.placeholder("int64", ()), af.placeholder("float32", ())
    made: list[af.Tensor] = []

    def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        made.append(y * 2 + 1)
        return i + 1, made[-1]

    af.while_loop(lambda i, _: i < n, body, (af.constant(0, "int64"), x), pool=af.Pool(capacity=capacity))
    async with af.Session(graph) as session:

        async def ask(count: int) -> list[float]:
            return [float(y) async for y in session.stream(made[0], {n: count, x: 1.0})]

        for counts in ([0], [1], [0, 3], [3, 0, 0, 1], [0]):
            found = await asyncio.gather(*map(ask, counts))
            assert found == [[2.0 ** (k + 2) - 1 for k in range(count)] for count in counts]
