"""Normalisation of layers, against NumPy, and by the checks of ops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import check_op

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(3)
X = RNG.standard_normal((2, 6, 5)) + 0.5
WEIGHT, BIAS = RNG.standard_normal(6), RNG.standard_normal(6)


def rms(x: np.ndarray, eps: float, axis: tuple[int, ...]) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=axis, keepdims=True) + eps)


def grouped(x: np.ndarray, groups: int, eps: float = 1e-5) -> np.ndarray:
    parts = x.reshape(x.shape[0], groups, -1)
    centred = parts - parts.mean(axis=-1, keepdims=True)
    return (centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)).reshape(x.shape)


@pytest.mark.parametrize("shape", [X.shape, (None, 6, None)], ids=["static", "open"])
@pytest.mark.usefixtures("graph")
async def test_norms(run: Run, shape: tuple[int | None, ...]) -> None:
    x = af.placeholder("float64", shape)
    weight = RNG.standard_normal((6, 5))
    found = await run(
        [
            af.nn.rms_norm(x, 5, weight[0]),
            af.nn.rms_norm(x, [6, 5], weight, eps=1e-3),
            af.nn.group_norm(x, 3, WEIGHT, BIAS),
            af.nn.group_norm(x, 6, bias=af.Variable(BIAS), eps=0.1),
        ],
        {x: X},
    )
    column = WEIGHT[:, None], BIAS[:, None]
    wanted = [
        rms(X, np.finfo("float64").eps, (-1,)) * weight[0],
        rms(X, 1e-3, (-2, -1)) * weight,
        grouped(X, 3) * column[0] + column[1],
        grouped(X, 6, 0.1) + column[1],
    ]
    for y, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("graph")
async def test_values_of_16_bits_are_summed_in_float32(run: Run) -> None:
    x = np.full((2, 4096), 300.0, np.float16)  # whose squares are beyond float16
    found = await run([af.nn.rms_norm(x, 4096), af.nn.group_norm(x + x % 7, 2)])
    assert [y.dtype for y in found] == [np.float16] * 2
    np.testing.assert_allclose(found[0], 1.0, rtol=1e-3)


@pytest.mark.usefixtures("graph")
async def test_batches_without_examples(run: Run) -> None:
    x = af.placeholder("float32", (None, 4, None))
    found = await run([af.nn.rms_norm(x, [4, 0]), af.nn.group_norm(x, 2)], {x: np.ones((0, 4, 0), np.float32)})
    assert [y.shape for y in found] == [(0, 4, 0)] * 2


def test_gradients_and_rows() -> None:
    assert check_op(af.nn.rms_norm, X, normalized_shape=5, eps=1e-2) == []
    (left_out,) = check_op(lambda x, w, b: af.nn.group_norm(x, 3, w, b), X, WEIGHT, BIAS)
    assert left_out.startswith("shapes on 'cpu': it refuses open extents: group_norm: the number of channels is known")


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: af.nn.rms_norm(X, 4),
        af.ShapeError,
        r"rms_norm: the last axes have extents \[4\]; got .*float64\[2,6,5\]",
    ),
    (lambda: af.nn.rms_norm(X, [1, 2, 6, 5]), af.ShapeError, "rms_norm: the last axes have extents"),
    (lambda: af.nn.rms_norm(X, []), af.ShapeError, "normalized_shape has the extent of one axis or more"),
    (lambda: af.nn.rms_norm(X, 2.5), af.GraphError, "normalized_shape"),  # type: ignore[arg-type]
    (lambda: af.nn.rms_norm(X.astype(int), 5), af.DTypeError, "rms_norm: takes floats, not int64"),
    (lambda: af.nn.rms_norm(X, 5, WEIGHT), af.ShapeError, r"rms_norm: weight has shape \[5\]"),
    (lambda: af.nn.group_norm(X, 4), af.ShapeError, "6 channels are not divided into 4 groups"),
    (lambda: af.nn.group_norm(X, 0), af.ShapeError, "6 channels are not divided into 0 groups"),
    (lambda: af.nn.group_norm(X[0, 0], 1), af.ShapeError, r"input is \(batch, channels, ...\)"),
    (lambda: af.nn.group_norm(X, 2, WEIGHT[:5]), af.ShapeError, r"group_norm: weight has shape \[6\]"),
    (
        lambda: af.nn.group_norm(X, 2, bias=af.constant(BIAS, "float32")),
        af.DTypeError,
        "bias has the dtype of the input, float64",
    ),
    (
        lambda: af.nn.group_norm(af.placeholder("float32", (None, None)), 2),
        af.GraphError,
        "the number of channels is known while the graph is built",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
