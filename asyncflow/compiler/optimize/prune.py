"""Pass: drops what other passes have left without a use: nodes that cannot fail, and captures.

What may fail stays although nobody uses its value, for it was part of the program.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncflow.compiler.program.purity import cannot_fail
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode


def prune(graph: Graph, keep: Collection[Node] = ()) -> None:
    """Prunes `graph` and its bodies, in place.

    Args:
        graph: a graph or body.
        keep: nodes that stay, such as those a run was asked to run.
    """
    _prune(graph, keep)


def _prune(graph: Graph, keep: Collection[Node]) -> tuple[set[Tensor], set[Node]]:
    """The tensors that are used, and the nodes that others wait for."""
    used: set[Tensor] = set(graph.results) if isinstance(graph, Subgraph) else set()
    awaited: set[Node] = set(keep)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if isinstance(node, StructuredNode):
            _prune_bodies(node)
        elif node not in awaited and used.isdisjoint(node.outputs) and (node.op is CONSTANT or cannot_fail(node)):
            continue
        kept.append(node)
        used.update(node.inputs)
        if node.control_inputs:
            awaited.update(node.control_inputs)
    if len(kept) < len(graph.nodes):
        graph.nodes[:] = kept[::-1]
    return used, awaited


def _prune_bodies(node: StructuredNode) -> None:
    """Prunes the bodies, and drops captures that neither uses."""
    first = node.first_capture
    needed: set[int] = set()
    for body in node.subgraphs:
        used, awaited = _prune(body, ())
        needed.update(
            place
            for place, inner in enumerate(body.inputs, start=node.body_offset)
            if place >= first and (inner in used or inner.node in awaited)
        )
    node.drop_inputs({place for place in range(first, len(node.inputs)) if place not in needed})
