"""``vertex_map(share=True)``: sets of vertices of different runs are computed together, as the rows of one call.

The sets of one run's vertices are one node, which waits in line as a pooled loop does. The core of the function is
built as a graph of its own over vertices of any runs. The runtime (`asyncflow.runtime.shared.vertex_pools`) chooses the
next vertices; the states of all runs stand in one place there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from asyncflow.graph.building.build import apply, as_tensor, graph_for, identity, placeholder
from asyncflow.graph.building.scopes import control_dependencies
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import deep
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.calls.batched import (
    NO_TEXT,
    BodyProgram,
    SharedCode,
    define_shared,
    is_repeatable,
    is_same_for_all,
    known_constants,
    shared_constants,
    why_not_shareable,
)
from asyncflow.lift.calls.keyed import draw_by_parameter, draws
from asyncflow.lift.lifting import Lifting
from asyncflow.lift.single_rows import warn_of_single_rows
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.random.random_again import random_key
from asyncflow.ops.rows.rule import SPREAD_ROWS, CannotLift, LiftedValue, no_row_rule
from asyncflow.ops.user.step_policy import StepPolicy
from asyncflow.vertex.children import AllChildren, Children, TakenChildren, VertexAxis
from asyncflow.vertex.function import REDUCE_CHILDREN, TracedFunction
from asyncflow.vertex.schedule import schedules
from asyncflow.vertex.split import FunctionParts
from asyncflow.vertex.structure.input_graph import InputGraph, named_parts


class InputCounts(NamedTuple):
    """Numbers of inputs of the node, by kind, in this order.

    Attributes:
        graph: its arrays.
        states: the state of a child that is not there, in parts.
        own: rows that each vertex has of its own, by number.
        common: values that are the same for all vertices of all runs that share a call.
    """

    graph: int
    states: int
    own: int
    common: int


class SharedSets(SharedCode):
    """The code of one vertex function whose sets are computed together with sets of other runs.

    Attributes:
        label: its name.
        counts: of the inputs of its node.
        has_rows: of each of these, whether each run has its own.
        specs: rows of states, and of what the core gives to the lazy part.
        gives_rows: whether a run gets all of these; else the states of its roots alone.
        pulls: of what each vertex has of its own, where that is pulled, the name.
        policy: decides when runs that wait join; None for at once.
        is_repeatable: computing a set again does no harm.
        order: from the arrays of a graph to what the schedule of its sets is; see `asyncflow.vertex.schedule`.
        program: from the inputs behind the graph and initial states, for some vertices, and the states of their
            children, to the rows of `specs`. Children are given by the parts of their states: of each slot, or of all
            children, with the row of the vertex that each belongs to, and the start of each vertex's children.
    """

    why_no_text = NO_TEXT.format("a vertex_map that is shared")

    def __init__(
        self,
        label: str,
        traced: TracedFunction,
        parts: FunctionParts,
        kept: Sequence[Tensor],
        known: Mapping[Tensor, LiftedValue],
        states: Sequence[LiftedValue],
        graph: InputGraph,
        arity: int | None,
        numbers: Callable[[], Tensor],
        policy: StepPolicy | None,
    ) -> None:
        super().__init__(label, traced.body)
        self.policy = policy
        self.traced, self._parts, self._arity = traced, parts, arity
        wanted = [*traced.scattered, *kept]
        for x in wanted:
            if not is_static(x.shape):
                raise CannotLift(f"{x.name} {x.spec}, which sets give, is of a shape that is not known in full")
        self.specs = tuple(Spec(x.dtype, (None, *(x.shape or ()))) for x in wanted)
        core = deep(parts.core)
        if (fault := why_not_shareable(core)) is not None:
            raise CannotLift(f"{label} cannot be shared: {fault}")
        warn_of_single_rows(graph_for(), label, "share=True", "vertex", core)
        self.is_repeatable = is_repeatable(core)
        known = {**known, **self._keys(numbers)}
        read = {*wanted, *(x for node in parts.core for x in node.inputs)}
        given = {x: value for x, value in known.items() if x in read}
        self._constants = shared_constants({x: y.tensor for x, y in given.items() if not y.has_rows})
        is_common = {x: not y.has_rows and is_same_for_all(y.tensor) for x, y in given.items()}
        self.own = {x: y for x, y in given.items() if not is_common[x]}
        self.common = {x: y.tensor for x, y in given.items() if is_common[x] and x not in self._constants}
        self.draws_numbers = False
        self._state_specs = [x.tensor.spec for x in states]
        self.program = self._built(wanted)
        self.order = self._ordering(graph)
        own = len(self.own) + self.draws_numbers
        self.counts = InputCounts(len(self.order.feeds), len(states), own, len(self.common))
        self.gives_rows = bool(traced.pushes or parts.lazy)
        names = {x: name for name, x in traced.pulls.items()}
        self.pulls = [names.get(x) for x in self.own]
        self.has_rows = (*(True,) * sum(self.counts[:3]), *(False,) * self.counts.common)

    def __repr__(self) -> str:
        return f"<shared {self.label}>"

    def node_specs(self) -> tuple[Spec, ...]:
        """Return the specs of the node's outputs."""
        return (*self.specs[: self.counts.states], *(self.specs if self.gives_rows else ()))

    def programs(self) -> tuple[BodyProgram, ...]:
        """See the class."""
        return (self.order, self.program)

    def _keys(self, numbers: Callable[[], Tensor]) -> dict[Tensor, LiftedValue]:
        """Have the core draw by the keys of vertices, and return these."""
        core = self._parts.core
        nodes = [node for node in self.traced.body.nodes if node in core]
        reduced = [node for node in nodes if node.op is REDUCE_CHILDREN and draws(node.attrs["each"])]
        key = draw_by_parameter(self.traced.body, nodes, reduced)
        if key is None:
            return {}
        places = numbers()
        of_run = apply(SPREAD_ROWS, random_key(), shape(places)[0], extent=None)[0]
        return {key: LiftedValue(concat([of_run, places], axis=1), has_rows=True)}

    def _ordering(self, data: InputGraph) -> BodyProgram:
        with Graph() as graph:
            arrays = {name: placeholder(int64, (None,)) for name in named_parts(data)}
            (plan,) = schedules(InputGraph(**arrays), arity=self._arity, n_types=1)
            starts = () if plan.child_starts is None else (plan.child_starts,)
            return BodyProgram(
                graph,
                tuple(arrays.values()),
                (plan.order, plan.positions, plan.set_starts, plan.root_ranks, plan.child_ranks, *starts),
            )

    def _built(self, wanted: Sequence[Tensor]) -> BodyProgram:
        with Graph() as graph:
            known = known_constants(self._constants)
            for x in self.own:
                if x.shape is None:
                    raise CannotLift(f"{x.name}, which sets read, is of unknown rank")
                known[x] = LiftedValue(placeholder(x.dtype, (None, *x.shape)), has_rows=True)
            common = {x: placeholder(outer.dtype, outer.shape) for x, outer in self.common.items()}
            known.update((x, LiftedValue(value, has_rows=False)) for x, value in common.items())
            numbers = placeholder(int64, (None, 2))
            children, of_children = self._children()
            count = shape(of_children[-1])[0] - (self._arity is None)

            def draw() -> Tensor:
                self.draws_numbers = True
                return numbers

            lifting = Lifting(
                VertexAxis(count, draw, children, in_loop=True, label=f"{self.label} (sample/vertex)"), self.label
            )
            known.update(children.known(self.traced))
            found = [lifting.rows.spread(x) for x in lifting.values(self.traced.body, known, wanted, self._parts.core)]
            with control_dependencies(lifting.effects()):
                fetches = tuple(identity(x) for x in found)
        own = [known[x].tensor for x in self.own] + ([numbers] if self.draws_numbers else [])
        return BodyProgram(graph, (*own, *common.values(), *of_children), fetches)

    def _children(self) -> tuple[Children, list[Tensor]]:
        """Children of some vertices, and the placeholders for them; the last has a row a vertex, or one more."""
        rows = (None,) if self._arity is None else (None, self._arity)
        states = [placeholder(x.dtype, (*rows, *(x.shape or ()))) for x in self._state_specs]
        if self._arity is not None:
            return TakenChildren(states), states
        owners, starts = placeholder(int64, (None,)), placeholder(int64, (None,))
        return AllChildren((), owners, owners, starts, states), [*states, owners, starts]


