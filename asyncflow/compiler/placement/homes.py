"""Pass: sends nodes to the device in whose memory the variable that they touch is, since an earlier run of the session.

A variable stays there, whatever else a later plan runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from asyncflow.devices.names import DeviceSpec
from asyncflow.errors import PlacementError
from asyncflow.graph.graph import Graph
from asyncflow.graph.resource import resources_of


def send_home(graph: Graph, homes: Mapping[Hashable, str]) -> None:
    """Asks for the device that holds the state a node touches.

    Raises:
        PlacementError: the node asks for another.
    """
    for node in graph.walk():
        for resource in resources_of(node):
            home = homes.get(resource.effect_key)
            if home is None:
                continue
            if node.device is not None and not DeviceSpec.parse(node.device).matches(home):
                raise PlacementError(
                    f"{node.name} ({node.op.name}) asks for {node.device!r}, but its resource is in the memory of "
                    f"{home}, where an earlier run of this session has put it; ask for {home!r} or for none"
                    f"\n  built at {node.location}"
                )
            node.device = home
