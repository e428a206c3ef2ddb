from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.layers.erf import erf
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare

POINTS = np.array([-math.inf, -30, -5.9, -1, -0.999, -1e-300, -0.0, 0, 1e-9, 0.3, 1, 1.001, 2, 6, 6.1, math.inf])


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 2e-15), ("float32", 3e-7), ("float16", 2e-3)])
def test_against_math(evaluate: Any, dtype: str, rtol: float) -> None:
    x = np.concatenate([POINTS, np.linspace(-7, 7, 301)]).astype(dtype)
    with af.Graph():
        given = af.placeholder(dtype, (None,))
        y = erf(given)
    got = evaluate(y, {given: x})
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got, [math.erf(item) for item in x], rtol=rtol)
    assert math.copysign(1, got[6]) == -1


def test_shapes(evaluate: Any) -> None:
    for shape in ((), (0,), (2, 3)):
        for dtype in ("float32", "float64", ml_dtypes.bfloat16):
            x = np.ones(shape, dtype)
            compare(evaluate, erf, np.full(shape, math.erf(1)).astype(dtype), x, exact=dtype == ml_dtypes.bfloat16)
    assert np.isnan(evaluate_nan(evaluate))


def evaluate_nan(evaluate: Any) -> Any:
    with af.Graph():
        return evaluate(erf(af.asarray(math.nan)))


def test_derivatives() -> None:
    assert_derivatives(erf, np.array([-3.0, -1.5, -0.4, 0.0, 0.7, 2.2]), order=2)


def test_integers_are_refused() -> None:
    with af.Graph(), pytest.raises(af.DTypeError, match="erf: takes floats, not int64"):
        erf(3)
