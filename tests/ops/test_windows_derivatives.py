"""Derivatives of convolution and pooling, of whose inputs all is known, the rank, or nothing."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from tests.autodiff.sweep import assert_derivatives

RNG = np.random.default_rng(4)
X, W, Y = RNG.standard_normal((2, 4, 5)), RNG.standard_normal((6, 2, 3)), RNG.standard_normal((2, 6, 3))


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution(stride: int) -> None:
    assert_derivatives(lambda x, w: af.nn.conv1d(x, w, stride=stride, padding=1, groups=2), X, W, order=2)
    assert_derivatives(lambda y, w: af.nn.conv_transpose1d(y, w, stride=stride, groups=2), Y, W, order=2)


def test_pooling() -> None:
    x = RNG.permutation(20).reshape(2, 2, 5) / 4
    assert_derivatives(lambda x: af.nn.max_pool1d(x, 3, 1, 1), x, order=2)
    assert_derivatives(lambda x: af.nn.avg_pool1d(x, 3, 2, 1, count_include_pad=False), x, order=2)
