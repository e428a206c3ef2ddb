"""LSTM and GRU in NumPy, one sequence at a time, and central differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

STEP = 1e-6


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def lstm_step(x: Array, state: tuple[Array, Array], weights: Sequence[Array]) -> tuple[Array, tuple[Array, Array]]:
    """Gate by gate, each with its own columns."""
    h, c = state
    size = h.shape[-1]

    def gate(place: int) -> Array:
        part = slice(place * size, (place + 1) * size)
        return x @ weights[0][:, part] + h @ weights[1][:, part] + weights[2][part]

    c = sigmoid(gate(1)) * c + sigmoid(gate(0)) * np.tanh(gate(2))
    h = sigmoid(gate(3)) * np.tanh(c)
    return h, (h, c)


def gru_step(x: Array, h: Array, weights: Sequence[Array]) -> tuple[Array, Array]:
    """Gate by gate, in the form of the textbook."""
    size = h.shape[-1]
    w, u, b = (np.split(item, 3, axis=-1) for item in weights[:3])
    reset = sigmoid(x @ w[0] + h @ u[0] + b[0])
    update = sigmoid(x @ w[1] + h @ u[1] + b[1])
    candidate = np.tanh(x @ w[2] + b[2] + reset * (h @ u[2] + weights[3]))
    assert candidate.shape[-1] == size
    h = (1 - update) * candidate + update * h
    return h, h


def sequence_by_sequence(
    step: Callable[..., tuple[Array, Any]], weights: Sequence[Array], inputs: Array, state: Any, lengths: Sequence[int]
) -> tuple[Array, list[Any]]:
    """Outputs with zeros past the ends, and the last state of each sequence."""
    steps, batch, _ = inputs.shape
    outputs = np.zeros((steps, batch, weights[1].shape[0]), inputs.dtype)
    finals = []
    for k in range(batch):
        own = tuple(part[k] for part in state) if isinstance(state, tuple) else state[k]
        for t in range(lengths[k]):
            outputs[t, k], own = step(inputs[t, k], own, weights)
        finals.append(own)
    return outputs, finals


def differences(loss: Callable[[Mapping[str, Array]], float], at: Mapping[str, Array]) -> dict[str, Array]:
    """Central differences of `loss` by every element."""
    found = {}
    for name, value in at.items():
        grad = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            sides = []
            for sign in (1, -1):
                moved = value.copy()
                moved[place] += sign * STEP
                sides.append(loss({**at, name: moved}))
            grad[place] = (sides[0] - sides[1]) / (2 * STEP)
        found[name] = grad
    return found
