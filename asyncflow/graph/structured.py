"""`CondNode` and `WhileNode`, the nodes that hold bodies, and the relation of their inputs to the bodies' inputs.

A `while` gives each input to its predicate and its body alike: loop variables first, then captures. A `cond` keeps its
first input, the predicate, to itself, and gives the captures behind it to both branches.

`Node.subgraphs` and `levels` lead into bodies; code that differs for branches and loops asks for the class of a node.
The attrs behind these views are for the op's shape rule and for the text form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.ir import Node, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from asyncflow.errors import SourceLocation
    from asyncflow.graph.graph import Graph, Subgraph
    from asyncflow.graph.values.spec import Spec


class PooledNode(Node):
    """A loop whose iterations run outside of its own run, with the bodies that it was built of."""

    __slots__ = ()

    @property
    def carried(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of loop variables: as the body gets each, and as it returns each. Its initial value is an input."""
        _, body = self.attrs["shared"].bodies
        return list(zip(body.inputs, body.results, strict=False))


def bodies_in(node: Node) -> Sequence[Graph]:
    """Return the bodies of a node, in whichever way it runs them."""
    return node.attrs["shared"].bodies if isinstance(node, PooledNode) else node.subgraphs


class StructuredNode(Node):
    """A branch or loop.

    Attributes:
        body_names: the attrs that hold its bodies, in the order of `subgraphs`.
        body_offset: how many of its inputs its bodies do not see.
    """

    __slots__ = ("subgraphs",)
    body_names: ClassVar[tuple[str, ...]]
    body_offset: ClassVar[int]

    def __init__(self, *, attrs: Mapping[str, Any], **fields: Any) -> None:
        super().__init__(attrs=attrs, **fields)
        # An attribute, as passes read the bodies of each node. A text may leave one out: see `verify`.
        self.subgraphs = tuple(attrs[name] for name in self.body_names if name in attrs)

    @property
    def decision(self) -> Tensor:
        """The boolean that decides which branch runs, or whether the loop goes on."""
        raise NotImplementedError

    @property
    def first_capture(self) -> int:
        """Position of the first capture among the inputs."""
        raise NotImplementedError

    @property
    def entering(self) -> list[Tensor]:
        """The inputs that the bodies see, in the order of theirs."""
        return self.inputs[self.body_offset :]

    @property
    def captures(self) -> list[Tensor]:
        """The tensors outside that the bodies use."""
        return self.inputs[self.first_capture :]

    def captured(self, body: Subgraph) -> dict[Tensor, Tensor]:
        """Pairs of captures: the tensor that stands for each in one of the bodies, and the tensor outside."""
        return dict(zip(body.inputs[self.first_capture - self.body_offset :], self.captures, strict=True))

    def add_capture(self, outer: Tensor, seen_in: Subgraph) -> Tensor:
        """Gives the bodies one more capture; returns it as seen in one of them."""
        self.inputs.append(outer)
        name = f"capture_{outer.node.name.rpartition('/')[2]}"
        for body in self.subgraphs:
            front = next((place for place, each in enumerate(body.nodes) if each.op is not PARAMETER), len(body.nodes))
            body.inputs.append(add_parameter(body, outer.spec, name, outer.node.location, front))
        return seen_in.inputs[-1]

    def add_output(self, spec: Spec) -> Tensor:
        """Gives the node one more output; the caller adds the results."""
        output = Tensor(self, len(self.outputs), spec)
        self.outputs = (*self.outputs, output)
        return output

    def _keep_outputs(self, places: Collection[int]) -> None:
        self.outputs = tuple(self.outputs[place] for place in places)
        for index, output in enumerate(self.outputs):
            output.index = index

    def drop_inputs(self, positions: Collection[int]) -> None:
        """Remove inputs (by their positions at the node), together with the parameters of the bodies."""
        if not positions:
            return
        self.inputs = [tensor for place, tensor in enumerate(self.inputs) if place not in positions]
        for body in self.subgraphs:
            inner = enumerate(body.inputs, start=self.body_offset)
            body.inputs = [tensor for place, tensor in inner if place not in positions]
            parameters = {tensor.node for tensor in body.inputs}
            body.nodes[:] = [node for node in body.nodes if node.op is not PARAMETER or node in parameters]