def add_shared_sets(
    shared: SharedSets,
    graph: InputGraph,
    initial: Sequence[LiftedValue],
    spread: Callable[[LiftedValue], Tensor],
    numbers: Callable[[], Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Add the node that computes all sets.

    Args:
        shared: its code.
        graph: of the run.
        initial: the parts of the state of a child that is not there.
        spread: gives a row for each vertex, by number.
        numbers: gives the numbers of all vertices, likewise.

    Returns:
        The states of the roots, and, where the node gives them, rows of all vertices, both by number.
    """
    arrays = map(as_tensor, named_parts(graph).values())
    own = [*map(spread, shared.own.values()), *([numbers()] if shared.draws_numbers else [])]
    inputs = [*arrays, *(x.tensor for x in initial), *own, *shared.common.values()]
    root = graph_for()
    name = root.unique_name(f"{shared.label.rpartition('/')[2]}/sets")
    node = shared.add_to(root, SHARED_SETS, inputs, name)
    return node.outputs[: len(initial)], node.outputs[len(initial) :]


SHARED_SETS = define_shared("shared_sets", "a vertex map shared with other runs", "vertex_map without share=True")
"""All sets of a vertex function; see `InputCounts` for its inputs."""
no_row_rule(SHARED_SETS, because="it takes the vertices of a whole batch at once")
