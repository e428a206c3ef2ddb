"""The plans that a session keeps are bounded, and go with the graph they were made for (Behaviour 96, Fault F68)."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.passes import Context
from asyncflow.compiler.pipeline import compile_plan
from asyncflow.compiler.plan import Partition, Plan, PlanNode
from asyncflow.compiler.program.request import PlanRequest
from asyncflow.runtime.session import function as function_module
from asyncflow.runtime.session import session as session_module

ONE = np.float32(1)


def doubled() -> tuple[af.Tensor, af.Tensor]:
    with af.Graph():
        x = af.placeholder("float32", ())
        return x, x * 2


@pytest.fixture
def alive() -> Callable[[type], int]:
    """Return how many objects of a kind that the test made are alive."""
    gc.collect()
    gc.freeze()  # what others have left is neither looked at nor counted, nor does it matter when they let go of it

    def count(kind: type) -> int:
        gc.collect()
        return sum(type(found) is kind for found in gc.get_objects())

    return count


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """Requests for which plans have been compiled."""
    requests: list[PlanRequest] = []

    def noted(request: PlanRequest, *args: Any, **options: Any) -> Plan:
        requests.append(request)
        return compile_plan(request, *args, **options)

    monkeypatch.setattr(session_module, "compile_plan", noted)
    return requests


async def test_plans_are_bounded_and_dropped_graphs_are_freed(
    compiled: list[PlanRequest], alive: Callable[[type], int]
) -> None:
    """Behaviour 96: F68: many fetch sets of one graph; the ones used last stay."""
    with af.Graph():
        x = af.placeholder("float32", ())
        fetches = [x * k for k in range(12)]
    async with af.Session(plans=4) as session:
        for k, y in enumerate(fetches):
            assert await session.run(y, {x: ONE}) == k
            assert await session.run(fetches[0], {x: ONE}) == 0  # stays in use
            assert session.statistics().plans == min(k + 1, 4)
        assert len(compiled) == 12
        compiled.clear()
        assert alive(Plan) == 4
        assert alive(PlanNode) == 4 * 3
        for k in (9, 10, 11, 0, 1):
            await session.run(fetches[k], {x: ONE})
        assert [request.fetches for request in compiled] == [(fetches[1],)]
        compiled.clear()


async def test_a_graph_that_is_gone_is_freed_while_the_session_is_open(alive: Callable[[type], int]) -> None:
    """Behaviour 96: F68: with its plans, whatever the bound."""
    graphs: list[weakref.ref[af.Graph]] = []

    async def use(session: af.Session) -> None:
        x, y = doubled()
        graphs.append(weakref.ref(x.graph))
        assert await session.run(y, {x: ONE}) == 2
        assert await session.run([x, y], {x: ONE}) == [1, 2]
        assert session.statistics().plans >= 2

    async with af.Session() as session:
        for _ in range(5):
            await use(session)
        assert alive(PlanNode) == 0
        assert [graph() for graph in graphs] == [None] * 5
        assert session.statistics().plans == 0


async def test_a_function_that_is_gone_is_freed(alive: Callable[[type], int]) -> None:
    """Behaviour 96: F68."""

    async def use(session: af.Session) -> None:
        @af.function
        def negated(x: Any) -> Any:
            return -x

        assert await negated(ONE) == -1
        assert session.statistics().plans >= 1

    async with af.Session() as session:
        for _ in range(5):
            await use(session)
        assert alive(PlanNode) == 0
        assert session.statistics().plans == 0


async def test_a_closed_session_leaves_nothing_with_its_graphs(alive: Callable[[type], int]) -> None:
    """Behaviour 96."""
    x, y = doubled()
    async with af.Session() as session, af.Session() as other:
        assert await session.run(y, {x: ONE}) == await other.run(y, {x: ONE})
        await other.aclose()
        assert await session.run(y, {x: ONE}) == 2
    assert alive(PlanNode) == 0
    assert x.graph.compiled == {}


async def test_a_prepared_call_keeps_its_plan() -> None:
    x, y = doubled()
    async with af.Session(plans=1) as session:
        prepared = session.prepare(y, [x])
        await prepared(ONE)
        plan = prepared._call.plan
        for _ in range(3):
            other, z = doubled()
            await session.run(z, {other: ONE})
        assert await prepared(ONE) == 2
        assert prepared._call.plan is plan


async def test_compiling_costs_the_same_however_many_plans_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """F68: the nodes of earlier plans are not visited, or on several devices only the nodes of a few."""
    looked: list[Partition] = []
    nodes: Any = Partition.nodes

    def counted(partition: Partition) -> list[PlanNode]:
        looked.append(partition)
        found: list[PlanNode] = nodes.fget(partition)
        return found

    monkeypatch.setattr(Partition, "nodes", property(counted))
    for devices, most in ((["cpu:0"], 0), (["cpu:0", "cpu:1"], 8)):
        with af.Graph() as graph:
            x = af.placeholder("float32", ())
            fetches = [x * k for k in range(20)]
        async with af.Session(graph, devices) as session:
            for y in fetches:
                looked.clear()
                session.plan(y, [x])
            assert len(looked) <= most


async def test_measured_costs_are_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of another graph may have the same name; what a graph has measured outlasts its growth."""
    asked: list[Any] = []

    def noted(request: PlanRequest, context: Context) -> Plan:
        asked.append(context.costs)
        return compile_plan(request, context)

    monkeypatch.setattr(session_module, "compile_plan", noted)

    def program() -> tuple[af.Graph, af.Tensor, af.Tensor]:
        with af.Graph() as graph:
            x = af.placeholder("float32", (None,))
            return graph, x, af.nonzero(x)[0]

    async with af.Session(devices=["cpu:0", "cpu:1"]) as session:
        graph, x, y = program()
        await session.run(y, {x: np.ones(3, np.float32)})
        _, other, z = program()
        assert y.node.name == z.node.name
        session.plan(z, [other])
        assert asked[-1] == {}
        session.plan([y, x], [x])
        assert set(asked[-1]) == {y.node.name}
        with graph:
            longer = y + 1
        session.plan(longer, [x])
        assert set(asked[-1]) == {y.node.name}


