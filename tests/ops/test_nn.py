from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import placeholder
from asyncflow.graph.graph import Graph
from asyncflow.ops.layers import nn

FLOATS = [np.dtype("f2"), np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.bfloat16)]
TOLERANCE = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-14, "bfloat16": 1.6e-2}
POINTS = [-100.0, -30.0, -2.0, -0.5, -0.0, 0.0, 0.25, 1.0, 3.0, 30.0, 100.0]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Evaluate: TypeAlias = Callable[..., Any]


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with Graph():
        yield


def close(got: Any, want: Any, dtype: Any) -> None:
    assert np.asarray(got).dtype == dtype
    tolerance = TOLERANCE[dtype.name]
    np.testing.assert_allclose(np.asarray(got, "f8"), np.asarray(want, "f8"), rtol=tolerance, atol=tolerance / 10)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


ACTIVATIONS = {
    "sigmoid": logistic,
    "silu": lambda x: x * logistic(x),
    "softplus": lambda x: max(x, 0) + math.log1p(math.exp(-abs(x))),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(evaluate: Evaluate, name: str, dtype: Any) -> None:
    x = np.array(POINTS).astype(dtype)
    function = getattr(nn, name)
    want = [ACTIVATIONS[name](float(item)) for item in x]
    close(evaluate(function(x)), want, dtype)
    close(evaluate(function(x[2])), want[2], dtype)
    assert evaluate(function(x[:0])).shape == (0,)
    assert math.isnan(evaluate(function(dtype.type(math.nan))))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ACTIVATIONS, "gelu"])
def test_activations_at_the_edges(evaluate: Evaluate, name: str, dtype: Any) -> None:
    """The limits at infinities and at the largest numbers are right, and nothing is lost at the smallest."""
    info = ml_dtypes.finfo(dtype)
    x = np.array([-np.inf, info.min, info.tiny, info.max, np.inf]).astype(dtype)
    near_zero = {"sigmoid": 0.5, "softplus": math.log(2), "relu": float(x[2])}.get(name, float(x[2]) / 2)
    far = [1.0, 1.0] if name == "sigmoid" else [float(x[3]), np.inf]
    close(evaluate(getattr(nn, name)(x)), [0, 0, near_zero, *far], dtype)


def test_sigmoid_keeps_the_digits_of_its_left_tail(evaluate: Evaluate) -> None:
    assert evaluate(nn.sigmoid(np.float64(-600))) == pytest.approx(math.exp(-600), rel=1e-12)
    assert evaluate(nn.sigmoid(np.array([-np.inf, np.inf], np.float64))).tolist() == [0, 1]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu_is_close_to_the_exact_one(evaluate: Evaluate, dtype: Any) -> None:
    x = np.array(POINTS).astype(dtype)
    exact = [0.5 * float(item) * (1 + math.erf(float(item) / math.sqrt(2))) for item in x]
    np.testing.assert_allclose(evaluate(nn.gelu(x)).astype("f8"), exact, atol=5e-4, rtol=TOLERANCE[dtype.name])


def test_activations_take_floats_only() -> None:
    for name in ("sigmoid", "silu", "softplus", "gelu", "softmax", "log_softmax", "logsumexp", "layer_norm"):
        with pytest.raises(DTypeError, match=rf"{name}: takes floats, not int32; convert with af.astype"):
            getattr(nn, name)(np.array([1], np.int32))
    assert nn.relu(np.array([-1], np.int8)).dtype == np.int8


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax(evaluate: Evaluate, dtype: Any, axis: Any) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(dtype) * dtype.type(8)
    wide = x.astype("f8")
    close(evaluate(nn.softmax(x, axis=axis)), softmax(wide, axis), dtype)
    close(evaluate(nn.log_softmax(x, axis=axis)), np.log(softmax(wide, axis)), dtype)
    close(evaluate(nn.logsumexp(x, axis=axis)), np.log(np.exp(wide).sum(axis=axis)), dtype)
    close(evaluate(nn.logsumexp(x, axis=axis, keepdims=True)), np.log(np.exp(wide).sum(axis, keepdims=True)), dtype)


def test_softmax_of_large_and_of_no_values(evaluate: Evaluate) -> None:
    assert evaluate(nn.softmax(np.array([1000, 1000, -1000], np.float32))).tolist() == [0.5, 0.5, 0]
    assert evaluate(nn.softmax(np.ones((0, 3)))).shape == (0, 3)
    assert evaluate(nn.log_softmax(np.ones((3, 0)))).shape == (3, 0)
    x = placeholder("float32", (None, 3))
    assert nn.softmax(x).shape == (None, 3)
    with pytest.raises(ShapeError, match=r"softmax: axis 2 is out of range"):
        nn.softmax(x, axis=2)
    with pytest.raises(ShapeError, match=r"softmax: axis -1 is out of range"):
        nn.softmax(np.float32(1))


