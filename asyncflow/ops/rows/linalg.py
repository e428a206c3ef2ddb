"""Row rules of products: what is multiplied by the same matrix for every row becomes one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.build import apply
from asyncflow.ops.linalg import MATMUL, MATRIX_TRANSPOSE, matrix_transpose
from asyncflow.ops.manipulation import expand_dims, reshape, squeeze
from asyncflow.ops.rows.rule import row_rule
from asyncflow.ops.shape import shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.ops.rows.rule import LiftedValue, RowAxis


@row_rule(MATMUL)
def _matmul(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    left, right = inputs
    if right.rank <= 2 and not right.has_rows:
        return [_by_matrix(node, left.tensor, right)]
    if left.rank == 2 and not left.has_rows and right.rank == 1:
        # (a @ row) for each row is rows @ a.T.
        return [_product(node, right.tensor, matrix_transpose(left.tensor))]
    as_row, as_column = left.rank == 1, right.rank == 1
    x = expand_dims(left.tensor, axis=-2) if as_row else left.tensor
    y = expand_dims(right.tensor, axis=-1) if as_column else right.tensor
    rank = max(left.rank + as_row, right.rank + as_column)
    x, y = (
        expand_dims(z, axis=tuple(range(1, 1 + rank - own))) if value.has_rows and own < rank else z
        for z, value, own in ((x, left, left.rank + as_row), (y, right, right.rank + as_column))
    )
    product = _product(node, x, y)
    dropped = ((-2,) if as_row else ()) + ((-1,) if as_column else ())
    return [squeeze(product, axis=dropped) if dropped else product]


def _by_matrix(node: Node, x: Tensor, right: LiftedValue) -> Tensor:
    """Rows times one matrix or vector: all axes of the rows but the last are folded into those of one product."""
    if x.ndim is None or x.ndim <= 2:
        return _product(node, x, right.tensor)
    assert x.shape is not None
    folded = reshape(x, (-1, x.shape[-1] if x.shape[-1] is not None else shape(x)[-1]))
    product = _product(node, folded, right.tensor)
    leading = [shape(x)[axis] if extent is None else extent for axis, extent in enumerate(x.shape[:-1])]
    return reshape(product, (*leading, *([] if right.rank == 1 else [_extent(right.tensor, -1)])))


def _extent(x: Tensor, axis: int) -> int | Tensor:
    assert x.shape is not None
    known = x.shape[axis]
    return shape(x)[axis] if known is None else known


def _product(node: Node, x: Tensor, y: Tensor) -> Tensor:
    return apply(MATMUL, x, y, **node.attrs)[0]


@row_rule(MATRIX_TRANSPOSE)
def _matrix_transpose(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(MATRIX_TRANSPOSE, inputs[0].tensor)
