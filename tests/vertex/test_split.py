from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.vertex.evaluation import slotted

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])  # sessions on devices of their own

PARTS = (
    "before the sets matmul, sum; in each set 2 matmul, add, subtract, tanh; after the sets multiply, sum, add. "
    "Bytes kept a vertex: states 24, from before the sets 33, from the sets 0"
)
WHOLE = (
    "before the sets nothing; in each set 3 matmul, 2 add, subtract, tanh, multiply, 2 sum; after the sets nothing. "
)


@pytest.mark.parametrize("lift_parts", [True, False])
async def test_a_plan_explains_the_three_parts(lift_parts: bool) -> None:
    with af.Graph() as graph:
        x: Any = af.placeholder("float64", (None, 2))
        pushed = af.vertex_map(slotted, af.InputGraph.chain([2]), x, lift_parts=lift_parts).pushes
    async with af.Session(graph) as session:
        text = session.plan(pushed, [x]).explain()
        assert (await session.run(pushed["leaf"], {x: np.ones((2, 2))})).tolist() == [True, False]
    line = next(line for line in text.splitlines() if line.startswith("vertex_map/slotted: "))
    assert line.removeprefix("vertex_map/slotted: vertex_map computes ").startswith(PARTS if lift_parts else WHOLE)


async def test_a_product_of_pulled_values_is_computed_before_the_sets() -> None:
    @af.vertex_function(state=af.spec("float64", (3,)), children=1)
    def cell(v: Any) -> None:
        v.scatter(v.gather(0) + af.einsum("ij,j->i", np.ones((3, 2)), v.pull()))

    with af.Graph() as graph:
        x: Any = af.placeholder("float64", (None, 2))
        roots = af.vertex_map(cell, af.InputGraph.chain([2]), x).roots
    async with af.Session(graph) as session:
        assert "before the sets einsum; in each set add; after" in session.plan(roots, [x]).explain()
        assert (await session.run(roots, {x: np.ones((2, 2))})).tolist() == [[4.0] * 3]


async def test_views_stay_with_the_sets_that_read_them() -> None:
    """So that gradients of parts of one value are joined in each set, and not for all vertices."""

    @af.vertex_function(state=af.spec("float64", (2,)), children=1)
    def cell(v: Any) -> None:
        x = v.pull() @ np.ones((2, 6))
        v.scatter(af.tanh(x[:2] + v.gather(0) * x[2:4]))
        v.push(x[4:])

    with af.Graph() as graph:
        x: Any = af.placeholder("float64", (None, 2))
        found = af.vertex_map(cell, af.InputGraph.chain([3]), x)
        grad = af.gradients(af.sum(found.roots) + af.sum(found.pushes["y"]), x)
    async with af.Session(graph) as session:
        text = session.plan(found.roots, [x]).explain()
        assert "before the sets matmul, getitem; in each set 2 getitem, multiply, add, tanh; after" in text
        fed = np.array([[0.1, 0.2], [0.3, -0.4], [0.5, 0.6]])
        value = await session.run(grad, {x: fed})
    for place in np.ndindex(3, 2):
        step = np.zeros((3, 2))
        step[place] = 1e-6
        either = []
        for moved in (fed + step, fed - step):
            rows, state = moved @ np.ones((2, 6)), np.zeros(2)
            for row in rows:
                state = np.tanh(row[:2] + state * row[2:4])
            either.append(state.sum() + rows[:, 4:].sum())
        np.testing.assert_allclose(value[place], (either[0] - either[1]) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize("where", ["behind a gather", "before", "after"])
async def test_a_store_and_what_reads_it_are_of_one_part(where: str) -> None:
    """A store has no row for each vertex, so no set could read its own part of it."""
    tree = af.InputGraph.from_nested(((1, 2), 3))[0]

    def sums(x: Any) -> Any:
        return af.scan(lambda total, each: total + each, x, af.constant(0.0))

    @af.vertex_function(state=af.spec("float64", (3,)), children=2)
    def cell(v: Any) -> None:
        x, below = v.pull(), v.gather(0) + v.gather(1)
        v.scatter(
            af.tanh(
                {"behind a gather": lambda: sums(x + below), "before": lambda: below + sums(x)}.get(
                    where, lambda: x + below
                )()
            )
        )
        v.push(sums(below) if where == "after" else x)

    with af.Graph() as graph:
        x = af.constant(np.random.default_rng(0).normal(size=(tree.n_vertices, 3)))
        fetches = []
        for lift_parts in (True, False):
            found = af.vertex_map(cell, tree, x, lift_parts=lift_parts)
            results = (found.roots, found.pushes["y"])
            fetches.append((*results, af.gradients(results, x)))
    async with af.Session(graph) as session:
        lifted, in_loop = await session.run(fetches)
    for one, other in zip(lifted, in_loop, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


async def test_a_store_from_outside_is_read_in_each_part() -> None:
    tree = af.InputGraph.from_nested(((1, 2), 3))[0]
    rows = np.random.default_rng(0).normal(size=(3, 2))

    @af.vertex_function(state=af.spec("float64", (2,)), children=2)
    def cell(v: Any) -> None:
        v.scatter(v.pull() * array.read(0) + (v.gather(0) + v.gather(1)) * array.read(1))
        v.push(v.gather(0) * array.read(2))

    with af.Graph() as graph:
        x = af.constant(np.ones((tree.n_vertices, 2)))
        array = af.TensorArray("float64", 3, element_shape=(2,), clear_after_read=False).unstack(af.constant(rows))
        fetches = []
        for lift_parts in (True, False):
            found = af.vertex_map(cell, tree, x, lift_parts=lift_parts)
            results = (found.roots, found.pushes["y"])
            fetches.append((*results, af.gradients(results, x)))
    async with af.Session(graph) as session:
        lifted, in_loop = await session.run(fetches)
    a, b, _ = rows
    np.testing.assert_allclose(lifted[0], [a + (a + 2 * a * b + a) * b])
    for one, other in zip(lifted, in_loop, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
