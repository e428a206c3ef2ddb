from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.matrices.diagonals import diag, diagonal, diagonal_matrix, trace
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import NUMBERS, compare, sample

SHAPES = [(2, 3), (3, 2), (3, 3), (0, 3), (0, 0), (2, 3, 4), (0, 2, 2), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_diagonal_and_trace(evaluate: Any, shape: tuple[int, ...]) -> None:
    for offset in (-4, -1, 0, 1, 2):
        for dtype in ("bool", "int8", "float32", "complex64"):
            x = sample(shape, dtype)
            expected = np.diagonal(x, offset, -2, -1)
            compare(evaluate, lambda t, k=offset: diagonal(t, offset=k), expected, x)
            compare(evaluate, lambda t, k=offset: trace(t, offset=k), np.trace(x, offset, -2, -1), x)


def test_dtypes(evaluate: Any) -> None:
    for dtype in (*NUMBERS, ml_dtypes.bfloat16):
        x = sample((2, 2), dtype)
        compare(evaluate, diag, np.diagonal(x), x, known=("all", "rank"))
        compare(evaluate, diag, np.diag(x[0]), x[0], known=("all", "rank"))
    x = sample((2, 2), "int8")
    compare(evaluate, lambda t: trace(t, dtype="int8"), np.trace(x, dtype="int8"), x)


@pytest.mark.parametrize("extent", [0, 1, 3])
def test_diag_of_vectors(evaluate: Any, extent: int) -> None:
    x = sample((extent,), "float32")
    for k in (-2, 0, 1):
        compare(evaluate, lambda t, k=k: diag(t, k=k), np.diag(x, k), x, known=("all", "rank"))


def test_diagonal_matrix_of_other_shapes(evaluate: Any) -> None:
    x = sample((2, 2), "float64")
    for rows, columns, offset in ((2, 5, 1), (4, 2, -1), (4, 2, -2), (2, 3, 0)):
        build = lambda t, r=rows, c=columns, k=offset: diagonal(diagonal_matrix(t, r, c, offset=k), offset=k)  # noqa: E731
        compare(evaluate, build, x, x)


def test_derivatives() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 2))
    for offset in (-1, 0, 1, 3):
        assert_derivatives(lambda t, k=offset: af.square(diagonal(t, offset=k)), x, order=2)
        assert_derivatives(lambda t, k=offset: trace(t, offset=k), x[0])
    assert_derivatives(lambda t: af.square(diag(t, k=-1)), x[0, 0], order=2, known=("all", "rank"))
    assert_derivatives(diag, x[0] + 1j * x[1], known=("all", "rank"))


def test_errors() -> None:
    with af.Graph():
        with pytest.raises(af.ShapeError, match="diagonal: takes a matrix or a stack of them, rank 2 or more"):
            diagonal(af.ones(3))
        with pytest.raises(af.ShapeError, match="diag: takes a vector or a matrix"):
            diag(af.ones((2, 2, 2)))
        with pytest.raises(af.ShapeError, match="diag: takes a vector or a matrix"):
            diag(af.placeholder("float32"))
        with pytest.raises(af.ShapeError, match="has 2 elements, not"):
            diagonal_matrix(af.ones(3), 2, 2, offset=0)


def test_a_length_that_does_not_fit_fails_the_run(evaluate: Any) -> None:
    with af.Graph():
        x = af.placeholder("float32", (None,))
        y = diagonal_matrix(x, 2, 2, offset=0)
    with pytest.raises(ValueError, match="diagonal 0 of 2 x 2 elements has 2, not 3"):
        evaluate(y, {x: np.ones(3, np.float32)})
