"""`batched`: a function whose firings, of any runs and iterations, may be computed as the rows of one call.

A call of it in a graph is one node, which waits as a coroutine does. Its body is built twice, each time as a graph of
its own: over one member, as it was written, and lifted over many. A batch is a run of one of these, in the session of
the members, and so has its regions, devices, traces and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, ParamSpec, Self
from weakref import WeakValueDictionary

from asyncflow.control.body import refuse_handles, result_tensor
from asyncflow.errors import GraphError
from asyncflow.graph import nest
from asyncflow.graph.build import add_control_input, as_tensor, graph_for, is_symbolic, placeholder, refuse_coroutines
from asyncflow.graph.builtin import CONSTANT, PARAMETER, PLACEHOLDER
from asyncflow.graph.graph import Graph, Subgraph, current_graph, node_effects
from asyncflow.graph.op import Access, Effects, define, derivative
from asyncflow.graph.resource import resources_of
from asyncflow.lift.lifting import Lifting, lift
from asyncflow.ops.batch import Batch
from asyncflow.ops.custom import install_batching
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, row_rule
from asyncflow.ops.shape import shape

if TYPE_CHECKING:
    from asyncflow.graph.ir import Attrs, Node, Tensor
    from asyncflow.graph.resource import Resource
    from asyncflow.graph.spec import Spec
    from asyncflow.values import Array, Kernel, Namespace, Nest, Value

P = ParamSpec("P")


NO_TEXT = "{} is code of this process, built for many members: build the graph anew where it is to run"
"""Why what several runs share is not in the text of a graph."""


class BodyProgram(NamedTuple):
    """The body of a batched function as a graph of its own.

    Attributes:
        graph: whose placeholders are the body's inputs.
        feeds: these placeholders.
        fetches: the body's results.
        states: what its variables stand for, where that is settled.
    """

    graph: Graph
    feeds: tuple[Tensor, ...]
    fetches: tuple[Tensor, ...]
    states: Mapping[Resource, object] = MappingProxyType({})


class SharedCode:
    """Code that several runs compute together, for one version of the variables that it reads.

    Members of different versions find different codes, and so share nothing.
    """

    def __init__(self, label: str, *bodies: Subgraph) -> None:
        self.label = label
        self.states: Mapping[Resource, object] = MappingProxyType({})
        self.origin = self
        self._resources = variables_of(*bodies)
        self._versions: WeakValueDictionary[tuple[int, ...], Self] = WeakValueDictionary()

    def programs(self) -> tuple[BodyProgram, ...]:
        """The graphs that it consists of."""
        raise NotImplementedError

    def at(self, states: Mapping[str, object]) -> Self:
        """The code whose variables stand for `states`; the same object each time.

        Args:
            states: by the names that `variables_of` gives.
        """
        key = tuple(map(id, states.values()))
        found = self._versions.get(key) if key else self
        if found is None:
            found = self._versions[key] = copy(self)
            found.states = {self._resources[name]: state for name, state in states.items()}
            for name, value in list(vars(found).items()):
                if isinstance(value, BodyProgram):
                    setattr(found, name, value._replace(states=found.states))
        return found


class SharedBody(SharedCode):
    """The code of one call of a batched function in a graph.

    Attributes:
        label: its name.
        what: a member waits for, for people.
        batch: how many share a call, and when.
        has_rows: of each input, whether each member has one of its own; else it is the same for all that share a call.
        specs: of the results of one member.
        is_repeatable: computing a member again does no harm.
    """

    why_no_text = NO_TEXT.format("the function of a batched call")

    def __init__(self, body: Subgraph, batch: Batch, has_rows: Mapping[Tensor, bool], label: str) -> None:
        super().__init__(label, body)
        self.what = f"a call of {label} that others share"
        self.batch = batch
        self.has_rows = tuple(has_rows.values())
        self.specs = tuple(x.spec for x in body.results)
        self.is_repeatable = is_repeatable(body)
        self._body = body
        self._inputs = tuple(has_rows)
        # Constants outside the body are constants of each program.
        self._constants = {inner: outer.node for outer, inner in body.captures.items() if inner not in has_rows}
        self.many = self._lifted()  # at once, so that what cannot be lifted is refused where it is written

    def __repr__(self) -> str:
        return f"<batched {self.label}, at most {self.batch.max_size}>"

    @cached_property
    def one(self) -> BodyProgram:
        """Over one member."""
        with Graph() as graph:
            feeds = tuple(placeholder(x.dtype, x.shape) for x in self._inputs)
            rows = RowAxis(as_tensor(1), 1, lambda: as_tensor([0]), label=self.label)
            found = self.built(rows, [LiftedValue(x, has_rows=False) for x in feeds])
            # What comes of a TensorArray is a row although its inputs are not.
            results = tuple(value.tensor[0] if value.has_rows else value.tensor for value in found)
        return BodyProgram(graph, feeds, results, self.states)

    def programs(self) -> tuple[BodyProgram, ...]:
        """Over one member, and over many."""
        return self.one, self.many

    def results_of(self, found: Sequence[Array]) -> Value:
        """The outputs of the node of a call, of the results of its member."""
        return found[0] if len(self.specs) == 1 else tuple(found)

    def built(self, rows: RowAxis, inputs: Sequence[LiftedValue]) -> list[LiftedValue]:
        """The results, in the current graph; `inputs` has one for each of the node's."""
        known = {**known_constants(self._constants), **dict(zip(self._inputs, inputs, strict=True))}
        return Lifting(rows, self.label).values(self._body, known, self._body.results)

    def _lifted(self) -> BodyProgram:
        with Graph() as graph:
            known = known_constants(self._constants)
            for x, rows in zip(self._inputs, self.has_rows, strict=True):
                extents = (None, *x.shape) if rows and x.shape is not None else x.shape
                known[x] = LiftedValue(placeholder(x.dtype, extents), rows)
            feeds = tuple(known[x].tensor for x in self._inputs)
            count = shape(feeds[self.has_rows.index(True)])[0]
            found = lift(self._body, known, self._body.results, count, self.label)
        return BodyProgram(graph, feeds, tuple(found))


