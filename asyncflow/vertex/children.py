"""The children of a set of vertices: none of them, by slot, or any number reduced to one (`Vertex.gather_all`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np

from asyncflow.control.stores.row_store import RowStore
from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import apply, as_tensor, constant, is_symbolic
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import NEW, NEW_UNCAPTURED, define, derivative
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import bool_, dtype_name, int64, summed_in
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.lifting import Lifting
from asyncflow.ops.arithmetic.elementwise import divide, maximum, multiply, subtract
from asyncflow.ops.arithmetic.logic import equal
from asyncflow.ops.arrays.creation import arange, zeros
from asyncflow.ops.arrays.datatypes import astype, broadcast_to, in_dtype
from asyncflow.ops.arrays.manipulation import concat, expand_dims, reshape
from asyncflow.ops.arrays.shape import size
from asyncflow.ops.cost import moving, per_input_element
from asyncflow.ops.derivatives.shapes import ensure_shape
from asyncflow.ops.indexing.add_at import add_at
from asyncflow.ops.indexing.indexing import gather, take
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, no_row_rule, row_rule
from asyncflow.values import Array, Kernel, Namespace, Nest
from asyncflow.vertex.function import REDUCE_CHILDREN, TracedFunction, VertexFunction


class Children(Protocol):
    """The children of a set of vertices."""

    def known(self, traced: TracedFunction) -> dict[Tensor, LiftedValue]:
        """The values of a traced function that are known of them."""


def initial_state(initial: Nest, function: VertexFunction) -> list[LiftedValue]:
    """Return the state of an absent child; values that are given as the number 0 are known to be zero."""
    leaves, structure = nest.flatten(initial)
    if structure.kind is None and len(function.specs) > 1:
        leaves = leaves * len(function.specs)
    elif structure.kind is not None:
        rule = f"vertex_map: initial is no nest like the state of {function}"
        leaves = nest.match(function.structure, initial, rule)
    found = []
    for path, leaf, spec in zip(function.structure.paths("initial"), leaves, function.specs, strict=True):
        if spec.dtype == bool_ and type(leaf) is int and leaf == 0:
            leaf = False  # 0, the default for all parts of a state
        x = as_tensor(leaf) if is_symbolic(leaf) else as_tensor(leaf, spec.dtype)
        if x.dtype != spec.dtype:
            raise DTypeError(f"vertex_map: {path} is {dtype_name(x.dtype)}, and the state of {function} {spec}")
        try:
            state = broadcast_to(x, spec.shape)
        except ShapeError:
            raise ShapeError(f"vertex_map: {path} is {x.spec}, and the state of {function} {spec}") from None
        # A constant tensor does not count as 0, as a run can feed another value.
        found.append(LiftedValue(state, has_rows=False, is_zero=not is_symbolic(leaf) and not np.any(leaf)))
    return found


class NoChildren:
    """No children: the gathered state is the same for all vertices."""

    def __init__(self, initial: Sequence[LiftedValue]) -> None:
        self.initial = initial

    def known(self, traced: TracedFunction) -> dict[Tensor, LiftedValue]:
        """See `Children.known`."""
        found = {
            inner: outer
            for tensors in traced.gathers.values()
            for inner, outer in zip(tensors, self.initial, strict=True)
        }
        for (part, slots), inner in traced.side_by_side.items():
            state = self.initial[part]
            found[inner] = state._replace(tensor=concat([state.tensor] * len(slots)))
        for node in traced.body.nodes:
            if node.op is REDUCE_CHILDREN:
                found.update(
                    (x, LiftedValue(zeros(_static(x), dtype=x.dtype), has_rows=False, is_zero=True))
                    for x in node.outputs
                )
        found.update((x, LiftedValue(constant(True), has_rows=False)) for x in traced.is_leaf)
        return found


class SlottedChildren:
    """Children told apart by number; `table` has a row of ranks for each vertex."""

    def __init__(self, states: Sequence[RowStore], table: Tensor) -> None:
        self.states = states
        self.table = table

    def known(self, traced: TracedFunction) -> dict[Tensor, LiftedValue]:
        """See `Children.known`."""
        slots = [(self.table[:, child], tensors) for child, tensors in traced.gathers.items()]
        found = {
            x: store.take(ranks) for ranks, tensors in slots for x, store in zip(tensors, self.states, strict=True)
        }
        for (part, children), x in traced.side_by_side.items():
            store, (width,) = self.states[part], _static(x)
            # For all slots in order, the usual case for binary trees, take the table unchanged.
            is_whole = self.table.shape is not None and children == tuple(range(self.table.shape[1] or 0))
            ranks = self.table if is_whole else take(self.table, list(children), axis=1)
            found[x] = reshape(store.take(ranks), (-1, width))
        return {x: LiftedValue(rows, has_rows=True) for x, rows in found.items()}


class TakenChildren:
    """Children told apart by number, with their states at hand: of each part ``[vertices, children, ...]``."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self.states = states

    def known(self, traced: TracedFunction) -> dict[Tensor, LiftedValue]:
        """See `Children.known`."""
        slots = traced.gathers.items()
        found = {x: rows[:, child] for child, inner in slots for x, rows in zip(inner, self.states, strict=True)}
        for (part, children), x in traced.side_by_side.items():
            found[x] = reshape(take(self.states[part], list(children), axis=1), (-1, *_static(x)))
        return {x: LiftedValue(rows, has_rows=True) for x, rows in found.items()}


