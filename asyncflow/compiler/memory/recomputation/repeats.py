"""Running a part of a loop's body again, for its gradient: the part, its permission, and a copy of it.

The copy gives the same bits. It is placed with the nodes that it repeats. Its random numbers are the repeated
iteration's, and it gets the values that the iteration read of variables. Effects, coroutines and functions of users are
never run twice; neither is a node that uses up a TensorArray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncflow.control.stores.tensor_array import (
    CONCAT,
    GATHER,
    PEEK,
    READ,
    SCATTER,
    SPLIT,
    STACK,
    TENSOR_ARRAY,
    UNSTACK,
    WRITE,
)
from asyncflow.graph.building.copying import Copier, copied
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.facts import ITERATE_AGAIN
from asyncflow.graph.graph import Graph, Subgraph, node_effects
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access, Memory
from asyncflow.graph.structured import StructuredNode, WhileNode, deep
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.random.random_again import RANDOM_AGAIN, draw_by_key, draws_numbers
from asyncflow.state.variables.variable import VARIABLE_READ

Owners = dict["Graph", StructuredNode]
"""The branch or loop that each body belongs to."""

_READERS = frozenset({READ, GATHER, PEEK, STACK, CONCAT})
_WRITERS = frozenset({WRITE, SCATTER, UNSTACK, SPLIT})


class Refusal(NamedTuple):
    """A node that must not run twice, and why."""

    node: Node
    why: str


# -- the repeated part -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BodyPart:
    """The part of a loop's body that values of it depend on.

    Attributes:
        nodes: the needed nodes, without parameters.
        variables: places of the needed loop variables.
    """

    nodes: set[Node] = field(default_factory=set)
    variables: set[int] = field(default_factory=set)


def part_for(loop: WhileNode, values: Iterable[Tensor], *, before: bool = True) -> BodyPart:
    """Return the part of the body that makes `values` in an iteration, and in those `before` it."""
    part = BodyPart()
    places = {variable: place for place, (variable, _) in enumerate(loop.carried)}
    waiting = [value.node for value in values]
    while waiting:
        node = waiting.pop()
        if node.op is PARAMETER:
            place = places.get(node.outputs[0])
            if place is not None and place not in part.variables:
                part.variables.add(place)
                if before:
                    waiting.append(loop.body.results[place].node)
        elif node not in part.nodes:
            part.nodes.add(node)
            waiting += node.sources
    return part


# -- refusals --------------------------------------------------------------------------------------------------------


def why_never_twice(loop: WhileNode, part: BodyPart) -> Refusal | None:
    """The first node of a part that must not run twice; None if there is none."""
    written = {resource for resource, access in node_effects(loop) if access is Access.WRITE}
    refusals = (
        (node, _why_not(node, written)) for node in deep(each for each in loop.body.nodes if each in part.nodes)
    )
    return next((Refusal(node, why) for node, why in refusals if why is not None), None)


def used_up(loop: WhileNode, part: BodyPart, owners: Owners) -> Node | None:
    """Return a node of the part that changes a TensorArray or store for good, so that nothing can run again from it."""
    for place in sorted(part.variables):
        if loop.body.inputs[place].dtype == VARIANT:
            return loop.body.results[place].node
    outside = [inner for inner in loop.captured(loop.body) if inner.dtype == VARIANT]
    return next(filter(None, (_uses_up(inner, loop.body, part.nodes, owners) for inner in outside)), None)


def _why_not(node: Node, written: Collection[object]) -> str | None:
    if node.op is not VARIABLE_READ:
        return ITERATE_AGAIN.why_not(node.op)
    ((resource, _),) = node_effects(node)
    if resource in written:
        return "it reads a variable that the loop writes"
    return "it reads a variable after something else has happened" if node.control_inputs else None


def _uses_up(array: Tensor, body: Graph, chosen: Collection[Node] | None, owners: Owners) -> Node | None:
    """Return a node that takes an element out of an outside array, so that it is not there again."""
    for node in body.nodes:
        places = [place for place, tensor in enumerate(node.inputs) if tensor is array]
        if not places or (chosen is not None and node not in chosen):
            continue
        if isinstance(node, StructuredNode):
            if isinstance(node, WhileNode) and places[0] < node.n_vars:
                return node
            inner = [part.inputs[place - node.body_offset] for part in node.subgraphs for place in places]
            found = next(filter(None, (_uses_up(each, each.node.graph, None, owners) for each in inner)), None)
            if found is not None:
                return found
        elif node.op.traits.memory not in (Memory.STORE, Memory.METADATA) and not _may_be_read_again(node, owners):
            return node
    return None


def _may_be_read_again(node: Node, owners: Owners) -> bool:
    """Return True if a node only reads an array that keeps its elements, or was made of rows that still exist."""
    if node.op not in _READERS:
        return False
    made = _made_outside(node.inputs[0], owners)
    if node.op is READ and made.op is UNSTACK:
        return True
    while made.op in _WRITERS:
        made = _made_outside(made.inputs[0], owners)
    return made.op is TENSOR_ARRAY and not made.attrs["clear_after_read"]


def _made_outside(tensor: Tensor, owners: Owners) -> Node:
    """The node that makes a value which bodies have captured; the parameter, if it is a loop variable."""
    while tensor.node.op is PARAMETER:
        body = tensor.node.graph
        outer = owners[body].captured(body).get(tensor)  # type: ignore[arg-type]
        if outer is None:
            break
        tensor = outer
    return tensor.node


# -- the copy --------------------------------------------------------------------------------------------------------


class Repeat(Copier):
    """A copy of nodes of a loop's body, in another body.

    Args:
        target: takes the copies.
        tensors: for the loop's variables, their values in the copy.
        outside: for its captures, the outside tensors.
        owners: of the bodies of the graph.

    Attributes:
        number: the repeated iteration, in the target; random numbers of the copies are the numbers of that iteration.
    """

    def __init__(
        self, target: Subgraph, tensors: dict[Tensor, Tensor], outside: Mapping[Tensor, Tensor], owners: Owners
    ) -> None:
        super().__init__(target, tensors)
        self.outside = outside
        self.owners = owners
        self.number: Tensor | None = None

    def known(self, x: Tensor) -> Tensor | None:
        """See `Copier.known`."""
        return self.outside.get(x)

    def name(self, node: Node) -> str:
        """See `Copier.name`."""
        return self.target.reserve(f"{node.name}/again")

    def made(self, node: Node) -> Node:
        """See `Copier.made`."""
        _together(node)
        rows = self._rows(node)
        if rows is None:
            if self.number is None or not (draws_numbers(node.op) or node.op is RANDOM_AGAIN):
                return super().made(node)
            number = self.target.import_tensor(self.number)  # import it in front of its users
            made = super().made(node)
            draw_by_key(made, number, self.loops)
            return made
        # A read may free the element, so read the array's original rows.
        inputs = [self.target.import_tensor(rows), self.value(node.inputs[1])]
        made = copied(node, self.target, inputs, self.name(node), attrs={"key": (("input", 0),)})
        made.op = GETITEM
        return made

    def structured(self, node: StructuredNode) -> Node:
        """See `Copier.structured`; other passes may change the bodies."""
        made = super().structured(node)
        for part in made.subgraphs:
            part.closed, part.captures = False, {}
        return made

    def _rows(self, node: Node) -> Tensor | None:
        """The rows of which the array that a node reads was made outside the loop."""
        if node.op is not READ:
            return None
        made = _made_outside(node.inputs[0], self.owners)
        return made.inputs[1] if made.op is UNSTACK and made not in self.nodes else None


def _together(node: Node) -> None:
    """Have a node in a group, in which its copy is, too."""
    if node.op is not CONSTANT and node.colocated_with is None:
        node.colocated_with = node.name
