"""Stand-ins while a pass rewrites a graph: tensors for tensors, and nodes for nodes that others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode


@dataclass(frozen=True, slots=True)
class Replacements:
    """Stand-ins; a stand-in may have one itself.

    Nodes stand behind their inputs, so that a pass can call `apply` on each as it comes to it. Where no tensor has a
    stand-in, no node has one.
    """

    tensors: dict[Tensor, Tensor] = field(default_factory=dict)
    nodes: dict[Node, Node] = field(default_factory=dict)

    def tensor(self, tensor: Tensor) -> Tensor:
        """The stand-in for `tensor` now: itself if nothing does."""
        while tensor in self.tensors:
            tensor = self.tensors[tensor]
        return tensor

    def node(self, node: Node) -> Node:
        """The node that others wait for now in place of `node`."""
        while node in self.nodes:
            node = self.nodes[node]
        return node

    def apply(self, node: Node) -> None:
        """Makes `node` use the stand-ins."""
        if node.inputs:
            tensors = self.tensors
            node.inputs = [self.tensor(tensor) if tensor in tensors else tensor for tensor in node.inputs]
        if node.control_inputs:
            node.control_inputs = list(dict.fromkeys(self.node(before) for before in node.control_inputs))

    def apply_to_results(self, graph: Graph) -> None:
        """Makes a body give back the stand-ins."""
        if self.tensors and isinstance(graph, Subgraph):
            graph.results = [self.tensor(result) for result in graph.results]


def join_inputs(node: StructuredNode, same: Mapping[int, int]) -> None:
    """Drops inputs of a branch or loop, and makes its bodies use others, which have the same values.

    Args:
        node: of the branch or loop.
        same: positions at the node of the inputs to drop, with the positions of their replacements.
    """
    if not same:
        return
    for body in node.subgraphs:
        inner = dict(enumerate(body.inputs, start=node.body_offset))
        pairs = [(inner[dropped], inner[kept]) for dropped, kept in same.items()]
        joined = Replacements(dict(pairs), {dropped.node: kept.node for dropped, kept in pairs})
        for user in body.nodes:
            joined.apply(user)
        joined.apply_to_results(body)
    node.drop_inputs(same)
