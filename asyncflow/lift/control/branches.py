"""Branches over rows: each branch runs on the rows that take it, and its results go back to their places."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.control.cond import cond
from asyncflow.graph.building.build import apply
from asyncflow.graph.op import OPAQUE, define, derivative, not_differentiable
from asyncflow.graph.structured import CondNode
from asyncflow.graph.values.dtypes import VARIANT, int64, string
from asyncflow.graph.values.shapes import format_shape, is_compatible, is_static, relax, size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.control.flow import branches_with_rows
from asyncflow.lift.control.parted import parting
from asyncflow.ops.arithmetic.logic import equal, greater, logical_or
from asyncflow.ops.arrays.creation import zeros
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import shape, size
from asyncflow.ops.cost import moving, per_input_element
from asyncflow.ops.derivatives.shapes import ensure_shape
from asyncflow.ops.indexing.indexing import gather
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, is_new, is_saved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.lift.lifting import Lifting
    from asyncflow.values import Array, Kernel, Namespace

# -- ops -------------------------------------------------------------------------------------------------------------

_NUMBERS = Spec(int64, (None,))


def _split_kernel(xp: Namespace) -> Kernel:
    return lambda predicate: (np.flatnonzero(predicate), np.flatnonzero(~predicate))


SPLIT_ROWS = define(
    "split_rows", lambda predicate: (_NUMBERS, _NUMBERS), _split_kernel, flops=per_input_element, runs_on_host=True
)
"""The numbers of the rows for which a predicate holds, and of the others."""
not_differentiable(SPLIT_ROWS, because="the numbers of rows are integers")


def _join_spec(
    count: Spec, places: Spec, values: Spec, others: Spec, rest: Spec, *, extent: int | None, absent: bool
) -> Spec:
    shape = relax(values.shape, rest.shape)
    return Spec(values.dtype, None if shape is None else (extent, *shape[1:]))


def _join_kernel(xp: Namespace, *, extent: int | None, absent: bool) -> Kernel:
    def join(count: Array, places: Array, values: Array, others: Array, rest: Array) -> Array:
        if not len(others):
            return values
        if not len(places):
            return rest
        if absent and values.shape[1:] != rest.shape[1:]:
            joined = xp.zeros((int(count), *map(max, values.shape[1:], rest.shape[1:])), values.dtype)
            there, value = (places, values) if values.size else (others, rest)
            joined[there] = value
            return joined
        if values.shape[1:] != rest.shape[1:]:
            one, other = format_shape(values.shape[1:]), format_shape(rest.shape[1:])
            raise ValueError(
                f"rows that stand side by side need one shape, and branches gave rows of shape {one} and {other}; "
                f"map_fn(lift=False) is a loop over rows"
            )
        joined = xp.empty((int(count), *values.shape[1:]), values.dtype)
        joined[places], joined[others] = values, rest
        return joined

    return join


JOIN_ROWS = define("join_rows", _join_spec, _join_kernel, host_inputs=(0,), flops=moving, traits=OPAQUE)
"""Op that joins rows of two places in the order of their numbers; with `absent`, the rows of one place have no
value.
"""


@derivative(JOIN_ROWS)
def _join(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, places, values, others, rest = node.inputs
    given: list[Tensor | None] = []
    for at, x in ((places, values), (others, rest)):
        own = x.shape and x.shape[1:]
        if node.attrs["absent"] and size_of(own) == 0:
            given.append(None)
            continue
        rows = gather(grad, at)
        if node.attrs["absent"]:
            # If no row has the value, the differentiated value has an empty shape.
            rows = reshape(rows, (-1, *own) if own and is_static(own) else shape(x))
        given.append(ensure_shape(rows, x.shape))
    return [None, None, given[0], None, given[1]]


def split_rows(predicate: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the rows for which `predicate` holds, and of the others."""
    held, others = apply(SPLIT_ROWS, predicate)
    return held, others


def some_rows(rows: RowAxis, numbers: Tensor) -> RowAxis:
    """Return the axis of the rows with these numbers."""
    some = rows.among(size(numbers), lambda: gather(rows.numbers(), numbers))
    return some if rows.part is None else some.part_of(rows.part[1], gather(rows.part[0], numbers))


