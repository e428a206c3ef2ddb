"""Loop frames of the nodes of a flat graph."""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.errors import InternalError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.frames import FramePath, frame_of
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node
from asyncflow.graph.verify import verify

_BY_HAND = frozenset({ENTER, SWITCH})


def has_primitives(nodes: Iterable[Node]) -> bool:
    """Return True if control flow was written by hand: nodes then belong to frames, and may be dead."""
    return not _BY_HAND.isdisjoint([node.op for node in nodes])


def is_everywhere(node: Node) -> bool:
    """Return True if the node is a constant without control inputs: it belongs to every frame, and each partition
    has it.
    """
    return node.op is CONSTANT and not node.control_inputs


def assign_frames(graph: Graph) -> dict[Node, FramePath]:
    """The frame of every node of a flat graph.

    Raises:
        GraphError: a node mixes two frames, or nodes wait for one another in a cycle.
    """
    frames: dict[Node, FramePath] = {}
    consumers: dict[Node, list[Node]] = {}
    missing: dict[Node, int] = {}
    ready: list[Node] = []
    sources = {node: _sources(node) for node in graph.nodes}
    for node in graph.nodes:
        waits_for = dict.fromkeys(sources[node])
        if node.op is MERGE:
            waits_for = {source: None for source in waits_for if source.op is not NEXT_ITERATION}
        missing[node] = len(waits_for)
        if not waits_for:
            ready.append(node)
        for source in waits_for:
            consumers.setdefault(source, []).append(node)
    while ready:
        node = ready.pop()
        frames[node] = frame_of(node.op.name, node.name, sources[node], frames, node.location)
        for consumer in consumers.get(node, ()):
            missing[consumer] -= 1
            if missing[consumer] == 0:
                ready.append(consumer)
    if len(frames) < len(graph.nodes):
        verify(graph)  # names the cycle
        stuck = ", ".join(node.name for node in graph.nodes if node not in frames)
        raise InternalError(f"no frame can be told for {stuck}")
    return frames


def _sources(node: Node) -> list[Node]:
    """The nodes that `node` waits for."""
    return [tensor.node for tensor in node.inputs if not is_everywhere(tensor.node)] + node.control_inputs
