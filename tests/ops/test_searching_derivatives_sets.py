"""Derivatives of distinct values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.autodiff.sweep import assert_derivatives, gradients_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.graph.ir import Tensor

UNIQUE: dict[str, Callable[[Tensor], Any]] = {
    "unique_values": af.unique_values,
    "unique_counts": lambda x: af.unique_counts(x).values,
    "unique_inverse": lambda x: af.unique_inverse(x).values,
    "unique_all": lambda x: af.unique_all(x).values,
}


@pytest.mark.parametrize("name", UNIQUE)
def test_distinct_values(name: str) -> None:
    x = np.array([[3.0, 1.0, 2.5], [-1.0, 7.0, 4.0]])
    assert_derivatives(lambda x: UNIQUE[name](x) ** 2, x, order=2, known=("all",))


def test_of_equal_elements_the_first_counts() -> None:
    (grad,) = gradients_at(af.unique_values, np.array([2.0, 1.0, 2.0]), grad=[np.array([10.0, 20.0])])
    np.testing.assert_array_equal(grad, [20.0, 10.0, 0.0])


def test_counts_and_positions_carry_nothing() -> None:
    with af.Graph():
        x = af.placeholder("float64", (3,))
        counts = af.unique_counts(x).counts
        assert af.gradients(counts, x) is None