def known_constants(constants: Mapping[Tensor, Node]) -> dict[Tensor, LiftedValue]:
    """Constants outside a body, in the current graph."""
    return {inner: LiftedValue(as_tensor(node.attrs["value"]), False) for inner, node in constants.items()}


_gatherers: list[Callable[[SharedBody, tuple[Array, ...]], Value]] = []


def install_gatherer(gather: Callable[[SharedBody, tuple[Array, ...]], Value]) -> None:
    """Tells who gathers members, and gives places in line; the runtime does, which nothing here may know."""
    _gatherers[:] = [gather]


def _kernel(xp: Namespace, *, shared: SharedBody, **variables: object) -> Kernel:
    code = shared.at(variables)
    return lambda *inputs: _gatherers[0](code, inputs)


def _specs(*inputs: Spec, shared: SharedBody, **variables: object) -> Spec | tuple[Spec, ...]:
    return shared.specs[0] if len(shared.specs) == 1 else shared.specs


def reads(node: Node) -> Effects:
    """The variables that a shared body reads."""
    return tuple((resource.effect_key, Access.READ) for resource in resources_of(node))


BATCHED = define("batched", _specs, _kernel, is_async=True, waits_in_line=True, effects=reads)
"""One call of a batched function; its inputs are the arguments and what the function captures.

Attributes beside `shared` are the variables that it reads, when the call is made.
"""


@derivative(BATCHED)
def _no_gradient(node: Node, *grads: Tensor | None) -> NoReturn:
    raise GraphError(
        f"{node.name} is a call of a batched function, through which no gradient goes: differentiate the function as "
        f"it is without batched(), over all rows at once\n  built at {node.location}"
    )


