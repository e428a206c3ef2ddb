"""Pass: groups nodes into regions, each of which becomes one generated Python function.

A region is a cluster of nodes that never wait, whole `cond` and `while` nodes included. It must not cost concurrency.
Nodes join one region only if they wait for the same *waiting nodes*, and the same ones wait for them. That includes the
next iteration of a loop. Waiting nodes are coroutine ops, the user's own functions, streamed values, and branches and
loops that contain them. For example, `a` feeds a user's function `f`, whose result `b` uses, and `c` needs neither.
Then `a`, `b` and `c` are in three regions: in one with `a`, `c` would hold up `f`, and in one with `b` it would wait
for `f`.

A region belongs to one *lane*, a compute stream of a device. Values that cross from lane to lane count as waiting nodes
as well, one per value and lane it goes to: it is sent as soon as it exists, and delays only its users.

Devices that launch their kernels one by one have no regions. On a device whose regions enqueue, nothing in a region may
wait for the device either: branches and loops join a region only if they decide by values on the host.

Regions never wait for each other in a circle, whatever the lanes are. The set before a node grows along every edge, and
the set behind it shrinks: all nodes of a cycle of clusters would have equal sets. Then no waiting node or crossing is
on the cycle, it stays in one lane, and all its nodes are in one cluster.

Loops that stay primitives get regions inside their bodies, so their iterations still overlap. One kind of loop that
waits is a region by itself, and a waiting node to all others: see `waits_in_turn`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import add, attrgetter, or_
from random import Random
from types import MappingProxyType

from asyncflow.compiler.placement.assign_streams import ComputeStream, has_no_stream
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.compiler.program.host_values import mixes_vectors
from asyncflow.compiler.program.kernels.kernels import is_small_spec
from asyncflow.compiler.program.kernels.transfers import TO_CARD
from asyncflow.compiler.program.loops.frames import has_primitives, is_everywhere
from asyncflow.compiler.program.ordered import ordered
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.compiler.regions.join_regions import Body, RegionCosts, join_regions
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph, Subgraph, has_side_effect, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op, host_inputs, runs_on_host
from asyncflow.graph.resource import waits_in_line
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.ops.rows.by_row import BY_ROW_OPS

_LARGEST = 400
"""A straight line of more nodes is cut: neither compiling a region nor running it may hold its thread for long."""

_DEEPEST = 12
"""Python allows 20 nested blocks; branches and loops nested deeper stay primitives, down to where this holds."""

_MOST_BARRIERS = 256
"""With more, telling clusters apart would cost more than they gain; such a graph stays as it is."""

_MOST_BITS = 1 << 27
"""The sets of crossings before all nodes take up to 16 MiB; where they would take more, crossings are only counted."""

_sources = attrgetter("sources")

_ONE_STREAM: Mapping[Node, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Region:
    """A region: nodes that run as one function.

    Attributes:
        nodes: in the order in which they run.
        inputs: tensors from outside, in the order of the region node's inputs.
        outputs: tensors used outside, in the order of its outputs.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __repr__(self) -> str:
        return f"{len(self.nodes)} nodes"

    def walk(self) -> Iterator[Node]:
        """Yield every node, also inside branches and loops."""
        for node in self.nodes:
            yield node
            for body in node.subgraphs:
                yield from body.walk()


REGION = Op("region", lambda *_, region: tuple(tensor.spec for tensor in region.outputs))


def make_regions(
    graph: Graph,
    streams: Mapping[Node, int] = _ONE_STREAM,
    asynchronous: Collection[str] = (),
    enqueuing: Collection[str] = (),
    on_host: AbstractSet[Tensor] = frozenset(),
    costs: RegionCosts | None = None,
    seed: int | None = None,
) -> dict[Node, int]:
    """Replace clusters by `region` nodes, in place.

    Args:
        graph: with the device of every node in ``node.device``, if there is more than one.
        streams: the compute stream of each node; 0 for missing ones.
        asynchronous: names of the devices that launch kernels one by one.
        enqueuing: names of the devices whose regions enqueue kernels and do not wait for them.
        on_host: tensors whose values are on the host; see `find_host_values`.
        costs: costs of `enqueuing` devices, by which regions are joined; None to join none.
        seed: draws one of the orders in which the nodes of a region may run; None for the one they are in.

    Returns:
        `streams`, with the region nodes added.
    """
    random = None if seed is None else Random(seed)
    clustering = _Clustering(streams, asynchronous, enqueuing, on_host, costs, random)
    clustering.cluster(Body(graph))
    return {**streams, **clustering.regions}


