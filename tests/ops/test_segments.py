from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.reductions.segments import bincount, segment_sum
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare, sample

IDS = np.array([2, 0, 2, 3])


def summed(x: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    result = np.zeros((count, *x.shape[1:]), x.dtype)
    np.add.at(result, ids, x)
    return result


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 0), (4, 2, 3)])
def test_segment_sum(evaluate: Any, shape: Any) -> None:
    for dtype in ("int8", "int64", "float16", "float32", "float64", "complex64"):
        x = sample(shape, dtype)
        for ids in (IDS, IDS.astype("uint8")):
            compare(evaluate, lambda t, i: segment_sum(t, i, 5), summed(x, ids, 5), x, ids)
    x = sample(shape, "float32")
    compare(evaluate, segment_sum, summed(x, IDS, 4), x, IDS, np.int64(4))


def test_segment_sum_of_nothing(evaluate: Any) -> None:
    none = np.zeros(0, "int64")
    compare(evaluate, lambda t, i: segment_sum(t, i, 2), np.zeros((2, 3)), np.zeros((0, 3)), none)
    compare(evaluate, lambda t, i: segment_sum(t, i, 0), np.zeros((0, 3)), np.zeros((0, 3)), none)


def test_segment_sum_derivatives() -> None:
    x = np.random.default_rng(0).normal(size=(4, 2))
    assert_derivatives(lambda t, i: af.square(segment_sum(t, i, 5)), x, IDS, order=2)


def test_segment_sum_errors(evaluate: Any) -> None:
    with af.Graph():
        with pytest.raises(af.ShapeError, match="one segment id for each row"):
            segment_sum(af.ones((3, 2)), [0, 1], 2)
        with pytest.raises(af.ShapeError, match="segment ids are a vector"):
            segment_sum(af.ones((3, 2)), [[0, 1]], 2)
        with pytest.raises(af.DTypeError, match="integer segment ids"):
            segment_sum(af.ones(2), [0.0, 1.0], 2)
        with pytest.raises(af.ShapeError, match="rank 1 or more"):
            segment_sum(1.0, [0], 2)
        x, ids = af.placeholder("float32", (None,)), af.placeholder("int64", (None,))
        y = segment_sum(x, ids, 2)
    with pytest.raises(ValueError, match=r"one segment id for each of 1 rows; got \[2\]"):
        evaluate(y, {x: np.ones(1, np.float32), ids: np.array([0, 1])})
    with pytest.raises(IndexError):
        evaluate(y, {x: np.ones(1, np.float32), ids: np.array([2])})


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_bincount(evaluate: Any, dtype: str) -> None:
    x = IDS.astype(dtype)
    for length in (0, 2, 6):
        compare(evaluate, lambda t, n=length: bincount(t, minlength=n), np.bincount(IDS, minlength=length), x)
    for kind in ("float16", "float32", "float64"):
        weights = np.array([0.5, 1, 2, 4], kind)
        expected = np.bincount(IDS, weights).astype(kind)
        compare(evaluate, lambda t, w: bincount(t, weights=w), expected, x, weights)
    compare(evaluate, bincount, np.zeros(0, "int64"), np.zeros(0, dtype))


def test_bincount_derivative() -> None:
    assert_derivatives(lambda w: af.square(bincount(IDS, weights=w)), np.array([0.5, 1, 2, 4]), order=2)


def test_bincount_errors(evaluate: Any) -> None:
    with af.Graph():
        with pytest.raises(af.DTypeError, match="takes integers"):
            bincount([1.0])
        with pytest.raises(af.ShapeError, match="takes a vector"):
            bincount([[1]])
        with pytest.raises(af.ShapeError, match="one weight for each"):
            bincount([1, 2], weights=[1.0])
        with pytest.raises(af.DTypeError, match="weights as floats"):
            bincount([1], weights=[1])
        with pytest.raises(af.GraphError, match="minlength is 0 or more, got -1"):
            bincount([1], minlength=-1)
        with pytest.raises(ValueError, match="negative"):
            evaluate(bincount([-1]))
