"""The rules of what a pass may do with a node: leave it out, run it elsewhere, run it again.

They add to what `asyncflow.graph.facts` says of the op what a node tells: its edges, and the types of its values.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.facts import MOVE
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import size_of
from asyncflow.graph.values.spec import Spec


def nbytes(spec: Spec) -> int | None:
    """Bytes of a value, or None if that is not known; strings and variants count as not known."""
    size = size_of(spec.shape)
    return None if size is None or spec.dtype.kind in "OT" else size * spec.dtype.itemsize


def cannot_fail(node: Node) -> bool:
    """Return True if the node surely succeeds, so that it may run, or not, as is best.

    A node that reads only shapes succeeds for all of them; any other node may find that they do not fit.
    """
    read = () if node.op.traits.memory is Memory.METADATA else node.inputs
    known = all(nbytes(tensor.spec) is not None for tensor in (*read, *node.outputs))
    return node.op.is_total and node.op.is_pure and known


def may_be_left_out(node: Node) -> bool:
    """Return True if a node whose outputs nothing uses need not run: it cannot fail, and running it does not show.

    Stores of saved values are made, written and read whatever the shapes of the values are.
    """
    op = node.op
    if op is CONSTANT or cannot_fail(node):
        return True
    return op.is_total and MOVE.allows(op) and has_variants((*node.inputs, *node.outputs))


def may_run_again(node: Node) -> bool:
    """Return True if a gradient may compute the node again, at any cost: its values depend on its inputs alone.

    An op that runs on the host may not: a card copies its inputs out and its outputs in.
    """
    if not node.op.is_pure or node.op.runs_on_host or node.control_inputs:
        return False
    return not has_variants((*node.inputs, *node.outputs))


def has_variants(tensors: Iterable[Tensor]) -> bool:
    """Return True if a TensorArray or the like is among the values: a value that may be used up is never shared or
    repeated.
    """
    return any(tensor.spec.dtype == VARIANT for tensor in tensors)


def awaited_nodes(graph: Graph) -> set[Node]:
    """Nodes of `graph` (not of its bodies) that others wait for by a control edge."""
    return {before for node in graph.nodes if node.control_inputs for before in node.control_inputs}
