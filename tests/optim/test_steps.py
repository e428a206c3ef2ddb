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

STEPS_BY_NAME = {"sgd": af.optim.sgd, "momentum": af.optim.momentum, "adam": af.optim.adam}
STEPS = 6
START = np.array([[1.5, -2.0, 0.25], [0.0, 3.0, -0.5]])
RATE = 0.1


def grads(dtype: str = "float64") -> np.ndarray:
    """Return a gradient for each step; an element never has any."""
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
    """The rate may be of any dtype, and differ from run to run: with 0 nothing moves."""
    w = af.Variable(START, name="w")
    rate = af.placeholder("float32", ())
    train = step([(af.constant(grads()[0]), w)], rate)
    await run(train, {rate: np.float32(0)})
    np.testing.assert_array_equal(await run(w.read()), START)
    await run(train, {rate: np.float32(0.5)})
    assert np.abs(await run(w.read()) - START).max() > 0.1


@pytest.mark.parametrize("step", [af.optim.sgd, af.optim.momentum, af.optim.adam])
async def test_two_variables_at_once(run: Run, step: Callable[..., af.Node]) -> None:
    """The state of one variable has nothing to do with the other's."""
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


async def test_an_optimisers_state_lies_in_the_container_of_the_variable(open_session: OpenSession) -> None:
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
    """Each message names the variable and the mistake."""
    w = af.Variable(np.zeros(3), name="w")
    g = af.zeros(3)
    for pairs, error, message in [
        ([(None, w)], af.GraphError, "'w' has no gradient"),
        ([(g, w), (g, w)], af.GraphError, "'w' comes twice"),
        ([], af.GraphError, "no variable"),
        ([(w, g)], af.GraphError, r"takes pairs of \(gradient, variable\)"),
        ([(af.zeros(3, dtype="float32"), w)], af.DTypeError, "'w', which holds float64, has another dtype"),
        ([(af.zeros(4), w)], af.ShapeError, "'w', of shape \\[3\\], has another shape"),
        ([(af.zeros(3, dtype="int64"), af.Variable([1, 2, 3], name="n"))], af.DTypeError, "only floats"),
    ]:
        with pytest.raises(error, match=message):
            step(pairs, 0.1)


def test_an_optimisers_state_needs_a_shape() -> None:
    w = af.Variable(np.zeros(3), name="w", shape=(None,))
    with pytest.raises(af.GraphError, match=r"'w' .* needs a shape"):
        af.optim.momentum([(af.zeros(3), w)], 0.1)


@pytest.mark.parametrize("betas", [{"beta1": 1.0}, {"beta2": -0.1}, {"beta1": float("nan")}, {"beta2": "0.9"}])
def test_betas_out_of_range(betas: dict[str, float]) -> None:
    w = af.Variable(0.0, name="w")
    with pytest.raises(af.GraphError, match=r"adam: beta[12] is a number, at least 0 and below 1; got"):
        af.optim.adam([(af.constant(1.0), w)], **betas)


def test_betas_are_no_tensors() -> None:
    """Betas are used while the graph is built."""
    with pytest.raises(af.GraphError, match=r"beta1 is a number, .*got <Tensor"):
        af.optim.adam([(af.constant(1.0), af.Variable(0.0))], beta1=af.constant(0.9))  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [-1e-8, float("nan"), "1e-8"])
def test_epsilon_out_of_range(epsilon: Any) -> None:
    with pytest.raises(af.GraphError, match="adam: epsilon is a number, at least 0; got"):
        af.optim.adam([(af.constant(1.0), af.Variable(0.0))], epsilon=epsilon)


@pytest.mark.parametrize("kept", [1.5, 1, -0.1, np.float32(2)])
def test_momentum_out_of_range(kept: Any) -> None:
    with pytest.raises(af.GraphError, match="momentum: momentum is a number, at least 0 and below 1; got"):
        af.optim.momentum([(af.constant(1.0), af.Variable(0.0))], 0.1, kept)


@pytest.mark.parametrize("step", STEPS_BY_NAME.values(), ids=STEPS_BY_NAME.keys())
@pytest.mark.parametrize("rate", [[0.1, 0.2], np.ones(3), "0.1", None, True, 1j, len], ids=repr)
def test_learning_rates_are_scalars(step: Callable[..., af.Node], rate: Any) -> None:
    """A vector would broadcast, and a string might be read as a number."""
    with pytest.raises(af.GraphError, match="learning_rate is a number or a scalar tensor; got"):
        step([(af.zeros(3), af.Variable(np.zeros(3)))], rate)


