"""Pass: chooses a compute stream for every node on a device that has several of them.

It runs after placement, on the structured graph. Nodes on one stream run one after the other, and a value that goes to
another stream is handed over, which costs time. So:

- A straight line, a branch, or one iteration of a loop whose iterations do not overlap: list scheduling by earliest
  finish time, longest path to the end first (HEFT). Light nodes follow what they use.
- A loop whose iterations overlap runs as fast as its busiest stream. Its dependency graph, values that go from one
  iteration to the next included, is condensed into strongly connected components, which overlap with nothing of
  themselves. They are cut, in topological order, into as many consecutive groups as there are streams, so that the
  heaviest group is as light as can be: a pipeline. Where list scheduling one iteration promises more, as it does for
  independent chains that cannot be cut evenly, or where one component has nearly all the work, that is done instead.
- A loop or branch inside either is one node that costs what its body does, for an assumed number of iterations, and
  stays whole on one stream, where it compiles to one function; unless there is little else to be done at the same time,
  in which case its own body is divided in the same way.

A division that gains next to nothing is not made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncflow.compiler.placement.node_costs import ASSUMED_ITERATIONS, assumed_ns
from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.frames import has_primitives
from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.structured import CondNode, WhileNode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node

_LIGHT_NS = 20_000.0
"""Lighter kernels hold the interpreter's lock most of their time: two streams of them do not overlap."""

_WORTHWHILE = 0.9
"""A division must bring the time down to this part of what one stream takes."""

_FAIR_SHARE = 1.5
"""A node of a loop's body that costs so many times what one stream should have, is divided itself."""


def assign_streams(
    graph: Graph,
    counts: Mapping[str, int],
    handovers: Mapping[str, float],
    costs: Mapping[str, float] | None = None,
) -> dict[Node, int]:
    """The compute stream of each node.

    Args:
        graph: structured, with the full name of a device in the ``device`` of every node, bodies included.
        counts: the number of compute streams of each device; one, where a device is not named.
        handovers: the time from one stream of a device to another in ns; see `Device.handover_ns`.
        costs: measured time of one firing in ns, by the node's name; other nodes are estimated.

    Returns:
        Streams from 1 up; nodes that are not in it have stream 0, parameters and plain constants always.
    """
    several = {device: count for device, count in counts.items() if count > 1}
    if not several:
        return {}
    assignment = _Assignment(several, handovers, costs or {})
    assignment.divide_line(graph)
    return assignment.streams


@dataclass(frozen=True, slots=True)
class _StreamLevel:
    """Nodes that are divided together: those of a graph, or of a loop's predicate and body.

    Attributes:
        nodes: in an order in which they can run, without those whose values are everywhere.
        sources: what each waits for.
        carried: for loop variables, what they wait for in the iteration before.
        results: the nodes that give the results.
        gate: the node of a loop's predicate.
    """

    nodes: list[Node]
    sources: dict[Node, list[Node]]
    carried: dict[Node, list[Node]] = field(default_factory=dict)
    results: list[Node] = field(default_factory=list)
    gate: Node | None = None

    def users(self) -> dict[Node, list[Node]]:
        """The nodes that wait for each node, in one iteration."""
        users: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in self.sources[node]:
                users[source].append(node)
        return users


def _line_of(graph: Graph) -> _StreamLevel:
    nodes = [node for node in graph.nodes if not _is_everywhere(node)]
    present = set(nodes)
    sources = {node: [source for source in dict.fromkeys(node.sources) if source in present] for node in nodes}
    return _StreamLevel(nodes, sources)


def _iteration_of(loop: WhileNode) -> _StreamLevel:
    """One iteration; what begins it waits for the predicate."""
    first, then = map(_line_of, loop.subgraphs)
    gate = loop.decision.node
    gates = [gate] if gate in first.sources else []
    sources = first.sources | {node: then.sources[node] or gates for node in then.nodes}
    carried: dict[Node, list[Node]] = {}
    for (variable, result), seen in zip(loop.carried, loop.predicate.inputs, strict=False):
        if result.node in then.sources:
            carried[seen.node] = carried[variable.node] = [result.node]
    results = list(dict.fromkeys(node for nodes in carried.values() for node in nodes))
    return _StreamLevel([*first.nodes, *then.nodes], sources, carried, results, gates[0] if gates else None)


def _is_everywhere(node: Node) -> bool:
    return node.op is FEED or (node.op is CONSTANT and not node.control_inputs)


