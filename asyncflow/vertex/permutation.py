"""Rows in another order, by numbers whose inverse is known: their gradient is a gather, too, and scatters nothing."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import NEW, define, derivative
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import moving
from asyncflow.ops.indexing.indexing import take
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, row_rule


def _permute_spec(x: Spec, places: Spec, inverse: Spec) -> Spec:
    rows = (places.shape or (None,))[0]
    return x if x.shape is None or rows is None else Spec(x.dtype, (rows, *x.shape[1:]))


PERMUTE_ROWS = define(
    "permute_rows",
    _permute_spec,
    lambda xp: lambda x, places, inverse: xp.take(x, places, axis=0),
    flops=moving,
    traits=NEW,
)


def permuted(x: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
    """The rows of `x` at `places`, each of which is named once: row ``inverse[k]`` of the result is row `k`."""
    return apply(PERMUTE_ROWS, x, places, inverse)[0]


@derivative(PERMUTE_ROWS)
def _permute(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, places, inverse = node.inputs
    return [permuted(grad, inverse, places), None, None]


@row_rule(PERMUTE_ROWS)
def _permute_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    x, places, inverse = inputs
    if places.has_rows or inverse.has_rows:
        raise CannotLift(f"{node.name} brings rows of each row into an order of its own")
    return [take(x.tensor, places.tensor, axis=1)]
