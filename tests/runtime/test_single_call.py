"""Plans of one kernel: which run without a scheduler is for the arrays fed to say, not for the shapes declared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.runtime.gates import in_flight
from asyncflow.runtime.run.run import Run
from tests.clocks import WorkClock

WEIGHTS = np.eye(64, dtype=np.float32)
ROWS = np.ones((2, 64), np.float32)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, work: WorkClock) -> list[Run]:
    """The runs that took a scheduler."""
    made: list[Run] = []

    class Noted(in_flight.Run):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(in_flight, "Run", Noted)
    return made


async def short(session: af.Session, y: af.Tensor, x: af.Tensor) -> None:
    """Whatever this machine is busy with, the kernel took no time lately, and the session's turn has just begun."""
    await asyncio.sleep(0)
    call = session.plan(y, [x]).single_call
    assert call is not None
    call.node.times.cost = measured(0)


def measured(ns: int) -> MeasuredCost:
    cost = MeasuredCost()
    cost.observe(1_000_000, ns)
    return cost


def squares(x: af.Tensor) -> af.Tensor:
    return x * x


def chain(x: af.Tensor) -> af.Tensor:
    for _ in range(10):
        x = x * 0.5 + 1.0
    return x


def layers(x: af.Tensor) -> af.Tensor:
    return af.tanh(x @ WEIGHTS) @ WEIGHTS


def branch(x: af.Tensor) -> af.Tensor:
    return af.cond(af.sum(x) > 0, lambda: x + 1.0, lambda: x - 1.0)


