"""The policy that goes by the distance from the top: a vertex is computed as late as its parents let it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.vertex.levels import depths

if TYPE_CHECKING:
    from asyncflow.values import Array
    from asyncflow.vertex.edges import Edges


def depth(edges: Edges) -> Array:
    """The set of each vertex: the longest path from a root down to it, counted from the deepest vertices of all."""
    down = depths(edges)
    up: Array = down.max(initial=0) - down
    return up


__all__ = ["depth"]
