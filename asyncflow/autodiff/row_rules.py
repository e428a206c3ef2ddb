"""Row rules of the stores that gradients of loops use: entries have a row axis, and entry numbers are common to all
rows.

A store of saved values has rows if the saved values have them, and a store of gradients always has.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

from asyncflow.autodiff.pieces.custom_gradient import (
    CUSTOM_GRADIENT,
    CustomRule,
    Gradients,
    TracedGradient,
    custom_rule,
    keep_copied_rule,
    traced_gradient,
)
from asyncflow.autodiff.pieces.recompute import BARRIER, RECOMPUTED
from asyncflow.autodiff.stores import part_sums, row_gradients, saved_values, store_gradients
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import template_shape
from asyncflow.ops.arrays.manipulation import concat, moveaxis
from asyncflow.ops.arrays.rows import row_template
from asyncflow.ops.indexing.rows import row_key, row_parts
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.ops.rows.rule import (
    CannotLift,
    LiftedValue,
    RowAxis,
    fixed,
    outputs_with_rows,
    refuse_part,
    row_rule,
)


@row_rule(saved_values.NEW_STORE, saved_values.MOVING_STORE, alike=True)
@row_rule(store_gradients.NO_GRADIENT, store_gradients.MERGE_GRADIENTS)
def _alike(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    return apply(node.op, *(x.tensor for x in inputs))


@row_rule(BARRIER, RECOMPUTED, each=True)
def _passed_on(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Values without rows stay so: the gradients of many rows of results run a piece again once."""
    return apply(node.op, *(x.tensor for x in inputs), **node.attrs)


