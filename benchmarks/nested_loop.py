"""A loop in a loop, with a branch inside: the steps of Collatz sequences, of which each has its own length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Trial, compare, timed, timed_await
from benchmarks.peers import JAX, NO_PEERS, PYTHON, TENSORFLOW_1, Peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.peers import TensorFlow

TIME = Figure("time an inner iteration", "µs")
FIRST = 200
"""The sequences from here on take about 55 steps each."""


async def measure(peers: Peers = NO_PEERS, *, repeats: int = 9, sequences: int = 200) -> list[Result]:
    """µs per step of a sequence: asyncflow, Python on NumPy scalars, TensorFlow, JAX."""
    with af.Graph() as graph:
        stop = af.placeholder("int32", ())
        _, total = _program(af, np.int32, af.while_loop, af.cond, stop)

    last = FIRST + sequences
    steps = int(_by_hand(last))
    scale = 1e6 / steps
    async with af.Session(graph) as session:
        trials: dict[str, Trial] = {
            ASYNCFLOW: timed_await(TIME, scale, lambda: session.run(total, {stop: last})),
            PYTHON: timed(TIME, scale, lambda: _by_hand(last)),
        }
        if peers.tensorflow is not None:
            trials[TENSORFLOW_1] = timed(TIME, scale, _tensorflow(peers.tensorflow, last))
        if peers.jax is not None:
            trials[JAX] = timed(TIME, scale, _jax(peers.jax, last))
        case = f"{sequences} sequences of {steps / sequences:.0f} steps"
        return await compare("nested_loop", case, trials, repeats=repeats)


def _program(system: Any, number: Any, while_loop: Any, cond: Any, stop: Any) -> Any:
    """The two loops, in a system that builds graphs."""

    def step(n: Any, count: Any) -> Any:
        following = cond(system.equal(n % 2, 0), lambda: n // 2, lambda: n * 3 + 1)
        return following, count + 1

    def sequence(k: Any, total: Any) -> Any:
        _, total = while_loop(lambda n, _: system.not_equal(n, 1), step, (k, total))
        return k + 1, total

    return while_loop(lambda k, _: k < stop, sequence, (number(FIRST), number(0)))


def _by_hand(last: int) -> np.int32:
    zero, one, two, three = map(np.int32, range(4))
    k, stop, total = np.int32(FIRST), np.int32(last), zero
    while k < stop:
        n = k
        while n != one:
            n = n // two if n % two == zero else n * three + one
            total = total + one
        k = k + one
    return total


def _tensorflow(tensorflow: TensorFlow, last: int) -> Callable[[], Any]:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        stop = v1.placeholder(v1.int32, ())
        _, total = _program(v1, v1.constant, v1.while_loop, v1.cond, stop)
    session = tensorflow.session(graph, threads=1)
    return lambda: session.run(total, {stop: last})


def _jax(jax: Any, last: int) -> Callable[[], Any]:
    def while_loop(condition: Any, body: Any, state: Any) -> Any:
        return jax.lax.while_loop(lambda state: condition(*state), lambda state: body(*state), state)

    @jax.jit  # type: ignore[untyped-decorator]
    def function(stop: Any) -> Any:
        return _program(jax.numpy, jax.numpy.int32, while_loop, jax.lax.cond, stop)[1]

    return lambda: np.asarray(function(np.int32(last)))
