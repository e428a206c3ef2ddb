"""Counts of values, against NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(5)
VALUES: dict[str, Any] = {
    "normal": RNG.normal(size=200),
    "float32": RNG.normal(size=(20, 5)).astype(np.float32),
    "integers": RNG.integers(-3, 9, 60),
    "equal": np.full(7, 2.5),
    "one": np.array([0.1]),
    "booleans": RNG.random(20) < 0.3,
}


async def counted(x: Any, *args: Any, **options: Any) -> Any:
    with af.Graph() as graph:
        fed = af.placeholder(x.dtype, (None,) * x.ndim)
        fetched = af.histogram(fed, *args, **options)
    async with af.Session(graph) as session:
        return await session.run(fetched, {fed: x})


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("bins", [1, 10, 7])
async def test_as_numpy(name: str, bins: int) -> None:
    x = VALUES[name]
    counts, edges = await counted(x, bins)
    want, want_edges = np.histogram(x.astype(edges.dtype), bins)
    assert counts.dtype == np.int64 and counts.sum() == x.size
    np.testing.assert_allclose(edges, want_edges, rtol=1e-6)
    found, _ = np.histogram(x.astype(edges.dtype), edges)
    np.testing.assert_array_equal(counts, found)
    if x.dtype == np.float64:
        np.testing.assert_array_equal(counts, want)


async def test_ranges_edges_and_weights() -> None:
    x = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, np.nan, np.inf])
    weights = np.arange(8.0)
    for ends in ((0.0, 2.0), (1.0, 1.0)):
        want, edges = np.histogram(x, 4, ends)
        found = await counted(x, 4, range=ends)
        np.testing.assert_array_equal(found[0], want)
        np.testing.assert_allclose(found[1], edges)
    counts, edges = await counted(x, [0.0, 0.5, 3.0])
    np.testing.assert_array_equal(counts, np.histogram(x, [0.0, 0.5, 3.0])[0])
    found, _ = await counted(x, [0.0, 0.5, 3.0], weights=weights)
    np.testing.assert_array_equal(found, np.histogram(x, [0.0, 0.5, 3.0], weights=weights)[0])


@pytest.mark.parametrize(
    ("bins", "options", "message"),
    [
        (0, {}, "bins is a positive integer, or a vector of edges; got 0"),
        (True, {}, "got True"),
        ([0.0, 1.0], {"range": (0, 1)}, "range is for a number of bins"),
        ([0.0], {}, "edges are a vector of 2 or more"),
        (3, {"range": (0, 1, 2)}, "range is a pair of numbers"),
    ],
)
def test_refusals(bins: Any, options: Any, message: str) -> None:
    with af.Graph(), pytest.raises(af.GraphError, match=message):
        af.histogram(af.placeholder("float64", (3,)), bins, **options)


async def test_rows_of_histograms() -> None:
    x = RNG.random((4, 30))
    with af.Graph() as graph:
        fed = af.placeholder("float64", (None, 30))
        rows = af.map_fn(lambda row: af.histogram(row, 5, range=(0.0, 1.0))[0], fed)
    async with af.Session(graph) as session:
        found = await session.run(rows, {fed: x})
    np.testing.assert_array_equal(found, [np.histogram(row, 5, (0.0, 1.0))[0] for row in x])
