"""The plans of a session: known costs, and the places where plans are compiled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.request import PlanRequest
from asyncflow.devices.machine.cost import MeasuredCost
from asyncflow.runtime.calls import plans
from asyncflow.runtime.calls.plans import PlanCache
from asyncflow.runtime.run.ask import Ask
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.testing import virtual_clock
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

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
            self.cache.get_nowait(PlanRequest(graph.home, (), ()), lambda _: empty())
        return []


def empty() -> Plan:
    return cast("Plan", type("Empty", (), {"partitions": [], "used": 0})())


def test_costs_are_asked_for_while_runs_add_plans() -> None:
    """A thread that compiles does so."""
    cache = PlanCache(256)
    with af.Graph() as graph:
        x = af.constant(0)
    cache.get_nowait(PlanRequest(graph.home, (x,), ()), lambda _: cast("Plan", Growing(cache, graph)))
    assert cache.of(graph).learn_costs() == {}
    assert len(cache) == 3


def chain(n_nodes: int, n_constants: int = 1) -> PlanRequest:
    """Return a request for a graph's plan: a chain that starts at `n_constants` float64 constants."""
    with af.Graph() as graph:
        x = af.constant(np.zeros(n_constants))
        for _ in range(n_nodes):
            x = af.identity(x)
    return PlanRequest(graph.home, (x,), ())


async def compiled_on(cache: PlanCache, n_nodes: int = 1000, n_constants: int = 1) -> int:
    """The thread on which the plan of a `chain` is compiled."""
    threads = []

    def compile(_: PlanRequest) -> Plan:
        threads.append(threading.get_ident())
        return empty()

    await cache.get(chain(n_nodes, n_constants), compile)
    return threads[0]


async def test_a_large_graph_compiles_beside_the_event_loop() -> None:
    """So that other coroutines go on."""
    assert await compiled_on(PlanCache(256)) != threading.get_ident()


@pytest.mark.parametrize(("n_constants", "is_beside"), [(1 << 10, False), (1 << 18, True)])
async def test_so_does_a_small_one_with_large_constants(n_constants: int, is_beside: bool) -> None:
    """Constants are folded, and copied to devices."""
    assert (await compiled_on(PlanCache(256), 3, n_constants) != threading.get_ident()) is is_beside


def test_on_virtual_time_it_does_not() -> None:
    """Simulated devices know one thread, and the order of events is the same every time."""
    with virtual_clock() as clock:
        assert clock.run(compiled_on(PlanCache(256))) == threading.get_ident()


async def test_what_compiles_is_left_to_its_thread_when_the_session_closes() -> None:
    """A run that wanted it and was cancelled leaves no task behind; a run that still waits gets an error."""
    cache, goes_on, ended = PlanCache(256), threading.Event(), threading.Event()

    def compile(_: PlanRequest) -> Plan:
        assert goes_on.wait(PATIENCE_S)
        ended.set()
        return empty()

    others = asyncio.all_tasks()
    cancelled, waiting = (asyncio.ensure_future(cache.get(chain(1000), compile)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await cache.aclose()
    with pytest.raises(af.SessionClosedError, match="closed while a graph was compiled"):
        await waiting
    assert asyncio.all_tasks() == others
    goes_on.set()
    assert ended.wait(PATIENCE_S)


async def test_plans_are_explained() -> None:
    """The explanation has the number of sent values, and the device and reason of each node; it is short for a quick
    look.
    """
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
            async with Ask(asked_s=0.0, timeout=5).in_time("the graph was not compiled"):
                await cache.get(PlanRequest(graph.home, (y,), ()), lambda _: empty())
        assert asyncio.get_running_loop().time() == pytest.approx(5)

    cache = PlanCache(4)
    monkeypatch.setattr(plans, "_compile_beside", compile_beside)
    monkeypatch.setattr(plans, "_compiles_soon", lambda _: False)
    monkeypatch.setattr(plans, "is_virtual", lambda _: False)
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


def trained(steps: Any = 40) -> tuple[af.Tensor, af.Tensor, af.Tensor]:
    """The input of a loop over products, its result, and the gradient, for which it saves 256 KiB an iteration."""
    x = af.placeholder("float32", (256, 256))
    y = af.while_loop(lambda i, _: i < steps, lambda i, y: (i + 1, af.tanh(y @ x)), (0, x * 1.0))[1]
    return x, y, af.gradients(af.sum(y), x)


def measured(ns: int) -> MeasuredCost:
    """As a run leaves it."""
    cost = MeasuredCost()
    cost.observe(1, ns)
    return cost


@pytest.mark.parametrize(("product_ns", "choice"), [(10_000, "recompute"), (100_000_000, "swap")])
async def test_later_plans_know_what_earlier_runs_have_measured(product_ns: int, choice: str, tmp_path: Path) -> None:
    """Values go to a file if products take long; a plan from estimates alone would compute them again."""
    with af.Graph() as graph:
        x, y, gradient = trained()
    async with af.Session(graph, regions=False, memory_limit=8 << 20, spill_directory=str(tmp_path)) as session:
        (partition,) = session.plan(y, [x]).partitions
        (product,) = [node for node in partition.nodes if node.name.endswith("matmul")]
        product.times.cost = measured(product_ns)
        (planned,) = session.plan(gradient, [x]).memory
        assert planned.figures.forward.device_ns >= product_ns
        is_moving, runs_again = planned.way.moved > 0, planned.way.kept < planned.figures.iterations
        assert (is_moving, runs_again) == (choice == "swap", choice == "recompute")


async def test_the_time_of_a_region_is_shared_out_over_all_iterations_of_its_loops() -> None:
    """The time of a node is known for one firing; it is unknown if only a run knows the number of firings."""
    with af.Graph() as graph:
        x, y, _ = trained()
        n = af.placeholder("int32", ())
        of_unknown_length = trained(n)
    async with af.Session(graph, memory_limit=1 << 30) as session:
        (partition,) = session.plan(y, [x]).partitions
        (region,) = [node for node in partition.nodes if node.region is not None]
        region.times.cost = measured(80_000_000)
        costs = dict(session._plans.of(graph).learn_costs())
        in_loop = sum(ns for name, ns in costs.items() if name.startswith("while/body/"))
        assert 1.9e6 < in_loop < 2e6
        (partition,) = session.plan(of_unknown_length[1], [of_unknown_length[0], n]).partitions
        (region,) = [node for node in partition.nodes if node.region is not None]
        region.times.cost = measured(80_000_000)
        assert session._plans.of(graph).learn_costs() == costs


async def test_a_run_that_leaves_a_graph_to_be_compiled_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def compiles_for_ever(self: PlanCache, request: PlanRequest, compile: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(PlanCache, "get", compiles_for_ever)
    with af.Graph() as graph:
        y = af.constant(1.0) + 1
    async with af.Session(graph) as session:
        with pytest.raises(af.DeadlineExceeded, match=r"not compiled within timeout=0.01 s; that goes on, for later"):
            await session.run(y, timeout=0.01)
