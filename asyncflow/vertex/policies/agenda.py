"""The policy for vertices of several types: a set takes all ready vertices of one type (DyNet's agenda).

The type whose vertices are lowest on average goes first: vertices far above the leaves had better wait for more of
their type. Without types this is the policy of activated sets.
"""

from __future__ import annotations

import numpy as np

from asyncflow.values import Array
from asyncflow.vertex.policies.breadth_first import breadth_first
from asyncflow.vertex.structure.edges import Edges
from asyncflow.vertex.structure.levels import steps


def agenda(edges: Edges) -> Array:
    """The set of each vertex: the number of the step that takes it."""
    height = breadth_first(edges)
    if edges.types is None:
        return height
    counts = np.maximum(np.bincount(edges.types), 1)
    turns = np.argsort(np.argsort(np.bincount(edges.types, height) / counts, kind="stable"))
    return steps(edges, edges.children, edges.parents, turns[edges.types])
