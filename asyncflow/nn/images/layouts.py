"""Layouts of images: which axis is that of channels."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from asyncflow.errors import GraphError, ShapeError, brief
from asyncflow.graph.ir import Tensor

Layout: TypeAlias = Literal["NCHW", "NHWC", "NCW", "NWC", "NCDHW", "NDHWC"]
"""Axes of a batch of images, with channels first or last; `NCHW` and `NHWC` stand for any number of axes."""


def channel_axis(what: str, x: Tensor, layout: str) -> int:
    """Return the axis of channels of `x`, counted from the front.

    Args:
        what: names the function in messages.
        x: ``(batch, channels, ...)`` or ``(batch, ..., channels)``.
        layout: of `x`.
    """
    if layout not in get_args(Layout):
        raise GraphError(f"{what}: layout is one of {', '.join(get_args(Layout))}; got {brief(layout)}")
    is_first, rank = layout[1] == "C", None if x.shape is None else len(x.shape)
    if rank is None or rank < 2 or (len(layout) != 4 and len(layout) != rank):
        axes = "(batch, channels, ...)" if is_first else "(batch, ..., channels)"
        raise ShapeError(f"{what}: input is {axes}, of a known rank that layout={layout!r} fits; got {x!r}")
    return 1 if is_first else rank - 1
