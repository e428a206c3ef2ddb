"""Row rules of ops that ask for shapes: rows are alike, so the answer is the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.build import apply, constant
from asyncflow.graph.dtypes import int64
from asyncflow.graph.ir import Node, Tensor
from asyncflow.ops.indexing import getitem
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, row_rule
from asyncflow.ops.shape import RANK, SHAPE, SIZE
from asyncflow.ops.statistical import prod


@row_rule(SHAPE, alike=True)
def _shape(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    (whole,) = apply(SHAPE, inputs[0].tensor)
    return [getitem(whole, slice(1, None))]


@row_rule(SIZE, alike=True)
def _size(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    (whole,) = apply(SHAPE, inputs[0].tensor)
    return [prod(getitem(whole, slice(1, None)))]


@row_rule(RANK, alike=True)
def _rank(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return [constant(inputs[0].rank, int64)]
