"""Loops over rows. Rows that go on are kept side by side, so that an iteration costs what its live rows cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.control.cond import cond
from asyncflow.control.stores.tensor_array import TensorArray
from asyncflow.control.while_loop import while_loop
from asyncflow.graph.building.build import constant
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.graph.values.shapes import is_static, relax
from asyncflow.lift.control.branches import some_rows, split_rows, taken
from asyncflow.lift.control.flow import decided_by_row, variables_with_rows
from asyncflow.lift.control.parted import parting
from asyncflow.ops.arithmetic.elementwise import SUBTRACT, add, minimum, subtract
from asyncflow.ops.arithmetic.logic import GREATER, equal, greater, greater_equal, logical_and, logical_or
from asyncflow.ops.arrays.creation import arange, zeros
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.arrays.shape import size
from asyncflow.ops.derivatives.shapes import ensure_shape
from asyncflow.ops.indexing.indexing import gather, scatter_update
from asyncflow.ops.reductions.statistical import max as max_of
from asyncflow.ops.reductions.utility import all as all_of
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, is_saved
from asyncflow.ops.searching.sorting import argsort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.ir import Tensor
    from asyncflow.lift.lifting import Lifting
    from asyncflow.values import Nest


def lift_while(lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
    """A loop for all rows."""
    has_rows = [value.has_rows for value in inputs]
    flags = variables_with_rows(node, has_rows)
    if decided_by_row(node, flags, has_rows):
        note = parting(node, inputs, lifting.rows)
        given = lifting, node, inputs, flags
        outputs = _back(*given) if _goes_back(node, inputs) else _RowsLoop(*given).build()
        note(outputs)
        return outputs
    return _together(lifting, node, inputs, flags)


def _together(lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue], flags: list[bool]) -> list[LiftedValue]:
    """A loop that all rows leave in the same iteration."""
    captures = inputs[node.n_vars :]
    inner = lifting.over(lifting.rows.inside())

    def lifted(values: Sequence[Tensor]) -> list[LiftedValue]:
        return [*(LiftedValue(x, rows) for x, rows in zip(values, flags, strict=True)), *captures]

    def sized(x: Tensor, rows: bool) -> Tensor:
        # A value reshaped to a computed shape no longer shows the known number of rows.
        return ensure_shape(x, lifting.rows.shape(x.shape[1:])) if rows and x.shape else x

    returned = while_loop(
        lambda *values: inner.results(node.predicate, lifted(values))[0].tensor,
        lambda *values: tuple(map(sized, inner.spread(inner.results(node.body, lifted(values)), flags), flags)),
        tuple(lifting.spread(inputs[: node.n_vars], flags)),
        shape_invariants=tuple(
            lifting.rows.shape(relax(x.shape, first.shape)) if rows and x.dtype != VARIANT else x.shape
            for x, first, rows in zip(node.body.inputs[: node.n_vars], inputs, flags, strict=False)
        ),
        parallel_iterations=node.parallel_iterations,
        name="while",
    )
    return [LiftedValue(x, rows) for x, rows in zip(returned, flags, strict=True)]


def _goes_back(node: WhileNode, inputs: Sequence[LiftedValue]) -> bool:
    """Return True if a loop counts down from a number of each row, and reads the values that the row saved in
    another loop.
    """
    end, step, count = node.predicate.results[0].node, node.body.results[0].node, inputs[0]
    return (
        count.has_rows
        and any(x.has_rows and x.tensor.dtype == VARIANT for x in inputs[node.n_vars :])
        and end.op is GREATER
        and step.op is SUBTRACT
        and end.inputs[0] is node.predicate.inputs[0]
        and step.inputs[0] is node.body.inputs[0]
        and all(is_constant(x) and x.node.attrs["value"] == y for x, y in ((end.inputs[1], 0), (step.inputs[1], 1)))
    )


def _back(lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue], flags: Sequence[bool]) -> list[LiftedValue]:
    """A loop that goes back through the iterations of another, from the last of the row that had most.

    In each it works on the rows that the other had then, in their order, and leaves the others as they are.
    """
    if any(_counts_iterations(part) for part in node.subgraphs):
        raise CannotLift(f"{node.name} draws random numbers, in iterations of each row's own")
    stores = {x for x in node.body.inputs[node.n_vars :] if x.dtype == VARIANT}
    if any(not stores.isdisjoint(each.inputs) for each in node.body.nodes if isinstance(each, StructuredNode)):
        raise CannotLift(f"{node.name} is left by each row for itself, and hands a store on to its inner nodes")
    rows, counts, captures = lifting.rows, inputs[0].tensor, inputs[node.n_vars :]

    def step(left: Tensor, *values: Tensor) -> Nest:
        places, _ = split_rows(greater_equal(counts, left))
        inner = lifting.over(some_rows(rows, places).part_of(rows, places).inside())
        own = taken([*(LiftedValue(x, True) for x in values), *captures], places)
        _, *results = inner.results(node.body, [LiftedValue(left, False), *own])
        given = [inner.rows.spread(x) for x in results]
        return (
            subtract(left, 1),
            *(y if y.dtype == VARIANT else scatter_update(x, places, y) for x, y in zip(values, given, strict=True)),
        )

    most = max_of(concat([counts, zeros(1, dtype=counts.dtype)]))
    firsts = lifting.spread(inputs[1 : node.n_vars], flags=[True] * (node.n_vars - 1))
    _, *last = while_loop(
        lambda left, *values: greater(left, 0),
        step,
        (most, *firsts),
        parallel_iterations=node.parallel_iterations,
        name="while",
    )
    return [LiftedValue(x, True) for x in (minimum(counts, 0), *last)]


def _counts_iterations(body: Subgraph, depth: int = 0) -> bool:
    """Return True if something in the body of a loop draws by the loop's iterations; `depth`: loops around it there."""
    for node in body.nodes:
        op = node.op
        is_counted = op.conduct.is_random or node.attrs.get("inside", 0) > depth  # others do not need a context
        if op.conduct.needs_context and is_counted:
            return True
        if any(_counts_iterations(part, depth + isinstance(node, WhileNode)) for part in node.subgraphs):
            return True
    return False


