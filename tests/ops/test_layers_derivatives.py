"""Activations, normalisations, looking up rows, and random ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import GraphError
from asyncflow.graph.op import derivative_of, why_not_differentiable
from asyncflow.graph.values.dtypes import bfloat16
from asyncflow.ops.layers import nn
from asyncflow.ops.random import random
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values

ACTIVATIONS = [nn.relu, nn.sigmoid, nn.silu, nn.softplus, nn.gelu]
AXES = [0, -1, 1, None, (0, 2), (-1, 0), ()]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Of either sign, and away from 0."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.2, 2.0, shape) * rng.choice([-1.0, 1.0], shape)


def only(gradients: list[Any]) -> Any:
    (gradient,) = gradients
    assert gradient is not None
    return gradient


# -- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_activations(function: Any) -> None:
    assert_derivatives(function, values(2, 3), order=2)
    assert_derivatives(function, values())
    assert_derivatives(function, values(0, 2))


@pytest.mark.parametrize("function", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_activations_far_out(function: Any, dtype: str) -> None:
    chosen = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    far = np.array([-np.inf, -300.0, 300.0, np.inf], chosen)
    slopes = only(gradients_at(function, far, grad=[np.ones(far.shape)]))
    assert slopes.dtype == chosen
    half = len(far) // 2
    expected = [0.0] * len(far) if function is nn.sigmoid else [0.0] * half + [1.0] * half
    assert slopes.astype(float).tolist() == expected


@pytest.mark.parametrize("function", ACTIVATIONS[1:])
def test_slopes_of_slopes_far_out_are_0(function: Any) -> None:
    def slope(x: Any) -> Any:
        (found,) = gradients(function(x), [x])
        return found

    far = np.array([-np.inf, -1e300, 1e300, np.inf])
    assert (only(gradients_at(slope, far, grad=[np.ones(4)])) == 0).all()


def test_relu_at_zero_and_of_integers() -> None:
    assert only(gradients_at(nn.relu, [-1.0, 0.0, -0.0, 2.0], grad=[np.ones(4)])).tolist() == [0, 0, 0, 1]
    assert gradients_at(lambda x, y: nn.relu(x) * y, [1, 2], [1.0, 2.0])[0] is None


def test_an_infinite_gradient_stays_out_of_what_relu_cut() -> None:
    assert only(gradients_at(nn.relu, [-1.0, 1.0], grad=[[np.inf, 2.0]])).tolist() == [0, 2]


# -- over an axis ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [nn.softmax, nn.log_softmax])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(function: Any, axis: int) -> None:
    assert_derivatives(lambda x: function(x, axis=axis), values(2, 3), order=2)
    assert_derivatives(lambda x: function(x, axis=axis), values(0, 2))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("keepdims", [False, True])
def test_logsumexp(axis: Any, keepdims: bool) -> None:
    assert_derivatives(lambda x: nn.logsumexp(x, axis=axis, keepdims=keepdims), values(2, 3, 2), order=2)


def test_logsumexp_of_nothing_and_of_one() -> None:
    assert_derivatives(lambda x: nn.logsumexp(x, axis=0), values(0, 2))
    assert_derivatives(nn.logsumexp, values(), order=2)


def test_logsumexp_of_masked_rows() -> None:
    x = [[-np.inf, -np.inf], [-np.inf, 3.0]]
    assert only(gradients_at(lambda x: nn.logsumexp(x, axis=1), x, grad=[[1.0, 1.0]])).tolist() == [[0, 0], [0, 1]]


def test_large_values_neither_overflow_nor_vanish() -> None:
    x = np.array([1000.0, 1000.0, -1000.0])
    for function in (nn.logsumexp, lambda x: nn.log_softmax(x)[2], lambda x: nn.softmax(x)[0]):
        assert np.isfinite(only(gradients_at(function, x, grad=[1.0]))).all()


@pytest.mark.parametrize("axis", [-1, 0, (0, 1), (-1, 0)])
def test_layer_norm(axis: Any) -> None:
    assert_derivatives(lambda x: nn.layer_norm(x, axis=axis), values(2, 3, 2), order=2, rtol=1e-4)


@pytest.mark.parametrize("shapes", [((4,), (4,)), ((3, 1), (4,)), ((), (3, 4)), ((1, 1), ())])
def test_layer_norm_with_scale_and_bias(shapes: Any) -> None:
    scale, bias = values(*shapes[0], seed=1), values(*shapes[1], seed=2)
    assert_derivatives(lambda x, s, b: nn.layer_norm(x, s, b, epsilon=0.1), values(3, 4), scale, bias)
    assert_derivatives(lambda x, s: nn.layer_norm(x, scale=s), values(3, 4), scale, order=2, known=("nothing",))
    assert_derivatives(lambda x, b: nn.layer_norm(x, bias=b), values(3, 4), bias)


def test_layer_norm_of_nothing() -> None:
    assert_derivatives(nn.layer_norm, values(0, 3), values(3), values(3))
    assert_derivatives(nn.layer_norm, values(2, 0), values(0), values(1))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_widened(name: str) -> None:
    dtype = bfloat16() if name == "bfloat16" else np.dtype(name)
    x = values(2, 300)
    for function in (nn.softmax, nn.log_softmax, nn.layer_norm, lambda x: nn.logsumexp(x, axis=1), nn.gelu):
        half = only(gradients_at(function, x.astype(dtype)))
        assert half.dtype == dtype
        wide = only(gradients_at(function, x.astype(dtype).astype(float)))
        np.testing.assert_allclose(half.astype(float), wide, rtol=0.05, atol=0.02)


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids", [[0, 2, 2, 3], [[1, 1], [0, 3]], 2, np.zeros((0,), int), np.array([3, 3], np.uint8)], ids=str
)
def test_embedding(ids: Any) -> None:
    assert_derivatives(nn.embedding, values(4, 3), np.asarray(ids), order=2)
    assert_derivatives(nn.embedding, values(4), np.asarray(ids))


def test_embedding_of_complex_rows_and_of_integers() -> None:
    assert_derivatives(nn.embedding, values(3, 2) + 1j * values(3, 2, seed=1), np.array([1, 1, 0]))
    ids, table = np.array([1, 0]), np.array([[1], [2]])
    assert gradients_at(lambda t, i, y: nn.embedding(t, i) * y, table, ids, values(2, 1))[:2] == [None, None]


def test_one_hot_has_a_reason() -> None:
    assert derivative_of(nn.ONE_HOT) is None
    assert why_not_differentiable(nn.ONE_HOT)


# -- random ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [random.NORMAL, random.UNIFORM, random.TRUNCATED_NORMAL, random.CATEGORICAL])
def test_samples_have_a_reason(op: Any) -> None:
    assert derivative_of(op) is None
    assert why_not_differentiable(op)


@pytest.mark.parametrize("draw", [lambda x: random.permutation(x, axis=0), lambda x: random.choice(x, 2)])
def test_rows_drawn_by_an_op_that_hides_which(draw: Any) -> None:
    with pytest.raises(GraphError, match=r"does not say which rows it drew.*x\[af\.random\.") as raised:
        gradients_at(draw, values(3))
    assert "test_layers_derivatives.py" in str(raised.value)


def test_scale_and_offset_of_samples() -> None:
    with af.Graph() as graph:
        mean, std = af.placeholder("float64", ()), af.placeholder("float64", ())
        random.normal((3,), mean=mean, std=std)
        found = {node.op for node in graph.nodes if node.inputs}
    assert all(derivative_of(op) for op in found)


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "sigmoid", "softmax", "log_softmax"])
def test_what_keeps_its_result(name: str) -> None:
    assert kept_values(getattr(nn, name), [1.0]) == {name}


@pytest.mark.parametrize("name", ["silu", "softplus", "gelu", "layer_norm"])
def test_what_keeps_its_argument(name: str) -> None:
    assert kept_values(getattr(nn, name), [1.0]) == {"x0"}


def test_embedding_keeps_ids_alone() -> None:
    assert kept_values(nn.embedding, values(2, 2), np.array([1])) == {"x1"}


def test_layer_norm_of_values_whose_squares_are_no_numbers() -> None:
    """As of the same values made smaller, which layer_norm does not see."""
    x, grad = values(3, 4), values(3, 4)
    small: list[Any] = gradients_at(nn.layer_norm, x, x[0], grad=[grad])
    large: list[Any] = gradients_at(nn.layer_norm, x * 2.0**600, x[0], grad=[grad])
    np.testing.assert_allclose(large[0] * 2.0**600, small[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(large[1], small[1], rtol=1e-4, atol=1e-6)
