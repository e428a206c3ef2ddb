"""The driver of each loop on a card, the card or the host, with the reason: for `Plan.explain`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from asyncflow.compiler.regions.capturable import DEVICE_WHILE
from asyncflow.compiler.regions.device_loops import devices_of_loop
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode


def explain_loops(
    graph: Graph, cards: Collection[str], on_host: AbstractSet[Tensor], reasons: Mapping[Node, str] | None
) -> tuple[str, ...]:
    """Lines for people: one for each loop on `cards`, but for loops that a card runs inside one of its own.

    Args:
        graph: with the device of every node in ``node.device``, after `make_device_loops`.
        cards: names of the CUDA devices.
        on_host: tensors whose values are on the host.
        reasons: see `make_device_loops`; None if cards may run no loops at all.
    """
    lines: list[str] = []
    for node in graph.walk():
        if node.op is DEVICE_WHILE:
            name = node.name.removesuffix("/device")
            lines.append(f"{name} on {node.device}: the card runs it, with the branches and loops in it")
        elif isinstance(node, WhileNode) and not set(devices := devices_of_loop(node)).isdisjoint(cards):
            reason = _reason(node, devices, on_host, reasons)
            lines.append(f"{node.name} on {', '.join(devices)}: the host drives it, {reason}")
    return tuple(lines)


def _reason(
    node: WhileNode, devices: tuple[str, ...], on_host: AbstractSet[Tensor], reasons: Mapping[Node, str] | None
) -> str:
    if node.decision in on_host:
        return "ahead of its kernels: it decides by numbers on the host"
    reads = "and reads the predicate of each iteration"
    if reasons is None:
        return reads
    left_out = "the pass that gives it to the card is left out"
    return f"{reads}: {'it is cut over devices' if len(devices) > 1 else reasons.get(node, left_out)}"
