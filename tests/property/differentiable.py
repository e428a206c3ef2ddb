"""Random programs that have a gradient: loops in loops, branches in them, products, casts and slices of floats."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import asyncflow as af

ROWS, COLUMNS = 3, 4
TRIPS = 3
"""No loop has more."""

FREE = {"KERNEL": 0, "PASS": 1 << 60, "COMPOSITE": 1 << 60}
"""Prices of `asyncflow.compiler.memory.saving.choose_saved` at which whatever may be computed again is."""

Step = Callable[[Random, list[Any], Any], Any]


def random_loss(random: Random, x: Any, w: Any, *, is_open: bool = False) -> Any:
    """A scalar that a loop over `x`, a matrix of `ROWS` times `COLUMNS`, gives; `w` is a square matrix of `COLUMNS`.

    Args:
        random: decides.
        x: at first.
        w: what matrices are multiplied by.
        is_open: the loop variables have extents that only a run knows.
    """
    return af.sum(_loop(random, [x], w, 0, is_open))


def _loop(random: Random, outer: list[Any], w: Any, depth: int, is_open: bool) -> Any:
    trips, counted, seed = random.randint(1, TRIPS), random.random() < 0.7, random.getrandbits(32)
    form = (None, COLUMNS) if is_open else (ROWS, COLUMNS)

    def body(i: Any, a: Any, b: Any) -> tuple[Any, ...]:
        inside = Random(seed)
        values = [*outer, a, b]
        for _ in range(inside.randint(2, 8)):
            step = inside.choice(_STEPS if depth < 2 else _STRAIGHT)
            value = step(inside, values, w) if step not in _NESTED else step(inside, values, w, depth, is_open)
            values.append(af.where(i % 2 == 0, value, a) if inside.random() < 0.2 else value)
        # Bounded, so that no second derivative overflows.
        return i + 1, af.sin(values[-1]), af.tanh(inside.choice(values) * 0.5)

    bound = trips if counted else af.astype(af.sum(af.zeros_like(outer[-1])) + trips, "int64")
    start = outer[-1], random.choice(outer) * 0.5
    invariants = ((), form, form) if is_open else None
    _, a, b = af.while_loop(lambda i, *_: i < bound, body, (np.int64(0), *start), shape_invariants=invariants)
    return a + b


# -- steps: a value from those that are there -------------------------------------------------------------------------


def _unary(random: Random, values: list[Any], w: Any) -> Any:
    return random.choice((af.sin, af.tanh, af.sigmoid, af.cos, af.square))(random.choice(values))


def _binary(random: Random, values: list[Any], w: Any) -> Any:
    return random.choice((af.add, af.multiply, af.subtract))(random.choice(values), random.choice(values))


def _product(random: Random, values: list[Any], w: Any) -> Any:
    return random.choice(values) @ w


def _mean(random: Random, values: list[Any], w: Any) -> Any:
    return random.choice(values) - af.mean(random.choice(values), axis=-1, keepdims=True)


def _wide(random: Random, values: list[Any], w: Any) -> Any:
    return af.astype(af.exp(af.astype(af.tanh(random.choice(values)), "float64")), "float32")


def _sliced(random: Random, values: list[Any], w: Any) -> Any:
    joined = af.concat([random.choice(values), random.choice(values)], axis=-1)
    gates = af.tanh(joined)
    return gates[:, :COLUMNS] * af.sigmoid(gates[:, COLUMNS:])


def _branch(random: Random, values: list[Any], w: Any, depth: int, is_open: bool) -> Any:
    decides, a, b = (random.choice(values) for _ in range(3))
    steps = [random.choice(_STRAIGHT) for _ in range(4)]
    seeds = [random.getrandbits(32) for _ in steps]

    def side(first: int) -> Any:
        inside = [a, b]
        for place in (first, first + 1):
            inside.append(steps[place](Random(seeds[place]), inside, w))
        return inside[-1] * inside[-2]

    return af.cond(af.sum(decides) > 0.1, lambda: side(0), lambda: side(2))


def _inner(random: Random, values: list[Any], w: Any, depth: int, is_open: bool) -> Any:
    return _loop(random, values[-2:], w, depth + 1, is_open)


_STRAIGHT: tuple[Any, ...] = (_unary, _unary, _binary, _binary, _product, _mean, _wide, _sliced)
_NESTED: tuple[Any, ...] = (_branch, _inner)
_STEPS = (*_STRAIGHT, *_NESTED)