def is_compilable(node: Node) -> bool:
    """Return True if generated code can run the node: neither it nor any inner node ever waits."""
    if node.subgraphs:
        return all(is_compilable(inner) for body in node.subgraphs for inner in body.nodes)
    if node.op in (EMIT, FEED, FETCH, CONTROL_TRIGGER):
        return False
    if node.op.conduct.is_user and node.op not in BY_ROW_OPS:
        return False  # may block, so a slow one gets a thread; ops over rows let the region stop between rows
    return node.op in (PARAMETER, CONSTANT) or (node.op.kernel is not None and not node.op.conduct.is_async)


def waits_in_turn(node: WhileNode) -> bool:
    """Return True if a loop may wait as a whole, because of one node in its body, such as a dequeue.

    The node's firings follow one another anyway, and the loop has no other visible effect meanwhile. Its computation is
    small, so no work is held up.
    """
    if node.graph.effects != "ordered" and node.parallel_iterations > 1:
        return False
    inside = [inner for body in node.subgraphs for inner in body.walk()]
    others = [x for x in inside if not (x.graph is node.body and waits_in_line(x) and _waits_for_itself(node, x))]
    return (
        len(inside) == len(others) + 1
        and all(inner.op.effects is None and (inner.subgraphs or is_compilable(inner)) for inner in others)
        and all(is_small_spec(tensor.spec) for inner in inside for tensor in (*inner.inputs, *inner.outputs))
    )


def _waits_for_itself(loop: WhileNode, node: Node) -> bool:
    """Return True if a firing of a waiting node comes after the firing of the iteration before.

    A node that waits without a side effect, such as a batched call, could wait in all iterations at once. It waits for
    itself only if it needs its earlier results. It must also say that it may be asked for on any thread.
    """
    if has_side_effect(node):
        return True
    if not getattr(node.attrs.get("shared"), "may_be_asked_anywhere", False):
        return False
    variables = {variable: loop.body.results[place].node for place, (variable, _) in enumerate(loop.carried)}
    seen: set[Node] = set()
    stack = [x.node for x in node.inputs]
    while stack:
        each = stack.pop()
        if each is node:
            return True
        if each not in seen:
            seen.add(each)
            stack += [variables[x] for x in each.outputs if x in variables] if each.op is PARAMETER else each.sources
    return False


def _may_overtake(node: Node) -> bool:
    """Return True if nothing orders effects of different iterations, so that a seed may reorder them.

    A region runs its nodes together, and a loop in one has no two iterations at a time.
    """
    is_in_turn = node.graph.effects == "ordered" or (isinstance(node, WhileNode) and node.parallel_iterations == 1)
    if is_in_turn or not (node.graph.is_subgraph or isinstance(node, WhileNode)):
        return False
    return bool(node_effects(node))


def _nesting(node: Node) -> int:
    inside = [_nesting(inner) for body in node.subgraphs for inner in body.nodes]
    return 1 + max(inside, default=0) if node.subgraphs else 0


