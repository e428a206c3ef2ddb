"""Row rules of products: products of every row with the same matrix become one product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_letters

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.ops.arrays.manipulation import expand_dims, moveaxis, permute_dims, reshape, squeeze
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.matrices import products as linalg
from asyncflow.ops.matrices.decompositions import SOLVE
from asyncflow.ops.matrices.products import EINSUM, MATMUL, MATRIX_TRANSPOSE, TENSORDOT, matrix_transpose
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, row_rule


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
    """Multiply rows by one matrix or vector: all axes of the rows but the last are folded into one."""
    if x.ndim is None or x.ndim <= 2:
        return _product(node, x, right.tensor)
    assert x.shape is not None
    *leading, last = (extent_of(x, axis) for axis in range(x.ndim))
    is_none_left = isinstance(last, Tensor) or last == 0  # or maybe: then -1 would be undetermined
    product = _product(node, reshape(x, (math.prod(leading) if is_none_left else -1, last)), right.tensor)
    return reshape(product, (*leading, *([] if right.rank == 1 else [extent_of(right.tensor, -1)])))


def _product(node: Node, x: Tensor, y: Tensor) -> Tensor:
    return apply(MATMUL, x, y, dtype=node.attrs["dtype"])[0]


@row_rule(MATRIX_TRANSPOSE)
def _matrix_transpose(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(MATRIX_TRANSPOSE, inputs[0].tensor)


@row_rule(TENSORDOT)
def _tensordot(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    left, right = inputs
    first, second = linalg._summed_axes(left.rank, right.rank, node.attrs["axes"])
    if not (left.has_rows and right.has_rows):
        axes = tuple(tuple(axis + x.has_rows for axis in summed) for x, summed in ((left, first), (right, second)))
        (product,) = apply(TENSORDOT, left.tensor, right.tensor, axes=axes, dtype=node.attrs["dtype"])
        return [product if left.has_rows else moveaxis(product, left.rank - len(first), 0)]
    kept = [[axis for axis in range(x.rank) if axis not in summed] for x, summed in ((left, first), (right, second))]
    product = _product(node, _grouped(left.tensor, kept[0], first), _grouped(right.tensor, second, kept[1]))
    extents = [extent_of(x.tensor, 1 + axis) for x, axes in zip(inputs, kept, strict=True) for axis in axes]
    return [reshape(product, (extent_of(product, 0), *extents))]


def _grouped(x: Tensor, first: Sequence[int], second: Sequence[int]) -> Tensor:
    """Return rows as matrices: the axes `first` are joined into one, and the axes `second` into the other."""
    ordered = permute_dims(x, [0, *(1 + axis for axis in (*first, *second))])
    extents = [math.prod(extent_of(x, 1 + axis) for axis in axes) for axes in (first, second)]
    return reshape(ordered, (extent_of(x, 0), *extents))


@row_rule(EINSUM)
def _einsum(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    terms, result = linalg._parse(node.attrs["subscripts"])
    letter = next(each for each in ascii_letters if each not in "".join(terms))
    ours = [letter * value.has_rows + term for term, value in zip(terms, inputs, strict=True)]
    tensors = [value.tensor for value in inputs]
    return apply(EINSUM, *tensors, subscripts=f"{','.join(ours)}->{letter}{result}", dtype=node.attrs["dtype"])


@row_rule(SOLVE)
def _solve(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    matrix, values = inputs
    if values.rank > 1:
        return apply(SOLVE, *rows.aligned(inputs))
    if not matrix.has_rows and matrix.rank == 2:
        return [matrix_transpose(apply(SOLVE, matrix.tensor, matrix_transpose(values.tensor))[0])]
    columns = expand_dims(rows.spread(values), axis=-1)
    raised = rows.raised(LiftedValue(columns, has_rows=True), matrix.rank)
    return [squeeze(apply(SOLVE, matrix.tensor, raised)[0], axis=-1)]
