"""A loop with another number of iterations in each request: its activations stepped together, or alone.

A GRU of 20 to 120 steps, whose input and length are each request's own. By hand, NumPy steps all live rows in one loop
without any requests: this is the possible gain.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.runtime.calls.calls import Prepared

    Request = tuple[np.ndarray[Any, Any], int]
    Requests = Sequence[tuple[object, ...]]

TIME = Figure("time of all requests", "ms")
ALONE = "a run a request"
BY_HAND = "NumPy, by hand"


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    hidden: tuple[int, ...] = (128, 512),
    clients: tuple[int, ...] = (1, 32),
    requests: int = 96,
    lengths: tuple[int, int] = (20, 120),
) -> list[Result]:
    """Milliseconds of all requests, with a pool, and without."""
    found = []
    for width in hidden:
        random = np.random.default_rng(0)
        weights = (random.normal(size=(width, 3 * width)) / width**0.5).astype(np.float32)
        asked: list[Request] = [
            (random.normal(size=3 * width).astype(np.float32), int(n))
            for n in random.integers(lengths[0], lengths[1] + 1, requests)
        ]
        with af.Graph() as graph:
            x, n = af.placeholder("float32", (3 * width,)), af.placeholder("int64", ())
            alone, pooled = (gru(x, n, weights, pool) for pool in (None, af.Pool(max(clients))))
        async with af.Session(graph) as session:
            for each in clients:
                trials: dict[str, Trial] = {
                    ASYNCFLOW: trial_of(session.prepare(pooled, [x, n]), asked, each),
                    ALONE: trial_of(session.prepare(alone, [x, n]), asked, each),
                    BY_HAND: _by_hand_trial(weights, asked, each),
                }
                case = f"{width} wide, {requests} requests of {lengths[0]} to {lengths[1]} steps, {each} at a time"
                found += await compare("pooled_loop", case, trials, repeats=repeats, tolerance=1e-4)
    return found


def gru(x: af.Tensor, n: af.Tensor, weights: np.ndarray[Any, Any], pool: af.Pool | None) -> af.Tensor:
    """The last of `n` states for the same input, [3 * width], in every step."""
    width = weights.shape[0]

    def step(i: af.Tensor, state: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        gates = state @ weights
        update = af.sigmoid(gates[:width] + x[:width])
        reset = af.sigmoid(gates[width : 2 * width] + x[width : 2 * width])
        candidate = af.tanh(x[2 * width :] + reset * gates[2 * width :])
        return i + 1, state + update * (candidate - state)

    found: af.Tensor = af.while_loop(lambda i, _: i < n, step, (0, np.zeros(width, np.float32)), pool=pool)[1]
    return found


def trial_of(run: Prepared, requests: Requests, clients: int) -> Trial:
    """Clients that ask for one after the other."""

    async def trial() -> Sample:
        left = iter(enumerate(requests))
        answers: list[Any] = [None] * len(requests)

        async def client() -> None:
            for number, request in left:
                answers[number] = await run(*request)

        started = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return Sample({TIME: (perf_counter() - started) * 1e3}, np.array(answers))

    return trial


def _by_hand_trial(weights: np.ndarray[Any, Any], requests: list[Request], capacity: int) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        with np.errstate(over="ignore"):
            answers = by_hand(weights, requests, capacity)
        return Sample({TIME: (perf_counter() - started) * 1e3}, answers)

    return trial


def by_hand(weights: np.ndarray[Any, Any], requests: list[Request], capacity: int) -> np.ndarray[Any, Any]:
    """Return the last states, [requests, width]: live rows side by side, the last one in the place of a row that
    ends.
    """
    width = weights.shape[0]
    inputs, states = np.empty((capacity, 3 * width), np.float32), np.empty((capacity, width), np.float32)
    made, limits = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    owners: list[int] = []
    answers = np.empty((len(requests), width), np.float32)
    waiting = list(range(len(requests)))[::-1]
    while waiting or owners:
        while waiting and len(owners) < capacity:
            row, number = len(owners), waiting.pop()
            inputs[row], limits[row] = requests[number]
            states[row] = made[row] = 0
            owners.append(number)
        live = len(owners)
        x, state = inputs[:live], states[:live]
        gates = state @ weights
        update = _sigmoid(gates[:, :width] + x[:, :width])
        reset = _sigmoid(gates[:, width : 2 * width] + x[:, width : 2 * width])
        state += update * (np.tanh(x[:, 2 * width :] + reset * gates[:, 2 * width :]) - state)
        made[:live] += 1
        for row in reversed(np.flatnonzero(made[:live] >= limits[:live])):
            answers[owners[row]] = states[row]
            last, number = len(owners) - 1, owners.pop()
            if row < last:
                owners[row] = number
                for slab in (inputs, states, made, limits):
                    slab[row] = slab[last]
    return answers


def _sigmoid(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = 1 / (1 + np.exp(-x))
    return found