@dataclass(slots=True)
class _Clustering:
    streams: Mapping[Node, int]
    asynchronous: Collection[str]
    enqueuing: Collection[str]
    on_host: AbstractSet[Tensor]
    costs: RegionCosts | None
    random: Random | None
    regions: dict[Node, int] = field(default_factory=dict)

    def cluster(self, body: Body) -> None:
        """Make the regions of one level, and of the bodies that are not part of one."""
        graph = body.graph
        if has_primitives(graph.nodes):
            return
        lanes = {node: self.lane(node) for node in graph.nodes}
        joins = {node for node in graph.nodes if self.may_join(node, lanes[node])}
        alone = set[Node]()
        # Bodies first: a loop that stays primitives has regions inside.
        for node in graph.nodes:
            if isinstance(node, WhileNode) and node not in joins and self.may_be_alone(node, lanes[node]):
                alone.add(node)
            elif node not in joins:
                self.cluster_bodies(node)
        barriers = [node for node in graph.nodes if node not in joins and self.is_barrier(node, lanes[node])]
        if len(barriers) > _MOST_BARRIERS:
            return
        crossings = _crossings(graph, lanes, joins, set(barriers), body.carried)
        keys = _keys(body, barriers, crossings)
        clusters: dict[Hashable, list[Node]] = {}
        for node in graph.nodes:
            if (node in joins or node in alone) and node.op is not PARAMETER and not is_everywhere(node):
                clusters.setdefault((lanes[node], keys[node]), []).append(node)
        cut = [each[at : at + _LARGEST] for each in clusters.values() for at in range(0, len(each), _LARGEST)]
        # A region of one kernel saves no firing; a region of one branch or loop saves the firings of its primitives.
        chosen = [part for part in self.joined(body, cut, lanes) if len(part) > 1 or part[0].subgraphs]
        if self.random is not None:
            chosen = [_shuffled(part, self.random) for part in chosen]
        if chosen:
            made = _replace(graph, chosen)
            for region, part in zip(made, chosen, strict=True):
                lane = lanes[part[0]]
                assert lane is not None
                region.device, self.regions[region] = lane

    def joined(
        self, body: Body, clusters: list[list[Node]], lanes: Mapping[Node, ComputeStream | None]
    ) -> list[list[Node]]:
        """Return `clusters`; on cards some are joined, if calling all of them does not pay."""
        if self.costs is None:
            return clusters

        def lane_of(cluster: Sequence[Node]) -> ComputeStream | None:
            lane = lanes[cluster[0]]
            if lane is None or lane.device not in self.enqueuing:
                return None
            # Regions of host values, such as counters, run ahead of kernels.
            is_ahead = all(tensor in self.on_host for node in cluster for tensor in node.outputs)
            return None if is_ahead else lane

        return join_regions(body, clusters, lane_of, self.costs, self.on_host, _LARGEST)

    def cluster_bodies(self, node: Node) -> None:
        for body in node.subgraphs:
            if isinstance(node, WhileNode) and body is node.body:
                asked = {tensor for inner in node.predicate.nodes for tensor in inner.inputs}
                pairs = zip(node.predicate.inputs, body.results, strict=False)
                decisive = [result for variable, result in pairs if variable in asked]
                # A body result that becomes a loop variable is at the variable's place.
                self.cluster(Body(body, node.carried, decisive, is_loop=True))
            else:
                self.cluster(Body(body, wanted=body.results))

    def lane(self, node: Node) -> ComputeStream | None:
        """Return the lane of the node; None for a branch or loop that is spread over several lanes."""
        # A branch or loop is in a lane only if all its nodes are: else its parts cross lanes by themselves.
        found = self.lanes(node) if node.subgraphs else None
        if not found:
            return ComputeStream(node.device, self.streams.get(node, 0))
        return found.pop() if len(found) == 1 else None

    def lanes(self, node: Node) -> set[ComputeStream | None]:
        """Return the lanes of the nodes inside a branch or loop."""
        return {self.lane(inner) for body in node.subgraphs for inner in body.nodes if not has_no_stream(inner)}

    def may_join(self, node: Node, lane: ComputeStream | None) -> bool:
        # With a seed, such a node stays a separate firing, which the seed can delay to reveal dependence on order.
        if self.random is not None and _may_overtake(node):
            return False
        return (
            lane is not None
            and node.op is not TO_CARD  # a CUDA graph takes copied values as inputs
            and lane.device not in self.asynchronous
            and is_compilable(node)
            and (lane.device not in self.enqueuing or self.never_waits(node))
            and _nesting(node) <= _DEEPEST
        )

    def may_be_alone(self, node: WhileNode, lane: ComputeStream | None) -> bool:
        launching = *self.asynchronous, *self.enqueuing
        return bool(lane and lane.device not in launching and waits_in_turn(node) and _nesting(node) <= _DEEPEST)

    def never_waits(self, node: Node) -> bool:
        """Return True if Python needs no value in a device's memory to run the node, and knows which values are
        there.
        """
        if isinstance(node, StructuredNode) and node.decision not in self.on_host:
            return False
        if mixes_vectors(node, self.on_host):
            return False
        if runs_on_host(node) or any(node.inputs[index] not in self.on_host for index in host_inputs(node)):
            return False
        return all(self.never_waits(inner) for body in node.subgraphs for inner in body.nodes)

    def is_barrier(self, node: Node, lane: ComputeStream | None) -> bool:
        if node.op in (FEED, FETCH, PARAMETER):
            return False
        return lane is None or lane.device not in self.asynchronous


