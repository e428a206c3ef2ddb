"""`batched`: a function whose firings, of any runs and iterations, may be computed as the rows of one call.

A call of it in a graph is one node, which waits as a coroutine does. Its body is built twice, each time as a graph of
its own: over one member, as it was written, and lifted over many. A batch is a run of one of these, in the session of
the members, and so has its regions, devices, traces and errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property, partial, wraps
from itertools import starmap
from types import MappingProxyType
from typing import Generic, NamedTuple, NoReturn, ParamSpec, Self, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from asyncflow.control.body import refuse_handles, result_tensor
from asyncflow.errors import GraphError, user_location
from asyncflow.graph.building.build import (
    add_control_input,
    as_tensor,
    graph_for,
    is_symbolic,
    placeholder,
    refuse_coroutines,
)
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.facts import CALL_AGAIN, SAME_FOR_ALL
from asyncflow.graph.graph import Graph, Subgraph, current_graph, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access, Effects, Op, define, derivative
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.calls.keyed import capture_key, draws
from asyncflow.lift.calls.ragged import OpenExtent, RaggedRows
from asyncflow.lift.lifting import Lifting, lift, lift_one
from asyncflow.lift.single_rows import warn_of_single_rows
from asyncflow.ops.arrays.known_values import static_value
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.random.random_again import RANDOM_AGAIN, draws_numbers
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, row_rule
from asyncflow.ops.user.batch import Batch
from asyncflow.ops.user.custom import install_batching
from asyncflow.ops.user.step_policy import StepPolicy
from asyncflow.values import Array, Conduct, Kernel, Namespace, Nest, Value

P = ParamSpec("P")

Join: TypeAlias = Callable[[Namespace, Sequence[Array]], Array]
"""Function ``join(xp, rows)`` that makes one array of the rows of all members."""


_SAME_BYTES = 4096
"""Bytes up to which values that members share are compared by content."""

NO_TEXT = "{} is code of this process, built for many members: build the graph again where it is to run"
"""Reason why code shared by several runs is not in the text of a graph."""


class BodyProgram(NamedTuple):
    """The body of a batched function as a graph of its own.

    Attributes:
        graph: the graph.
        feeds: its placeholders, which are the body's inputs.
        fetches: the body's results.
        states: the state of each variable, where one version is meant.
    """

    graph: Graph
    feeds: tuple[Tensor, ...]
    fetches: tuple[Tensor, ...]
    states: Mapping[Resource, object] = MappingProxyType({})


class SharedCode:
    """Code that several runs compute together, for one version of the variables that it reads.

    Members of different versions find different codes, and so share nothing.
    """

    specs: tuple[Spec, ...]

    def __init__(self, label: str, *bodies: Subgraph) -> None:
        self.label = label
        self.states: Mapping[Resource, object] = MappingProxyType({})
        self._origin: Self | None = None
        self.built_programs: dict[str, BodyProgram] = {}
        self._resources = variables_of(*bodies)
        self._versions: WeakValueDictionary[tuple[int, ...], Self] = WeakValueDictionary()

    @property
    def origin(self) -> Self:
        """The code that this is a version of; without one, the code itself."""
        return self if self._origin is None else self._origin

    def programs(self) -> tuple[BodyProgram, ...]:
        """Return the graphs that the code consists of."""
        raise NotImplementedError

    def node_specs(self) -> Spec | tuple[Spec, ...]:
        """Return the specs of the node's outputs."""
        return self.specs

    def add_to(self, graph: Graph, op: Op, inputs: Sequence[Tensor], name: str, controls: Iterable[Node] = ()) -> Node:
        """Add the node of this code, under a reserved name; its attributes beside `shared` are the variables that
        the code reads.
        """
        node = graph.add_node(op, inputs, {"shared": self, **self._resources}, self.node_specs(), reserved_name=name)
        for control in controls:
            add_control_input(node, control)
        return node

    def at(self, states: Mapping[str, object]) -> Self:
        """The code whose variables stand for `states`; the same object each time.

        Args:
            states: by the names that `variables_of` gives.
        """
        # A version holds its states, so that their ids are not reused while it is listed here. Its runs and batches
        # hold it; after them it is dropped, with old values of variables.
        key = tuple(map(id, states.values()))
        found = self._versions.get(key) if key else self
        if found is None:
            # Shares `built_programs`: all versions have the same graphs, and `built_once` adds the states.
            found = self._versions[key] = copy(self)
            found._origin = self.origin
            found.states = {self._resources[name]: state for name, state in states.items()}
            for name, value in list(vars(found).items()):
                if isinstance(value, BodyProgram):
                    setattr(found, name, value._replace(states=found.states))
        return found


