"""`Graph`: nodes in the order they were built; `Subgraph`: the body of a branch or loop, with captures."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, ClassVar, Final, Literal, NoReturn, Self, cast
from weakref import ref

from asyncflow.entered import Entered
from asyncflow.errors import GraphError, SourceLocation, user_location
from asyncflow.foreign_names import close_names
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.home import Home
from asyncflow.graph.ir import PICKLE_GRAPHS, Assumption, Attrs, Node, NodeId, Tensor, is_name
from asyncflow.graph.op import Access, Effects, Op
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.graph.structured import StructuredNode, deep, levels
from asyncflow.graph.values.spec import Spec
from asyncflow.pickling import NotPickled


@dataclass(slots=True, eq=False)
class Scope:
    """The scope that nodes which join a graph are given: the prefix of their names, and requests.

    `graph` is None in the scope that a graph itself keeps: nothing in a graph refers to it (see `Home`).
    """

    graph: Graph | None = None
    name_scope: str = ""
    device: str | None = None
    colocated_with: str | None = None
    controls: tuple[Node, ...] = ()


_current: Entered[Graph] = Entered("asyncflow_graph")
_scopes: Entered[Scope] = Entered("asyncflow_scopes")


current_graph = _current.innermost
"""Returns the graph or subgraph that new nodes join, or None."""

leave_graphs = _current.leave_all
"""Function that makes no graph current in this context: the user's kernels run in a copy of the awaiting code's
context.
"""


_SHOWN: Final = frozenset({"effects", "named", "node", "nodes", "seed", "tensor", "version", "walk"})
"""Public names of a graph that programs use."""


class Graph(NotPickled):
    """A program: nodes and edges. Use it as a context manager; nodes built inside join it.

    A graph may grow after it has run; `version` counts its nodes, and sessions compile anew when it changes. Any task
    and any thread may add to it, also at the same time: which graph is being built, and under which scopes, each knows
    for itself. `lock` keeps others out while several nodes have to be added in one go, as by `gradients`.

    A graph is freed, with its plans, as soon as the last reference to it goes: a variable of yours, a `Session` made
    for it, an `@af.function`. Its tensors and nodes do not count. A tensor that outlives its graph keeps the nodes it
    is computed from, and can still be run and built upon. Names, gradients and all other nodes went with the graph.

    Args:
        effects: ``"ordered"``: nodes that touch one resource run in the order they were written, and a branch or loop
            that runs, runs all its effects. ``"unordered"``: only explicit edges order nodes, and branches and loops
            are pruned to the needed nodes (the MAPL '17 semantics).
        seed: seeds the graph's random ops. None: each session draws one, which its checkpoints keep; `Session(seed=)`
            is of the schedule alone.

    >>> with Graph() as graph:
    ...     pass
    >>> len(graph.nodes)
    0
    """

    is_subgraph: ClassVar[bool] = False
    made_of: Graph | None = None
    """Of a lowered graph, the graph that the nodes in its regions still stand in."""
    _instead = PICKLE_GRAPHS

    def __init__(self, *, effects: Literal["ordered", "unordered"] = "ordered", seed: int | None = None) -> None:
        if effects not in ("ordered", "unordered"):
            raise GraphError(f"Graph(effects={effects!r}): effects must be 'ordered' or 'unordered'")
        self.effects: Literal["ordered", "unordered"] = effects
        self.seed = seed
        self.home = Home(ref(self))
        self.nodes: list[Node] = []
        self.version = 0
        self.label = ""
        self.closed = False
        self.lock = RLock()
        self._base = Scope()
        self.frames: dict[Node, tuple[str, ...]] = {}
        self.enters: dict[tuple[str, ...], Node] = {}  # first Enter of each frame, in the first `searched_for_enters`
        self.searched_for_enters = 0
        self.shapes: dict[Tensor, Tensor] = {}
        self.extents: dict[Tensor, tuple[int, ...] | None] = {}
        self.kept_for_gradients: dict[Node, Any] = {}
        self.parted: dict[Node, Any] = {}  # for nodes made by lifting: the branch or loop over rows
        self.assumptions: dict[Hashable, Assumption] = {}  # of the root graph with all bodies
        self.remarks: dict[str, str] = {}  # by label, how a part was built: for `Plan.explain`
        self.compiled: dict[Hashable, Any] = {}  # plans of sessions, dropped with the graph
        self._by_name: dict[str, Node] = {}
        self._taken: dict[str, int] = {}

    @property
    def parent(self) -> Graph | None:
        """The graph that a body of a branch or loop stands in; None for others."""
        return None

    @property
    def root(self) -> Graph:
        """The graph that is in no other: this one, or the outermost around it."""
        return self

    @classmethod
    def of_left(cls, plain: Mapping[str, object], nodes: list[Node], forgotten: dict[Node, object]) -> Self:
        """Return a graph of nodes that have outlived theirs; see `Home.revived`."""
        graph = cls.__new__(cls)
        Graph.__init__(graph)
        graph.__dict__.update(plain)
        graph.nodes, graph.closed = nodes, cls.is_subgraph
        graph.kept_for_gradients = graph.parted = forgotten
        graph._by_name = {node.name: node for node in graph.walk()}
        return graph

    def __dir__(self) -> list[str]:
        """Names for completion: the library's own methods are left out."""
        return [name for name in super().__dir__() if name.startswith("_") or name in _SHOWN]

    def __del__(self) -> None:
        if "_taken" in self.__dict__:  # else the constructor has refused its arguments
            self.home.leave(self)

    def __enter__(self) -> Self:
        _current.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _current.leave(self)

    def __copy__(self) -> NoReturn:
        raise GraphError(
            "a shallow copy of a graph would share its nodes, which know one graph; use copy.deepcopy(graph)"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        memo[id(self.compiled)] = {}  # a copy has no compiled plans yet
        memo[id(self.lock)] = RLock()
        return super().__deepcopy__(memo)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} nodes>"

    # -- building ------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope:
        """The scope of nodes that this task or thread adds."""
        for scope in reversed(_scopes.all()):  # inner bodies have their own scopes, and this graph may still get nodes
            if scope.graph is self:
                return scope
        return self._base

    @contextmanager
    def scoped(self, **changes: object) -> Iterator[Scope]:
        """Change the scope, for nodes that this task or thread adds inside the block."""
        scope = replace(self.scope, graph=self, **cast("Attrs", changes))
        _scopes.enter(scope)
        try:
            yield scope
        finally:
            _scopes.leave(scope)

    def add_node(
        self,
        op: Op,
        inputs: Sequence[Tensor],
        attrs: Attrs,
        specs: Spec | tuple[Spec, ...],
        *,
        name: str | None = None,
        reserved_name: str | None = None,
        location: SourceLocation | None = None,
    ) -> Node:
        """Append a node whose inputs already belong to this graph.

        Args:
            op: the op of the node.
            inputs: tensors of this graph.
            attrs: static arguments of the op.
            specs: of the outputs: one, or a tuple of them where the kernel gives a tuple.
            name: to be made unique; None takes the op's.
            reserved_name: from an earlier `unique_name`, taken as it is.
            location: the user's line; None finds it.

        Raises:
            GraphError: this is the body of a branch or loop, and it is finished: only its function may add to it.
        """
        if self.closed:
            raise GraphError(f"{self.label} is finished: nodes can only be added while its function is being called")
        root, scope = self.root, self.scope
        location = location or user_location()  # outside the lock: it walks the stack
        full = "" if reserved_name else scope.name_scope + _valid(op.name if name is None else name)
        with root.lock:
            node = op.node_type(
                graph=self,
                id=NodeId(root.version),
                name=reserved_name or _numbered(full, root._taken),
                op=op,
                inputs=inputs,
                attrs=attrs,
                specs=specs,
                control_inputs=scope.controls,
                device=scope.device,
                colocated_with=scope.colocated_with,
                location=location,
            )
            root._by_name[node.name] = node
            root._taken.setdefault(node.name, 0)
            self.nodes.append(node)
            root.version += 1  # the root's version includes bodies: sessions recompile if any of them grows
        return node

    def adopt(self, node: Node) -> None:
        """Append a node of another graph, which is used up; a compiler pass calls `renumber` when it is done."""
        node.graph = self
        self.root._by_name[node.name] = node
        self.nodes.append(node)

    def take_back(self, count: int) -> None:
        """Remove the nodes behind the first `count`, which nothing else may use; their names are free again."""
        with self.root.lock:
            gone = self.nodes[count:]
            del self.nodes[count:]
            for each in deep(gone):
                self.root._by_name.pop(each.name, None)
                self.root._taken.pop(each.name, None)
            # Notes on removed nodes would keep them alive, and lead gradients to values that no graph computes.
            outputs = {tensor for node in gone for tensor in node.outputs}
            self.shapes = {x: found for x, found in self.shapes.items() if outputs.isdisjoint((x, found))}
            kept = {key: each for key, each in self.root.assumptions.items() if outputs.isdisjoint(each.tensors)}
            self.root.assumptions = kept
            self.home.give_up(gone)

    def renumber(self) -> None:
        """Give the nodes of a root graph ids in their order again."""
        for index, node in enumerate(self.nodes):
            node.id = NodeId(index)
        self.version = len(self.nodes)

    def unique_name(self, name: str) -> str:
        """`name` inside the current name scope, numbered if taken: ``layer/add``, ``layer/add_1``.

        Raises:
            GraphError: it is no string, is empty, or has a colon, which stands between node and output in a fetch.
        """
        return self.reserve(self.scope.name_scope + _valid(name))

    def reserve(self, full: str) -> str:
        """`full`, numbered if taken, and taken from here on; the compiler's own names may have a colon."""
        root = self.root
        with root.lock:
            return _numbered(full, root._taken)

    def has_name(self, name: str) -> bool:
        """Return True if `unique_name` would number `name`, outside all scopes."""
        return name in self.root._taken

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as seen from this graph: itself, or a capture of an enclosing graph's tensor.

        Raises:
            GraphError: it belongs to another graph, or to the body of a branch or loop that does not enclose this one.
        """
        if tensor.node._home is self.home:
            return tensor
        raise GraphError(_leak(tensor, self))

    def import_control(self, node: Node) -> Node | None:
        """`node` as a control input here; None if an enclosing branch or loop waits for it instead."""
        if node._home is self.home:
            return node
        raise GraphError(_leak(node.outputs[0] if node.outputs else node, self))

    def can_use(self, graph: Graph) -> bool:
        """Return True if values of `graph` can be imported here."""
        return graph is self

    # -- looking up ----------------------------------------------------------------------------------------------

    def node(self, name: str) -> Node:
        """Return the node of that name, in this graph or in any branch or loop inside.

        Raises:
            GraphError: there is none; close names are suggested.
        """
        found = self.root._by_name.get(_checked_name(name))
        if found is None:
            raise GraphError(f"no node is named {name!r}{_suggest(name, self.root._by_name)}")
        return found

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name: ``"layer/add:0"``, or ``"layer/add"`` for output 0.

        Raises:
            GraphError: there is none.
        """
        node_name, _, index = _checked_name(name).partition(":")
        node = self.node(node_name)
        number = int(index) if index.isascii() and index.isdigit() else 0 if not index else -1
        if not 0 <= number < len(node.outputs):
            raise GraphError(f"no tensor is named {name!r}: node {node_name!r} has {len(node.outputs)} outputs")
        return node.outputs[number]

    def named(self, name: str) -> Tensor | Node:
        """The tensor of that name, or the node if it has no outputs: what a run fetches by it.

        Raises:
            GraphError: there is neither.
        """
        return self.tensor(name) if ":" in _checked_name(name) or self.node(name).outputs else self.node(name)

    def walk(self) -> list[Node]:
        """Return every node, also inside branches and loops, outer before inner."""
        return [node for graph in levels(self) for node in graph.nodes]

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The variables and other resources that its nodes touch, in the order in which they come."""
        return tuple(dict.fromkeys(each for node in self.walk() for each in resources_of(node)))


class Subgraph(Graph):
    """The body of a branch or loop (or a loop's predicate).

    Attributes:
        label: for messages and names, such as ``while/body``.
        around: the home of `parent`.
        inputs: one inner tensor per input of the structured node: first its parameters, then its captures.
        captures: outer tensor (of `parent`) to inner tensor.
        starts: in the body of a loop that is being built, inner loop variables to the outer tensors they start with.
        results: the tensors it gives back.
        outer_controls: nodes of `parent` that must run before the structured node does.
        closed: whether its function has returned, after which no node may join.
    """

    is_subgraph: ClassVar[bool] = True

    def __init__(self, parent: Graph, label: str) -> None:
        super().__init__(effects=parent.effects, seed=parent.seed)
        self.around = parent.home
        self.label = label
        outer = parent.scope
        self._base = Scope(None, f"{label}/", outer.device, outer.colocated_with)
        self._begin()

    def _begin(self) -> None:
        self.inputs: list[Tensor] = []
        self.captures: dict[Tensor, Tensor] = {}
        self.starts: dict[Tensor, Tensor] = {}
        self.results: list[Tensor] = []
        self.outer_controls: dict[Node, None] = {}

    @classmethod
    def of_left(cls, plain: Mapping[str, object], nodes: list[Node], forgotten: dict[Node, object]) -> Self:
        """See `Graph.of_left`: a body without its branch or loop, of which only messages have use."""
        body = super().of_left(plain, nodes, forgotten)
        body._begin()
        return body

    @property
    def parent(self) -> Graph:
        """See `Graph.parent`."""
        return self.around.graph

    @parent.setter
    def parent(self, parent: Graph) -> None:
        self.around = parent.home

    @property
    def root(self) -> Graph:
        """See `Graph.root`."""
        graph: Graph = self
        while isinstance(graph, Subgraph):
            graph = graph.around.graph
        return graph

    def __repr__(self) -> str:
        return f"<Subgraph {self.label} of {len(self.nodes)} nodes>"

    def can_use(self, graph: Graph) -> bool:
        """Return True if values of `graph` can be imported here: of this graph, or of one around it."""
        return graph is self or self.parent.can_use(graph)

    def add_input(self, spec: Spec, name: str) -> Tensor:
        """A new inner tensor that stands for an input of the structured node."""
        with self.scoped(controls=()):  # a parameter has its value before any node of the body can run
            node = self.add_node(PARAMETER, (), {"spec": spec}, spec, name=name)
        self.inputs.append(node.outputs[0])
        return node.outputs[0]

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """See `Graph.import_tensor`; tensors of enclosing graphs become captures."""
        if tensor.node._home is self.home:
            return tensor
        if not self.can_use(tensor.node.graph):
            raise GraphError(_leak(tensor, self))
        outer = self.parent.import_tensor(tensor)  # level by level: each enclosing body captures it, too
        if outer not in self.captures:
            self.captures[outer] = self.add_input(outer.spec, f"capture_{tensor.node.name.rpartition('/')[2]}")
        return self.captures[outer]

    def import_control(self, node: Node) -> Node | None:
        """See `Graph.import_control`: a node outside runs before the whole branch or loop."""
        if node._home is self.home:
            return node
        if not encloses(node.graph, self):
            raise GraphError(_leak(node.outputs[0] if node.outputs else node, self))
        outer = self.parent.import_control(node)
        if outer is not None:
            self.outer_controls[outer] = None
        return None


def encloses(outer: Graph, inner: Graph) -> bool:
    """Return True if `inner` is `outer`, or a branch or loop somewhere inside it."""
    graph: Graph | None = inner
    while graph is not None:
        if graph is outer:
            return True
        graph = graph.parent
    return False


@contextmanager
def reopened(graph: Graph) -> Iterator[Graph]:
    """Make `graph` current, even a finished body: for later additions to a program, such as gradients.

    Added nodes belong to no scope: neither names nor devices and control edges come from the place where `graph` was
    built.
    """
    prefix = f"{graph.label}/" if isinstance(graph, Subgraph) else ""
    with graph.root.lock, graph.scoped(name_scope=prefix, device=None, colocated_with=None, controls=()):
        saved, graph.closed = graph.closed, False
        try:
            with graph:
                yield graph
        finally:
            graph.closed = saved


def node_effects(node: Node) -> Effects:
    """Resources the node touches: its op's effects, or all effects inside a structured node, first touch first."""
    if isinstance(node, StructuredNode):
        return _combine(effect for body in node.subgraphs for inner in body.nodes for effect in node_effects(inner))
    return node.op.effects(node) if node.op.effects is not None else ()


def has_side_effect(node: Node) -> bool:
    """Return True if the node changes anything outside its outputs."""
    return any(access is Access.WRITE for _, access in node_effects(node))


def _combine(effects: Iterable[tuple[Hashable, Access]]) -> Effects:
    combined: dict[Hashable, Access] = {}
    for resource, access in effects:
        if combined.get(resource) is not Access.WRITE:
            combined[resource] = access
    return tuple(combined.items())


def _valid(name: str) -> str:
    if not is_name(name):
        raise GraphError(f"name={name!r}: a name is a string that is not empty and has no ':' in it")
    return name


def _numbered(full: str, taken: dict[str, int]) -> str:
    """A name that is not taken, which is from here on; the caller has the lock of the root graph."""
    candidate = full
    while candidate in taken:  # keep the count: otherwise each of a thousand equal names would search from 1
        taken[full] += 1
        candidate = f"{full}_{taken[full]}"
    taken[candidate] = 0
    return candidate


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise GraphError(f"a node or tensor is looked up by its name, a string such as 'layer/add:0'; got {name!r}")
    return name


def _leak(value: Tensor | Node, graph: Graph) -> str:
    home = value.graph
    node = value.node if isinstance(value, Tensor) else value
    here = graph.label if isinstance(graph, Subgraph) else "this graph"
    if home.root is not graph.root:
        return (
            f"{value!r} belongs to another graph than {here}: a graph only uses its own tensors; feed its value instead"
            f"\n  built at {node.location}"
        )
    where = home.label if isinstance(home, Subgraph) else "the outer graph"
    return (
        f"{value!r} was built inside {where} and is used in {here}, which lies outside it: "
        f"a value leaves a branch or loop only as one of its results; return it from the function"
        f"\n  built at {node.location}"
    )


def _suggest(name: str, known: Mapping[str, object]) -> str:
    close = close_names(name, list(known))
    return f"; did you mean {' or '.join(repr(item) for item in close)}?" if close else ""
