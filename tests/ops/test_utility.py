"""`nan_to_num`, against NumPy's; `all`, `any` and `diff` are in `test_statistical.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int32", "bool"])
@pytest.mark.parametrize("options", [{}, {"nan": 3.0, "posinf": 9.0, "neginf": -9.0}])
async def test_numbers_in_place_of_nans_and_infinities(dtype: str, options: dict[str, Any]) -> None:
    x = np.array([0.5, -2.0, 0.0, np.nan, np.inf, -np.inf]) if dtype[0] in "fc" else np.array([0, 1, 2])
    x = x.astype(dtype)
    if dtype == "complex64":
        x.imag = x.real[::-1]
    with af.Graph() as graph:
        fed = af.placeholder(dtype, (None,))
        y = af.nan_to_num(fed, **options)
        slope = af.gradients(af.sum(y), [fed])[0] if dtype == "float64" else y
    async with af.Session(graph) as session:
        found, gradient = await session.run([y, slope], {fed: x})
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, np.nan_to_num(x, **options))
    if dtype == "float64":
        assert gradient.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
