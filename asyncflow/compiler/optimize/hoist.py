"""Pass: moves nodes that every iteration of a loop would compute anew in front of the loop.

Moved are nodes that depend on captures and constants alone. A loop may have no iterations at all, so out of its body
only what cannot fail is moved; its predicate is evaluated at least once, so out of that whatever is pure. As the value
is kept for as long as the loop runs, it must be no larger than its sources. A large transposed matrix by which the loop
multiplies is copied there, too.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Final, cast

import numpy as np

from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.purity import awaited_nodes, cannot_fail, nbytes
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.graph.builtin import CONSTANT, IDENTITY, is_constant
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import VIEW
from asyncflow.graph.structured import WhileNode
from asyncflow.ops.matrices.products import MATMUL, MATRIX_TRANSPOSE
from asyncflow.values import Array, Kernel, Namespace

_SMALL = 1024
"""Bytes of a value that may always be kept."""
_LARGE = 128 << 10
"""Bytes of a matrix that a product reads again in each iteration, out of a cache that others use too."""
_STRIP = 64
"""Rows transposed at a time: that number of columns fills lines of the cache."""


def _turned_kernel(xp: Namespace) -> Kernel:
    if xp is not np:
        return cast("Kernel", operator.methodcaller("swapaxes", -1, -2))

    def turned(x: Array) -> Array:
        result = np.empty(x.shape[::-1], x.dtype)
        for start in range(0, len(x), _STRIP):
            result[:, start : start + _STRIP] = x[start : start + _STRIP].T
        return result

    return turned


TURNED: Final = replace(MATRIX_TRANSPOSE, kernel=_turned_kernel, traits=VIEW)
"""A transposed matrix by which a loop multiplies, copied once.

A BLAS packs the right side anew for each product. From a view it reads across the rows: products of 4 to 64 rows with
256x1024 numbers took 1.2 to 2.4 times as long, and the copy less than two products.
"""


def hoist(graph: Graph) -> None:
    """Hoists out of all loops of `graph`, in place; out of inner ones first, so that a value may move on from there."""
    hoisted_any = False
    ordered: list[Node] = []
    for node in graph.nodes:
        for body in node.subgraphs:
            hoist(body)
        if isinstance(node, WhileNode):
            moved = _Hoist(node).run()
            hoisted_any = hoisted_any or bool(moved)
            ordered.extend(moved)
        ordered.append(node)
    if hoisted_any:
        graph.nodes[:] = ordered


class _Hoist:
    """Hoists out of the two bodies of one loop."""

    def __init__(self, loop: WhileNode) -> None:
        self.loop = loop
        self.moved: list[Node] = []
        self.outside: dict[Tensor, Tensor] = {}
        """Tensors of the body at hand, and where their values are found outside."""

    def run(self) -> list[Node]:
        """The nodes to stand in front of the loop."""
        for body in self.loop.subgraphs:
            self.outside = self.loop.captured(body)
            chosen = self._choose(body)
            if chosen:
                self._move(body, chosen)
        return self.moved

    def _choose(self, body: Subgraph) -> list[Node]:
        available = set(self.outside)
        awaited = awaited_nodes(body)
        chosen: list[Node] = []
        for node in body.nodes:
            if not node.inputs or node.control_inputs or node in awaited or not available.issuperset(node.inputs):
                if node.outputs and is_constant(node.outputs[0]):
                    available.update(node.outputs)
                continue
            sizes = [nbytes(output.spec) for output in node.outputs]
            # The predicate is evaluated at least once, so that it may fail there, too.
            runs_anyway = body is self.loop.predicate and node.op.is_pure and None not in sizes
            if node.op is not IDENTITY and (runs_anyway or cannot_fail(node)) and _is_worthwhile(node):
                available.update(node.outputs)
                chosen.append(node)
        return chosen

    def _move(self, body: Subgraph, chosen: list[Node]) -> None:
        leaving = set(chosen)
        body.nodes[:] = [node for node in body.nodes if node not in leaving]
        used = {tensor for node in body.nodes for tensor in node.inputs}
        used.update(body.results)
        inside = Replacements()
        for node in chosen:
            if _is_turned_factor(node, body):
                node.op = TURNED
            node.inputs = [self._outside(tensor) for tensor in node.inputs]
            node.graph = self.loop.graph
            self.moved.append(node)
            for output in node.outputs:
                self.outside[output] = output
                if output in used:
                    inside.tensors[output] = self.loop.add_capture(output, body)
        for node in body.nodes:
            inside.apply(node)
        inside.apply_to_results(body)

    def _outside(self, tensor: Tensor) -> Tensor:
        if tensor not in self.outside:
            constant = tensor.node
            name = constant.name.rpartition("/")[2]
            copied = detached_node(self.loop.graph, CONSTANT, (), constant.attrs, constant, tensor.spec, name=name)
            self.moved.append(copied)
            self.outside[tensor] = copied.outputs[0]
        return self.outside[tensor]


def _is_turned_factor(node: Node, body: Subgraph) -> bool:
    """Return True if a node transposes a large matrix by which `body` multiplies."""
    if node.op is not MATRIX_TRANSPOSE:
        return False
    (matrix,) = node.outputs
    is_large = matrix.spec.rank == 2 and matrix.dtype.kind == "f" and (nbytes(matrix.spec) or 0) >= _LARGE
    return is_large and any(each.op is MATMUL and each.inputs[1] is matrix for each in body.nodes)


def _is_worthwhile(node: Node) -> bool:
    made = sum(nbytes(output.spec) or 0 for output in node.outputs)
    return made <= max(_SMALL, sum(nbytes(tensor.spec) or 0 for tensor in node.inputs))
