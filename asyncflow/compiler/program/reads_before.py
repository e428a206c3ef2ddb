"""Reads of variables in a loop that does not write them, made once in front of the loop.

What other runs write while the loop runs is then seen by all of its iterations, or by none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from asyncflow.compiler.program.detached import detached_node
from asyncflow.graph.graph import Graph, Subgraph, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.state.variables.variable import VARIABLE_READ


def read_before(loop: WhileNode, bodies: Iterable[Subgraph], chosen: Collection[Node] | None = None) -> list[Node]:
    """Make one read in front of `loop` of each variable that is read inside.

    Args:
        loop: writes none of the variables.
        bodies: of the loop, in which reads are looked for, also in inner branches and loops.
        chosen: the nodes of the bodies to look at; None for all.

    Returns:
        The nodes to stand in front of the loop.
    """
    reads: dict[object, Node] = {}
    seen: dict[tuple[object, Graph], Tensor] = {}

    def value(resource: object, path: Sequence[StructuredNode], body: Subgraph) -> Tensor:
        key = resource, body
        if key not in seen:
            *around, owner = path
            outer = value(resource, around, owner.graph) if around else reads[resource].outputs[0]  # type: ignore[arg-type]
            seen[key] = owner.add_capture(outer, body)
        return seen[key]

    def visit(body: Subgraph, chosen: Collection[Node] | None, path: Sequence[StructuredNode]) -> None:
        gone: dict[Node, Tensor] = {}
        for node in list(body.nodes):
            if chosen is not None and node not in chosen:
                continue
            if node.op is VARIABLE_READ:
                ((resource, _),) = node_effects(node)
                if resource not in reads:
                    reads[resource] = _moved(node, loop)
                gone[node] = value(resource, path, body)
            for part in node.subgraphs:
                assert isinstance(node, StructuredNode)
                visit(part, None, [*path, node])
        if gone:
            _leave(body, gone)

    for body in bodies:
        visit(body, chosen, [loop])
    return list(reads.values())


def _moved(read: Node, loop: WhileNode) -> Node:
    moved = detached_node(loop.graph, VARIABLE_READ, [], read.attrs, read, read.specs, name=f"{read.name}/before")
    moved.control_inputs = list(loop.control_inputs)
    return moved


def _leave(body: Subgraph, gone: dict[Node, Tensor]) -> None:
    instead = {node.outputs[0]: value for node, value in gone.items()}
    body.nodes[:] = [node for node in body.nodes if node not in gone]
    for node in body.nodes:
        node.inputs = [instead.get(tensor, tensor) for tensor in node.inputs]
        node.control_inputs = [before for before in node.control_inputs if before not in gone]
    body.results = [instead.get(tensor, tensor) for tensor in body.results]
