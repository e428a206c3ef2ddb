"""Loops over rows. Rows that go on are kept side by side, so that an iteration costs what its live rows cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.control.cond import cond
from asyncflow.control.tensor_array import TensorArray
from asyncflow.control.while_loop import while_loop
from asyncflow.graph.build import constant
from asyncflow.graph.dtypes import VARIANT, int64
from asyncflow.graph.shapes import is_static, relax
from asyncflow.graph.structured import levels
from asyncflow.lift.branches import some_rows, split_rows, taken
from asyncflow.lift.flow import decided_by_row, variables_with_rows
from asyncflow.lift.parted import parting
from asyncflow.ops.creation import arange
from asyncflow.ops.derivatives.shapes import ensure_shape
from asyncflow.ops.elementwise import add
from asyncflow.ops.indexing import gather
from asyncflow.ops.logic import greater
from asyncflow.ops.rows.rule import CannotLift, LiftedValue
from asyncflow.ops.shape import size
from asyncflow.ops.sorting import argsort
from asyncflow.ops.utility import all as all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Tensor
    from asyncflow.graph.structured import WhileNode
    from asyncflow.lift.lifting import Lifting
    from asyncflow.values import Nest


def lift_while(lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
    """A loop for all rows."""
    has_rows = [value.has_rows for value in inputs]
    flags = variables_with_rows(node, has_rows)
    if decided_by_row(node, flags, has_rows):
        note = parting(node, inputs, lifting.rows)
        outputs = _RowsLoop(lifting, node, inputs, flags).build()
        note(outputs)
        return outputs
    return _together(lifting, node, inputs, flags)


def _together(lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue], flags: list[bool]) -> list[LiftedValue]:
    """A loop that all rows leave in the same iteration."""
    captures = inputs[node.n_vars :]
    inner = lifting.over(lifting.rows.inside())

    def lifted(values: Sequence[Tensor]) -> list[LiftedValue]:
        return [*(LiftedValue(x, rows) for x, rows in zip(values, flags, strict=True)), *captures]

    returned = while_loop(
        lambda *values: inner.results(node.predicate, lifted(values))[0].tensor,
        lambda *values: tuple(inner.spread(inner.results(node.body, lifted(values)), flags)),
        tuple(lifting.spread(inputs[: node.n_vars], flags)),
        shape_invariants=tuple(
            lifting.rows.shape(relax(x.shape, first.shape)) if rows and x.dtype != VARIANT else x.shape
            for x, first, rows in zip(node.body.inputs[: node.n_vars], inputs, flags, strict=False)
        ),
        parallel_iterations=node.parallel_iterations,
        name="while",
    )
    return [LiftedValue(x, rows) for x, rows in zip(returned, flags, strict=True)]


class _RowsLoop:
    """A loop that each row leaves for itself: what it carries is for the rows that go on.

    Beside the loop variables it carries the captures that have rows, the places of its rows, and for each output what
    rows left behind, piece by piece.
    """

    def __init__(self, lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue], flags: Sequence[bool]) -> None:
        self.lifting = lifting
        self.node = node
        self.inputs = inputs
        self.flags = list(flags)
        specs = [x.spec for x in node.body.inputs[: node.n_vars]]
        for spec in specs:
            if spec.dtype == VARIANT:
                raise CannotLift(f"{node.name} is left by each row for itself, and carries a TensorArray")
            if spec.shape is None:
                raise CannotLift(f"{node.name} carries a value whose rank is not known")
        for spec, first in zip(specs, inputs, strict=False):
            if spec.shape != first.shape and is_static(first.shape):
                raise CannotLift(f"{node.name} is left by each row for itself, with values of different shapes")
        if any(each.op.is_random for level in levels(node.predicate) for each in level.nodes):
            raise CannotLift(f"{node.name} draws whether it goes on, for each row by itself")
        self.carried = [place for place in range(node.n_vars, len(inputs)) if inputs[place].has_rows]
        self.shapes = [spec.shape for spec in specs]

    def build(self) -> list[LiftedValue]:
        """Adds the loop; gives its outputs, which have rows."""
        rows, node = self.lifting.rows, self.node
        live = self.lifting.spread(self.inputs[: node.n_vars], self.flags)
        live += [self.inputs[place].tensor for place in self.carried]
        arrays = [
            TensorArray(x.dtype, 0, True, (None, *(shape or ()))) for x, shape in zip(live, self.shapes, strict=False)
        ]
        places = arange(rows.count, dtype=int64)
        state = self._parted(
            self.lifting, (constant(0, int64), places, live, TensorArray("int64", 0, True, (None,)), arrays)
        )
        invariants = [
            (None, *(shape or ())) if has_rows else shape
            for shape, has_rows in zip(self.shapes, self.flags, strict=True)
        ]
        invariants += [(None, *(self.inputs[place].shape or ())) for place in self.carried]
        *_, left_places, arrays = while_loop(
            lambda pieces, places, live, left_places, arrays: greater(size(places), 0),
            self._step,
            state,
            shape_invariants=((), (None,), invariants, None, [None] * len(arrays)),
            parallel_iterations=node.parallel_iterations,
            name="while",
        )
        order = argsort(left_places.concat())
        outputs = [
            ensure_shape(gather(array.concat(), order), rows.shape(shape))
            for array, shape in zip(arrays, self.shapes, strict=True)
        ]
        return [LiftedValue(x, True) for x in outputs]

    def _step(self, *state: Nest) -> Nest:
        pieces, places, live, left_places, arrays = state
        inner = self.lifting.over(some_rows(self.lifting.rows, places).inside())
        results = inner.spread(inner.results(self.node.body, self._values(live)), self.flags)
        live = [*results, *live[len(results) :]]
        return self._parted(inner, (pieces, places, live, left_places, arrays), is_step=True)

    def _values(self, live: Sequence[Tensor]) -> list[LiftedValue]:
        """The inputs of the bodies, for the rows that go on."""
        n_vars = self.node.n_vars
        variables = [LiftedValue(x, rows) for x, rows in zip(live[:n_vars], self.flags, strict=True)]
        captures = dict(zip(self.carried, live[n_vars:], strict=True))
        return variables + [
            LiftedValue(captures[place], True) if place in captures else value
            for place, value in enumerate(self.inputs[n_vars:], start=n_vars)
        ]

    def _parted(self, inner: Lifting, state: Nest, *, is_step: bool = False) -> Nest:
        """The state without the rows that leave, which are written to the arrays of what is left behind."""
        pieces, places, live, left_places, arrays = state
        (goes_on,) = inner.results(self.node.predicate, self._values(live))

        def part() -> Nest:
            stay, leave = split_rows(goes_on.tensor)
            leaving = some_rows(inner.rows, leave)
            flags = [*self.flags, *[True] * len(self.carried)]
            values = [LiftedValue(x, rows) for x, rows in zip(live, flags, strict=True)]
            gone = [leaving.spread(x) for x in taken(values[: len(arrays)], leave)]
            return (
                add(pieces, 1),
                gather(places, stay),
                [x.tensor for x in taken(values, stay)],
                left_places.write(pieces, gather(places, leave)),
                [array.write(pieces, x) for array, x in zip(arrays, gone, strict=True)],
            )

        # Most often no row leaves; but each array needs a piece, to be joined.
        return cond(all_of(goes_on.tensor), lambda: state, part, name="leave") if is_step else part()
