"""Row rules of ops that broadcast or work along axes: an axis that is counted from the front is one further back."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.shapes import normalize_axis, size_of
from asyncflow.ops import fft, nn
from asyncflow.ops import manipulation as m
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.datatypes import BROADCAST_ARRAYS
from asyncflow.ops.manipulation import expand_dims, reshape
from asyncflow.ops.padding import PAD
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, fixed, row_rule
from asyncflow.ops.shape import shape
from asyncflow.ops.statistical import prod


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


@row_rule(nn.LAYER_NORM)
def _layer_norm(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axes = tuple(1 + axis for axis in normalize_axes(node.attrs["axis"], inputs[0].rank))
    return apply(node.op, *rows.aligned(_all_spread(rows, inputs)), **{**node.attrs, "axis": axes})


@row_rule("axis")
def _one_axis(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axis, attrs = node.attrs["axis"], node.attrs
    if axis is None:
        if attrs.get("keepdims"):
            return row_by_row(node, rows, inputs)
        return apply(node.op, *(flat(rows.spread(x)) for x in inputs), **{**attrs, "axis": 1})
    if axis >= 0 and len({x.rank for x in inputs}) > 1:
        return row_by_row(node, rows, inputs)
    return apply(node.op, *rows.aligned(_all_spread(rows, inputs)), **{**attrs, "axis": behind(axis)})


def _all_spread(rows: RowAxis, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
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


@row_rule(fft.FFT, fft.IFFT, fft.RFFT, fft.IRFFT, nn.ONE_HOT)
def _along_with_size(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *size = inputs
    attrs = {**node.attrs, "axis": behind(node.attrs["axis"])}
    return apply(node.op, rows.spread(x), *fixed(node, size, "a size"), **attrs)


@row_rule(m.ROLL)
def _roll(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *by = inputs
    axis = node.attrs["axis"]
    if axis is None or any(each.has_rows for each in by):
        return row_by_row(node, rows, inputs)
    moved = tuple(map(behind, axis)) if isinstance(axis, tuple) else behind(axis)
    return apply(node.op, x.tensor, *(each.tensor for each in by), **{**node.attrs, "axis": moved})


@row_rule(m.REPEAT)
def _repeat(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *counts = inputs
    axis = node.attrs["axis"]
    whole = flat(rows.spread(x)) if axis is None else rows.spread(x)
    attrs = {**node.attrs, "axis": 1 if axis is None else behind(axis)}
    return apply(node.op, whole, *fixed(node, counts, "numbers of repeats"), **attrs)


@row_rule(m.TILE)
def _tile(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    (x,) = inputs
    given = node.attrs["repetitions"]
    rank = max(x.rank, len(given))
    return apply(node.op, rows.raised(x, rank), repetitions=(1,) * (1 + rank - len(given)) + given)


@row_rule(PAD)
def _pad(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, value = inputs
    if value.has_rows:
        return row_by_row(node, rows, inputs)
    return apply(PAD, x.tensor, value.tensor, widths=((0, 0), *node.attrs["widths"]))


@row_rule(m.PERMUTE_DIMS)
def _permute_dims(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axes = (0, *(1 + normalize_axis(axis, len(node.attrs["axes"])) for axis in node.attrs["axes"]))
    return apply(node.op, inputs[0].tensor, axes=axes)


@row_rule(m.EXPAND_DIMS)
def _expand_dims(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    axis = node.attrs["axis"]
    axes = tuple(1 + place for place in normalize_axes(axis, inputs[0].rank + len(axis)))
    return apply(node.op, inputs[0].tensor, axis=axes)


@row_rule("matrices")
def _of_the_last_axes(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Apply the op to stacks of matrices: the row axis is one more of their axes."""
    x, *sizes = inputs
    return apply(node.op, rows.spread(x), *fixed(node, sizes, "a shape"), **node.attrs)
