"""Random weights: their variance, and the values that they keep through layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

DRAWS = [af.nn.he_uniform, af.nn.he_normal]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("shape", "inputs"), [((300, 200), 300), ((200, 30, 3, 3), 270), ((100, 80, 5), 400)], ids=str)
def test_the_variance_follows_the_inputs(draw: Callable[..., Any], shape: tuple[int, ...], inputs: int) -> None:
    weights = draw(np.random.default_rng(0), shape)
    assert (weights.shape, weights.dtype) == (shape, np.float32)
    assert abs(weights.var() * inputs / 2 - 1) < 0.03
    np.testing.assert_array_equal(weights, draw(np.random.default_rng(0), shape))
    limit = np.sqrt(6 / inputs)
    assert (np.abs(weights) <= limit).all() == (draw is af.nn.he_uniform)


@pytest.mark.parametrize("draw", DRAWS)
def test_values_keep_their_variance_through_relu(draw: Callable[..., Any]) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((100, 400))
    for _ in range(10):
        x = np.maximum(x @ draw(random, (400, 400), dtype="float64"), 0)
    assert 0.7 < (x**2).mean() < 1.4


@pytest.mark.parametrize("draw", DRAWS)
def test_shapes_without_inputs(draw: Callable[..., Any]) -> None:
    assert draw(np.random.default_rng(0), (0, 3)).shape == (0, 3)
    with pytest.raises(af.ShapeError, match=r"weights have a shape \(inputs, outputs\) or .*; got \(3,\)"):
        draw(np.random.default_rng(0), (3,))
