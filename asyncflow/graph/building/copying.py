"""`Copier`: copies of nodes in another place of a program, the bodies of branches and loops among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.structured import StructuredNode, WhileNode, join_captures
from asyncflow.graph.values.spec import Spec


class Copier:
    """Copies of nodes in another graph or body.

    A subclass is the rule of one kind of copy. It overrides `known` where values need no copy, `made` where a copy is
    another node than the original, and `name`.

    Args:
        target: takes the copies.
        tensors: stand-ins in `target`, or in a graph around it, for values of the original.

    Attributes:
        target: the graph or body that copies join: within the copy of a body, that copy.
        tensors: the stand-ins for values so far.
        nodes: the copies of nodes.
        loops: number of copied loops around `target`.
    """

    def __init__(self, target: Graph, tensors: dict[Tensor, Tensor] | None = None) -> None:
        self.target = target
        self.tensors = {} if tensors is None else tensors
        self.nodes: dict[Node, Node] = {}
        self.loops = 0

    # -- the rule ----------------------------------------------------------------------------------------------------

    def known(self, x: Tensor) -> Tensor | None:
        """Return the stand-in for a value whose node is not copied; None to copy the node."""
        return None

    def name(self, node: Node) -> str:
        """Return a reserved name for the copy of a node."""
        return self.target.unique_name(node.name.rpartition("/")[2])

    def made(self, node: Node) -> Node:
        """Add the copy of a node that has no bodies."""
        return copied(node, self.target, self.values(node.inputs), self.name(node))

    def note(self, x: Tensor, stand_in: Tensor) -> None:
        """Note the stand-in for a value."""
        self.tensors[x] = stand_in

    # -- copies ------------------------------------------------------------------------------------------------------

    def value(self, x: Tensor) -> Tensor:
        """Return the stand-in for a value in `target`; nodes behind it that have no copy yet are copied."""
        if x not in self.tensors:
            self._find(x)
        found = self.tensors[x]
        return found if found.node._home is self.target.home else self.target.import_tensor(found)

    def values(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the stand-ins for values, as `value` does."""
        return [self.value(x) for x in tensors]

    def _find(self, x: Tensor) -> None:
        open_, entered = [x], set[Node]()  # no recursion, as chains are as long as programs
        while open_:
            each = open_.pop()
            if each in self.tensors:
                continue
            node = each.node
            known = None if node in entered else self.known(each)
            if known is not None:
                self.note(each, known)
            elif node not in entered and any(before not in self.tensors for before in node.inputs):
                entered.add(node)
                open_ += [each, *reversed(node.inputs)]
            else:
                self.add(node)

    def copy(self, nodes: Iterable[Node]) -> None:
        """Copy nodes, which stand in an order in which they can run; parameters are left out."""
        for node in nodes:
            if node.op is not PARAMETER:
                self.add(node)

    def add(self, node: Node) -> None:
        """Copy a node."""
        assert node.op is not PARAMETER, f"{node.name} has no stand-in"
        made = self.structured(node) if isinstance(node, StructuredNode) else self.made(node)
        made.control_inputs += [self.nodes[before] for before in node.control_inputs if before in self.nodes]
        self.nodes[node] = made
        for x, stand_in in zip(node.outputs, made.outputs, strict=True):
            self.note(x, stand_in)

    def structured(self, node: StructuredNode) -> Node:
        """Add the copy of a branch or loop."""
        inputs, label, first = self.values(node.inputs), self.name(node), node.first_capture
        bodies = [self._body(node, body, inputs, label) for body in node.subgraphs]
        captured = join_captures(bodies, first - node.body_offset)
        attrs = {**node.attrs, **dict(zip(node.body_names, bodies, strict=True))}
        return copied(node, self.target, [*inputs[:first], *captured], label, attrs=attrs)

    def _body(self, node: StructuredNode, body: Subgraph, inputs: Sequence[Tensor], label: str) -> Subgraph:
        made = Subgraph(self.target, f"{label}/{body.label.rpartition('/')[2]}")
        around, self.target = self.target, made
        self.loops += isinstance(node, WhileNode)
        with made:
            for place, x in enumerate(body.inputs, node.body_offset):
                if place < node.first_capture:
                    self.note(x, made.add_input(x.spec, "var"))
                    continue
                outer = inputs[place]
                if outer not in made.captures:
                    # Use the shape that the original was built with. A stand-in may have another, such as an empty
                    # array for a branch not taken, which nodes in the body would refuse.
                    made.captures[outer] = made.add_input(x.spec, f"capture_{outer.node.name.rpartition('/')[2]}")
                self.note(x, made.captures[outer])
            self.copy(body.nodes)
            made.results = [self.value(x) for x in body.results]
        self.loops -= isinstance(node, WhileNode)
        self.target = around
        return made


def copied(
    node: Node,
    target: Graph,
    inputs: Sequence[Tensor],
    name: str,
    *,
    attrs: Attrs | None = None,
    specs: Spec | tuple[Spec, ...] | None = None,
) -> Node:
    """Return a copy of a node at the end of `target`, located and placed as the original.

    Args:
        node: the original.
        target: a graph or body.
        inputs: of the copy, in `target`.
        name: a reserved name.
        attrs: of the copy; None for the original's.
        specs: of its outputs, as for `Graph.add_node`; None for the original's.
    """
    attrs = node.attrs if attrs is None else attrs
    specs = node.specs if specs is None else specs
    made = target.add_node(node.op, inputs, attrs, specs, reserved_name=name, location=node.location)
    made.device, made.colocated_with = node.device, node.colocated_with
    return made
