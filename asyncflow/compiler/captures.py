"""How the inputs of a branch or loop node and those of its bodies belong together, and how to change both at once.

A `while` gives each input to its predicate and its body alike: loop variables first, then captures. A `cond` keeps its
first input, the predicate, to itself, and gives the captures behind it to both branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.builtin import PARAMETER

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncflow.graph.ir import Node, Tensor


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
        parameter = body.add_node(PARAMETER, (), {"spec": spec}, spec, name=name, location=outer.node.location)
        body.inputs.append(parameter.outputs[0])
        added.append(parameter.outputs[0])
    return added


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
