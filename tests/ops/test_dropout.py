from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import as_dtype


async def values(rate: Any, x: Any, *, feeds: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the dropout of `x`, and the gradient of its sum."""
    with af.Graph(seed=3) as graph:
        given = af.placeholder(x.dtype, (None,) * x.ndim)
        chance = af.placeholder("float32", ()) if feeds else rate
        y = af.dropout(given, chance, seed=5)
        assert y.dtype == x.dtype
        grad = af.gradients(af.sum(y), given)
    async with af.Session(graph) as session:
        got, slope = await session.run([y, grad], {given: x, **({chance: np.float32(rate)} if feeds else {})})
    return np.asarray(got), np.asarray(slope)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
async def test_what_stays_is_scaled(dtype: str) -> None:
    x = np.ones((40, 25), as_dtype(dtype))
    got, grad = await values(0.25, x)
    kept = got != 0
    np.testing.assert_allclose(got[kept].astype("float64"), 4 / 3, rtol=1e-2 if x.dtype.itemsize == 2 else 1e-6)
    assert 0.7 < kept.mean() < 0.8
    assert (grad == got).all()


@pytest.mark.parametrize("feeds", [False, True])
async def test_ends_of_the_range(feeds: bool) -> None:
    x = np.linspace(-1, 1, 8, dtype="float32")
    got, grad = await values(0.0, x, feeds=feeds)
    assert (got == x).all()
    assert (grad == 1).all()
    got, grad = await values(1.0, x, feeds=feeds)
    assert not got.any()
    assert not grad.any()


async def test_shapes() -> None:
    for shape in ((), (0,), (2, 0, 3)):
        got, grad = await values(0.5, np.ones(shape, "float32"))
        assert got.shape == grad.shape == shape


async def test_each_run_drops_others() -> None:
    with af.Graph(seed=1) as graph:
        y = af.dropout(af.ones(64), 0.5)
    async with af.Session(graph) as session:
        first, second = await session.run(y), await session.run(y)
    assert not np.array_equal(first, second)


def test_errors() -> None:
    with af.Graph():
        x = af.ones(3)
        for rate in (-0.1, 1.5, np.float32(2)):
            with pytest.raises(af.GraphError, match="rate lies from 0 to 1"):
                af.dropout(x, rate)
        with pytest.raises(af.ShapeError, match="rate is a scalar"):
            af.dropout(x, [0.5, 0.5])
        with pytest.raises(af.DTypeError, match="takes floats"):
            af.dropout([1, 2], 0.5)
