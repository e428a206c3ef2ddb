"""Row rules of indexing and scattering: positions may be each row's own; bounds of slices must be common to all.

A key over rows takes the row axis whole. If NumPy would not leave the row axis in front then, the key names each row
beside the positions in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncflow.graph.building.build import apply, constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.arithmetic.logic import greater_equal, less_equal, logical_and
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import in_dtype
from asyncflow.ops.arrays.extents import template_shape
from asyncflow.ops.arrays.manipulation import expand_dims, moveaxis, reshape
from asyncflow.ops.arrays.rows import row_template
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.indexing.indexing import GETITEM, INDEX_ADD, INDEX_UPDATE, TAKE, TAKE_ALONG_AXIS
from asyncflow.ops.indexing.keys import WHOLE, Key, along, place_of_positions
from asyncflow.ops.indexing.scatter import SCATTER_ALONG_AXIS, SCATTER_TO, parts_of, sizes_of
from asyncflow.ops.indexing.windows import DYNAMIC_SLICE
from asyncflow.ops.rows.axes import behind
from asyncflow.ops.rows.positions import positions_of_rows
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, fixed, row_rule
from asyncflow.ops.searching.searching import where


class RowKey(NamedTuple):
    """A key for all rows.

    Attributes:
        key: of a value with a row axis in front.
        indices: the tensors in it.
        joined: how many axes the positions have.
        at: where these stand, among the axes of a row that is indexed. In what `key` gives they are in front, behind
            the row axis, if `moves`.
        moves: whether `key` names rows.
    """

    key: Key
    indices: list[Tensor]
    joined: int
    at: int
    moves: bool

    def from_front(self, x: Tensor) -> Tensor:
        """Move the axes of the key's result to their places in a row's result."""
        return self._moved(x, 1, 1 + self.at)

    def to_front(self, x: Tensor) -> Tensor:
        """Move the axes of a value written at the key back to the front."""
        return self._moved(x, 1 + self.at, 1)

    def _moved(self, x: Tensor, start: int, end: int) -> Tensor:
        if not self.moves or not self.joined or not self.at:
            return x
        return moveaxis(x, tuple(range(start, start + self.joined)), tuple(range(end, end + self.joined)))


def row_key(
    node: Node, rows: RowAxis, key: Key, x: Shape, indices: Sequence[LiftedValue], places: Tensor | None = None
) -> RowKey:
    """A key for all rows.

    Args:
        node: that indexes, for messages.
        rows: the axis.
        key: of one row.
        x: the shape of one row of the indexed value.
        indices: the tensors in the key.
        places: of the rows within the indexed value; None for all of its rows.

    Raises:
        CannotLift: bounds of slices, or masks, are each row's own, or a rank is not known.
    """
    if not indices and places is None:
        return RowKey((WHOLE, *key), [], 0, 0, moves=False)
    joined, at, apart = _positions(node, key, x, indices)
    if not apart and places is None and not any(index.has_rows for index in indices):
        return RowKey((WHOLE, *key), [v.tensor for v in indices], joined, at, moves=False)
    numbers = arange(rows.count if rows.extent is None else rows.extent, dtype=int64) if places is None else places
    numbers = expand_dims(numbers, axis=tuple(range(1, 1 + joined))) if joined else numbers
    tensors = named_rows(rows, indices, joined, axes=1)
    return RowKey((("input", len(indices)), *key), [*tensors, numbers], joined, at, moves=True)


def named_rows(rows: RowAxis, indices: Sequence[LiftedValue], rank: int, *, axes: int) -> list[Tensor]:
    """Return indices of one rank in each row, which name their row if out of range."""
    return [positions_of_rows(rows, rows.raised(v, rank), axes=axes) if v.has_rows else v.tensor for v in indices]


def _positions(node: Node, key: Key, x: Shape, indices: Sequence[LiftedValue]) -> tuple[int, int, bool]:
    """Return the number and place of the positions' axes in a key, and True if other entries stand between them."""
    numbers = [entry[1] for entry in key if entry[0] == "input"]
    named = [indices[number] for number in numbers]
    fixed(node, [each for number, each in enumerate(indices) if number not in numbers], "bounds of a slice")
    fixed(node, [each for each in named if each.tensor.dtype.kind == "b"], "a mask")
    if x is None:
        raise CannotLift(f"the rank of what {node.name} indexes is not known while the graph is built")
    joined = max((1 if each.tensor.dtype.kind == "b" else each.rank for each in named), default=0)
    at, apart = place_of_positions(x, key, [Spec(each.tensor.dtype, each.shape) for each in indices])
    return joined, at, apart


# -- rules -----------------------------------------------------------------------------------------------------------