@dataclass(frozen=True, slots=True)
class AllChildren:
    """Children of vertices with any number of them, one after the other.

    Attributes:
        states: of all vertices so far.
        ranks: of the children.
        owners: for each the row of its vertex.
        starts: where the children of each vertex begin, and where the last ones end.
        taken: the children's own states, once they have been read.
    """

    states: Sequence[RowStore]
    ranks: Tensor
    owners: Tensor
    starts: Tensor
    taken: list[Tensor] = field(default_factory=list)

    def known(self, traced: TracedFunction) -> dict[Tensor, LiftedValue]:
        """See `Children.known`."""
        return {}

    def rows(self) -> list[Tensor]:
        """The states of the children, a row for each: the same for all that read them, as their gradients add up."""
        if not self.taken:
            self.taken.extend(store.take(self.ranks) for store in self.states)
        return self.taken

    def spread(self, x: Tensor) -> Tensor:
        """Return, for each child, the row of its vertex."""
        return apply(SPREAD_SEGMENTS, x, self.starts, self.owners)[0]


class VertexAxis(RowAxis):
    """The vertices of a set as rows; `children` are theirs."""

    def __init__(
        self, count: Tensor, numbers: Callable[[], Tensor], children: Children, *, in_loop: bool, label: str
    ) -> None:
        super().__init__(count, None, numbers, own_loops=int(in_loop), label=label)
        self.children = children