def taken(values: Sequence[LiftedValue], numbers: Tensor) -> list[LiftedValue]:
    """Return values of the rows with these numbers only; stores stay as they are."""
    return [
        LiftedValue(gather(x.tensor, numbers), True) if x.has_rows and x.tensor.dtype != VARIANT else x for x in values
    ]


# -- the rule --------------------------------------------------------------------------------------------------------


def lift_cond(lifting: Lifting, node: CondNode, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
    """A branch for all rows. Where each row decides for itself, rows are parted: never both sides for a row."""
    predicate, *captures = inputs
    flags = branches_with_rows(node, [value.has_rows for value in inputs])
    if not predicate.has_rows:
        true, false = (partial(_results, lifting, body, captures, flags) for body in node.subgraphs)
        returned = cond(predicate.tensor, true, false, name="cond")
        return [LiftedValue(x, has_rows) for x, has_rows in zip(returned if flags else (), flags, strict=True)]
    for x, y in zip(inputs, node.inputs, strict=True):
        # Values saved by a loop in a branch are read in the gradient's same branch, for the same rows.
        is_own = isinstance(y.node, CondNode) and y.node.predicate is node.predicate and is_saved(y)
        if x.has_rows and x.tensor.dtype == VARIANT and not is_own:
            raise CannotLift("rows of a TensorArray go different ways through a branch")
    note = parting(node, inputs, lifting.rows)
    places = split_rows(predicate.tensor)
    one_body, other_body = node.subgraphs
    sides = [
        _side(lifting, one_body, other_body, captures, *places),
        _side(lifting, other_body, one_body, captures, places[1]),
    ]
    rows = lifting.rows
    joined: list[Tensor] = []
    saved = node.graph.kept_for_gradients.get(node, {}).values()
    for place, (y, one, other) in enumerate(zip(node.outputs, *sides, strict=True)):
        if y.dtype == VARIANT:
            # A store saved by a loop in one branch; the other branch has an empty one.
            joined.append(other if is_new(one_body.results[place]) else one)
            continue
        # In place of a value that one branch saves for its gradient, the other branch has a dummy.
        absent = any(y is each for each in saved)
        if not absent and not is_compatible(one.shape, other.shape):
            raise CannotLift(f"{node.name} gives rows of {one.spec} and of {other.spec}")
        given = (rows.count, places[0], one, places[1], other)
        joined += apply(JOIN_ROWS, *given, extent=rows.extent, absent=absent)
    outputs = [LiftedValue(x, True) for x in joined]
    note(outputs)
    return outputs


def _results(
    lifting: Lifting, body: Subgraph, captures: Sequence[LiftedValue], flags: Sequence[bool]
) -> list[Tensor] | None:
    return lifting.spread(lifting.results(body, captures), flags) or None


def _side(
    lifting: Lifting,
    body: Subgraph,
    absent: Subgraph,
    captures: Sequence[LiftedValue],
    numbers: Tensor,
    others: Tensor | None = None,
) -> Sequence[Tensor]:
    """The results of a branch for some rows; it does not run if there are none.

    But where only a run tells the shape of a row, and there are no `others` either, it says of what shape nothing is.
    """
    for result in body.results:
        if result.dtype == VARIANT and not is_saved(result):
            raise CannotLift("rows of a TensorArray go different ways through a branch")
        if result.shape is None:
            raise CannotLift(f"the rank of {result.name}, which a branch gives, is not known")
        if result.dtype == string:
            raise CannotLift("strings go different ways through a branch")
    some = some_rows(lifting.rows, numbers)
    part = lifting.over(some)

    def run() -> list[Tensor]:
        return part.spread(part.results(body, taken(captures, numbers)), [True] * len(body.results))

    def none() -> list[Tensor]:
        return [
            zeros((0, *(extent or 0 for extent in x.shape or ())), dtype=x.dtype)
            if x.dtype != VARIANT
            else apply((x if is_new(x) else y).node.op)[0]
            for x, y in zip(body.results, absent.results, strict=True)
        ]

    runs = greater(some.count, 0)
    if others is not None and any(not is_static(x.shape) for x in body.results):
        runs = logical_or(runs, equal(size(others), 0))
    returned = cond(runs, run, none, name="rows")
    return returned if body.results else []
