"""Programs whose loops can run again in segments for their gradients, and how tests have them do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.memory.recomputation.segments import SegmentedLoop

N = 11
"""Iterations of most loops: neither a square nor a multiple of the lengths that are tried."""
WIDTH = 3


_REWRITE = SegmentedLoop.rewrite


def force(patch: pytest.MonkeyPatch, length: int | None, kept: int = 0) -> None:
    """Has all loops run again in segments of this length, behind the first iterations, whether that gains or not."""
    patch.setattr(SegmentedLoop, "rewrite", lambda self, *_: _REWRITE(self, length, kept * (len(self.readers) == 1)))
    patch.setattr(SegmentedLoop, "usual_length", lambda self: length)
    patch.setattr(SegmentedLoop, "gains", lambda self, count, length: True)


def recurrent(n: Any) -> tuple[af.Tensor, list[Any]]:
    """A cell with a variable, a branch, random numbers, a counter that starts at 5, and rows read from outside."""
    w = af.Variable(np.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH), name="w")
    xs = af.constant(np.linspace(0, 1, 20 * WIDTH).reshape(20, WIDTH))

    def body(t: af.Tensor, h: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, ...]:
        mask = af.random.uniform((WIDTH,), dtype="float64")
        h = af.tanh(af.matmul(h, w) + xs[t - 5]) * mask
        h = af.cond(af.sum(h) > 0, lambda: af.sin(h), lambda: h * h)
        return t + 1, h, total + af.sum(af.exp(h))

    start = af.constant(np.full(WIDTH, 0.5))
    _, h, total = af.while_loop(lambda t, *_: t < 5 + n, body, (np.int32(5), start, np.float64(0)))
    return af.sum(h) + total, [w, xs, start]


def nested(n: Any) -> tuple[af.Tensor, list[Any]]:
    """Inner loops of different lengths, with a variable and random numbers in them."""
    scale = af.Variable(np.float64(0.9), name="scale")

    def inner(j: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return j + 1, af.sin(x * scale) + 0.1 * af.random.normal((WIDTH,), dtype="float64") * x

    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.while_loop(lambda j, _: j <= i % 3, inner, (0, x))[1] * af.cos(x)

    start = af.constant(np.linspace(0.1, 1, WIDTH))
    return af.sum(af.while_loop(lambda i, _: i < n, body, (0, start))[1]), [scale, start]


def by_data(n: Any) -> tuple[af.Tensor, list[Any]]:
    """A loop that ends when a number is large enough, and has no counter of its own."""
    start = af.constant(np.linspace(1, 2, WIDTH))
    goal = 1.3 ** af.astype(n, "float64")
    (x,) = af.while_loop(lambda x: af.sum(x) < goal, lambda x: (x * 1.3 + af.sin(x) * 0.01,), (start,))
    return af.sum(x * x), [start]


def of_arrays(n: Any) -> tuple[af.Tensor, list[Any]]:
    """Arrays that give up elements once read, and an array that keeps its elements."""
    xs, ys = (af.constant(np.linspace(first, 1, N * WIDTH).reshape(N, WIDTH)) for first in (0, -1))
    given = af.TensorArray("float64", N, element_shape=(WIDTH,)).unstack(xs)
    kept = af.TensorArray("float64", N, element_shape=(WIDTH,), clear_after_read=False).unstack(ys)

    def body(i: af.Tensor, x: af.Tensor, made: Any) -> tuple[Any, ...]:
        x = af.tanh(x * given.read(i) + kept.read(i))
        return i + 1, x, made.write(i, af.exp(x))

    made = af.TensorArray("float64", N, element_shape=(WIDTH,))
    _, x, made = af.while_loop(lambda i, *_: i < n, body, (0, af.ones(WIDTH, dtype="float64"), made))
    return af.sum(made.stack()) + af.sum(x), [xs, ys]


def of_rows(n: Any) -> tuple[af.Tensor, list[Any]]:
    """The gradient loop collects gradients of rows picked by number."""
    table = af.constant(np.linspace(-1, 1, 5 * WIDTH).reshape(5, WIDTH))

    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.sin(x * af.take(table, af.stack([i % 5, i % 2]), axis=0)[0])

    return af.sum(af.while_loop(lambda i, _: i < n, body, (0, af.ones(WIDTH, dtype="float64")))[1]), [table]


def inside_a_loop(n: Any) -> tuple[af.Tensor, list[Any]]:
    """Steps of descent: the loop and its gradient are in the body of another, and the whole is differentiated."""
    start = af.constant(np.linspace(0.1, 1, WIDTH))

    def energy(x: af.Tensor) -> af.Tensor:
        return af.sum(af.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, af.sin(y) + 0.1 * y * y), (0, x))[1])

    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, x - 0.1 * af.gradients(energy(x), x)

    return af.sum(af.while_loop(lambda i, _: i < 3, body, (0, start))[1]), [start]


def two_gradients(n: Any) -> tuple[af.Tensor, list[Any]]:
    """Two gradients read what one loop saves, and one of them is differentiated."""
    x, y = af.constant(np.linspace(0.1, 1, WIDTH)), af.constant(np.float64(0.7))
    z = af.while_loop(lambda i, _: i < n, lambda i, z: (i + 1, af.sin(z * y)), (0, x))[1]
    return af.sum(af.gradients(af.sum(z), x) ** 2) + af.sum(af.gradients(af.sum(z * z), y)), [x, y]


PROGRAMS: dict[str, Callable[[Any], tuple[af.Tensor, list[Any]]]] = {
    build.__name__: build for build in (recurrent, nested, by_data, of_arrays, of_rows, inside_a_loop, two_gradients)
}


def built(build: Callable[[Any], tuple[af.Tensor, list[Any]]]) -> tuple[list[af.Tensor], af.Tensor]:
    """The value and its gradients, and the number of iterations, which is fed."""
    n = af.placeholder("int64", ())
    value, xs = build(n)
    return [value, *af.gradients(value, xs)], n


def assert_same_bits(found: Any, expected: Any) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), place
