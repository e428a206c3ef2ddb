"""`vertex_map` gives what a plain evaluation, vertex after vertex, gives; with gradients, on all devices."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.vertex.graphs import children_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

H = 3
RNG = np.random.default_rng(0)
U, W, V = RNG.normal(size=(H, H)), RNG.normal(size=(2, H)), RNG.normal(size=(H, H))


def forest(rng: np.random.Generator, lengths: list[int], types: int = 0) -> af.InputGraph:
    """Samples of these sizes: trees, chains, stars and graphs with shared children."""
    samples = []
    for number, n in enumerate(lengths):
        kinds = rng.integers(0, types, n).tolist() if types else None
        if number % 3 == 2:
            edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 1.5 / n]
            taken: dict[int, int] = {}
            few = [e for e in edges if taken.setdefault(e[0], 0) < 2 and not taken.update({e[0]: taken[e[0]] + 1})]
            samples.append(af.InputGraph.from_edges(n, few, kinds))
        else:
            parents, room = [-1] * n, [2] * n
            for vertex in range(1, n):
                free = [p for p in range(vertex) if room[p]]
                parents[vertex] = free[-1] if number % 3 == 1 else int(rng.choice(free))
                room[parents[vertex]] -= 1
            samples.append(af.InputGraph.from_parents(parents, kinds))
    return af.InputGraph.batch(samples)


def in_order(graph: af.InputGraph) -> list[int]:
    """Children before their parents."""
    return list(TopologicalSorter(dict(enumerate(children_of(graph)))).static_order())


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


@af.vertex_function(state=af.spec("float64", (H,)), children=2)
def slotted(v: Any) -> None:
    """Two children, told apart; eager, core and lazy operations."""
    left, right = v.gather(0), v.gather(1)
    h = af.tanh(v.pull() @ W + left @ U - right @ V)
    v.scatter(h)
    v.push(af.sum(h * left) + af.sum(v.pull()))
    v.push(v.is_leaf, name="leaf")


def slotted_alone(graph: af.InputGraph, x: Any, initial: float) -> tuple[Any, Any]:
    states: dict[int, Any] = {}
    pushed = np.zeros(len(x))
    for vertex in in_order(graph):
        below = [states[child] for child in children_of(graph)[vertex]]
        left, right = (*below, np.full(H, initial), np.full(H, initial))[:2]
        states[vertex] = np.tanh(x[vertex] @ W + left @ U - right @ V)
        pushed[vertex] = (states[vertex] * left).sum() + x[vertex].sum()
    return pushed, np.array([states[root] for root in graph.roots.tolist()]).reshape(-1, H)


@af.vertex_function(state=(af.spec("float64", (H,)), af.spec("float64", (H,))))
def child_sum(v: Any) -> None:
    """A Tree-LSTM of any fan-in, with a forget gate for each child."""
    x = v.pull() @ W
    h = v.gather_all(lambda child: child[0])
    kept = v.gather_all(lambda child: af.sigmoid(x + child[0] @ U) * child[1])
    most = v.gather_all(lambda child: child[1], reduce="max")
    mean = v.gather_all(lambda child: child[0], reduce="mean")
    c = kept + af.tanh(x + h @ V) + 0.1 * most
    v.scatter((af.tanh(c) + mean, c))
    v.push(af.sum(c))


def child_sum_alone(graph: af.InputGraph, x: Any) -> tuple[Any, Any]:
    states: dict[int, tuple[Any, Any]] = {}
    for vertex in in_order(graph):
        below = [states[child] for child in children_of(graph)[vertex]]
        own = x[vertex] @ W
        h = sum((each[0] for each in below), np.zeros(H))
        kept = sum((sigmoid(own + each[0] @ U) * each[1] for each in below), np.zeros(H))
        most = np.max([each[1] for each in below], axis=0) if below else np.zeros(H)
        c = kept + np.tanh(own + h @ V) + 0.1 * most
        states[vertex] = np.tanh(c) + h / max(len(below), 1), c
    pushed = np.array([states[vertex][1].sum() for vertex in range(len(x))])
    return pushed, np.array([states[root][0] for root in graph.roots.tolist()]).reshape(-1, H)


SIZES = [[5, 1, 6], [1], [2, 2, 3, 3, 3, 3]]


@pytest.mark.parametrize("policy", ["breadth_first", "depth", "agenda"])
@pytest.mark.parametrize("lift_parts", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
async def test_80_81_82_a_batch_gives_what_vertices_give_one_by_one(
    graph: af.Graph, run: Run, sizes: list[int], lift_parts: bool, policy: str
) -> None:
    """80. 81. 82. Chains, trees, shared children, single vertices: all children first, whatever the strategy."""
    rng = np.random.default_rng(len(sizes))
    batch = forest(rng, sizes)
    x = rng.normal(size=(sum(sizes), 2))
    for initial in (0, 0.5):
        found = af.vertex_map(slotted, batch, x, initial=initial, policy=policy, lift_parts=lift_parts)
        pushed, roots = await run((found.pushes, found.roots))
        want_pushed, want_roots = slotted_alone(batch, x, initial)
        np.testing.assert_allclose(pushed["y"], want_pushed, rtol=1e-12)
        np.testing.assert_allclose(roots, want_roots, rtol=1e-12)
        assert pushed["leaf"].tolist() == [not children_of(batch)[vertex] for vertex in range(len(x))]


@pytest.mark.parametrize("lift_parts", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
async def test_80_fan_in_may_vary(graph: af.Graph, run: Run, sizes: list[int], lift_parts: bool) -> None:
    """80. Any number of children, reduced to their sum, mean and largest."""
    rng = np.random.default_rng(len(sizes))
    batch = forest(rng, sizes)
    x = rng.normal(size=(sum(sizes), 2))
    found = af.vertex_map(child_sum, batch, x, lift_parts=lift_parts)
    pushed, roots = await run((found.pushes["y"], found.roots[0]))
    want_pushed, want_roots = child_sum_alone(batch, x)
    np.testing.assert_allclose(pushed, want_pushed, rtol=1e-12)
    np.testing.assert_allclose(roots, want_roots, rtol=1e-12)


async def test_80_an_empty_batch(graph: af.Graph, run: Run) -> None:
    """80. No vertices, or no samples."""
    for batch in (af.InputGraph.batch([]), af.InputGraph.chain([0, 0])):
        found = af.vertex_map(slotted, batch, np.zeros((0, 2)))
        pushed, roots = await run((found.pushes["y"], found.roots))
        assert pushed.shape == (0,)
        assert roots.shape == (0, H)


@pytest.mark.parametrize("lift_parts", [True, False])
@pytest.mark.parametrize("function", [slotted, child_sum])
async def test_81_gradients_of_shared_children_add(graph: af.Graph, run: Run, function: Any, lift_parts: bool) -> None:
    """81. Against central differences, of what is pulled, of `initial`, and of a weight around the function."""
    rng = np.random.default_rng(3)
    batch = forest(rng, [6, 3, 7])
    x0, scale0 = rng.normal(size=(16, 2)), 0.7
    x, scale = af.placeholder("float64", (16, 2)), af.placeholder("float64", ())
    weights = rng.normal(size=16)

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

    async def at(x1: Any, scale1: float) -> float:
        return float(await run(loss, {x: x1, scale: scale1}))

    step = 1e-6
    for place in [(0, 0), (3, 1), (8, 0), (15, 1), (11, 0)]:
        moved = np.zeros_like(x0)
        moved[place] = step
        want = (await at(x0 + moved, scale0) - await at(x0 - moved, scale0)) / (2 * step)
        np.testing.assert_allclose(got_x[place], want, rtol=1e-5, atol=1e-7)
    want = (await at(x0, scale0 + step) - await at(x0, scale0 - step)) / (2 * step)
    np.testing.assert_allclose(got_scale, want, rtol=1e-5)


async def test_83_two_types(graph: af.Graph, run: Run) -> None:
    """83. Vertices of several types compute functions of their own; their states are alike."""

    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def word(v: Any) -> None:
        v.scatter(af.tanh(v.pull() @ W))
        v.push(af.sum(v.pull()))

    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def phrase(v: Any) -> None:
        h = af.tanh(v.gather(0) @ U + v.gather(1) @ V)
        v.scatter(h)
        v.push(af.sum(h) + af.sum(v.gather(0)))
        v.push(af.max(h), name="first")

    rng = np.random.default_rng(5)
    for sizes in ([7, 1, 9], [1], []):
        batch = forest(rng, sizes, types=2) if sizes else af.InputGraph.from_edges(0, [], [])
        n = sum(sizes)
        x = rng.normal(size=(n, 2))
        states: dict[int, Any] = {}
        want, first = np.zeros(n), np.zeros(n)
        for vertex in in_order(batch):
            below = [states[child] for child in children_of(batch)[vertex]]
            left, right = (*below, np.zeros(H), np.zeros(H))[:2]
            if np.asarray(batch.types)[vertex] == 0:
                states[vertex] = np.tanh(x[vertex] @ W)
                want[vertex] = x[vertex].sum()
            else:
                states[vertex] = np.tanh(left @ U + right @ V)
                want[vertex], first[vertex] = states[vertex].sum() + left.sum(), states[vertex].max()
        for policy in ("breadth_first", "agenda", "depth"):
            found = af.vertex_map({"word": word, "phrase": phrase}, batch, x, policy=policy)
            pushed, roots = await run((found.pushes, found.roots))
            np.testing.assert_allclose(pushed["y"], want, rtol=1e-12)
            np.testing.assert_allclose(pushed["first"], first, rtol=1e-12)
            np.testing.assert_allclose(roots, np.array([states[r] for r in batch.roots.tolist()]).reshape(-1, H))


async def test_random_draws_do_not_depend_on_the_batch_or_the_policy() -> None:
    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def noisy(v: Any) -> None:
        late = af.random.categorical(v.gather(0), seed=4)
        v.scatter(v.gather(0) + v.gather(1) + af.random.normal((H,), seed=3) + af.astype(late, "float64"))

    rng = np.random.default_rng(0)
    one, other = forest(rng, [6]), forest(rng, [9])
    found = []
    for batch in (one, af.InputGraph.batch([one, other])):
        for policy in ("breadth_first", "depth"):
            for lift_parts in (True, False):
                with af.Graph(seed=7) as graph:
                    roots = af.vertex_map(noisy, batch, policy=policy, lift_parts=lift_parts).roots
                for regions in (True, False):
                    async with af.Session(graph, regions=regions) as session:
                        found.append((await session.run(roots))[0])
    assert all(np.array_equal(each, found[0]) for each in found)
