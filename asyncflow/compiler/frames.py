"""Pass: tells which loop frame each node of a lowered graph runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.errors import InternalError
from asyncflow.graph.frames import FramePath, frame_of
from asyncflow.graph.verify import verify

if TYPE_CHECKING:
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node


def assign_frames(graph: Graph) -> dict[Node, FramePath]:
    """The frame of every node of a flat graph.

    Raises:
        GraphError: a node mixes two frames, or nodes wait for one another in a cycle.
    """
    frames: dict[Node, FramePath] = {}
    # Sources stand before their users, but for the back edges of loops, which say nothing that the enter does not.
    for node in graph.nodes:
        sources = [*(tensor.node for tensor in node.inputs), *node.control_inputs]
        frames[node] = frame_of(node.op.name, node.name, sources, frames, node.location)
    return frames
