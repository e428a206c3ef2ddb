"""Behaviour 52: folds, scan and map_fn, with the known values. Gradients are elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

ELEMENTS = np.arange(1.0, 7.0)


def step(state: Any, x: Any) -> Any:
    return (state + x) * 2


@pytest.mark.parametrize(
    ("fold", "initializer", "expected"),
    [(af.foldl, None, 208), (af.foldl, 10.0, 880), (af.foldr, None, 450), (af.foldr, 10.0, 1282)],
)
async def test_folds(run: Run, fold: Callable[..., Any], initializer: Any, expected: float) -> None:
    """Behaviour 52: foldl 208 and 880, foldr 450 and 1282."""
    assert await run(fold(step, ELEMENTS, initializer)) == expected


@pytest.mark.parametrize(
    ("reverse", "initializer", "expected"),
    [
        (False, None, [1, 2, 6, 24, 120, 720]),
        (False, 2.0, [2, 4, 12, 48, 240, 1440]),
        (True, None, [720, 720, 360, 120, 30, 6]),
        (True, 2.0, [1440, 1440, 720, 240, 60, 12]),
    ],
)
async def test_scan(run: Run, reverse: bool, initializer: Any, expected: list[float]) -> None:
    """Behaviour 52: in both directions results stay at their rows' places."""
    scanned = af.scan(lambda a, x: a * x, ELEMENTS, initializer, reverse=reverse)
    np.testing.assert_array_equal(await run(scanned), expected)


async def test_scan_of_no_elements(run: Run) -> None:
    """Behaviour 52: the shape is [0,2,4]."""
    scanned = af.scan(lambda a, x: a + x, np.zeros((0, 2, 4)), np.ones((2, 4)))
    assert (await run(scanned)).shape == (0, 2, 4)


@pytest.mark.parametrize("loop", [af.scan, af.foldl, af.foldr])
def test_an_initializer_of_another_structure(loop: Callable[..., Any]) -> None:
    """Behaviour 52: the function must return the structure of its argument."""
    with pytest.raises(af.GraphError, match="expected"):
        loop(lambda state, x: (state[0] + x, state[1], x), ELEMENTS, (0.0, 1.0))


async def test_nests(run: Run) -> None:
    """Behaviour 52: a state of one structure over elements of another."""
    fibonacci = af.scan(lambda s, x: (s[1], s[0] + s[1]), {"unused": np.zeros(6)}, (1.0, 1.0))
    first, second = await run(fibonacci)
    np.testing.assert_array_equal(first, [1, 2, 3, 5, 8, 13])
    np.testing.assert_array_equal(second, [2, 3, 5, 8, 13, 21])


@pytest.mark.parametrize("window", [1, 10, 32])
async def test_map_fn(run: Run, window: int) -> None:
    """Behaviour 52: rows are independent, and come back at their places."""
    mapped = af.map_fn(lambda x: {"square": x * x, "sign": x > 3}, ELEMENTS, parallel_iterations=window)
    values = await run(mapped)
    np.testing.assert_array_equal(values["square"], ELEMENTS**2)
    np.testing.assert_array_equal(values["sign"], ELEMENTS > 3)


async def test_nested_map_fn(run: Run) -> None:
    """Behaviour 52: a table, row by row."""
    table = np.arange(12.0).reshape(3, 4)
    mapped = af.map_fn(lambda row: af.map_fn(lambda x: x + af.sum(row), row), table)
    np.testing.assert_array_equal(await run(mapped), table + table.sum(axis=1, keepdims=True))


async def test_elements_of_unknown_number(run: Run) -> None:
    """Behaviour 52: the number of rows is known in the run."""
    xs = af.placeholder("float64", (None,))
    results = af.foldl(lambda t, x: t + x, xs, 0.0), af.scan(lambda t, x: t + x, xs, 0.0), af.map_fn(lambda x: -x, xs)
    for n in (0, 1, 5):
        values = np.arange(float(n))
        total, running, negated = await run(results, {xs: values})
        assert total == values.sum()
        np.testing.assert_array_equal(running, np.cumsum(values))
        np.testing.assert_array_equal(negated, -values)
