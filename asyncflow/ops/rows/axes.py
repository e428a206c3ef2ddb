"""Row rules of ops that broadcast or work along axes: an axis that is counted from the front is one further back."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.shapes import size_of
from asyncflow.ops.arrays import manipulation as m
from asyncflow.ops.arrays.datatypes import BROADCAST_ARRAYS
from asyncflow.ops.arrays.manipulation import expand_dims, reshape
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.reductions.statistical import prod
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, fixed, row_rule


def behind(axis: int) -> int:
    """An axis of one row, as one of many rows."""
    return axis + 1 if axis >= 0 else axis


@row_rule("elementwise", BROADCAST_ARRAYS)
def _elementwise(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Single rows broadcast behind the row axis."""
    return apply(node.op, *(rows.aligned(inputs) if len(inputs) > 1 else [inputs[0].tensor]), **node.attrs)


@row_rule("axes", m.SQUEEZE)
def _several_axes(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    (x,) = inputs
    axes = tuple(1 + axis for axis in normalize_axes(node.attrs["axis"], x.rank))
    return apply(node.op, x.tensor, **{**node.attrs, "axis": axes})


@row_rule("axis")
def _one_axis(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axis, attrs = node.attrs["axis"], node.attrs
    if axis is None:
        if attrs.get("keepdims"):
            return row_by_row(node, rows, inputs)
        return apply(node.op, *(flat(rows.spread(x)) for x in inputs), **{**attrs, "axis": 1})
    if axis >= 0 and len({x.rank for x in inputs}) > 1:
        return row_by_row(node, rows, inputs)
    return apply(node.op, *rows.aligned(all_spread(rows, inputs)), **{**attrs, "axis": behind(axis)})


def all_spread(rows: RowAxis, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
    """The inputs, each with rows."""
    return [LiftedValue(rows.spread(x), has_rows=True) for x in inputs]


def flat(x: Tensor) -> Tensor:
    """Rows as vectors."""
    row = LiftedValue(x, has_rows=True)
    if row.rank <= 1:
        return x if row.rank else expand_dims(x, axis=1)
    size = size_of(row.shape)
    if size:
        return reshape(x, (-1, size))
    return reshape(x, (shape(x)[0], prod(shape(x)[1:])))


def along_with_size(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Along an axis, to a size that is the same for all rows."""
    x, *size = inputs
    attrs = {**node.attrs, "axis": behind(node.attrs["axis"])}
    return apply(node.op, rows.spread(x), *fixed(node, size, "a size"), **attrs)


@row_rule("matrices")
def _of_the_last_axes(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Apply the op to stacks of matrices: the row axis is one more of their axes."""
    x, *sizes = inputs
    return apply(node.op, rows.spread(x), *fixed(node, sizes, "a shape"), **node.attrs)
