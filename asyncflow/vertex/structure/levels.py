"""Paths in trees, by doubling their length; sets of vertices, for any graph, in the order of computation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncflow.values import Array
from asyncflow.vertex.structure.edges import Edges


def parent_of_each(edges: Edges) -> Array | None:
    """The parent of each vertex, and the number of vertices where there is none; None if a vertex has several."""
    above = np.full(edges.size + 1, edges.size)
    above[edges.children] = edges.parents
    return above if np.count_nonzero(above != edges.size) == len(edges.children) else None


def find_heights(edges: Edges) -> Array:
    """The length of the longest path from each vertex down to a leaf.

    Raises:
        GraphError: there is a cycle.
    """
    above = parent_of_each(edges)
    if above is None:
        return steps(edges, edges.children, edges.parents)
    # Passes over all paths skip leaves, which are half of the vertices.
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


def jumps(edges: Edges, above: Array, vertices: Array) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, with `above` leading that far up, until it leads out of all trees: a pass for each
    doubling.

    Among `vertices` these are places, and their number is out of all trees.

    A batch of depth 50 takes 6 passes over all vertices, and a chain of 10,000 takes 14. That costs less than one step
    a level, in which NumPy's calls cost more than their work.

    Raises:
        GraphError: there is a cycle.
    """
    jump = 1
    while (least := above.min()) < len(vertices):
        if jump > len(vertices):
            raise edges.cycle(int(vertices[least]))
        yield jump
        above[:] = above[above]
        jump *= 2


def steps(edges: Edges, before: Array, after: Array, turns: Array | None = None) -> Array:
    """The number of the step in which each vertex is computed; in a step all that are ready are.

    Args:
        edges: of the graph.
        before: for each edge the vertex that has to be computed first.
        after: for each edge the vertex that waits for that.
        turns: of each vertex; a step computes those alone that have the least turn of all that are ready.

    Raises:
        GraphError: there is a cycle.
    """
    counts = np.bincount(before, minlength=edges.size)
    firsts, released = counts.cumsum() - counts, after[np.argsort(before, kind="stable")]
    pending = np.bincount(after, minlength=edges.size)
    step, place = np.full(edges.size, -1), np.empty(edges.size, np.int64)
    waiting: list[list[Array]] = [[] for _ in range(0 if turns is None else int(turns.max(initial=0)) + 1)]
    ready, now = np.flatnonzero(pending == 0), 0
    while True:
        if turns is not None:
            for turn in np.flatnonzero(np.bincount(turns[ready])):
                waiting[turn].append(ready[turns[ready] == turn])
        chosen = next(filter(None, waiting), [ready])
        if not chosen[0].size:
            break
        computed = np.concatenate(chosen)
        chosen.clear()
        step[computed] = now
        now += 1
        freed = released[ranges(firsts[computed], counts[computed])]
        np.subtract.at(pending, freed, 1)
        freed = freed[pending[freed] == 0]
        place[freed] = np.arange(len(freed))
        ready = freed[place[freed] == np.arange(len(freed))]  # each vertex once, even if it waited for several
    if (step < 0).any():
        raise edges.cycle(_on_cycle(before, after, step < 0))
    return step


def ranges(starts: Array, lengths: Array) -> Array:
    """Return ranges of numbers, each from a start on and of a given length, one behind the other."""
    ends = lengths.cumsum()
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def _on_cycle(before: Array, after: Array, left: Array) -> int:
    """Return a vertex on a cycle among the remaining ones, each of which waits for another of them."""
    awaited = np.arange(len(left))
    inner = left[before] & left[after]
    awaited[after[inner]] = before[inner]
    for _ in range(len(left).bit_length()):
        awaited = awaited[awaited]
    return int(awaited[left].min())
