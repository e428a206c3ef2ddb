"""Losses and masks, against NumPy and central differences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.nn.recurrent import differences, sigmoid

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

RNG = np.random.default_rng(5)
LOGITS = RNG.standard_normal((2, 3, 4)) * 3
LABELS = np.array([[0, 3, 1], [2, 2, 0]])


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def one_hot(labels: np.ndarray) -> np.ndarray:
    return (labels[..., None] == np.arange(4)).astype(np.float64)


@pytest.mark.parametrize(
    "labels", [LABELS, LABELS.astype(np.uint8), one_hot(LABELS)], ids=["int64", "uint8", "one-hot"]
)
async def test_softmax_cross_entropy(run: Run, labels: np.ndarray) -> None:
    """Numbers of classes, and weights of all classes, mean the same."""
    found = await run(af.nn.softmax_cross_entropy(LOGITS, labels))
    want = -(log_softmax(LOGITS) * one_hot(LABELS)).sum(axis=-1)
    np.testing.assert_allclose(found, want, rtol=1e-12)


async def test_softmax_cross_entropy_of_a_distribution(run: Run) -> None:
    weights = RNG.dirichlet(np.ones(4), (2, 3))
    found = await run(af.nn.softmax_cross_entropy(LOGITS, weights))
    np.testing.assert_allclose(found, -(log_softmax(LOGITS) * weights).sum(axis=-1), rtol=1e-12)


@pytest.mark.parametrize("sparse", [True, False])
async def test_softmax_cross_entropy_of_unknown_shapes(run: Run, sparse: bool) -> None:
    logits = af.placeholder("float64", (None, None, None))
    labels = af.placeholder("int64", (None, None)) if sparse else af.placeholder("float64", (None, None, None))
    loss = af.nn.softmax_cross_entropy(logits, labels)
    found = await run(loss, {logits: LOGITS, labels: LABELS if sparse else one_hot(LABELS)})
    assert found.shape == (2, 3)


async def test_softmax_cross_entropy_of_large_logits(run: Run) -> None:
    """Neither overflow nor the loss of a small difference: exp(-10) is left of 1000 against 1010."""
    found = await run(af.nn.softmax_cross_entropy(np.array([[1010, 1000], [1000, 1010]], np.float32), [0, 0]))
    np.testing.assert_allclose(found, [4.54e-5, 10.0000454], rtol=1e-3)


@pytest.mark.parametrize("sparse", [True, False])
async def test_gradient_of_softmax_cross_entropy(run: Run, sparse: bool) -> None:
    """Probabilities less the label."""
    x = af.constant(LOGITS)
    loss = af.nn.softmax_cross_entropy(x, LABELS if sparse else one_hot(LABELS))
    found = await run(af.gradients(loss, x))
    np.testing.assert_allclose(found, np.exp(log_softmax(LOGITS)) - one_hot(LABELS), atol=1e-12)


async def test_sigmoid_cross_entropy(run: Run) -> None:
    """Element by element; labels broadcast, and may lie between 0 and 1."""
    labels = np.array([0, 1, 0.25, 0.75])
    p = sigmoid(LOGITS)
    found = await run(af.nn.sigmoid_cross_entropy(LOGITS, labels))
    np.testing.assert_allclose(found, -labels * np.log(p) - (1 - labels) * np.log(1 - p), rtol=1e-10)


async def test_sigmoid_cross_entropy_of_large_logits(run: Run) -> None:
    """Nearly right logits have a small loss that is not 0, and wrong ones a finite one."""
    logits, labels = np.array([[50, -50, 1000, -1000], [1, 0, 0, 0]], np.float32)
    found = await run(af.nn.sigmoid_cross_entropy(logits, labels))
    np.testing.assert_allclose(found, [np.exp(-50), np.exp(-50), 1000, 0], rtol=1e-6)


async def test_gradient_of_sigmoid_cross_entropy(run: Run) -> None:
    """The probability less the label, at 0 too, where a formula with `abs` would give something else."""
    x, labels = np.array([-2.0, 0.0, 0.0, 3.0, 900.0]), np.array([0.25, 1, 0, 1, 0])
    logits = af.constant(x)
    found = await run(af.gradients(af.nn.sigmoid_cross_entropy(logits, labels), logits))
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found, sigmoid(x) - labels, atol=1e-12)


async def test_mean_squared_error(run: Run) -> None:
    """Over everything, or over some axes."""
    x, y = RNG.standard_normal((2, 4, 3)), RNG.standard_normal((4, 3))
    everything, rows = await run([af.nn.mean_squared_error(x, y), af.nn.mean_squared_error(x, y, axis=-1)])
    np.testing.assert_allclose(everything, ((x - y) ** 2).mean(), rtol=1e-12)
    np.testing.assert_allclose(rows, ((x - y) ** 2).mean(axis=-1), rtol=1e-12)


@pytest.mark.parametrize("fed", [False, True])
async def test_sequence_mask(run: Run, fed: bool) -> None:
    """The number of steps may be known in the run only; lengths may be longer."""
    steps = af.placeholder("int64", ()) if fed else 3
    mask = af.nn.sequence_mask(np.array([2, 0, 5], np.int32), steps)
    found = await run(mask, {steps: 3} if fed else None)
    np.testing.assert_array_equal(found, [[1, 0, 1], [1, 0, 1], [0, 0, 1]])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
async def test_sequence_mask_of_small_integers(run: Run, dtype: type[np.integer[Any]]) -> None:
    """There may be more steps than such a dtype can count."""
    mask = await run(af.nn.sequence_mask(np.array([2, 100], dtype), 300))
    assert mask.sum(axis=0).tolist() == [2, 100]


def test_sequence_mask_of_floats() -> None:
    with pytest.raises(af.DTypeError, match="lengths are integers, not float64"):
        af.nn.sequence_mask([2.0, 1.0], 3)


async def test_masked_mean(run: Run) -> None:
    """Masked elements may even be NaN; the mean of nothing is 0. The gradient is 0 where the mask is false."""
    x = af.constant([1.0, np.nan, 3.0, np.inf])
    mask = np.array([True, False, True, False])
    mean = af.nn.masked_mean(x, mask)
    found, grad, nothing = await run([mean, af.gradients(mean, x), af.nn.masked_mean(x, np.zeros(4, bool))])
    assert (found, nothing) == (2, 0)
    np.testing.assert_array_equal(grad, [0.5, 0, 0.5, 0])


async def test_masked_mean_of_a_mask_that_broadcasts(run: Run) -> None:
    """The mean counts elements, not items of the mask."""
    x = af.placeholder("float64", (None, None))
    mean = af.nn.masked_mean(x, np.array([[True], [False]]))
    assert await run(mean, {x: np.array([[1.0, 2.0, 6.0], [100.0, 100.0, 100.0]])}) == 3


async def test_gradients_against_differences(run: Run) -> None:
    """All together, as a model uses them."""
    at = {"logits": LOGITS, "x": RNG.standard_normal((2, 3))}
    feeds = {name: af.placeholder("float64", value.shape) for name, value in at.items()}
    mask = af.nn.sequence_mask([1, 2, 0], 2)
    loss = af.nn.masked_mean(af.nn.softmax_cross_entropy(feeds["logits"], LABELS), mask)
    loss += af.nn.mean_squared_error(af.nn.sigmoid_cross_entropy(feeds["x"], 0.25), 0.5)
    found = await run(af.gradients(loss, feeds), {feeds[name]: value for name, value in at.items()})

    def by_hand(values: Any) -> float:
        picked = np.take_along_axis(log_softmax(values["logits"]), LABELS[..., None], axis=-1)[..., 0]
        p = sigmoid(values["x"])
        entropy = -0.25 * np.log(p) - 0.75 * np.log(1 - p)
        return -(picked[0, 0] + picked[0, 1] + picked[1, 1]) / 3 + ((entropy - 0.5) ** 2).mean()

    for name, want in differences(by_hand, at).items():
        np.testing.assert_allclose(found[name], want, atol=1e-8)


def test_labels_that_do_not_fit() -> None:
    """Each message names both sides."""
    with pytest.raises(af.ShapeError, match=r"logits of shape \[2,3,4\] need integer labels"):
        af.nn.softmax_cross_entropy(LOGITS, LABELS[0])
    with pytest.raises(af.ShapeError, match=r"logits of shape \[2,3,4\] need"):
        af.nn.softmax_cross_entropy(LOGITS, LOGITS[..., :3])
    with pytest.raises(af.DTypeError, match="labels are integers, or floats of the dtype of the logits"):
        af.nn.softmax_cross_entropy(LOGITS, LOGITS.astype(np.float32))


@pytest.mark.parametrize(("label", "dtype"), [(4, np.int64), (-1, np.int64), (-1, np.int8), (200, np.uint8)])
async def test_a_label_out_of_range(run: Run, label: int, dtype: type[np.integer[Any]]) -> None:
    """Below 0 as well: it would count from the last class."""
    labels = LABELS.astype(dtype)
    labels[1, 1] = label
    with pytest.raises(af.KernelError, match=f"label {label} is no class: .* from 0, and there are 4") as caught:
        await run(af.nn.softmax_cross_entropy(LOGITS, labels))
    assert isinstance(caught.value.__cause__, IndexError)


async def test_no_labels_at_all(run: Run) -> None:
    """Nor a scalar one; both are in range."""
    empty, scalar = (
        af.nn.softmax_cross_entropy(LOGITS[:, :0], LABELS[:, :0]),
        af.nn.softmax_cross_entropy(LOGITS[0, 0], 3),
    )
    found = await run([empty, scalar])
    assert found[0].shape == (2, 0)
    np.testing.assert_allclose(found[1], -log_softmax(LOGITS)[0, 0, 3])


@pytest.mark.parametrize("labels", [np.array([0, 1, 1]), np.array([False, True, True]), [0, 1, 1], 1, True, 0.25])
async def test_labels_take_the_dtype_of_the_logits(run: Run, labels: Any) -> None:
    """Integers and booleans, and Python's numbers."""
    x = np.array([-2.0, 0.5, 3.0], np.float32)
    found = await run(af.nn.sigmoid_cross_entropy(x, labels))
    assert found.dtype == np.float32
    want = await run(af.nn.sigmoid_cross_entropy(x.astype(np.float64), np.asarray(labels, np.float64)))
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_floats_that_do_not_fit() -> None:
    """Neither is converted silently."""
    with pytest.raises(af.DTypeError, match=r"labels are of the dtype of the logits, or .*float64.* for .*float32"):
        af.nn.sigmoid_cross_entropy(LOGITS.astype(np.float32), LOGITS)
    with pytest.raises(af.DTypeError, match="logits are floats; got"):
        af.nn.sigmoid_cross_entropy(LABELS, LABELS)