@pytest.fixture
def few_traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(function_module, "_MOST_TRACES", 4)
    with warnings.catch_warnings(action="ignore"):
        yield


async def test_the_graphs_of_a_function_are_bounded(few_traces: None) -> None:
    """Behaviour 96: F68: the ones used last stay, and are not traced again."""
    traced: list[str] = []

    @af.function
    def greet(x: Any, name: str) -> Any:
        traced.append(name)
        return x + len(name)

    async with af.Session() as session:
        for k in range(12):
            assert await greet(1.0, "a" * k) == 1 + k
            assert await greet(1.0, "") == 1
        assert len(traced) == 12
        assert len(greet._traces) == 4
        gc.collect()
        assert session.statistics().plans == 4
        await greet(1.0, "a")
        assert traced.count("a") == 2


@pytest.mark.parametrize("call", [lambda call: call, asyncio.gather])  # a task's call stack has no line of the user's
async def test_retracing_again_and_again_warns_once_and_names_the_argument(call: Any) -> None:
    """Behaviour 96: F68."""

    @af.function
    def greet(x: Any, name: str, loud: bool) -> Any:
        return x + len(name)

    async with af.Session():
        with warnings.catch_warnings(record=True, action="always") as caught:
            for k in range(40):
                await call(greet(1.0, f"user {k}", k % 2 == 0))
        [warned] = caught
        assert "greet has been traced 32 times" in str(warned.message)
        assert "argument name was of 32 kinds, lately 'user 29', 'user 30', 'user 31'" in str(warned.message)
        assert warned.filename == __file__


async def test_retracing_for_lists_of_other_lengths_names_them() -> None:
    """Behaviour 96."""

    @af.function
    def last(xs: Any) -> Any:
        return xs[-1]

    async with af.Session():
        for k in range(1, 32):
            await last([1.0] * k)
        with pytest.warns(RuntimeWarning, match=r"argument xs was of 32 kinds, lately .*\[\*, \*"):
            await last([1.0] * 32)