@dataclass(slots=True)
class _Crossings:
    """The values, and bare orders, that go from one lane to another.

    Attributes:
        into: for each node, the numbers of crossings it waits for.
        out_of: for each node, the numbers of crossings it sends.
        count: how many there are.
    """

    into: dict[Node, list[int]] = field(default_factory=dict)
    out_of: dict[Node, list[int]] = field(default_factory=dict)
    count: int = 0


def _crossings(
    graph: Graph,
    lanes: Mapping[Node, ComputeStream | None],
    joins: Collection[Node],
    barriers: Collection[Node],
    carried: Sequence[tuple[Tensor, Tensor]],
) -> _Crossings:
    """Return the crossings that a region might delay: one end may be in a region, and neither is a waiting node
    anyway.
    """
    found = _Crossings()
    numbers: dict[tuple[Tensor | Node, ComputeStream | None], int] = {}
    sent_by = {variable: result.node for variable, result in carried}

    def cross(value: Tensor | Node, source: Node, target: Node) -> None:
        if has_no_stream(source) or target.op is FETCH or lanes[source] == lanes[target]:
            return
        if source in barriers or target in barriers or not (source in joins or target in joins):
            return
        key = value, lanes[target]
        if key not in numbers:
            numbers[key] = len(numbers)
            found.out_of.setdefault(source, []).append(numbers[key])
        found.into.setdefault(target, []).append(numbers[key])

    for node in graph.nodes:
        for tensor in node.inputs:
            # The next iteration must not wait longer than necessary, either.
            cross(tensor, sent_by.get(tensor, tensor.node), node)
        for control in node.control_inputs:
            cross(control, control, node)
    found.count = len(numbers)
    return found


def _keys(body: Body, barriers: Sequence[Node], crossings: _Crossings) -> dict[Node, Hashable]:
    """Return for each node the waiting nodes and crossings before it and behind it."""
    graph = body.graph
    if not barriers and not crossings.count:
        return dict.fromkeys(graph.nodes)  # no node waits: one key for all
    into = {node: 1 << index for index, node in enumerate(barriers)}
    out_of = dict(into)
    for node, awaited in _awaited_next(body, into).items():
        out_of[node] = out_of.get(node, 0) | awaited << len(barriers)
    if crossings.count * len(graph.nodes) > _MOST_BITS:
        sets = _before_and_behind(graph, into, out_of)
        # The most crossings on any path to each node, and from it. Along edges these also only grow and shrink.
        ones, out = dict.fromkeys(crossings.into, 1), dict.fromkeys(crossings.out_of, 1)
        longest = _before_and_behind(graph, ones, out, max, add)
        return {node: (sets[node], longest[node]) for node in graph.nodes}
    # Bits of barriers, then of the next iteration's barriers and of the decision, then of crossings.
    used = 2 * len(barriers) + 1
    for bits, crossed in ((into, crossings.into), (out_of, crossings.out_of)):
        for node, numbers in crossed.items():
            bits[node] = bits.get(node, 0) | sum(1 << (used + number) for number in set(numbers))
    return dict(_before_and_behind(graph, into, out_of))


