from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.errors import KernelError
from asyncflow.vertex.schedule import POLICIES, SCHEDULE, VertexSchedule, schedules
from asyncflow.vertex.structure.equal_chains import are_equal_chains
from tests.vertex.graphs import batches, children_of, heights, ordered, sets

every_policy = pytest.mark.parametrize("policy", list(POLICIES))


def schedule(graph: af.InputGraph, policy: str = "breadth_first", **options: Any) -> VertexSchedule:
    (found,) = schedules(graph, policy, **options)
    return found


def check(graph: Any, policy: str) -> None:
    """A schedule against a plain reading of it: the order, the sets, and what each vertex finds."""
    found, table = ordered(graph, policy), ordered(graph, policy, 40)
    fewest = max(map(len, children_of(graph)), default=0)
    slots = ordered(graph, policy, fewest)
    assert (slots.child_ranks == table.child_ranks[:, :fewest]).all()
    for one, other in ((found, None), (slots, fewest)):
        for a, b in zip(one, ordered(graph, policy, other, without="heights"), strict=True):
            assert (a is None) == (b is None)
            np.testing.assert_array_equal(a, b)
    order = found.order.tolist()
    assert sorted(order) == list(range(graph.n_vertices))
    assert [order[position] for position in found.positions] == list(range(graph.n_vertices))
    groups = sets(found)
    assert list(chain.from_iterable(groups)) == order
    assert all(group == sorted(group) and group for group in groups)
    number = {vertex: k for k, group in enumerate(groups) for vertex in group}
    children = children_of(graph)
    assert all(number[child] < number[vertex] for vertex in order for child in children[vertex])
    rank = {vertex: position + 1 for position, vertex in enumerate(order)}
    wanted = [[rank[child] for child in children[vertex]] for vertex in order]
    assert [[int(x) for x in row if x] for row in table.child_ranks] == wanted
    assert all(row[: len(want)].all() for row, want in zip(table.child_ranks, wanted, strict=True))
    starts = found.child_starts.tolist()
    assert [found.child_ranks[a:b].tolist() for a, b in pairwise(starts)] == wanted
    assert found.child_positions.tolist() == [k for k, row in enumerate(wanted) for _ in row]
    assert found.root_ranks.tolist() == [rank[root] for root in graph.roots]
    if graph.types is not None:
        assert [set(graph.types[group].tolist()) for group in groups] == [{kind} for kind in found.set_types]


@every_policy
@settings(max_examples=25)
@given(graph=batches())
def test_any_graphs(policy: str, graph: af.InputGraph) -> None:
    check(graph, policy)


@every_policy
@settings(max_examples=25)
@given(graph=batches(trees=True))
def test_any_trees(policy: str, graph: af.InputGraph) -> None:
    check(graph, policy)


@every_policy
@settings(max_examples=25)
@given(graph=batches(typed=True))
def test_any_types(policy: str, graph: af.InputGraph) -> None:
    check(graph, policy)


@settings(max_examples=25)
@given(graph=batches())
def test_sets_are_activated_sets(graph: af.InputGraph) -> None:
    levels = heights(graph)
    wanted = [[v for v, level in enumerate(levels) if level == k] for k in range(max(levels, default=-1) + 1)]
    assert sets(ordered(graph)) == wanted
    assert sets(ordered(graph, "agenda")) == wanted


def test_depth_counts_from_the_top() -> None:
    graph = af.InputGraph.from_parents([-1, 0, 0, 1, 1, -1, 5])
    assert sets(ordered(graph)) == [[2, 3, 4, 6], [1, 5], [0]]
    assert sets(ordered(graph, "depth")) == [[3, 4], [1, 2, 6], [0, 5]]


def test_agenda_waits_for_more_of_a_kind() -> None:
    """Two sentences of words (0), one with a phrase (1) more than the other, and a sentence (2) each: one set of
    sentences.
    """
    graph = af.InputGraph.batch(
        [
            af.InputGraph.from_parents([1, 2, -1], [0, 1, 2]),
            af.InputGraph.from_parents([1, 2, 3, -1], [0, 1, 1, 2]),
        ]
    )
    assert sets(ordered(graph, "agenda")) == [[0, 3], [1, 4], [5], [2, 6]]
    found = ordered(graph, "breadth_first")
    assert sets(found) == [[0, 3], [1, 4], [5], [2], [6]]
    assert found.set_types.tolist() == [0, 1, 1, 2, 2]


