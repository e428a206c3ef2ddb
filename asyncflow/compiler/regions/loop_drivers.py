"""Who decides whether a loop on a card goes on, the card or the host, and why: for `Plan.explain`."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from asyncflow.compiler.regions.capturable import DEVICE_WHILE, why_host_drives
from asyncflow.compiler.regions.device_loops import devices_of_loop
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import WhileNode


class LoopDriver(NamedTuple):
    """The driver of a loop with kernels on a card.

    Attributes:
        loop: its name.
        devices: where its kernels run.
        is_card: the card does; else the host.
        reason: why, in a few words; empty for a card.
    """

    loop: str
    devices: tuple[str, ...]
    is_card: bool
    reason: str = ""

    def __str__(self) -> str:
        where = f"{self.loop} on {', '.join(self.devices)}"
        if self.is_card:
            return f"{where}: the card runs it, with the branches and loops in it"
        return f"{where}: the host drives it, {self.reason}"


def find_loop_drivers(
    graph: Graph, cards: Collection[str], on_host: AbstractSet[Tensor], *, device_while: bool
) -> tuple[LoopDriver, ...]:
    """Those of all loops on `cards`, but for loops that a card runs inside one of its own.

    Args:
        graph: with the device of every node in ``node.device``, after `make_device_loops`.
        cards: names of the CUDA devices.
        on_host: tensors whose values are on the host.
        device_while: whether cards may run loops at all.
    """
    found: list[LoopDriver] = []
    for node in graph.walk():
        if node.op is DEVICE_WHILE:
            found.append(LoopDriver(node.name.removesuffix("/device"), (node.device or "",), is_card=True))
        elif isinstance(node, WhileNode):
            devices = devices_of_loop(node)
            if any(device in cards for device in devices):
                reason = _reason(node, devices, on_host, device_while=device_while)
                found.append(LoopDriver(node.name, devices, is_card=False, reason=reason))
    return tuple(found)


def _reason(node: WhileNode, devices: tuple[str, ...], on_host: AbstractSet[Tensor], *, device_while: bool) -> str:
    if node.decision in on_host:
        return "ahead of its kernels: it decides by numbers on the host"
    reads = "and reads the predicate of each iteration"
    if not device_while:
        return reads
    return f"{reads}: {'it is cut over devices' if len(devices) > 1 else why_host_drives(node, on_host)}"