PROGRAMS: dict[str, Callable[[af.Tensor], af.Tensor]] = {
    program.__name__: program for program in (squares, chain, layers, branch)
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_small_arrays_of_open_extents_need_no_scheduler(program: str, runs: list[Run]) -> None:
    with af.Graph():
        x = af.placeholder("float32", (None, 64))
        y = PROGRAMS[program](x)
    async with af.Session() as session, af.Session(regions=False) as interpreted:
        for rows in (1, 2, 3):
            await short(session, y, x)
            fed = ROWS[:1].repeat(rows, axis=0)
            got = await session.run(y, {x: fed})
            assert runs == []
            np.testing.assert_array_equal(got, await interpreted.run(y, {x: fed}))
            runs.clear()


async def test_a_kernel_that_took_long_goes_to_a_thread(runs: list[Run]) -> None:
    """Once that was on as many elements; its measurement there, and on fewer, brings it back."""
    with af.Graph():
        x = af.placeholder("float32", (None,))
        y = x * x
    async with af.Session() as session:
        call = session.plan(y, [x]).single_call
        assert call is not None
        call.node.times.cost = MeasuredCost(slope_ns=INLINE_LIMIT_NS / 100)
        await session.run(y, {x: np.ones(51, np.float32)})
        assert len(runs) == 1
        call.node.times.cost = MeasuredCost(slope_ns=INLINE_LIMIT_NS / 100)
        await asyncio.sleep(0)
        await session.run(y, {x: np.ones(49, np.float32)})
        assert len(runs) == 1
        assert call.node.times.cost.is_measured


async def test_long_kernels_and_large_arrays_take_the_scheduler(runs: list[Run]) -> None:
    """A product of unknown size is not tried on the event loop, and there is nothing to gain on many elements."""
    with af.Graph():
        x = af.placeholder("float32", (None, 64))
        y, z = layers(x), squares(x)
    async with af.Session() as session:
        await session.run(y, {x: ROWS})
        assert len(runs) == 1
        await short(session, z, x)
        await session.run(z, {x: np.ones((1025, 64), np.float32)})
        assert len(runs) == 2


async def test_what_may_wait_takes_the_scheduler(runs: list[Run]) -> None:
    with af.Graph():
        x = af.placeholder("float32", (None,))
        loop = af.while_loop(lambda v: af.sum(v) < 10, lambda v: v + 1, x)
        random = x + af.random.normal((3,), dtype="float32")
    async with af.Session() as session:
        for y in (loop, random):
            assert session.plan(y, [x]).single_call is None


WHO: ContextVar[str] = ContextVar("who")


@pytest.mark.parametrize("is_region", [False, True])
async def test_a_users_function_that_is_short_needs_no_scheduler(
    is_region: bool, runs: list[Run], work: WorkClock
) -> None:
    """Until it has proved to be short it takes one, and again once it is slow: its other rows then go to a thread."""
    seen: list[tuple[bool, str]] = []
    slow: list[float] = []
    here = threading.get_ident()

    @af.op(outputs=af.spec("float64", ()))
    def own(v: Any) -> Any:
        with pytest.raises(af.GraphError, match="no graph is being built here"):
            af.abs(v)
        seen.append((threading.get_ident() == here, WHO.get()))
        work.wait(50 * INLINE_LIMIT_NS if v in slow else 1_000)
        return v * 2.0

    with af.Graph() as graph:
        x = af.placeholder("float64", (4,))
        y = af.map_fn(own, x)
        y = y + 1.0 if is_region else y
        value = np.arange(4.0)
        async with af.Session(graph) as session:  # inside `with graph`, which the function is not to see
            WHO.set("first")
            for _ in range(12):
                await session.run(y, {x: value})
            runs.clear()
            seen.clear()
            WHO.set("second")
            assert (await session.run(y, {x: value})).tolist() == (value * 2 + is_region).tolist()
            assert runs == [] and seen == [(True, "second")] * 4
            seen.clear()
            slow += [1.0, 2.0]
            assert (await session.run(y, {x: value})).tolist() == (value * 2 + is_region).tolist()
            assert len(runs) == 1 and seen == [(True, "second")] * 2 + [(False, "second")] * 2
            await session.run(y, {x: value})
            assert len(runs) == 2 and seen[4:] == [(False, "second")] * 4


@pytest.mark.parametrize("is_region", [False, True])
async def test_a_users_function_that_fails_leaves_a_session_that_works(is_region: bool, runs: list[Run]) -> None:
    @af.op(outputs=af.spec("float64", ()))
    def own(v: Any) -> Any:
        if v == 2.0:
            raise ValueError("two is too much")
        return v

    with af.Graph() as graph:
        x = af.placeholder("float64", (3,))
        y = af.map_fn(own, x) + 1.0 if is_region else af.map_fn(own, x)
    async with af.Session(graph) as session:
        for _ in range(12):
            await session.run(y, {x: np.zeros(3)})
        runs.clear()
        with pytest.raises(af.KernelError, match=r"two is too much[\s\S]*iteration map/1[\s\S]*test_single_call.py"):
            await session.run(y, {x: np.array([1.0, 2.0, 3.0])})
        await session.run(y, {x: np.zeros(3)})
        assert runs == []


async def test_errors_name_the_node(runs: list[Run]) -> None:
    with af.Graph():
        x, w = af.placeholder("float32", (None,), name="x"), af.placeholder("float32", (None,), name="w")
        with af.name_scope("both"):
            y = x + w
    async with af.Session(memory_limit=1 << 20) as session:
        with pytest.raises(af.KernelError, match=r"both/add[\s\S]*float32\[2\], float32\[3\]"):
            await session.run(y, {x: np.ones(2, np.float32), w: np.ones(3, np.float32)})
        assert runs == []


async def test_the_memory_limit_holds(runs: list[Run]) -> None:
    """A run that passes the limit takes a scheduler after all, where it could wait for others to end."""
    with af.Graph():
        x = af.placeholder("float32", (None,))
        outer = af.expand_dims(x, axis=0) * af.expand_dims(x, axis=1)
    async with af.Session(memory_limit=1 << 20) as session:
        await short(session, outer, x)
        with pytest.raises(af.OutOfMemoryError, match=r"over its limit of 1.0 MiB"):
            await session.run(outer, {x: np.ones(600, np.float32)})
        assert len(runs) == 1
        await short(session, outer, x)
        assert (await session.run(outer, {x: np.ones(3, np.float32)})).shape == (3, 3)
        assert len(runs) == 1


async def test_infinities_are_values(runs: list[Run]) -> None:
    """No floating-point warnings, which are errors in tests."""
    with af.Graph():
        x = af.placeholder("float32", (None,))
        y = 1.0 / x
    async with af.Session() as session:
        await short(session, y, x)
        np.testing.assert_array_equal(await session.run(y, {x: np.zeros(2, np.float32)}), [np.inf, np.inf])
        assert runs == []
        with pytest.warns(RuntimeWarning, match="divide by zero"):
            np.ones(2) / np.zeros(2)
