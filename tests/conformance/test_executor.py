"""Behaviour 69, 72 and 73: size, errors, and how often a node fires."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession

Run = Callable[..., Awaitable[Any]]


def random_tree(leaves: int, seed: int) -> tuple[af.Tensor, int]:
    """Return the sum of constants, added pairwise in a random order, and its value."""
    random = Random(seed)
    numbers = [random.randrange(1000) for _ in range(leaves)]
    pool = [af.constant(number) for number in numbers]
    while len(pool) > 1:
        left, right = (pool.pop(random.randrange(len(pool))) for _ in range(2))
        pool.append(left + right)
    return pool[0], sum(numbers)


@pytest.mark.slow
async def test_a_random_tree_of_4096_leaves(run: Run, graph: af.Graph) -> None:
    """Behaviour 69: right, whatever its shape."""
    total, expected = random_tree(4096, seed=7)
    assert await run(total) == expected


@pytest.mark.slow
async def test_a_chain_of_8192_nodes(run: Run, graph: af.Graph) -> None:
    """Behaviour 69: a chain of nodes without kernels, and one with; no recursion anywhere."""
    x = af.placeholder("int64", ())
    passed = added = x
    for _ in range(4096):
        passed = af.identity(passed)
        added = added + 1
    assert await run(passed + added, {x: 1}) == 4098


@pytest.mark.slow
async def test_a_value_with_8192_users_of_a_value(run: Run, graph: af.Graph) -> None:
    """Behaviour 69: one value with 8,192 users, all of which another node waits for."""
    x = af.placeholder("int64", ())
    users = [af.identity(x) for _ in range(8192)]
    assert await run(af.group(*users), {x: 1}) is None
    assert await run([users[0], users[-1]], {x: 3}) == [3, 3]


@pytest.mark.slow
async def test_a_chain_of_8192_control_edges(run: Run, graph: af.Graph) -> None:
    """Behaviour 69: order alone, as long."""
    node = af.group()
    for _ in range(8192):
        with af.control_dependencies([node]):
            node = af.group()
    assert await run(node) is None


async def test_no_inputs(run: Run, graph: af.Graph) -> None:
    """Behaviour 69: a graph of one constant, of a group of nothing, and a fetch of nothing."""
    assert await run(af.constant(3)) == 3
    assert await run(af.group()) is None
    empty: list[af.Tensor] = []
    assert await run({"none": empty, "one": (af.constant(1),)}) == {"none": [], "one": (1,)}


async def test_an_error_input_has_no_effects(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 72: what depends on a failed node does not run, and a second failure does not replace the first."""
    variable = af.Variable(1, name="count")
    ran: list[str] = []

    @af.op(outputs=af.spec("int64", ()))
    def failing(x: Any) -> Any:
        ran.append("failing")
        raise LookupError("the first")

    @af.op(outputs=(), stateful=True)
    def effect(x: Any) -> None:
        ran.append("effect")
        raise LookupError("the second")

    bad = failing(2)
    later = [variable.assign(bad), effect(bad)]
    for _ in range(2):
        with pytest.raises(af.KernelError, match="the first") as caught:
            await session.run(later)
        assert not hasattr(caught.value, "__notes__")
    assert ran == ["failing", "failing"]
    assert await session.run(variable.read()) == 1


async def test_an_error_is_terminal(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 72: effects that are ordered after it do not happen either."""
    variable = af.Variable(0, name="count")

    @af.op(outputs=())
    def failing() -> None:
        raise LookupError("stop")

    first = variable.assign_add(1)
    with af.control_dependencies([first]):
        broken = failing()
    with af.control_dependencies([broken]):
        second = variable.assign_add(10)
    with pytest.raises(af.KernelError, match="stop"):
        await session.run([first, second])
    assert await session.run(variable.read()) == 1


def firings(trace: af.Trace) -> Counter[tuple[str, str]]:
    """Return the number of firings of each node under each tag."""
    return Counter((firing.node, firing.tag) for firing in trace.firings)


async def test_every_run_computes_with_its_own_feeds(graph: af.Graph, run: Run) -> None:
    """Behaviour 73: arrays and numbers of the host, also where a graph of kernels is launched again."""
    x, n = af.placeholder("float64", (2, 2)), af.placeholder("float64", ())
    y = x
    for _ in range(4):
        y = (y + af.sum(y, axis=0)) * n
    fed = [np.array([[k, 1.0], [2.0, k]]) for k in range(3)]
    for number in (2.0, 3.0):
        found = await asyncio.gather(*(run(y, {x: value, n: number}) for value in fed))
        for expected in fed:
            for _ in range(4):
                expected = (expected + expected.sum(axis=0)) * number
            np.testing.assert_array_equal(found.pop(0), expected)


@pytest.mark.parametrize("seed", [None, 0, 1])
async def test_each_node_fires_once(open_session: OpenSession, graph: af.Graph, seed: int | None) -> None:
    """Behaviour 73: exactly once without control flow, though it has many users; a region is one node."""
    x = af.placeholder("int64", ())
    shared = total = x * 3
    for k in range(20):
        total = total + (shared + k)
    trace = af.Trace()
    async with open_session(graph, seed=seed, regions=False, optimize=False) as session:
        assert await session.run(total, {x: 1}, trace=trace) == 253
    counts = firings(trace)
    assert set(counts.values()) == {1}
    assert len(counts) == 41


@pytest.mark.parametrize("seed", [None, 0, 1])
async def test_at_most_once_per_tag(open_session: OpenSession, graph: af.Graph, seed: int | None) -> None:
    """Behaviour 73: in nested loops and branches, once per path of frames and iterations."""

    def outer(i: Any, total: Any) -> Any:
        _, inner = af.while_loop(lambda j, _: j < i, lambda j, t: (j + 1, t + j), (0, total), name="inner")
        return i + 1, af.cond(i > 2, lambda: inner * 2, lambda: inner + 1)

    _, total = af.while_loop(lambda i, _: i < 4, outer, (0, 0), name="outer")
    trace = af.Trace()
    async with open_session(graph, seed=seed, regions=False) as session:
        assert await session.run(total, trace=trace) == 14
    assert set(firings(trace).values()) == {1}
    tags = {firing.tag for firing in trace.firings}
    assert {"outer/0", "outer/4", "outer/3/inner/0", "outer/3/inner/3"} <= tags
    assert not any(tag.startswith("outer/4/") or tag == "outer/5" for tag in tags)


async def test_the_times_of_a_firing(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 73: scheduled, started and ended in this order, within the span of the run, on every path."""
    x = af.placeholder("float32", (None,))

    @af.op(outputs=af.spec("float32", (None,)))
    async def on_loop(v: Any) -> Any:
        return v

    on_thread = af.op(outputs=af.spec("float32", (None,)), cost=1e12, name="on_thread")(lambda v: v + 1)
    trace = af.Trace()
    await session.run(on_thread(on_loop(x * 2)), {x: np.ones(5, np.float32)}, trace=trace)
    assert {firing.stream for firing in trace.firings} == {"inline", "async", "compute"}
    (span,) = trace.runs
    for firing in trace.firings:
        times = [span.started_ns, firing.scheduled_ns, firing.started_ns, firing.ended_ns, span.ended_ns]
        assert times == sorted(times)
        assert firing.status == "ok"
