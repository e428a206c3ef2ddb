"""Functions with a gradient of their own, over rows: their gradient of one row holds for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(2)
X = RNG.normal(size=(5, 3))
W = RNG.normal(size=(3, 3))


@af.custom_gradient
def clipped(x: Any, *, limit: float = 0.25) -> Any:
    return x * x, lambda grad: af.clip(grad, -limit, limit)


@af.custom_gradient
def product(pair: Any, w: Any) -> Any:
    """A function whose gradient uses nodes of the function, has gradients itself, and differs from the true ones."""
    y = af.tanh(pair["a"] @ w)

    def back(slope: Any, count: Any) -> Any:
        assert count is None
        own = slope * (1.0 - y * y)
        return {"a": own @ af.permute_dims(w, (1, 0)), "b": y * 0.5}, af.linalg.outer(pair["a"], own) * 3.0

    return (y + pair["b"], af.argmax(y)), back


def plain(x: Any, w: Any) -> Any:
    y, place = product({"a": x, "b": x * 2.0}, w)
    return clipped(y) + af.astype(place, "float64") + clipped(w)[0]


def in_branch(x: Any, w: Any) -> Any:
    return af.cond(x[0] > 0.0, lambda: plain(x, w), lambda: clipped(x, limit=0.1))


def in_loop(x: Any, w: Any) -> Any:
    return af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, plain(y * 0.5, w)), (0, x))[1]


def in_own_loop(x: Any, w: Any) -> Any:
    count = af.astype(af.abs(x[0]) * 4, "int64")
    return af.while_loop(lambda i, y: i < count, lambda i, y: (i + 1, af.tanh(plain(y, w))), (0, x))[1]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("body", [plain, in_branch, in_loop, in_own_loop])
async def test_gradients_of_rows_follow_the_functions_rule(body: Any, inside: bool) -> None:
    """Asked for of all rows, or in the body of each."""
    found = []
    with af.Graph() as graph:
        x, w = af.constant(X), af.constant(W)
        for lift in (True, False):
            if inside:
                derived = lambda row: af.gradients(af.sum(body(row, w) ** 2), [row, w])  # noqa: E731
                y = af.sum(sum(map(af.sum, af.map_fn(derived, x, lift=lift))))
            else:
                y = af.sum(af.map_fn(lambda row: body(row, w), x, lift=lift) ** 2)
            found.append((y, *af.gradients(y, [x, w])))
    async with af.Session(graph) as session:
        got, want = await session.run(found)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


async def test_rows_of_rows() -> None:
    with af.Graph() as graph:
        x = af.constant(np.stack([X, -X]))
        y = af.vmap(af.vmap(lambda row: in_branch(row, af.constant(W))))(x)
        each = [in_branch(x[i, j], af.constant(W)) for i in range(2) for j in range(5)]
        slopes = [af.gradients(af.sum(of), [x])[0] for of in (y, af.stack(each))]
    async with af.Session(graph) as session:
        got, want = await session.run(slopes)
    np.testing.assert_allclose(got, want)


def test_a_gradient_that_does_not_fit_is_refused_where_it_was_written() -> None:
    wrong = af.custom_gradient(lambda x: (x * 2.0, af.sum))
    with af.Graph(), pytest.raises(af.ShapeError, match=r"(?s)is to have shape \[3\].*test_lifting_custom_gradient"):
        af.vmap(wrong)(af.constant(X))


def test_a_gradient_that_rows_cannot_share_is_refused_when_it_is_asked_for() -> None:
    wrong = af.custom_gradient(lambda x: (x * 2.0, lambda grad: grad + af.sum(af.nonzero(x)[0])))
    with af.Graph():
        x = af.constant(X)
        y = af.vmap(wrong)(x)
        with pytest.raises(
            af.GraphError, match=r"grad_fn of .* cannot be computed for several rows at once: .*nonzero"
        ):
            af.gradients(af.sum(y), [x])


async def test_a_gradient_that_differentiates_a_loop_of_the_row() -> None:
    """The gradient adds saved values to the loop, which is lifted after that; to a loop around the function too."""

    @af.custom_gradient
    def twice(a: Any) -> Any:
        y = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, af.sin(v) * a), (0, a))[1]
        return y, lambda grad: 2.0 * af.gradients(y, a, grad_ys=grad)

    found = []
    with af.Graph() as graph:
        x = af.constant([0.5, -1.0, 2.0])
        for lift in (True, False):
            y = af.map_fn(
                lambda row: af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, twice(v)), (0, row))[1], x, lift=lift
            )
            found.append([y, af.gradients(y, x)])
    async with af.Session(graph) as session:
        one, other = await session.run(found)
    np.testing.assert_allclose(one, other, rtol=1e-14)