class _RowsLoop:
    """A loop that each row leaves by itself: it carries the values of the rows that go on.

    Beside the loop variables it carries the captures that have rows, and the places of its rows. It also carries the
    arrays of finished rows' outputs, piece by piece.

    An iteration computes the body, and then the predicate of the next iteration. Random numbers depend on the
    iteration. So if the predicate draws any, an iteration computes its own predicate first, and then the body. All rows
    may have left by then, so the body is in a branch.
    """

    def __init__(self, lifting: Lifting, node: WhileNode, inputs: Sequence[LiftedValue], flags: Sequence[bool]) -> None:
        self.lifting = lifting
        self.node = node
        self.inputs = inputs
        specs = [x.spec for x in node.body.inputs[: node.n_vars]]
        for spec in specs:
            if spec.shape is None:
                raise CannotLift(f"{node.name} carries a value whose rank is not known")
        for spec, first in zip(specs, inputs, strict=False):
            if spec.shape != first.shape and is_static(first.shape):
                raise CannotLift(f"{node.name} is left by each row for itself, with values of different shapes")
        stores = [place for place, spec in enumerate(specs) if spec.dtype == VARIANT]
        carried = any(x.has_rows and x.tensor.dtype == VARIANT for x in inputs[node.n_vars :])
        if carried or not all(is_saved(node.inputs[place]) for place in stores):
            raise CannotLift(f"{node.name} is left by each row for itself, and carries a TensorArray")
        # All rows share the stores of saved values: each iteration saves the values of the rows that go on.
        self.flags = [flag or place in stores for place, flag in enumerate(flags)]
        self.left = [place for place in range(node.n_vars) if place not in stores]
        self.carried = [place for place in range(node.n_vars, len(inputs)) if inputs[place].has_rows]
        self.shapes = [spec.shape for spec in specs]
        self.decides_first = any(each.op.conduct.needs_context for each in node.predicate.walk())

    def build(self) -> list[LiftedValue]:
        """Adds the loop; gives its outputs, which have rows."""
        rows, node = self.lifting.rows, self.node
        live = self.lifting.spread(self.inputs[: node.n_vars], self.flags)
        live += [self.inputs[place].tensor for place in self.carried]
        arrays = [TensorArray(live[at].dtype, 0, True, (None, *(self.shapes[at] or ()))) for at in self.left]
        places = arange(rows.count, dtype=int64)
        state: Nest = (constant(0, int64), places, live, TensorArray("int64", 0, True, (None,)), arrays)
        if not self.decides_first:
            state = self._parted(self.lifting, state)
        invariants = [
            (None, *(shape or ())) if has_rows and place in self.left else shape
            for place, (shape, has_rows) in enumerate(zip(self.shapes, self.flags, strict=True))
        ]
        invariants += [(None, *(self.inputs[place].shape or ())) for place in self.carried]
        _, _, last, left_places, arrays = while_loop(
            self._goes_on,
            self._step,
            state,
            shape_invariants=((), (None,), invariants, None, [None] * len(arrays)),
            parallel_iterations=node.parallel_iterations,
            name="while",
        )
        order = argsort(left_places.concat())
        outputs = list(last[: node.n_vars])
        for place, array in zip(self.left, arrays, strict=True):
            outputs[place] = ensure_shape(gather(array.concat(), order), rows.shape(self.shapes[place]))
        return [LiftedValue(x, True) for x in outputs]

    def _goes_on(self, pieces: Tensor, places: Tensor, *others: Nest) -> Tensor:
        some = greater(size(places), 0)
        # Each array needs a piece to join, even if there are no rows at all.
        return logical_or(some, equal(pieces, 0)) if self.decides_first else some

    def _step(self, *state: Nest) -> Nest:
        if not self.decides_first:
            inner, state = self._stepped(state)
            return self._parted(inner, state, may_stay=True)
        state = self._parted(self._inside(state[1]), state, may_stay=greater(state[0], 0))
        return cond(greater(size(state[1]), 0), lambda: self._stepped(state)[1], lambda: state, name="rows")

    def _inside(self, places: Tensor) -> Lifting:
        return self.lifting.over(some_rows(self.lifting.rows, places).inside())

    def _stepped(self, state: Nest) -> tuple[Lifting, Nest]:
        """Return the state after the body, and the lifting over its rows."""
        pieces, places, live, left_places, arrays = state
        inner = self._inside(places)
        results = inner.spread(inner.results(self.node.body, self._values(live)), self.flags)
        return inner, (pieces, places, [*results, *live[len(results) :]], left_places, arrays)

    def _values(self, live: Sequence[Tensor]) -> list[LiftedValue]:
        """The inputs of the bodies, for the rows that go on."""
        n_vars = self.node.n_vars
        variables = [LiftedValue(x, rows) for x, rows in zip(live[:n_vars], self.flags, strict=True)]
        captures = dict(zip(self.carried, live[n_vars:], strict=True))
        return variables + [
            LiftedValue(captures[place], True) if place in captures else value
            for place, value in enumerate(self.inputs[n_vars:], start=n_vars)
        ]

    def _parted(self, inner: Lifting, state: Nest, *, may_stay: Tensor | bool = False) -> Nest:
        """Return the state without the rows that leave, whose values are written to the output arrays.

        Args:
            inner: the lifting over the rows.
            state: see `build`.
            may_stay: True if the arrays get no piece where no row leaves, as is most often so.
        """
        pieces, places, live, left_places, arrays = state
        (goes_on,) = inner.results(self.node.predicate, self._values(live))

        def part() -> Nest:
            stay, leave = split_rows(goes_on.tensor)
            leaving = some_rows(inner.rows, leave)
            flags = [*self.flags, *[True] * len(self.carried)]
            values = [LiftedValue(x, rows) for x, rows in zip(live, flags, strict=True)]
            gone = [leaving.spread(x) for x in taken([values[place] for place in self.left], leave)]
            return (
                add(pieces, 1),
                gather(places, stay),
                [x.tensor for x in taken(values, stay)],
                left_places.write(pieces, gather(places, leave)),
                [array.write(pieces, x) for array, x in zip(arrays, gone, strict=True)],
            )

        if may_stay is False:
            return part()
        all_stay = all_of(goes_on.tensor)
        all_stay = all_stay if may_stay is True else logical_and(may_stay, all_stay)
        return cond(all_stay, lambda: state, part, name="leave")
