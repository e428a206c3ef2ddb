"""Pass: chooses a device for every node (white paper 2015 §3.2.1, §4.3).

Requests, colocation and kernels limit the devices of a node (`constraints`, `choices`). Among the rest a simulated
execution finds the best, from measured or estimated times, transfers and memory limits (`list_schedule`).

A branch or loop is placed from the inside out. It stays whole, to become one function, if all its requests agree and it
is light, or cutting it gains too little. Otherwise its nodes are placed one by one, and its integer scalars (counters,
and the predicates made of them) are kept on one device: the one the loop asks for, or all requests inside it, or the
session's first.

Nodes without work follow others: a constant or fed value goes to its first user, a loop variable to the maker of its
next value. A capture goes to its value, a `cond` or `while` to its predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from asyncflow.compiler.placement.choices import Choices
from asyncflow.compiler.placement.followers import place_followers
from asyncflow.compiler.placement.level import PlacementLevel, Split, Whole
from asyncflow.compiler.placement.list_schedule import GAIN, Solution
from asyncflow.compiler.placement.node_costs import ASSUMED_ITERATIONS, NodeCosts, tensor_nbytes
from asyncflow.compiler.placement.simulated_execution import Value
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.compiler.program.kernels.device_kernels import NO_KERNELS, Kernels
from asyncflow.devices.protocol import Device
from asyncflow.errors import counted
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode, WhileNode

_LIGHT_NS = 200_000.0
"""A body whose nodes take less together is not worth cutting."""

_OVERLAPPING, _MOST_UNROLLED = 4, 4_000
"""Number of overlapping iterations that are simulated, and the most nodes that this may make."""

_MANY = 128.0
"""The number of overlapping iterations whose time is counted: filling a pipeline then matters little."""

_NO_COUNTERS: Mapping[Node, int] = MappingProxyType({})

_NOWHERE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of a graph's nodes, with reasons, both by node name; and further notes."""

    devices: dict[str, str]
    reasons: dict[str, str]
    notes: tuple[str, ...] = ()

    def explain(self) -> str:
        """One line a node, device by device, after the notes."""
        lines: list[str] = list(self.notes)
        for device in dict.fromkeys(self.devices.values()):
            names = [name for name, on in self.devices.items() if on == device]
            lines.append(f"{device}: {counted(len(names), 'node')}")
            lines.extend(f"  {name}: {self.reasons[name]}" for name in names)
        return "\n".join(lines)


def place(
    graph: Graph,
    devices: Sequence[Device],
    costs: Mapping[str, float] | None = None,
    kernels: Kernels = NO_KERNELS,
    *,
    seed: int | None = None,
    placed: Mapping[str, str] = _NOWHERE,
    notes: tuple[str, ...] = (),
) -> Placement:
    """Give every node of `graph`, bodies included, the full name of one device in `node.device`.

    Args:
        graph: structured, from `resolve_requests` and the optimisations; changed in place.
        devices: the session's devices, the preferred one first.
        costs: mean ns of a firing by node name, from earlier runs; missing ones are estimated.
        kernels: of users, for kinds of device.
        seed: puts nodes on random devices among the allowed ones, to show that results do not depend on the placement.
            None: where they finish first.
        placed: the devices of nodes by name in a run that is done again; not regarded unless it has them all.
        notes: what else the placement is to say.
    """
    nodes = list(graph.walk())
    if len(devices) == 1:
        names = [node.name for node in nodes]
        for node in nodes:
            node.device = devices[0].name
        return Placement(dict.fromkeys(names, devices[0].name), dict.fromkeys(names, "the only device of the session"))
    numbers = {device.name: number for number, device in enumerate(devices)}
    # A replay needs the recorded partitions: nodes fire in the recorded order, device by device.
    if all(placed.get(node.name) in numbers for node in nodes):
        where = {node: numbers[placed[node.name]] for node in nodes}
        why = dict.fromkeys(nodes, "as in the run that is done again")
    else:
        # With a user's kernel, a function may run on a card instead of the host.
        choices = Choices(graph, devices, kernels)
        if seed is not None:
            where, why = _at_random(nodes, choices, Random(seed))
        else:
            where, why = find_places(graph, choices, NodeCosts(devices, costs or {}))
        place_followers(graph, choices, where, why)
    for node in nodes:
        node.device = devices[where[node]].name
    found = {node.name: devices[where[node]].name for node in nodes}
    return Placement(found, {node.name: why[node] for node in nodes}, notes)


