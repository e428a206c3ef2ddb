"""The policy of activated sets: a vertex is computed as soon as its children are (Cavs §3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncflow.vertex.levels import jumps, parent_of_each, steps

if TYPE_CHECKING:
    from asyncflow.values import Array
    from asyncflow.vertex.edges import Edges


def breadth_first(edges: Edges) -> Array:
    """The set of each vertex: the length of the longest path from it down to a leaf.

    Raises:
        GraphError: there is a cycle.
    """
    above = parent_of_each(edges)
    if above is None:
        return steps(edges, edges.children, edges.parents)
    height = np.zeros(edges.size + 1, np.int64)
    for jump in jumps(edges, above):
        np.maximum.at(height, above, height + jump)
    return height[:-1]


__all__ = ["breadth_first"]
