from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

import asyncflow as af
from tests.vertex.graphs import batches, children_of, heights, same, samples

TREE = af.InputGraph.from_parents([2, 2, 4, 4, -1])
"""((0, 1), 3)"""


class Directed:
    """A graph as NetworkX has it."""

    def __init__(self, nodes: str, edges: list[str], directed: bool = True) -> None:
        self._nodes, self._edges, self._directed = nodes, edges, directed

    def is_directed(self) -> bool:
        return self._directed

    def nodes(self) -> list[object]:
        return list(self._nodes)

    def edges(self) -> list[tuple[object, object]]:
        return [(edge[0], edge[1]) for edge in self._edges]


class Point(NamedTuple):
    x: int
    y: int


def test_constructors_agree() -> None:
    nested, leaves = af.InputGraph.from_nested((("a", "b"), "c"))
    assert leaves == ["a", "b", "c"]
    for graph in (
        nested,
        af.InputGraph.from_edges(5, [(4, 2), (2, 0), (2, 1), (4, 3)]),
        af.InputGraph.from_networkx(Directed("ABCDE", ["EC", "CA", "CB", "ED"])),
        af.InputGraph(np.array([0, 0, 0, 2, 2, 4], np.int32), np.array([0, 1, 2, 3], np.uint8), np.array([0, 5])),
        af.InputGraph([0, 0, 0, 2, 2, 4], [0, 1, 2, 3], (0, 5)),  # type: ignore[arg-type]
        af.InputGraph.batch([TREE]),
        af.InputGraph.batch([TREE, TREE, TREE])[1],
    ):
        assert same(graph, TREE), graph
    assert (TREE.leaves.tolist(), TREE.roots.tolist(), TREE.n_vertices, len(TREE)) == ([0, 1, 3], [4], 5, 1)


def test_chains_are_batches_of_chains() -> None:
    chains = [af.InputGraph.from_parents([*range(1, length), *[-1] * (length > 0)]) for length in (3, 0, 1, 2)]
    assert same(af.InputGraph.chain([3, 0, 1, 2]), af.InputGraph.batch(chains))
    assert same(af.InputGraph.chain([]), af.InputGraph.batch([]))


@settings(max_examples=40)
@given(graph=batches(trees=True))
def test_parents_give_the_graph_back(graph: af.InputGraph) -> None:
    """But for the order of children, which is theirs."""
    for sample in graph:
        parents = [-1] * sample.n_vertices
        for vertex, children in enumerate(children_of(sample)):
            for child in children:
                parents[child] = vertex
        found = children_of(af.InputGraph.from_parents(parents))
        assert found == [sorted(children) for children in children_of(sample)]


@settings(max_examples=40)
@given(graph=batches(typed=True))
def test_slices_are_batches_of_samples(graph: af.InputGraph) -> None:
    assert same(af.InputGraph.batch(graph), graph) or not len(graph)
    for cut in (slice(1, 3), slice(None), slice(2, 2), slice(None, None, -1), slice(0, 9, 2), slice(3, 1)):
        chosen = range(len(graph))[cut]
        got = graph[cut]
        assert got.types is not None or not chosen
        assert len(got) == len(chosen)
        assert same(af.InputGraph.batch([graph[k] for k in chosen]), got) or not chosen
    if len(graph):
        assert same(graph[-1], graph[len(graph) - 1])
    for outside in (len(graph), -len(graph) - 1):
        with pytest.raises(IndexError, match=rf"a batch of {len(graph)} samples has no sample {outside}"):
            graph[outside]


@settings(max_examples=40)
@given(graph=batches())
def test_heights_are_known(graph: af.InputGraph) -> None:
    """Graphs made of arrays, batches and slices have heights."""
    for part in (graph, graph[1:3], graph[::-1], af.InputGraph.chain([3, 0, 2])):
        np.testing.assert_array_equal(part.heights, heights(part))
    assert same(replace(graph, heights=None), graph)
    assert same(af.InputGraph(graph.offsets, graph.children, graph.samples, None, graph.heights), graph)


@settings(max_examples=40)
@given(graph=samples())
def test_edges_give_the_graph_back(graph: af.InputGraph) -> None:
    edges = [(vertex, child) for vertex, children in enumerate(children_of(graph)) for child in children]
    assert same(af.InputGraph.from_edges(graph.n_vertices, edges), graph)


def test_deep_nests_do_not_recur() -> None:
    tree: Any = 0
    for leaf in range(1, 20_000):
        tree = (tree, leaf)
    graph, leaves = af.InputGraph.from_nested(tree)
    assert (graph.n_vertices, leaves[:3], leaves[-1]) == (39_999, [0, 1, 2], 19_999)
    while type(tree) is tuple:
        tree = tree[0]


