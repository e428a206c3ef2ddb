from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.arrays.padding import pad
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import NUMBERS, compare, sample


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (1, 1)])
@pytest.mark.parametrize("widths", [0, 2, (1, 2), ((0, 1), (2, 0)), (1, (0, 2))])
def test_against_numpy(evaluate: Any, shape: Any, widths: Any) -> None:
    x = sample(shape, "float32")
    full = tuple((w, w) if isinstance(w, int) else w for w in widths) if widths == (1, (0, 2)) else widths
    known = ("all", "rank", "nothing") if widths in (((0, 1), (2, 0)), (1, (0, 2))) else ("all", "rank")
    compare(evaluate, lambda t: pad(t, widths), np.pad(x, full), x, known=known)
    padded = np.pad(x, full, constant_values=7)
    compare(evaluate, lambda t, v: pad(t, widths, value=v), padded, x, np.float32(7), known=known)


def test_against_numpy_with_unknown_rank_and_value(evaluate: Any) -> None:
    x = sample((2, 3), "int32")
    compare(evaluate, lambda t: pad(t, [[1, 0], [0, 2]], value=9), np.pad(x, [[1, 0], [0, 2]], constant_values=9), x)


def test_dtypes_and_rank_0(evaluate: Any) -> None:
    for dtype in (*NUMBERS, ml_dtypes.bfloat16):
        x = sample((2,), dtype)
        compare(evaluate, lambda t: pad(t, [(1, 2)]), np.concatenate([np.zeros(1, dtype), x, np.zeros(2, dtype)]), x)
    words = np.array(["a", "b"], dtype=string)
    compare(evaluate, lambda t: pad(t, [(1, 0)]), np.array(["", "a", "b"], dtype=string), words)
    compare(evaluate, lambda t: pad(t, 3), np.float32(2), np.float32(2), known=("all", "rank"))
    compare(evaluate, lambda t: pad(t, []), np.float32(2), np.float32(2))


def test_derivatives() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3))
    assert_derivatives(lambda t: af.square(pad(t, ((1, 0), (0, 2)))), x, order=2)
    assert_derivatives(lambda t, v: af.square(pad(t, ((1, 0), (0, 2)), value=v)), x, np.float64(1.5), order=2)
    assert_derivatives(lambda t: pad(t, [(1, 1)]), np.zeros(0))


def test_errors() -> None:
    with af.Graph():
        x = af.ones((2, 3))
        with pytest.raises(af.GraphError, match=r"widths are 0 or more, got -1"):
            pad(x, -1)
        with pytest.raises(af.GraphError, match="an axis has two widths"):
            pad(x, [(1, 2, 3), 1])
        with pytest.raises(af.ShapeError, match="3 pairs of widths need a value of that rank"):
            pad(x, [1, 2, 3])
        with pytest.raises(af.ShapeError, match="give a pair of widths for each axis"):
            pad(af.placeholder("float32"), 1)
        with pytest.raises(af.DTypeError, match=r"0\.5 does not fit dtype int64"):
            pad(af.asarray([1]), 1, value=0.5)
        with pytest.raises(af.ShapeError, match="of rank 0"):
            pad(x, 1, value=af.ones(2))
