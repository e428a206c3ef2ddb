"""Pass: leaves out nodes that give back one of their inputs, bit for bit.

Such as ``x * 1``, ``x - 0``, a conversion to the dtype it has, two negations, a transpose of a transpose, and
identities that nothing waits for. Not ``x + 0`` of floats, which turns -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncflow.autodiff.pieces.custom_gradient import CUSTOM_GRADIENT
from asyncflow.autodiff.pieces.recompute import RECOMPUTED
from asyncflow.autodiff.stop_gradient import STOP_GRADIENT
from asyncflow.compiler.program.purity import awaited_nodes
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.graph.builtin import CONSTANT, IDENTITY, is_constant
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values.shapes import is_static
from asyncflow.ops.arithmetic.elementwise import ADD, DIVIDE, FLOOR_DIVIDE, MULTIPLY, NEGATIVE, POSITIVE, SUBTRACT
from asyncflow.ops.arithmetic.logic import BITWISE_INVERT, BITWISE_OR, BITWISE_XOR, LOGICAL_NOT
from asyncflow.ops.arrays.datatypes import ASTYPE, BROADCAST_TO
from asyncflow.ops.arrays.manipulation import PERMUTE_DIMS, RESHAPE
from asyncflow.ops.matrices.products import MATRIX_TRANSPOSE
from asyncflow.ops.searching.searching import WHERE


def simplify(graph: Graph) -> None:
    """Simplify `graph` and its bodies, in place."""
    replaced = Replacements()
    awaited = awaited_nodes(graph)
    kept: list[Node] = []
    for node in graph.nodes:
        if replaced.tensors:
            replaced.apply(node)
        rule = _RULES.get(node.op)
        if rule is not None and not node.control_inputs and node not in awaited:
            same = rule(node)
            if same is not None and same.dtype == node.outputs[0].dtype:
                replaced.tensors[node.outputs[0]] = same
                continue
        elif node.op in (CUSTOM_GRADIENT, RECOMPUTED) and not node.control_inputs and node not in awaited:
            replaced.tensors.update(zip(node.outputs, node.inputs, strict=False))  # arguments stand behind results
            continue
        for body in node.subgraphs:
            simplify(body)
        kept.append(node)
    if replaced.tensors:
        replaced.apply_to_results(graph)
        graph.nodes[:] = kept


def _unchanged(node: Node) -> Tensor | None:
    return node.inputs[0]


def _same_shape(node: Node) -> Tensor | None:
    """For ops that only change the shape."""
    x = node.inputs[0]
    return x if is_static(x.shape) and x.shape == node.outputs[0].shape else None


def _same_branches(node: Node) -> Tensor | None:
    _, x1, x2 = node.inputs
    return x1 if x1 is x2 and is_static(x1.shape) and x1.shape == node.outputs[0].shape else None


# -- neutral elements ------------------------------------------------------------------------------------------------


def _neutral(value: float, kinds: str, *, left: bool = False) -> Callable[[Node], Tensor | None]:
    """Rule of an operation that a scalar `value` on the right (or the left too) leaves out, for dtypes of `kinds`."""

    def rule(node: Node) -> Tensor | None:
        x1, x2 = node.inputs
        if x2.node.op is CONSTANT:
            found, other = x2, x1
        elif left and x1.node.op is CONSTANT:
            found, other = x1, x2
        else:
            return None
        # The common dtype counts: an integer 0 is not a neutral element for floats.
        return other if node.outputs[0].dtype.kind in kinds and _is_scalar(found, value) else None

    return rule


def _is_scalar(tensor: Tensor, value: float) -> bool:
    found = tensor.node.attrs["value"]
    if found.shape != () or found.dtype.kind not in _NUMBERS or not is_constant(tensor):
        return False
    # -0.0 counts as a different number.
    return bool(found == value and not np.signbit(found))


# -- pairs -----------------------------------------------------------------------------------------------------------


def _twice(node: Node) -> Tensor | None:
    """Return the original of an op applied twice that undoes itself."""
    before = node.inputs[0].node
    return before.inputs[0] if before.op is node.op and not before.control_inputs else None


def _transposed_back(node: Node) -> Tensor | None:
    before = node.inputs[0].node
    if before.op is not PERMUTE_DIMS or before.control_inputs:
        return None
    first, second = before.attrs["axes"], node.attrs["axes"]
    rank = len(first)
    is_back = [first[axis] % rank for axis in second] == list(range(rank))
    return before.inputs[0] if is_back else None


_NUMBERS = "iuf"
_RULES: dict[Op, Callable[[Node], Tensor | None]] = {
    **dict.fromkeys((IDENTITY, POSITIVE, STOP_GRADIENT, ASTYPE), _unchanged),
    **dict.fromkeys((RESHAPE, BROADCAST_TO), _same_shape),
    **dict.fromkeys((NEGATIVE, BITWISE_INVERT, LOGICAL_NOT, MATRIX_TRANSPOSE), _twice),
    WHERE: _same_branches,
    PERMUTE_DIMS: _transposed_back,
    MULTIPLY: _neutral(1, _NUMBERS, left=True),
    DIVIDE: _neutral(1, "f"),
    FLOOR_DIVIDE: _neutral(1, "iu"),
    ADD: _neutral(0, "iu", left=True),
    SUBTRACT: _neutral(0, _NUMBERS),
    BITWISE_OR: _neutral(0, "iu", left=True),
    BITWISE_XOR: _neutral(0, "iu", left=True),
}
"""The input that a node of the op is the same as, if any; the dtypes must agree too, which `simplify` checks."""