Code = TypeVar("Code", bound=SharedCode)


class built_once(Generic[Code]):  # noqa: N801 - a decorator
    """A program of a `SharedCode` that is built when it is first asked for, and for all versions of variables."""

    def __init__(self, build: Callable[[Code], BodyProgram]) -> None:
        self._build, self._name = build, build.__name__

    def __get__(self, code: Code, owner: type[Code]) -> BodyProgram:
        """Return the program with the states of the version."""
        program = code.built_programs.get(self._name)
        if program is None:
            program = code.built_programs[self._name] = self._build(code)._replace(states={})
        return program._replace(states=code.states)


class SharedBody(SharedCode):
    """The code of one call of a batched function in a graph.

    Attributes:
        label: its name.
        what: words for people on the call for which a member waits.
        batch: the options: how many members share a call, and when.
        location: where the call was built.
        has_rows: for each input, True if each member has its own value, False if all that share a call have one.
        specs: specs of the results of one member.
        stays: places of inputs of a node that may be on a device; values common to all members are compared on the
            host.
        is_repeatable: True if computing a member again does no harm.
        has_loop: True if the time of a call depends on its members; it may never end.
    """

    why_no_text = NO_TEXT.format("the function of a batched call")
    may_be_asked_anywhere = True
    """True, as the kernel may be called on any thread: members are gathered when one is awaited."""

    def __init__(
        self, body: Subgraph, batch: Batch, has_rows: Mapping[Tensor, bool], label: str, ragged: RaggedRows | None
    ) -> None:
        super().__init__(label, body)
        self.what = f"a call of {label} that others share"
        self.batch = batch
        self.location = user_location()
        self.has_rows = tuple(has_rows.values())
        self.specs = tuple(x.spec for x in body.results)
        told = None if ragged is None else ragged.told
        given = [own for place, own in enumerate(self.has_rows) if place != told]
        self.stays = frozenset(place for place, own in enumerate(given) if own)
        self.is_repeatable = is_repeatable(body.walk())
        self.has_loop = any(node.subgraphs for node in body.walk())
        self.is_packed = ragged is not None and ragged.is_packed
        self._body = body
        self._ragged = ragged
        self._inputs = tuple(has_rows)
        self._constants = shared_constants({x: outer for outer, x in body.captures.items() if x not in has_rows})
        # Lift now, so that a function that cannot be lifted fails at its definition. A function of packed rows serves
        # any number of members: it gets the offset of each.
        self.many = self.one if self.is_packed else self._lifted()

    def find_parts(self, ragged: RaggedRows, side_by_side: Sequence[bool]) -> None:
        """Find the owner of each part of the results; see `RaggedRows.find_parts`."""
        ragged.find_parts(self.specs, self._shapes_with, side_by_side)
        self.specs = tuple(starmap(ragged.spec_outside, enumerate(self.specs)))

    def __repr__(self) -> str:
        return f"<batched {self.label}, at most {self.batch.max_size}>"

    @built_once
    def one(self) -> BodyProgram:
        """Over one member."""
        return self._as_written([x.shape for x in self._inputs])

    @cached_property
    def staying(self) -> tuple[int, ...]:
        """Places of results that may stay on a device: of all but counters and predicates."""
        # The host reads counters and predicates to branch: on the device, each read would wait.
        return tuple(k for k, spec in enumerate(self.specs) if spec.shape != () or spec.dtype.kind not in "biu")

    def _as_written(self, shapes: Sequence[Shape]) -> BodyProgram:
        with Graph() as graph:
            feeds = tuple(placeholder(x.dtype, given) for x, given in zip(self._inputs, shapes, strict=True))
            known = self._known([LiftedValue(x, has_rows=False) for x in feeds])
            results = lift_one(self._body, known, self._body.results, self.label)
        return BodyProgram(graph, feeds, tuple(results), self.states)

    def programs(self) -> tuple[BodyProgram, ...]:
        """Over one member, and over many."""
        return self.one, self.many

    def _shapes_with(self, lengths: Mapping[OpenExtent, int], members: int) -> list[Shape]:
        """Return the shapes of the results for these extents of arguments; None for a shape not known then."""
        shapes = [x.shape for x in self._inputs]
        assert self._ragged is not None
        for place, given in enumerate(shapes[: self._ragged.told + 1] if self.is_packed else ()):
            count = members + (place == self._ragged.told)
            shapes[place] = tuple(count if extent is None else extent for extent in given or ())
        for (place, axis), length in lengths.items():
            extents = list(shapes[place] or ())
            extents[axis] = length
            shapes[place] = tuple(extents)
        try:
            return [x.shape for x in self._as_written(shapes).fetches]
        except (GraphError, CannotLift):  # these lengths do not fit together: they show nothing about the results
            return [None] * len(self.specs)

    # -- feeds and results ---------------------------------------------------------------------------------------

    def kind(self, inputs: Sequence[Array]) -> Hashable:
        """Equal for members that may share a call, as far as dtypes and shapes are concerned.

        Raises:
            Exception: a function of the user's about shapes failed.
        """
        if self._ragged is not None:
            return self._ragged.kind(inputs)
        return tuple([(value.dtype, value.shape) for value in inputs])

    def inside(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the inputs of the body, given the inputs of a node."""
        return inputs if self._ragged is None else self._ragged.with_told(inputs)

    def rows_inside(self, inputs: Sequence[LiftedValue], node: Node) -> Sequence[LiftedValue]:
        """Return the inputs of the body, where the node's inputs have rows."""
        if self._ragged is None:
            return inputs
        if self.is_packed:
            raise CannotLift(f"{node.name} is written for packed rows of all members, not for one", node.location)
        told = self._ragged.told
        return (*inputs[:told], self._ragged.tell_row(inputs), *inputs[told:])

    def fed(self, members: Sequence[Sequence[Array]], gather: Callable[[Join, Sequence[Array]], Array]) -> list[Array]:
        """The values that the graph is fed for members with these inputs; see `is_for_many`.

        Args:
            members: the inputs of each.
            gather: gives ``join(xp, rows)`` for one input of all members, in whichever memory.
        """
        first = members[0]
        if not self.is_for_many(len(members)):
            return list(first)
        joined = _stacked if self._ragged is None else self._ragged.joined
        return [
            gather(partial(joined, place), [inputs[place] for inputs in members]) if has_rows else first[place]
            for place, has_rows in enumerate(self.has_rows)
        ]

    def is_for_many(self, count: int) -> bool:
        """Return True if `many` is run for this number of members, else `one`."""
        return count > 1 or self.is_packed

    def parts(
        self, results: Sequence[Array], fed: Sequence[Array], members: Sequence[Sequence[Array]]
    ) -> Iterable[Sequence[Array]]:
        """Return the results of each member, given the results of a call.

        Raises:
            ValueError: a result is not as long as it has to be.
        """
        if not self.is_for_many(len(members)):
            if self._ragged is not None:  # a call that fails in a batch must fail alone, too, not only under load
                self._ragged.require_own(results, members[0])
            return (results,)
        if self._ragged is not None:
            return self._ragged.parts(results, fed, members)
        return (
            # Indexed by a number alone, a string array would give a `str`, not a 0-d array.
            [value[row, ...] if value.dtype.kind == "T" else value[row] for value in results]
            for row in range(len(members))
        )

    def node_specs(self) -> Spec | tuple[Spec, ...]:
        """See `SharedCode.node_specs`."""
        return self.specs[0] if len(self.specs) == 1 else self.specs

    def results_of(self, found: Sequence[Array]) -> Value:
        """The outputs of the node of a call, of the results of its member."""
        return found[0] if len(self.specs) == 1 else tuple(found)

    def built(self, rows: RowAxis, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
        """The results, in the current graph; `inputs` has one for each of the body's."""
        return Lifting(rows, self.label).checked_values(self._body, self._known(inputs), self._body.results)

    def _known(self, inputs: Sequence[LiftedValue]) -> dict[Tensor, LiftedValue]:
        return {**known_constants(self._constants), **dict(zip(self._inputs, inputs, strict=True))}

    def _lifted(self) -> BodyProgram:
        with Graph() as graph:
            known = known_constants(self._constants)
            for x, rows in zip(self._inputs, self.has_rows, strict=True):
                extents = (None, *x.shape) if rows and x.shape is not None else x.shape
                known[x] = LiftedValue(placeholder(x.dtype, extents), rows)
            feeds = tuple(known[x].tensor for x in self._inputs)
            # `_add_call` guarantees that at least one input has rows.
            count = shape(feeds[self.has_rows.index(True)])[0]
            found = lift(self._body, known, self._body.results, count, self.label)
        return BodyProgram(graph, feeds, tuple(found))


def _stacked(place: int, xp: Namespace, rows: Sequence[Array]) -> Array:
    return xp.stack(rows)


def shared_constants(captured: Mapping[Tensor, Tensor]) -> dict[Tensor, Node]:
    """Return the constants among a body's captures, by their inner tensors.

    They are constants of each program, too. Runs with another value cannot share it, so that none may be fed.
    """
    found = {inner: outer.node for inner, outer in captured.items() if outer.node.op is CONSTANT}
    for node in found.values():
        static_value(node.outputs[0])
    return found


def known_constants(constants: Mapping[Tensor, Node]) -> dict[Tensor, LiftedValue]:
    """Constants outside a body, in the current graph."""
    return {inner: LiftedValue(as_tensor(node.attrs["value"]), False) for inner, node in constants.items()}


_gatherers: dict[type[SharedCode], Callable[..., Value]] = {}


def install_gatherer(code: type[SharedCode], gather: Callable[..., Value]) -> None:
    """Register the function that computes such code and gives places in line; the runtime does so, as rooms below it
    may not know it.
    """
    _gatherers[code] = gather


def _kernel(xp: Namespace, *, shared: SharedCode, streamed: tuple[Tensor, ...] = (), **variables: object) -> Kernel:
    code, gather = shared.at(variables), _gatherers[type(shared)]
    told = {"streamed": streamed} if streamed else {}
    return lambda *inputs, **more: gather(code, inputs, **told, **more)


def _reads(node: Node) -> Effects:
    return tuple((resource.effect_key, Access.READ) for resource in resources_of(node))


def define_shared(name: str, what: str, instead: str, node_type: type[Node] = Node) -> Op:
    """The op of nodes with a `SharedCode`, for `what` has no gradient; what to differentiate `instead` is told."""
    op = define(
        name,
        lambda *inputs, shared, **attrs: shared.node_specs(),
        _kernel,
        conduct=Conduct(is_async=True, waits_in_line=True),
        effects=_reads,
        node_type=node_type,
    )

    @derivative(op)
    def refuse(node: Node, *grads: Tensor | None) -> NoReturn:
        raise GraphError(
            f"{node.name} is {what}, through which no gradient goes: differentiate {instead}"
            f"\n  built at {node.location}"
        )

    return op


BATCHED = define_shared(
    "batched", "a call of a batched function", "the function without batched(), over all rows at once"
)
"""One call of a batched function; its inputs are the arguments and what the function captures."""


@row_rule(BATCHED)
def _batched_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> list[Tensor]:
    shared: SharedBody = node.attrs["shared"]
    return [rows.spread(value) for value in shared.built(rows, shared.rows_inside(inputs, node))]


def batched(
    fn: Callable[P, Nest] | None = None,
    /,
    max_size: int = 64,
    *,
    max_delay_s: float = 0.0,
    max_bytes: int | None = None,
    cost: str = "learned",
    pad: bool | float | str | None = None,
    bucket: Sequence[int] | Callable[[int], int] | None = None,
    ragged: str | None = None,
    policy: StepPolicy | None = None,
) -> Callable[..., Nest]:
    """Make a function whose calls in graphs may be computed together with others: request batching.

    Each firing of such a call waits until nothing else in its session can go on. It waits at most for half of the time
    until its deadline, and half a second. Then the gathered firings, of any runs, iterations and branches, are computed
    as the rows of one call. They share one if they are calls of one place in the program, and their arguments have
    equal dtypes and shapes. Variables are read once for all members of a call. Other captures that depend on constants
    and variables alone are one value for all members, and only members with the same value share a call. Otherwise
    each member has its own value.

    A member that is cancelled or late leaves. If the function has branches or loops, a member that never ends does not
    hold up the others for ever once it has left. The others are computed again in halves once the call has taken twice
    the usual time, and twice the time until the first member left. The same happens after half of the time that the
    first of its members had, so that members that can still meet their deadline do. If the function calls a
    user-defined op that is not ``pure``, nothing is computed again: the remaining members wait for the call, and only
    later ones do not.

    If a call fails, its members are computed again in halves, until the one at fault is alone: its run fails, and the
    others go on. Results equal the member's own, within rounding, as a product of one row and of many take different
    kernels. No gradient goes through a call.

    Args:
        fn: takes tensors, or nests of them, and returns a tensor or a nest. It may have branches and loops, read
            variables, and check with `assert_that`, which fails only the members at fault. It may not change variables
            or await. Its numbers from `af.random` do not depend on the other members of the call.
        max_size: most members of a call.
        max_delay_s: seconds that a member may wait for others although nothing else is left to do; at most half of the
            time until its deadline.
        max_bytes: most bytes of arguments of a call; a member that has more is alone.
        cost: "learned": the size of a call is chosen by the durations of earlier calls; "none": all waiting members
            join.
        pad: padding for arguments that differ in extents which the graph leaves open, so that they share calls; the
            function takes ``lengths`` then, and honours them. See `Batch`.
        bucket: extents to pad to, or a function of a length that gives one.
        ragged: "packed": the function gets such arguments side by side, and ``offsets``.
        policy: decides when a call is made, and for how many members, in place of `max_delay_s` and `cost`.

    Returns:
        A function that takes and returns the same; without `fn`, a decorator.

    Raises:
        GraphError: an option is out of its range; or, from the function: it cannot be computed for several members at
            once (the message says why), or has no argument that is a tensor. With `pad`, `bucket` or `ragged`, also:
            the owner of each part of a result is not known.

    >>> import asyncflow as af
    >>> classify = batched(lambda x: af.argmax(x @ af.ones((4, 3))), max_size=32)
    >>> with af.Graph():
    ...     classify(af.placeholder("float32", (4,)))
    <Tensor batched:0 int64[]>
    """
    batch = Batch(
        max_size,
        max_delay_s=max_delay_s,
        max_bytes=max_bytes,
        cost=cost,
        pad=pad,
        bucket=bucket,
        ragged=ragged,
        policy=policy,
    )
    if fn is None:
        return lambda decorated: batched_with(decorated, batch)
    return batched_with(fn, batch)


def batched_with(
    fn: Callable[..., Nest], batch: Batch, name: str = "", side_by_side: Sequence[bool] = ()
) -> Callable[..., Nest]:
    """See `batched`.

    Args:
        fn: see there.
        batch: see there.
        name: of the nodes; without one, the function's.
        side_by_side: once the function has been called, which of its results are so, if that is known.
    """
    if not callable(fn):
        raise GraphError(f"batched takes a function; got {fn!r}")
    refuse_coroutines(fn)
    _require_told(fn, batch)
    name = name or getattr(fn, "__name__", "")

    @wraps(fn)
    def call(*args: Nest, **kwargs: Nest) -> Nest:
        leaves, structure = nest.flatten((args, kwargs))
        if current_graph() is None and not any(map(is_symbolic, leaves)):
            return fn(*args, **kwargs)  # called on arrays, without a graph: no other members exist
        with graph_for(*leaves) as graph:
            given = [graph.import_tensor(as_tensor(leaf)) for leaf in leaves]
            label = graph.unique_name(name if name.isidentifier() else "batched")
            return _add_call(fn, batch, graph, given, structure, label, side_by_side)

    if batch.tells is not None:  # callers do not pass this parameter
        shown = _signature_of(fn)
        if shown is not None:
            parameters = [x for name, x in shown.parameters.items() if name != batch.tells]
            vars(call)["__signature__"] = shown.replace(parameters=parameters)
    return call


def _signature_of(fn: Callable[..., Nest]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except ValueError:  # it has none
        return None


def _require_told(fn: Callable[..., Nest], batch: Batch) -> None:
    """Raise GraphError if a function lacks the parameter that describes its rows."""
    shown = None if batch.tells is None else _signature_of(fn)
    if shown is None:
        return
    parameters = shown.parameters
    if batch.tells not in parameters and all(x.kind is not x.VAR_KEYWORD for x in parameters.values()):
        options = "pad= and bucket= need" if batch.ragged is None else 'ragged="packed" needs'
        raise GraphError(
            f"{options} a function with a parameter {batch.tells}=, which says where rows end and padding begins; "
            f"{getattr(fn, '__name__', fn)} takes {', '.join(parameters) or 'no parameters'}"
        )


def _add_call(
    fn: Callable[..., Nest],
    batch: Batch,
    graph: Graph,
    given: Sequence[Tensor],
    structure: nest.Structure,
    label: str,
    side_by_side: Sequence[bool],
) -> Nest:
    ragged = None
    if batch.tells is not None:
        ragged = RaggedRows(batch, given, label)
    body, returned = _trace(fn, graph, given, structure, label, ragged, batch.tells)
    outer = {inner: outer for outer, inner in body.captures.items() if outer.node.op is not CONSTANT}
    if (store := next((x for x in outer.values() if x.dtype == VARIANT), None)) is not None:
        raise GraphError(
            f"{label} cannot be batched: {store.name}, which it captures, is a TensorArray or RowStore; pass in "
            f"the values "
            f"read from it\n  built at {store.node.location}"
        )
    # A capture with one value for all runs is fed once for a call; any other adds one row for each member.
    own = body.inputs[: len(given) + (ragged is not None)]
    has_rows = {**dict.fromkeys(own, True), **{x: not is_same_for_all(outer[x]) for x in outer}}
    if not any(has_rows.values()):
        raise GraphError(f"{label}: a batched function needs an argument that is a tensor, its member's own")
    if batch.ragged is not None and not all(has_rows[x] is False for x in outer):
        its = next(x.name for inner, x in outer.items() if has_rows[inner])
        raise GraphError(f"{label}: {its}, which it captures, is each run's own; make it an argument, to be packed too")
    try:
        shared = SharedBody(body, batch, has_rows, label, ragged)
        if ragged is not None:
            shared.find_parts(ragged, side_by_side)
    except CannotLift as reason:
        raise GraphError(f"{label} cannot be batched: {reason}") from None
    if batch.ragged is None:  # packed rows are one array
        warn_of_single_rows(graph, label, "batched", "member", body.walk())
    node = shared.add_to(graph, BATCHED, [*given, *outer.values()], label, body.outer_controls)
    return returned.unflatten(node.outputs)


def _trace(
    fn: Callable[..., Nest],
    graph: Graph,
    given: Sequence[Tensor],
    structure: nest.Structure,
    label: str,
    ragged: RaggedRows | None,
    tells: str | None,
) -> tuple[Subgraph, nest.Structure]:
    """Trace the body, and return it with the nest of its results."""
    body = Subgraph(graph, label)
    with body:
        specs = [x.spec for x in given] if ragged is None else [*(x.spec for x in given), ragged.told_spec]
        if ragged is not None:
            specs = list(starmap(ragged.spec_inside, enumerate(specs)))
        inner = [body.add_input(spec, "x") for spec in specs]
        args, kwargs = structure.unflatten(inner if tells is None else inner[:-1])
        leaves, returned = nest.flatten(
            fn(*args, **kwargs) if tells is None else fn(*args, **kwargs, **{tells: inner[-1]})
        )
        refuse_coroutines(*leaves)
        if not leaves:
            raise GraphError(f"{label}: a batched function returns a tensor, or a nest of them; it gives nothing")
        results = [result_tensor(body, leaf) for leaf in leaves]
    paths = [*structure.paths("argument"), *([] if tells is None else [tells]), *returned.paths("result")]
    refuse_handles("batched", paths, [*inner, *results])
    body.results = results
    body.closed = True
    if (fault := why_not_shareable(body.walk())) is not None:
        raise GraphError(f"{label} cannot be batched: {fault}")
    if draws(body):  # keyed by the member's own firing, so that its numbers do not depend on other members
        try:
            capture_key(body)
        except CannotLift as reason:
            raise GraphError(f"{label} cannot be batched: {reason}") from None
    return body, returned


def why_not_shareable(nodes: Iterable[Node]) -> str | None:
    """Return a fault of one node whose results would differ among several members; None without such a node."""
    for node in nodes:
        if node.op.conduct.needs_context and node.op is not RANDOM_AGAIN and not draws_numbers(node.op):
            fault = "depends on the run, which members of a call do not share: do it outside, and pass the result in"
        elif node.subgraphs == () and any(
            access is Access.WRITE and not (key is node and node.outputs) for key, access in node_effects(node)
        ):  # checks, and nodes that close arrays, write to no resource but themselves
            fault = "has an effect, which would happen once for several members: do it outside"
        else:
            continue
        return f"{node.name} ({node.op.name}) {fault}\n  built at {node.location}"
    return None


def is_same_for_all(x: Tensor) -> bool:
    """Return True if all runs see the same value, but for writes to variables."""
    seen: set[Node] = set()
    stack = [x]
    while stack:
        node = stack.pop().node
        if node in seen:
            continue
        seen.add(node)
        # Branches and loops are not searched: False is always correct, and costs only a row for each member.
        if node.op is PARAMETER:
            outer = captured_by(node)
            if outer is None:
                return False
            stack.append(outer)
        elif not SAME_FOR_ALL.allows(node.op) or any(access is Access.WRITE for _, access in node_effects(node)):
            return False
        else:
            stack.extend(node.inputs)
    return True


def identity_of(value: Array) -> Hashable:
    """Return a key of an array that activations share; equal keys mean equal values.

    Arrays of at most `_SAME_BYTES` are compared by their contents, larger ones by object.
    """
    if value.nbytes > _SAME_BYTES:
        return id(value)  # waiting members keep it alive; equal copies do not share a call, which is only slower
    # The bytes of a string array hold addresses of its longer strings, not their text.
    return value.shape, tuple(value.ravel().tolist()) if value.dtype.kind == "T" else value.tobytes()


def is_repeatable(nodes: Iterable[Node]) -> bool:
    """Return True if the nodes may be computed again: they call no user-defined op that is not pure."""
    return all(CALL_AGAIN.allows(node.op) for node in nodes)


def variables_of(*bodies: Subgraph) -> dict[str, Resource]:
    """Return attributes that name the variables read by bodies, for passes that look for them."""
    found = dict.fromkeys(resource for body in bodies for resource in body.resources)
    return {f"variable_{index}": resource for index, resource in enumerate(found)}


def captured_by(parameter: Node) -> Tensor | None:
    """Return the tensor outside that a parameter stands for; None for an argument."""
    body = parameter.graph
    assert isinstance(body, Subgraph)
    return next((outer for outer, inner in body.captures.items() if inner.node is parameter), None)


install_batching(batched_with)
