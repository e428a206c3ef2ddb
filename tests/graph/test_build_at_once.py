"""94: one graph built by several tasks, or by several threads, at once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import current_graph
from asyncflow.graph.verify import verify
from tests.patience import PATIENCE_S

THREADS = 4


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """Return the results of ``work(k)`` in several threads that begin together."""
    start = threading.Barrier(THREADS)

    def begin(k: int) -> Any:
        start.wait(PATIENCE_S)
        return work(k)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


def test_threads_add_to_one_graph(eager_switches: None) -> None:
    """Behaviour 94: nodes keep ids and names of their own, and are under the scopes of their own thread."""
    graph = af.Graph()

    def build(k: int) -> list[af.Tensor]:
        with graph, af.device(f"cpu:{k}"), af.name_scope("same"):
            return [af.identity(af.constant(k)) for _ in range(100)]

    built = at_once(build)
    assert len(graph.nodes) == graph.version == THREADS * 200
    assert [node.id for node in graph.nodes] == list(range(graph.version))
    assert len({node.name for node in graph.nodes}) == graph.version
    for k, tensors in enumerate(built):
        assert {tensor.node.device for tensor in tensors} == {f"cpu:{k}"}
        assert len({tensor.node.name.partition("/")[0] for tensor in tensors}) == 1
    verify(graph)


async def test_threads_differentiate_one_loop(session: af.Session, eager_switches: None) -> None:
    """Behaviour 94: the threads add the values to save to one and the same loop."""
    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y = af.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, af.sin(v) * v), (af.constant(0), x))[1]

    def differentiate(k: int) -> af.Tensor:
        with graph:
            return af.gradients(y * float(k + 1), x)

    grads = at_once(differentiate)
    verify(graph)
    found = await session.run(grads, {x: 1.5})
    np.testing.assert_allclose(found, found[0] * np.arange(1, THREADS + 1), rtol=1e-12)
    step = 1e-6
    values = await session.run(y, {x: 1.5 + step}), await session.run(y, {x: 1.5 - step})
    assert found[0] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


async def test_tasks_build_in_turns(graph: af.Graph) -> None:
    """Behaviour 94: each is in the graph, and under the scopes, that it has entered itself, whatever others enter
    meanwhile."""
    other = af.Graph()
    entered, left = asyncio.Event(), asyncio.Event()

    async def first() -> af.Tensor:
        with other, af.device("cpu:1"), af.name_scope("first"):
            entered.set()
            await left.wait()
            return af.identity(af.constant(1.0))

    async def second() -> af.Tensor:
        await entered.wait()
        with other, af.control_dependencies([af.constant(1.0)]):
            made = af.identity(af.constant(2.0))
            left.set()
            await asyncio.sleep(0)
        return made

    a, b = await asyncio.gather(first(), second())
    assert (a.node.device, a.node.name, a.node.control_inputs) == ("cpu:1", "first/identity", [])
    assert (b.node.device, b.node.name, len(b.node.control_inputs)) == (None, "identity", 1)
    assert current_graph() is graph


async def test_a_graph_is_left_where_it_was_not_entered() -> None:
    """Behaviour 94: as by a stack that another task unwinds."""
    graph = af.Graph()

    async def enters() -> None:
        graph.__enter__()
        assert current_graph() is graph

    await asyncio.create_task(enters())
    graph.__exit__(None, None, None)
    assert current_graph() is None
