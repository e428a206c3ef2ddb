"""Random batches of graphs, and their meaning in plain Python."""

from __future__ import annotations

from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.vertex.schedule import SCHEDULE, VertexSchedule
from asyncflow.vertex.structure.input_graph import named_parts


@st.composite
def samples(draw: st.DrawFn, *, trees: bool = False) -> af.InputGraph:
    """Draw a graph of up to 12 vertices, whose numbers say nothing of their order."""
    n = draw(st.integers(0, 12))
    number = draw(st.permutations(range(n)))
    edges = []
    for vertex in range(1, n):
        parents = st.lists(st.integers(0, vertex - 1), max_size=1 if trees else 3)
        edges += [(number[parent], number[vertex]) for parent in draw(parents)]
    return af.InputGraph.from_edges(n, draw(st.permutations(edges)))


@st.composite
def batches(draw: st.DrawFn, *, typed: bool = False, trees: bool = False) -> af.InputGraph:
    """Up to four of them."""
    graph = af.InputGraph.batch(draw(st.lists(samples(trees=trees), max_size=4)))
    if not typed:
        return graph
    types = draw(st.lists(st.integers(0, 2), min_size=graph.n_vertices, max_size=graph.n_vertices))
    return af.InputGraph(graph.offsets, graph.children, graph.samples, np.array(types, np.int64))


def children_of(graph: Any) -> list[list[int]]:
    """The children of each vertex."""
    offsets, children = graph.offsets.tolist(), graph.children.tolist()
    return [children[first:last] for first, last in pairwise(offsets)]


def heights(graph: af.InputGraph) -> list[int]:
    """The longest path from each vertex to a leaf."""
    children = children_of(graph)
    found = [0] * len(children)
    for vertex in TopologicalSorter(dict(enumerate(children))).static_order():
        found[vertex] = max((found[child] + 1 for child in children[vertex]), default=0)
    return found


def ordered(
    graph: Any,
    policy: str = "breadth_first",
    arity: int | None = None,
    n_types: int | None = None,
    part: tuple[int, int] = (0, 1),
    without: str = "",
) -> Any:
    """The schedule of a graph of arrays, or of a part of it, as the op's kernel gives it, `without` one of them."""
    arrays = {name: x for name, x in named_parts(graph).items() if name != without}
    assert SCHEDULE.kernel is not None
    attrs = {"policy": policy, "arity": arity, "n_types": n_types, "parts": part[1], "known": tuple(arrays)[3:]}
    found: Any = SCHEDULE.kernel(np, **attrs)(*arrays.values())
    each = len(found) // part[1]
    found = found[part[0] * each : (part[0] + 1) * each]
    starts, parents = found[5:7] if arity is None else (None, None)
    return VertexSchedule._make([*found[:5], starts, parents, None if graph.types is None else found[-1]])


def sets(found: Any) -> list[list[int]]:
    """The vertices of each set."""
    starts = found.set_starts.tolist()
    return [found.order[first:last].tolist() for first, last in pairwise(starts)]


def same(a: Any, b: Any) -> bool:
    """Return True if two graphs of arrays are equal."""
    parts = [(x.offsets, x.children, x.samples, x.heights) for x in (a, b)]
    if (a.types is None) != (b.types is None):
        return False
    return all(map(np.array_equal, *parts)) and (a.types is None or np.array_equal(a.types, b.types))
