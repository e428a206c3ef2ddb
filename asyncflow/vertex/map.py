"""`vertex_map`: vertex functions over the vertices of input graphs, many at once (Cavs §3).

It has no executor of its own: it builds eager operations over all vertices, a loop over sets of vertices whose children
are done, and lazy operations over all vertices. States stand in row stores in execution order, behind a row 0 for
missing children. So a set's states are appended, and read by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from asyncflow.autodiff.stores.row_gradients import append_of_known_size
from asyncflow.control.case import switch_case
from asyncflow.control.cond import cond
from asyncflow.control.stores.row_store import RowStore
from asyncflow.control.while_loop import while_loop
from asyncflow.errors import GraphError, brief, warn_user
from asyncflow.graph.building.build import TensorLike, as_tensor, constant, graph_for, identity
from asyncflow.graph.building.scopes import control_dependencies, name_scope
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.calls.batched import why_not_shareable
from asyncflow.lift.lifting import Lifting
from asyncflow.ops.arithmetic.elementwise import add, minimum, multiply, subtract
from asyncflow.ops.arithmetic.logic import equal, less
from asyncflow.ops.arrays.creation import arange, zeros
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import concat, expand_dims, stack
from asyncflow.ops.arrays.shape import size
from asyncflow.ops.axes import check_flag, static_int
from asyncflow.ops.indexing.indexing import gather, scatter_update
from asyncflow.ops.reductions.statistical import cumulative_sum
from asyncflow.ops.reductions.utility import all as all_of
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis
from asyncflow.ops.searching.searching import nonzero, searchsorted
from asyncflow.ops.user.step_policy import StepPolicy
from asyncflow.values import Nest
from asyncflow.vertex.children import AllChildren, Children, NoChildren, SlottedChildren, VertexAxis, initial_state
from asyncflow.vertex.function import TracedFunction, VertexFunction
from asyncflow.vertex.permutation import permuted
from asyncflow.vertex.schedule import BY_NUMBER, VertexSchedule, check_order, schedules
from asyncflow.vertex.shared import SharedSets, add_shared_sets
from asyncflow.vertex.side_by_side import join_products
from asyncflow.vertex.split import FunctionParts, explained, split
from asyncflow.vertex.structure.input_graph import InputGraph


class VertexResults(NamedTuple):
    """Results of vertices: `vertex_map` gives them."""

    pushes: dict[str, Tensor]
    """Pushed values, by name: a row for each vertex, in the order of their numbers."""
    roots: Nest
    """The states of the roots, in the order of their numbers; a nest like a state, of rows."""


def vertex_map(
    function: VertexFunction | Mapping[str, VertexFunction],
    graph: InputGraph,
    pulls: Mapping[str, TensorLike] | TensorLike | None = None,
    *,
    initial: Nest = 0,
    policy: str | StepPolicy = "breadth_first",
    lift_parts: bool = True,
    streams: int = 1,
    share: bool = False,
    name: str | None = None,
) -> VertexResults:
    """Run a vertex function over all vertices of a batch of graphs, set by set: children before their parents.

    All vertices of a set are computed at once, whatever graphs they are of. Work that does not depend on children is
    computed once for all vertices before the sets, and work that no state needs once after them. Results do not depend
    on the policy, nor, but for rounding, on what else is in the batch.

    Args:
        function: what each vertex computes. With a mapping, vertices of type 0 compute the first function, vertices of
            type 1 the second, and so on; their states are alike.
        graph: the structure of the batch: data, or tensors that are fed.
        pulls: what vertices pull, by name: a row for each vertex, in the order of their numbers. A single tensor goes
            by the name "x".
        initial: the state of a child that is not there: a nest like a state, or one number for all of it. If it is the
            number 0, its products are left out of the first set, infinities included.
        policy: the order of the vertices: "breadth_first", "depth" or "agenda"; the last is for several types. With
            `share` it is always the first, and another one is a UserWarning. A function decides when runs that wait
            join the next step of a shared map, and how many (`StepPolicy`).
        lift_parts: whether eager and lazy operations leave the loop; False keeps all of it in the loop, which computes
            the same with less memory and more time.
        streams: into how many parts of about as many vertices the batch is cut, between samples. Each part has a loop
            of its own, so that they overlap on a device with equally many compute streams
            (``Session(compute_streams=2)``), or on several devices. It pays for large products, on a CPU with a core
            for each; one thread launches for a card, which loses by it.
        share: True computes sets of this run together with sets of other runs of the session, such as set 7 of one and
            set 0 of another. It is meant for many requests of one graph or a few each. It takes one function and one
            stream, and no gradient goes through it.
        name: what names of its nodes begin with.

    Raises:
        GraphError: a function does not scatter, or pulls a name that is not given; or, as it awaits or changes a
            variable, it cannot be computed for several vertices at once; the message names it and its line.
        DTypeError, ShapeError: a scattered state, or `initial`, does not fit the declared state.
        GraphError: (in the run, as the cause of a KernelError) the graph has a cycle, too many children, or a type that
            there is not; the message names sample and vertex.
    """
    functions = _functions_of(function)
    if not isinstance(graph, InputGraph):
        raise GraphError(f"vertex_map runs over the vertices of an af.InputGraph; got {brief(graph)}")
    given: Mapping[str, TensorLike] = {}
    if pulls is not None:
        given = pulls if isinstance(pulls, Mapping) else {"x": pulls}
    if static_int(streams, "vertex_map(streams): streams") < 1:
        raise GraphError(f"vertex_map(streams): streams is the number of parts of the batch, 1 or more; got {streams}")
    check_flag(lift_parts, "vertex_map(lift_parts): lift_parts")
    check_flag(share, "vertex_map(share): share")
    if share and (streams != 1 or len(functions) != 1):
        raise GraphError("vertex_map(share=True) takes one function, and streams=1")
    order, steps = _order_and_steps(policy, share=share)
    with graph_for(*given.values(), graph.offsets), name_scope("vertex_map" if name is None else name) as scope:
        tensors = {key: as_tensor(value) for key, value in given.items()}
        label = scope.rstrip("/")
        try:
            arity, state = _arity(functions), initial_state(initial, functions[0])
            if len(functions) > 1 and graph.types is None:
                wanted = f"vertex_map of {len(functions)} functions needs a graph with types"
                raise GraphError(f"{wanted}; this one has none")
            plans = schedules(graph, order, tensors, arity=arity, n_types=len(functions), parts=streams)
            parts = label, functions[0], graph, tensors, state
            # Rows of a part are some of all rows; only the whole batch is a permutation, whose gradient is its inverse.
            maps = [_VertexMap(*parts, plan, share, streams == 1 and not share, steps) for plan in plans]
            traced = [_traced(each, tensors, lift_parts=lift_parts, share=share) for each in functions]
            return _joined([mapping.build(mapping.kinds(functions, traced)) for mapping in maps])
        except CannotLift as reason:
            raise GraphError(f"vertex_map computes many vertices at once, but {reason}") from None


def _functions_of(function: VertexFunction | Mapping[str, VertexFunction]) -> list[VertexFunction]:
    """Return the functions by type; raise `GraphError` unless there is one, and all are vertex functions."""
    functions = list(function.values()) if isinstance(function, Mapping) else [function]
    for each in functions:
        if not isinstance(each, VertexFunction):
            raise GraphError(f"vertex_map takes what @af.vertex_function gives; got {each!r}")
    if not functions:
        raise GraphError("vertex_map takes what @af.vertex_function gives; got no function")
    return functions


def _order_and_steps(policy: str | StepPolicy, *, share: bool) -> tuple[str, StepPolicy | None]:
    """Return the order of the vertices, and the user's decision when runs join, from `policy`, which gives either."""
    if not isinstance(policy, str) and callable(policy):
        if not share:
            raise GraphError("vertex_map(policy=) takes a function with share=True; without it vertices are of one run")
        return BY_NUMBER, policy
    # Refuse a misspelt order with share=True, too, although orders have no effect there.
    order = check_order(policy)
    if not share:
        return order, None
    if order != "breadth_first":
        warn_user(
            f"vertex_map(share=True) computes each vertex as soon as its children are: policy={policy!r} has no "
            "effect; leave it out, or pass share=False"
        )
    return BY_NUMBER, None


