"""Loops that a card runs by itself give, to the bit, what the same loops give where the host drives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy

Built = tuple[list[af.Tensor], dict[af.Tensor, Any]]
"""What a run fetches and feeds."""


def launched(cupy: FakeCupy) -> list[str]:
    """Return the names of the launches, without copies."""
    return [name for _, name in cupy.engine.launches if "cop" not in name and name != "poison"]


async def results(
    build: Callable[[], Built], *, device_while: bool, runs: int = 2, seed: int = 0, **options: Any
) -> tuple[list[list[bytes]], list[str], str]:
    """Return the bits of all results of each run, the launches of the last run, and the plan's explanation."""
    with small_cards(seed) as cupy:
        with af.Graph() as graph:
            fetched, feeds = build()
        found = []
        async with af.Session(
            graph, ["cuda:0"], device_while=device_while, loop_batching=False, debug=True, **options
        ) as session:
            for _ in range(runs):
                cupy.engine.launches.clear()
                found.append([np.asarray(value).tobytes() for value in await session.run(fetched, feeds)])
            explained = session.plan(fetched, list(feeds)).explain()
        return found, launched(cupy), explained


async def check_equal(build: Callable[[], Built], graphs: int, **options: Any) -> str:
    """Run with and without `device_while`, compare the bits, and return how the card's plan explains its loops.

    Args:
        build: makes the program, in the current graph.
        graphs: number of graph launches of the last run.
        options: of `results`.
    """
    by_host, kernels, _ = await results(build, device_while=False, **options)
    by_card, launches, explained = await results(build, device_while=True, **options)
    assert by_card == by_host
    assert launches.count("graph") == graphs
    if graphs:
        assert len(launches) < len(kernels)
    return explained


def matrix(size: int = 3) -> tuple[af.Tensor, dict[af.Tensor, Any]]:
    """A placeholder, and a feed for it."""
    x = af.placeholder("float64", (size, size), name="x")
    return x, {x: np.random.default_rng(size).normal(size=(size, size)) * 0.4}


def until(limit: float, step: Callable[[af.Tensor], af.Tensor], start: af.Tensor, **options: Any) -> af.Tensor:
    """A loop that goes on while the sum of squares is below `limit`."""
    return af.while_loop(lambda y: af.sum(y * y) < limit, step, start, **options)


# -- products and variables --------------------------------------------------------------------------------------------


def with_products() -> Built:
    x, feeds = matrix()
    return [until(50, lambda y: y @ x + (x @ y) * 0.5 + 0.3, x)], feeds


def with_products_of_stacks() -> Built:
    x, feeds = matrix()
    start = af.stack([x, x + 1])
    return [until(500, lambda y: af.matmul(y, x) + af.matmul(x, y) + 0.3, start)], feeds


def with_products_in_parts() -> Built:
    """In the predicate, a branch and an inner loop."""
    x, feeds = matrix()

    def step(y: af.Tensor) -> af.Tensor:
        y = af.cond(af.sum(y @ x) > 0, lambda: y @ x + 1, lambda: y + 0.5)
        return until(9, lambda z: z @ x + 1.25, y)

    return [af.while_loop(lambda y: af.max(y @ y) < 60, step, x)], feeds


def with_variables() -> Built:
    """Read in the predicate, the body, a branch, and an inner loop; one in several places."""
    x, feeds = matrix()
    w = af.Variable(np.full((3, 3), 0.75), name="w")
    bias, most = af.Variable(np.float64(0.25), name="bias"), af.Variable(np.float64(900), name="most")

    def step(y: af.Tensor) -> af.Tensor:
        y = af.cond(af.max(y) > 1, lambda: y @ w.read() + bias.read(), lambda: y + 1)
        return until(9, lambda z: z + w.read() + bias.read(), y)

    return [af.while_loop(lambda y: af.sum(y * y) < most.read() + bias.read(), step, x)], feeds


def with_variables_that_change() -> Built:
    """Written before and behind the loop, in each run."""
    x, feeds = matrix()
    w = af.Variable(np.full((3, 3), 0.5), name="w")
    before = w.assign_add(np.full((3, 3), 0.125))
    y = until(70, lambda y: y @ w.read() + 0.5, x)
    return [y, before, w.assign_sub(y / 1024), w.read()], feeds


@pytest.mark.parametrize(
    "build",
    [with_products, with_products_of_stacks, with_products_in_parts, with_variables, with_variables_that_change],
)
async def test_products_and_variables_are_in_the_loop(build: Callable[[], Built]) -> None:
    explained = await check_equal(build, graphs=1, runs=3)
    assert "the card runs it" in explained
    assert "the host drives" not in explained


async def test_a_loop_that_writes_a_variable_stays_with_the_host() -> None:
    def build() -> Built:
        x, feeds = matrix()
        total = af.Variable(np.float64(0), name="total")

        def step(y: af.Tensor) -> af.Tensor:
            with af.control_dependencies([total.assign_add(af.max(y))]):
                return y * 1.5 + total.read()

        return [until(50, step, x), total.read()], feeds

    assert "works on a store or variable, which the host does" in await check_equal(build, graphs=0)