@row_rule(REDUCE_CHILDREN)
def _reduce(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    if not isinstance(rows, VertexAxis) or not isinstance(rows.children, AllChildren):
        raise CannotLift(f"{node.name} reads all children in a branch or loop")
    children = rows.children
    edges = RowAxis(
        size(children.owners),
        None,
        lambda: _edge_numbers(rows, children),
        own_loops=rows.own_loops,
        label=f"{rows.label[:-1]}/child)",
    )
    each: Subgraph = node.attrs["each"]
    # The reduced function is lifted over edges: a row for each child, and the vertex's own values spread to them.
    states = [LiftedValue(x, has_rows=True) for x in children.rows()]
    given = [LiftedValue(children.spread(x.tensor), True) if x.has_rows else x for x in inputs]
    if "keyed" in node.attrs:  # in shared work, a child's key is its vertex's key and the child's place
        place = len(inputs) - len(node.attrs["reads"]) - 1
        keys = [given[place].tensor, expand_dims(_places(children), axis=1)]
        given[place] = LiftedValue(concat(keys, axis=1), True)
    known = dict(zip([*each.inputs, *node.attrs["reads"]], [*states, *given], strict=True))
    found = Lifting(edges, f"{node.name}/each").values(each, known, each.results)
    return [_reduced(edges.spread(x), children, node.attrs["reduce"]) for x in found]


def _edge_numbers(rows: VertexAxis, children: AllChildren) -> Tensor:
    """Return for each child the number of its vertex, and its place among the vertex's children."""
    own = gather(rows.numbers(), children.owners)
    return concat([own, expand_dims(_places(children), axis=1)], axis=1)


def _places(children: AllChildren) -> Tensor:
    """Return for each child its place among the children of its vertex."""
    return subtract(arange(size(children.owners), dtype=int64), gather(children.starts, children.owners))


def _static(x: Tensor) -> tuple[int, ...]:
    if x.shape is None or None in x.shape:
        raise CannotLift(f"{x.name} {x.spec}, which all children give, is of a shape that is not known in full")
    return tuple(extent or 0 for extent in x.shape)


def _reduced(x: Tensor, children: AllChildren, reduce: str) -> Tensor:
    """Rows of children, reduced to one for each vertex; zeros where there are no children."""
    if reduce == "mean":
        # Use the wide dtype to the end: a float16 sum could overflow although the mean does not.
        count = children.starts[1:] - children.starts[:-1]
        total = _reduced(in_dtype(x, summed_in(x.dtype)), children, "sum")
        each = reshape(astype(maximum(count, 1), total.dtype), (-1, *(1,) * ((x.ndim or 1) - 1)))
        return in_dtype(divide(total, each), x.dtype)
    return reduced_segments(x, children.starts, children.owners, reduce=reduce)


# -- segments --------------------------------------------------------------------------------------------------------


def _segments_spec(x: Spec, starts: Spec, owners: Spec, *, reduce: str) -> Spec:
    ends = starts.shape[0] if starts.shape else None
    return Spec(x.dtype, None if x.shape is None else (None if ends is None else ends - 1, *x.shape[1:]))


def _segments_kernel(xp: Namespace, *, reduce: str) -> Kernel:
    operation: np.ufunc = np.add if reduce == "sum" else np.maximum

    def on_host(x: Array, starts: Array, owners: Array) -> Array:
        dtype = x.dtype
        wide = summed_in(dtype)
        if reduce == "sum" and wide is not dtype:
            return on_host(x.astype(wide), starts, owners).astype(dtype)
        if len(x) >= _MANY:
            return _in_turns(operation, x, starts)
        reduced = np.zeros((len(starts) - 1, *x.shape[1:]), x.dtype)
        # `reduceat` returns the next row for an empty segment, so only segments with rows are passed.
        filled = np.flatnonzero(starts[1:] > starts[:-1])
        if len(filled) == len(reduced):
            operation.reduceat(x, starts[:-1], axis=0, out=reduced)
        elif len(filled):
            reduced[filled] = operation.reduceat(x, starts[filled], axis=0)
        return reduced

    def elsewhere(x: Array, starts: Array, owners: Array) -> Array:
        reduced = xp.zeros((len(starts) - 1, *x.shape[1:]), x.dtype)
        if reduce == "sum":
            add_at(xp, reduced, owners, x)
            return reduced
        # Process first children, then second ones, and so on: each turn has at most one child of a vertex.
        turns = np.arange(len(x)) - starts[np.repeat(np.arange(len(starts) - 1), np.diff(starts))]
        for turn in range(int(turns.max(initial=-1)) + 1):
            chosen = xp.asarray(np.flatnonzero(turns == turn))
            places = owners[chosen]
            reduced[places] = x[chosen] if turn == 0 else xp.maximum(reduced[places], x[chosen])
        return reduced

    return on_host if xp is np else elsewhere


_MANY: Final = 64
"""Rows from which on `reduceat`, which goes down each column of each segment by itself, is slower than whole rows."""
_FEW: Final = 2
"""Number of remaining segments that are reduced one by one."""


def _in_turns(operation: np.ufunc, x: Array, starts: Array) -> Array:
    """Reduce segments turn by turn: all first rows, with all second rows, and so on; the longest segments stand in
    front.
    """
    counts = starts[1:] - starts[:-1]
    order = (-counts).argsort(kind="stable")
    first, counts = starts[:-1].take(order), counts.take(order)
    # In each turn, how many segments have a row.
    filled, *lefts = (len(counts) - counts[::-1].searchsorted(np.arange(counts[0]), side="right")).tolist()
    found = x.take(first[:filled], axis=0)
    for turn, left in enumerate(lefts, 1):
        if left <= _FEW:
            for segment, (row, count) in enumerate(zip(first[:left].tolist(), counts[:left].tolist(), strict=True)):
                found[segment] = operation(found[segment], operation.reduce(x[row + turn : row + count], axis=0))
            break
        operation(found[:left], x.take(first[:left] + turn, axis=0), out=found[:left])
    new = np.empty if filled == len(counts) else np.zeros
    reduced = new((len(counts), *x.shape[1:]), x.dtype)
    reduced[order[:filled]] = found
    return reduced


REDUCE_SEGMENTS = define(
    "reduce_segments",
    _segments_spec,
    _segments_kernel,
    host_inputs=(1,),
    flops=per_input_element,
    traits=NEW_UNCAPTURED,
)
"""The sum or the largest of each of several rows that stand side by side; zeros for none."""
SUM_SEGMENTS = define(
    "sum_segments",
    partial(_segments_spec, reduce="sum"),
    partial(_segments_kernel, reduce="sum"),
    host_inputs=(1,),
    flops=per_input_element,
    traits=NEW,
)
"""The same for sums alone, which a card makes without further copies from the host."""
no_row_rule(REDUCE_SEGMENTS, SUM_SEGMENTS, because="it takes the children of a whole batch at once")


def reduced_segments(x: Tensor, *segments: Tensor, reduce: str) -> Tensor:
    """Return the sum or the largest of the rows of each segment, given where they begin, and the segment of each."""
    if reduce == "sum":
        return apply(SUM_SEGMENTS, x, *segments)[0]
    return apply(REDUCE_SEGMENTS, x, *segments, reduce=reduce)[0]


SPREAD_SEGMENTS = define(
    "spread_segments",
    lambda x, starts, owners: Spec(x.dtype, None if x.shape is None else ((owners.shape or (None,))[0], *x.shape[1:])),
    lambda xp: lambda x, starts, owners: xp.take(x, owners, axis=0),
    host_inputs=(1,),
    flops=moving,
    traits=NEW,
)
"""The row of its segment for each row of several: the transpose of their sum."""
no_row_rule(SPREAD_SEGMENTS, because="it gives to the children of a whole batch at once")


@derivative(REDUCE_SEGMENTS, SUM_SEGMENTS)
def _segments(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *segments = node.inputs
    if node.op is SUM_SEGMENTS or node.attrs["reduce"] == "sum":
        return [apply(SPREAD_SEGMENTS, grad, *segments)[0], None, None]
    # Children that tie for the maximum share the gradient, so that their sum is one gradient.
    is_largest = astype(equal(x, apply(SPREAD_SEGMENTS, node.outputs[0], *segments)[0]), x.dtype)
    ties = reduced_segments(is_largest, *segments, reduce="sum")
    spread = apply(SPREAD_SEGMENTS, divide(grad, maximum(ties, 1.0)), *segments)[0]
    return [multiply(spread, is_largest), None, None]


@derivative(SPREAD_SEGMENTS)
def _spread(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *segments = node.inputs
    return [ensure_shape(apply(SUM_SEGMENTS, grad, *segments)[0], x.shape), None, None]
