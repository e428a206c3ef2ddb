"""Row rules of convolution and pooling.

Rows of examples alone are further examples. Rows of filters alone are further filters: as a convolution sums products
as a matrix product does, rows of one input join the axis of it that is not summed over. Where both inputs have rows, or
there are groups, each row is a group of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.ops.arrays.extents import apply_to_shape
from asyncflow.ops.arrays.manipulation import moveaxis, reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, fixed, row_rule
from asyncflow.ops.windows.conv import CONV, CONV_INPUT, CONV_WEIGHT
from asyncflow.ops.windows.pool import MAX_POOL, PICKED, POOL_PLACES, SUM_POOL, SUM_POOL_INPUT, UNPOOLED


@row_rule(CONV, CONV_INPUT, CONV_WEIGHT)
def _conv(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    one, other, *sizes = inputs
    op, groups, is_weight = node.op, node.attrs["groups"], node.op is CONV_WEIGHT
    # In weights, the axis in front of the channels has the filters; images have only the channels.
    channels = -1 - node.attrs["windows"].rank
    filters = channels - 1
    count = rows.count if rows.extent is None else rows.extent
    rest = iter(fixed(node, sizes, "a shape"))
    shape = [next(rest) if extent is None else extent for extent in node.attrs.get("shape", ())]
    if not is_weight and not other.has_rows:
        return [_applied(node, shape, groups, one.tensor, other.tensor)]
    joins, of_result, widens = (channels, filters, False) if is_weight else (filters, channels, op is CONV_INPUT)
    if groups == 1 and one.has_rows != other.has_rows:
        if one.has_rows:
            pair, of_result, widens = [_joined(one.tensor, channels), other.tensor], channels, True
        else:
            pair = [one.tensor, _joined(other.tensor, channels if widens else joins)]
    else:
        pair = [_joined(rows.spread(one), channels), _joined(rows.spread(other), joins)]
        groups = groups * count if groups is not None and isinstance(count, int) else None
    own = shape[0] if widens else extent_of(other.tensor, joins)
    if widens:
        shape[0] = own * count
    return [_apart(_applied(node, shape, groups, *pair), of_result, count, own)]


def _applied(node: Node, shape: Sequence[int | Tensor], groups: int | None, *inputs: Tensor) -> Tensor:
    attrs = {"windows": node.attrs["windows"], "groups": groups}
    return apply_to_shape(node.op, shape, *inputs, **attrs) if shape else apply(node.op, *inputs, **attrs)[0]


def _joined(x: Tensor, axis: int) -> Tensor:
    """Return rows with the row axis as part of the axis `axis`, which counts from the back."""
    rank = LiftedValue(x, has_rows=False).rank
    extents = [extent_of(x, place) for place in range(1, rank)]
    extents[axis] = extents[axis] * extent_of(x, 0)
    return reshape(moveaxis(x, 0, rank - 1 + axis), extents)


def _apart(x: Tensor, axis: int, count: int | Tensor, own: int | Tensor) -> Tensor:
    """Return such an axis as rows again, each of which has the extent `own` there."""
    rank = LiftedValue(x, has_rows=False).rank
    extents = [extent_of(x, place) for place in range(rank)]
    extents[rank + axis : rank + axis + 1] = [count, own]
    return moveaxis(reshape(x, extents), rank + axis, 0)


@row_rule(MAX_POOL, POOL_PLACES, PICKED, UNPOOLED, SUM_POOL, SUM_POOL_INPUT)
def _pool(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Rows are one more axis in front."""
    given = 2 if node.op in (PICKED, UNPOOLED) else 1
    values = [rows.spread(x) for x in inputs[:given]]
    return apply(node.op, *values, *fixed(node, inputs[given:], "a shape"), **node.attrs)
