"""`vertex_map` gives what a plain evaluation, vertex after vertex, gives; with gradients, on all devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.vertex.schedule import POLICIES
from tests.conftest import OpenSession
from tests.vertex.evaluation import (
    H,
    child_sum,
    child_sum_alone,
    forest,
    phrase,
    slotted,
    slotted_alone,
    typed_alone,
    word,
)
from tests.vertex.graphs import children_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

every_policy = pytest.mark.parametrize("policy", list(POLICIES))

BATCHES = [forest(np.random.default_rng(len(sizes)), sizes) for sizes in ([5, 1, 6], [1], [2, 2, 3, 3, 3, 3])]
"""Trees, chains, shared children, single vertices."""
NOTHING = [af.InputGraph.batch([]), af.InputGraph.chain([0, 0])]


@every_policy
@pytest.mark.parametrize("lift_parts", [True, False])
async def test_a_batch_gives_what_vertices_give_one_by_one(
    graph: af.Graph, run: Run, lift_parts: bool, policy: str
) -> None:
    """Behaviour 80, Behaviour 81, Behaviour 82: chains, trees, shared children, single vertices: all children first,
    whatever the strategy."""
    rng = np.random.default_rng(0)
    batch, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
    initial = af.placeholder("float64", ())
    found = af.vertex_map(slotted, batch, x, initial=initial, policy=policy, lift_parts=lift_parts)
    for number, data in enumerate([*BATCHES, *NOTHING]):
        rows, first = rng.normal(size=(data.n_vertices, 2)), 0.5 * number
        pushed, roots = await run((found.pushes, found.roots), {**batch.feeds(data), x: rows, initial: first})
        want_pushed, want_roots = slotted_alone(data, rows, first)
        np.testing.assert_allclose(pushed["y"], want_pushed, rtol=1e-12)
        np.testing.assert_allclose(roots, want_roots, rtol=1e-12)
        assert pushed["leaf"].tolist() == [not below for below in children_of(data)]


@pytest.mark.parametrize("lift_parts", [True, False])
async def test_fan_in_may_vary(graph: af.Graph, run: Run, lift_parts: bool) -> None:
    """Behaviour 80: any number of children, reduced to their sum, mean and largest."""
    rng = np.random.default_rng(0)
    batch, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
    found = af.vertex_map(child_sum, batch, x, lift_parts=lift_parts)
    for data in (*BATCHES, *NOTHING):
        rows = rng.normal(size=(data.n_vertices, 2))
        pushed, roots = await run((found.pushes["y"], found.roots[0]), {**batch.feeds(data), x: rows})
        want_pushed, want_roots = child_sum_alone(data, rows)
        np.testing.assert_allclose(pushed, want_pushed, rtol=1e-12)
        np.testing.assert_allclose(roots, want_roots, rtol=1e-12)


@pytest.mark.parametrize("lift_parts", [True, False])
@pytest.mark.parametrize(
    ("function", "alone"),
    [(slotted, slotted_alone), pytest.param(child_sum, child_sum_alone, marks=pytest.mark.slow)],
    ids=["slotted", "child_sum"],
)
async def test_gradients_of_shared_children_add(
    graph: af.Graph, run: Run, function: Any, alone: Callable[..., Any], lift_parts: bool
) -> None:
    """Behaviour 81: gradients of pulled values, of `initial`, and of a weight around the function equal differences."""
    rng = np.random.default_rng(3)
    batch = forest(rng, [4, 2, 5])
    x0, scale0, weights = rng.normal(size=(11, 2)), 0.7, rng.normal(size=11)
    x, scale = af.placeholder("float64", (11, 2)), af.placeholder("float64", ())

    @af.vertex_function(state=function.structure.unflatten(function.specs), children=function.children)
    def scaled(v: Any) -> None:
        class Scaled:
            def __getattr__(self, name: str) -> Any:
                return (lambda *args: v.pull(*args) * scale) if name == "pull" else getattr(v, name)

        function.__wrapped__(Scaled())

    found = af.vertex_map(scaled, batch, x, initial=scale, lift_parts=lift_parts)
    roots = found.roots if function is slotted else found.roots[0]
    loss = af.sum(found.pushes["y"] * weights) + af.sum(af.square(roots))
    got_x, got_scale = await run(af.gradients(loss, [x, scale]), {x: x0, scale: scale0})

    def at(moved: Any, scale: float) -> float:
        pushed, roots = alone(batch, moved * scale, scale)
        return float((pushed * weights).sum() + (roots**2).sum())

    step = 1e-6
    want_x = np.zeros_like(x0)
    for place in np.ndindex(*x0.shape):
        moved = np.zeros_like(x0)
        moved[place] = step
        want_x[place] = (at(x0 + moved, scale0) - at(x0 - moved, scale0)) / (2 * step)
    np.testing.assert_allclose(got_x, want_x, rtol=1e-5, atol=1e-7)
    want = (at(x0, scale0 + step) - at(x0, scale0 - step)) / (2 * step)
    np.testing.assert_allclose(got_scale, want, rtol=1e-5)


@every_policy
async def test_two_types(graph: af.Graph, run: Run, policy: str) -> None:
    """Behaviour 83: vertices of several types compute functions of their own; their states are alike."""
    rng = np.random.default_rng(5)
    batch, x = af.InputGraph.placeholder(types=True), af.placeholder("float64", (None, 2))
    found = af.vertex_map({"word": word, "phrase": phrase}, batch, x, policy=policy)
    for sizes in ([5, 1, 6], [1], []):
        data = forest(rng, sizes, types=2) if sizes else af.InputGraph.from_edges(0, [], [])
        rows = rng.normal(size=(sum(sizes), 2))
        pushed, roots = await run((found.pushes, found.roots), {**batch.feeds(data), x: rows})
        want, most, want_roots = typed_alone(data, rows)
        np.testing.assert_allclose(pushed["y"], want, rtol=1e-12)
        np.testing.assert_allclose(pushed["most"], most, rtol=1e-12)
        np.testing.assert_allclose(roots, want_roots, rtol=1e-12)


@pytest.mark.parametrize("streams", [1, 2])
async def test_children_of_balanced_trees(graph: af.Graph, run: Run, streams: int) -> None:
    """Behaviour 80: children are evenly spaced in the store, so that reading them may give a view, which is
    read-only.
    """

    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def mixed(v: Any) -> None:
        h = v.gather(0) * 2.0 - (v.gather(0) + v.gather(1)) + v.pull()
        v.scatter(h)
        v.push(v.gather(1) + h)

    tree = af.InputGraph.from_nested((((0, 1), (2, 3)), ((4, 5), (6, 7))))[0]
    rows = np.random.default_rng(0).normal(size=(3 * tree.n_vertices, H))
    found = af.vertex_map(mixed, af.InputGraph.batch([tree] * 3), rows, streams=streams)
    pushed, roots = await run((found.pushes["y"], found.roots))
    states, wanted = np.zeros_like(rows), np.zeros_like(rows)
    below = children_of(af.InputGraph.batch([tree] * 3))
    for vertex, children in enumerate(below):  # which stand before their parents
        left, right = states[children] if children else np.zeros((2, H))
        states[vertex] = left * 2.0 - (left + right) + rows[vertex]
        wanted[vertex] = right + states[vertex]
    np.testing.assert_allclose(pushed, wanted, rtol=1e-12)
    np.testing.assert_allclose(roots, states[[14, 29, 44]], rtol=1e-12)


async def test_dynets_silent_error_an_operand_that_was_computed_behind_others(graph: af.Graph, run: Run) -> None:
    """DyNet (its pull request 1258) read an operand at batch position 0, though it had been computed at another."""
    batch = af.InputGraph.batch([af.InputGraph.chain([1])] * 3 + [af.InputGraph.chain([2])])
    x = np.arange(1.0, 6.0).reshape(5, 1)

    @af.vertex_function(state=af.spec("float64", (1,)), children=1)
    def f(v: Any) -> None:
        eager = v.pull() * 10.0
        v.scatter(eager + v.gather(0))
        late = v.gather(0) * 3.0
        v.push(late + eager)
        v.push(late * late, name="square")

    found = af.vertex_map(f, batch, x)
    pushed, roots = await run((found.pushes, found.roots))
    # The leaf of the last sample is at position 3 of the first set, its root alone in the second.
    assert roots[:, 0].tolist() == [10.0, 20.0, 30.0, 90.0]
    assert pushed["y"][:, 0].tolist() == [10.0, 20.0, 30.0, 40.0, 50.0 + 120.0]
    assert pushed["square"][:, 0].tolist() == [0.0, 0.0, 0.0, 0.0, 120.0**2]


async def test_random_draws_do_not_depend_on_the_batch_or_the_policy(open_session: OpenSession) -> None:
    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def noisy(v: Any) -> None:
        late = af.random.categorical(v.gather(0), seed=4)
        v.scatter(v.gather(0) + v.gather(1) + af.random.normal((H,), seed=3) + af.astype(late, "float64"))

    rng = np.random.default_rng(0)
    one, other = forest(rng, [6]), forest(rng, [9])
    found = []
    both = af.InputGraph.batch([one, other])
    for batch, policy, lift_parts in (
        (one, "breadth_first", True),
        (both, "breadth_first", False),
        (both, "depth", True),
    ):
        with af.Graph(seed=7) as graph:
            roots = af.vertex_map(noisy, batch, policy=policy, lift_parts=lift_parts).roots
        async with open_session(graph) as session:
            found.append((await session.run(roots))[0])
    assert all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.parametrize("dtype", ["int64", "int8", "float32"])
async def test_a_mean_of_integers_is_float64(graph: af.Graph, run: Run, dtype: str) -> None:
    """As that of `af.mean`, and not of the dtype that the state has, so that nothing is lost or overflows."""

    @af.vertex_function(state=af.spec(dtype, ()))
    def mean(v: Any) -> None:
        v.scatter(v.pull() + af.astype(v.gather_all(reduce="mean"), dtype))
        v.push(v.gather_all(reduce="mean"))

    star = af.InputGraph.from_parents([-1, 0, 0, 0])
    found = af.vertex_map(mean, star, af.constant([1, 100, 100, 101], dtype))
    pushed, roots = await run((found.pushes["y"], found.roots))
    assert (found.pushes["y"].dtype, pushed.dtype) == (pushed.dtype, "float32" if dtype == "float32" else "float64")
    np.testing.assert_allclose(pushed, [301 / 3, 0.0, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(roots, np.array([1 + 301 / 3]).astype(dtype), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "wide"), [("int8", "int64"), ("uint8", "uint64"), ("bool", "int64")])
async def test_a_sum_of_small_integers_does_not_wrap(graph: af.Graph, run: Run, dtype: str, wide: str) -> None:
    """The sum has the dtype of `af.sum`; a state of the narrow dtype asks for a conversion that the user writes."""

    @af.vertex_function(state=af.spec(dtype, ()))
    def total(v: Any) -> None:
        v.push(v.gather_all())
        v.scatter(v.pull())

    star = af.InputGraph.from_parents([-1, 0, 0, 0])
    pushed = af.vertex_map(total, star, np.array([1, 1, 100, 100]).astype(dtype)).pushes["y"]
    assert pushed.dtype == wide
    assert (await run(pushed)).tolist() == [3 if dtype == "bool" else 201, 0, 0, 0]


async def test_states_may_be_booleans(graph: af.Graph, run: Run) -> None:
    @af.vertex_function(state=af.spec("bool", ()), children=1)
    def any_below(v: Any) -> None:
        v.scatter(af.logical_or(v.pull(), v.gather(0)))

    found = af.vertex_map(any_below, af.InputGraph.chain([3, 2]), np.array([False, True, False, False, False]))
    assert (await run(found.roots)).tolist() == [True, False]