@every_policy
@pytest.mark.parametrize(
    "graph",
    [
        af.InputGraph.batch([]),
        af.InputGraph.batch([af.InputGraph.from_parents([])] * 3),
        af.InputGraph.from_parents([-1]),
        af.InputGraph.from_parents([-1] * 5),
        af.InputGraph.from_parents([30] * 30 + [-1]),
        af.InputGraph.chain([4, 4, 4]),
        af.InputGraph.chain([3]),
        af.InputGraph.chain([1, 1, 1]),
        af.InputGraph.chain([4, 4, 3]),
        af.InputGraph.from_edges(2, [(0, 1), (0, 1)]),
        af.InputGraph.from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 4)]),
    ],
    ids=[
        "no samples",
        "empty samples",
        "a vertex",
        "roots alone",
        "a star",
        "chains",
        "a chain",
        "vertices",
        "other chains",
        "a child twice",
        "shared children",
    ],
)
def test_corners(policy: str, graph: af.InputGraph) -> None:
    check(graph, policy)


@every_policy
def test_a_deep_chain(policy: str) -> None:
    found = ordered(af.InputGraph.chain([100_000, 3]), policy, 1)
    assert len(found.set_starts) == 100_001
    assert (np.diff(found.set_starts) >= 1).all()
    assert found.root_ranks.tolist() == ([100_002, 100_003] if policy == "depth" else [100_003, 6])


@every_policy
def test_a_deep_chain_with_a_second_way(policy: str) -> None:
    """Each vertex also has its grandchild as a child, so that it is no tree, and has types."""
    n = 2_000
    edges = [(v, v - step) for v in range(n) for step in (1, 2) if v >= step]
    graph = af.InputGraph.from_edges(n, edges, np.arange(n) % 2)
    assert ordered(graph, policy).order.tolist() == list(range(n))


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_near_chains_are_no_chains(lengths: list[int], data: st.DataObject) -> None:
    """Chains of one length are recognized by their arrays, of which no number may differ."""
    graph = af.InputGraph.chain(lengths)
    arrays = [np.array(x) for x in (graph.offsets, graph.children, graph.samples)]
    assert are_equal_chains(*arrays) == (len(set(lengths)) == 1 and lengths[0] > 0)
    changed = data.draw(st.sampled_from([x for x in arrays if x.size]))
    changed[data.draw(st.integers(0, len(changed) - 1))] += data.draw(st.sampled_from([-5, -1, 1, 2]))
    assert not are_equal_chains(*arrays)


@every_policy
@settings(max_examples=25)
@given(count=st.integers(1, 4), length=st.integers(1, 5))
def test_equal_chains_are_ordered_as_any_graph(policy: str, count: int, length: int) -> None:
    graph = af.InputGraph.chain([length] * count)
    check(graph, policy)
    typed = replace(graph, types=np.zeros(graph.n_vertices, np.int64))
    for arity in (None, 1, 3):
        alike = ordered(typed, policy, arity)._replace(set_types=None)  # which are ordered as any graph is
        for one, other in zip(ordered(graph, policy, arity), alike, strict=True):
            np.testing.assert_array_equal(one, other)


def test_types_far_apart() -> None:
    graph = af.InputGraph.from_parents([1, 2, -1], [65535, 0, 65535])
    found = ordered(graph)
    assert (sets(found), found.set_types.tolist()) == ([[0], [1], [2]], [65535, 0, 65535])


class Malformed:
    """Arrays without a check."""

    def __init__(
        self,
        offsets: list[int],
        children: list[int],
        samples: list[int],
        types: list[int] | None = None,
        heights: list[int] | None = None,
    ) -> None:
        self.offsets, self.children, self.samples = (np.array(x, np.int64) for x in (offsets, children, samples))
        self.types = None if types is None else np.array(types)
        self.heights = None if heights is None else np.array(heights, np.int64)


