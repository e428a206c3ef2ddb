"""Row rules of making arrays and of manipulation: rows are alike, so their number goes in front of a shape.

An axis that is counted from the front is one further back.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply, constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape, is_static, normalize_axis, size_of
from asyncflow.ops.arithmetic.elementwise import abs, floor_divide
from asyncflow.ops.arithmetic.logic import equal
from asyncflow.ops.arrays import creation
from asyncflow.ops.arrays import manipulation as m
from asyncflow.ops.arrays.datatypes import BROADCAST_TO, astype, broadcast_to
from asyncflow.ops.arrays.derivatives import SUM_TILES
from asyncflow.ops.arrays.manipulation import RESHAPE, RESHAPE_TO, concat, expand_dims, reshape
from asyncflow.ops.arrays.padding import PAD
from asyncflow.ops.arrays.shape import RANK, SHAPE, SIZE, shape
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.derivatives.shapes import CHECK_SHAPE, ENSURE_SHAPE, SUM_TO
from asyncflow.ops.indexing.indexing import getitem
from asyncflow.ops.reductions.statistical import prod
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.ops.rows.axes import behind, flat
from asyncflow.ops.rows.by_row import row_by_row
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, fixed, no_row_rule, row_rule
from asyncflow.ops.searching.searching import where


def row_template(
    node: Node, rows: RowAxis, template: Shape, sizes: Sequence[LiftedValue]
) -> tuple[Shape, list[Tensor]]:
    """Return the template of a shape (`asyncflow.ops.arrays.extents`) and its open extents, behind the row count."""
    tensors = fixed(node, sizes, "a shape")
    if template is None:
        return None, [_vector(rows, tensors[0])]
    return (rows.extent, *template), [*([rows.count] if rows.extent is None else []), *tensors]


def _vector(rows: RowAxis, extents: Tensor) -> Tensor:
    return concat([expand_dims(rows.count), astype(extents, int64)])


@row_rule(BROADCAST_TO, SUM_TO, CHECK_SHAPE)
def _to_shape(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *sizes = inputs
    template, open_ones = row_template(node, rows, node.attrs["shape"], sizes)
    whole = rows.spread(x)
    if node.op is BROADCAST_TO:
        whole = rows.raised(LiftedValue(whole, True), LiftedValue(node.outputs[0], False).rank)
    elif node.op is SUM_TO and (added := x.rank - LiftedValue(node.outputs[0], False).rank):
        whole = sum_of(whole, axis=tuple(range(1, 1 + added)), dtype=whole.dtype)
    return apply(node.op, whole, *open_ones, **{**node.attrs, "shape": template})


@row_rule(ENSURE_SHAPE)
def _ensure_shape(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(ENSURE_SHAPE, inputs[0].tensor, shape=rows.shape(node.attrs["shape"]))


@row_rule(RESHAPE, RESHAPE_TO)
def _reshape(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *given = inputs
    known = node.outputs[0].shape
    if x.has_rows and known is not None and is_static(known) and (rows.extent is not None or size_of(known)):
        return [reshape(x.tensor, (-1 if rows.extent is None else rows.extent, *(extent or 0 for extent in known)))]
    dims = node.attrs["shape"] if node.op is RESHAPE else node.attrs["dims"]
    if dims is None and known is not None:
        dims = (None,) * len(known)
    extents = fixed(node, given, "a shape")[0] if given else constant(dims, int64)
    if dims is None or -1 in dims or node.attrs.get("dims", ()) is None:
        # Find the extent for -1 from a single row: without rows it would be undetermined.
        of_row = prod(shape(x.tensor)[1 if x.has_rows else 0 :])
        extents = where(equal(extents, -1), floor_divide(of_row, abs(prod(extents))), extents)
    found = dims and (rows.extent, *(None if dim == -1 else dim for dim in dims))
    return apply(RESHAPE_TO, rows.spread(x), _vector(rows, extents), dims=found)


@row_rule(creation.FULL)
def _full(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    value, *sizes = inputs
    template, open_ones = row_template(node, rows, node.attrs["shape"], sizes)
    raised = rows.raised(value, LiftedValue(node.outputs[0], False).rank)
    return apply(BROADCAST_TO, raised, *open_ones, shape=template)


@row_rule(creation.FULL_LIKE)
def _full_like(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, value = inputs
    if not value.has_rows:
        return apply(creation.FULL_LIKE, x.tensor, value.tensor)
    extents = shape(x.tensor) if x.has_rows else _vector(rows, shape(x.tensor))
    return [broadcast_to(rows.raised(value, x.rank), extents)]


@row_rule(SUM_TILES)
def _sum_tiles(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *sizes = inputs
    template, open_ones = row_template(node, rows, node.attrs["shape"], sizes)
    repetitions, rank = node.attrs["repetitions"], LiftedValue(node.outputs[0], False).rank
    if template is None or len(repetitions) > rank:
        return row_by_row(node, rows, inputs)
    each = (1,) * (1 + rank - len(repetitions)) + repetitions
    return apply(SUM_TILES, x.tensor, *open_ones, repetitions=each, shape=template)


@row_rule(creation.ARANGE)
def _arange(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    if node.attrs["length"] is None:
        raise CannotLift(f"{node.name} has a length of its own for each row")
    return row_by_row(node, rows, inputs)


@row_rule(creation.LINSPACE)
def _linspace(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    fixed(node, inputs[2:], "a length")
    return row_by_row(node, rows, inputs)


no_row_rule(creation.EYE, because="its inputs are sizes, and rows are alike")


# -- shapes as values ------------------------------------------------------------------------------------------------


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


# -- axes ------------------------------------------------------------------------------------------------------------


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
