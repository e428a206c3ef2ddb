"""Row rules of layers: normalisations, and looking up rows."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.indexing.rows import named_rows
from asyncflow.ops.layers import nn
from asyncflow.ops.layers.nn import EMBEDDING
from asyncflow.ops.rows.axes import along_with_size
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, row_rule

row_rule(nn.ONE_HOT)(along_with_size)


@row_rule(nn.LAYER_NORM)
def _layer_norm(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *affine = inputs
    axes = tuple(1 + axis for axis in normalize_axes(node.attrs["axis"], x.rank))
    # Weights shared by all rows broadcast: spreading them would cost a call in each step.
    values = rows.aligned([LiftedValue(rows.spread(x), has_rows=True), *affine])
    return apply(node.op, *values, **{**node.attrs, "axis": axes})


@row_rule(EMBEDDING)
def _embedding(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    table, ids = inputs
    if table.has_rows:
        return row_by_row(node, rows, inputs)
    return apply(EMBEDDING, table.tensor, *named_rows(rows, [ids], 0, axes=0))
