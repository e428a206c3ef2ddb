"""The policy of activated sets: a vertex is computed as soon as its children are (Cavs §3.2)."""

from __future__ import annotations

from asyncflow.values import Array
from asyncflow.vertex.structure.edges import Edges
from asyncflow.vertex.structure.levels import find_heights


def breadth_first(edges: Edges) -> Array:
    """The set of each vertex: its height. An `InputGraph` of arrays knows it.

    Raises:
        GraphError: heights are not known, and there is a cycle.
    """
    return find_heights(edges) if edges.heights is None else edges.heights