def _inside(node: Node) -> Iterator[Node]:
    """Every node of its bodies that does something, those of bodies in them included."""
    for body in node.subgraphs:
        for inner in body.walk():
            if inner.op is not PARAMETER and not _is_everywhere(inner):
                yield inner


@dataclass(slots=True)
class _Assignment:
    counts: Mapping[str, int]
    handovers: Mapping[str, float]
    measured: Mapping[str, float]
    streams: dict[Node, int] = field(default_factory=dict)
    costs: dict[Node, float] = field(default_factory=dict)
    homes: dict[Node, str | None] = field(default_factory=dict)

    # -- dividing ------------------------------------------------------------------------------------------------

    def divide_line(self, graph: Graph) -> None:
        """Divides the nodes of a graph that run once, or of a branch."""
        if not has_primitives(graph.nodes):
            level = _line_of(graph)
            if self.concerns(level.nodes):
                self.divide_once(level)

    def divide_bodies(self, node: Node) -> None:
        """Divides what is inside a branch or loop."""
        if isinstance(node, CondNode):
            for branch in node.subgraphs:
                self.divide_line(branch)
        elif isinstance(node, WhileNode) and not any(has_primitives(body.nodes) for body in node.subgraphs):
            level = _iteration_of(node)
            if not self.concerns(level.nodes):
                return
            if node.parallel_iterations > 1:
                self.divide_overlapping(level)
            else:
                self.divide_once(level)

    def concerns(self, nodes: Iterable[Node]) -> bool:
        return any(
            node.device in self.counts or any(inner.device in self.counts for inner in _inside(node)) for node in nodes
        )

    def divide_once(self, level: _StreamLevel) -> None:
        """Divides nodes that run once, or in iterations that do not overlap."""
        divided = self.divide_main_work(level, self.is_alone)
        lanes, makespan = _ListSchedule(self, level, self.counts, divided).run()
        _, alone = _ListSchedule(self, level, {}, divided).run()
        if makespan < _WORTHWHILE * alone:
            self.put(lanes, divided)

    def divide_overlapping(self, level: _StreamLevel) -> None:
        """Divides the nodes of iterations that overlap."""
        divided = self.divide_main_work(level, self.is_too_large)
        components = _strongly_connected(level)
        streams: dict[Node, int] = {}
        busiest = 0.0
        for device in dict.fromkeys(self.home(node) for node in level.nodes):
            if device is None:
                continue
            loads = [self.load(component, device, divided) for component in components]
            total = sum(loads)
            pipeline = _Pipeline(level, components, loads, self.counts.get(device, 1))
            groups, heaviest = pipeline.divide()
            if heaviest + self.handover_ns(device) < _WORTHWHILE * total:
                streams |= {
                    node: group
                    for component, group in zip(components, groups, strict=True)
                    for node in component
                    if self.home(node) == device
                }
                total = heaviest
            busiest = max(busiest, total)
        lanes, makespan = _ListSchedule(self, level, self.counts, divided).run()
        if makespan < _WORTHWHILE * busiest:
            streams = lanes
        self.put(streams, divided)

    def put(self, lanes: Mapping[Node, int], divided: Collection[Node]) -> None:
        """Takes over streams for one level, and for all that is inside its branches and loops."""
        for node, stream in lanes.items():
            if stream and node not in divided and self.home(node) in self.counts and node.op is not PARAMETER:
                self.streams[node] = stream
                self.streams.update(dict.fromkeys(_inside(node), stream))

    # -- branches and loops --------------------------------------------------------------------------------------

    def divide_main_work(self, level: _StreamLevel, wanted: Callable[[Node, _StreamLevel, float], bool]) -> set[Node]:
        """Divides the bodies of nodes that must or should be, and gives those where that led to something."""
        divided: set[Node] = set()
        totals: dict[str | None, float] = {}
        for node in level.nodes:
            totals[self.home(node)] = totals.get(self.home(node), 0.0) + self.cost(node)
        for node in level.nodes:
            if node.subgraphs and (self.home(node) is None or wanted(node, level, totals[self.home(node)])):
                before = len(self.streams)
                self.divide_bodies(node)
                if self.home(node) is None or len(self.streams) > before:
                    divided.add(node)
        return divided

    def is_alone(self, node: Node, level: _StreamLevel, total: float) -> bool:
        """Whether the node is large, and too little can run at the same time to keep the other streams busy."""
        count = self.share(node)
        if count == 1 or self.cost(node) * 2 * count < total:
            return False
        related = _reached(node, level.sources) | _reached(node, level.users())
        others = [other for other in level.nodes if other not in related and self.home(other) == self.home(node)]
        return sum(map(self.cost, others)) < self.cost(node) * (count - 1) / 2

    def is_too_large(self, node: Node, level: _StreamLevel, total: float) -> bool:
        """Whether the stream that had to run the whole node would hold back the others."""
        return self.share(node) > 1 and self.cost(node) > _FAIR_SHARE * total / self.share(node)

    # -- what is known of a node ---------------------------------------------------------------------------------

    def home(self, node: Node) -> str | None:
        """The device of the node; of a branch or loop, that of all in it, or None if they have several."""
        if node not in self.homes:
            inside = {inner.device for inner in _inside(node) if not inner.subgraphs} or {node.device}
            self.homes[node] = inside.pop() if len(inside) == 1 else None
        return self.homes[node]

    def share(self, node: Node) -> int:
        """Over how many streams a divided node is spread."""
        home = self.home(node)
        return 1 if home is None else self.counts.get(home, 1)

    def load(self, component: Iterable[Node], device: str, divided: Collection[Node]) -> float:
        return sum(self.cost(node) for node in component if node not in divided and self.home(node) == device)

    def cost(self, node: Node) -> float:
        """The time of the node in ns, as a whole, without the light kernels in it, which overlap with nothing."""
        if node not in self.costs:
            expected = self.expected_ns(node)
            self.costs[node] = expected if expected >= _LIGHT_NS else 0.0
        return self.costs[node]

    def expected_ns(self, node: Node) -> float:
        if node.name in self.measured:
            return self.measured[node.name]
        if node.subgraphs:
            bodies = [sum(map(self.cost, body.nodes)) for body in node.subgraphs]
            return max(bodies) if isinstance(node, CondNode) else ASSUMED_ITERATIONS * sum(bodies)
        if node.op.kernel is None or node.op in (CONSTANT, IDENTITY, NO_OP):
            return 0.0
        return assumed_ns(node)

    def handover_ns(self, device: str | None) -> float:
        return self.handovers.get(device or "", 0.0)


