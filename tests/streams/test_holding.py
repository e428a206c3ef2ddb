"""Parts of a run: every request inside it, while it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.streams.holding import RunPart, current_part, enclosing_parts, is_within, own_context
from tests.faults.kernels import INT, CoroutineGate, in_flight
from tests.patience import PATIENCE_S


async def test_parts_of_parts() -> None:
    """Runs that are over are passed over, wherever they stand."""
    first, second = object(), object()
    outer = RunPart(first, None)
    inner = RunPart(second, outer)
    own_context(inner)
    assert current_part() is inner
    assert enclosing_parts() == {outer, inner}
    assert is_within(first)
    assert is_within(second)
    inner.is_over = True
    assert current_part() is outer
    assert not is_within(second)
    outer.is_over, inner.is_over = True, False
    assert enclosing_parts() == {inner}
    inner.is_over = True
    assert current_part() is None
    assert not is_within(first)


async def test_a_task_that_outlives_its_run_is_no_part_of_it(graph: af.Graph) -> None:
    """`max_runs` counts the task's later runs: no run waits for it any more."""
    gate = CoroutineGate()
    left: list[asyncio.Task[Any]] = []
    x = af.placeholder("int64", ())
    slow = gate.op(x)

    async def later() -> None:
        await ended.wait()
        await session.run(slow, {x: np.int64(2)})

    @af.op(outputs=INT)
    async def leaves_one_behind(x: Any) -> Any:
        left.append(asyncio.create_task(later()))
        return x

    ended = asyncio.Event()
    behind = leaves_one_behind(x)
    async with af.Session(graph, max_runs=1, max_queued=0) as session, asyncio.timeout(PATIENCE_S):
        await session.run(behind, {x: np.int64(0)})
        async with in_flight(session.run(slow, {x: np.int64(1)}), lambda: gate.started) as running:
            ended.set()
            with pytest.raises(af.OverloadedError):
                await left[0]
            gate.opened.set()
            await running
    assert gate.started == [1]


async def test_a_run_asked_for_by_way_of_another_session_is_part_of_the_first(graph: af.Graph) -> None:
    """The inner run would wait for the end of the run that waits for it: `max_runs` does not count it."""
    gate = CoroutineGate()
    gate.opened.set()
    x = af.placeholder("int64", ())
    inner = gate.op(x)

    @af.op(outputs=INT)
    async def back(value: Any) -> Any:
        return await first.run(inner, {x: value})

    there = back(x)

    @af.op(outputs=INT)
    async def away(value: Any) -> Any:
        return await second.run(there, {x: value})

    outer = away(x)
    async with af.Session(graph, max_runs=1) as first, af.Session(graph) as second, asyncio.timeout(PATIENCE_S):
        assert await first.run(outer, {x: np.int64(3)}) == 3