@row_rule(GETITEM)
def _getitem(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *indices = inputs
    return [_indexed(node, rows, node.attrs["key"], x, indices)]


@row_rule(TAKE)
def _take(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, indices = inputs
    axis = node.attrs["axis"]
    if not indices.has_rows:
        return apply(TAKE, x.tensor, indices.tensor, axis=behind(axis))
    if x.has_rows:
        return [_indexed(node, rows, along(axis, ("input", 0)), x, [indices])]
    (taken,) = apply(TAKE, x.tensor, *named_rows(rows, [indices], 0, axes=0), axis=axis)
    at = axis % x.rank
    return [moveaxis(taken, at, 0) if at else taken]


def _indexed(node: Node, rows: RowAxis, key: Key, x: LiftedValue, indices: Sequence[LiftedValue]) -> Tensor:
    if x.has_rows:
        found = row_key(node, rows, key, x.shape, indices)
        return found.from_front(apply(GETITEM, x.tensor, *found.indices, key=found.key)[0])
    joined, at, apart = _positions(node, key, x.shape, indices)
    (whole,) = apply(GETITEM, x.tensor, *named_rows(rows, indices, joined, axes=0), key=key)
    return whole if apart or not at else moveaxis(whole, at, 0)


@row_rule(INDEX_UPDATE, INDEX_ADD)
def _changed(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, values, *indices = inputs
    found = row_key(node, rows, node.attrs["key"], x.shape, indices)
    whole = rows.spread(x)
    if values.has_rows or found.moves:
        rank = LiftedValue(apply(GETITEM, whole, *found.indices, key=found.key)[0], has_rows=True).rank
        raised = rows.raised(LiftedValue(rows.spread(values), has_rows=True), rank)
        values = LiftedValue(found.to_front(raised), has_rows=True)
    return apply(node.op, whole, values.tensor, *found.indices, key=found.key)


@row_rule(SCATTER_TO)
def _scatter_to(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    keys, tensors, template = row_parts(node, rows, inputs)
    return apply(SCATTER_TO, *tensors, keys=keys, shape=template, known=rows.shape(node.outputs[0].shape))


def _as_positions(key: Key, indices: Sequence[LiftedValue], values: Shape) -> tuple[Key, Sequence[LiftedValue]]:
    """Return a key of slices as one of positions if a bound is each row's own; `values` says how long the slices are.

    A `dynamic_slice` has such a key in its derivative, and its windows lie inside.
    """
    is_window = all(entry[0] == "slice" and isinstance(entry[1], tuple) and entry[3] is None for entry in key)
    if not is_window or values is None or not any(index.has_rows for index in indices):
        return key, indices
    sizes = [size for size in values[: len(key)] if size is not None]
    if len(sizes) < len(key):
        return key, indices
    starts = [indices[entry[1][1]] for entry in key]
    return tuple(("input", axis) for axis in range(len(key))), _windows(starts, sizes)


def row_parts(
    node: Node, rows: RowAxis, inputs: Sequence[LiftedValue], part: tuple[Tensor, RowAxis] | None = None
) -> tuple[tuple[Key, ...], list[Tensor], Shape]:
    """Return keys, inputs and the template of a scatter for all rows, or for a part of the rows; see `RowAxis`."""
    places, whole = part or (None, rows)
    given = sizes_of(inputs, node.attrs["shape"])
    template, sizes = row_template(node, whole, node.attrs["shape"], given)
    # If a tensor gives the shape, its length is the rank.
    shape = merge(template_shape(node.attrs["shape"], [x.tensor.spec for x in given]), node.attrs["known"])
    keys, tensors = [], []
    for key, (values, indices) in zip(node.attrs["keys"], parts_of(inputs, node.attrs["keys"]), strict=True):
        key, indices = _as_positions(key, indices, values.shape)
        found = row_key(node, rows, key, shape, indices, places)
        keys.append(found.key)
        tensors += [found.to_front(rows.spread(values)), *found.indices]
    return tuple(keys), [*tensors, *sizes], template


@row_rule(TAKE_ALONG_AXIS)
def _take_along_axis(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, indices = inputs
    found = named_rows(rows, [indices], 0, axes=1) if indices.has_rows else [rows.spread(indices)]
    return apply(node.op, rows.spread(x), *found, axis=behind(node.attrs["axis"]))


@row_rule(SCATTER_ALONG_AXIS)
def _scatter_along_axis(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    values, indices, *sizes = inputs
    template, open_ones = row_template(node, rows, node.attrs["shape"], sizes)
    attrs = {**node.attrs, "shape": template, "axis": behind(node.attrs["axis"])}
    return apply(node.op, rows.spread(values), rows.spread(indices), *open_ones, **attrs)


@row_rule(DYNAMIC_SLICE)
def _dynamic_slice(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, *starts = inputs
    if rows.extent is not None and not any(start.has_rows for start in starts):
        tensors = [constant(0, int64), *(start.tensor for start in starts)]
        return apply(node.op, x.tensor, *tensors, sizes=(rows.extent, *node.attrs["sizes"]))
    if not starts:
        return [rows.spread(x)]
    sizes = node.attrs["sizes"]
    inside = [
        _or_outside(start, extent_of(x.tensor, axis + x.has_rows), size)
        for axis, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    key = tuple(("input", axis) for axis in range(len(starts)))
    return [_indexed(node, rows, key, x, _windows(inside, sizes))]


def _or_outside(start: LiftedValue, extent: int | Tensor, size: int) -> LiftedValue:
    """Return `start` if a window of `size` from there lies inside, else `extent`: a position that indexing refuses."""
    begin = in_dtype(start.tensor, int64)
    is_inside = logical_and(greater_equal(begin, 0), less_equal(begin, extent - size))
    return start._replace(tensor=where(is_inside, begin, extent))


def _windows(starts: Sequence[LiftedValue], sizes: Sequence[int]) -> list[LiftedValue]:
    """Return the positions in windows, one array for each axis; together they name each element of a row's window."""
    found, rank = [], len(starts)
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        begin = in_dtype(start.tensor, int64)
        if start.has_rows:
            begin = expand_dims(begin, axis=tuple(range(1, 1 + rank)))
        steps = reshape(arange(size, dtype=int64), [size if each == axis else 1 for each in range(rank)])
        found.append(start._replace(tensor=add(begin, steps)))
    return found