class CondNode(StructuredNode):
    """A `cond`. Its bodies are the branches, the one for a predicate that holds first."""

    __slots__ = ()
    body_names = ("true_branch", "false_branch")
    body_offset = 1

    @property
    def predicate(self) -> Tensor:
        """The boolean that decides."""
        return self.inputs[0]

    decision = predicate

    @property
    def first_capture(self) -> int:
        """See `StructuredNode.first_capture`."""
        return 1

    def keep_results(self, places: Collection[int]) -> None:
        """Keep only these results of the branches and outputs of the node, in this order."""
        for branch in self.subgraphs:
            branch.results = [branch.results[place] for place in places]
        self._keep_outputs(places)


class WhileNode(StructuredNode):
    """A `while`. Its bodies are the predicate and the body."""

    __slots__ = ()
    body_names = ("cond", "body")
    body_offset = 0

    @property
    def predicate(self) -> Subgraph:
        """The subgraph whose one result says whether another iteration runs."""
        return self.subgraphs[0]

    @property
    def body(self) -> Subgraph:
        """The subgraph that an iteration runs; its results are the next values of the loop variables."""
        return self.subgraphs[1]

    @property
    def decision(self) -> Tensor:
        """See `StructuredNode.decision`; a tensor of `predicate`."""
        return self.predicate.results[0]

    @property
    def n_vars(self) -> int:
        """Number of loop variables."""
        count: int = self.attrs["n_vars"]
        return count

    first_capture = n_vars

    @property
    def carried(self) -> list[tuple[Tensor, Tensor]]:
        """Each loop variable as the body sees it, paired with the next iteration's value."""
        return list(zip(self.body.inputs, self.body.results, strict=False))

    @property
    def parallel_iterations(self) -> int:
        """Maximum number of live iterations."""
        window: int = self.attrs["parallel_iterations"]
        return window

    @property
    def swap_memory(self) -> bool:
        """True if values saved for gradients may move to host memory."""
        swaps: bool = self.attrs["swap_memory"]
        return swaps

    def add_variable(self, initial: Tensor, name: str = "var") -> tuple[Tensor, Tensor]:
        """Gives the loop one more variable; returns it as the body sees it, and what the loop leaves in it.

        The caller appends the body's result for it.
        """
        position = self.n_vars
        self.inputs.insert(position, initial)
        for body in self.subgraphs:
            body.inputs.insert(position, add_parameter(body, initial.spec, name, self.location, 0))
        self.attrs["n_vars"] = position + 1
        return self.body.inputs[position], self.add_output(initial.spec)

    def keep_variables(self, places: Collection[int]) -> None:
        """Keep only these results and outputs of the loop, in this order; the caller moves or drops its inputs."""
        self.body.results = [self.body.results[place] for place in places]
        self._keep_outputs(places)
        self.attrs["n_vars"] = len(places)


def levels(graph: Graph) -> Iterator[Graph]:
    """The graph and the bodies of all branches and loops in it, outer before inner."""
    stack = [graph]
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.nodes:
            if isinstance(node, StructuredNode):
                stack.extend(node.subgraphs)


def deep(nodes: Iterable[Node]) -> list[Node]:
    """Return nodes, and behind each all that is in its bodies."""
    return [each for node in nodes for each in (node, *(inner for body in node.subgraphs for inner in body.walk()))]


def add_parameter(body: Subgraph, spec: Spec, name: str, location: SourceLocation, place: int) -> Tensor:
    """Add a parameter to `body` at this place among its nodes, in front of all nodes that may use it."""
    parameter = body.add_node(PARAMETER, (), {"spec": spec}, spec, name=name, location=location)
    parameter.control_inputs = []
    body.nodes.insert(place, body.nodes.pop())
    return parameter.outputs[0]


def join_captures(bodies: Sequence[Subgraph], n_parameters: int) -> list[Tensor]:
    """Gives all `bodies` the same captures in the same order, and closes them; returns the outer tensors."""
    joined = list(dict.fromkeys(outer for body in bodies for outer in body.captures))
    for body in bodies:
        for outer in joined:
            body.import_tensor(outer)
        body.inputs = body.inputs[:n_parameters] + [body.captures[outer] for outer in joined]
        body.captures = dict(zip(joined, body.inputs[n_parameters:], strict=True))
        body.closed = True
    return joined
