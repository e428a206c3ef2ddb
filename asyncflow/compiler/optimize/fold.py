"""Pass: computes constant values while compiling.

A pure node with constant inputs and a small result becomes a constant under its own name. A kernel that fails, or gives
NaN or infinity, is left for the run, which reports it as the session asks. A `cond` on a constant is replaced by the
branch that is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncflow.compiler.program.kernels.kernels import bind_kernel
from asyncflow.compiler.program.purity import awaited_nodes, has_variants, nbytes
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.graph.builtin import CONSTANT, PARAMETER, is_constant
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, StructuredNode
from asyncflow.values import Array, Value

_LARGEST = 64 * 1024
"""Bytes of a result; larger constants would be kept for as long as the plan."""

_LARGEST_INPUT = 1024 * 1024
"""Bytes of an input: compiling must not take long."""


def fold(graph: Graph) -> None:
    """Fold `graph` and its bodies, in place."""
    _Fold(graph).run()


class _Fold:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.replaced = Replacements()
        self.kept: list[Node] = []
        self.awaited: set[Node] | None = None

    def run(self) -> None:
        pending = self.graph.nodes[::-1]
        while pending:
            node = pending.pop()
            if self.replaced.tensors:
                self.replaced.apply(node)
            if isinstance(node, StructuredNode):
                inlined = self._structured(node)
                if inlined is not None:
                    pending.extend(reversed(inlined))
                    continue
            elif node.op is not CONSTANT and node.op is not PARAMETER and not node.control_inputs:
                _fold_node(node)
            self.kept.append(node)
        self.replaced.apply_to_results(self.graph)
        self.graph.nodes[:] = self.kept

    def _structured(self, node: StructuredNode) -> list[Node] | None:
        """Fold inside; return the nodes that replace the node, or None if it stays."""
        is_known = isinstance(node, CondNode) and is_constant(node.decision) and not node.control_inputs
        if is_known and not self._is_awaited(node):
            return self._take_branch(node)
        _sink_constants(node)
        for body in node.subgraphs:
            fold(body)
        return None

    def _is_awaited(self, node: Node) -> bool:
        if self.awaited is None:
            self.awaited = awaited_nodes(self.graph)
        return node in self.awaited

    def _take_branch(self, node: StructuredNode) -> list[Node]:
        taken = node.subgraphs[0 if node.decision.node.attrs["value"].item() else 1]
        if self.awaited is not None:
            self.awaited |= awaited_nodes(taken)
        for parameter, outer in node.captured(taken).items():
            self.replaced.tensors[parameter] = outer
            self.replaced.nodes[parameter.node] = outer.node
        self.replaced.tensors.update(zip(node.outputs, taken.results, strict=True))
        nodes = [inner for inner in taken.nodes if inner.op is not PARAMETER]
        for inner in nodes:
            inner.graph = self.graph
            for body in inner.subgraphs:
                body.parent = self.graph
        return nodes


def _fold_node(node: Node) -> None:
    for tensor in node.inputs:
        if not is_constant(tensor) or tensor.node.device != node.device:
            return
    value = _compute(node, [x.node.attrs["value"] for x in node.inputs]) if _is_foldable(node) else None
    if value is not None:
        node.op, node.inputs, node.attrs = CONSTANT, [], {"value": value}


def _is_foldable(node: Node) -> bool:
    if not node.single or not node.op.is_pure or has_variants(node.inputs):
        return False
    return _is_small(node.outputs[0], _LARGEST) and all(_is_small(tensor, _LARGEST_INPUT) for tensor in node.inputs)


def _is_small(tensor: Tensor, limit: int) -> bool:
    size = nbytes(tensor.spec)
    return size is not None and size <= limit


def _compute(node: Node, inputs: Sequence[Array]) -> Array | None:
    try:
        with np.errstate(all="ignore"):
            # Bind as the run would, so that the bits are the same.
            kernel = bind_kernel(node, np, _no_state, check_outputs=True, check_numerics=True)
            value = np.asarray(kernel(*(_as_in_a_run(value) for value in inputs)))
    except Exception:
        # The failure recurs in the run, if it gets there, and is reported with tag and place.
        return None
    value.flags.writeable = False
    return value


def _as_in_a_run(value: Array) -> Value:
    kernel = CONSTANT.kernel
    assert kernel is not None
    return kernel(np, value=value)()


def _no_state(resource: object) -> Any:
    raise TypeError(f"{resource!r} has a state, which only a session knows")


# -- branches and loops ----------------------------------------------------------------------------------------------


def _sink_constants(node: StructuredNode) -> None:
    """Makes captures of small constants constants of the bodies."""
    sunk = [
        place
        for place, outer in enumerate(node.captures, start=node.first_capture)
        if is_constant(outer) and _is_small(outer, _LARGEST)
    ]
    for place in sunk:
        outer = node.inputs[place].node
        for body in node.subgraphs:
            stand_in = body.inputs[place - node.body_offset].node
            stand_in.op, stand_in.attrs, stand_in.device = CONSTANT, dict(outer.attrs), outer.device
    node.drop_inputs(sunk)