def test_objects_other_than_tuples_are_leaves() -> None:
    point = Point(1, 2)
    graph, leaves = af.InputGraph.from_nested(([1, 2], point, None, "x"))
    assert (len(leaves), graph.n_vertices) == (4, 5)
    assert leaves[1] is point
    assert af.InputGraph.from_nested("alone")[1] == ["alone"]


def test_arrays_are_read_only_copies() -> None:
    offsets = np.array([0, 0])
    graph: Any = af.InputGraph(offsets, np.array([], np.int64), np.array([0, 1]))
    offsets[0] = 7
    assert graph.offsets.tolist() == [0, 0]
    with pytest.raises(ValueError, match="read-only"):
        graph.offsets[0] = 1


def test_its_repr() -> None:
    assert repr(TREE) == "InputGraph(1 samples, 5 vertices, 4 children)"
    with af.Graph():
        graph = af.InputGraph.placeholder(name="trees")
    assert "trees_offsets" in repr(graph)
    with pytest.raises(af.GraphError, match="holds a Tensor: only one of arrays can be looked at"):
        len(graph)
    with pytest.raises(af.GraphError, match="holds a Tensor: only one of arrays can be looked at"):
        replace(TREE, children=graph.children)


def test_it_pickles_and_takes_types() -> None:
    typed = replace(TREE, types=np.array([0, 0, 1, 0, 1]))
    assert same(pickle.loads(pickle.dumps(typed)), typed)
    assert not same(typed, TREE)


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "cycle": (lambda: af.InputGraph.from_parents([1, 2, 0]), af.GraphError, "vertex 0 of sample 0 is its own"),
    "own parent": (lambda: af.InputGraph.from_parents([-1, 1]), af.GraphError, "vertex 1 of sample 0 is its own"),
    "parent": (lambda: af.InputGraph.from_parents([2, -1]), af.GraphError, "vertex 0 has the parent 2; .* 0 to 1"),
    "no parent": (lambda: af.InputGraph.from_parents([-2]), af.GraphError, "vertex 0 has the parent -2"),
    "floats": (
        lambda: af.InputGraph.from_parents(np.array([0.5])),
        af.DTypeError,
        "parents of an input graph are integers; got float64",
    ),
    "table": (
        lambda: af.InputGraph.from_parents(np.array([[0]])),
        af.ShapeError,
        r"parents of an input graph have shape \[\?\]; got \[1,1\]",
    ),
    "edge": (
        lambda: af.InputGraph.from_edges(2, [(0, 1), (2, 0)]),
        af.GraphError,
        "vertex 0 has the parent 2; .* 0 to 1",
    ),
    "child": (lambda: af.InputGraph.from_edges(2, [(0, 2)]), af.GraphError, "vertex 0 of sample 0 has a child 2"),
    "child in a list": (
        lambda: af.InputGraph([0, 1], [1], [0, 1]),  # type: ignore[arg-type]
        af.GraphError,
        "vertex 0 of sample 0 has a child 1",
    ),
    "ragged edges": (
        lambda: af.InputGraph.from_edges(2, [(0, 1), (1,)]),  # type: ignore[list-item]
        af.ShapeError,
        r"edges of an input graph have shape \[\?,2\]; got \[\(0, 1\), \(1,\)\]",
    ),
    "fewer than no vertices": (
        lambda: af.InputGraph.from_edges(-1, []),
        af.GraphError,
        "n is the number of vertices, 0 or more; got -1",
    ),
    "a float of vertices": (
        lambda: af.InputGraph.from_edges(2.0, []),  # type: ignore[arg-type]
        af.GraphError,
        "n must be an int known while the graph is built, got 2.0",
    ),
    "sample by name": (
        lambda: TREE["a"],  # type: ignore[index]
        af.GraphError,
        r"graph\[sample\]: sample must be an int .* got 'a'",
    ),
    "triples": (
        lambda: af.InputGraph.from_edges(2, np.array([[0, 1, 1]])),
        af.ShapeError,
        r"edges of an input graph have shape \[\?,2\]; got \[1,3\]",
    ),
    "types": (
        lambda: af.InputGraph.from_parents([-1], [1, 2]),
        af.ShapeError,
        "type for each of its 1 vertices; got 2",
    ),
    "heights": (
        lambda: af.InputGraph(TREE.offsets, TREE.children, TREE.samples, heights=np.array([0, 0, 1, 1, 2])),
        af.GraphError,
        "vertex 3 of sample 0 is of height 0; got 1",
    ),
    "heights of other children": (
        lambda: af.InputGraph(TREE.offsets, np.array([0, 1, 0, 3]), TREE.samples, None, TREE.heights),
        af.GraphError,
        "vertex 4 of sample 0 is of height 1; got 2",
    ),
    "type": (lambda: af.InputGraph.from_parents([-1], [-1]), af.GraphError, "is of type -1; types are 0 to 65535"),
    "length": (lambda: af.InputGraph.chain([2, -1]), af.GraphError, "that of sample 1 is -1"),
    "a list": (lambda: af.InputGraph.from_nested([[1, 2], [3]]), af.GraphError, "got a list.*write tuples"),
    "lists of tuples": (lambda: af.InputGraph.from_nested(([(1,)], 3)), af.GraphError, "got a list.*write tuples"),
    "empty tuple": (lambda: af.InputGraph.from_nested((1, ())), af.GraphError, "an empty tuple"),
    "a list of trees": (lambda: af.InputGraph.from_nested([(1, 2), (3, 4)]), af.GraphError, "for several samples"),
    "undirected": (lambda: af.InputGraph.from_networkx(Directed("A", [], False)), af.GraphError, "has to be directed"),
    "no graph": (lambda: af.InputGraph.from_networkx([1, 2]), af.GraphError, r"takes a networkx.DiGraph; got \[1, 2\]"),  # type: ignore[arg-type]
    "dtype": (
        lambda: af.InputGraph(np.zeros(1), np.zeros(0, int), np.zeros(1, int)),
        af.DTypeError,
        "offsets .* float64",
    ),
    "shape": (
        lambda: af.InputGraph(np.zeros((1, 1), int), np.zeros(0, int), np.zeros(1, int)),
        af.ShapeError,
        "offsets",
    ),
    "half typed": (
        lambda: af.InputGraph.batch([TREE, replace(TREE, types=np.zeros(5, int))]),
        af.GraphError,
        "of 2 graphs of a batch 1 have types",
    ),
    "pairs": (
        lambda: af.InputGraph.batch([af.InputGraph.from_nested((1, 2))]),  # type: ignore[list-item]
        af.GraphError,
        r"graph 0 of a batch is an af.InputGraph; got \(InputGraph",
    ),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_faults_are_named(fault: str) -> None:
    make, kind, message = ERRORS[fault]
    with pytest.raises(kind, match=message) as found:
        make()
    assert f"written at {__file__}" in str(found.value)


