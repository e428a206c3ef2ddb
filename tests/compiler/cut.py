"""Graphs cut over devices, each node placed by hand with `af.device`; the rest is on ``cpu:0``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import asyncflow as af
from asyncflow.compiler.lowering.lower import lower
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.order_effects import order_effects
from asyncflow.graph.builtin import CONSTANT, PARAMETER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node

HOME = "cpu:0"


def put_by_hand(graph: Graph, fetches: Sequence[Any]) -> Graph:
    """The graph after `extract`, with a device for every node.

    A loop variable is where its next value is made, a capture where its value is.
    """
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    copied = extract(graph, fetches, feeds).graph
    _put(copied)
    order_effects(copied)
    af.verify(copied)
    return copied


def _put(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op is not PARAMETER:
            node.device = node.device or HOME
        for body in node.subgraphs:
            _put(body)
        if node.op.name == "while":
            condition, body = node.attrs["cond"], node.attrs["body"]
            for position, pair in enumerate(zip(condition.inputs, body.inputs, strict=True)):
                is_variable = position < node.attrs["n_vars"]
                made = body.results[position].node if is_variable else node.inputs[position].node
                for inner in pair:
                    inner.node.device = HOME if made.op is CONSTANT or made.device is None else made.device
        elif node.op.name == "cond":
            for branch in node.subgraphs:
                for outer, inside in zip(node.inputs[1:], branch.inputs, strict=True):
                    inside.node.device = outer.node.device


def cut(graph: Graph, fetches: Sequence[Any], **options: Any) -> Graph:
    """The graph after `lower`."""
    lowered = lower(put_by_hand(graph, fetches), **options).graph
    af.verify(lowered)
    return lowered


def text(graph: Graph) -> str:
    """One line a node, with its device: ``cpu:1  add = add(x/recv, y)``; constants that are everywhere have ``-``.

    Of the attributes, only the number of a transfer and what an Enter says.
    """
    return "\n".join(_lines(graph))


def _lines(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        inputs = ", ".join(tensor.node.name if len(tensor.node.outputs) == 1 else tensor.name for tensor in node.inputs)
        shown = f"{node.op.name}{_number(node)}({inputs})"
        after = "".join(f" after {control.name}" for control in node.control_inputs)
        yield f"{'-' if is_everywhere(node) else node.device}  {node.name} = {shown}{after}"


def is_everywhere(node: Node) -> bool:
    return node.op is CONSTANT and not node.control_inputs


def _number(node: Node) -> str:
    if node.op.name == "enter":
        return f"[{node.attrs['frame']}{', constant' if node.attrs['constant'] else ''}]"
    if node.op.name in ("send", "recv"):
        return f"[{node.attrs['transfer']}{', acknowledged' if node.attrs['is_acknowledged'] else ''}]"
    return ""


def crossings(graph: Graph) -> list[str]:
    """Edges from one device to another: there must be none."""
    return [
        f"{source.name} -> {node.name}"
        for node in graph.nodes
        for source in (*(tensor.node for tensor in node.inputs), *node.control_inputs)
        if not is_everywhere(source) and not is_everywhere(node) and source.device != node.device
    ]


def of(graph: Graph, op: str, device: str | None = None) -> list[Node]:
    """Nodes of an op, on one device or on all."""
    return [node for node in graph.nodes if node.op.name == op and device in (None, node.device)]
