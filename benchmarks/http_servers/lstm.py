"""The models of `benchmarks.http_serving`, in NumPy: eight LSTM steps over one vector, and one layer."""

from __future__ import annotations

from typing import Any

import numpy as np

SIZE, STEPS = 512, 8
MOST = 32
"""Requests that may be computed together."""
WAIT_S = 0.002
"""Waiting time of servers that want one."""
WEIGHTS = np.random.default_rng(0).normal(scale=0.05, size=(2 * SIZE, 4 * SIZE)).astype(np.float32)


SMALL_WEIGHTS = np.ascontiguousarray(WEIGHTS[:SIZE, :SIZE])


def small_model(x: Any) -> Any:
    """One layer, for many rows."""
    return np.tanh(x @ SMALL_WEIGHTS)


def sigmoid(x: Any) -> Any:
    """In NumPy."""
    return 1 / (1 + np.exp(-x))


def model(x: Any) -> Any:
    """The last states, for many rows."""
    h = c = np.zeros_like(x)
    for _ in range(STEPS):
        i, f, o, g = np.split(np.concatenate([x, h], axis=1) @ WEIGHTS, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    return h
