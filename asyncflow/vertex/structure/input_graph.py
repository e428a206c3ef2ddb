"""`InputGraph`: the structure of a batch of directed acyclic graphs, as data (Cavs §3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Protocol, TypeAlias, Union, cast

import numpy as np

from asyncflow.errors import GraphError, a_kind, brief
from asyncflow.graph.building.build import placeholder
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import static_int
from asyncflow.values import Array
from asyncflow.vertex.structure.edges import integers, read_edges, roots
from asyncflow.vertex.structure.levels import find_heights

Ints: TypeAlias = Union["Array", Sequence[int]]
"""An array of integers, or a list of them."""


class DirectedGraph(Protocol):
    """A graph of NetworkX, as far as it is read here."""

    def is_directed(self) -> bool:
        """Return True if the edges have a direction."""

    def nodes(self) -> Iterable[object]:
        """The nodes, in order."""

    def edges(self) -> Iterable[tuple[object, object]]:
        """Pairs of nodes."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class InputGraph:
    """The structure of a batch of directed acyclic graphs: a value like any other, and no part of a program.

    Vertices are numbered through the batch, sample by sample. A vertex has any number of children, and may share them
    with others; one without children is a leaf, one without parents a root. Arrays and lists are checked, and kept as
    read-only arrays of int64. An instance may as well hold tensors, and is a nest of them: it is traced as the
    argument of an `af.function`, carried by loops, fetched and pickled.

    Args:
        offsets: the children of vertex ``v`` are ``children[offsets[v]:offsets[v + 1]]``, in their order.
        children: vertex numbers within the batch.
        samples: the vertices of sample ``i`` are ``samples[i]`` up to ``samples[i + 1]``; there may be none.
        types: of the vertices, from 0 on; None: they are all alike.
        heights: of the vertices: the length of the longest path down to a leaf. None: they are computed. With arrays
            that happens always, once for all batches that a graph is in, so that a run has only to sort by them. As
            tensors, they may be any numbers below the number of vertices, each above the heights of the children.

    Raises:
        GraphError: the arrays are no such graph, or there is a cycle; the message names sample and vertex.

    >>> import asyncflow as af
    >>> tree, words = af.InputGraph.from_nested((("roses", "are"), "red"))
    >>> words
    ['roses', 'are', 'red']
    >>> tree.leaves, tree.roots
    (array([0, 1, 3]), array([4]))
    >>> batch = af.InputGraph.batch([tree, af.InputGraph.chain([3])])
    >>> batch, batch[1].children
    (InputGraph(2 samples, 8 vertices, 6 children), array([0, 1]))
    """

    offsets: Array | Tensor
    children: Array | Tensor
    samples: Array | Tensor
    types: Array | Tensor | None = None
    heights: Array | Tensor | None = None

    def __post_init__(self) -> None:
        # Nests take graphs apart and rebuild them with any leaves: tensors, specs, paths.
        if not isinstance(self.offsets, np.ndarray | list | tuple):
            return
        parts = named_parts(self)
        for part in parts.values():
            if not isinstance(part, np.ndarray | list | tuple):
                raise _no_array(part)
        edges = read_edges(**cast("dict[str, Array]", parts))
        edges.check(None, None)
        found = find_heights(edges)  # also refuses a cycle
        if edges.heights is not None and (is_wrong := edges.heights != found).any():
            vertex = int(is_wrong.argmax())
            raise edges.error(vertex, f"is of height {found[vertex]}; got {edges.heights[vertex]}")
        types = None if edges.types is None else np.array(edges.types)
        self._keep(np.array(edges.offsets), np.array(edges.children), np.array(edges.samples), types, found)

    @classmethod
    def from_edges(cls, n: int, edges: Array | Sequence[tuple[int, int]], types: Ints | None = None) -> InputGraph:
        """One sample of `n` vertices, of pairs of a parent and its child; a parent's children are in their order."""
        n = static_int(n, "from_edges(n, edges): n")
        if n < 0:
            raise GraphError(f"from_edges(n, edges): n is the number of vertices, 0 or more; got {n}")
        pairs = integers("edges", edges, (None, 2))
        for parent, child in pairs[(pairs[:, 0] < 0) | (pairs[:, 0] >= n)]:
            raise GraphError(f"vertex {child} has the parent {parent}; vertices are 0 to {n - 1}")
        order = np.argsort(pairs[:, 0], kind="stable")  # stable: the order of a parent's edges is that of its children
        counts = np.bincount(pairs[:, 0], minlength=n)
        samples = np.array([0, n])
        return cls(_starts(counts), pairs[order, 1], samples, None if types is None else integers("types", types))

    @classmethod
    def from_parents(cls, parents: Ints, types: Ints | None = None) -> InputGraph:
        """One sample of trees: the parent of each vertex, -1 for a root; children are in the order of their numbers."""
        above = integers("parents", parents)
        below = np.flatnonzero(above != -1)
        return cls.from_edges(len(above), np.stack([above[below], below], 1), types)

    @classmethod
    def from_nested(cls, tree: object) -> tuple[InputGraph, list[object]]:
        """One sample, a tree of nested tuples, and its leaves: all that is no tuple, in the order of the vertices.

        Vertices are numbered from left to right, children before their parents. `InputGraph.leaves` are the numbers of
        the leaves. A namedtuple is a leaf, and so is a list in a tuple, unless it holds tuples.

        Raises:
            GraphError: a tuple is empty, `tree` is a list, or a list holds tuples.
        """
        found: list[object] = []
        parents: list[int] = []
        waiting: list[tuple[object, int]] = [(tree, -1)]
        # An explicit stack: a nest may be deeper than Python's recursion limit. Numbers are reversed below.
        while waiting:  # from right to left, parents first
            item, parent = waiting.pop()
            if item == () and type(item) is tuple:
                raise GraphError("an empty tuple in nested tuples is neither a leaf nor has it children")
            if type(item) is list and (item is tree or any(type(each) is tuple for each in item)):
                raise GraphError(
                    f"one sample is made of nested tuples; got a list, {brief(item)}: write tuples, or, for several "
                    "samples, InputGraph.batch([InputGraph.from_nested(tree)[0] for tree in trees])"
                )
            if type(item) is tuple:
                waiting.extend((child, len(parents)) for child in item)
            parents.append(parent)
            found.append(item)
        above = np.array(parents[::-1])
        graph = cls.from_parents(np.where(above < 0, -1, len(above) - 1 - above))
        return graph, [item for item in reversed(found) if type(item) is not tuple]

    @classmethod
    def from_networkx(cls, graph: DirectedGraph, types: Ints | None = None) -> InputGraph:
        """One sample: a directed graph of NetworkX, with edges from parents to children, in the order of its nodes."""
        if not hasattr(graph, "is_directed"):
            raise GraphError(f"from_networkx takes a networkx.DiGraph; got {brief(graph)}")
        if not graph.is_directed():
            raise GraphError(
                "edges lead from parents to children, so a graph has to be directed; got an undirected one"
            )
        numbers = {node: number for number, node in enumerate(graph.nodes())}
        return cls.from_edges(len(numbers), [(numbers[a], numbers[b]) for a, b in graph.edges()], types)

    @classmethod
    def chain(cls, lengths: Ints) -> InputGraph:
        """Sequences: a sample for each length, in which every vertex but the first has the one before as its child."""
        steps = integers("lengths", lengths)
        for sample in np.flatnonzero(steps < 0):
            raise GraphError(f"lengths of chains are 0 or more; that of sample {sample} is {steps[sample]}")
        samples = _starts(steps)
        # Each vertex has one child, except the first of a sample, so heights are places in the sample.
        counts = np.ones(samples[-1], np.int64)
        counts[samples[:-1][steps > 0]] = 0
        numbers = np.arange(samples[-1]) - samples[:-1].repeat(steps)
        return cls._of(_starts(counts), np.flatnonzero(counts) - 1, samples, None, numbers)

    @classmethod
    def batch(cls, graphs: Iterable[InputGraph]) -> InputGraph:
        """Join the samples of several graphs in one; either all graphs have types, or none."""
        graphs = list(graphs)
        for number, graph in enumerate(graphs):
            if not isinstance(graph, InputGraph):
                raise GraphError(f"graph {number} of a batch is an af.InputGraph; got {brief(graph)}")
        parts = [graph._arrays() for graph in graphs]
        typed = [part[3] for part in parts if part[3] is not None]
        if len(typed) not in (0, len(parts)):
            raise GraphError(f"of {len(parts)} graphs of a batch {len(typed)} have types: all have, or none")
        sizes = np.array(
            [(len(levels), len(children), len(samples)) for _, children, samples, _, levels in parts], np.int64
        )
        vertices, edges, ends = sizes.reshape(-1, 3).T
        before = vertices.cumsum() - vertices
        zero = np.zeros(1, np.int64)
        # In few array operations for any number of graphs: a batch is made for each training step.
        offsets = _joined([zero, *(part[0][1:] for part in parts)])
        offsets[1:] += (edges.cumsum() - edges).repeat(vertices)
        children = _joined([part[1] for part in parts])
        children += before.repeat(edges)
        samples = _joined([zero, *(part[2][1:] for part in parts)])
        samples[1:] += before.repeat(ends - 1)
        types, heights = _joined(typed) if typed else None, _joined([part[4] for part in parts])
        return cls._of(offsets, children, samples, types, heights)

    @classmethod
    def placeholder(cls, *, types: bool = False, heights: bool = True, name: str = "graph") -> InputGraph:
        """Make a graph of placeholders, to be fed by every run that needs them: ``feeds={**graph.feeds(data), x:
        rows}``.

        Args:
            types: whether vertices have types.
            heights: whether heights are fed, as `feeds` does. Without them each run finds them, as it has to where
                arrays are fed of which no `InputGraph` has been made.
            name: what names of the tensors begin with.
        """
        return cls(**{part: placeholder(int64, (None,), f"{name}_{part}") for part in _names(types, heights)})

    @classmethod
    def spec(cls, *, types: bool = False, heights: bool = True) -> InputGraph:
        """Make a graph of specs, to trace a function for: ``f.trace(af.InputGraph.spec())``."""
        return cls(**dict.fromkeys(_names(types, heights), cast("Tensor", Spec(int64, (None,)))))

    def feeds(self, data: InputGraph) -> Mapping[Tensor, Array]:
        """The feeds that give data to the tensors of this graph."""
        if not isinstance(data, InputGraph):
            raise GraphError(f"graph.feeds(data): data is an af.InputGraph of arrays; got {brief(data)}")
        if (self.types is None) != (data.types is None):
            without, which = ("placeholders", "data") if self.types is None else ("data", "placeholders")
            raise GraphError(f"the {which} of a graph have types, and the {without} have none")
        arrays = dict(zip(_NAMES, data._arrays(), strict=True))
        return {key: arrays[name] for name, key in named_parts(self).items() if isinstance(key, Tensor)}  # type: ignore[misc]

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._arrays()[2]) - 1

    def __iter__(self) -> Iterator[InputGraph]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int | slice) -> InputGraph:
        """One sample, or several, as a batch of their own.

        Raises:
            IndexError: there is no such sample.
        """
        if not isinstance(index, slice) and not -len(self) <= static_int(index, "graph[sample]: sample") < len(self):
            raise IndexError(f"graph[{index}]: a batch of {len(self)} samples has no sample {index}")
        offsets, children, samples, types, heights = self._arrays()
        every = range(len(self))
        chosen = every[index] if isinstance(index, slice) else range(every[index], every[index] + 1)
        if chosen.step != 1 and chosen:  # arrays of neighbouring samples are slices; others are batched again
            return InputGraph.batch([self[sample] for sample in chosen])
        start, stop = (chosen[0], chosen[-1] + 1) if chosen else (0, 0)
        first, last = samples[start], samples[stop]
        return InputGraph._of(
            offsets[first : last + 1] - offsets[first],
            children[offsets[first] : offsets[last]] - first,
            samples[start : stop + 1] - first,
            None if types is None else types[first:last],
            heights[first:last],
        )

    def __repr__(self) -> str:
        if not isinstance(self.offsets, np.ndarray):
            return f"InputGraph({', '.join(map(repr, named_parts(self).values()))})"
        return f"InputGraph({len(self)} samples, {self.n_vertices} vertices, {len(self._arrays()[1])} children)"

    @property
    def n_vertices(self) -> int:
        """Number of vertices of the batch."""
        return len(self._arrays()[0]) - 1

    @property
    def roots(self) -> Array:
        """The vertices without parents, ascending."""
        return roots(self.n_vertices, self._arrays()[1])

    @property
    def leaves(self) -> Array:
        """The vertices without children, ascending."""
        return np.flatnonzero(np.diff(self._arrays()[0]) == 0)

    @classmethod
    def _of(cls, *arrays: Array | None) -> InputGraph:
        """Make a graph of checked, immutable arrays."""
        graph = object.__new__(cls)  # bypasses `__post_init__`, which would check again and recompute the heights
        graph._keep(*arrays)
        return graph

    def _keep(self, *arrays: Array | None) -> None:
        for name, array in zip(_NAMES, arrays, strict=True):
            if array is not None:
                array.flags.writeable = False
            object.__setattr__(self, name, array)

    def _arrays(self) -> tuple[Array, Array, Array, Array | None, Array]:
        parts = self.offsets, self.children, self.samples, self.types, self.heights
        if not isinstance(self.heights, np.ndarray):  # graphs of arrays have heights
            raise _no_array(self.offsets)
        return cast("tuple[Array, Array, Array, Array | None, Array]", parts)


_NAMES: Final = tuple(field.name for field in fields(InputGraph))


def _names(types: bool, heights: bool) -> list[str]:
    return [name for name in _NAMES if {"types": types, "heights": heights}.get(name, True)]


def _no_array(part: object) -> GraphError:
    return GraphError(f"an input graph holds {a_kind(type(part))}: only one of arrays can be looked at")


def named_parts(graph: InputGraph) -> dict[str, Array | Tensor]:
    """The vectors of a graph by name, in their order: all that there are."""
    return {name: part for name in _NAMES if (part := getattr(graph, name)) is not None}


def _starts(counts: Array) -> Array:
    """Return the start of each group of these sizes, and the end of the last one."""
    return np.concatenate([[0], counts.cumsum()])


def _joined(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0, np.int64), *arrays])
