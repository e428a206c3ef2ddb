"""`Home`: how nodes know their graph without keeping it alive, and how tensors that outlive their graph go on.

References lead one way: a graph holds its nodes, a node its outputs and the tensors that it takes, a branch or loop its
bodies. The way back leads through a `Home`, which holds its graph weakly. So the last reference to a graph frees it,
and Python's collector has nothing to do.

A node and its outputs refer to each other as long as their graph lives. When the graph goes, `Home.leave` puts
`LeftOutputs` in place of the outputs, which are weak: a tensor that is still referenced then keeps exactly the nodes it
is computed from. If such a tensor is used, `Home.revived` makes a graph of the nodes that are left. They hold that
graph, so the collector has to free it.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, cast
from weakref import ref

from asyncflow.errors import GraphError
from asyncflow.graph.ir import Assumption, Node, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from asyncflow.graph.graph import Graph, Subgraph

_lock = RLock()
"""Held while a graph is made of the nodes that are left."""

_PLAIN = ("_base", "_taken", "around", "effects", "label", "lock", "remarks", "seed", "version")
"""Attributes of a graph from which no node can be reached."""


class Forgotten(dict[Node, Any]):
    """Notes of a revived graph about nodes; a node that lost its notes with the former graph is refused."""

    def __init__(self, nodes: frozenset[int]) -> None:
        super().__init__()
        self._nodes = nodes

    def _check(self, node: Node) -> None:
        if node.id in self._nodes:
            raise GraphError(
                f"the graph of {node!r} was dropped, and with it what gradients and rows of this node need: keep the "
                f"graph (`with af.Graph() as graph:`) as long as you differentiate its tensors"
                f"\n  built at {node.location}"
            )

    def get(self, node: Node, default: Any = None) -> Any:
        """See `dict.get`."""
        self._check(node)
        return super().get(node, default)

    def setdefault(self, node: Node, default: Any = None) -> Any:
        """See `dict.setdefault`."""
        self._check(node)
        return super().setdefault(node, default)

    def __contains__(self, node: object) -> bool:
        if isinstance(node, Node):
            self._check(node)
        return super().__contains__(node)


class Left(NamedTuple):
    """Remains of a graph that is gone.

    Attributes:
        kind: its class.
        plain: its attributes, except references to nodes.
        nodes: its nodes, which may be gone as well.
        annotated: ids of the nodes for which it kept what their gradients or rows need.
        assumed: the tensors (nodes, and which of their outputs) on whose values it was built.
    """

    kind: type[Graph]
    plain: dict[str, Any]
    nodes: list[ref[Node]]
    annotated: frozenset[int]
    assumed: list[tuple[ref[Node], int, Assumption]]


class Home:
    """The link from nodes to the graph or body that they stand in.

    Attributes:
        ref: a weak reference to the graph.
        kept: the graph, where its nodes hold it: it was revived, or has loops written by hand, which are circles.
    """

    __slots__ = ("_left", "kept", "ref")

    def __init__(self, graph: ref[Graph]) -> None:
        self.ref: Callable[[], Graph | None] = graph
        self.kept: Graph | None = None
        self._left: Left | None = None

    @property
    def graph(self) -> Graph:
        """The graph, which is made anew if it was gone."""
        return self.ref() or self.revived()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled, as the graph does."""
        self.graph.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Home:
        """Return the home of a copy of the graph."""
        graph = self.graph
        made = memo[id(self)] = Home(ref(graph))
        copied = copy.deepcopy(graph, memo)
        made.ref, made.kept = ref(copied), copied if self.kept is not None else None
        return made

    def leave(self, graph: Graph) -> None:
        """Cut the references from nodes to their outputs, as the last reference to `graph` has gone."""
        if graph.frames:
            self.kept = graph
            return
        annotated = frozenset(node.id for each in (graph.kept_for_gradients, graph.parted) for node in each)
        nodes = [node for node in graph.nodes if node._home is self]
        for node in (*nodes, *graph._by_name.values()):
            if type(node.outputs) is tuple and self._encloses(node._home):
                self.give_up((node,))
                if node.op.name == "merge" and any(tensor.node.op.name == "next_iteration" for tensor in node.inputs):
                    node.inputs = []  # of a lowered loop that does not run any more
        plain = {name: value for name, value in graph.__dict__.items() if name in _PLAIN}
        self._left = Left(type(graph), plain, [ref(node) for node in nodes], annotated, _assumed(graph))

    def give_up(self, nodes: Iterable[Node]) -> None:
        """Have nodes that no graph holds any more refer to their outputs weakly."""
        for node in nodes:
            node.outputs = cast("tuple[Tensor, ...]", LeftOutputs(node))

    def _encloses(self, home: Home) -> bool:
        """Return True if `home` belongs to this graph, or to a body somewhere in it, even if the graph is gone."""
        while home is not self:
            graph = home.ref()
            if graph is None:
                return True
            if not graph.is_subgraph:
                return False
            home = cast("Subgraph", graph).around
        return True

    def revived(self) -> Graph:
        """Return a graph of the nodes that are left."""
        with _lock:
            graph, left = self.ref(), self._left
            if graph is not None:
                return graph
            assert left is not None
            nodes = [node for weak in left.nodes if (node := weak()) is not None]
            graph = left.kind.of_left({**left.plain, "home": self}, nodes, Forgotten(left.annotated))
            for node in graph.walk():
                outputs: object = node.outputs
                if isinstance(outputs, LeftOutputs):
                    node.outputs = outputs.restored(node)
            for weak, index, was in left.assumed:
                if (source := weak()) is not None:
                    x = source.outputs[index]
                    told = replace(was, rule=f"{was.rule} in a graph that was dropped:", tensors=(x,))
                    graph.assumptions[told.rule, x] = told
            self.ref, self.kept, self._left = ref(graph), graph, None
            return graph


def _assumed(graph: Graph) -> list[tuple[ref[Node], int, Assumption]]:
    """Return all tensors on whose values a graph was built, weakly: a run must not feed the surviving ones."""
    found: dict[Tensor, Assumption] = {}
    for each in graph.assumptions.values():
        pending = list(each.tensors)
        while pending:
            x = pending.pop()
            if x not in found:
                found[x] = each
                captures: Mapping[Tensor, Tensor] = getattr(x.node._home.ref(), "captures", {})
                pending += [outer for outer, inner in captures.items() if inner is x]
                pending += x.node.inputs if x.node.op.name != "shape" else ()
    return [(ref(x.node), x.index, each) for x, each in found.items()]


class LeftOutputs:
    """The outputs of a node whose graph is gone; a tensor without references is made again at the next access."""

    __slots__ = ("_node", "_tensors")

    def __init__(self, node: Node) -> None:
        self._node = ref(node)
        self._tensors = [(ref(tensor), tensor.spec) for tensor in node.outputs]

    def restored(self, node: Node) -> tuple[Tensor, ...]:
        """Return the outputs, for the node to hold."""
        found = [(weak(), spec) for weak, spec in self._tensors]
        return tuple([Tensor(node, i, spec) if tensor is None else tensor for i, (tensor, spec) in enumerate(found)])

    def _found(self) -> tuple[Tensor, ...]:
        node = self._node()
        assert node is not None
        node._home.revived()
        outputs: object = node.outputs
        if outputs is self:  # its graph is gone
            node.outputs = self.restored(node)
        return node.outputs

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._found())

    def __getitem__(self, index: int) -> Tensor:
        return self._found()[index]
