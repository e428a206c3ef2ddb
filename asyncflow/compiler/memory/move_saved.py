"""Pass: lets the stores on devices that can move saved values ask the device (docs/design/gradients.md).

The attribute ``moves`` of ``NEW_STORE`` says when values may move: "never"; "short", once memory is; "late", once more
is held than was planned; or "always", from the first byte. Without the attribute, `while_loop(swap_memory=True)` and
`Session(saved_values="swap")` mean "always", and everything else "short".
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.autodiff.stores.checkpoints import SAVE_FIRST, SEGMENT_STORE
from asyncflow.autodiff.stores.saved_values import MOVING_STORE, NEW_STORE, SAVE
from asyncflow.devices.swapping import Swapping
from asyncflow.errors import LoopIdentity
from asyncflow.graph.graph import Graph
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.dtypes import VARIANT


def move_saved(graph: Graph, swapping: Mapping[str, Swapping], *, always: bool = False) -> None:
    """Replaces the stores of loops, by the name of their device; with `always` from the first byte."""
    bodies: dict[Graph, WhileNode] = {}
    for loop in graph.walk():
        if not isinstance(loop, WhileNode):
            continue
        bodies[loop.body] = loop
        for initial, result in zip(loop.inputs, loop.body.results, strict=False):
            save = result.node
            node = initial.node.inputs[1].node if initial.node.op is SEGMENT_STORE else initial.node
            device = swapping.get(node.device or "")
            moves = node.attrs.get("moves") or ("always" if loop.swap_memory or always else "short")
            if node.op is NEW_STORE and save.op in (SAVE, SAVE_FIRST) and device is not None and moves != "never":
                value = save.inputs[2]
                node.op = MOVING_STORE
                node.attrs = {
                    "swapping": device,
                    "label": value.node.name,
                    "moves": moves,
                    # A store of an inner loop does not move itself.
                    "together": 0 if value.dtype == VARIANT else node.attrs.get("together", device.moves.together),
                    "loops": _loops(loop, bodies),
                }


def _loops(loop: WhileNode, bodies: Mapping[Graph, WhileNode]) -> tuple[str, ...]:
    """Return the loops around a loop, from the outermost inward, and the loop itself, as tags show them."""
    labels: list[str] = []
    inner: WhileNode | None = loop
    while inner is not None:
        labels.insert(0, LoopIdentity(inner.name).label)
        graph: Graph | None = inner.graph
        while graph is not None and graph not in bodies:
            graph = graph.parent
        inner = None if graph is None else bodies[graph]
    return tuple(labels)