@row_rule(BATCHED)
def _batched_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> list[Tensor]:
    shared: SharedBody = node.attrs["shared"]
    return [rows.spread(value) for value in shared.built(rows, inputs)]


def batched(
    fn: Callable[P, Nest] | None = None,
    /,
    *,
    max_size: int = 64,
    max_delay_s: float = 0.0,
    max_bytes: int | None = None,
    cost: str = "learned",
) -> Callable[..., Nest]:
    """Makes a function whose calls in graphs may be computed together with others: request batching.

    Each firing of such a call waits until nothing else in its session can go on; then those that have gathered, of any
    runs, iterations and branches, are computed as the rows of one call. They share one if they are calls of one place
    in the program, and their arguments have equal dtypes and shapes. Variables are read once for all members of a call.
    What else the function captures is one value for all of them if it depends on constants and variables alone, and
    only members that have the very same one share a call; else each member has its own.

    A member that is cancelled leaves; if a call fails, its members are computed again in halves, until the one at fault
    is alone: its run fails, and the others go on. Results are those of the member by itself, within rounding, as a
    product of one row and of many take different kernels.

    Args:
        fn: takes tensors, or nests of them, and returns a tensor or a nest. It may have branches and loops, and read
            variables; not change them, draw random numbers, or await.
        max_size: most members of a call.
        max_delay_s: seconds that a member may wait for others although nothing else is left to do.
        max_bytes: most bytes of arguments of a call; a member that has more is alone.
        cost: "learned": how many share a call is chosen from what calls took; "none": as many as there are.

    Returns:
        A function that takes and returns the same; without `fn`, a decorator.

    Raises:
        GraphError: an option is out of its range; or, from the function: what it does cannot be computed for several
            members at once (the message names it), or it has no argument that is a tensor.

    >>> import asyncflow as af
    >>> classify = batched(lambda x: af.argmax(x @ af.ones((4, 3))), max_size=32)
    >>> with af.Graph():
    ...     classify(af.placeholder("float32", (4,)))
    <Tensor batched:0 int64[]>
    """
    batch = Batch(max_size, max_delay_s=max_delay_s, max_bytes=max_bytes, cost=cost)
    if fn is None:
        return lambda decorated: batched_with(decorated, batch)
    return batched_with(fn, batch)


def batched_with(fn: Callable[..., Nest], batch: Batch, name: str = "") -> Callable[..., Nest]:
    """See `batched`; `name` is that of the nodes, and without one, the function's."""
    if not callable(fn):
        raise GraphError(f"batched takes a function; got {fn!r}")
    refuse_coroutines(fn)
    name = name or getattr(fn, "__name__", "")

    @wraps(fn)
    def call(*args: Nest, **kwargs: Nest) -> Nest:
        leaves, structure = nest.flatten((args, kwargs))
        if current_graph() is None and not any(map(is_symbolic, leaves)):
            return fn(*args, **kwargs)
        with graph_for(*leaves) as graph:
            given = [graph.import_tensor(as_tensor(leaf)) for leaf in leaves]
            return _add_call(fn, batch, graph, given, structure, name if name.isidentifier() else "batched")

    return call


@dataclass(frozen=True, slots=True)
class _TracedBody:
    body: Subgraph
    structure: nest.Structure


