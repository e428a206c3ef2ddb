from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.reductions.quantile import quantile
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare, sample

X = np.random.default_rng(3).normal(size=(3, 4, 2))


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
@pytest.mark.parametrize("q", [0.0, 0.5, 0.37, 1.0])
def test_one_share(evaluate: Any, axis: int | None, q: float) -> None:
    compare(evaluate, lambda t: quantile(t, q, axis=axis), np.quantile(X, q, axis), X, exact=False)
    kept = np.quantile(X, q, axis, keepdims=True)
    compare(evaluate, lambda t: quantile(t, q, axis=axis, keepdims=True), kept, X, exact=False, known=("all", "rank"))


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_several_shares(evaluate: Any, axis: int | None) -> None:
    q = np.array([0.9, 0.0, 0.5])
    compare(
        evaluate, lambda t: quantile(t, q, axis=axis), np.quantile(X, q, axis), X, exact=False, known=("all", "rank")
    )
    kept = np.quantile(X, q, axis, keepdims=True)
    build = lambda t: quantile(t, q, axis=axis, keepdims=True)  # noqa: E731
    compare(evaluate, build, kept, X, exact=False, known=("all", "rank"))


def test_dtypes(evaluate: Any) -> None:
    for dtype in ("int8", "uint64", "float32", "float64"):
        x = sample((5,), dtype)
        expected = np.quantile(x, 0.5).astype("float32" if dtype == "float32" else "float64")
        compare(evaluate, lambda t: quantile(t, 0.5), expected, x)
    compare(evaluate, lambda t: quantile(t, 0.5), np.float16(3), np.arange(7, dtype="float16"))
    compare(evaluate, lambda t: quantile(t, 0.5), np.float64(2), np.float64(2))
    compare(evaluate, lambda t: quantile(t, 0.5, axis=1), np.zeros(0), np.zeros((0, 2)))


def test_nan(evaluate: Any) -> None:
    x = np.array([[1.0, np.nan, 0.0], [3.0, 1.0, 2.0]])
    compare(evaluate, lambda t: quantile(t, 0.5, axis=1), np.array([np.nan, 2.0]), x)
    compare(
        evaluate,
        lambda t, q: quantile(t, q, axis=1),
        np.array([np.nan, np.nan]),
        x,
        np.float64(1.5),
        known=("all", "rank"),
    )


def test_derivatives() -> None:
    assert_derivatives(lambda t: af.square(quantile(t, 0.3, axis=1)), X, order=2)
    assert_derivatives(lambda t: quantile(t, [0.3, 0.8], axis=0), X, known=("all", "rank"))
    assert_derivatives(quantile, X, np.float64(0.37), known=("all", "rank"))


def test_errors() -> None:
    with af.Graph():
        with pytest.raises(af.GraphError, match=r"q lies from 0 to 1, got 1\.5"):
            quantile(X, 1.5)
        with pytest.raises(af.GraphError, match="q lies from 0 to 1"):
            quantile(X, [0.5, -0.1])
        with pytest.raises(af.ShapeError, match="q is a scalar or a vector"):
            quantile(X, [[0.5]])
        with pytest.raises(af.ShapeError, match="nothing to choose from"):
            quantile(np.zeros((0, 2)), 0.5, axis=0)
        with pytest.raises(af.DTypeError, match="takes real numbers"):
            quantile(np.array([1j]), 0.5)
        with pytest.raises(IndexError, match="axis 3"):
            quantile(X, 0.5, axis=3)
        unknown = af.placeholder("float64")
        with pytest.raises(af.ShapeError, match="keepdims needs a known rank"):
            quantile(unknown, 0.5, keepdims=True)
        with pytest.raises(af.ShapeError, match="several shares need a known rank"):
            quantile(unknown, [0.5], axis=1)
