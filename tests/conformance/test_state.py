"""Behaviour 70 and 71: variables under concurrent runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.gates import Gate
from tests.conftest import OpenSession
from tests.faults.kernels import until

Run = Callable[..., Awaitable[Any]]


@pytest.mark.slow
async def test_concurrent_assign_add_is_exact(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 70: 1024 concurrent runs, none lost."""
    count = af.Variable(1, name="count")
    add = count.assign_add(1)
    seen = await asyncio.gather(*(session.run(add) for _ in range(1024)))
    assert sorted(seen) == list(range(2, 1026))
    assert await session.run(count.read()) == 1025


@pytest.mark.slow
async def test_concurrent_read_add_write_may_lose_updates(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 70: a read and a write are two steps, so at most 1025, and here fewer: all read before any writes."""
    count = af.Variable(1, name="count")
    barrier = asyncio.Barrier(1024)

    @af.op(outputs=af.spec("int64", ()))
    async def everybody_has_read(x: Any) -> Any:
        await barrier.wait()
        return x

    write = count.assign(everybody_has_read(count.read()) + 1)
    await asyncio.gather(*(session.run(write) for _ in range(1024)))
    assert await session.run(count.read()) == 2


async def test_read_add_write_one_after_another(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 70: nothing is lost when runs do not overlap."""
    count = af.Variable(1, name="count")
    write = count.assign(count.read() + 1)
    for _ in range(20):
        await session.run(write)
    assert await session.run(count.read()) == 21


@pytest.mark.slow
async def test_two_assign_concats(open_session: OpenSession) -> None:
    """Behaviour 70: two atomic appends in either order, and nothing else; both orders occur over the seeds."""
    results = set()
    with af.Graph(effects="unordered") as graph:
        text = af.Variable(np.zeros(0, np.int64), name="text", shape=(None,))
        appends = [text.update(lambda old, new: af.concat([old, new]), np.array([k])) for k in (1, 2)]
    af.allow_races(text)
    for seed in range(20):
        async with open_session(graph, seed=seed, regions=False) as session:
            await session.run(appends)
            results.add(tuple((await session.run(text)).tolist()))
    assert results == {(1, 2), (2, 1)}


@pytest.mark.parametrize("seed", [None, *range(5)])
async def test_a_read_after_a_write(open_session: OpenSession, seed: int | None) -> None:
    """Behaviour 71: with a control edge the read gives B, in any ready order."""
    with af.Graph(effects="unordered") as graph:
        variable = af.Variable("A", name="letter")
        with af.control_dependencies([variable.assign("B")]):
            after = variable.read()
    async with open_session(graph, seed=seed, regions=seed is None) as session:
        assert await session.run(after) == "B"


async def test_without_an_edge_either(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 71: unordered, A or B, and both occur; in a graph with ordered effects, the order as written."""
    seen = set()
    with af.Graph(effects="unordered") as unordered:
        variable = af.Variable("A", name="letter")
        write, read = variable.assign("B"), variable.read()
    af.allow_races(variable)
    for seed in range(20):
        async with open_session(unordered, seed=seed, regions=False) as session:
            seen.add(str((await session.run([write, read]))[1]))
    assert seen == {"A", "B"}
    with graph:
        ordered = af.Variable("A", name="ordered")
        first, _, second = ordered.read(), ordered.assign("B"), ordered.read()
        fetches = [first, ordered.assign("C"), second]
    async with open_session(graph, seed=1, regions=False) as session:
        assert [str(x) for x in await session.run(fetches)] == ["A", "C", "A"]


async def test_a_write_waits_for_the_reads_before_it(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 71: with ordered effects, though the read has to wait itself and the write has not."""
    gate, variable = Gate(), af.Variable(1, name="number")
    with af.control_dependencies([gate(0)]):
        read = variable.read()
    running = asyncio.ensure_future(session.run([read, variable.assign(2)]))
    await until(lambda: gate.arrived)
    gate.open()
    assert await running == [1, 2]


async def test_an_unfetched_write_is_pruned(run: Run, graph: af.Graph) -> None:
    """Behaviour 71: order edges never cause a write to run."""
    variable = af.Variable("A", name="letter")
    variable.assign("B")
    assert await run(variable.read()) == "A"
