"""Derivatives of choice and of sorting against central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values


def sample(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# -- choice ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "x1", "x2"),
    [((2, 3), (2, 3), (2, 3)), ((2, 1), (3,), ()), ((), (2, 3), (1, 3)), ((4, 2, 3), (3,), (2, 1)), ((0, 3), (3,), ())],
)
def test_where(condition: tuple[int, ...], x1: tuple[int, ...], x2: tuple[int, ...]) -> None:
    chosen = np.asarray(sample(*condition)) > 0
    values = np.asarray(sample(*x1, seed=1)), np.asarray(sample(*x2, seed=2))
    assert_derivatives(lambda c, x, y: af.square(af.where(c, x, y)), chosen, *values, order=2)


def test_where_promotes() -> None:
    chosen = np.array([True, False])
    none, narrow, wide = gradients_at(af.where, chosen, np.ones(2, np.float32), np.ones(2), grad=[[3.0, 4.0]])
    assert none is None
    assert narrow is not None and wide is not None
    assert (narrow.dtype, wide.dtype) == (np.float32, np.float64)
    assert (narrow.tolist(), wide.tolist()) == ([3.0, 0.0], [0.0, 4.0])


def test_unchosen_operands_get_zero_even_of_an_infinite_gradient() -> None:
    """The safe square root: its slope at 0 is infinite."""
    _, first, second = gradients_at(af.where, np.array([True, False]), np.ones(2), np.ones(2), grad=[[np.inf, np.nan]])
    assert first is not None and second is not None
    assert first.tolist() == [np.inf, 0.0]
    assert second[0] == 0.0
    assert np.isnan(second[1])


def test_only_the_condition_is_kept() -> None:
    assert kept_values(af.where, sample(3) > 0, sample(3), sample(3)) == {"x0"}


# -- sorting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("stable", [False, True])
def test_sort(axis: int, descending: bool, stable: bool) -> None:
    x = np.random.default_rng(0).permutation(12).reshape(3, 4) / 4
    assert_derivatives(lambda x: af.square(af.sort(x, axis=axis, descending=descending, stable=stable)), x, order=2)


def test_sort_of_nothing_and_of_one() -> None:
    assert_derivatives(lambda x: af.square(af.sort(x)), sample(0), order=2)
    assert_derivatives(lambda x: af.square(af.sort(x, axis=0)), sample(1, 3), order=2)


def test_equal_elements_keep_their_order() -> None:
    x = np.array([2.0, 1.0, 2.0, 1.0])
    (grad,) = gradients_at(af.sort, x, grad=[[1.0, 2.0, 3.0, 4.0]])
    assert grad is not None
    assert grad.tolist() == [3.0, 1.0, 4.0, 2.0]
    (grad,) = gradients_at(lambda x: af.sort(x, descending=True), x, grad=[[1.0, 2.0, 3.0, 4.0]])
    assert grad is not None
    assert grad.tolist() == [1.0, 3.0, 2.0, 4.0]


# -- what has no derivative ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        af.argmax,
        af.argmin,
        af.argsort,
        lambda x: af.nonzero(x)[0],
        af.count_nonzero,
        lambda x: af.searchsorted(x, x),
        lambda x: af.unique_counts(x).counts,
    ],
)
def test_nothing_flows_through_positions_and_counts(build: Any) -> None:
    for how in ("all", "rank"):
        assert gradients_at(lambda x: af.astype(build(x), "float64"), np.array([1.0, 2.0, 4.0]), known=how) == [None]
