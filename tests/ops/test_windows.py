"""`dynamic_slice`: parts of fixed extents at places that only the run knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare


@pytest.mark.parametrize("starts", [(0, 0), (2, 1), (3, 0)])
def test_windows_are_numpys_slices(evaluate: Any, starts: tuple[int, int]) -> None:
    x = np.arange(15).reshape(5, 3)
    i, j = starts
    want = x[i : i + 2, j : j + 2]
    compare(evaluate, lambda x, i, j: af.dynamic_slice(x, [i, j], (2, 2)), want, x, np.int64(i), np.int8(j))
    compare(evaluate, lambda x, at: af.dynamic_slice(x, at, (2, 2)), want, x, np.array(starts), known=("all",))


def test_extents_are_known_whatever_else_is() -> None:
    with af.Graph():
        x, i = af.placeholder("float32"), af.placeholder("int64", ())
        assert af.dynamic_slice(x, [i, 0], [2, 8]).shape == (2, 8)
        start = af.zeros((2, 8), dtype="float32")
        _, kept = af.while_loop(
            lambda t, _: t < 3, lambda t, _: (t + 1, af.dynamic_slice(x, [t, 0], [2, 8])), (0, start)
        )
        assert kept.shape == (2, 8)


@pytest.mark.parametrize("start", [-1, 4])
def test_a_window_that_leaves_its_tensor_fails_the_run(evaluate: Any, start: int) -> None:
    with af.Graph():
        x, i = af.placeholder("float64", (None,)), af.placeholder("int64", ())
        with pytest.raises(IndexError, match=rf"a window of 2 from {start} on leaves axis 0 of \[5\]"):
            evaluate(af.dynamic_slice(x, [i], [2]), {x: np.ones(5), i: np.int64(start)})


def test_what_does_not_fit_is_refused() -> None:
    with af.Graph():
        x = af.placeholder("float64", (5, 3))
        refused: list[tuple[Any, Any, str]] = [
            ([0], [2], r"a start and a size for each axis of \[5,3\], got 1"),
            ([0, 0], [2], r"a size for each start; got 2 starts"),
            ([0, 0], [2, 4], r"a window of 4 does not fit axis 1 of \[5,3\]"),
            ([0, [0, 0]], [2, 2], r"a start is an integer scalar"),
            (af.placeholder("int64", (None,)), [2, 2], r"one vector of known length"),
        ]
        for starts, sizes, message in refused:
            with pytest.raises(af.ShapeError, match=message):
                af.dynamic_slice(x, starts, sizes)


def test_the_gradient_goes_back_to_its_place() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    assert_derivatives(lambda x: af.square(af.dynamic_slice(x, [af.constant(2), 1], [2, 2])), x, order=2)
