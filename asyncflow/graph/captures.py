"""How the inputs of a branch or loop node and those of its bodies belong together, and how to change both at once.

A `while` gives each input to its predicate and its body alike: loop variables first, then captures. A `cond` keeps its
first input, the predicate, to itself, and gives the captures behind it to both branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.ir import Tensor

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncflow.errors import SourceLocation
    from asyncflow.graph.graph import Graph, Subgraph
    from asyncflow.graph.ir import Node
    from asyncflow.graph.spec import Spec


def first_capture(node: Node) -> int:
    """Position of the first capture among the inputs of a structured node."""
    variables: int = node.attrs["n_vars"] if node.op.name == "while" else 1
    return variables


def body_offset(node: Node) -> int:
    """How many inputs of a structured node its bodies do not see."""
    return 0 if node.op.name == "while" else 1


def add_capture(node: Node, outer: Tensor) -> list[Tensor]:
    """Gives the bodies of a structured node one more capture; returns it as seen in each of them."""
    node.inputs.append(outer)
    name, spec = f"capture_{outer.node.name.rpartition('/')[2]}", outer.spec
    added: list[Tensor] = []
    for body in node.subgraphs:
        front = next((place for place, each in enumerate(body.nodes) if each.op is not PARAMETER), len(body.nodes))
        inner = _add_parameter(body, spec, name, outer.node.location, front)
        body.inputs.append(inner)
        added.append(inner)
    return added


def add_variable(node: Node, initial: Tensor) -> tuple[Tensor, Tensor]:
    """Gives a `while` one more loop variable; returns it as its body sees it, and what the loop leaves in it.

    The caller appends the body's result for it.
    """
    position: int = node.attrs["n_vars"]
    node.inputs.insert(position, initial)
    inner: Tensor | None = None
    for body in node.subgraphs:
        inner = _add_parameter(body, initial.spec, "var", node.location, 0)
        body.inputs.insert(position, inner)
    assert inner is not None
    node.attrs["n_vars"] = position + 1
    return inner, add_output(node, initial.spec)


def _add_parameter(body: Graph, spec: Spec, name: str, location: SourceLocation, place: int) -> Tensor:
    """A parameter of `body` at this place among its nodes, in front of all that may use it."""
    parameter = body.add_node(PARAMETER, (), {"spec": spec}, spec, name=name, location=location)
    parameter.control_inputs = []
    body.nodes.insert(place, body.nodes.pop())
    return parameter.outputs[0]


def keep_variables(node: Node, places: Collection[int]) -> None:
    """Leaves a `while` only these results and outputs, in this order; its inputs are the caller's to move or drop."""
    body: Subgraph = node.attrs["body"]
    body.results = [body.results[place] for place in places]
    node.outputs = tuple(node.outputs[place] for place in places)
    for index, output in enumerate(node.outputs):
        output.index = index
    node.attrs["n_vars"] = len(places)


def add_output(node: Node, spec: Spec) -> Tensor:
    """Gives a branch or loop node one more output; the caller adds the results."""
    output = Tensor(node, len(node.outputs), spec)
    node.outputs = (*node.outputs, output)
    return output


def drop_inputs(node: Node, positions: Collection[int]) -> None:
    """Takes inputs (by their positions at the structured node) away from it and its bodies, and their parameters."""
    if not positions:
        return
    offset = body_offset(node)
    node.inputs = [tensor for place, tensor in enumerate(node.inputs) if place not in positions]
    for body in node.subgraphs:
        body.inputs = [tensor for place, tensor in enumerate(body.inputs, start=offset) if place not in positions]
        parameters = {tensor.node for tensor in body.inputs}
        body.nodes[:] = [inner for inner in body.nodes if inner.op is not PARAMETER or inner in parameters]
