"""Steps of training, against NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af

if TYPE_CHECKING:
    from tests.conftest import OpenSession

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

STEPS = 6
START = np.array([[1.5, -2.0, 0.25], [0.0, 3.0, -0.5]])
RATE = 0.1


def grads(dtype: str = "float64") -> np.ndarray:
    """One gradient for each step; one element never has any."""
    found = np.random.default_rng(3).standard_normal((STEPS, *START.shape))
    found[:, 1, 1] = 0
    return found.astype(dtype)


def sgd(w: Any, gs: Any) -> Any:
    for g in gs:
        w = w - RATE * g
    return w


def momentum(w: Any, gs: Any, kept: float = 0.8, nesterov: bool = False) -> Any:
    v = np.zeros_like(w)
    for g in gs:
        v = kept * v + g
        w = w - RATE * (g + kept * v if nesterov else v)
    return w


def adam(w: Any, gs: Any, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> Any:
    m, s = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gs, start=1):
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * g**2
        w = w - RATE * (m / (1 - beta1**t)) / (np.sqrt(s / (1 - beta2**t)) + epsilon)
    return w


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("step", "reference"),
    [
        (af.optim.sgd, sgd),
        (partial(af.optim.momentum, momentum=0.8), momentum),
        (partial(af.optim.momentum, momentum=0.8, nesterov=True), partial(momentum, nesterov=True)),
        (af.optim.adam, adam),
        (
            partial(af.optim.adam, beta1=0.5, beta2=0.9, epsilon=0.1),
            partial(adam, beta1=0.5, beta2=0.9, epsilon=0.1),
        ),
    ],
    ids=["sgd", "momentum", "nesterov", "adam", "adam-other"],
)
async def test_several_steps(run: Run, step: Callable[..., af.Node], reference: Callable[..., Any], dtype: str) -> None:
    """Each step goes on from what the one before left, in the dtype of the variable."""
    w = af.Variable(START.astype(dtype), name="w")
    g = af.placeholder(dtype, START.shape)
    train = step([(g, w)], learning_rate=RATE)
    for each in grads(dtype):
        await run(train, {g: each})
    found = await run(w.read())
    assert found.dtype == dtype
    np.testing.assert_allclose(found, reference(START, grads()), rtol=1e-12 if dtype == "float64" else 2e-5)


@pytest.mark.parametrize("step", [af.optim.sgd, af.optim.momentum, af.optim.adam])
async def test_a_learning_rate_that_is_a_tensor(run: Run, step: Callable[..., af.Node]) -> None:
    """It may be of any dtype, and differ from run to run: with 0 nothing moves."""
    w = af.Variable(START, name="w")
    rate = af.placeholder("float32", ())
    train = step([(af.constant(grads()[0]), w)], rate)
    await run(train, {rate: np.float32(0)})
    np.testing.assert_array_equal(await run(w.read()), START)
    await run(train, {rate: np.float32(0.5)})
    assert np.abs(await run(w.read()) - START).max() > 0.1


@pytest.mark.parametrize("step", [af.optim.sgd, af.optim.momentum, af.optim.adam])
async def test_two_variables_at_once(run: Run, step: Callable[..., af.Node]) -> None:
    """What is remembered for one has nothing to do with the other."""
    a, b = af.Variable(START, name="a"), af.Variable(START[0], name="b")
    train = step([(af.constant(grads()[0]), a), (af.constant(grads()[1, 1]), b)], learning_rate=RATE)
    alone = af.Variable(START[0], name="alone")
    train_alone = step([(af.constant(grads()[1, 1]), alone)], learning_rate=RATE)
    for _ in range(3):
        await run([train, train_alone])
    np.testing.assert_array_equal(await run(b.read()), await run(alone.read()))


async def test_half_precision_keeps_its_means_in_float32(run: Run) -> None:
    """Squares of gradients of 1e-4 are 0 in float16, and so is Adam's epsilon."""
    w = af.Variable(np.ones(3, np.float16), name="w")
    train = af.optim.adam([(af.constant(np.array([1e-4, -1e-4, 0], np.float16)), w)], 0.125)
    await run(train)
    found = await run(w.read())
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, [0.875, 1.125, 1], rtol=1e-3)