def _add_call(
    fn: Callable[..., Nest], batch: Batch, graph: Graph, given: Sequence[Tensor], structure: nest.Structure, name: str
) -> Nest:
    label = graph.unique_name(name)
    traced = _trace(fn, graph, given, structure, label)
    body = traced.body
    outer = {inner: outer for outer, inner in body.captures.items() if outer.node.op is not CONSTANT}
    has_rows = {**dict.fromkeys(body.inputs[: len(given)], True), **{x: not is_same_for_all(outer[x]) for x in outer}}
    if not any(has_rows.values()):
        raise GraphError(f"{label}: a batched function takes a tensor, of which each member has its own; it has none")
    try:
        shared = SharedBody(body, batch, has_rows, label)
    except CannotLift as reason:
        raise GraphError(f"{label} cannot be batched: {reason}") from None
    attrs: Attrs = {"shared": shared, **variables_of(body)}
    node = graph.add_node(BATCHED, [*given, *outer.values()], attrs, _specs(**attrs), reserved_name=label)
    for control in body.outer_controls:
        add_control_input(node, control)
    return traced.structure.unflatten(node.outputs)


def _trace(
    fn: Callable[..., Nest], graph: Graph, given: Sequence[Tensor], structure: nest.Structure, label: str
) -> _TracedBody:
    body = Subgraph(graph, label)
    with body:
        inner = [body.add_input(x.spec, "x") for x in given]
        args, kwargs = structure.unflatten(inner)
        leaves, returned = nest.flatten(fn(*args, **kwargs))
        refuse_coroutines(*leaves)
        if not leaves:
            raise GraphError(f"{label}: a batched function returns a tensor, or a nest of them; it gives nothing")
        results = [result_tensor(body, leaf) for leaf in leaves]
    refuse_handles("batched", (*structure.paths("argument"), *returned.paths("result")), [*inner, *results])
    body.results = results
    body.closed = True
    if (fault := why_not_shareable(body)) is not None:
        raise GraphError(f"{label} cannot be batched: {fault}")
    return _TracedBody(body, returned)


def why_not_shareable(body: Subgraph) -> str | None:
    """Names something in a body that would not be the same for each of several members; None if all is."""
    for node in body.walk():
        if node.op.needs_context:
            fault = "draws random numbers, which would depend on who shares the call: draw outside, and pass them in"
        elif any(access is Access.WRITE for _, access in node_effects(node)) and node.subgraphs == ():
            fault = "has an effect, which would happen once for several members: do it outside"
        else:
            continue
        return f"{node.name} ({node.op.name}) {fault}\n  built at {node.location}"
    return None


def is_same_for_all(x: Tensor) -> bool:
    """Whether all runs see the same value, but for writes to variables."""
    seen: set[Node] = set()
    stack = [x]
    while stack:
        node = stack.pop().node
        if node in seen:
            continue
        seen.add(node)
        if node.op is PLACEHOLDER or node.op.is_random or node.op.is_user or node.subgraphs:
            return False
        if node.op is PARAMETER:
            outer = _captured(node)
            if outer is None:
                return False
            stack.append(outer)
        elif node.op is not CONSTANT:
            if any(access is Access.WRITE for _, access in node_effects(node)):
                return False
            stack.extend(node.inputs)
    return True


def is_repeatable(body: Subgraph) -> bool:
    """Whether computing the body again does no harm: it calls nothing of the user's that is not said to be pure."""
    return not any(node.op.is_user and not node.op.is_repeatable for node in body.walk())


def variables_of(*bodies: Subgraph) -> dict[str, Resource]:
    """Attributes that name the variables that bodies read, for those who look for them."""
    found = dict.fromkeys(resource for body in bodies for resource in body.resources)
    return {f"variable_{index}": resource for index, resource in enumerate(found)}


def _captured(parameter: Node) -> Tensor | None:
    """The tensor outside that a parameter stands for; None for an argument."""
    body = parameter.graph
    assert isinstance(body, Subgraph)
    return next((outer for outer, inner in body.captures.items() if inner.node is parameter), None)


install_batching(batched_with)

__all__ = [
    "BATCHED",
    "NO_TEXT",
    "BodyProgram",
    "SharedBody",
    "SharedCode",
    "batched",
    "batched_with",
    "install_gatherer",
    "is_repeatable",
    "is_same_for_all",
    "known_constants",
    "reads",
    "variables_of",
    "why_not_shareable",
]
