"""`vertex_map` beside other things: one feeds another, and they stand in loops, branches and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.vertex.evaluation import H, forest, slotted, slotted_alone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

DATA = forest(np.random.default_rng(1), [4, 3, 4])
X = np.random.default_rng(2).normal(size=(11, 2))
STEP = 1e-6


@af.vertex_function(state=af.spec("float64", (H,)), children=2)
def encoder(v: Any) -> None:
    h = af.tanh(v.gather(0) + v.gather(1) + af.sum(v.pull()))
    v.scatter(h)
    v.push(h, name="h")


@af.vertex_function(state=af.spec("float64", (H,)), children=1)
def decoder(v: Any) -> None:
    h = af.tanh(v.pull() * 0.5 - v.gather(0))
    v.scatter(h)
    v.push(af.sum(h))


def sloped(loss: Callable[[Any], float], direction: Any) -> float:
    return (loss(X + STEP * direction) - loss(X - STEP * direction)) / (2 * STEP)


def linked_alone(x: Any) -> Any:
    """The encoder over forests, then the decoder over a chain of the same vertices."""
    children = [DATA.children[a:b] for a, b in zip(DATA.offsets[:-1], DATA.offsets[1:], strict=True)]
    states: dict[int, Any] = {}
    while len(states) < len(x):
        for vertex, below in enumerate(children):
            if vertex not in states and all(int(child) in states for child in below):
                total = sum((states[int(child)] for child in below), np.zeros(H))
                states[vertex] = np.tanh(total + x[vertex].sum())
    h, pushed = np.zeros(H), []
    for vertex in range(len(x)):
        h = np.tanh((states[vertex] + 1.0) * 0.5 - h)
        pushed.append(h.sum())
    return np.array(pushed)


async def test_pushes_are_pulled_by_a_static_graph_and_another_function(graph: af.Graph, run: Run) -> None:
    """Behaviour 83."""
    x = af.placeholder("float64", (None, 2))
    encoded = af.vertex_map(encoder, DATA, x).pushes["h"]
    decoded = af.vertex_map(decoder, af.InputGraph.chain([11]), encoded + 1.0).pushes["y"]
    got, grad = await run((decoded, af.gradients(af.sum(af.square(decoded)), x)), {x: X})
    np.testing.assert_allclose(got, linked_alone(X), rtol=1e-12)
    direction = np.random.default_rng(3).normal(size=X.shape)
    want = sloped(lambda x: float((linked_alone(x) ** 2).sum()), direction)
    np.testing.assert_allclose((grad * direction).sum(), want, rtol=1e-5)


@pytest.mark.slow
async def test_inside_a_loop_and_a_branch(graph: af.Graph, run: Run) -> None:
    """Behaviour 83: what roots give goes into the next iteration, twice by one branch and once by the other."""
    fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (11, 2))

    def body(i: Any, rows: Any, total: Any) -> Any:
        pushed = af.cond(
            i < 2,
            lambda: af.vertex_map(slotted, fed, rows).pushes["y"],
            lambda: -af.vertex_map(slotted, fed, rows, policy="depth", lift_parts=False).pushes["y"],
        )
        return i + 1, rows * 0.5, total + pushed * af.astype(i + 1, "float64")

    total = af.while_loop(lambda i, *_: i < 3, body, (0, x, af.zeros(11)))[2]
    got, grad = await run((total, af.gradients(af.sum(af.square(total)), x)), {**fed.feeds(DATA), x: X})

    def alone(x: Any) -> Any:
        pushed = [slotted_alone(DATA, x * 0.5**i)[0] for i in range(3)]
        return pushed[0] + 2 * pushed[1] - 3 * pushed[2]

    np.testing.assert_allclose(got, alone(X), rtol=1e-11)
    direction = np.random.default_rng(3).normal(size=X.shape)
    want = sloped(lambda x: float((alone(x) ** 2).sum()), direction)
    np.testing.assert_allclose((grad * direction).sum(), want, rtol=1e-5)


async def test_inside_a_function(session: af.Session) -> None:
    """Behaviour 83: it is traced once for graphs of any size."""
    traces = 0

    @af.function
    def score(graph: af.InputGraph, x: af.Tensor) -> af.Tensor:
        nonlocal traces
        traces += 1
        return af.vertex_map(slotted, graph, x).pushes["y"]

    for sizes in ([4, 3, 4], [1], [2, 6]):
        data = forest(np.random.default_rng(1), sizes)
        rows = X[: data.n_vertices]
        np.testing.assert_allclose(await score(data, rows), slotted_alone(data, rows)[0], rtol=1e-12)
    assert traces <= 2
