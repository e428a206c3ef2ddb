"""The loop frame that a node runs in, derived from its inputs (EuroSys '18 §4.1).

A frame is the path of frame names from the outermost loop inward; ``()`` is outside all loops. Enter's output is one
frame further in, Exit's one further out; every other node stays in the frame of its inputs, which must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from asyncflow.errors import GraphError, SourceLocation
from asyncflow.graph.ir import Node

FramePath: TypeAlias = tuple[str, ...]


def frame_of(
    op_name: str, name: str, sources: Iterable[Node], frames: Mapping[Node, FramePath], location: SourceLocation
) -> FramePath:
    """The frame that a node runs in.

    Args:
        op_name: of the node.
        name: of the node, for messages.
        sources: its inputs and control inputs.
        frames: frames of `sources`; a back edge's may be missing.
        location: of the node, for messages.

    Raises:
        GraphError: the sources are in two frames, or it is an exit outside every frame.
    """
    first: tuple[Node, FramePath] | None = None
    for source in sources:
        if source not in frames:
            continue
        frame = output_frame(source, frames[source])
        if first is None:
            first = source, frame
        elif frame != first[1]:
            raise GraphError(
                f"{name} ({op_name}) mixes two frames: {first[0].name} is in {format_frame(first[1])}, "
                f"{source.name} in {format_frame(frame)}; bring values in with enter, out with exit"
                f"\n  built at {location}"
            )
    frame = () if first is None else first[1]
    if op_name == "exit" and not frame:
        raise GraphError(f"{name} is an exit outside every frame\n  built at {location}")
    return frame


def output_frame(node: Node, frame: FramePath) -> FramePath:
    """The frame of the outputs of `node`, which runs in `frame`."""
    if node.op.name == "enter":
        return (*frame, node.attrs["frame"])
    return frame[:-1] if node.op.name == "exit" else frame


def format_frame(frame: FramePath) -> str:
    """``frame 'outer/inner'``, or ``no frame``."""
    return f"frame {'/'.join(frame)!r}" if frame else "no frame"
