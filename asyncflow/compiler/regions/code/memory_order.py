"""Values whose axes may stand in memory in another order than they are counted in, as a transpose's do.

Elementwise results of them have that order, too. Copied to a buffer of the usual order they would be the same numbers.
But products and sums of them would differ in the last bits from the results without a region: kernels for operands of
either order add in different orders.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.ops.arrays.manipulation import PERMUTE_DIMS
from asyncflow.ops.matrices.products import EINSUM, MATMUL, MATRIX_TRANSPOSE

_TURNING = (EINSUM, MATRIX_TRANSPOSE, PERMUTE_DIMS)


def find_reordered(nodes: Collection[Node]) -> frozenset[Tensor]:
    """Return the reordered values of a region's nodes, and of their bodies; a product has the usual order."""
    found: set[Tensor] = set()
    count = -1
    while len(found) > count:  # a loop variable may be a value reordered in the previous iteration
        count = len(found)
        for node in nodes:
            _add(node, found)
    return frozenset(found)


def _add(node: Node, found: set[Tensor]) -> None:
    if not isinstance(node, StructuredNode):
        if node.op in _TURNING or (node.op is not MATMUL and not found.isdisjoint(node.inputs)):
            found.update(x for x in node.outputs if x.shape is None or len(x.shape) > 1)
        return
    for body in node.subgraphs:
        found.update(inner for inner, outer in node.captured(body).items() if outer in found)
    if isinstance(node, WhileNode):
        inputs = (node.inputs, node.predicate.inputs, node.body.inputs, node.body.results)
        results = [*zip(node.outputs, *inputs, strict=False)]
    else:
        results = [*zip(node.outputs, *(body.results for body in node.subgraphs), strict=True)]
    for same in results:
        if not found.isdisjoint(same):
            found.update(same)
    for body in node.subgraphs:
        for each in body.nodes:
            _add(each, found)
