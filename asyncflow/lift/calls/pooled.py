"""``while_loop(pool=)``: a loop whose activations, of any runs, are the rows of one state that is stepped together.

A pooled loop is one node, which waits as a coroutine does. Predicate and body are built over many activations, as two
graphs of their own. `check` tells which joining activations go on at all, and `steps` makes a number of steps, or stops
before one of them ends. One activation that has the pool to itself is stepped by `alone`, over its own values. It then
costs as much as the loop by itself.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from asyncflow.control.stores import tensor_array
from asyncflow.control.stores.row_store import SLICE
from asyncflow.control.while_loop import install_pooling, while_loop
from asyncflow.errors import GraphError, LoopIdentity, user_location, warn_user
from asyncflow.graph.building.build import apply, as_tensor, placeholder
from asyncflow.graph.builtin import CONSTANT, PARAMETER, PLACEHOLDER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, PooledNode, WhileNode, join_captures
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.calls.batched import (
    NO_TEXT,
    BodyProgram,
    SharedCode,
    built_once,
    captured_by,
    define_shared,
    is_repeatable,
    is_same_for_all,
    known_constants,
    shared_constants,
    why_not_shareable,
)
from asyncflow.lift.calls.keyed import carry_key, draws, left_as_written
from asyncflow.lift.lifting import lift, lift_one
from asyncflow.lift.single_rows import warn_of_single_rows
from asyncflow.ops.arrays.creation import zeros
from asyncflow.ops.arrays.manipulation import concat, expand_dims
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.indexing.indexing import INDEX_ADD, INDEX_UPDATE, take
from asyncflow.ops.reductions.utility import all as all_of
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, no_row_rule
from asyncflow.ops.searching.searching import where
from asyncflow.ops.user.batch import Pool

SEVERAL = 8
"""Number of steps in one launch while no activation joins or leaves."""

_LARGEST = 64
"""Most nodes of a body that is copied for several steps. With more, a launch costs little beside a step, and the copies
take long to compile.
"""

STEPS = "steps_together"
"""The name of the loop inside that makes steps."""


class SharedLoop(SharedCode):
    """The code of one pooled loop in a graph.

    Attributes:
        label: its name.
        loop: its name, and where it was built.
        pool: the options: how many activations are stepped together, and when.
        ahead: number of steps whose items may wait to be taken.
        bodies: predicate and body, as they were built.
        changed: places of variables with some elements changed by each step, such as caches.
        has_rows: of each input, whether each activation has one of its own.
        specs: specs of the loop variables of one activation.
        is_repeatable: True if computing a step again does no harm.
        by_size: True if it stacks or slices stores: activations that are stepped together then have equally many
            entries.
        has_several: True if `several` pays.
        step_sources: code of compiled regions for `Plan.explain`, by the kind of step.
        check: program from all inputs to a flag for each activation: True if it goes on.
        steps: program that makes steps. It takes the most steps to make, a flag for each activation, and all inputs. It
            gives the next loop variables, flags of activations that go on, and the number of steps made.
        alone: program of steps of one activation, from the most steps and its inputs; it may not go on at all.
    """

    why_no_text = NO_TEXT.format("a loop with a pool")

    def __init__(
        self,
        condition: Subgraph,
        body: Subgraph,
        initial: Sequence[Tensor],
        kept: dict[int, bool],
        pool: Pool,
        ahead: int,
        label: str,
    ) -> None:
        super().__init__(label, condition, body)
        self.loop = LoopIdentity(label, user_location())
        self.pool = pool
        self.ahead = ahead
        self.specs = tuple(x.spec for x in body.inputs[: len(body.results)])
        self.changed = _changed(body)
        self.has_rows = tuple(kept.values())
        nodes = [node for part in (condition, body) for node in part.walk()]
        entering = {x: y for part in (condition, body) for x, y in zip(part.inputs, initial, strict=False)}
        self.is_repeatable = is_repeatable(nodes) and not any(_reads_once(node, entering) for node in nodes)
        self.by_size = any(node.op in _WHOLE or (node.op is SLICE and node.attrs["count"] is None) for node in nodes)
        # `several` goes on computing rows that have ended, so calls in it must not have effects.
        self.has_several = self.is_repeatable and sum(1 for part in (condition, body) for _ in part.walk()) <= _LARGEST
        self.bodies = condition, body
        self._places = tuple(kept)
        self._body = body
        self.step_sources: dict[str, str] = {}
        self._constants = shared_constants({inner: outer for outer, inner in body.captures.items()})
        self._emitting: dict[tuple[bool | Tensor, ...], BodyProgram] = {}
        self._taking: dict[int, BodyProgram] = {}
        # Lift now, so that a body that cannot be lifted fails at its definition.
        self.check = self._checking()
        self.steps = self._stepping(is_one=False)

    def __repr__(self) -> str:
        return f"<pooled loop {self.label}, at most {self.pool.capacity}>"

    @property
    def n_vars(self) -> int:
        """Return the number of loop variables among the inputs; the others are captures."""
        return len(self.specs)

    @property
    def captured_names(self) -> dict[int, str]:
        """Return the names of captured arrays, by place among the inputs of a firing."""
        outer = {inner: x for x, inner in self._body.captures.items()}
        inputs = enumerate(self._body.inputs[place] for place in self._places)
        return {k: outer[x].name for k, x in inputs if k >= self.n_vars and x in outer and self.has_rows[k]}

    def programs(self) -> tuple[BodyProgram, ...]:
        """See the class."""
        return self.check, self.steps, *([self.alone] if self.is_repeatable else ())

    @built_once
    def alone(self) -> BodyProgram:
        """See the class."""
        return self._stepping(is_one=True)

    @built_once
    def exchange(self) -> BodyProgram:
        """From places, the slabs of all inputs that have rows, and new rows, to slabs of the rows there and the new."""
        with Graph() as graph:
            keep = placeholder("int64", (None,))
            slabs, fresh = (self._slabs(len(self._places)) for _ in range(2))
            found = [concat([take(slab, keep, axis=0), rows], axis=0) for slab, rows in zip(slabs, fresh, strict=True)]
        return BodyProgram(graph, (keep, *slabs, *fresh), tuple(found), self.states)

    def taking(self, most: int) -> BodyProgram:
        """Return the program from places, and slabs of the first `most` inputs, to the rows at these places."""
        # One for each `most`: results have only the loop variables, other rows have all inputs.
        program = self._taking.get(most)
        if program is None:
            with Graph() as graph:
                places, slabs = placeholder("int64", (None,)), self._slabs(most)
                found = [take(slab, places, axis=0) for slab in slabs]
            program = self._taking[most] = BodyProgram(graph, (places, *slabs), tuple(found))
        return program

    def _slabs(self, most: int) -> tuple[Tensor, ...]:
        return tuple(value.tensor for value in list(self._given().values())[:most] if value.has_rows)

    @property
    def is_static(self) -> bool:
        """True if rows are arrays that keep their shapes."""
        own = [self._body.inputs[place] for place, own in zip(self._places, self.has_rows, strict=True) if own]
        return all(is_static(x.shape) and x.dtype != VARIANT and x.dtype.kind != "T" for x in own)

    def emitting(self, streamed: tuple[Tensor, ...], *, is_one: bool = False) -> BodyProgram:
        """Return the program `steps` or `alone` with the streamed values in front of the flags, for single steps."""
        program = self._emitting.get((is_one, *streamed))
        if program is None:
            program = self._emitting[is_one, *streamed] = self._stepping(is_one=is_one, streamed=streamed)
        # All versions of the variables share the program; the states belong to this version.
        return program._replace(states=self.states)

    @built_once
    def once(self) -> BodyProgram:
        """The program of one step, from all inputs to the next variables and flags, on a device that keeps them."""
        with Graph() as graph:
            given, feeds, count = self._many()
            following = self._values(self._body, given, count)
            (again,) = self._goes_on(given, following, count)
        return BodyProgram(graph, feeds, (*following, again), self.states)

    @built_once
    def several(self) -> BodyProgram:
        """The program of `SEVERAL` steps without items: an activation that ends in one of them keeps its variables
        in the others.
        """
        with Graph() as graph:
            given, feeds, count = self._many()
            following: list[Tensor] = []
            again: Tensor | None = None
            for k in range(SEVERAL):
                before, following = following, self._values(self._body, given, count, label=f"/{k}")
                if again is not None:  # rows that have ended are computed again, and their values discarded
                    following = [
                        where(expand_dims(again, tuple(range(1, len(new.shape or ())))), new, old)
                        for new, old in zip(following, before, strict=True)
                    ]
                (goes_on,) = self._goes_on(given, following, count, f"/{k}")
                again = goes_on if again is None else again & goes_on
            assert again is not None
        return BodyProgram(graph, feeds, (*following, again), self.states)

    def _many(self) -> tuple[dict[int, LiftedValue], tuple[Tensor, ...], Tensor]:
        """Return the inputs of many activations by place, their placeholders, and the number of activations."""
        given = self._given()
        feeds = tuple(value.tensor for value in given.values())
        return given, feeds, shape(feeds[0])[0]

    def _given(self, *, is_one: bool = False, lent: Container[int] = ()) -> dict[int, LiftedValue]:
        """Return placeholders for the inputs, by place; the values of `lent` places are the pool's own, and may be
        written to.
        """
        given = {}
        for place, has_rows in zip(self._places, self.has_rows, strict=True):
            x = self._body.inputs[place]
            is_many = has_rows and not is_one
            spec = Spec(x.dtype, (None, *(x.shape or ())) if is_many else x.shape)
            (value,) = apply(PLACEHOLDER, spec=spec, is_lent=place in lent)
            given[place] = LiftedValue(value, is_many)
        return given

    def _known(self, part: Subgraph, given: Mapping[int, LiftedValue]) -> dict[Tensor, LiftedValue]:
        constants = known_constants(self._constants)
        return {x: given[k] if k in given else constants[self._body.inputs[k]] for k, x in enumerate(part.inputs)}

    def _checking(self) -> BodyProgram:
        with Graph() as graph:
            given, feeds, count = self._many()
            goes_on = self._values(self.bodies[0], given, count)
        return BodyProgram(graph, feeds, tuple(goes_on), self.states)

    def _stepping(self, *, is_one: bool, streamed: tuple[Tensor, ...] = ()) -> BodyProgram:
        with Graph() as graph:
            given = self._given(is_one=is_one, lent=self.changed if is_one else range(self.n_vars))
            inputs = tuple(value.tensor for value in given.values())
            most = placeholder("int64", ())
            count = None if is_one else shape(inputs[0])[0]
            # The flags of many rows come from `check` or the previous step; for one activation they are computed here,
            # without a separate launch.
            if is_one:
                (flags,) = self._values(self.bodies[0], given, count, label="/again")
            else:
                flags = placeholder("bool", (None,))

            def step(made: Tensor, _: Tensor, __: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
                inside = {**given, **{k: LiftedValue(x, not is_one) for k, x in enumerate(values[: self.n_vars])}}
                found = self._values(self._body, inside, count, streamed)
                (again,) = self._goes_on(inside, found[: self.n_vars], count)
                return made + 1, (again if is_one else all_of(again)), again, *found

            # Streamed values are variables, too, with no rows at first: only a loop writes to the slabs it is lent.
            rows = () if is_one else (0,)
            nothing = [zeros((*rows, *[dim or 0 for dim in x.shape or ()]), dtype=x.dtype) for x in streamed]
            shapes = [None if x.shape is None else (*[None for _ in rows], *x.shape) for x in streamed]
            # Stop when the first activation ends: a waiting activation can then take its row.
            made, _, again, *last = while_loop(
                lambda made, all_go_on, *_: (made < most) & all_go_on,
                step,
                (as_tensor(0), flags if is_one else as_tensor(True), flags, *inputs[: self.n_vars], *nothing),
                shape_invariants=(*[...] * (3 + self.n_vars), *shapes),
                name=STEPS,
            )
        feeds = (most, *inputs) if is_one else (most, flags, *inputs)
        return BodyProgram(graph, feeds, (*last, again, made), self.states)

    def _goes_on(
        self, given: dict[int, LiftedValue], following: Sequence[Tensor], count: Tensor | None, label: str = ""
    ) -> list[Tensor]:
        """Return which activations go on with these variables, which are added to `given`."""
        given.update({k: LiftedValue(x, count is not None) for k, x in enumerate(following)})
        return self._values(self.bodies[0], given, count, label=f"{label}/again")

    def _values(
        self,
        part: Subgraph,
        given: Mapping[int, LiftedValue],
        count: Tensor | None,
        more: Sequence[Tensor] = (),
        label: str = "",
    ) -> list[Tensor]:
        """Return the results of predicate or body, and `more` of its values, for `count` activations; None: for a
        single one.
        """
        label = f"{self.label}{label}"
        known, wanted = self._known(part, given), [*part.results, *more]
        if count is not None:
            return lift(part, known, wanted, count, label, owns_stores=True)
        return lift_one(part, known, wanted, label)


_WHOLE = frozenset((tensor_array.STACK, tensor_array.CONCAT))
_TAKING = _WHOLE | {tensor_array.READ, tensor_array.GATHER}


def _changed(body: Subgraph) -> tuple[int, ...]:
    found = []
    for place, (value, result) in enumerate(zip(body.inputs, body.results, strict=False)):
        x = result
        while x.node.op in (INDEX_UPDATE, INDEX_ADD):
            x = x.node.inputs[0]
        if x is value and x is not result and x.shape != ():
            found.append(place)
    return tuple(found)


def _reads_once(node: Node, entering: Mapping[Tensor, Tensor]) -> bool:
    """Return True if a node of a pooled loop uses elements of a TensorArray up: a second attempt would not find them.

    Args:
        node: of the body or the predicate.
        entering: by its loop variables, the values that these begin with; later ones are of the same kind.
    """
    if node.op not in _TAKING:
        return False
    x: Tensor | None = node.inputs[0]
    while x is not None and x.node.op is not tensor_array.TENSOR_ARRAY:
        maker = x.node
        if x in entering:
            x = entering[x]
        elif maker.op is PARAMETER:
            x = captured_by(maker)
        elif isinstance(maker, CondNode):
            x = maker.subgraphs[0].results[x.index]
        else:  # loops and writes return an array of the kind they take
            x = maker.inputs[x.index if isinstance(maker, WhileNode | PooledNode) else 0] if maker.inputs else None
    return x is None or bool(x.node.attrs["clear_after_read"])


POOLED = define_shared("pooled_while", "a loop with a pool", "it without pool=", PooledNode)
"""A pooled loop; its inputs are initial values and what predicate and body capture.

