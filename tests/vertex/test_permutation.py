"""Rows that are brought into another order: gradients of any order, and over a row axis."""

from __future__ import annotations

import numpy as np

import asyncflow as af
from asyncflow.vertex.permutation import permuted

PLACES = np.array([2, 0, 3, 1])
INVERSE = np.argsort(PLACES)
X = np.random.default_rng(0).standard_normal((4, 3))
WEIGHTS = np.random.default_rng(1).standard_normal((4, 3))


def shuffled(x: af.Tensor) -> af.Tensor:
    return permuted(x, af.constant(PLACES), af.constant(INVERSE))


async def test_gradients_of_any_order_go_back_to_their_rows(graph: af.Graph) -> None:
    x = af.placeholder("float64", (None, 3))
    y = shuffled(x)
    (first,) = af.gradients(af.sum(y * y * y * WEIGHTS), [x])
    (second,) = af.gradients(af.sum(first * first), [x])
    assert y.shape == (4, 3)
    async with af.Session(graph) as session:
        rows, grad, of_grad = await session.run((y, first, second), {x: X})
    own = WEIGHTS[INVERSE]
    np.testing.assert_array_equal(rows, X[PLACES])
    np.testing.assert_allclose(grad, 3 * X**2 * own)
    np.testing.assert_allclose(of_grad, 36 * X**3 * own**2)


async def test_rows_of_each_row_of_many(graph: af.Graph) -> None:
    many = np.stack([X, 2 * X, X - 1])
    of_rows = af.vmap(lambda x: af.gradients(af.sum(shuffled(x * x) * WEIGHTS), [x])[0])(af.constant(many))
    async with af.Session(graph) as session:
        rows, grads = await session.run((af.vmap(shuffled)(af.constant(many)), of_rows))
    np.testing.assert_array_equal(rows, many[:, PLACES])
    np.testing.assert_allclose(grads, 2 * many * WEIGHTS[INVERSE])
