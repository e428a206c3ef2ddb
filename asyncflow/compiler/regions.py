"""Pass: groups nodes into regions, each of which becomes one generated Python function.

A region is a cluster of nodes that never wait, whole `cond` and `while` nodes included. It must not cost concurrency:
nodes join one region only if they wait for the same *barriers* (nodes that may wait: coroutine ops, the user's own
functions, streamed values, and branches and loops that contain them) and are waited for by the same ones. Such a
cluster is convex: a path that left it and came back would pass a barrier, or a node with other barriers before or
behind it.

Loops that stay primitives get regions inside their bodies, so their iterations still overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncflow.compiler.extract import EMIT, FEED, FETCH
from asyncflow.compiler.frames import has_primitives
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import STRUCTURED, Graph, Subgraph
from asyncflow.graph.op import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncflow.graph.ir import Node, Tensor

_LARGEST = 400
"""A straight line of more nodes is cut: neither compiling a region nor running it may hold its thread for long."""

_DEEPEST = 12
"""Python allows 20 nested blocks; branches and loops nested deeper stay primitives, down to where this holds."""

_MOST_BARRIERS = 256
"""With more, telling clusters apart would cost more than they gain; such a graph stays as it is."""


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes that run as one function.

    Attributes:
        nodes: in the order in which they run.
        inputs: tensors from outside, in the order of the region node's inputs.
        outputs: tensors that somebody outside uses, in the order of its outputs.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def walk(self) -> Iterator[Node]:
        """Every node, those in branches and loops included."""
        for node in self.nodes:
            yield node
            for body in _bodies(node):
                yield from body.walk()


REGION = Op(name="region", infer=lambda *_, region: tuple(tensor.spec for tensor in region.outputs))


def make_regions(graph: Graph) -> None:
    """Replaces clusters by `region` nodes, in place."""
    _cluster(graph, results=())


def _bodies(node: Node) -> Sequence[Subgraph]:
    return node.subgraphs if node.op.name in STRUCTURED else ()


def is_compilable(node: Node) -> bool:
    """Whether generated code can run the node: it never waits, and neither does anything inside it."""
    if node.op.name in STRUCTURED:
        return all(is_compilable(inner) for body in node.subgraphs for inner in body.nodes)
    if node.op in (EMIT, FEED, FETCH, CONTROL_TRIGGER):
        return False
    if node.op.is_user:
        return False  # it may block: it gets a thread of its own if it is slow
    return node.op in (PARAMETER, CONSTANT) or (node.op.kernel is not None and not node.op.is_async)


def _is_everywhere(node: Node) -> bool:
    """Whether the node is a constant that waits for nothing: its value is bound wherever it is used."""
    return node.op is CONSTANT and not node.control_inputs


def _nesting(node: Node) -> int:
    return (
        1 + max((_nesting(inner) for body in _bodies(node) for inner in body.nodes), default=0) if _bodies(node) else 0
    )


def _cluster(graph: Graph, results: Iterable[Tensor]) -> None:
    if has_primitives(graph.nodes):
        return
    joins = {node: is_compilable(node) and _nesting(node) <= _DEEPEST for node in graph.nodes}
    for node in graph.nodes:
        if not joins[node]:
            for body in _bodies(node):
                _cluster(body, body.results)
    barriers = [node for node in graph.nodes if not joins[node] and node.op not in (FEED, FETCH, PARAMETER)]
    if len(barriers) > _MOST_BARRIERS:
        return
    clusters: dict[object, list[Node]] = {}
    keys = _keys(graph, barriers)
    for node in graph.nodes:
        if joins[node] and node.op is not PARAMETER and not _is_everywhere(node):
            clusters.setdefault(keys[node], []).append(node)
    chosen = [part for cluster in clusters.values() for part in _cut(cluster) if _worthwhile(part)]
    if chosen:
        _replace(graph, chosen, set(results))


def _keys(graph: Graph, barriers: Sequence[Node]) -> dict[Node, tuple[int, int]]:
    """For each node, the barriers before it and after it, as sets of bits."""
    bit = {node: 1 << index for index, node in enumerate(barriers)}
    before: dict[Node, int] = {}
    after: dict[Node, int] = dict.fromkeys(graph.nodes, 0)
    for node in graph.nodes:
        found = 0
        for source in _sources(node):
            found |= before.get(source, 0) | bit.get(source, 0)
        before[node] = found
    for node in reversed(graph.nodes):
        reached = after[node] | bit.get(node, 0)
        for source in _sources(node):
            after[source] = after.get(source, 0) | reached
    return {node: (before[node], after[node]) for node in graph.nodes}


def _sources(node: Node) -> Iterable[Node]:
    yield from (tensor.node for tensor in node.inputs)
    yield from node.control_inputs


def _cut(cluster: list[Node]) -> Iterable[list[Node]]:
    return (cluster[start : start + _LARGEST] for start in range(0, len(cluster), _LARGEST))


def _worthwhile(cluster: Sequence[Node]) -> bool:
    return len(cluster) > 1 or cluster[0].op.name in STRUCTURED


def _replace(graph: Graph, clusters: Sequence[Sequence[Node]], results: set[Tensor]) -> None:
    """Puts one `region` node in the place of each cluster, in an order in which all can run."""
    owner = {node: index for index, cluster in enumerate(clusters) for node in cluster}
    used: dict[Tensor, None] = dict.fromkeys(results)
    for node in graph.nodes:
        used.update((tensor, None) for tensor in node.inputs if owner.get(node, -1) != owner.get(tensor.node, -2))
    renamed: dict[Tensor, Tensor] = {}
    replaced: dict[Node, Node] = {}
    for cluster in clusters:
        _add_region(graph, cluster, used, renamed, replaced)
    kept = [node for node in graph.nodes if node not in owner]
    for node in kept:
        node.inputs = [renamed.get(tensor, tensor) for tensor in node.inputs]
        node.control_inputs = list(dict.fromkeys(replaced.get(control, control) for control in node.control_inputs))
    graph.nodes[:] = _in_order(kept)
    if isinstance(graph, Subgraph):
        graph.results = [renamed.get(tensor, tensor) for tensor in graph.results]


def _add_region(
    graph: Graph,
    cluster: Sequence[Node],
    used: dict[Tensor, None],
    renamed: dict[Tensor, Tensor],
    replaced: dict[Node, Node],
) -> None:
    members = set(cluster)
    inputs = dict.fromkeys(
        tensor
        for node in cluster
        for tensor in node.inputs
        if tensor.node not in members and not _is_everywhere(tensor.node)
    )
    outputs = tuple(tensor for node in cluster for tensor in node.outputs if tensor in used)
    region = Region(tuple(cluster), tuple(inputs), outputs)
    specs = tuple(tensor.spec for tensor in outputs)
    name = "region" if len(cluster) > 1 else f"{cluster[0].name.rpartition('/')[2]}/region"
    node = graph.add_node(REGION, list(inputs), {"region": region}, specs, name=name, location=cluster[0].location)
    node.device = next((member.device for member in cluster if member.device is not None), None)
    node.control_inputs = list(
        dict.fromkeys(control for member in cluster for control in member.control_inputs if control not in members)
    )
    renamed.update(zip(outputs, node.outputs, strict=True))
    replaced.update(dict.fromkeys(cluster, node))


def _in_order(nodes: Sequence[Node]) -> list[Node]:
    """`nodes` so that each stands behind what it waits for (back edges of hand-written loops excepted)."""
    present = set(nodes)
    done: set[Node] = set()
    ordered: list[Node] = []
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            if node in done:
                stack.pop()
                continue
            missing = [
                source
                for source in _sources(node)
                if source in present and source not in done and source.op.name != "next_iteration"
            ]
            if missing:
                stack.extend(missing)
            else:
                done.add(node)
                ordered.append(node)
                stack.pop()
    return ordered