def find_places(graph: Graph, choices: Choices, costs: NodeCosts) -> tuple[dict[Node, int], dict[Node, str]]:
    """The device where every node that does work is best, and the reason."""
    return _Placer(graph, choices, costs).run()


def _at_random(nodes: Sequence[Node], choices: Choices, random: Random) -> tuple[dict[Node, int], dict[Node, str]]:
    """A device for every node that does work, one for each group."""
    where: dict[Node, int] = {}
    groups: dict[str, int] = {}
    for node in nodes:
        if node.op in (PARAMETER, CONSTANT, FEED, FETCH, EMIT) or node.subgraphs:
            continue
        device = random.choice(choices.allowed(node))
        where[node] = device if node.colocated_with is None else groups.setdefault(node.colocated_with, device)
    return where, {node: choices.asked_reason(node) or "at random, as placement_seed= asks" for node in where}


@dataclass(slots=True)
class _ContentSummary:
    """Facts about the nodes in a branch or loop, or in the whole graph.

    Attributes:
        times: ns of all they do on each device.
        launches: ns of launching all of it on each device.
        once: ns of all of them, each once, on its fastest device.
        is_small: none of them has much to do.
        peak: bytes live at a time.
    """

    times: list[float]
    launches: list[float]
    once: float = 0.0
    is_small: bool = True
    peak: float = 0.0

    @property
    def is_light(self) -> bool:
        return self.is_small or self.once < _LIGHT_NS


