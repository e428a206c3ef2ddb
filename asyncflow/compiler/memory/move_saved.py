"""Pass: has the stores on devices that can move saved values ask the device (docs/design/gradients.md).

``NEW_STORE`` says by its attribute ``moves`` what may: "never"; "short", once memory is; or "always", from the first
byte. Where nothing is said, `while_loop(swap_memory=True)` means "always" and all else "short".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.autodiff.saved_values import MOVING_STORE, NEW_STORE, SAVE
from asyncflow.graph.structured import WhileNode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncflow.devices.swapping import Swapping
    from asyncflow.graph.graph import Graph


def move_saved(graph: Graph, swapping: Mapping[str, Swapping]) -> None:
    """Replaces the stores of loops, by the name of their device."""
    for loop in graph.walk():
        if not isinstance(loop, WhileNode):
            continue
        for initial, result in zip(loop.inputs, loop.body.results, strict=False):
            node, save = initial.node, result.node
            device = swapping.get(node.device or "")
            moves = node.attrs.get("moves") or ("always" if loop.swap_memory else "short")
            if node.op is NEW_STORE and save.op is SAVE and device is not None and moves != "never":
                node.op = MOVING_STORE
                node.attrs = {"swapping": device, "label": save.inputs[2].node.name, "always": moves == "always"}
