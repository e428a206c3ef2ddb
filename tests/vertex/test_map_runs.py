"""Runs of `vertex_map` that are cancelled, late or too large leave nothing behind, and the session goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])  # sessions on devices of their own

LONG = 1_000_000


@af.vertex_function(state=af.spec("float64", (4,)), children=1)
def total(v: Any) -> None:
    v.scatter(v.pull() + v.gather(0))


def program() -> tuple[af.Graph, af.InputGraph, af.Tensor, af.Tensor]:
    with af.Graph() as graph:
        fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 4))
        roots = af.vertex_map(total, fed, x).roots
    return graph, fed, x, roots


def feeds(fed: af.InputGraph, x: af.Tensor, length: int) -> Any:
    return {**fed.feeds(af.InputGraph.chain([length])), x: np.ones((length, 4))}


async def check(session: af.Session, fed: af.InputGraph, x: af.Tensor, roots: af.Tensor) -> None:
    assert session.statistics().runs == 0
    assert (await session.run(roots, feeds(fed, x, 3))).tolist() == [[3.0] * 4]


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
async def test_a_cancel_between_sets(regions: bool) -> None:
    """Behaviour 84."""
    graph, fed, x, roots = program()
    async with af.Session(graph, regions=regions) as session:
        task = asyncio.create_task(session.run(roots, feeds(fed, x, LONG)))
        async with asyncio.timeout(PATIENCE_S):
            while session.statistics().runs == 0:  # noqa: ASYNC110 - nothing tells that a run has begun
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check(session, fed, x, roots)


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
async def test_a_deadline_between_sets(regions: bool) -> None:
    """Behaviour 85."""
    graph, fed, x, roots = program()
    async with af.Session(graph, regions=regions) as session:
        with pytest.raises(af.DeadlineExceeded, match=r"timeout=0\.05"):
            await session.run(roots, feeds(fed, x, LONG), timeout=0.05)
        await check(session, fed, x, roots)


async def test_the_memory_limit_ends_the_run_and_not_the_session() -> None:
    graph, fed, x, roots = program()
    async with af.Session(graph, devices=["cpu:0"], memory_limit=1 << 20) as session:
        with pytest.raises(af.OutOfMemoryError, match="row_store"):
            await session.run(roots, feeds(fed, x, 15_000))
        await check(session, fed, x, roots)
        assert (await session.run(roots, feeds(fed, x, 1_000))).tolist() == [[1_000.0] * 4]
