"""Values of a body for many rows where some are 0 for every row, as states of missing children are.

Terms that are 0 are left out, with what would multiply them. That is right except for infinities and NaN: 0 times
infinity counts as 0 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncflow.graph.ir import Node
from asyncflow.graph.values.shapes import is_static
from asyncflow.ops.arithmetic.elementwise import ADD, MULTIPLY, NEGATIVE, SUBTRACT, TANH
from asyncflow.ops.arrays.manipulation import CONCAT, EXPAND_DIMS, RESHAPE, SQUEEZE
from asyncflow.ops.derivatives.shapes import zeros_of
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.layers.nn import RELU
from asyncflow.ops.matrices.products import MATMUL
from asyncflow.ops.reductions.statistical import SUM
from asyncflow.ops.rows.rule import LiftedValue

_OF_ZEROS: Final = frozenset({CONCAT, EXPAND_DIMS, GETITEM, NEGATIVE, RELU, RESHAPE, SQUEEZE, SUM, TANH})
"""Ops that give zeros where all of their inputs are."""


def without_zeros(node: Node, inputs: Sequence[LiftedValue]) -> LiftedValue | None:
    """Return a node's output for all rows if other inputs' zeros make it 0 or one of its inputs; None otherwise."""
    if not any(value.is_zero for value in inputs) or not is_static(node.outputs[0].shape):
        return None
    output = node.outputs[0]
    if node.op in (MULTIPLY, MATMUL) or (node.op in _OF_ZEROS and all(value.is_zero for value in inputs)):
        return LiftedValue(zeros_of(output), has_rows=False, is_zero=True)
    if node.op is ADD or (node.op is SUBTRACT and inputs[1].is_zero):
        other = inputs[0] if inputs[1].is_zero else inputs[1]
        if other.shape == output.shape and other.tensor.dtype == output.dtype:
            return other
    return None