def _traced(
    function: VertexFunction, pulls: Mapping[str, Tensor], *, lift_parts: bool, share: bool
) -> tuple[TracedFunction, FunctionParts]:
    """A function as a body over one vertex, and its parts."""
    graph = graph_for()
    specs = {key: Spec(x.dtype, x.shape and x.shape[1:]) for key, x in pulls.items()}
    traced = function.trace(graph, graph.unique_name(function.name), specs)
    if lift_parts:
        join_products(traced)
    # Sharing the whole vertex with other runs gains most, but effects belong to single runs.
    is_all_shared = share and why_not_shareable(traced.body.walk()) is None
    return traced, split(traced, all_in_core=not lift_parts or is_all_shared)


def _joined(parts: Sequence[VertexResults]) -> VertexResults:
    """The results of the parts of a batch, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    pushes = {name: concat([part.pushes[name] for part in parts]) for name in parts[0].pushes}
    states = [nest.flatten(part.roots) for part in parts]
    roots = [concat(rows) for rows in zip(*(leaves for leaves, _ in states), strict=True)]
    return VertexResults(pushes, states[0][1].unflatten(roots))


@dataclass(frozen=True, slots=True)
class _VertexKind:
    """One of the functions, with its vertices in execution order.

    Attributes:
        number: of the type.
        function: the vertex function.
        traced: the same as a body over one vertex.
        parts: its eager, core and lazy nodes.
        vertices: their numbers.
        places: their positions among all vertices in execution order; None: all of them.
        starts: how many of them stand before each set.
        ends: how many of them stand before the end of each set.
    """

    number: int
    function: VertexFunction
    traced: TracedFunction
    parts: FunctionParts
    vertices: Tensor
    places: Tensor | None
    starts: Tensor
    ends: Tensor

    @property
    def kept(self) -> list[Tensor]:
        """Values that the core gives to the lazy part, beside states."""
        states = set(self.traced.scattered)  # a set: `in` on a list would compare tensors, which builds nodes
        return [x for x in self.parts.kept if x not in states]


_Stores = tuple[list[RowStore], list[list[RowStore]]]
"""Stores for each part of a state, and for each kind of values that its core passes to its lazy part."""


@dataclass(slots=True)
class _VertexMap:
    """The parts of a `vertex_map` while it is built."""

    label: str
    function: VertexFunction
    graph: InputGraph
    pulls: dict[str, Tensor]
    initial: Sequence[LiftedValue]
    schedule: VertexSchedule
    is_shared: bool
    """Sets are put in order elsewhere: here all vertices are one, in the order of their numbers."""
    is_permuted: bool
    """True if all vertices of the batch are computed, so that a permutation takes rows to execution order and back."""
    steps: StepPolicy | None
    """Decides when runs join, where sets are shared."""
    liftings: list[Lifting] = field(default_factory=list)
    size: Tensor = field(init=False)
    n_sets: Tensor = field(init=False)
    set_ends: Tensor = field(init=False)
    first_ranks: Tensor = field(init=False)
    """Of each set."""
    next_ranks: Tensor = field(init=False)
    """Of the set behind each."""

    def __post_init__(self) -> None:
        plan = self.schedule
        self.size = subtract(size(as_tensor(self.graph.offsets)), 1) if self.is_shared else size(plan.order)
        self.n_sets = subtract(size(plan.set_starts), 1)
        self.set_ends, ranks = plan.set_starts[1:], add(plan.set_starts, 1)
        self.first_ranks, self.next_ranks = ranks, ranks[1:]

    def kinds(
        self, functions: Sequence[VertexFunction], traced: Sequence[tuple[TracedFunction, FunctionParts]]
    ) -> list[_VertexKind]:
        """Return the functions, each with its vertices."""
        plan = self.schedule
        if len(functions) == 1:
            vertices = arange(self.size, dtype=int64) if self.is_shared else plan.order
            return [_VertexKind(0, functions[0], *traced[0], vertices, None, plan.set_starts, self.set_ends)]
        return [self._kind(number, *each) for number, each in enumerate(zip(functions, traced, strict=True))]

    def _kind(self, number: int, function: VertexFunction, traced: tuple[TracedFunction, FunctionParts]) -> _VertexKind:
        plan = self.schedule
        assert plan.set_types is not None
        (places,) = nonzero(equal(gather(as_tensor(self.graph.types), plan.order), number))
        # A set has one type. Sets of other types have none of these vertices, so they start where they end.
        own = astype(equal(plan.set_types, number), int64)
        sizes = subtract(self.set_ends, plan.set_starts[:-1])
        starts = cumulative_sum(multiply(sizes, own), include_initial=True)
        return _VertexKind(number, function, *traced, gather(plan.order, places), places, starts, starts[1:])

    def build(self, kinds: Sequence[_VertexKind]) -> VertexResults:
        """Add the sets, and the nodes before and after them."""
        before = [self._before(kind) for kind in kinds]
        remarks = graph_for().root.remarks
        for kind, known in zip(kinds, before, strict=True):
            stored = {
                "states": kind.traced.scattered,
                "from before the sets": [x for x in kind.parts.before if known[x].has_rows],
                "from the sets": kind.kept,
            }
            remarks[f"{self.label}/{kind.function.name}"] = explained(kind.parts, stored)
        roots: Sequence[Tensor]
        if self.is_shared:
            roots, (states, kept) = self._shared_sets(kinds[0], before[0])
        else:
            states, kept = self._sets(kinds, before)
            roots = [store.take(self.schedule.root_ranks) for store in states]
        after = [self._after(*each, states) for each in zip(kinds, before, kept, strict=True)]
        names = dict.fromkeys(name for kind in kinds for name in kind.traced.pushes)
        pushes = {name: self._in_order(kinds, [values.get(name) for values in after]) for name in names}
        effects = [node for lifting in self.liftings for node in lifting.effects()]
        if effects:
            # Assertions are checked for every vertex, whichever results are fetched.
            with control_dependencies(effects):
                pushes, roots = {name: identity(x) for name, x in pushes.items()}, [identity(x) for x in roots]
        return VertexResults(pushes, self.function.structure.unflatten(roots))

    # -- for all vertices of a kind --------------------------------------------------------------------------------

    def _numbers(self, vertices: Tensor) -> Tensor:
        """The sample of each vertex, and its number there: random draws are counted by these."""
        # Not by its number in the batch: a sample draws the same numbers in any batch.
        samples = as_tensor(self.graph.samples)
        sample = subtract(searchsorted(samples, vertices, side="right"), 1)
        return stack([sample, subtract(vertices, gather(samples, sample))], axis=1)

    def _label(self, kind: _VertexKind) -> str:
        return f"{self.label}/{kind.function.name} (sample/vertex)"

    def _all(self, kind: _VertexKind) -> Lifting:
        count = self.size if kind.places is None else size(kind.vertices)
        rows = RowAxis(count, None, lambda: self._numbers(kind.vertices), label=self._label(kind))
        return self._lifting(kind, rows, is_inside=False)

    def _lifting(self, kind: _VertexKind, rows: RowAxis, *, is_inside: bool) -> Lifting:
        """Make a lifting over some vertices; outside of branches and loops its effects are noted."""
        lifting = Lifting(rows, f"{self.label}/{kind.function.name}")
        if not is_inside:
            self.liftings.append(lifting)
        return lifting

    def _table(self, kind: _VertexKind) -> Tensor:
        """The ranks of the children of each vertex, by slot."""
        ranks = self.schedule.child_ranks
        return ranks if kind.places is None else gather(ranks, kind.places)

    def _is_leaf(self, kind: _VertexKind) -> Tensor:
        starts = as_tensor(self.graph.offsets) if self.is_shared else self.schedule.child_starts
        if starts is None:
            return all_of(equal(self._table(kind), 0), axis=1)
        counts = subtract(starts[1:], starts[:-1])
        return equal(counts if kind.places is None else gather(counts, kind.places), 0)

    def _before(self, kind: _VertexKind) -> dict[Tensor, LiftedValue]:
        """Values of the body that no gather reaches, for all vertices: pulls, and what eager nodes make of them."""
        traced = kind.traced
        # Shared sets check the rows that they read themselves; the schedule checks the other pulls.
        read = {*traced.scattered, *(x for node in kind.parts.core for x in node.inputs)} if self.is_shared else set()
        known = {
            x: LiftedValue(self.pulls[name] if x in read else self._pulled(kind, name), True)
            for name, x in traced.pulls.items()
        }
        known.update((x, LiftedValue(self._is_leaf(kind), True)) for x in kind.traced.is_leaf)
        body = kind.traced.body
        known.update((inner, LiftedValue(outer, False)) for outer, inner in body.captures.items())
        wanted = list(kind.parts.before)
        self._all(kind).values(body, known, wanted, kind.parts.eager)
        return known

    def _pulled(self, kind: _VertexKind, name: str) -> Tensor:
        """The rows that vertices of a kind pull, in execution order."""
        x, plan = self.pulls[name], self.schedule
        if kind.places is not None:
            return gather(x, kind.vertices)
        return permuted(x, plan.order, plan.positions) if self.is_permuted else gather(x, plan.order)

    def _after(
        self, kind: _VertexKind, known: dict[Tensor, LiftedValue], kept: Sequence[RowStore], states: Sequence[RowStore]
    ) -> dict[str, Tensor]:
        """The pushed values of all vertices of a kind, in execution order."""
        traced = kind.traced
        if not traced.pushes and not kind.parts.lazy:
            return {}
        known = dict(known)
        known.update((x, LiftedValue(store.stack(), True)) for x, store in zip(kind.kept, kept, strict=True))
        for x, store in zip(traced.scattered, states, strict=True):
            rows = store.slice(1, store.size()) if kind.places is None else store.take(add(kind.places, 1))
            known.setdefault(x, LiftedValue(rows, True))
        if traced.gathers:
            known.update(SlottedChildren(states, self._table(kind)).known(traced))
        lifting = self._all(kind)
        found = lifting.values(traced.body, known, list(traced.pushes.values()), kind.parts.lazy)
        return {name: lifting.rows.spread(x) for name, x in zip(traced.pushes, found, strict=True)}

    def _in_order(self, kinds: Sequence[_VertexKind], values: Sequence[Tensor | None]) -> Tensor:
        """Return pushed values in the order of the vertices; zeros for vertices without a push of that name."""
        if kinds[0].places is None:
            assert values[0] is not None
            if self.is_shared:
                return values[0]
            places, inverse = self.schedule.positions, self.schedule.order
            return permuted(values[0], places, inverse) if self.is_permuted else gather(values[0], places)
        given = [(kind, x) for kind, x in zip(kinds, values, strict=True) if x is not None]
        if (shape := given[0][1].shape) is None or not is_static(shape[1:]):
            raise GraphError("vertex_map: what several functions push has rows of a shape that is known in full")
        nothing = zeros((1, *(extent or 0 for extent in shape[1:])), dtype=given[0][1].dtype)
        # Row 0 is for vertices without the push; the rows of each kind follow, kind by kind.
        places, count = zeros((size(self.schedule.order),), dtype=int64), constant(1, int64)
        for kind, _ in given:
            assert kind.places is not None
            own = size(kind.places)
            places = scatter_update(places, kind.places, add(arange(own, dtype=int64), count))
            count = add(count, own)
        return gather(concat([nothing, *(x for _, x in given)]), gather(places, self.schedule.positions))

    # -- set by set ------------------------------------------------------------------------------------------------

    def _shared_sets(self, kind: _VertexKind, before: dict[Tensor, LiftedValue]) -> tuple[Sequence[Tensor], _Stores]:
        """The states of the roots, and what the lazy part needs."""
        label, arity = f"{self.label}/{kind.function.name}", kind.function.children
        axis = self._all(kind).rows
        parts = kind.traced, kind.parts, kind.kept
        shared = SharedSets(label, *parts, before, self.initial, self.graph, arity, axis.numbers, self.steps)
        roots, rows = add_shared_sets(shared, self.graph, self.initial, axis.spread, axis.numbers)
        states, kept = self._new_stores([kind])
        if rows:
            count = len(states)
            states = [store.append(x) for store, x in zip(states, rows[:count], strict=True)]
            kept = [[store.append(x) for store, x in zip(kept[0], rows[count:], strict=True)]]
        return roots, (states, kept)

    def _new_stores(self, kinds: Sequence[_VertexKind]) -> _Stores:
        # Row 0 is the state of a missing child. So ranks count from 1, and rank 0 means no vertex.
        capacity = add(self.size, 1)
        states = [
            RowStore(x.tensor.dtype, x.shape, capacity).append(expand_dims(x.tensor, axis=0)) for x in self.initial
        ]
        return states, [[_store(kind, x) for x in kind.kept] for kind in kinds]

    def _sets(self, kinds: Sequence[_VertexKind], before: Sequence[dict[Tensor, LiftedValue]]) -> _Stores:
        states, kept = self._new_stores(kinds)
        # The first set has no children, so it gathers only `initial`, computed once.
        stores = self._set(kinds, before, constant(0, int64), (states, kept), is_first=True)
        done: tuple[Tensor, _Stores] = while_loop(
            lambda number, stores: less(number, self.n_sets),
            lambda number, stores: (add(number, 1), self._set(kinds, before, number, stores, is_first=False)),
            (constant(1, int64), stores),
            name="sets",
        )
        return done[1]

    def _set(
        self,
        kinds: Sequence[_VertexKind],
        before: Sequence[dict[Tensor, LiftedValue]],
        number: Tensor,
        stores: _Stores,
        *,
        is_first: bool,
    ) -> _Stores:
        """The stores with one more set: that of the number, which is of one kind."""

        def of(kind: _VertexKind) -> _Stores:
            return self._computed(kind, before[kind.number], number, stores, is_first=is_first)

        if len(kinds) == 1:
            return of(kinds[0])
        types = self.schedule.set_types
        assert types is not None

        def chosen() -> _Stores:
            stores: _Stores = switch_case(types[number], [partial(of, kind) for kind in kinds])
            return stores

        # A batch without vertices has no first set, and so no type to choose by.
        return cond(less(0, self.n_sets), chosen, lambda: stores) if is_first else chosen()

    def _computed(
        self, kind: _VertexKind, before: dict[Tensor, LiftedValue], number: Tensor, stores: _Stores, *, is_first: bool
    ) -> _Stores:
        states, kept = stores
        # If there are no vertices, the first set ends where it starts.
        stop = kind.starts[minimum(add(number, 1), self.n_sets)] if is_first else kind.ends[number]
        own = slice(kind.starts[number], stop)
        # Stores have no rows to slice. Only stores from outside cross into another part.
        crossing = {x: y for x, y in before.items() if x.dtype != VARIANT or not y.has_rows}
        known = {x: LiftedValue(y.tensor[own], True) if y.has_rows else y for x, y in crossing.items()}
        children = NoChildren(self.initial) if is_first else self._children(number, states)
        known.update(children.known(kind.traced))
        rows = VertexAxis(
            subtract(own.stop, own.start),
            lambda: self._numbers(kind.vertices[own]),
            children,
            in_loop=not is_first,
            label=self._label(kind),
        )
        lifting = self._lifting(kind, rows, is_inside=not is_first or kind.places is not None)
        wanted = [*kind.traced.scattered, *kind.kept]
        found = [rows.spread(x) for x in lifting.values(kind.traced.body, known, wanted, kind.parts.core)]
        given = found[len(states) :]
        # Ranks give the length of the stores before and after a set, so gradients need not save it in each iteration.
        sizes = () if is_first else (self.first_ranks[number], self.next_ranks[number])
        return (
            [append_of_known_size(store, x, sizes) for store, x in zip(states, found, strict=False)],
            [
                [store.append(x) for store, x in zip(each, given, strict=True)] if place == kind.number else each
                for place, each in enumerate(kept)
            ],
        )

    def _children(self, number: Tensor, states: Sequence[RowStore]) -> Children:
        plan = self.schedule
        first, last = plan.set_starts[number], self.set_ends[number]
        if plan.child_starts is None or plan.child_positions is None:
            return SlottedChildren(states, plan.child_ranks[first:last])
        starts = plan.child_starts[first : add(last, 1)]
        edges = slice(plan.child_starts[first], plan.child_starts[last])
        return AllChildren(
            states,
            plan.child_ranks[edges],
            subtract(plan.child_positions[edges], first),
            subtract(starts, edges.start),
        )


def _store(kind: _VertexKind, x: Tensor) -> RowStore:
    """A store for values that the core of a function gives to its lazy part."""
    if not is_static(x.shape):
        raise GraphError(
            f"{kind.function} pushes values computed from {x.name} {x.spec}, whose shape is not known in full; pass "
            "lift_parts=False, or use af.reshape"
        )
    return RowStore(x.dtype, x.shape, size(kind.vertices))


def _arity(functions: Sequence[VertexFunction]) -> int | None:
    """Return the number of children of a vertex, if children are told apart."""
    first = functions[0]
    for other in functions:
        if (other.structure, other.specs) != (first.structure, first.specs):
            raise GraphError(f"states of {first} and {other} differ; vertices gather states of any of their children")
        if (other.children is None) != (first.children is None):
            raise GraphError(f"{first} and {other}: both have any number of children, or neither")
    return None if first.children is None else max(each.children or 0 for each in functions)
