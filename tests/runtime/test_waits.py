"""Firings that waited in line leave nothing behind, even without a search for reference cycles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.others import held_in_the_end
from tests.patience import PATIENCE_S

SIZE = 5_000


@af.op(outputs=lambda spec: spec, rows=True, pure=True)
def positive(x: Any) -> Any:
    """Fails for rows that are not."""
    if (x < 0).any():
        raise ValueError("a negative one")
    return x + 1.0


def batched(x: af.Tensor) -> af.Tensor:
    return af.batched(lambda row: af.sum(positive(row), axis=0))(af.sin(x * 0.0) + x)


def batched_in_a_loop(x: af.Tensor) -> af.Tensor:
    call = af.batched(lambda row: positive(row) * 0.5)
    return af.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, call(v)), (0, x))[1]


def batched_alone(x: af.Tensor) -> af.Tensor:
    return af.batched(positive)(x)


def pooled_alone(x: af.Tensor) -> af.Tensor:
    return af.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, positive(v)), (0, x), pool=af.Pool(8))[1]


def pooled(x: af.Tensor) -> af.Tensor:
    return af.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, positive(v)), (0, x * 2.0), pool=af.Pool(8))[1]


def shared_vertices(x: af.Tensor) -> af.Tensor:
    @af.vertex_function(state=af.spec("float64", (SIZE,)), children=1)
    def cell(v: Any) -> None:
        v.scatter(positive(v.pull()) + v.gather(0))

    graph = af.InputGraph.chain([2])
    return af.vertex_map(cell, graph, af.stack([x, x * 2.0]), initial=0.0, share=True).roots


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("program", [batched, batched_alone, batched_in_a_loop, pooled, pooled_alone, shared_vertices])
async def test_nothing_is_held_once_runs_have_ended(program: Callable[[af.Tensor], af.Tensor], regions: bool) -> None:
    """With values, with errors, or cancelled before they are computed together and while they are."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (SIZE,))
        y = program(x)
    async with af.Session(graph, regions=regions) as session, asyncio.timeout(PATIENCE_S):

        async def ask(*numbers: float, passes: int | None = None) -> list[str]:
            tasks = [asyncio.ensure_future(session.run(y, {x: np.full(SIZE, number)})) for number in numbers]
            for _ in range(passes or 0):
                await asyncio.sleep(0)
            if passes is not None:
                for task in tasks:
                    task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            return [type(each).__name__ if isinstance(each, BaseException) else "ended" for each in found]

        assert await ask(1.0, 2.0, 3.0) == ["ended"] * 3
        assert await held_in_the_end(session) == 0
        assert await ask(1.0, -200.0, 3.0) == ["ended", "KernelError", "ended"]
        assert await held_in_the_end(session) == 0
        assert await ask(-200.0) == ["KernelError"]
        assert await held_in_the_end(session) == 0
        for passes in range(1, 8):
            assert set(await ask(1.0, 2.0, 3.0, passes=passes)) <= {"ended", "CancelledError"}
            assert await held_in_the_end(session) == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("regions", [False, True])
async def test_nothing_is_held_once_an_element_has_come(regions: bool) -> None:
    """Nor when the run that waited for one was cancelled, or the queue was closed."""
    with af.Graph() as graph:
        queue = af.FIFOQueue(4, af.spec("float64", ()))
        x = af.placeholder("float64", (SIZE,))
        y = af.sum(x * 2.0 + queue.dequeue())
        put, close = queue.enqueue(1.0), queue.close()
    async with af.Session(graph, regions=regions) as session, asyncio.timeout(PATIENCE_S):

        async def ask(end: Callable[[asyncio.Task[Any]], Any]) -> str:
            task = asyncio.ensure_future(session.run(y, {x: np.ones(SIZE)}))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
            ended = end(task)
            if not isinstance(ended, bool):
                await ended
            await asyncio.wait([task])
            return "cancelled" if task.cancelled() else type(task.exception()).__name__

        assert await ask(lambda _: session.run(put)) == "NoneType"
        assert await held_in_the_end(session) == 0
        assert await ask(lambda task: task.cancel()) == "cancelled"
        assert await held_in_the_end(session) == 0
        assert await ask(lambda _: session.run(close)) == "QueueClosedError"
        assert await held_in_the_end(session) == 0


@pytest.mark.usefixtures("no_collector")
async def test_batches_of_runs_that_pass_the_memory_limit_together() -> None:
    """Runs that did not fit beside the others find their memory free when it is their turn, and none fails."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (SIZE,))
        y = af.batched(lambda row: af.sum(row, axis=0))(af.sin(x * 0.0) + x)
    async with af.Session(graph, memory_limit=300_000) as session, asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            asked = [session.run(y, {x: np.full(SIZE, float(k))}) for k in range(12)]
            assert await asyncio.gather(*asked) == [float(SIZE * k) for k in range(12)]