def test_logsumexp_at_the_edges(evaluate: Evaluate) -> None:
    assert evaluate(nn.logsumexp(np.array([1000, 1000], np.float32))) == np.float32(1000 + math.log(2))
    assert evaluate(nn.logsumexp(np.full(3, -np.inf))) == -np.inf
    assert evaluate(nn.logsumexp(np.array([np.inf, 1], np.float64))) == np.inf
    assert evaluate(nn.logsumexp(np.ones((2, 0)), axis=1)).tolist() == [-np.inf, -np.inf]
    assert evaluate(nn.logsumexp(np.float32(3))) == 3
    assert evaluate(nn.logsumexp(np.ones((2, 3)), axis=(0, 1), keepdims=True)).shape == (1, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [-1, (1, 2)])
def test_layer_norm(evaluate: Evaluate, dtype: Any, axis: Any) -> None:
    rng = np.random.default_rng(0)
    x, scale, bias = (rng.normal(size=shape).astype(dtype) for shape in ((3, 4, 8), (8,), (8,)))
    wide = x.astype("f8")
    centred = wide - wide.mean(axis=axis, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(axis=axis, keepdims=True) + 1e-5)
    tolerance = 4 * TOLERANCE[dtype.name]
    for got, expected in [
        (nn.layer_norm(x, axis=axis), want),
        (nn.layer_norm(x, scale, axis=axis), want * scale.astype("f8")),
        (nn.layer_norm(x, None, bias, axis=axis), want + bias.astype("f8")),
        (nn.layer_norm(x, scale, bias, axis=axis), want * scale.astype("f8") + bias.astype("f8")),
    ]:
        np.testing.assert_allclose(evaluate(got).astype("f8"), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layer_norm_of_large_values(evaluate: Evaluate, dtype: Any) -> None:
    """Values whose squares are no numbers, or their sum is none; other rows keep their epsilon."""
    pattern = np.array([[1.0, -2.0, 3.0, 5.0], [1.0, 1.0, 1.0, 1.0], [1e-3, 2e-3, 0.0, 1e-3]])
    scale = np.array([[2.0 ** (ml_dtypes.finfo(dtype).maxexp // 2)], [2.0**6], [1.0]])
    x = (pattern * scale).astype(dtype)
    wide = x.astype("f8") / scale
    epsilon = 1e-5 / scale**2
    want = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + epsilon)
    close(evaluate(nn.layer_norm(x)), want, dtype)
    huge = (pattern[:2] / 8 * float(ml_dtypes.finfo(dtype).max)).astype(dtype)
    close(evaluate(nn.layer_norm(huge)), [want[0], np.zeros(4)], dtype)


def test_layer_norm_refuses_what_would_change_its_result() -> None:
    x = placeholder("float32", (2, 3))
    with pytest.raises(DTypeError, match=r"layer_norm: scale and bias have the dtype of the values, float32, not"):
        nn.layer_norm(x, np.ones(3))
    with pytest.raises(ShapeError, match=r"layer_norm: scale and bias broadcast to shape \[2,3\]"):
        nn.layer_norm(x, np.ones((4, 1, 3), "f4"))


def test_one_hot(evaluate: Evaluate) -> None:
    ids = np.array([[0, 2, 5], [-1, 1, 0]])
    want = (ids[..., None] == np.arange(3)).astype("f4")
    assert np.array_equal(evaluate(nn.one_hot(ids, 3)), want)
    for axis in (0, 1, -2):
        assert np.array_equal(evaluate(nn.one_hot(ids, 3, axis=axis)), np.moveaxis(want, -1, axis))
    assert evaluate(nn.one_hot(np.int32(1), 3, dtype="bool")).tolist() == [False, True, False]
    n, unknown = placeholder("int32", ()), placeholder("int64")
    assert nn.one_hot(ids, n).shape == (2, 3, None)
    assert nn.one_hot(unknown, 3).shape is None
    assert np.array_equal(evaluate(nn.one_hot(ids, n), {n: np.int32(3)}), want)
    with pytest.raises(DTypeError, match=r"one_hot: takes integers, not float64"):
        nn.one_hot(np.ones(2), 3)


def test_embedding_refuses_ids_from_the_end(evaluate: Evaluate) -> None:
    with pytest.raises(IndexError, match=r"id -1 is below 0"):
        evaluate(nn.embedding(np.ones((4, 3)), [2, -1]))


def test_embedding(evaluate: Evaluate) -> None:
    table = np.arange(12, dtype="f4").reshape(4, 3)
    assert np.array_equal(evaluate(nn.embedding(table, [[0, 3], [1, 1]])), table[[[0, 3], [1, 1]]])
    assert np.array_equal(evaluate(nn.embedding(table, 2)), table[2])
    ids = placeholder("int32", (None, 2))
    assert nn.embedding(table, ids).shape == (None, 2, 3)
    with pytest.raises(IndexError):
        evaluate(nn.embedding(table, 4))
    with pytest.raises(DTypeError, match=r"embedding: takes integer ids, not float64"):
        nn.embedding(table, 1.0)
    with pytest.raises(ShapeError, match=r"embedding: takes a table of rank 1 or more"):
        nn.embedding(np.float32(1), 0)