# -- in programs -----------------------------------------------------------------------------------------------------


def _sizes(graph: af.InputGraph) -> Any:
    return graph.offsets[1:] - graph.offsets[:-1]


async def test_it_is_fed_and_fetched(session: af.Session) -> None:
    with af.Graph():
        graph = af.InputGraph.placeholder(types=True)
        sizes = _sizes(graph)
    data = replace(TREE, types=np.array([0, 0, 1, 0, 1]))
    got, back = await session.run((sizes, graph), graph.feeds(data))
    assert got.tolist() == [0, 0, 2, 0, 2]
    assert same(back, data)


async def test_it_is_an_argument(session: af.Session) -> None:
    traces: list[af.InputGraph] = []

    @af.function
    def sizes(graph: af.InputGraph) -> Any:
        traces.append(graph)
        return _sizes(graph)

    assert (await sizes(TREE)).tolist() == [0, 0, 2, 0, 2]
    assert (await sizes(af.InputGraph.chain([3]))).tolist() == [0, 1, 1]
    assert len(traces) == 1
    assert sizes.trace(af.InputGraph.spec()).outputs is not None
    assert len(traces) == 1, "a trace for specs is the one for data"
    await sizes(replace(TREE, types=np.zeros(5, int)))
    assert len(traces) == 2


async def test_branches_and_loops_carry_it(session: af.Session) -> None:
    with af.Graph():
        graph, n = af.InputGraph.placeholder(), af.placeholder("int64", ())
        chosen = af.cond(n > 1, lambda: graph, lambda: af.InputGraph.chain([2]))
        _, last = af.while_loop(lambda i, _: i < n, lambda i, kept: (i + 1, kept), (0, chosen))
    for count, wanted in ((1, af.InputGraph.chain([2])), (3, TREE)):
        assert same(await session.run(last, {**graph.feeds(TREE), n: count}), wanted)


def test_feeds_that_do_not_fit() -> None:
    typed = replace(TREE, types=np.zeros(5, int))
    with af.Graph():
        plain, with_types = af.InputGraph.placeholder(), af.InputGraph.placeholder(types=True)
    with pytest.raises(af.GraphError, match="the data of a graph have types, and the placeholders have none"):
        plain.feeds(typed)
    with pytest.raises(af.GraphError, match="the placeholders of a graph have types, and the data have none"):
        with_types.feeds(TREE)
    with pytest.raises(af.GraphError, match=r"data is an af.InputGraph of arrays; got \[0, 1\]"):
        plain.feeds([0, 1])  # type: ignore[arg-type]
