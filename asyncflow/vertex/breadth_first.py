"""The policy of activated sets: a vertex is computed as soon as its children are (Cavs §3.2)."""

from __future__ import annotations

import numpy as np

from asyncflow.values import Array
from asyncflow.vertex.edges import Edges
from asyncflow.vertex.levels import jumps, parent_of_each, steps


def breadth_first(edges: Edges) -> Array:
    """The set of each vertex: the length of the longest path from it down to a leaf.

    Raises:
        GraphError: there is a cycle.
    """
    above = parent_of_each(edges)
    if above is None:
        return steps(edges, edges.children, edges.parents)
    # Leaves, which are half of the vertices, are left out of the passes over all paths.
    inner = np.flatnonzero(edges.counts > 0)
    number = np.full(edges.size + 1, len(inner))
    number[inner] = np.arange(len(inner))
    up = np.append(number[above[inner]], len(inner))
    longest = np.zeros(len(up), np.int64)
    for jump in jumps(edges, up, inner):
        np.maximum.at(longest, up, longest + jump)
    height = np.zeros(edges.size, np.int64)
    height[inner] = longest[:-1] + 1
    return height
