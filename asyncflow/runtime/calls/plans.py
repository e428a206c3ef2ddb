"""The plans a session has compiled, and the compiling of new ones: a large graph on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from heapq import nlargest
from operator import attrgetter
from typing import Any, TypeAlias
from weakref import WeakSet, ref

from asyncflow.compiler.placement.node_costs import assumed_ns
from asyncflow.compiler.plan import Plan, PlanNode
from asyncflow.compiler.program.kernels.device_kernels import compiled
from asyncflow.compiler.program.loops.counters import trip_count
from asyncflow.compiler.program.request import PlanRequest
from asyncflow.errors import SessionClosedError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.structured import WhileNode
from asyncflow.streams.beside import background, call_beside
from asyncflow.streams.loop import is_virtual

_COMPILED_INLINE = 50
"""Number of nodes up to which a graph compiles on the event loop, in less than 5 ms."""

_CONSTANTS_INLINE = 1 << 20
"""Bytes of constants up to which a graph compiles there: they are folded, and copied to devices."""


_LEARNED_FROM = 4
"""Number of a graph's plans, used last, that tell its nodes' costs: compiling must not slow down with each further
plan.
"""


Compile: TypeAlias = Callable[[PlanRequest], "Plan"]


class GraphPlans:
    """The plans and costs that one session keeps for one graph. The graph holds it, so that both go together.

    Attributes:
        graph: a weak reference to it.
        version: of the graph, when `plans` was empty.
        plans: by the kinds of run that they were compiled for.
        calls: kinds of runs read so far, by the caller's fetches and feeds; see `CallCache`.
        costs: mean nanoseconds of nodes, by name.
    """

    __slots__ = ("__weakref__", "calls", "costs", "graph", "plans", "version")

    def __init__(self, graph: Graph) -> None:
        self.graph = ref(graph)
        self.version = graph.version
        self.plans: dict[PlanRequest, Plan] = {}
        self.calls: dict[Hashable, Any] = {}
        self.costs: dict[str, float] = {}

    def learn_costs(self) -> dict[str, float]:
        """`costs`, after a look at what the plans in use have measured lately."""
        # Copy the plans: a compiling thread calls this while runs add plans.
        for plan in nlargest(_LEARNED_FROM, list(self.plans.values()), key=attrgetter("used")):
            for partition in plan.partitions:
                for node in partition.nodes:
                    if (cost := node.times.cost) is not None and cost.is_measured:
                        self.costs.update(_shared_out(node, cost.mean_ns))
        return dict(self.costs)


class PlanCache:
    """The plans of a session, up to a maximum: the least recently used goes first.

    They are held by their graphs, and go with them. A graph that has grown loses its plans: they would not see the new
    nodes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._graphs: WeakSet[GraphPlans] = WeakSet()
        self._compiling: dict[tuple[int, int, PlanRequest], asyncio.Future[Plan]] = {}
        self._alive: WeakSet[Plan] = WeakSet()
        self._flips = 0
        compiled.add(self)

    def __len__(self) -> int:
        return sum(len(kept.plans) for kept in list(self._graphs))

    def of(self, graph: Graph) -> GraphPlans:
        """The plans and costs kept for a graph, as it is now."""
        kept: GraphPlans | None = graph.compiled.get(self)
        if kept is None:
            kept = graph.compiled[self] = GraphPlans(graph)
            self._graphs.add(kept)
        elif kept.version != graph.version:
            kept.learn_costs()
            kept.plans = {}
            kept.version = graph.version
        return kept

    async def aclose(self) -> None:
        """Leave compilations to their threads: a run that waits for one gets a `SessionClosedError`."""
        loop = asyncio.get_running_loop()
        compiling = [each for each in self._compiling.values() if each.get_loop() is loop]  # a closed loop runs nothing
        for each in compiling:
            each.cancel()
        await asyncio.gather(*compiling, return_exceptions=True)

    def clear(self) -> None:
        """Forget all plans."""
        for kept in list(self._graphs):
            self._drop(kept)
        self._graphs.clear()

    def _drop(self, kept: GraphPlans) -> None:
        graph = kept.graph()
        if graph is not None:
            graph.compiled.pop(self, None)

    def _keep(self, kept: GraphPlans, request: PlanRequest, plan: Plan) -> None:
        everywhere = [(other, held) for other in list(self._graphs) for held in list(other.plans.items())]
        everywhere.sort(key=lambda entry: entry[1][1].used)
        plan.used = everywhere[-1][1][1].used if everywhere else 0
        for other, (unused, dropped) in everywhere[: max(0, len(everywhere) + 1 - self._most)]:
            other.plans.pop(unused, None)
            other.calls = {key: call for key, call in other.calls.items() if call.plan is not dropped}
            if not other.plans and other is not kept:
                self._drop(other)
                self._graphs.discard(other)
        kept.plans[request] = plan
        self._alive.add(plan)

    def get_nowait(self, request: PlanRequest, compile: Compile) -> Plan:
        """The plan, compiled here and now if need be."""
        kept = self.of(request.graph)
        plan = kept.plans.get(request)
        if plan is None:
            plan = compile(request)
            self._keep(kept, request, plan)
        return plan

    def alive(self, states: Collection[Hashable]) -> list[Plan]:
        """Return all plans that touch some of these states, kept here or by their runs."""
        return [plan for plan in self._alive if not plan.survey.states.isdisjoint(states)]

    def flip(self, renewed: Mapping[Plan, Plan]) -> None:
        """Replace plans, for runs that start from now on.

        Holders of an old plan find the new one in it, except for shared bodies: their plans belong to the runs they are
        computed for.
        """
        self._flips += 1
        for kept in list(self._graphs):
            for request, plan in kept.plans.items():
                if plan.is_shared and plan in renewed:
                    kept.plans[request] = renewed[plan]
        for plan, new in renewed.items():
            if plan.is_shared:
                new.is_shared = True
                self._alive.discard(plan)
                self._alive.add(new)
            else:
                plan.renew(new)

    async def compiled(self, request: PlanRequest, compile: Compile) -> Plan:
        """A plan that is not kept; a large graph is compiled on a thread, as `get` does."""
        return compile(request) if self._compiles_here(request) else await _compile_beside(compile, request)

    def _compiles_here(self, request: PlanRequest) -> bool:
        return _compiles_soon(request.graph) or is_virtual(asyncio.get_running_loop())

    async def get(self, request: PlanRequest, compile: Compile) -> Plan:
        """Return the plan; a graph that is large, or has large constants, compiles on a thread, so that the event loop
        goes on.

        On virtual time it compiles on the loop, as nothing waits meanwhile, and the same has to happen every time.

        Cancellation: compiling goes on, for later runs.
        """
        plan = self.of(request.graph).plans.get(request)
        if plan is not None:
            return plan
        if self._compiles_here(request):
            return self.get_nowait(request, compile)
        return await self._compiled_beside(request, compile)

    async def _compiled_beside(self, request: PlanRequest, compile: Compile) -> Plan:
        """The plan, from a thread; compiled anew if states were replaced meanwhile, as it may have found old ones."""
        while True:
            kept, flips = self.of(request.graph), self._flips
            plan = kept.plans.get(request)
            if plan is not None:
                return plan
            # Requests that arrive meanwhile share the compilation; cancelling one does not cancel it for others.
            key = (flips, request.graph.version, request)
            shared = self._compiling.get(key)
            if shared is None:
                shared = self._compiling[key] = asyncio.ensure_future(_compile_beside(compile, request))
                shared.add_done_callback(partial(self._compiled, kept, key))
            task = asyncio.current_task()
            asked = 0 if task is None else task.cancelling()  # the task may have gone on after an earlier cancellation
            try:
                plan = await asyncio.shield(shared)
            except asyncio.CancelledError:
                if shared.cancelled() and (task is None or task.cancelling() == asked):
                    raise SessionClosedError("the session was closed while a graph was compiled") from None
                raise
            if flips == self._flips:
                self._alive.add(plan)
                return plan

    def _compiled(self, kept: GraphPlans, key: tuple[int, int, PlanRequest], compiled: asyncio.Future[Plan]) -> None:
        del self._compiling[key]
        *versions, request = key
        if not compiled.cancelled() and compiled.exception() is None and versions == [self._flips, kept.version]:
            self._keep(kept, request, compiled.result())