The attribute `streamed` is there in plans of streams alone: values of the body that are handed out in each step.
"""
no_row_rule(POOLED, because="it steps activations by itself; leave out pool=, as the rows are given already")


_warned: dict[str | tuple[str, type[Warning], int], int] = {}
"""The warnings shown: a function that is traced often builds its loops as often."""


def _add(
    condition: Subgraph,
    body: Subgraph,
    initial: Sequence[Tensor],
    specs: Sequence[Spec],
    label: str,
    ahead: int,
    pool: Pool,
) -> Node | None:
    """Add the node of a pooled loop; return None, warn and leave a remark if something in it cannot be pooled."""
    if not isinstance(pool, Pool):
        raise GraphError(f"pool= of {label} is an af.Pool; got {pool!r}")
    outer = body.parent
    assert outer is not None
    entering = list(initial)
    try:
        with left_as_written(outer, condition, body):
            if draws(condition, body):  # each activation draws by its own key, independent of other rows
                entering.append(carry_key(condition, body, len(specs)))
            n_vars = len(entering)
            kept = dict.fromkeys(range(n_vars), True)
            for place, x in enumerate(join_captures((condition, body), n_vars), n_vars):
                if x.node.op is not CONSTANT:  # constants are built into the programs
                    kept[place] = not is_same_for_all(x)
                    entering.append(x)
            _check(condition, body, kept, n_vars)
            shared = SharedLoop(condition, body, entering[:n_vars], kept, pool, ahead, label)
    except CannotLift as reason:
        outer.root.remarks[label] = f"is not pooled: {reason}"
        warn_user(f"{label} is not pooled, so each run computes it by itself: {reason}", registry=_warned)
        return None
    warn_of_single_rows(outer, label, "pool=", "request", (*condition.walk(), *body.walk()))
    return shared.add_to(outer, POOLED, entering, label, {**condition.outer_controls, **body.outer_controls})


def _check(condition: Subgraph, body: Subgraph, kept: Mapping[int, bool], n_vars: int) -> None:
    """Raise CannotLift where something would not be the same for each of several activations."""
    for place, has_rows in kept.items():
        x = body.inputs[place]
        # A loop variable has a store for each activation; a captured store would be shared by all.
        if has_rows and place >= n_vars and x.dtype == VARIANT:
            raise CannotLift(f"{x.name}, which it captures, is a TensorArray or RowStore: make it a loop variable")
        if has_rows and x.shape is None:
            raise CannotLift(f"{x.name} is {x.spec}, whose number of axes is not known")
    for part in (condition, body):
        if (fault := why_not_shareable(part.walk())) is not None:
            raise CannotLift(fault)
    devices = {node.device for part in (condition, body) for node in part.walk() if node.device is not None}
    if len(devices) > 1:
        raise CannotLift(f"it is cut over several devices ({', '.join(sorted(devices))})")


install_pooling(_add)