async def test_what_is_remembered_lies_in_the_container_of_the_variable(open_session: OpenSession) -> None:
    """So two sessions train on together: the means of Adam count the steps of both."""
    try:
        w = af.Variable(START, name="w", container="tests.optim")
        train = af.optim.adam([(af.constant(grads()[0]), w)], RATE)
        for count in (1, 2):
            async with open_session() as session:
                await session.run(train)
                np.testing.assert_allclose(await session.run(w.read()), adam(START, [grads()[0]] * count), rtol=1e-12)
    finally:
        af.reset_container("tests.optim")


async def test_steps_in_a_loop(run: Run) -> None:
    """A whole training loop in the graph: every iteration sees the variables of the one before."""
    w = af.Variable(4.0, name="w")

    def body(i: Any) -> Any:
        train = af.optim.sgd([(2 * w.read(), w)], learning_rate=0.25)
        with af.control_dependencies([train]):
            return af.identity(i + 1)

    assert await run(af.while_loop(lambda i: i < 5, body, 0)) == 5
    assert await run(w.read()) == 4 / 2**5


async def test_minimize(run: Run) -> None:
    """A line is found again: slope 3, intercept -1."""
    x = np.linspace(-1, 1, 32)
    slope, intercept = af.Variable(0.0, name="slope"), af.Variable(0.0, name="intercept")
    loss = af.nn.mean_squared_error(slope * x + intercept, 3 * x - 1)
    weights = {"slope": slope, "intercept": intercept}
    train = af.optim.minimize(loss, weights, partial(af.optim.momentum, learning_rate=0.2, momentum=0.5))
    for _ in range(200):
        await run(train)
    found = await run({"loss": loss, **weights})
    assert found["loss"] < 1e-12
    np.testing.assert_allclose([found["slope"], found["intercept"]], [3, -1], atol=1e-5)


@pytest.mark.parametrize("step", [af.optim.sgd, af.optim.momentum, af.optim.adam])
def test_pairs_that_do_not_fit(step: Callable[..., af.Node]) -> None:
    """Each message names the variable and what is wrong."""
    w = af.Variable(np.zeros(3), name="w")
    g = af.zeros(3)
    for pairs, error, message in [
        ([(None, w)], af.GraphError, "'w' has no gradient"),
        ([(g, w), (g, w)], af.GraphError, "'w' comes twice"),
        ([], af.GraphError, "no variable"),
        ([(w, g)], af.GraphError, r"takes \(gradient, variable\)"),
        ([(af.zeros(3, dtype="float32"), w)], af.DTypeError, "'w', which holds float64, has another dtype"),
        ([(af.zeros(4), w)], af.ShapeError, "'w', of shape \\[3\\], has another shape"),
        ([(af.zeros(3, dtype="int64"), af.Variable([1, 2, 3], name="n"))], af.DTypeError, "only floats"),
    ]:
        with pytest.raises(error, match=message):
            step(pairs, 0.1)


def test_what_is_remembered_needs_a_shape() -> None:
    w = af.Variable(np.zeros(3), name="w", shape=(None,))
    with pytest.raises(af.GraphError, match=r"'w' .* needs a shape"):
        af.optim.momentum([(af.zeros(3), w)], 0.1)


@pytest.mark.parametrize("betas", [{"beta1": 1.0}, {"beta2": -0.1}, {"beta1": float("nan")}])
def test_betas_out_of_range(betas: dict[str, float]) -> None:
    w = af.Variable(0.0, name="w")
    with pytest.raises(af.GraphError, match=r"beta[12] is at least 0 and below 1"):
        af.optim.adam([(af.constant(1.0), w)], **betas)