@pytest.mark.parametrize("rate", [1, np.float32(1), np.array(1.0), np.int64(1)], ids=repr)
async def test_learning_rates_of_any_dtype(run: Run, rate: Any) -> None:
    """Rates are converted to the dtype of the variable."""
    w = af.Variable(np.ones(2, np.float32))
    await run(af.optim.sgd([(af.ones(2, dtype="float32"), w)], rate))
    assert (await run(w.read())).tolist() == [0, 0]


@pytest.mark.parametrize("step", STEPS_BY_NAME.values(), ids=STEPS_BY_NAME.keys())
@pytest.mark.parametrize(
    "pairs",
    [
        lambda g, w: (g, w),
        lambda g, w: [g, g],
        lambda g, w: g,
        lambda g, w: [(g, w), 3],
        lambda g, w: [(g, w), (g, w, w)],
        lambda g, w: {w: g},
        lambda g, w: 0.5,
    ],
    ids=["a-pair", "gradients", "a-gradient", "a-number", "three", "mapping", "none"],
)
def test_wrong_pairs(step: Callable[..., af.Node], pairs: Callable[..., Any]) -> None:
    """The message shows what pairs are."""
    w = af.Variable(np.zeros((2, 3)), name="w")
    with pytest.raises(af.GraphError, match=r"takes pairs of \(gradient, variable\), such as zip"):
        step(pairs(w * 2, w), 0.1)


def test_the_norm_that_clipping_returns_is_no_gradient() -> None:
    """Forgotten, its [0] makes a pair of all gradients and the first variable."""
    weights = [af.Variable(np.zeros(3), name="a"), af.Variable(np.zeros(3), name="b")]
    clipped = af.optim.clip_by_global_norm([af.zeros(3), af.zeros(3)], 1.0)
    with pytest.raises(af.GraphError, match=r"gradient of variable 'a' is one tensor; got .*: take its \[0\]"):
        af.optim.sgd(zip(clipped, weights, strict=True), 0.1)


async def test_a_gradient_that_is_a_list_of_numbers(run: Run) -> None:
    w = af.Variable([1.0, 2.0])
    await run(af.optim.sgd([([1.0, 1.0], w)], 1.0))
    assert (await run(w.read())).tolist() == [0, 1]


@pytest.mark.parametrize("step", STEPS_BY_NAME.values(), ids=STEPS_BY_NAME.keys())
def test_a_step_that_is_refused_adds_nothing(step: Callable[..., af.Node], graph: af.Graph) -> None:
    """Not even for the pairs in front of the wrong one."""
    w, v = af.Variable(np.zeros(3), name="w"), af.Variable(np.zeros(3), name="v")
    good, wrong = af.zeros(3), af.zeros(2)
    before = len(graph.nodes)
    with pytest.raises(af.ShapeError, match="'v'"):
        step([(good, w), (wrong, v)], 0.1)
    assert len(graph.nodes) == before


def test_minimize_checks_its_loss() -> None:
    """As `value_and_grad` does."""
    w = af.Variable(np.ones(3), name="w")
    loss: Any
    for loss, error, message in [
        (w * 2, af.ShapeError, r"minimize: the loss is .*; it must be a scalar: take its af.sum or af.mean"),
        (af.argmax(w), af.DTypeError, "minimize: the loss is .*int64.*; only a float has a gradient"),
        ((af.sum(w), w), af.GraphError, "minimize: the loss is one tensor to differentiate; got"),
    ]:
        with pytest.raises(error, match=message):
            af.optim.minimize(loss, [w], partial(af.optim.sgd, learning_rate=0.1))


def test_minimize_checks_its_step() -> None:
    """The message shows how to bind a learning rate."""
    w = af.Variable(1.0, name="w")
    step: Any
    for step, message in [
        (0.1, r"step of minimize is a function of pairs .*\(as partial\(af.optim.sgd, learning_rate=0.1\) is\); got 0"),
        (af.optim.sgd, r"called with pairs .*\(as partial\(.* which sgd.* does not take: missing .*'learning_rate'"),
    ]:
        with pytest.raises(af.GraphError, match=message):
            af.optim.minimize(w * w, [w], step)
