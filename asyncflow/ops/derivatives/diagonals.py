"""Derivatives of diagonals: taking one and putting it into a matrix are each other's transposes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, gradient_of_first
from asyncflow.ops.derivatives.shapes import ensure_shape, extent_of
from asyncflow.ops.diagonals import DIAGONAL, DIAGONAL_MATRIX, diagonal, diagonal_matrix


@derivative(DIAGONAL)
def _diagonal(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    rows, columns = (extent_of(x, axis) for axis in (-2, -1))
    return [ensure_shape(diagonal_matrix(grad, rows, columns, offset=node.attrs["offset"]), x.shape)]


gradient_of_first(
    DIAGONAL_MATRIX,
    lambda node, grad: ensure_shape(diagonal(grad, offset=node.attrs["offset"]), node.inputs[0].shape),
)
