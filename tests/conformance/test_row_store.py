"""Rows appended by a loop and read by later iterations, with gradients, wherever the loop runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

CHILDREN = np.array([[0, 1], [2, 2], [4, 3], [5, 0], [7, 6]])
"""Of rows 4 to 8: some have two parents, one is both children of another."""
STARTS = np.array([4, 6, 8, 9])


def embedded(x: af.Tensor, w: af.Tensor) -> af.Tensor:
    """The states of a graph, level by level."""
    children, starts = af.constant(CHILDREN), af.constant(STARTS)

    def level(i: af.Tensor, store: af.RowStore) -> tuple[af.Tensor, af.RowStore]:
        start, stop = starts[i], starts[i + 1]
        below = store.take(children[start - 4 : stop - 4])
        return i + 1, store.append(af.tanh(af.matmul(af.reshape(below, (-1, 6)), w)))

    store = af.RowStore(x.dtype, (3,)).append(x)
    return af.while_loop(lambda i, _: i < 3, level, (0, store))[1].stack()


def by_hand(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    rows = list(x)
    for left, right in CHILDREN:
        rows.append(np.tanh(np.concatenate([rows[left], rows[right]]) @ w))
    return np.array(rows)


@pytest.fixture
def values() -> list[np.ndarray]:
    rng = np.random.default_rng(80)
    return [rng.normal(size=(4, 3)), rng.normal(size=(6, 3))]


async def test_states_of_a_graph(graph: af.Graph, run: Run, values: list[np.ndarray]) -> None:
    x, w = af.placeholder("float64", (None, 3)), af.placeholder("float64", (6, 3))
    np.testing.assert_allclose(await run(embedded(x, w), dict(zip((x, w), values, strict=True))), by_hand(*values))


@pytest.mark.slow
async def test_their_gradients(graph: af.Graph, run: Run, values: list[np.ndarray]) -> None:
    """Held against differences: along one direction, to the second order."""
    x, w = af.placeholder("float64", (None, 3)), af.placeholder("float64", (6, 3))
    grads = af.gradients(af.sum(embedded(x, w) ** 2), [x, w])
    second = af.gradients(sum(af.sum(af.sin(grad)) for grad in grads), [x, w])
    rng = np.random.default_rng(81)
    along = [rng.normal(size=value.shape) for value in values]
    feeds = [{x: values[0] + h * along[0], w: values[1] + h * along[1]} for h in (-1e-5, 0.0, 1e-5)]
    before, (first, again), after = [await run((grads, second), fed) for fed in feeds]

    def loss(fed: dict[af.Tensor, np.ndarray]) -> float:
        return float((by_hand(fed[x], fed[w]) ** 2).sum())

    def slope(found: Any) -> float:
        return float(sum((grad * direction).sum() for grad, direction in zip(found, along, strict=True)))

    def sines(found: Any) -> float:
        return float(sum(np.sin(grad).sum() for grad in found))

    assert slope(first) == pytest.approx((loss(feeds[2]) - loss(feeds[0])) / 2e-5, rel=1e-5)
    assert slope(again) == pytest.approx((sines(after[0]) - sines(before[0])) / 2e-5, rel=1e-5)


async def test_jacobians_and_hessians_of_a_recomputed_loop(graph: af.Graph, run: Run) -> None:
    """All rows of the gradient share a store: the piece is run again once."""
    x = af.placeholder("float64", (3,))

    def piece(x: af.Tensor) -> af.Tensor:
        def body(i: af.Tensor, store: af.RowStore) -> tuple[af.Tensor, af.RowStore]:
            return i + 1, store.append(af.reshape(x[i] ** 3, (1, 1)))

        return af.reshape(af.while_loop(lambda i, _: i < 3, body, (0, af.RowStore(x.dtype, (1,))))[1].stack(), (3,))

    y = af.recompute(piece)(x)
    jacobian, hessian = af.jacobian(y, x), af.hessian(af.sum(y**2), x)
    value = np.array([1.0, 2.0, 3.0])
    found, second = await run((jacobian, hessian), {x: value})
    assert np.allclose(found, np.diag(3 * value**2))
    assert np.allclose(second, np.diag(30 * value**4))


async def test_a_store_of_each_row_is_refused_by_vmap_and_not_by_map_fn(graph: af.Graph, run: Run) -> None:
    def one(x: af.Tensor) -> af.Tensor:
        return af.RowStore(x.dtype, (2,)).append(af.reshape(x, (1, 2))).stack()

    x = af.constant([[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(af.GraphError, match="a store of rows is filled in the order of one program"):
        af.vmap(one)(x)
    assert np.array_equal(await run(af.map_fn(one, x)), [[[1.0, 2.0]], [[3.0, 4.0]]])