@row_rule(saved_values.SAVE, store_gradients.ACCUMULATE)
def _save(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    store, index, value = inputs
    if node.op is store_gradients.ACCUMULATE:
        refuse_part(node, rows)
    return apply(node.op, rows.spread(store), *fixed(node, [index], "a number"), rows.spread(value))


@row_rule(saved_values.READ_SAVED)
def _read(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    store, index = inputs
    spec: Spec = node.attrs["value"]
    value = spec if spec.dtype == VARIANT else Spec(spec.dtype, rows.shape(spec.shape))
    return apply(node.op, store.tensor, *fixed(node, [index], "a number"), value=value)


@row_rule(store_gradients.ELEMENT_GRADIENT)
def _element(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    refuse_part(node, rows)
    grads, index, *sizes = inputs
    template = node.attrs["shape"]
    open_ones: Sequence[Tensor] = ()
    if node.attrs["dtype"] != VARIANT:
        template, open_ones = row_template(node, rows, template, sizes)
    (place,) = fixed(node, [index], "a number")
    return apply(node.op, grads.tensor, place, *open_ones, dtype=node.attrs["dtype"], shape=template)


@row_rule(store_gradients.STACKED_GRADIENTS)
def _stacked(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    grad, *indices = inputs
    return apply(node.op, moveaxis(rows.spread(grad), 0, 1), *fixed(node, indices, "numbers"))


@row_rule(store_gradients.ROWS_GRADIENT)
def _rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    attrs = node.attrs
    scattered = int(attrs["is_scattered"])
    grads, *rest = inputs
    # Element numbers come first, then rows.
    template, sizes = row_template(node, rows, attrs["shape"], rest[scattered:])
    if template is None:
        sizes = [concat([sizes[0][1:2], sizes[0][:1], sizes[0][2:]])]
    else:
        if rows.extent is None and template[1] is None:
            sizes[:2] = sizes[1::-1]
        template = (template[1], template[0], *template[2:])
    indices = fixed(node, rest[:scattered], "numbers")
    (whole,) = apply(node.op, grads.tensor, *indices, *sizes, **{**attrs, "shape": template})
    return [moveaxis(whole, 1, 0)]


@row_rule(part_sums.ADD_PARTS)
def _add_parts(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    keys, tensors, template = row_parts(node, rows, inputs[1:], rows.part)
    known = node.attrs["known"] and (rows.part[1] if rows.part else rows).shape(node.attrs["known"])
    return apply(node.op, inputs[0].tensor, *tensors, keys=keys, shape=template, known=known)


@row_rule(part_sums.PART_OF_SUM)
def _part_of_sum(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    total, *rest = inputs
    shape = node.attrs["shape"]
    count = len(rest) - (1 if shape is None else shape.count(None))
    places, whole = rows.part or (None, rows)
    template, sizes = row_template(node, whole, shape, rest[count:])
    known = template_shape(shape, [x.tensor.spec for x in rest[count:]])
    found = row_key(node, rows, node.attrs["key"], known, rest[:count], places)
    attrs = {"key": found.key, "shape": template, "dtype": node.attrs["dtype"]}
    return [found.from_front(apply(node.op, total.tensor, *found.indices, *sizes, **attrs)[0])]


def _traced(node: Node) -> tuple[CustomRule, TracedGradient] | None:
    rule = custom_rule(node)
    return None if rule is None else (rule, traced_gradient(node, rule))


@row_rule(CUSTOM_GRADIENT, always=lambda node: not node.attrs.get("runs_again"), prepare=_traced)
def _custom(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Lift what the user's function builds for one row, for each gradient that is asked for."""
    body = rows.body
    prepared = cast("tuple[CustomRule, TracedGradient] | None", body.prepared(node))
    if prepared is None:
        raise CannotLift(f"{node.name} lacks its user-defined gradient")
    rule, trace = prepared
    used = {inner: body.value(outer) for outer, inner in trace.body.captures.items()}
    has_rows = outputs_with_rows(node, [x.has_rows for x in inputs])[0]
    spread = rows.spread if has_rows else attrgetter("tensor")
    outputs = apply(CUSTOM_GRADIENT, *map(spread, inputs), **node.attrs)

    def gradients_of_rows(given: Sequence[Tensor | None]) -> tuple[Gradients, Gradients]:
        arrived = zip(trace.grads, given, strict=True)
        known = {x: LiftedValue(grad, has_rows) for x, grad in arrived if x is not None and grad is not None}
        try:
            results = body.computed(trace.body, {**used, **known}, trace.wanted())
        except CannotLift as reason:
            raise GraphError(f"grad_fn of {rule.name} cannot be computed for several rows at once: {reason}") from None
        if not has_rows:
            if any(x.has_rows for x in results):
                raise GraphError(f"grad_fn of {rule.name} uses values of several rows, and {node.name} has one for all")
            return trace.unflatten(x.tensor for x in results)
        found, of_variables = trace.unflatten(map(rows.spread, results))
        # All rows share a variable, so sum over rows.
        return found, [None if x is None else sum_of(x, axis=0, dtype=x.dtype) for x in of_variables]

    keep_copied_rule(outputs[0].node, rule, gradients_of_rows, [body.value(x).tensor for x in rule.captured])
    return outputs


@row_rule(store_gradients.JOINED_GRADIENTS, store_gradients.PIECES_GRADIENT)
def _pieces(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    whole, lengths, *sizes = inputs
    attrs, open_ones = {**node.attrs, "axis": 1 + node.attrs["axis"]}, list[Tensor]()
    if node.op is store_gradients.PIECES_GRADIENT:
        attrs["shape"], open_ones = row_template(node, rows, attrs["shape"], sizes)
    return apply(node.op, rows.spread(whole), *fixed(node, [lengths], "lengths"), *open_ones, **attrs)


@row_rule(row_gradients.ADD_ROWS, row_gradients.READ_ROWS)
def _store_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Each row of the store has a row axis in front."""
    if rows.extent is None:
        unknown = f"{node.name} keeps rows in a store, and how many of them is not known before the run"
        raise CannotLift(f"{unknown}: say it by af.reshape, as in af.jacobian(af.reshape(y, (2, 3)), x)")
    grads, *given, first, second = inputs
    at = 1 if node.attrs["is_range"] else second.rank
    attrs = {**node.attrs, "row": Spec(node.attrs["row"].dtype, rows.shape(node.attrs["row"].shape))}
    values = [moveaxis(rows.spread(x), 0, at) for x in given]
    (found,) = apply(node.op, rows.spread(grads), *values, *fixed(node, [first, second], "numbers"), **attrs)
    return [found if node.op is row_gradients.ADD_ROWS else moveaxis(found, at, 0)]
