"""The derivative of an op that is called row by row: the derivative of the op itself, lifted."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.errors import GraphError
from asyncflow.graph.building.build import graph_for
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, derivative_of, not_differentiable, why_not_differentiable
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.lifting import lift
from asyncflow.ops.arrays.known_values import empty_body
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.reductions.statistical import sum as sum_of
from asyncflow.ops.rows.by_row import BY_ROW_DRAWN, BY_ROW_OPS, op_of
from asyncflow.ops.rows.rule import CannotLift, LiftedValue

not_differentiable(BY_ROW_DRAWN, because="nothing flows back through random draws")


@derivative(*BY_ROW_OPS)
def _by_row(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    op, (numbers, *inputs) = op_of(node), node.inputs
    rule = derivative_of(op)
    if rule is None:
        if why_not_differentiable(op) is None:
            raise GraphError(f"{op.name} has no derivative, and a gradient is asked for that flows through {node.name}")
        return [None] * len(node.inputs)
    graph = graph_for()
    label = graph.unique_name("row")
    body = Subgraph(graph, label)
    has_rows: Sequence[bool] = node.attrs["has_rows"]
    known: dict[Tensor, LiftedValue] = {}

    def of_row(x: Tensor, rows: bool) -> Tensor:
        return body.add_input(Spec(x.dtype, x.shape if not rows or x.shape is None else x.shape[1:]), "row")

    with body:
        given = [of_row(x, rows) for x, rows in zip(inputs, has_rows, strict=True)]
        specs = tuple(Spec(y.dtype, y.shape and y.shape[1:]) for y in node.outputs)
        one = body.add_node(op, given, node.attrs["arguments"], specs[0] if node.attrs["single"] else specs)
        arrived = [None if grad is None else of_row(grad, True) for grad in grads]
        found = rule(one, *arrived)
    known.update((row, LiftedValue(x, rows)) for row, x, rows in zip(given, inputs, has_rows, strict=True))
    known.update((row, LiftedValue(y, True)) for row, y in zip(one.outputs, node.outputs, strict=True))
    for row, grad in zip(arrived, grads, strict=True):
        if row is not None and grad is not None:
            known[row] = LiftedValue(grad, True)
    try:
        whole = iter(lift(body, known, [x for x in found if x is not None], shape(numbers)[0], label))
    except CannotLift as reason:
        raise GraphError(f"the derivative of {op.name} cannot be computed for several rows at once: {reason}") from None
    empty_body(body)
    each = [None if x is None else next(whole) for x in found]
    return [
        None,
        *(x if x is None or rows else sum_of(x, axis=0, dtype=x.dtype) for x, rows in zip(each, has_rows, strict=True)),
    ]
