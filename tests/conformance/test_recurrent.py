"""Sequences of different lengths through a loop, forward and back, and a step of training, in every arrangement."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.nn.recurrent import differences, lstm_step, sequence_by_sequence

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

LENGTHS = [2, 4, 0, 1]
INPUTS = np.random.default_rng(1).standard_normal((4, 4, 2))
ZEROS = np.zeros((4, 3))


async def test_a_training_step_of_an_lstm(run: Run) -> None:
    """Outputs, gradients, and the weights after one step of gradient descent."""
    weights = af.nn.lstm_weights(2, 3, seed=1, dtype="float64")
    cell = partial(af.nn.lstm_cell, weights=weights.read())
    outputs, _ = af.nn.dynamic_rnn(cell, INPUTS, (ZEROS, ZEROS), LENGTHS)
    loss = af.sum(outputs**2)
    grads = af.gradients(loss, weights)
    train = af.optim.sgd(zip(grads, weights, strict=True), 0.5)
    before = {name: np.array(variable.initial) for name, variable in zip("wub", weights, strict=True)}

    def by_hand(values: Any) -> Any:
        return sequence_by_sequence(lstm_step, list(values.values()), INPUTS, (ZEROS, ZEROS), LENGTHS)[0]

    found, by_weights, _ = await run([outputs, grads, train])
    np.testing.assert_allclose(found, by_hand(before), atol=1e-12)
    want = differences(lambda values: float((by_hand(values) ** 2).sum()), before)
    for grad, expected in zip(by_weights, want.values(), strict=True):
        np.testing.assert_allclose(grad, expected, atol=1e-7)
    for variable, (name, old) in zip(weights, before.items(), strict=True):
        np.testing.assert_allclose(await run(variable.read()), old - 0.5 * want[name], atol=1e-7)


@pytest.mark.slow
async def test_a_loop_of_training_steps(run: Run) -> None:
    """Every iteration sees the variables, and what Adam remembers, as the one before left them."""
    w = af.Variable([3.0, -2.0], name="w")

    def step(i: Any) -> Any:
        loss = af.sum((w.read() - 1) ** 2)
        with af.control_dependencies([af.optim.minimize(loss, [w], partial(af.optim.adam, learning_rate=0.1))]):
            return af.identity(i + 1)

    assert await run(af.while_loop(lambda i: i < 150, step, 0)) == 150
    np.testing.assert_allclose(await run(w.read()), [1, 1], atol=0.02)
