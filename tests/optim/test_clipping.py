"""Bounds for gradients, against NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

A = np.array([[3.0, 0.0], [0.0, -4.0]])
B = np.array([12.0])


async def test_by_value(run: Run) -> None:
    """Element by element; a nest stays a nest."""
    found = await run(af.optim.clip_by_value({"a": A, "b": (B,)}, -1, 5))
    np.testing.assert_array_equal(found["a"], np.clip(A, -1, 5))
    np.testing.assert_array_equal(found["b"][0], [5])


@pytest.mark.parametrize("limit", [1.0, 5.0, 100.0, np.float64(2), np.array(2.0)])
async def test_by_norm(run: Run, limit: Any) -> None:
    """Each gradient is clipped by itself: norms 5 and 12 end at the limit, and smaller ones stay as they are."""
    for found, given, norm in zip(await run(af.optim.clip_by_norm([A, B], limit)), (A, B), (5, 12), strict=True):
        np.testing.assert_allclose(found, given * min(1, limit / norm), rtol=1e-15)


@pytest.mark.parametrize("limit", [1.0, 13.0, 26.0])
async def test_by_global_norm(run: Run, limit: float) -> None:
    """All by one factor: together the norm is 13."""
    (a, b), norm = await run(af.optim.clip_by_global_norm((A, B), limit))
    assert norm == 13
    np.testing.assert_allclose(a, A * min(1, limit / 13), rtol=1e-15)
    np.testing.assert_allclose(b, B * min(1, limit / 13), rtol=1e-15)


async def test_norm_of_nothing_but_zeros(run: Run) -> None:
    (found,), norm = await run(af.optim.clip_by_global_norm([np.zeros(3)], 1.0))
    assert norm == 0
    np.testing.assert_array_equal(found, [0, 0, 0])


async def test_half_precision_does_not_overflow(run: Run) -> None:
    """300 squared is more than float16 holds."""
    (found,), norm = await run(af.optim.clip_by_global_norm([np.array([300, -400], np.float16)], 5.0))
    assert norm == 500
    assert norm.dtype == np.float32
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, [3, -4], rtol=2e-3)


@pytest.mark.parametrize("size", [1e20, 1e-30])
async def test_squares_that_float32_cannot_hold(run: Run, size: float) -> None:
    """Neither an infinite norm nor one of 0."""
    x = np.array([3 * size, -4 * size], np.float32)
    found, norm = await run(af.optim.clip_by_global_norm({"x": x}, size))
    np.testing.assert_allclose(norm, 5 * size, rtol=1e-6)
    assert norm.dtype == found["x"].dtype == np.float32
    np.testing.assert_allclose(found["x"], [0.6 * size, -0.8 * size], rtol=1e-6)
    np.testing.assert_allclose(await run(af.optim.clip_by_norm(x, size)), found["x"], rtol=1e-6)


@pytest.mark.parametrize("wrong", [[np.inf, 1.0], [np.nan, 1.0], [1e300, 1.0]], ids=["inf", "nan", "overflow"])
async def test_a_norm_that_is_not_finite(run: Run, wrong: list[float]) -> None:
    """Every gradient becomes not finite, so that training on zeros cannot go unnoticed."""
    (a, b), norm = await run(af.optim.clip_by_global_norm([np.array(wrong), np.ones(2)], 1.0))
    assert not np.isfinite(norm)
    assert np.isnan([*a, *b]).all()


def test_integers_are_refused() -> None:
    """Rounded to integers, a scaled gradient would be 0."""
    grads = [A, np.array([3, 4])]
    with pytest.raises(af.DTypeError, match=r"clip_by_value: takes gradients that are floats; got .*int64"):
        af.optim.clip_by_value(grads, -1, 1)
    with pytest.raises(af.DTypeError, match=r"clip_by_norm: takes gradients that are floats; got .*int64"):
        af.optim.clip_by_norm(grads, 1.0)
    with pytest.raises(af.DTypeError, match=r"clip_by_global_norm: takes gradients that are floats; got .*int64"):
        af.optim.clip_by_global_norm(grads, 1.0)


def test_none_stays_none() -> None:
    """As `gradients` gives it for what the loss does not depend on."""
    assert af.optim.clip_by_value([None, A], 0, 1)[0] is None
    assert af.optim.clip_by_norm((None, A), 1)[0] is None
    assert af.optim.clip_by_global_norm({"a": None, "b": A}, 1)[0]["a"] is None


def test_limits_that_make_no_sense() -> None:
    for limit in (0, -1.0, float("nan")):
        with pytest.raises(af.GraphError, match="max_norm is above 0"):
            af.optim.clip_by_norm([A], limit)
        with pytest.raises(af.GraphError, match="max_norm is above 0"):
            af.optim.clip_by_global_norm([A], limit)
    wrong: Any
    for wrong in ([1.0, 2.0], "1", None, 1j):
        with pytest.raises(af.GraphError, match="max_norm is a number or a scalar tensor; got"):
            af.optim.clip_by_global_norm([A], wrong)
    with pytest.raises(af.GraphError, match="no gradient"):
        af.optim.clip_by_global_norm([None], 1.0)
