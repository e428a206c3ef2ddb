"""Derivatives of reductions and of running sums and products against central differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.op import derivative_of
from asyncflow.graph.values.dtypes import bfloat16
from asyncflow.ops.reductions.recurrence import linear_recurrence
from asyncflow.ops.reductions.statistical import STD
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values

if TYPE_CHECKING:
    from collections.abc import Callable

AXES = [None, 0, 1, -1, (0, 2), (-1, 0), (0, 1, 2), ()]
SUMS = [af.sum, af.mean, af.prod]


def sample(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def plane(*shape: int) -> np.ndarray:
    return sample(*shape) + 1j * sample(*shape, seed=1)


def distinct(*shape: int) -> np.ndarray:
    """No two elements are near one another."""
    values = np.random.default_rng(2).permutation(int(np.prod(shape)))
    return (values.reshape(shape) - 3.0) / 4


def squared(build: Callable[..., af.Tensor]) -> Callable[..., af.Tensor]:
    """The output squared, so that the second derivative is not zero."""
    return lambda *inputs: af.square(build(*inputs))


# -- sums, means and products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("reduce", SUMS)
def test_sums(reduce: Any, axis: Any, keepdims: bool) -> None:
    assert_derivatives(squared(lambda x: reduce(x, axis=axis, keepdims=keepdims)), sample(2, 3, 2), order=2)


@pytest.mark.parametrize("reduce", SUMS)
def test_sums_of_scalars_of_nothing_and_of_complex_numbers(reduce: Any) -> None:
    assert_derivatives(squared(reduce), np.float64(1.5), order=2)
    assert_derivatives(squared(lambda x: reduce(x, axis=1)), sample(0, 3), order=2)
    assert_derivatives(lambda x: reduce(x, axis=0), plane(3, 2), order=2)


def test_sums_over_nothing() -> None:
    for reduce in SUMS:
        (grad,) = gradients_at(lambda x, f=reduce: f(x, axis=0), np.ones((0, 3)), grad=[np.ones(3)])
        assert grad is not None
        assert grad.shape == (0, 3)


@pytest.mark.parametrize("reduce", [af.sum, af.prod, af.cumulative_sum, af.cumulative_prod])
def test_sums_in_another_dtype(reduce: Any) -> None:
    (grad,) = gradients_at(lambda x: reduce(x, dtype="float64"), np.array([2, 3], np.float32))
    assert grad is not None
    assert grad.dtype == np.float32
    (grad,) = gradients_at(lambda x: reduce(x, dtype="complex128"), np.array([2.0, 3.0]))
    assert grad is not None
    assert grad.dtype == np.float64
    assert gradients_at(lambda x: reduce(x, dtype="float64"), np.array([2, 3])) == [None]


def test_means_of_integers_have_no_gradient() -> None:
    for reduce in (af.mean, af.var, af.std):
        assert gradients_at(lambda x, f=reduce: f(x), np.array([2, 3])) == [None]


@pytest.mark.parametrize("known", ["all", "nothing"])
def test_means_of_many_small_floats(known: str) -> None:
    """float16 cannot count them, and bfloat16 stops at 256."""
    for dtype in (np.dtype("float16"), bfloat16()):
        (grad,) = gradients_at(af.mean, np.ones(70000, dtype), grad=[70000 / 64], known=known)
        assert grad is not None
        assert grad.dtype == dtype
        np.testing.assert_allclose(grad.astype(float), 1 / 64, rtol=0.01)


@pytest.mark.parametrize("zeros", [0, 1, 2, 3])
@pytest.mark.parametrize("axis", [None, 0, (0, 1), (-1, 0)], ids=str)
def test_products_with_zeros(axis: Any, zeros: int) -> None:
    x = sample(2, 4)
    x.reshape(-1)[[1, 5, 6][:zeros]] = 0
    assert_derivatives(lambda x: af.prod(x, axis=axis), x, order=3)


def test_products_of_others() -> None:
    (grad,) = gradients_at(af.prod, np.array([0.0, 2.0, 3.0]), grad=[1.0])
    assert grad is not None
    assert grad.tolist() == [6.0, 0.0, 0.0]
    (grad,) = gradients_at(af.prod, np.array([0.0, 2.0, 0.0]), grad=[1.0])
    assert grad is not None
    assert grad.tolist() == [0.0, 0.0, 0.0]


# -- spread ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [axis for axis in AXES if axis != ()], ids=str)
@pytest.mark.parametrize("reduce", [af.var, af.std])
def test_spread(reduce: Any, axis: Any, keepdims: bool) -> None:
    assert_derivatives(squared(lambda x: reduce(x, axis=axis, keepdims=keepdims)), sample(2, 3, 3), order=2, rtol=1e-4)


@pytest.mark.parametrize("reduce", [af.var, af.std])
def test_spread_with_a_correction_and_of_complex_numbers(reduce: Any) -> None:
    assert_derivatives(lambda x: reduce(x, axis=-1, correction=1), sample(2, 3), order=2, rtol=1e-4)
    assert_derivatives(lambda x: reduce(x, correction=0.5), sample(5), order=2, rtol=1e-4)
    assert_derivatives(lambda x: reduce(x, axis=0), plane(3, 2), order=2, rtol=1e-4)
    assert_derivatives(lambda x: reduce(x, axis=1), sample(0, 3))


def test_equal_elements_have_a_standard_deviation_of_slope_zero() -> None:
    (grad,) = gradients_at(lambda x: af.std(x, axis=1), np.array([[2.0, 2.0], [1.0, 3.0]]), grad=[[1.0, 1.0]])
    assert grad is not None
    assert grad.tolist() == [[0.0, 0.0], [-0.5, 0.5]]


def test_equal_elements_have_a_standard_deviation_of_curvature_zero() -> None:
    def slope(x: af.Tensor) -> af.Tensor:
        rule = derivative_of(STD)
        assert rule is not None
        (grad,) = rule(af.std(x, axis=1).node, af.constant([1.0, 1.0]))
        assert grad is not None
        return grad

    (grad,) = gradients_at(slope, np.array([[2.0, 2.0], [1.0, 3.0]]), grad=[[[1.0, 2.0], [0.0, 0.0]]])
    assert grad is not None
    assert grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


# -- extremes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("reduce", [af.max, af.min])
def test_extremes(reduce: Any, axis: Any, keepdims: bool) -> None:
    assert_derivatives(squared(lambda x: reduce(x, axis=axis, keepdims=keepdims)), distinct(2, 3, 2), order=2)


@pytest.mark.parametrize("reduce", [af.max, af.min])
def test_extremes_of_scalars_and_of_nothing(reduce: Any) -> None:
    assert_derivatives(squared(reduce), np.float64(1.5), order=2)
    assert_derivatives(squared(lambda x: reduce(x, axis=1)), sample(0, 3))


def test_equal_extremes_share() -> None:
    x = np.array([[2.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    (grad,) = gradients_at(lambda x: af.max(x, axis=1), x, grad=[[1.0, 6.0]])
    assert grad is not None
    assert grad.tolist() == [[0.5, 0.0, 0.5], [2.0, 2.0, 2.0]]
    (grad,) = gradients_at(af.min, x, grad=[3.0])
    assert grad is not None
    assert grad.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


def test_other_elements_are_not_touched_by_infinities_and_nans() -> None:
    (grad,) = gradients_at(lambda x: af.max(x, axis=1), np.array([[1.0, 2.0], [3.0, np.nan]]), grad=[[np.inf, 1.0]])
    assert grad is not None
    assert grad.tolist() == [[0.0, np.inf], [0.0, 0.0]]


# -- running sums and products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("include_initial", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("running", [af.cumulative_sum, af.cumulative_prod])
def test_running(running: Any, axis: int, include_initial: bool) -> None:
    build = squared(lambda x: running(x, axis=axis, include_initial=include_initial))
    assert_derivatives(build, sample(3, 4), order=2)
    assert_derivatives(build, sample(0, 1))


@pytest.mark.parametrize("running", [af.cumulative_sum, af.cumulative_prod])
def test_running_along_a_vector_and_of_complex_numbers(running: Any) -> None:
    assert_derivatives(squared(running), sample(4), order=2, known=("all", "rank"))
    assert_derivatives(lambda x: running(x, axis=0), plane(3, 2), order=2)


@pytest.mark.parametrize("include_initial", [False, True])
def test_running_products_with_zeros(include_initial: bool) -> None:
    x = np.array([[1.5, 0.0, 2.0, -1.0], [0.0, 2.0, 0.0, 3.0]])
    assert_derivatives(lambda x: af.cumulative_prod(x, axis=1, include_initial=include_initial), x, order=3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
def test_linear_recurrence(axis: int, reverse: bool) -> None:
    build = squared(lambda x, factors: linear_recurrence(x, factors, axis=axis, reverse=reverse))
    assert_derivatives(build, sample(3, 4), sample(3, 4, seed=1), order=2)
    assert_derivatives(lambda x, f: linear_recurrence(x, f, axis=axis, reverse=reverse), plane(2, 3), plane(2, 3)[::-1])


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_only_shapes_are_kept_of_sums() -> None:
    assert kept_values(lambda x: af.sum(x, axis=1), sample(2, 3)) == set()
    assert kept_values(lambda x: af.mean(x, axis=1), sample(2, 3)) == set()
    assert kept_values(lambda x: af.cumulative_sum(x, axis=1), sample(2, 3)) == set()
    assert kept_values(lambda x: af.var(x, axis=1), sample(2, 3)) == {"x0"}
    assert kept_values(lambda x: af.max(x, axis=1), sample(2, 3)) == {"x0", "max"}