def _reached(start: Node, edges: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """`start` and all that `edges` lead to from it."""
    found, stack = {start}, [start]
    while stack:
        for node in edges[stack.pop()]:
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


# -- one iteration -----------------------------------------------------------------------------------------------


class _ListSchedule:
    """Puts each node where it ends first, those with the longest way to the end first (HEFT)."""

    def __init__(
        self, costs: _Assignment, level: _StreamLevel, counts: Mapping[str, int], divided: Collection[Node]
    ) -> None:
        self.costs = costs
        self.level = level
        self.counts = counts
        self.divided = divided
        self.users = level.users()
        self.streams: dict[Node, int] = {}
        self.ends: dict[Node, float] = {}
        self.free: dict[tuple[str | None, int], float] = {}

    def run(self) -> tuple[dict[Node, int], float]:
        """The stream of each node, and when the last one ends."""
        rank: dict[Node, float] = {}
        for node in reversed(self.level.nodes):
            rank[node] = self.costs.cost(node) + max((rank[user] for user in self.users[node]), default=0.0)
        for node in sorted(self.level.nodes, key=lambda node: -rank[node]):  # stable: sources stay before users
            self.place(node)
        for node in reversed(self.level.nodes):
            if node not in self.streams:  # light and first of its kind: it goes with what uses it
                self.streams[node] = next(
                    (self.streams[user] for user in self.users[node] if self.home(user) == self.home(node)), 0
                )
        return self.streams, max(self.ends.values(), default=0.0)

    def home(self, node: Node) -> str | None:
        return self.costs.home(node)

    def place(self, node: Node) -> None:
        home, cost = self.home(node), self.costs.cost(node)
        near = [s for s in self.level.sources[node] if s in self.streams and self.home(s) == home]
        last = max(near, key=self.ends.__getitem__, default=None)
        if not cost:
            if node is self.level.gate:
                self.streams[node] = 0
            elif last is not None and node.op is not PARAMETER:  # which is there for every stream
                self.streams[node] = self.streams[last]
            self.ends[node] = self.ready(node, self.streams.get(node))
            return
        count = self.counts.get(home, 1) if home is not None else 1
        if node in self.divided:
            lanes = [(home, stream) for stream in range(count)]
            start = max(self.ready(node, 0), *(self.free.get(lane, 0.0) for lane in lanes))
            self.streams[node] = 0
            self.ends[node] = start + cost / self.costs.share(node)
            self.free.update(dict.fromkeys(lanes, self.ends[node]))
            return
        preferred = None if last is None else self.streams[last]
        end, _, stream = min(
            (max(self.ready(node, stream), self.free.get((home, stream), 0.0)) + cost, stream != preferred, stream)
            for stream in range(count)
        )
        self.streams[node] = stream
        self.ends[node] = self.free[home, stream] = end

    def ready(self, node: Node, stream: int | None) -> float:
        """When all that `node` waits for is there; on any stream, for None."""
        home, ready = self.home(node), 0.0
        for source in self.level.sources[node]:
            near = self.home(source) == home and self.streams.get(source, stream) == stream
            ready = max(ready, self.ends[source] + (0.0 if near or stream is None else self.costs.handover_ns(home)))
        return ready


# -- iterations that overlap -------------------------------------------------------------------------------------


def _strongly_connected(level: _StreamLevel) -> list[list[Node]]:
    """The strongly connected components of the level, iterations joined, in topological order (Tarjan).

    It starts from the results and walks towards what they need, so what one result needs stands together.
    """
    sources = {node: [*level.sources[node], *level.carried.get(node, ())] for node in level.nodes}
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    open_nodes: list[Node] = []
    is_open: set[Node] = set()
    components: list[list[Node]] = []
    for root in (*level.results, *level.nodes):
        if root in number:
            continue
        path = [(root, iter(sources[root]))]
        number[root] = low[root] = len(number)
        open_nodes.append(root)
        is_open.add(root)
        while path:
            node, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    component: list[Node] = []
                    while not component or component[-1] is not node:
                        component.append(open_nodes.pop())
                    is_open.difference_update(component)
                    components.append(component)
            elif following not in number:
                number[following] = low[following] = len(number)
                open_nodes.append(following)
                is_open.add(following)
                path.append((following, iter(sources[following])))
            elif following in is_open:
                low[node] = min(low[node], number[following])
    return components


def cut_evenly(loads: Sequence[float], parts: int) -> list[int]:
    """The part that each load belongs to, if they are cut in at most `parts` runs and the largest is least."""

    def runs(limit: float) -> list[int]:
        filled, part, found = 0.0, 0, []
        for load in loads:
            if filled and filled + load > limit:
                filled, part = 0.0, part + 1
            filled += load
            found.append(part)
        return found

    low, high = max(loads, default=0.0), sum(loads)
    for _ in range(60):  # down to the last bit
        middle = (low + high) / 2
        if max(runs(middle), default=0) < parts:
            high = middle
        else:
            low = middle
    return runs(high)


class _Pipeline:
    """Divides the components of a loop's iterations over the streams of one device."""

    def __init__(
        self, level: _StreamLevel, components: Sequence[Sequence[Node]], loads: Sequence[float], count: int
    ) -> None:
        self.loads = loads
        self.count = count
        self.heavy = [index for index, load in enumerate(loads) if load]
        owner = {node: index for index, component in enumerate(components) for node in component}
        self.gate = None if level.gate is None else owner[level.gate]
        self.sources: list[list[int]] = []
        for index, component in enumerate(components):
            found = (
                owner[source]
                for node in component
                # That a parameter waits for the predicate ties it to no stream.
                for source in (level.carried.get(node, ()) if node.op is PARAMETER else level.sources[node])
            )
            self.sources.append([source for source in dict.fromkeys(found) if source != index])

    def divide(self) -> tuple[list[int], float]:
        """The stream of each component, and the load of the busiest stream."""
        cut = cut_evenly([self.loads[index] for index in self.heavy], self.count)
        totals = [0.0] * self.count
        for index, group in zip(self.heavy, cut, strict=True):
            totals[group] += self.loads[index]
        return self.with_light(dict(zip(self.heavy, cut, strict=True))), max(totals)

    def with_light(self, heavy: Mapping[int, int]) -> list[int]:
        """Light components go with the last they use, or else with the first that uses them."""
        groups = dict(heavy)
        if self.gate is not None:
            groups.setdefault(self.gate, 0)  # the predicate must run ahead, which it does on the first stream
        users: dict[int, list[int]] = {}
        for index, sources in enumerate(self.sources):
            known = [groups[source] for source in sources if source in groups]
            if index not in groups and known:
                groups[index] = max(known)
            for source in sources:
                users.setdefault(source, []).append(index)
        for index in reversed(range(len(self.loads))):
            if index not in groups:
                groups[index] = min((groups[user] for user in users.get(index, ()) if user in groups), default=0)
        return [groups[index] for index in range(len(self.loads))]
