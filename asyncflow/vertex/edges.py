"""The edges of a batch of graphs as arrays: what is wrong with them is found here, and said by sample and vertex."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.shapes import format_shape, is_compatible
from asyncflow.values import Array

_LAST_TYPE = 65535
"""Types number functions, of which there are few; counts of each type are kept."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The arrays of an `InputGraph`, which fit one another; cycles are found by whoever orders the vertices.

    Attributes:
        offsets: where the children of each vertex begin, and where the last ones end.
        children: vertex numbers within the batch.
        samples: where the vertices of each sample begin, and where the last ones end.
        types: of the vertices; None: there are none.
        counts: number of children of each vertex.
        parents: the vertex that has each child, ascending.
        first_sample: the number in the batch of what is sample 0 here.
        first_vertex: the number in the batch of what is vertex 0 here.
    """

    offsets: Array
    children: Array
    samples: Array
    types: Array | None
    counts: Array
    parents: Array
    first_sample: int = 0
    first_vertex: int = 0

    @property
    def size(self) -> int:
        """Number of vertices."""
        return len(self.counts)

    def part(self, number: int, count: int) -> Edges:
        """One of several parts of a batch, one behind the other: whole samples, and as many vertices as in the others.

        They differ by up to the largest sample, and may be empty.
        """
        wanted = self.size * np.array([number, number + 1]) / count
        after = np.searchsorted(self.samples, wanted)
        before = np.maximum(after - 1, 0)
        first, last = np.where(wanted - self.samples[before] < self.samples[after] - wanted, before, after).tolist()
        start, stop = self.samples[[first, last]].tolist()
        below = slice(self.offsets[start], self.offsets[stop])
        return Edges(
            self.offsets[start : stop + 1] - below.start,
            self.children[below] - start,
            self.samples[first : last + 1] - start,
            None if self.types is None else self.types[start:stop],
            self.counts[start:stop],
            self.parents[below] - start,
            first,
            start,
        )

    def check(self, arity: int | None, n_types: int | None) -> None:
        """Looks for too many children, and for types that there are not; None is no limit.

        Raises:
            GraphError: one is found; the message names its sample and vertex.
        """
        if arity is not None and self.counts.max(initial=0) > arity:
            vertex = int(self.counts.argmax())
            raise self.error(vertex, f"has {self.counts[vertex]} children; {arity} are the most that there may be")
        if self.types is None:
            return
        last = _LAST_TYPE if n_types is None else n_types - 1
        for typed in np.flatnonzero((self.types < 0) | (self.types > last)):
            raise self.error(int(typed), f"is of type {self.types[typed]}; types are 0 to {last}")

    def check_children(self) -> None:
        """Looks for children that are no vertices of their parent's sample.

        Raises:
            GraphError: there is one.
        """
        if len(self.samples) == 2 and self.children.min(initial=0) >= 0 and self.children.max(initial=-1) < self.size:
            return  # most requests are of one sample
        starts = self.offsets[self.samples]  # of each sample's children
        filled = np.flatnonzero(np.diff(starts))
        if not filled.size:
            return
        least = np.minimum.reduceat(self.children, starts[filled])
        most = np.maximum.reduceat(self.children, starts[filled])
        for sample in filled[(least < self.samples[filled]) | (most >= self.samples[filled + 1])]:
            first, end = self.samples[sample : sample + 2]
            children = self.children[starts[sample] :]
            edge = ((children < first) | (children >= end)).argmax()
            wrong = f"has a child {children[edge]}, which is none of its sample's vertices, {first} to {end - 1}"
            raise self.error(self.parents[starts[sample] + edge], wrong)

    def error(self, vertex: int, wrong: str) -> GraphError:
        """The error that says what is wrong with a vertex."""
        sample = np.searchsorted(self.samples, vertex, side="right") - 1
        first, in_batch = self.samples[sample], self.first_vertex + vertex
        batch = "" if in_batch == vertex - first else f" ({in_batch} in the batch)"
        return GraphError(f"vertex {vertex - first} of sample {self.first_sample + sample}{batch} {wrong}")

    def cycle(self, vertex: int) -> GraphError:
        """The error of a vertex that is on a cycle."""
        return self.error(vertex, "is its own descendant; the edges of an input graph form no cycle")


def read_edges(offsets: Array, children: Array, samples: Array, types: Array | None = None) -> Edges:
    """The arrays of an input graph, checked but for cycles.

    Raises:
        GraphError: they do not fit one another; a `DTypeError` or `ShapeError` if they are no vectors of integers.
    """
    offsets, children = integers("offsets", offsets), integers("children", children)
    samples, types = integers("samples", samples), None if types is None else integers("types", types)
    size = len(offsets) - 1
    if types is not None and len(types) != size:
        raise ShapeError(f"an input graph has a type for each of its {size} vertices; got {len(types)}")
    _check_ends("samples", samples, size, "vertices")
    _check_ends("offsets", offsets, len(children), "children")
    lengths, counts = samples[1:] - samples[:-1], offsets[1:] - offsets[:-1]
    if lengths.min(initial=0) < 0:
        sample = lengths.argmin()
        raise GraphError(f"sample {sample} has {lengths[sample]} vertices: samples of an input graph never fall")
    is_rising = counts.min(initial=0) >= 0
    edges = Edges(offsets, children, samples, types, counts, owners(offsets) if is_rising else counts)
    if not is_rising:
        vertex = counts.argmin()
        raise edges.error(int(vertex), f"has {counts[vertex]} children: offsets of an input graph never fall")
    edges.check_children()
    return edges


def owners(starts: Array) -> Array:
    """For each of the entries that stand one segment after the other, the number of its segment.

    That is how many segments begin up to it: `repeat` takes four times as long.
    """
    count = int(starts[-1])
    return np.bincount(starts[1:-1], minlength=count).cumsum()[:count]


def roots(size: int, children: Array) -> Array:
    """The vertices that are no child, ascending."""
    is_root = np.ones(size, bool)
    is_root[children] = False
    return np.flatnonzero(is_root)


def integers(name: str, values: object, shape: tuple[int | None, ...] = (None,)) -> Array:
    """An array of int64 of that shape.

    Raises:
        DTypeError, ShapeError: the values are none.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise ShapeError(f"{name} of an input graph have shape {format_shape(shape)}; got {brief(values)}") from None
    if not array.size and not isinstance(values, np.ndarray):
        return np.zeros([extent or 0 for extent in shape], np.int64)
    if array.dtype.kind not in "iu":
        raise DTypeError(f"{name} of an input graph are integers; got {array.dtype}")
    if not is_compatible(array.shape, shape):
        raise ShapeError(f"{name} of an input graph have shape {format_shape(shape)}; got {format_shape(array.shape)}")
    return array.astype(np.int64, copy=False)


def _check_ends(name: str, starts: Array, end: int, what: str) -> None:
    if not len(starts) or starts[0] != 0 or starts[-1] != end:
        seen = f"{starts[0]} to {starts[-1]}" if len(starts) else "none"
        raise GraphError(f"{name} of an input graph go from 0 to the number of {what}, {end}; got {seen}")
