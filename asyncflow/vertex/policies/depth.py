"""The policy that goes by the distance from the top: a vertex is computed as late as its parents let it."""

from __future__ import annotations

import numpy as np

from asyncflow.values import Array
from asyncflow.vertex.structure.edges import Edges
from asyncflow.vertex.structure.levels import jumps, parent_of_each, steps


def depth(edges: Edges) -> Array:
    """The set of each vertex: the longest path from a root down to it, counted from the deepest vertices of all.

    Raises:
        GraphError: there is a cycle.
    """
    above = parent_of_each(edges)
    if above is None:
        down = steps(edges, edges.parents, edges.children)
    else:
        down = np.not_equal(above, edges.size).astype(np.int64)
        for _ in jumps(edges, above, np.arange(edges.size)):
            down += down[above]
        down = down[:-1]
    return np.asarray(down.max(initial=0) - down)
