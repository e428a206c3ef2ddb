"""Any batch gives what its vertices give one after the other: results, and gradients in a random direction."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings

import asyncflow as af
from asyncflow.vertex.schedule import POLICIES
from tests.vertex.evaluation import child_sum, child_sum_alone, phrase, slotted, slotted_alone, typed_alone, word
from tests.vertex.graphs import batches, children_of

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = 1e-6


def of_two(graph: af.InputGraph, *, n_types: int = 0) -> af.InputGraph:
    """The graph with no more than the first two children of each vertex, and types below a number."""
    children = [below[:2] for below in children_of(graph)]
    offsets = np.cumsum([0, *map(len, children)])
    types = None if graph.types is None else np.asarray(graph.types) % n_types
    return af.InputGraph(offsets, np.array([*chain.from_iterable(children)], np.int64), graph.samples, types)


def typed_parts(graph: af.InputGraph, x: Any) -> tuple[Any, Any]:
    pushed, most, roots = typed_alone(graph, x)
    return pushed + most, roots


PROGRAMS: dict[str, tuple[Any, Callable[..., tuple[Any, Any]]]] = {
    "slotted": (slotted, slotted_alone),
    "child_sum": (child_sum, child_sum_alone),
    "typed": ({"word": word, "phrase": phrase}, typed_parts),
}


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_batch(name: str, policy: str) -> None:
    """With the policy "depth" in two parts, as streams run them; each program and policy lifted in parts and whole."""
    function, alone = PROGRAMS[name]
    lift_parts = ([*PROGRAMS].index(name) + [*POLICIES].index(policy)) % 2 == 0
    streams = 2 if policy == "depth" else 1
    is_typed = name == "typed"
    with af.Graph() as program:
        fed, x = af.InputGraph.placeholder(types=is_typed), af.placeholder("float64", (None, 2))
        found = af.vertex_map(function, fed, x, policy=policy, lift_parts=lift_parts, streams=streams)
        pushed = found.pushes["y"] + found.pushes["most"] if is_typed else found.pushes["y"]
        roots = found.roots[0] if name == "child_sum" else found.roots
        fetches = pushed, roots, af.gradients(af.sum(pushed) + af.sum(af.square(roots)), x)

    def loss(graph: af.InputGraph, rows: Any) -> float:
        pushed, roots = alone(graph, rows)
        return float(pushed.sum() + (roots**2).sum())

    with asyncio.Runner() as runner:
        session = af.Session(program)

        @settings(max_examples=8)
        @given(batches(typed=is_typed))
        def check(data: af.InputGraph) -> None:
            graph = data if name == "child_sum" else of_two(data, n_types=2)
            rng = np.random.default_rng(graph.n_vertices)
            rows, direction = rng.normal(size=(2, graph.n_vertices, 2))
            got, got_roots, grad = runner.run(session.run(fetches, {**fed.feeds(graph), x: rows}))
            want, want_roots = alone(graph, rows)
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
            np.testing.assert_allclose(got_roots, want_roots, rtol=1e-11, atol=1e-12)
            slope = (loss(graph, rows + STEP * direction) - loss(graph, rows - STEP * direction)) / (2 * STEP)
            np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-5, atol=1e-6)

        check()
        runner.run(session.aclose())


@pytest.mark.slow
def test_a_deep_chain() -> None:
    """Behaviour 82: ten thousand sets of one vertex, and their gradients; nothing recurs."""
    n = 10_000

    @af.vertex_function(state=af.spec("float64", (1,)), children=1)
    def f(v: Any) -> None:
        v.scatter(v.pull() + 0.5 * v.gather(0))

    with af.Graph() as program:
        x = af.constant(np.full((n, 1), 0.5))
        roots = af.vertex_map(f, af.InputGraph.chain([n]), x).roots
        grad = af.gradients(af.sum(roots), x)

    async def main() -> Any:
        async with af.Session(program) as session:
            return await session.run((roots, grad))

    got, got_grad = asyncio.run(main())
    np.testing.assert_allclose(got, [[1.0]])
    np.testing.assert_allclose(got_grad[:, 0], 0.5 ** np.arange(n - 1, -1, -1.0))
