from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import linalg as la
from tests.autodiff.sweep import assert_derivatives, gradients_at
from tests.ops.against_numpy import compare, sample

X = np.random.default_rng(1).normal(size=(2, 3, 4))


@pytest.mark.parametrize("ord", [2, 1, 0, 3, 2.5, math.inf, -math.inf, -1])
def test_vector_norm(evaluate: Any, ord: float) -> None:
    for x in (X, X + 1j * X[::-1]):
        for axis in (None, 0, -1, (0, 2)):
            for keepdims in (False, True):
                over: dict[str, Any] = {"axis": axis, "keepdims": keepdims}
                want = np.linalg.vector_norm(x, ord=ord, **over)
                compare(
                    evaluate, lambda t, o=over: la.vector_norm(t, ord=ord, **o), want, x, exact=False, known=("rank",)
                )


def test_vector_norm_of_other_dtypes_and_nothing(evaluate: Any) -> None:
    compare(evaluate, la.vector_norm, np.float64(5), np.array([3, 4]))
    compare(evaluate, la.vector_norm, np.float32(5), np.array([3, 4], "float32"))
    compare(evaluate, la.vector_norm, np.float64(0), np.zeros((0, 2)))
    compare(evaluate, la.vector_norm, np.float64(2), np.float64(-2))


@pytest.mark.parametrize("ord", ["fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf])
def test_matrix_norm(evaluate: Any, ord: Any) -> None:
    for x in (X, X[0], X + 1j * X[::-1]):
        for keepdims in (False, True):
            want = np.linalg.matrix_norm(x, ord=ord, keepdims=keepdims)
            compare(evaluate, lambda t, k=keepdims: la.matrix_norm(t, ord=ord, keepdims=k), want, x, exact=False)


def test_products(evaluate: Any) -> None:
    for dtype in ("int8", "float32", "complex64"):
        x, y = sample((3,), dtype), sample((2,), dtype, 1)
        compare(evaluate, la.outer, np.outer(x, y), x, y, known=("all", "rank"))
        a, b = sample((2, 3), dtype), sample((4, 1, 3), dtype, 2)
        compare(evaluate, la.cross, np.cross(a, b), a, b)
        compare(evaluate, lambda s, t: la.cross(s, t, axis=0), np.cross(a.T, b[:2, 0].T, axis=0), a.T, b[:2, 0].T)
    compare(evaluate, la.outer, np.zeros((0, 2)), np.zeros(0), np.zeros(2), known=("all", "rank"))
    compare(evaluate, la.cross, np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(3))


@pytest.mark.slow
def test_derivatives() -> None:
    for ord in (2, 1, 3, math.inf):
        assert_derivatives(lambda t, o=ord: la.vector_norm(t, ord=o, axis=-1), X, known=("all",))
    assert_derivatives(la.vector_norm, X[0] + 1j * X[1], order=2, known=("all", "nothing"))
    for kind in ("fro", "nuc", 1, 2, -2):
        assert_derivatives(lambda t, o=kind: la.matrix_norm(t, ord=o), X[:, :2], known=("all",))
    for scale in (1, 1 + 2j):
        a, b = X[0, :2, :3] * scale, X[1, :1, 1:] * scale
        assert_derivatives(la.cross, a, b, order=2)
        assert_derivatives(la.outer, a[0], b[0], known=("all", "rank"))


def test_the_gradient_at_0_is_0() -> None:
    (grad,) = gradients_at(la.vector_norm, np.zeros(3), grad=[1.0])
    assert grad is not None
    assert grad.tolist() == [0.0, 0.0, 0.0]


def test_errors(evaluate: Any) -> None:
    with af.Graph():
        with pytest.raises(af.GraphError, match="ord is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got 3"):
            la.matrix_norm(X, ord=3)
        with pytest.raises(af.ShapeError, match="takes matrices, of rank 2 or more"):
            la.matrix_norm(X[0, 0])
        with pytest.raises(af.ShapeError, match="outer: takes vectors"):
            la.outer(X, X)
        with pytest.raises(af.ShapeError, match="vectors have 3 elements, along axis -1"):
            la.cross(X, X)
        with pytest.raises(IndexError, match="axis 5"):
            la.cross(X, X, axis=5)
        x = af.placeholder("float64", (None,))
        y = la.cross(x, x)
    with pytest.raises(af.ShapeError, match=r"parts of \[1, 1, 1\] do not fill an extent of 2"):
        evaluate(y, {x: np.ones(2)})


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
async def test_distances_of_rows(ord: float) -> None:
    rng = np.random.default_rng(3)
    one, other = rng.normal(size=(2, 4, 3)), rng.normal(size=(5, 3))
    one[0, 1] = other[2]  # distance 0
    with af.Graph() as graph:
        x, y = af.placeholder("float64", (None, None, 3)), af.placeholder("float64", (None, 3))
        distances = af.cdist(x, y, ord=ord)
        slope = af.gradients(af.sum(distances), [x])[0]
    async with af.Session(graph) as session:
        found, gradient = await session.run([distances, slope], {x: one, y: other})
    want = np.linalg.norm(one[..., :, None, :] - other[..., None, :, :], ord=ord, axis=-1)
    np.testing.assert_allclose(found, want, rtol=1e-12)
    assert found.shape == (2, 4, 5) and np.isfinite(gradient).all()


def test_distances_need_matrices_of_rows_of_one_length() -> None:
    with af.Graph():
        with pytest.raises(af.ShapeError, match="cdist takes matrices"):
            af.cdist(af.placeholder("float64", (3,)), af.placeholder("float64", (2, 3)))
        with pytest.raises(af.ShapeError):
            af.cdist(af.placeholder("float64", (2, 4)), af.placeholder("float64", (2, 3)))
