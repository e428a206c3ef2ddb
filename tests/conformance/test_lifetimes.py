"""Graphs, plans and sessions are freed by their last reference, and the collector is the application's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession

Feeds: TypeAlias = dict[af.Tensor, Any]
Program: TypeAlias = Callable[[], tuple[Any, Feeds]]
"""Builds in the current graph; gives what to fetch and what to feed."""

ONES = np.ones(4, np.float32)


def _x() -> af.Tensor:
    return af.placeholder("float32", (4,), name="x")


def plain() -> tuple[Any, Feeds]:
    x = _x()
    return [af.tanh(x * 2 + 1), af.sum(x)], {x: ONES}


def training() -> tuple[Any, Feeds]:
    """A branch in a loop, its gradients, and a variable that changes."""
    x, w = _x(), af.Variable(ONES)

    def step(i: af.Tensor, a: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.cond(af.sum(a) > 0, lambda: af.tanh(a * w), lambda: a * w)

    y = af.while_loop(lambda i, _: i < 3, step, (0, x))[1]
    to_x, to_w = af.gradients(af.sum(y), [x, w])
    return [y, to_x, w.assign(w - 0.1 * to_w)], {x: ONES}


def arrays() -> tuple[Any, Feeds]:
    """TensorArrays, loops over rows, lifted ones, and rules of the user's."""

    @af.custom_gradient
    def clipped(x: af.Tensor) -> Any:
        y = af.exp(x)
        return y, lambda grad: grad * af.minimum(y, 1.0)

    x = af.placeholder("float32", (None, 4), name="x")
    rows = af.map_fn(lambda row: af.cond(af.sum(row) > 0, lambda: af.tanh(row), lambda: row), x)
    sums = af.scan(lambda total, row: total + af.recompute(af.sin)(row), x)
    loop = af.map_fn(clipped, x, lift=False)
    slopes = af.gradients(af.sum(sums) + af.sum(loop), x)
    return [rows, slopes], {x: np.ones((3, 4), np.float32)}


def functions() -> tuple[Any, Feeds]:
    """Functions of the user's, plain and awaiting, with state and without."""

    @af.op(outputs=af.spec("float32", (4,)), stateful=True)
    def counted(x: Any) -> Any:
        return x + 1

    @af.op(outputs=af.spec("float32", (4,)))
    async def awaited(x: Any) -> Any:
        await asyncio.sleep(0)
        return x * 2

    x = _x()
    return awaited(counted(x)), {x: ONES}


def batched() -> tuple[Any, Feeds]:
    x = _x()
    return af.batched(lambda row: af.tanh(row * 2))(x), {x: ONES}


def pooled() -> tuple[Any, Feeds]:
    x = _x()
    y = af.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, af.tanh(a)), (0, x), pool=af.Pool(4))
    return y, {x: ONES}


def vertices() -> tuple[Any, Feeds]:
    trees = af.InputGraph.placeholder()
    x = af.placeholder("float32", (None,), name="x")

    @af.vertex_function(state=af.spec("float32", ()), children=2)
    def cell(v: af.Vertex) -> None:
        v.scatter(v.pull() + v.gather(0) * v.gather(1))

    (tree, _), (other, _) = (af.InputGraph.from_nested(nested) for nested in (("a", "b"), (("a", "b"), "c")))
    batch = af.InputGraph.batch([tree, other])
    roots = [af.vertex_map(cell, trees, x).roots, af.vertex_map(cell, trees, x, share=True).roots]
    return [*roots, af.gradients(af.sum(roots[0]), x)], {**trees.feeds(batch), x: np.ones(batch.n_vertices, np.float32)}


def queues() -> tuple[Any, Feeds]:
    x, queue = _x(), af.FIFOQueue(2, af.spec("float32", (4,)))
    return [queue.enqueue(x), queue.dequeue()], {x: ONES}


def failing() -> tuple[Any, Feeds]:
    @af.op(outputs=af.spec("float32", (4,)))
    def fails(x: Any) -> Any:
        raise ValueError("no")

    x = _x()
    return af.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, fails(a)), (0, x)), {x: ONES}


async def _run(session: af.Session, fetches: Any, feeds: Feeds) -> None:
    for outcome in await asyncio.gather(*(session.run(fetches, feeds) for _ in range(2)), return_exceptions=True):
        if isinstance(outcome, BaseException):
            assert "fails" in str(outcome), outcome


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "programs",
    [(training,), (arrays, plain), (functions, queues, batched), (pooled, failing), (vertices,)],
    ids=["training", "arrays", "functions", "pooled", "vertices"],
)
async def test_graphs_plans_and_sessions_end_with_the_last_reference(
    programs: tuple[Program, ...], open_session: OpenSession
) -> None:
    """Behaviour 110: in whichever order their user lets go of a session, a graph, and tensors of it."""

    def built(program: Program) -> tuple[af.Graph, Any, Feeds]:
        with af.Graph() as graph:
            return graph, *program()

    async def use(program: Program, session: af.Session) -> list[ref[Any]]:
        graph, fetches, feeds = built(program)
        await _run(session, fetches, feeds)
        gone: list[ref[Any]] = [ref(graph), ref(session.plan(fetches, tuple(feeds)))]
        if program is not plain:
            del graph  # before its tensors
        del fetches, feeds
        return gone

    async def close(graph: af.Graph, fetches: Any, feeds: Feeds) -> list[ref[Any]]:
        async with open_session(graph) as session:
            await _run(session, fetches, feeds)
            gone: list[ref[Any]] = [ref(session), ref(session.plan(fetches, tuple(feeds)))]
            return gone

    async with open_session() as session:
        gone = [weak for program in programs for weak in await use(program, session)]
    kept = built(programs[0])
    gone += await close(*kept)
    await asyncio.sleep(0)  # callbacks of the last run
    assert [weak() for weak in gone if weak() is not None] == []
