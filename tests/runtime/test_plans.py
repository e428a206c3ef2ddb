"""The plans of a session: what is known of their costs, and where they are compiled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.request import PlanRequest
from asyncflow.runtime.session import plans
from asyncflow.runtime.session.plans import PlanCache
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.testing import virtual_clock

if TYPE_CHECKING:
    from asyncflow.compiler.plan import Plan


class Growing:
    """A plan that is being looked at while runs add others: of its graph, and of another."""

    used = 0

    def __init__(self, cache: PlanCache, graph: af.Graph) -> None:
        self.cache = cache
        self.graph = graph
        self.others: list[af.Graph] = []

    @property
    def partitions(self) -> list[Any]:
        self.others.append(af.Graph())
        for graph in (self.graph, *self.others):
            self.cache.get_nowait(PlanRequest(graph, (), ()), lambda _: empty())
        return []


def empty() -> Plan:
    return cast("Plan", type("Empty", (), {"partitions": [], "used": 0})())


def test_costs_are_asked_for_while_runs_add_plans() -> None:
    """A thread that compiles does so."""
    cache = PlanCache(256)
    with af.Graph() as graph:
        x = af.constant(0)
    cache.get_nowait(PlanRequest(graph, (x,), ()), lambda _: cast("Plan", Growing(cache, graph)))
    assert cache.of(graph).learn_costs() == {}
    assert len(cache) == 3


async def compiled_on(cache: PlanCache, n_nodes: int = 1000, n_constants: int = 1) -> int:
    """The thread on which the plan of a graph is compiled: a chain that starts at so many float64 constants."""
    threads = []

    def compile(_: PlanRequest) -> Plan:
        threads.append(threading.get_ident())
        return empty()

    with af.Graph() as graph:
        x = af.constant(np.zeros(n_constants))
        for _ in range(n_nodes):
            x = af.identity(x)
    await cache.get(PlanRequest(graph, (x,), ()), compile, None)
    return threads[0]


async def test_a_large_graph_compiles_beside_the_event_loop() -> None:
    """So that other coroutines go on."""
    assert await compiled_on(PlanCache(256)) != threading.get_ident()


@pytest.mark.parametrize(("n_constants", "is_beside"), [(1 << 10, False), (1 << 18, True)])
async def test_so_does_a_small_one_with_large_constants(n_constants: int, is_beside: bool) -> None:
    """They are folded, and copied to devices."""
    assert (await compiled_on(PlanCache(256), 3, n_constants) != threading.get_ident()) is is_beside


def test_on_virtual_time_it_does_not() -> None:
    """Simulated devices know one thread, and the order of what happens is the same every time."""
    with virtual_clock() as clock:
        assert clock.run(compiled_on(PlanCache(256))) == threading.get_ident()


async def test_plans_are_explained() -> None:
    """How many values are sent, and why each node of a region is where it is; in short if it is only looked at."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (64, 64), name="x")
        with af.device("cpu:0"):
            a = af.matmul(x, x)
        with af.device("cpu"), af.colocate_with(a):
            b = af.tanh(a)
        with af.device("cpu:1"):
            c = af.tanh(b)
    async with af.Session(graph, devices=["cpu:0", "cpu:1"]) as session:
        plan = session.plan(c, [x])
    lines = plan.explain().splitlines()
    assert lines[0] == "cpu:0 sends 1 value to cpu:1"
    here = "tests/runtime/test_plans.py:"
    assert any(line.startswith("      # matmul: asked for 'cpu:0' at ") and here in line for line in lines)
    assert "      # tanh: colocated with matmul" in lines
    assert any(line.startswith("    tanh_1 = tanh(") and "  # asked for 'cpu:1' at " in line for line in lines)
    assert repr(plan) == "<Plan: 3 nodes on cpu:0, 3 nodes on cpu:1; explain() tells more>"


def test_a_timeout_counts_from_the_first_time_that_a_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flip of variables has it compiled anew."""

    async def compile_beside(*_: object) -> Plan:
        await asyncio.sleep(2)
        cache.flip({})
        return empty()

    async def main() -> None:
        with af.Graph() as graph:
            y = af.constant(1.0) + 1
        with pytest.raises(af.DeadlineExceeded, match="not compiled within timeout=5"):
            await cache.get(PlanRequest(graph, (y,), ()), lambda _: empty(), 5)
        assert asyncio.get_running_loop().time() == pytest.approx(5)

    cache = PlanCache(4)
    monkeypatch.setattr(plans, "_compile_beside", compile_beside)
    monkeypatch.setattr(plans, "_compiles_soon", lambda _: False)
    monkeypatch.setattr(plans, "is_virtual", lambda _: False)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())
