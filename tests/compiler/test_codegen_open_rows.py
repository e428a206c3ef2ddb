"""Values of which only the run knows how many rows they have, in regions: with the bits that they have without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.compiler.test_codegen import assert_same_bits, both_ways

W = np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32) / 8

UNARY: list[Callable[[Any], Any]] = [
    af.tanh,
    af.relu,
    af.sigmoid,
    lambda a: a * 0.5 + 1,
    lambda a: a[::-1],
    lambda a: a - af.mean(a),
    lambda a: af.tanh(a @ W),
    lambda a: af.take(a, [0], axis=0),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - b[:1],
    lambda a, b: b[:1] * a,
    lambda a, b: af.where(a[:1] > b, b, 0.0),
    lambda a, b: af.where(a > 0, a, b),
    lambda a, b: af.concat([a[:, :20] * 0.5, (a * b[:1])[:, 20:]], axis=1),
    lambda a, b: af.cond(af.sum(a) > 0, lambda: af.tanh(a) - b[:1], lambda: a * 0.5),
    lambda a, b: af.while_loop(lambda j, _: j < 2, lambda j, c: (j + 1, af.tanh(c + b[:1])), (0, a))[1],
]


def random_step(random: np.random.Generator) -> Callable[..., Any]:
    """A body of two values: operations on values of one number of rows or another, of which each may be read again."""
    script = [
        (int(random.integers(len(UNARY) + len(BINARY))), *map(int, random.integers(0, 2 + k, 2))) for k in range(12)
    ]

    def step(*variables: Any) -> list[Any]:
        values = list(variables)
        for op, a, b in script:
            made = UNARY[op](values[a]) if op < len(UNARY) else BINARY[op - len(UNARY)](values[a], values[b])
            values.append(made)
        whole = [x + af.sum(y, axis=0) * 0.01 for x, y in zip(values[:2], values[-2:], strict=True)]
        return [af.tanh(x) for x in whole]

    return step


@pytest.mark.parametrize("seed", range(30))
async def test_random_bodies_of_open_rows(graph: af.Graph, seed: int) -> None:
    """Bodies in loops and outside; rows that broadcast; fed, fetched and kept values are left alone."""
    random = np.random.default_rng(seed)
    step, n = random_step(random), af.placeholder("int64", ())
    start = [af.placeholder("float32", (None, 40)) for _ in range(2)]
    once = step(*start)
    fetches = af.while_loop(lambda i, *_: i < n, lambda i, *values: (i + 1, *step(*values)), (0, *once))
    rows = (7, 7) if seed % 3 else (1, 5)
    feeds = {n: 4} | {x: random.normal(size=(k, 40)).astype(np.float32) for x, k in zip(start, rows, strict=True)}
    first, second = await both_ways(graph, [*fetches, *once, *start], feeds)
    assert_same_bits(first, second)


@pytest.mark.parametrize("seed", range(8))
async def test_gradients_of_loops_of_open_rows(graph: af.Graph, seed: int) -> None:
    random = np.random.default_rng(seed)
    step = random_step(random)
    start = [af.placeholder("float32", (None, 40)) for _ in range(2)]
    _, *ends = af.while_loop(lambda i, *_: i < 3, lambda i, *values: (i + 1, *step(*values)), (0, *start))
    grads = af.gradients(af.sum(ends[0] * ends[1]), start)
    feeds = {x: random.normal(size=(6, 40)).astype(np.float32) for x in start}
    first, second = await both_ways(graph, grads, feeds)
    assert_same_bits(first, second)


@pytest.mark.parametrize("in_loop", [True, False])
async def test_rows_that_are_broadcast(graph: af.Graph, in_loop: bool) -> None:
    """One row and many, or none, meet: only the run finds out."""
    x, y = af.placeholder("float32", (None, 40)), af.placeholder("float32", (None, 40))

    def total(a: Any, b: Any) -> Any:
        return af.sum(af.exp(a) + b, axis=0) + af.sum(af.tanh(b) * a, axis=0) + af.sum(af.where(af.exp(b) > 1, a, 0.0))

    z = total(x, y)
    if in_loop:
        _, z = af.while_loop(lambda i, _: i < 2, lambda i, z: (i + 1, z + total(x + z, y)), (0, af.zeros(40)))
    one, many = np.ones((1, 40), np.float32), np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    for feeds in ({x: one, y: many}, {x: many, y: one}, {x: many, y: many}, {x: one, y: many[:0]}):
        assert_same_bits(*[[each] for each in await both_ways(graph, z, feeds)])


@pytest.mark.parametrize("rows", [1, 5])
async def test_rows_that_are_appended(graph: af.Graph, rows: int) -> None:
    """To two states of one store; they are read, and saved for a gradient."""
    x = af.placeholder("float32", (None, 40), name="x")

    def level(i: Any, store: af.RowStore, other: af.RowStore) -> Any:
        h = af.tanh(store.slice(0, af.shape(x)[0]) + store.take(af.arange(i, i + af.shape(x)[0])) * 0.5)
        exps = af.exp(h * 0.1)
        return i + 1, store.append(h), store.append(exps * 2).append(af.where(h > 0, exps, 0.0))

    start = af.RowStore("float32", (40,)).append(af.relu(x))
    _, store, other = af.while_loop(lambda i, *_: i < 4, level, (np.int64(0), start, start))
    y = store.stack()
    grads = af.gradients(af.sum(y * y) + af.sum(other.stack()), x)
    fed = np.random.default_rng(rows).standard_normal((rows, 40)).astype(np.float32)
    assert_same_bits(*await both_ways(graph, [y, other.stack(), grads, start.stack()], {x: fed}))


@pytest.mark.parametrize("rows", [1, 6])
async def test_products_and_joined_rows_that_are_appended(graph: af.Graph, rows: int) -> None:
    x = af.placeholder("float32", (None, 40))

    def body(i: Any, product: Any, joined: Any) -> Any:
        h = product.take(af.arange(af.shape(x)[0]))
        return i + 1, product.append(h @ W), joined.append(af.concat([h * 2, af.tanh(h)], axis=1))

    start = af.RowStore("float32", (40,)).append(x), af.RowStore("float32", (80,))
    _, *stores = af.while_loop(lambda i, *_: i < 4, body, (0, *start))
    feeds = {x: np.random.default_rng(rows).normal(size=(rows, 40)).astype(np.float32)}
    rows_of_both = [store.stack() for store in stores]
    assert_same_bits(*await both_ways(graph, rows_of_both, feeds))
