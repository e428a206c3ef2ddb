"""Nodes that a pass makes, and finds a place for itself."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values.spec import Spec


def detached_node(
    graph: Graph,
    op: Op,
    inputs: Sequence[Tensor],
    attrs: Attrs,
    like: Node,
    specs: Spec | tuple[Spec, ...],
    *,
    name: str | None = None,
    reserved_name: str | None = None,
) -> Node:
    """A node of `graph` that is not among its nodes yet, placed and located as `like`; names as in `Graph.add_node`."""
    node = graph.add_node(op, inputs, attrs, specs, name=name, reserved_name=reserved_name, location=like.location)
    graph.nodes.pop()
    node.device, node.colocated_with = like.device, like.colocated_with
    return node
