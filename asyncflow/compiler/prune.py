"""Pass: drops what other passes have left without a use: nodes that cannot fail, and captures.

What may fail stays although nobody uses its value, for it was part of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.compiler.captures import body_offset, drop_inputs, first_capture
from asyncflow.compiler.purity import cannot_fail
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.graph import STRUCTURED, Graph, Subgraph

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncflow.graph.ir import Node, Tensor


def prune(graph: Graph, keep: Collection[Node] = ()) -> None:
    """Prunes `graph` and its bodies, in place.

    Args:
        graph: a graph or body.
        keep: nodes that stay, such as those a run was asked to run.
    """
    used: set[Tensor] = set(graph.results) if isinstance(graph, Subgraph) else set()
    awaited: set[Node] = set(keep)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.op.name in STRUCTURED:
            for body in node.subgraphs:
                prune(body)
            _drop_unused_captures(node)
        elif node not in awaited and used.isdisjoint(node.outputs) and (node.op is CONSTANT or cannot_fail(node)):
            continue
        kept.append(node)
        used.update(node.inputs)
        if node.control_inputs:
            awaited.update(node.control_inputs)
    if len(kept) < len(graph.nodes):
        graph.nodes[:] = kept[::-1]


def _drop_unused_captures(node: Node) -> None:
    used: set[Tensor] = set()
    for body in node.subgraphs:
        used.update(body.results)
        for inner in body.nodes:
            used.update(inner.inputs)
            used.update(tensor for before in inner.control_inputs for tensor in before.outputs)
    offset = body_offset(node)
    drop_inputs(
        node,
        [
            place
            for place in range(first_capture(node), len(node.inputs))
            if used.isdisjoint(body.inputs[place - offset] for body in node.subgraphs)
        ],
    )
