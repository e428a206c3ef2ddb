"""Pass: chooses where a graph runs.

A run uses one device: the first of the session's that satisfies the constraints of all its nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.devices.names import DeviceSpec
from asyncflow.errors import PlacementError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.devices.protocol import Device
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node


def choose_device(graph: Graph, devices: Sequence[Device]) -> Device:
    """The first of `devices` that every node of `graph`, bodies included, may run on.

    Raises:
        PlacementError: there is none; the message names the requests and where they were written.
    """
    requests: dict[str, Node] = {}
    for node in graph.walk():
        if node.device is not None:
            requests.setdefault(node.device, node)
    specs = {text: DeviceSpec.parse(text) for text in requests}
    for device in devices:
        if all(spec.matches(device.name) for spec in specs.values()):
            return device
    present = ", ".join(device.name for device in devices)
    for text, spec in specs.items():
        if not any(spec.matches(device.name) for device in devices):
            node = requests[text]
            raise PlacementError(
                f"no device fits {text!r}: this session has {present}; ask for one with Session(devices=[...])"
                f"\n  asked for by {node.name}, built at {node.location}"
            )
    listed = "\n".join(f"  {text!r} for {node.name}, built at {node.location}" for text, node in requests.items())
    raise PlacementError(
        f"one run uses one device, and no device of this session ({present}) fits all these requests:\n{listed}"
    )
