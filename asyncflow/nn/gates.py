"""Cutting the gates of a cell apart, which are computed side by side."""

from __future__ import annotations

from asyncflow.errors import ShapeError
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.shapes import Shape, format_shape


def plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    """The gates with a bias, if there is one."""
    return gates if bias is None else gates + bias


def split_gates(gates: Tensor, count: int, state: Shape) -> list[Tensor]:
    """`count` pieces of equal extent along the last axis.

    Args:
        gates: ``(batch, count * hidden)``.
        count: of gates.
        state: shape of the cell's state, ``(batch, hidden)``.

    Raises:
        ShapeError: the extents do not fit, or are not known while the graph is built.
    """
    width = gates.shape[-1] if gates.shape else None
    hidden = state[-1] if state else None
    if width is None and hidden is not None:
        width = count * hidden
    if width is None:
        raise ShapeError(
            f"a cell with {count} gates needs to know `hidden` while the graph is built: give the state the shape "
            f"[None,hidden], or the weights [None,{count} * hidden]"
        )
    if width % count or hidden not in (None, width // count):
        raise ShapeError(
            f"a cell with {count} gates needs weights of {count} * hidden columns and a state of shape [batch,hidden]; "
            f"got gates of shape {format_shape(gates.shape)} and a state of shape {format_shape(state)}"
        )
    hidden = width // count
    return [gates[..., place * hidden : (place + 1) * hidden] for place in range(count)]
