"""Children that are added up after a product each are taken, and multiplied, side by side; zeros are left out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.regions.regions import REGION
from asyncflow.ops.derivatives.shapes import SUM_TO
from tests.conftest import OpenSession
from tests.vertex.evaluation import forest, in_order
from tests.vertex.graphs import children_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

own_sessions = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])

FORWARD, BACKWARD = "vertex_map/sets", "gradients/vertex_map/sets/while"
H = 3
RNG = np.random.default_rng(0)
U, V = RNG.normal(size=(H, H)), RNG.normal(size=(H, H))
BATCH = forest(np.random.default_rng(3), [5, 1, 6, 2])
X = RNG.normal(size=(BATCH.n_vertices, H))


def tree(u: Any, v: Any) -> Any:
    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def cell(vertex: Any) -> None:
        vertex.scatter(af.tanh(vertex.gather(0) @ u + vertex.pull() + vertex.gather(1) @ v))

    return cell


def alone(initial: float) -> Any:
    states: dict[int, Any] = {}
    for vertex in in_order(BATCH):
        below = [states[child] for child in children_of(BATCH)[vertex]]
        left, right = [*below, *[np.full(H, initial)] * 2][:2]
        states[vertex] = np.tanh(X[vertex] + left @ U + right @ V)
    return states


def counted(session: af.Session, fetches: Any, feeds: Any = (), *, inside: str | None = None) -> Counter[str]:
    """Return the ops of a plan by name: the ops in loops of this name, or outside of all loops."""
    nodes = [
        each
        for node in session.plan(fetches, feeds).graph.nodes
        for each in (node.attrs["region"].nodes if node.op is REGION else [node])
    ]
    if inside is not None:
        nodes = [
            node for loop in nodes if loop.name.endswith(inside) for body in loop.subgraphs for node in body.walk()
        ]
    return Counter(node.op.name for node in nodes)


@pytest.mark.parametrize("initial", [0.0, 0.5])
async def test_joined_products_give_what_vertices_give_one_by_one(graph: af.Graph, run: Run, initial: float) -> None:
    """Within rounding, where some children are missing too."""
    found = af.vertex_map(tree(af.constant(U), af.constant(V)), BATCH, X, initial=initial)
    roots = await run(found.roots)
    states = alone(initial)
    parents = {child for below in children_of(BATCH) for child in below}
    expected = [states[vertex] for vertex in range(BATCH.n_vertices) if vertex not in parents]
    np.testing.assert_allclose(roots, expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("initial", [0.0, 0.5])
async def test_gradients_equal_the_separate_products(graph: af.Graph, run: Run, initial: float) -> None:
    """To the second order; `lift_parts=False` joins none."""
    u, v, x = af.placeholder("float64", (H, H)), af.placeholder("float64", (H, H)), af.placeholder("float64", X.shape)
    fetches = []
    for lift_parts in (True, False):
        roots = af.vertex_map(tree(u, v), BATCH, x, initial=initial, lift_parts=lift_parts).roots
        once = af.gradients(af.sum(roots**2), [u, v, x])
        twice = af.gradients(af.sum(af.sin(once[0])) + af.sum(once[2] ** 2), [u, v, x])
        fetches.append([*once, *twice])
    joined, apart = await run(fetches, {u: U, v: V, x: X})
    for mine, theirs in zip(joined, apart, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


@own_sessions
async def test_a_set_takes_and_multiplies_once_and_so_does_its_gradient(graph: af.Graph) -> None:
    u, v = af.Variable(U), af.Variable(V)
    roots = af.vertex_map(tree(u, v), BATCH, X).roots
    grads = af.gradients(af.sum(roots), [u, v])
    async with af.Session(graph) as session:
        forward = counted(session, roots, inside=FORWARD)
        assert (forward["row_store_take"], forward["matmul"]) == (1, 1)
        backward = counted(session, grads, inside=BACKWARD)
        assert (backward["matmul"], backward["add_products"], backward["add_row_gradients"]) == (1, 1, 1)


@own_sessions
async def test_all_children_are_taken_once_for_all_that_read_them(graph: af.Graph) -> None:
    """A part of a state: one take, and one addition to its gradient."""
    u, v, part = af.Variable(U), af.Variable(V), af.spec("float64", (H,))

    @af.vertex_function(state=(part, part))
    def cell(vertex: Any) -> None:
        own = vertex.pull()
        h = vertex.gather_all(lambda child: child[0]) @ u
        kept = vertex.gather_all(lambda child: af.sigmoid(own + child[0] @ v) * child[1])
        vertex.scatter((af.tanh(own + h + kept), kept + own))

    roots: Any = af.vertex_map(cell, BATCH, X).roots
    grads = af.gradients(af.sum(roots[0] * roots[1]), [u, v])
    async with af.Session(graph) as session:
        assert counted(session, roots, inside=FORWARD)["row_store_take"] == 2
        assert counted(session, grads, inside=BACKWARD)["add_row_gradients"] == 2
        assert "scatter_to" not in counted(session, grads, inside=BACKWARD)


@own_sessions
async def test_gradients_of_sets_compare_and_keep_no_shapes(graph: af.Graph) -> None:
    """All values of a set have as many rows, whatever a run finds that number to be."""
    u, v = af.Variable(U), af.Variable(V)
    roots = af.vertex_map(tree(u, v), BATCH, X, initial=0.5, lift_parts=False).roots
    grads = af.gradients(af.sum(roots), [u, v])
    async with af.Session(graph) as session:
        assert counted(session, grads, inside=BACKWARD)["matmul"] == 2
        assert SUM_TO.name not in counted(session, grads, inside=BACKWARD)
        assert "shape" not in counted(session, grads, inside=FORWARD)


@own_sessions
@pytest.mark.parametrize("reader", ["push", "twice", "alone", "pulled"])
async def test_products_read_elsewhere_stay_separate(graph: af.Graph, reader: str) -> None:
    weights = af.constant(np.broadcast_to(V, (BATCH.n_vertices, H, H)).copy())

    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def cell(vertex: Any) -> None:
        left = vertex.gather(0) @ U
        right = vertex.gather(1) @ (vertex.pull("v") if reader == "pulled" else V)
        total = left + right if reader != "alone" else left * right
        if reader == "push":
            vertex.push(left)
        vertex.scatter(af.tanh(vertex.pull() + total + (left if reader == "twice" else 0.0)))

    found = [af.vertex_map(cell, BATCH, {"x": X, "v": weights}, initial=0.5, lift_parts=each) for each in (True, False)]
    async with af.Session(graph) as session:
        assert counted(session, found[0].roots, inside=FORWARD)["matmul"] == 2
        mine, theirs = await session.run([(each.roots, each.pushes) for each in found])
    np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-12)
    assert mine[1].keys() == theirs[1].keys()


@pytest.mark.slow
async def test_three_children_of_which_two_are_added_up(graph: af.Graph, run: Run) -> None:
    """Two parts of a state, each of which has its own joined product; a third child stays by itself."""
    spec = af.spec("float64", (H,))

    @af.vertex_function(state={"h": spec, "c": spec}, children=3)
    def cell(v: Any) -> None:
        first, second, third = v.gather(0), v.gather(1), v.gather(2)
        h = v.pull() + third["h"] @ U + first["h"] @ V - second["c"] @ U
        c = (third["c"] @ V + first["c"] @ U) + second["c"] @ V
        v.scatter({"h": af.tanh(h), "c": af.tanh(c)})

    edges = af.InputGraph.from_edges(5, [(0, 1), (0, 2), (0, 3), (3, 4)])
    fetches = []
    x = af.placeholder("float64", (5, H))
    for lift_parts in (True, False):
        roots: Any = af.vertex_map(cell, edges, x, initial={"h": 0, "c": 0.25}, lift_parts=lift_parts).roots
        fetches.append([roots["h"], roots["c"], af.gradients(af.sum(roots["h"] * roots["c"]), x)])
    mine, theirs = await run(fetches, {x: X[:5]})
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


# -- zeros -----------------------------------------------------------------------------------------------------------


@own_sessions
@pytest.mark.parametrize("lift_parts", [True, False])
async def test_leaves_multiply_nothing_by_an_initial_of_0(graph: af.Graph, lift_parts: bool) -> None:
    """Forward and backward: nothing outside of the loop does, whatever the weights are."""
    u, v, x = af.Variable(U), af.Variable(V), af.placeholder("float64", X.shape)
    weights = [u, v]
    roots = af.vertex_map(tree(u, v), BATCH, x, lift_parts=lift_parts).roots
    fetches = [roots, *af.gradients(af.sum(roots), weights)]
    leaf = af.vertex_map(tree(af.constant(np.full((H, H), np.inf)), v), af.InputGraph.chain([1]), X[:1]).roots
    async with af.Session(graph) as session:
        assert "matmul" not in counted(session, fetches, [x])
        np.testing.assert_array_equal(await session.run(leaf), np.tanh(X[:1]))


@pytest.mark.parametrize("fed", [0.0, 0.5])
async def test_an_initial_that_is_fed_is_multiplied(graph: af.Graph, run: Run, fed: float) -> None:
    initial = af.placeholder("float64", (H,))
    found = af.vertex_map(tree(af.constant(U), af.constant(V)), af.InputGraph.chain([1]), X[:1], initial=initial).roots
    (state,) = await run(found, {initial: np.full(H, fed)})
    np.testing.assert_allclose(state, np.tanh(X[0] + np.full(H, fed) @ (U + V)), rtol=1e-12)


@own_sessions
async def test_zeros_go_through_all_ops_that_keep_them(graph: af.Graph) -> None:
    """A binary Tree-LSTM's leaves: gates of children, their cells and sums leave nothing behind."""
    part = af.spec("float64", (H,))

    @af.vertex_function(state=(part, part), children=2)
    def cell(vertex: Any) -> None:
        (h0, c0), (h1, c1) = vertex.gather(0), vertex.gather(1)
        x = vertex.pull()
        kept = af.sigmoid(x) * c0 + c1 * af.sigmoid(x + h1 @ U)
        both = af.concat([-h0, af.tanh(h1[::-1])]) @ np.concatenate([U, V])
        c = kept - af.relu(h0) + af.sum(c1) + af.tanh(x + both)
        vertex.scatter((af.tanh(c), c))

    h, c = af.vertex_map(cell, BATCH, X).roots
    apart = af.vertex_map(cell, BATCH, X, initial=af.constant(0.0)).roots
    async with af.Session(graph) as session:
        assert not counted(session, (h, c)).keys() & {"matmul", "multiply", "sum", "relu"}
        for mine, theirs in zip(*await session.run([(h, c), apart]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)


async def test_states_without_elements_are_not_put_side_by_side(open_session: OpenSession) -> None:
    with af.Graph() as graph:
        nothing = af.ones((0, 0))

        @af.vertex_function(state=af.spec("float64", (0,)), children=2)
        def cell(vertex: Any) -> None:
            vertex.scatter(vertex.gather(0) @ nothing + vertex.gather(1) @ nothing)

        roots = af.vertex_map(cell, BATCH).roots
    async with open_session(graph) as session:
        assert (await session.run(roots)).shape == (len(BATCH.roots), 0)
