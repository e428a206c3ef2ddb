"""Row rules of ops that work along axes: every axis is one further back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.build import apply
from asyncflow.graph.shapes import normalize_axis
from asyncflow.ops import manipulation as m
from asyncflow.ops import nn, searching, sorting, statistical, utility
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.rows.rule import row_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.ops.rows.rule import LiftedValue, RowAxis


@row_rule(
    *(statistical.SUM, statistical.PROD, statistical.MAX, statistical.MIN, statistical.MEAN, statistical.STD),
    *(statistical.VAR, utility.ALL, utility.ANY, searching.COUNT_NONZERO, nn.LOGSUMEXP, m.FLIP, m.SQUEEZE),
)
def _several_axes(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    (x,) = inputs
    axes = tuple(1 + axis for axis in normalize_axes(node.attrs["axis"], x.rank))
    return apply(node.op, x.tensor, **{**node.attrs, "axis": axes})


@row_rule(nn.SOFTMAX, nn.LOG_SOFTMAX, sorting.SORT, sorting.ARGSORT, utility.DIFF)
def _one_axis(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    (x,) = inputs
    return apply(node.op, x.tensor, **{**node.attrs, "axis": 1 + normalize_axis(node.attrs["axis"], x.rank)})


@row_rule(m.PERMUTE_DIMS)
def _permute_dims(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axes = (0, *(1 + normalize_axis(axis, len(node.attrs["axes"])) for axis in node.attrs["axes"]))
    return apply(node.op, inputs[0].tensor, axes=axes)


@row_rule(m.EXPAND_DIMS)
def _expand_dims(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axis = node.attrs["axis"]
    axes = tuple(1 + place for place in normalize_axes(axis, inputs[0].rank + len(axis)))
    return apply(node.op, inputs[0].tensor, axis=axes)
