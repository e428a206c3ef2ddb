"""The edges of a batch of graphs as arrays; faults are found here, and reported by sample and vertex."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.values import Array

_INT64 = np.dtype(np.int64)
_LAST_TYPE = 65535
"""Types number functions, of which there are few; counts of each type are kept."""


@dataclass(frozen=True)
class Edges:
    """The arrays of an `InputGraph`, consistent with each other; cycles are found when the vertices are ordered.

    Attributes:
        offsets: where the children of each vertex begin, and where the last ones end.
        children: vertex numbers within the batch.
        samples: where the vertices of each sample begin, and where the last ones end.
        types: of the vertices; None: there are none.
        heights: of the vertices, at most their number; None: they are to be found. The order of the vertices later
            checks that they are above the heights of children.
        counts: number of children of each vertex.
        first_sample: the number in the batch of this part's sample 0.
        first_vertex: the number in the batch of this part's vertex 0.
    """

    offsets: Array
    children: Array
    samples: Array
    types: Array | None
    heights: Array | None
    counts: Array
    first_sample: int = 0
    first_vertex: int = 0

    @property
    def size(self) -> int:
        """Number of vertices."""
        return len(self.counts)

    @cached_property
    def parents(self) -> Array:
        """The vertex that has each child, ascending."""
        return owners(self.offsets)

    def part(self, number: int, count: int) -> Edges:
        """Return one of several consecutive parts of a batch: whole samples, and about equally many vertices in each
        part.

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
            None if self.heights is None else self.heights[start:stop],
            self.counts[start:stop],
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
            raise self.error(vertex, f"has {self.counts[vertex]} children; at most {arity} are allowed")
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
            return  # most requests have one sample
        starts = self.offsets.take(self.samples)  # of each sample's children
        (filled,) = (starts[1:] > starts[:-1]).nonzero()
        if not filled.size:
            return
        firsts = starts.take(filled)
        is_wrong = np.minimum.reduceat(self.children, firsts) < self.samples.take(filled)
        is_wrong |= np.maximum.reduceat(self.children, firsts) >= self.samples.take(filled + 1)
        for sample in filled[is_wrong]:
            first, end = self.samples[sample : sample + 2]
            children = self.children[starts[sample] :]
            edge = ((children < first) | (children >= end)).argmax()
            wrong = f"has a child {children[edge]}, which is not among its sample's vertices, {first} to {end - 1}"
            raise self.error(self.parents[starts[sample] + edge], wrong)

    def error(self, vertex: int, wrong: str) -> GraphError:
        """Return the error for a vertex."""
        sample = np.searchsorted(self.samples, vertex, side="right") - 1
        first, in_batch = self.samples[sample], self.first_vertex + vertex
        batch = "" if in_batch == vertex - first else f" ({in_batch} in the batch)"
        return GraphError(f"vertex {vertex - first} of sample {self.first_sample + sample}{batch} {wrong}")

    def too_low(self) -> GraphError:
        """Return the error for a vertex whose height is not above the heights of its children."""
        assert self.heights is not None
        edge = (self.heights[self.children] >= self.heights[self.parents]).argmax()
        vertex, child = int(self.parents[edge]), self.children[edge]
        heights = f"is of height {self.heights[vertex]}, and has a child of height {self.heights[child]}"
        return self.error(vertex, f"{heights}; each must be above its children's")

    def cycle(self, vertex: int) -> GraphError:
        """The error of a vertex that is on a cycle."""
        return self.error(vertex, "is its own descendant; the edges of an input graph form no cycle")


def read_edges(
    offsets: Array, children: Array, samples: Array, types: Array | None = None, heights: Array | None = None
) -> Edges:
    """The arrays of an input graph, checked but for cycles.

    Raises:
        GraphError: they do not fit one another; a `DTypeError` or `ShapeError` if they are no vectors of integers.
    """
    offsets, children = integers("offsets", offsets), integers("children", children)
    _check_ends("offsets", "vertices", offsets, len(children), "children")
    samples, size = integers("samples", samples), len(offsets) - 1
    types = None if types is None else _of_each("type", types, size)
    heights = None if heights is None else _of_each("height", heights, size)
    _check_ends("samples", "samples", samples, size, "vertices")
    lengths, counts = samples[1:] - samples[:-1], offsets[1:] - offsets[:-1]
    if lengths.min(initial=0) < 0:
        sample = lengths.argmin()
        raise GraphError(f"sample {sample} has {lengths[sample]} vertices: samples of an input graph never fall")
    edges = Edges(offsets, children, samples, types, heights, counts)
    if counts.min(initial=0) < 0:
        vertex = counts.argmin()
        raise edges.error(int(vertex), f"has {counts[vertex]} children: offsets of an input graph never fall")
    edges.check_children()
    if heights is not None and (heights.min(initial=0) < 0 or heights.max(initial=-1) >= size):
        wrong = int(((heights < 0) | (heights >= size)).argmax())
        raise edges.error(wrong, f"is of height {heights[wrong]}; heights are 0 to {size - 1}")
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
    return is_root.nonzero()[0]


def integers(name: str, values: object, shape: tuple[int | None, ...] = (None,)) -> Array:
    """An array of int64 of that shape.

    Raises:
        DTypeError, ShapeError: the values are none.
    """
    if type(values) is np.ndarray and values.dtype == _INT64 and values.ndim == len(shape) == 1:
        return values  # always so for an `InputGraph`
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


def _of_each(what: str, values: Array, size: int) -> Array:
    array = integers(f"{what}s", values)
    if len(array) != size:
        raise ShapeError(f"an input graph has a {what} for each of its {size} vertices; got {len(array)}")
    return array


def _check_ends(name: str, owners: str, starts: Array, end: int, what: str) -> None:
    if not len(starts):
        raise GraphError(f"{name} of an input graph have one entry more than there are {owners}, from 0 on; got none")
    if starts[0] != 0 or starts[-1] != end:
        seen = f"{starts[0]} to {starts[-1]}"
        raise GraphError(f"{name} of an input graph go from 0 to the number of {what}, {end}; got {seen}")