MALFORMED: dict[str, tuple[Malformed, str]] = {
    "cycle": (Malformed([0, 1, 2, 3], [1, 2, 0], [0, 3]), "vertex 0 of sample 0 is its own descendant"),
    "cycle below a root": (Malformed([0, 1, 2, 3], [1, 2, 1], [0, 3]), "vertex [12] of sample 0 is its own descendant"),
    "cycle above": (Malformed([0, 0, 1, 3], [2, 1, 0], [0, 3]), "vertex [12] of sample 0 is its own descendant"),
    "itself": (Malformed([0, 0, 1], [1], [0, 1, 2]), r"vertex 0 of sample 1 \(1 in the batch\) is its own descendant"),
    "dangling": (Malformed([0, 0, 1], [2], [0, 2]), "vertex 1 of sample 0 has a child 2.*vertices, 0 to 1"),
    "negative": (Malformed([0, 0, 1], [-1], [0, 2]), "vertex 1 of sample 0 has a child -1"),
    "another sample": (Malformed([0, 0, 0, 1], [0], [0, 1, 3]), r"vertex 1 of sample 1 \(2 in .*child 0.*1 to 2"),
    "arity": (Malformed([0, 0, 0, 0, 3], [0, 1, 2], [0, 4]), "vertex 3 of sample 0 has 3 children; at most 2 are"),
    "type": (Malformed([0, 0, 0], [], [0, 1, 2], [1, 3]), r"vertex 0 of sample 1 .* is of type 3; types are 0 to 2"),
    "negative type": (Malformed([0, 0], [], [0, 1], [-1]), "vertex 0 of sample 0 is of type -1; types are 0 to 2"),
    "falling": (Malformed([0, 2, 1, 3], [1, 1, 1], [0, 3]), "vertex 1 of sample 0 has -1 children: offsets"),
    "falling samples": (Malformed([0, 0, 0], [], [0, 3, 2]), "sample 1 has -1 vertices: samples"),
    "starts": (
        Malformed([1, 1], [], [0, 1]),
        "offsets of an input graph go from 0 to the number of children, 0; got 1",
    ),
    "ends": (Malformed([0, 0], [0], [0, 1]), "offsets .* to the number of children, 1; got 0 to 0"),
    "sample ends": (Malformed([0, 0], [], [0, 2]), "samples .* to the number of vertices, 1; got 0 to 2"),
    "no offsets": (Malformed([], [], []), "offsets .* one entry more than there are vertices, from 0 on; got none"),
    "types missing": (Malformed([0, 0], [], [0, 1], [0, 0]), "a type for each of its 1 vertices; got 2"),
}


@every_policy
@pytest.mark.parametrize("fault", MALFORMED)
def test_faults_are_named(policy: str, fault: str) -> None:
    graph, message = MALFORMED[fault]
    with pytest.raises(af.GraphError, match=message):
        ordered(graph, policy, 2, 3)


async def test_feeds_are_checked(session: af.Session) -> None:
    fed, message = MALFORMED["itself"]
    with af.Graph():
        graph = af.InputGraph.placeholder(heights=False)
        found = schedule(graph, arity=2)
    keys = (graph.offsets, graph.children, graph.samples)
    feeds = dict(zip(keys, (fed.offsets, fed.children, fed.samples), strict=True))
    with pytest.raises(KernelError, match=message):
        await session.run(found.order, feeds)


def tree(*heights: int) -> Malformed:
    """((0, 1), 3), with heights without a check."""
    return Malformed([0, 0, 0, 2, 2, 4], [0, 1, 2, 3], [0, 5], heights=list(heights))


WRONG_HEIGHTS: dict[str, tuple[Malformed, str]] = {
    "all alike": (tree(0, 0, 0, 0, 0), "vertex 2 of sample 0 is of height 0, and has a child of height 0"),
    "of one set": (tree(0, 0, 1, 0, 1), "vertex 4 of sample 0 is of height 1, and has a child of height 1"),
    "lower": (tree(1, 1, 0, 1, 2), "vertex 2 of sample 0 is of height 0, and has a child of height 1"),
    "a leaf above": (tree(0, 0, 1, 3, 2), "vertex 4 of sample 0 is of height 2, and has a child of height 3"),
    "negative": (tree(0, -1, 1, 0, 2), "vertex 1 of sample 0 is of height -1; heights are 0 to 4"),
    "too high": (tree(0, 0, 1, 0, 5), "vertex 4 of sample 0 is of height 5; heights are 0 to 4"),
    "missing": (tree(0, 0, 1, 0), "a height for each of its 5 vertices; got 4"),
    "upside down": (
        Malformed([0, 2, 2], [1, 1], [0, 2], heights=[0, 1]),
        "vertex 0 of sample 0 is of height 0, and has a child of height 1",
    ),
    "of a cycle": (
        Malformed([0, 1, 2, 3], [1, 2, 0], [0, 3], heights=[0, 1, 2]),
        "vertex 0 of sample 0 is of height 0, and has a child of height 1",
    ),
    "of a second sample": (
        Malformed([0, 0, 0, 1], [1], [0, 1, 3], heights=[0, 1, 1]),
        r"vertex 1 of sample 1 \(2 in the batch\) is of height 1, and has a child of height 1",
    ),
}


