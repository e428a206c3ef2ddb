"""The two things a graph is made of: `Node`, an op applied, and `Tensor`, one output of a node.

An `Assumption` is what a graph notes of its tensors beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NewType, TypeAlias

from asyncflow.errors import GraphError, SourceLocation
from asyncflow.graph.values.operators import Operators, _call
from asyncflow.pickling import NotPickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from asyncflow.graph.graph import Graph, Subgraph
    from asyncflow.graph.op import Op
    from asyncflow.graph.values.spec import Spec

NodeId = NewType("NodeId", int)
"""Position of a node in the order in which its root graph was built."""

Attrs: TypeAlias = "Mapping[str, Any]"
"""The static arguments of a node by name; the signatures of the op's own rules, which take them, have their types."""


PICKLE_GRAPHS = (
    "graphs hold Python functions; build the graph in the other process, or send its text, af.print_graph(graph), for "
    "af.parse_graph to read. Values are sent as NumPy arrays, which session.run gives"
)
"""Advice in place of pickling a graph or a part of one."""


def is_name(name: object) -> bool:
    """Return True if a node, scope or resource may have this name."""
    return isinstance(name, str) and name != "" and ":" not in name


_node_of = attrgetter("node")


class Tensor(NotPickled, Operators):
    """A symbolic value: output number `index` of `node`. It has a value only inside a run."""

    __slots__ = ("__weakref__", "index", "node", "spec")
    _instead = PICKLE_GRAPHS

    def __init__(self, node: Node, index: int, spec: Spec) -> None:
        self.node = node
        self.index = index
        self.spec = spec

    @property
    def graph(self) -> Graph:
        """The graph or subgraph that holds the node."""
        return self.node.graph

    @property
    def name(self) -> str:
        """``node-name:index``, which a session accepts as a fetch or a feed."""
        return f"{self.node.name}:{self.index}"

    @property
    def device(self) -> str | None:
        """Requested device, such as ``"cpu"``; None if a session is to choose."""
        return self.node.device

    def to_device(self, device: str, /, *, stream: None = None) -> Tensor:
        """The same value on `device`. Streams are the session's own business: `stream` stays None."""
        if stream is not None:
            raise GraphError(f"to_device(stream={stream!r}): sessions order streams themselves; leave it out")
        return _call("to_device", self, device)

    @property
    def T(self) -> Tensor:
        """The transpose of a matrix."""
        if self.ndim not in (None, 2):
            raise GraphError(f"{self!r}.T needs rank 2; use af.permute_dims or .mT")
        return _call("matrix_transpose", self)

    @property
    def mT(self) -> Tensor:
        """The transpose of the last two axes."""
        return _call("matrix_transpose", self)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape or self.shape[0] is None:
            raise GraphError(
                f"cannot iterate over {self!r}: its length is not known while the graph is built; "
                f"use af.while_loop, af.map_fn or af.scan"
            )
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.spec}>"


class Node(NotPickled):
    """An op applied to inputs. Built by `asyncflow.graph.building.build.apply`; never changed by users.

    Of ops with bodies it is a `CondNode` or `WhileNode` (`asyncflow.graph.structured`).

    Attributes:
        id: its place in the build order of the root graph.
        name: unique in the root graph.
        op: the op that the node applies.
        inputs: tensors of the same graph.
        attrs: the op's static arguments.
        outputs: its tensors.
        single: whether the kernel returns the one value itself rather than a tuple.
        control_inputs: nodes of the same graph that run first.
        device: placement constraint, such as ``"cpu"`` or ``"cuda:1"``; None for none.
        colocated_with: name of a node to be placed with.
        location: the user's line.
    """

    __slots__ = (
        "__weakref__",
        "_home",
        "attrs",
        "colocated_with",
        "control_inputs",
        "device",
        "id",
        "inputs",
        "location",
        "name",
        "op",
        "outputs",
        "single",
    )
    _instead = PICKLE_GRAPHS

    subgraphs: tuple[Subgraph, ...] = ()
    """The bodies a structured node (``cond``, ``while``) holds; empty for any other."""

    def __init__(
        self,
        *,
        graph: Graph,
        id: NodeId,
        name: str,
        op: Op,
        inputs: Sequence[Tensor],
        attrs: Attrs,
        specs: Spec | tuple[Spec, ...],
        control_inputs: Sequence[Node],
        device: str | None,
        colocated_with: str | None,
        location: SourceLocation,
    ) -> None:
        self._home = graph.home
        self.id = id
        self.name = name
        self.op = op
        self.inputs = list(inputs)
        self.attrs = dict(attrs)
        self.single = not isinstance(specs, tuple)
        listed = specs if isinstance(specs, tuple) else (specs,)
        self.outputs = tuple([Tensor(self, index, spec) for index, spec in enumerate(listed)])
        self.control_inputs = list(control_inputs)
        self.device = device
        self.colocated_with = colocated_with
        self.location = location

    @property
    def graph(self) -> Graph:
        """The graph or subgraph of the node, which does not keep it alive."""
        return self._home.ref() or self._home.revived()

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self._home = graph.home

    @property
    def specs(self) -> Spec | tuple[Spec, ...]:
        """Specs of the outputs, as the op's shape rule returns them: one, or a tuple."""
        return self.outputs[0].spec if self.single else tuple(output.spec for output in self.outputs)

    @property
    def sources(self) -> list[Node]:
        """Nodes to wait for: makers of the inputs, and control inputs, with repetitions."""
        return [*map(_node_of, self.inputs), *self.control_inputs]

    def __repr__(self) -> str:
        return f"<Node {self.name} ({self.op.name})>"


@dataclass(frozen=True, slots=True)
class Assumption:
    """A conclusion drawn while a graph was built, and its place (`asyncflow.graph.assumptions`).

    Attributes:
        rule: name of the rule that draws it from the values of `tensors`.
        tensors: of the graph or of bodies in it.
        value: the conclusion: an array for the value of one tensor, or a number.
        location: the user's line that needed it.
        version: version of the graph at that time; the node that needed it has at least this id.
    """

    rule: str
    tensors: tuple[Tensor, ...]
    value: Any
    location: SourceLocation
    version: int
