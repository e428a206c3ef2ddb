"""Jacobians, Hessians and products with them, against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(3)
X, W, V = RNG.normal(size=(2, 3)), RNG.normal(size=(3, 2)), RNG.normal(size=(2, 3))


def _program(x: Any, w: Any) -> Any:
    """With a branch and a loop in it, whose gradients are loops with stores."""
    h = af.cond(af.sum(w) > -100.0, lambda: af.tanh(x @ w), lambda: x @ w)
    return af.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * h + af.sum(x)), (0, h))[1]


def _numpy(x: Any, w: Any) -> Any:
    h = y = np.tanh(x @ w)
    for _ in range(2):
        y = y * h + x.sum()
    return y


def _differences(f: Any, x: Any, step: float = 1e-5) -> Any:
    found = []
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        found.append((f(x + moved) - f(x - moved)) / (2 * step))
    return np.moveaxis(
        np.array(found).reshape(*x.shape, *np.shape(f(x))), tuple(range(x.ndim)), tuple(range(-x.ndim, 0))
    )


@pytest.mark.parametrize("known", [True, False])
async def test_jacobians_are_the_differences(known: bool) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", X.shape if known else (None, None))
        w = af.constant(W)
        found = af.jacobian(_program(x, w), {"x": x, "w": w})
    async with af.Session(graph) as session:
        got = await session.run(found, {x: X})
    np.testing.assert_allclose(got["x"], _differences(lambda x: _numpy(x, W), X), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(got["w"], _differences(lambda w: _numpy(X, w), W), rtol=1e-6, atol=1e-8)


async def test_hessians_and_products_with_them_are_the_differences() -> None:
    with af.Graph() as graph:
        x = af.constant(X)
        y = af.sum(af.tanh(x @ af.constant(W)) ** 3)
        whole, product = af.hessian(y, x), af.hvp(y, x, V)
        (slope,) = af.gradients([y], [x])
    async with af.Session(graph) as session:

        async def slope_at(at: Any) -> Any:
            return await session.run(slope, {x: at})

        hessian, times_v = await session.run((whole, product))
        step = 1e-5
        along = (await slope_at(X + step * V) - await slope_at(X - step * V)) / (2 * step)
    np.testing.assert_allclose(times_v, along, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(np.tensordot(hessian, V, axes=2), times_v, rtol=1e-10)
    np.testing.assert_allclose(hessian, np.transpose(hessian, (2, 3, 0, 1)), rtol=1e-10)


def test_second_derivatives_are_those_of_a_scalar() -> None:
    with af.Graph():
        x = af.constant(X)
        with pytest.raises(af.ShapeError, match=r"those of a scalar, not of .*; af.jacobian takes any shape"):
            af.hessian(x * x, x)
        with pytest.raises(af.ShapeError, match=r"the rank of .* is not known"):
            af.jacobian(af.placeholder("float64"), x)
