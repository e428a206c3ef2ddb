"""`Session.warm_up`: the first request finds done what only the first one has to do, and state as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler import pipeline
from asyncflow.runtime.session import session as session_module
from tests.conftest import OpenSession

if TYPE_CHECKING:
    from asyncflow.compiler.plan import Plan


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are compiled from now on."""
    plans: list[Plan] = []

    def compile_plan(*args: Any) -> Plan:
        plans.append(pipeline.compile_plan(*args))
        return plans[-1]

    monkeypatch.setattr(session_module, "compile_plan", compile_plan)
    return plans


async def test_nothing_is_left_to_compile(open_session: OpenSession, compiled: list[Plan]) -> None:
    """Neither for one request, nor for several that share batches and pools."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))
        w = af.Variable(np.ones(3, np.float32), name="w")
        batch = af.batched(lambda row: row * w.read(), max_size=8)(x)
        result = af.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s + batch), (0, x), pool=af.Pool(4))[1]
    value = np.ones(3, np.float32)
    async with open_session(graph) as session:
        assert await session.warm_up(result, {x: value}, sizes=(1, 4)) == 5
        known = len(compiled)
        assert known >= 3
        prepared = session.prepare(result, [x])
        assert (await session.run(result, {x: value})).tolist() == [4, 4, 4]
        assert (await prepared(value)).tolist() == [4, 4, 4]
        assert len(compiled) == known
        assert session.statistics().batches["while"].largest >= 2


async def test_what_writes_is_compiled_only(open_session: OpenSession, compiled: list[Plan]) -> None:
    called = []

    @af.op(outputs=af.spec("int64", ()))
    def count() -> np.int64:
        called.append(1)
        return np.int64(1)

    with af.Graph() as graph:
        n = af.Variable(0, name="n")
        write = n.assign_add(1)
        calls = count()
    async with open_session(graph) as session:
        assert await session.warm_up(write) == 0
        assert await session.warm_up(calls, sizes=[3]) == 0
        assert await session.run(n) == 0
        assert not called
        known = len(compiled)
        assert await session.run(write) == 1
        assert len(compiled) == known


async def test_random_numbers_go_on_as_if_nothing_had_been_run() -> None:
    with af.Graph() as graph:
        noise = af.random.normal((2,))
        doubled = af.batched(lambda x: x * 2)(noise)
    drawn = []
    for is_warm in (False, True):
        async with af.Session(graph, seed=1) as session:
            session._runs.in_flight.random_seed = 5
            if is_warm:
                assert await session.warm_up(doubled, sizes=[1, 3]) == 4
            drawn.append([(await session.run(doubled)).tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]


async def test_a_run_that_fails_says_so() -> None:
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = 1 // x
    async with af.Session(graph) as session:
        with pytest.raises(af.FeedError):
            await session.warm_up(y)
        with pytest.raises(af.FeedError):
            await session.warm_up(y, {x: 0.5})


@pytest.mark.parametrize("sizes", [[0], [1, -1], [1.5], [True], [5], 3, (), None, "1"])
async def test_sizes_are_positive_and_may_run_at_once(sizes: Any) -> None:
    with af.Graph() as graph:
        y = af.constant(1) + 1
    async with af.Session(graph, max_runs=4) as session:
        with pytest.raises(ValueError, match="sizes has positive integers up to max_runs=4"):
            await session.warm_up(y, sizes=sizes)
        assert await session.warm_up(y, sizes=[4]) == 4