def _awaited_next(body: Body, barriers: Mapping[Node, int]) -> dict[Node, int]:
    """For the nodes of a loop's results, the waiting nodes of the next iteration behind them; the decision is one."""
    found: dict[Node, int] = {}
    if not barriers:
        return found
    sides = _before_and_behind(body.graph, {}, barriers)
    for variable, result in body.carried:
        found[result.node] = found.get(result.node, 0) | sides[variable.node][1]
    for result in body.wanted if body.is_loop else ():
        found[result.node] = found.get(result.node, 0) | 1 << len(barriers)
    return found


def _before_and_behind(
    graph: Graph,
    into: Mapping[Node, int],
    out_of: Mapping[Node, int],
    joined: Callable[[int, int], int] = or_,
    more: Callable[[int, int], int] = or_,
) -> dict[Node, tuple[int, int]]:
    """Return the crossings passed before each node and behind it: sets of bits, unless they are joined otherwise."""
    before: dict[Node, int] = {}
    behind: dict[Node, int] = {}
    # Nodes stand behind their sources, so one pass each way is enough.
    for node in graph.nodes:
        found = 0
        for source in node.sources:
            found = joined(found, before.get(source, 0))
        before[node] = more(found, into.get(node, 0))
    for node in reversed(graph.nodes):
        found = behind[node] = more(behind.get(node, 0), out_of.get(node, 0))
        for source in node.sources:
            behind[source] = joined(behind.get(source, 0), found)
    return {node: (before[node], behind[node]) for node in graph.nodes}


def _replace(graph: Graph, clusters: Sequence[Sequence[Node]]) -> list[Node]:
    """Put a `region` node in the place of each cluster, in an order in which all can run; return these nodes."""
    owner = {node: index for index, cluster in enumerate(clusters) for node in cluster}
    used: dict[Tensor, None] = dict.fromkeys(graph.results if isinstance(graph, Subgraph) else ())
    for node in graph.nodes:
        used.update((tensor, None) for tensor in node.inputs if owner.get(node, -1) != owner.get(tensor.node, -2))
    replaced = Replacements()
    made = [_add_region(graph, cluster, used, replaced) for cluster in clusters]
    kept = [node for node in graph.nodes if node not in owner]
    for node in kept:
        replaced.apply(node)
    # A region runs as a whole, so a node between two members may have to move before or behind it.
    graph.nodes[:] = ordered(kept, _sources)
    replaced.apply_to_results(graph)
    return made


def _add_region(graph: Graph, cluster: Sequence[Node], used: Mapping[Tensor, None], replaced: Replacements) -> Node:
    members = set(cluster)
    inputs = dict.fromkeys(
        tensor
        for node in cluster
        for tensor in node.inputs
        if tensor.node not in members and not is_everywhere(tensor.node)
    )  # constants are bound into the function
    outputs = tuple(tensor for node in cluster for tensor in node.outputs if tensor in used)
    region = Region(tuple(cluster), tuple(inputs), outputs)
    specs = tuple(tensor.spec for tensor in outputs)
    name = "region" if len(cluster) > 1 else f"{cluster[0].name.rpartition('/')[2]}/region"
    node = graph.add_node(REGION, list(inputs), {"region": region}, specs, name=name, location=cluster[0].location)
    node.control_inputs = list(
        dict.fromkeys(control for member in cluster for control in member.control_inputs if control not in members)
    )
    replaced.tensors.update(zip(outputs, node.outputs, strict=True))
    replaced.nodes.update(dict.fromkeys(cluster, node))
    return node


def _shuffled(nodes: Sequence[Node], random: Random) -> list[Node]:
    """Return `nodes`, and inside branches and loops too, in any order in which each stands behind the nodes it waits
    for.
    """
    for body in (body for node in nodes for body in node.subgraphs):
        body.nodes[:] = _shuffled(body.nodes, random)
    return ordered(random.sample(nodes, len(nodes)), _sources)
