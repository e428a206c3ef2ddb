"""Derivatives of diagonals: taking one and putting it into a matrix are each other's transposes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of
from asyncflow.ops.diagonals import DIAGONAL, DIAGONAL_MATRIX, diagonal, diagonal_matrix


@derivative(DIAGONAL)
def _diagonal(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    rows, columns = (_extent(x, axis) for axis in (-2, -1))
    return [ensure_shape(diagonal_matrix(grad, rows, columns, offset=node.attrs["offset"]), x.shape)]


def _extent(x: Tensor, axis: int) -> int | Tensor:
    known = None if x.shape is None else x.shape[axis]
    return shape_of(x)[axis] if known is None else known


@derivative(DIAGONAL_MATRIX)
def _diagonal_matrix(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *sizes = node.inputs
    return [ensure_shape(diagonal(grad, offset=node.attrs["offset"]), x.shape), *[None] * len(sizes)]