@pytest.mark.parametrize("arity", [None, 2, 3])
@pytest.mark.parametrize("fault", WRONG_HEIGHTS)
def test_heights_are_checked(fault: str, arity: int | None) -> None:
    """Whatever numbers are fed, a vertex is never computed before its children."""
    graph, message = WRONG_HEIGHTS[fault]
    with pytest.raises(af.GraphError, match=message):
        ordered(graph, arity=arity)


@settings(max_examples=40)
@given(graph=batches(), data=st.data())
def test_any_heights_that_rise_will_do(graph: Any, data: st.DataObject) -> None:
    """Lower vertices are computed first, and it is an error if a child is not lower."""
    assume(not are_equal_chains(graph.offsets, graph.children, graph.samples))  # whose heights nobody looks at
    drawn = st.integers(0, max(graph.n_vertices - 1, 0))
    heights = data.draw(st.lists(drawn, min_size=graph.n_vertices, max_size=graph.n_vertices))
    fed = replace(graph, heights=None)
    object.__setattr__(fed, "heights", np.array(heights, np.int64))
    children = children_of(graph)
    arity = data.draw(st.sampled_from([None, max(map(len, children), default=0), 40]))
    if all(heights[child] < heights[vertex] for vertex, below in enumerate(children) for child in below):
        wanted = [[v for v, at in enumerate(heights) if at == height] for height in sorted(set(heights))]
        assert sets(ordered(fed, arity=arity)) == wanted
    else:
        with pytest.raises(af.GraphError, match="each must be above its children's"):
            ordered(fed, arity=arity)


@every_policy
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("arity", [None, 2])
async def test_in_a_program(session: af.Session, policy: str, typed: bool, arity: int | None) -> None:
    types = np.array([0, 1, 0, 1, 1]) if typed else None
    data = af.InputGraph.from_edges(5, [(4, 3), (4, 2), (3, 0), (3, 1)], types)
    with af.Graph():
        graph = af.InputGraph.placeholder(types=typed)
        found = schedule(graph, policy, arity=arity, n_types=2)
        x = af.placeholder("float32", (None, 2))
        rows = af.take(x, found.order, axis=0)
    got, ordered_rows = await session.run(
        (found, rows), {**graph.feeds(data), x: np.arange(10.0, dtype="f4").reshape(5, 2)}
    )
    wanted = ordered(data, policy, arity, 2)
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
        assert (a is None) == (b is None), name
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert (ordered_rows[:, 0] == 2 * wanted.order).all()


async def test_in_a_loop(session: af.Session) -> None:
    """The graph is carried, and ordered in each iteration."""
    data = af.InputGraph.from_parents([1, 2, -1])
    with af.Graph():
        graph = af.InputGraph.placeholder()

        def body(i: Any, graph: af.InputGraph, total: Any) -> Any:
            found = schedule(graph, arity=1)
            return i + 1, graph, total + af.sum(found.order * (found.positions + 1)) * i

        _, carried, total = af.while_loop(lambda i, *_: i < 3, body, (0, graph, 0))
    got, carried = await session.run((total, carried), graph.feeds(data))
    assert got == (0 * 1 + 1 * 2 + 2 * 3) * (0 + 1 + 2)
    assert carried.children.tolist() == [0, 1]


def test_specs_follow_the_graph() -> None:
    with af.Graph():
        graph = af.InputGraph.placeholder()
        table, flat = schedule(graph, arity=3), schedule(graph, arity=None)
        assert (str(table.child_ranks.spec), table.child_starts, table.set_types) == ("int64[?,3]", None, None)
        assert [str(x.spec) for x in flat if x is not None] == ["int64[?]"] * 7
        fixed = schedule(af.InputGraph.chain([4]), arity=1)
        assert (str(fixed.order.spec), str(fixed.child_ranks.spec)) == ("int64[4]", "int64[4,1]")