class _Placer:
    """Places the nodes that do work."""

    def __init__(self, graph: Graph, choices: Choices, costs: NodeCosts) -> None:
        self.graph = graph
        self.choices = choices
        self.costs = costs
        self.is_limited = any(limit is not None for limit in choices.limits)
        self.summaries: dict[StructuredNode, _ContentSummary] = {}

    def run(self) -> tuple[dict[Node, int], dict[Node, str]]:
        """The device and the reason of every node that does work."""
        common = self.choices.common(self.graph.walk())
        # Most small programs end here, without a simulation. With a limit, light work may still not fit.
        if common and not self.is_limited and self.summarize(self.graph).is_light:
            nodes = [node for node in self.graph.walk() if node.op is not PARAMETER]
            asked = self.choices.asked_reason
            light = "all the work there is takes less time than sharing it"
            return dict.fromkeys(nodes, common[0]), {node: asked(node) or light for node in nodes}
        level = self.level(is_root=True)
        level.add_graph(self.graph)
        return self.outcome(level, level.solve())

    def level(self, counters: Mapping[Node, int] = _NO_COUNTERS, *, is_root: bool = False) -> PlacementLevel:
        return PlacementLevel(self.choices, self.costs, self.inside, counters, is_root)

    # -- branches and loops --------------------------------------------------------------------------------------

    def inside(self, node: StructuredNode, home: Callable[[Tensor], int | None]) -> Whole | Split:
        """Decides whether a branch or loop stays whole, or else where each of its nodes goes."""
        inner = [member for body in node.subgraphs for member in body.walk()]
        common = self.choices.common(inner)
        summary = self.summary(node)
        whole: Whole | None = None
        if common:
            own = tuple(device for device in self.choices.allowed(node) if device in common)
            held = self.choices.held(inner)
            whole = Whole(
                allowed=own or common,
                times=summary.times,
                launches=summary.launches,
                workspace=summary.peak,
                held=held,
            )
            if self.fits(whole) and summary.is_light:
                return whole
        if isinstance(node, WhileNode):
            split = self.split_while(node, home, common)
        else:
            split = self.split_cond(node, home)
        if whole is None or not self.fits(whole):
            return split
        together = min(map(whole.on, whole.allowed))
        return whole if split.span > GAIN * together else replace(split, whole=whole)

    def fits(self, whole: Whole) -> bool:
        """Return True if a device has room for it, were the device empty."""
        limits = (self.choices.limits[device] for device in whole.allowed)
        return any(limit is None or whole.workspace + whole.held <= limit for limit in limits)

    def split_while(self, node: WhileNode, home: Callable[[Tensor], int | None], common: Sequence[int]) -> Split:
        condition, body, n_vars = node.predicate, node.body, node.n_vars
        level = self.level(self.choices.counters(node, common))
        values = [
            # Transferred once for all iterations.
            level.give(inner, Value(nbytes=tensor_nbytes(outer), share=1 / ASSUMED_ITERATIONS))
            for outer, *inner in zip(node.inputs, condition.inputs, body.inputs, strict=True)
        ]
        for value, outer in zip(values[n_vars:], node.captures, strict=True):
            level.problem.values[value].home = home(outer)
        # Overlapping iterations are unrolled, as far as they are not too many to simulate.
        n_nodes = len(condition.nodes) + len(body.nodes)
        n_iterations = max(1, min(node.parallel_iterations, _OVERLAPPING, _MOST_UNROLLED // n_nodes))
        variables = values[:n_vars]
        for iteration in range(n_iterations):
            level.part = iteration
            level.add_graph(condition)
            level.gate = level.task(condition.results[0])
            level.add_graph(body)
            results = [level.index[result] for result in body.results]
            # The later half shows the time that each further iteration adds; the earlier half fills the pipeline.
            if iteration < n_iterations // 2:
                level.problem.first_part = len(level.problem.tasks)
            if iteration == 0:
                for variable, result in zip(values, results, strict=False):
                    level.problem.values[variable].share = 1.0
                    if level.problem.values[result].maker is not None:
                        level.problem.values[variable].like = result
                variables = [
                    variable if level.problem.values[result].maker is None else result
                    for variable, result in zip(values, results, strict=False)
                ]
            for inner_cond, inner_body, result in zip(condition.inputs, body.inputs, results, strict=False):
                level.index[inner_cond] = level.index[inner_body] = result
        counted = float(n_iterations)
        if n_iterations > 1:
            level.problem.repeats = (_MANY - n_iterations) / (n_iterations - n_iterations // 2)
            counted = _MANY
        solution = level.solve()
        where, why = self.outcome(level, solution)
        outputs = [level.device_of(variable, solution) for variable in variables]
        needed = [*outputs, *(level.needed_on(value, solution) for value in values[n_vars:])]
        loads = [ASSUMED_ITERATIONS / n_iterations * load for load in level.loads(solution)]
        hosts = [ASSUMED_ITERATIONS / n_iterations * load for load in level.host_loads(solution)]
        span = ASSUMED_ITERATIONS / counted * solution.span
        return Split(where=where, why=why, loads=loads, hosts=hosts, span=span, inputs=needed, outputs=outputs)

    def split_cond(self, node: StructuredNode, home: Callable[[Tensor], int | None]) -> Split:
        where: dict[Node, int] = {}
        why: dict[Node, str] = {}
        span = 0.0
        loads, hosts = [0.0] * len(self.choices.limits), [0.0] * self.costs.hosts(is_root=False).count
        needed: list[int | None] = [None] * len(node.inputs)
        outputs: list[int | None] = []
        # The results are on the devices of the true branch, which is placed last.
        for branch in reversed(node.subgraphs):
            level = self.level()
            values = [
                level.give([inner], Value(nbytes=tensor_nbytes(outer), home=home(outer)))
                for outer, inner in zip(node.entering, branch.inputs, strict=True)
            ]
            level.add_graph(branch)
            solution = level.solve()
            placed, reasons = self.outcome(level, solution)
            where.update(placed)
            why.update(reasons)
            # Only one branch runs, but it is unknown which: count the longer one on each device.
            span = max(span, solution.span)
            loads = [max(pair) for pair in zip(loads, level.loads(solution), strict=True)]
            hosts = [max(pair) for pair in zip(hosts, level.host_loads(solution), strict=True)]
            for position, value in enumerate(values, start=1):
                device = level.needed_on(value, solution)
                needed[position] = needed[position] if device is None else device
            outputs = [level.device_of(level.index[result], solution) for result in branch.results]
        return Split(where=where, why=why, loads=loads, hosts=hosts, span=span, inputs=needed, outputs=outputs)

    # -- estimates -----------------------------------------------------------------------------------------------

    def summary(self, node: StructuredNode) -> _ContentSummary:
        if node not in self.summaries:
            parts = [self.summarize(body) for body in node.subgraphs]
            is_loop = isinstance(node, WhileNode)

            def in_all(pairs: Iterable[Sequence[float]]) -> list[float]:
                return [ASSUMED_ITERATIONS * sum(ns) if is_loop else max(ns) for ns in pairs]

            self.summaries[node] = _ContentSummary(
                times=in_all(zip(*(part.times for part in parts), strict=True)),
                launches=in_all(zip(*(part.launches for part in parts), strict=True)),
                once=sum(part.once for part in parts),
                is_small=all(part.is_small for part in parts),
                peak=max(part.peak for part in parts),
            )
        return self.summaries[node]

    def summarize(self, graph: Graph) -> _ContentSummary:
        """The summary of a graph's nodes, with all that is in them."""
        none = [0.0] * len(self.choices.limits)
        summary = _ContentSummary(none, none)
        for node in graph.nodes:
            if isinstance(node, StructuredNode):
                inner = self.summary(node)
                times: Sequence[float] = inner.times
                launches: Sequence[float] = inner.launches
                summary.once += inner.once
                summary.is_small = summary.is_small and inner.is_small
            else:
                times, launches = self.costs.times(node), self.costs.launches(node)
                fastest = min(times)
                summary.once += fastest
                summary.is_small = summary.is_small and (fastest == 0.0 or self.costs.is_small(node))
            summary.times = [total + time for total, time in zip(summary.times, times, strict=True)]
            summary.launches = [total + time for total, time in zip(summary.launches, launches, strict=True)]
        if self.is_limited:
            summary.peak = self.peak(graph)
        return summary

    def peak(self, graph: Graph) -> float:
        """The most bytes live at a time, the nodes run in their order."""
        # A constant is held throughout, so it has no last reader that frees it.
        last = {tensor: node for node in graph.nodes for tensor in node.inputs if tensor.node.op is not CONSTANT}
        live = peak = 0.0
        for node in graph.nodes:
            live += sum(map(tensor_nbytes, node.outputs))
            extra = self.summary(node).peak if isinstance(node, StructuredNode) else 0.0
            peak = max(peak, live + extra)
            live -= sum(tensor_nbytes(tensor) for tensor in dict.fromkeys(node.inputs) if last.get(tensor) is node)
        return peak

    # -- outcome -------------------------------------------------------------------------------------------------

    def outcome(self, level: PlacementLevel, solution: Solution) -> tuple[dict[Node, int], dict[Node, str]]:
        """Devices and reasons of a level's nodes, and of all in them."""
        where: dict[Node, int] = {}
        why: dict[Node, str] = {}
        for node, group in level.group_of.items():
            device = solution.devices[group]
            inside = level.structured.get(node)
            if isinstance(inside, Split):
                where.update(inside.where)
                why.update(inside.why)
                continue
            where[node] = device
            why[node] = self.reason(node, level, solution)
            if inside is not None:
                members = [inner for body in node.subgraphs for inner in body.walk() if inner.op is not PARAMETER]
                where.update(dict.fromkeys(members, device))
                why.update(
                    (inner, self.choices.asked_reason(inner) or f"in {node.name}, which stays whole")
                    for inner in members
                )
        return where, why

    def reason(self, node: Node, level: PlacementLevel, solution: Solution) -> str:
        """Return the reason for a node's place."""
        if node in level.counters:
            return "kept together with the counters and predicate of its loop"
        names = self.choices.names
        group = level.group_of[node]
        device, finishes = solution.devices[group], solution.finishes[group]
        asked = self.choices.asked_reason(node)
        if asked is not None and (finishes is None or node.colocated_with not in (None, node.name)):
            return asked
        if finishes is None:
            return (
                "the only device that can run it" if len(level.problem.groups[group].allowed) == 1 else "does no work"
            )
        prefix = "" if asked is None else f"{asked}; "
        full = solution.full[group]
        if full and device not in full:
            return f"{prefix}only {_listed(names, finishes)} has room, not {_listed(names, full)}"
        # The search compares whole placements, so a node may be slower on its device than elsewhere.
        if finishes.get(device, float("inf")) > min(finishes.values()):
            together = "it stays with its neighbours, as spreading the work gains too little"
            return prefix + (together if solution.is_gathered else "all work is done sooner that way")
        others = ", ".join(f"{_duration(end)} on {names[d]}" for d, end in finishes.items() if d != device)
        return f"{prefix}finishes first there: {_duration(finishes[device])}" + (f", {others}" if others else "")


def _duration(ns: float) -> str:
    """Nanoseconds for people: ``1.2 ms``."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.3g} ns"


def _listed(names: Sequence[str], positions: Iterable[int]) -> str:
    return ", ".join(names[position] for position in positions)
