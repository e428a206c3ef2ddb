"""The policy of activated sets: a vertex is computed as soon as its children are (Cavs §3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.vertex.levels import heights

if TYPE_CHECKING:
    from asyncflow.values import Array
    from asyncflow.vertex.edges import Edges


def breadth_first(edges: Edges) -> Array:
    """The set of each vertex: the length of the longest path from it down to a leaf."""
    return heights(edges)


__all__ = ["breadth_first"]