def test_no_gradient_comes_back() -> None:
    with af.Graph():
        x = af.placeholder("float64", (3,))
        found = schedule(af.InputGraph.chain([3]), arity=1)
        y = af.sum(af.take(x, found.order) * af.astype(found.child_ranks[:, 0], "float64"))
        assert af.gradients(y, x).shape == (3,)


def test_wrong_requests() -> None:
    with af.Graph():
        graph = af.InputGraph.placeholder()
        with pytest.raises(af.GraphError, match="policies are 'breadth_first', 'depth', 'agenda'; got 'bfs'"):
            schedule(graph, "bfs", arity=1)
        floats = af.placeholder("float32", (None,))
        with pytest.raises(af.DTypeError, match="schedule: the arrays of an input graph are integers; got float32"):
            schedule(af.InputGraph(floats, floats, floats), arity=1)
        table = af.placeholder("int64", (None, 2))
        with pytest.raises(af.ShapeError, match="schedule: the arrays of an input graph are vectors; got int64"):
            schedule(af.InputGraph(table, table, table), arity=1)


@pytest.mark.usefixtures("no_collector")  # whose callbacks are calls, too
def test_no_python_runs_for_a_vertex() -> None:
    """Trees of the same depth and of any size are ordered by as many calls."""

    def calls(graph: af.InputGraph) -> int:
        count = 0

        def seen(*_: Any) -> None:
            nonlocal count
            count += 1

        sys.setprofile(seen)
        try:
            ordered(graph, "breadth_first", 2)
        finally:
            sys.setprofile(None)
        return count

    tree = af.InputGraph.from_nested((((1, 2), (3, 4)), ((5, 6), (7, 8))))[0]
    assert calls(af.InputGraph.batch([tree] * 100)) == calls(af.InputGraph.batch([tree] * 2))
    assert SCHEDULE.runs_on_host
    assert SCHEDULE.is_pure


@pytest.mark.parametrize(("policy", "arity"), [("breadth_first", 3), ("depth", None)])
async def test_a_loop_over_sets_finds_the_rows_of_children(session: af.Session, policy: str, arity: int | None) -> None:
    """Each vertex adds its own row to twice its children's rows; a missing child has 0."""
    edges = [(4, 3), (4, 2), (3, 0), (3, 1), (2, 1), (2, 0), (2, 5)]
    data = af.InputGraph.batch([af.InputGraph.from_edges(6, edges), af.InputGraph.chain([3])[0]])
    own = np.arange(1.0, 10.0).reshape(9, 1)
    with af.Graph():
        graph, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 1))
        found = schedule(graph, policy, arity=arity)

        def body(k: Any, store: af.RowStore) -> Any:
            first, end = found.set_starts[k], found.set_starts[k + 1]
            rows = af.take(x, found.order[first:end], axis=0)
            if found.child_starts is None or found.child_positions is None:
                below = af.sum(store.take(found.child_ranks[first:end]), axis=1)
            else:
                edges = slice(found.child_starts[first], found.child_starts[end])
                taken = store.take(found.child_ranks[edges])
                below = af.segment_sum(taken, found.child_positions[edges] - first, end - first)
            return k + 1, store.append(rows + 2.0 * below)

        store = af.RowStore("float64", (1,)).append(np.zeros((1, 1)))
        _, store = af.while_loop(lambda k, _: k < af.size(found.set_starts) - 1, body, (0, store))
        everything, roots = af.take(store.stack(), found.positions + 1, axis=0), store.take(found.root_ranks)
        (grad,) = af.gradients(af.sum(roots), [x])
    states = [[0.0] for _ in range(9)]
    for vertex in ordered(data).order:
        states[vertex] = own[vertex] + 2 * sum((states[child] for child in children_of(data)[vertex]), np.zeros(1))
    got, got_roots, got_grad = await session.run((everything, roots, grad), {**graph.feeds(data), x: own})
    np.testing.assert_array_equal(got, states)
    np.testing.assert_array_equal(got_roots, [states[root] for root in data.roots])
    np.testing.assert_array_equal(got_grad[:, 0], [8.0, 8.0, 2.0, 2.0, 1.0, 4.0, 4.0, 2.0, 1.0])
