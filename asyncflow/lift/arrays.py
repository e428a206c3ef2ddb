"""Row rules of TensorArrays: every element has a row axis. Rows write at the same places, and read where they like."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.control.stores import row_store
from asyncflow.control.stores import tensor_array as ta
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.manipulation import expand_dims, moveaxis
from asyncflow.ops.indexing.indexing import getitem
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, fixed, no_row_rule, refuse_part, row_rule
from asyncflow.ops.searching.sets import unique_inverse


def _array(node: Node, rows: RowAxis, value: LiftedValue) -> Tensor:
    refuse_part(node, rows)
    if not value.has_rows:
        raise CannotLift(f"{node.name} writes what rows have into a TensorArray that was made outside")
    return value.tensor


def _element(node: Node, rows: RowAxis) -> Spec:
    element: Spec = node.attrs["element"]
    return Spec(element.dtype, rows.shape(element.shape))


@row_rule(ta.TENSOR_ARRAY, on_demand=True)
def _new(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    size = fixed(node, [inputs[0]], "a size")[0]
    return apply(ta.TENSOR_ARRAY, size, **{**node.attrs, "element": _element(node, rows)})


@row_rule(ta.WRITE)
def _write(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    array, index, value = inputs
    place = fixed(node, [index], "an index")[0]
    return apply(ta.WRITE, _array(node, rows, array), place, rows.spread(value), element=_element(node, rows))


@row_rule(ta.UNSTACK)
def _unstack(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    array, values = inputs
    turned = moveaxis(rows.spread(values), 0, 1)
    return apply(ta.UNSTACK, _array(node, rows, array), turned, element=_element(node, rows))


@row_rule(ta.SCATTER)
def _scatter(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    array, indices, values = inputs
    places = fixed(node, [indices], "indices")[0]
    turned = moveaxis(rows.spread(values), 0, 1)
    return apply(ta.SCATTER, _array(node, rows, array), places, turned, element=_element(node, rows))


@row_rule(ta.READ)
def _read(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    array, index = inputs
    if array.has_rows:
        refuse_part(node, rows)
        if index.has_rows:
            return [_at_own_places(node, rows, array.tensor, index.tensor, arange(rows.count))]
        return apply(ta.READ, array.tensor, index.tensor, element=_element(node, rows))
    return apply(ta.GATHER, array.tensor, index.tensor, element=node.attrs["element"])


@row_rule(ta.STACK)
def _stack(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    refuse_part(node, rows)
    (whole,) = apply(ta.STACK, inputs[0].tensor, **{**node.attrs, "element": _element(node, rows)})
    return [moveaxis(whole, 1, 0)]


@row_rule(ta.GATHER, ta.PEEK)
def _gather(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    refuse_part(node, rows)
    array, indices = inputs
    if not array.has_rows:
        raise CannotLift(f"{node.name} has indices of its own for each row")
    if indices.has_rows:
        return [_at_own_places(node, rows, array.tensor, indices.tensor, expand_dims(arange(rows.count), axis=1))]
    (whole,) = apply(node.op, array.tensor, indices.tensor, element=_element(node, rows))
    return [moveaxis(whole, 1, 0)]


def _at_own_places(node: Node, rows: RowAxis, array: Tensor, places: Tensor, numbers: Tensor) -> Tensor:
    """Return the elements at places that differ between rows; elements that no row asks for are not looked at."""
    distinct = unique_inverse(places)
    (whole,) = apply(ta.PEEK, array, distinct.values, element=_element(node, rows))
    return getitem(whole, (distinct.inverse_indices, numbers))


@row_rule(ta.ELEMENT_SHAPE, alike=True)
def _element_shape(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    array, index = inputs
    place = fixed(node, [index], "an index")[0]
    (whole,) = apply(ta.ELEMENT_SHAPE, array.tensor, place, element=_element(node, rows))
    return [getitem(whole, slice(1, None))]


@row_rule(row_store.ROW_STORE, alike=True)
def _row_store(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """All rows share a store that holds no value of a row: a recomputed piece fills it once."""
    if inputs[0].has_rows:
        raise CannotLift(f"{node.name} has a capacity of each row's own")
    return apply(node.op, inputs[0].tensor, **node.attrs)


@row_rule(ta.SIZE, alike=True)
def _size(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(ta.SIZE, inputs[0].tensor)


@row_rule(ta.CLOSE)
def _close(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(ta.CLOSE, inputs[0].tensor)


no_row_rule(ta.SPLIT, ta.CONCAT, because="its pieces are as long as the run says, for each row")
