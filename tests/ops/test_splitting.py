from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.arrays.splitting import split
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import NUMBERS, compare, sample


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_equal_parts(evaluate: Any, axis: int) -> None:
    x = sample((4, 6), "float32")
    compare(evaluate, lambda t: split(t, 2, axis=axis), tuple(np.split(x, 2, axis)), x)


def test_sizes(evaluate: Any) -> None:
    for dtype in (*NUMBERS, string):
        x = sample((5, 2), "int8").astype(dtype)
        parts = (x[:1], x[1:1], x[1:])
        compare(evaluate, lambda t: split(t, [1, 0, 4]), parts, x)
        compare(evaluate, lambda t: split(t, (1, 0, -1)), parts, x)
    x = np.zeros((0, 2))
    compare(evaluate, lambda t: split(t, 3), (x, x, x), x)
    compare(evaluate, lambda t: split(t, [0, -1]), (x, x), x)


def test_derivatives() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3))
    assert_derivatives(lambda t: [af.square(part) for part in split(t, 2)], x, order=2)
    assert_derivatives(lambda t: [af.square(part) for part in split(t, [1, -1], axis=-1)], x, order=2)
    assert_derivatives(lambda t: af.square(split(t, [1, 3])[1]), x, order=2)


def test_errors() -> None:
    with af.Graph():
        x = af.ones((5, 2))
        with pytest.raises(af.ShapeError, match="an extent of 5 cannot be split into 2 equal parts"):
            split(x, 2)
        with pytest.raises(af.ShapeError, match=r"parts of \[1, 2\] do not fill an extent of 5"):
            split(x, [1, 2])
        with pytest.raises(af.ShapeError, match=r"parts of \[4, 2, -1\] do not fill an extent of 5"):
            split(x, [4, 2, -1])
        with pytest.raises(af.GraphError, match="one part or more, got 0"):
            split(x, 0)
        for sizes in ([], [-2, 7], [-1, -1]):
            with pytest.raises(af.GraphError, match="at most one is -1"):
                split(x, sizes)
        with pytest.raises(af.ShapeError, match="rank 1 or more"):
            split(af.ones(()), 1)
        with pytest.raises(IndexError, match="axis 2 is out of range"):
            split(x, 1, axis=2)


@pytest.mark.parametrize("sections", [2, [1, 1], [4, -1]])
def test_what_does_not_fill_fails_the_run(evaluate: Any, sections: Any) -> None:
    with af.Graph():
        x = af.placeholder("float32", (None,))
        part = split(x, sections)[0]
    with pytest.raises(af.ShapeError, match="an extent of 3"):
        evaluate(part, {x: np.ones(3, np.float32)})
