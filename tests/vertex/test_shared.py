"""`SharedSets`: what the node of a shared vertex map is given and gives, and the programs that it consists of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.vertex.schedule import SCHEDULE
from asyncflow.vertex.shared import SHARED_SETS, InputCounts, SharedSets
from tests.vertex.evaluation import H, W, slotted, slotted_alone

PART = af.spec("float64", (H,))


@af.vertex_function(state=PART, children=2)
def roots_alone(v: af.Vertex) -> None:
    v.scatter(af.tanh(v.pull() @ W) + v.gather(0) + v.gather(1))


@af.vertex_function(state=PART)
def any_number(v: af.Vertex) -> None:
    v.scatter(af.where(v.is_leaf, 1.0, 2.0) + af.sum(v.pull()) + v.gather_all())


@af.vertex_function(state=PART, children=1)
def noisy(v: af.Vertex) -> None:
    drawn = af.random.uniform((H,), dtype="float64")
    v.scatter(af.where(drawn < 0.5, af.sum(v.pull()), 0.0) + v.gather(0))
    v.push(v.pull("y") * 2, "twice")


def built(function: af.VertexFunction, **options: Any) -> tuple[SharedSets, af.Graph, Any]:
    """The code of a shared map of two pulls, its graph and results, and the placeholders that are fed."""
    with af.Graph(seed=3) as graph:
        structure, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2), name="x")
        y = af.placeholder("float64", (None,), name="y")
        found = af.vertex_map(function, structure, {"x": x, "y": y}, share=True, **options)
    (node,) = (node for node in graph.nodes if node.op is SHARED_SETS)
    return node.attrs["shared"], graph, (structure, x, y, found)


def test_states_of_roots_are_all_that_is_given_where_nothing_comes_after() -> None:
    shared, *_ = built(roots_alone)
    assert shared.counts == InputCounts(graph=4, states=1, own=1, common=0)
    assert (shared.pulls, shared.gives_rows) == (["x"], False)
    assert shared.node_specs() == (af.spec("float64", (None, H)),)
    assert shared.has_rows == (True,) * 6
    assert shared.programs() == (shared.order, shared.program)
    assert [node.op for node in shared.order.graph.nodes].count(SCHEDULE) == 1


def test_rows_of_all_vertices_are_given_to_later_nodes() -> None:
    shared, *_ = built(slotted)
    rows = [af.spec("float64", (None, *(each.shape or ())[1:])) for each in shared.specs]
    assert shared.gives_rows
    assert shared.node_specs() == (*rows[: shared.counts.states], *rows)


def test_what_vertices_have_of_their_own() -> None:
    """Each vertex knows if it is a leaf; with any number of children there are starts as well."""
    shared, *_ = built(any_number)
    assert sorted(shared.pulls, key=str) == [None, "x"]
    assert len(shared.order.fetches) == 6
    assert len(built(roots_alone)[0].order.fetches) == 5


def test_variables_and_fed_values_are_common_or_own() -> None:
    """Values that depend on constants and variables alone are the same for all members of a call."""
    with af.Graph() as graph:
        w, scale = af.Variable(np.eye(H), name="w"), af.placeholder("float64", ())

        @af.vertex_function(state=PART, children=1)
        def scaled(v: af.Vertex) -> None:
            v.scatter((v.gather(0) + scale) @ (w * 2) + af.sum(v.pull()))

        structure, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
        af.vertex_map(scaled, structure, x, share=True)
    (node,) = (node for node in graph.nodes if node.op is SHARED_SETS)
    shared = node.attrs["shared"]
    assert shared.counts.own == 2
    assert set(shared.pulls) == {"x", None}
    assert shared.has_rows == (*(True,) * 7, *(False,) * shared.counts.common)


@pytest.mark.parametrize("n_vertices", [1, 3])
async def test_rows_of_what_only_comes_after_are_looked_at_too(n_vertices: int) -> None:
    """A pull that no set reads has a row for each vertex, or the run fails; one row is not spread to all."""
    shared, graph, (structure, x, y, found) = built(noisy)
    assert shared.gives_rows
    chain = af.InputGraph.chain([2])
    async with af.Session(graph, debug=True) as session:
        feeds = {**structure.feeds(chain), x: np.ones((2, 2)), y: np.arange(2.0)}
        assert (await session.run(found.pushes["twice"], feeds)).tolist() == [0.0, 2.0]
        with pytest.raises(af.KernelError, match=r"pulls\['y'\] has a row for each vertex: the graph has 2 vertices"):
            await session.run(found.pushes["twice"], {**feeds, y: np.arange(float(n_vertices))})


async def test_types_are_checked_and_otherwise_of_no_account() -> None:
    """One function is for type 0 alone."""
    with af.Graph() as graph:
        structure, x = af.InputGraph.placeholder(types=True), af.placeholder("float64", (None, 2))
        roots = af.vertex_map(slotted, structure, x, initial=0.0, share=True).roots
    chain = af.InputGraph.chain([3])
    right = replace(chain, types=np.zeros(3, np.int64))
    feeds = {**structure.feeds(right), x: np.ones((3, 2))}
    async with af.Session(graph, debug=True) as session:
        found = await session.run(roots, feeds)
        np.testing.assert_allclose(found, slotted_alone(chain, np.ones((3, 2)))[1])
        with pytest.raises(af.KernelError, match="vertex 1 of sample 0 is of type 1; types are 0 to 0"):
            await session.run(roots, {**feeds, structure.types: np.array([0, 1, 0])})


def test_the_policy_is_looked_at() -> None:
    with pytest.raises(af.GraphError, match=r"policies are 'breadth_first'.*; got 'by_number'"):
        built(slotted, policy="by_number")


def test_a_policy_without_effect_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r": policy='depth' has no effect; leave it out, or pass share=False"):
        built(slotted, policy="depth")