def _compiles_soon(graph: Graph) -> bool:
    if graph.version > _COMPILED_INLINE:
        return False
    constants: int = sum(node.attrs["value"].nbytes for node in graph.walk() if node.op is CONSTANT)
    return constants <= _CONSTANTS_INLINE


def _shared_out(node: PlanNode, measured: float) -> dict[str, float]:
    """The measured time of a node; of a region, shared out to its nodes as they were expected to take.

    Nothing, where only a run knows how many iterations a loop in it has.
    """
    if node.region is None:
        return {node.name: measured}
    region = node.source.attrs["region"]
    expected_ns = _expected_ns(region)
    if not expected_ns:
        return {}
    share = measured / expected_ns
    return {inner.name: share * assumed_ns(inner) for inner in region.walk() if inner.op.kernel is not None}


def _expected_ns(body: Subgraph) -> float | None:
    """The time that all nodes of a body are expected to take; None if only a run knows."""
    total = 0.0
    for node in body.nodes:
        count = trip_count(node) if isinstance(node, WhileNode) else 1
        parts = [_expected_ns(inner) for inner in node.subgraphs]
        if count is None or None in parts:
            return None
        total += count * sum(part for part in parts if part is not None)
        total += assumed_ns(node) if node.op.kernel is not None else 0.0
    return total


async def _compile_beside(compile: Compile, request: PlanRequest) -> Plan:
    with background:  # before the thread starts, so that the first wait for the GIL is short, too
        return await call_beside(partial(compile, request), outlasts_program=False)
