"""Shapes and counters as data: a vector that the host has made is computed with as any other is, wherever that is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

MATRIX = np.ones((3, 2), np.float32)


def chain(vector: af.Tensor) -> af.Tensor:
    """Two operations, so that there is a region to compute them in."""
    return vector * 2 + 1


@pytest.mark.parametrize("taken", [True, False])
async def test_a_branch_gives_a_shape_or_data(run: Run, taken: bool) -> None:
    """Both where the host knows the predicate and where a device computes it."""
    matrix, data = af.placeholder("float32", (None, None)), af.placeholder("int64", (None,))
    n = af.placeholder("int64", ())
    chosen = [af.cond(predicate, lambda: af.shape(matrix), lambda: data[:2]) for predicate in (n > 2, af.sum(data) > 2)]
    swapped = af.cond(n > 2, lambda: data[:2], lambda: af.shape(matrix))
    feeds = {matrix: MATRIX, data: np.array([5 if taken else 1, 1]), n: 3 if taken else 0}
    shape, other = ([3, 2], [5, 1]) if taken else ([1, 1], [3, 2])
    expected = [np.array(value) * 2 + 1 for value in (shape, shape, other)]
    actual = await run([chain(value) for value in (*chosen, swapped)], feeds)
    for one, two in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, two)
    # What a branch gives may be read on the host as well.
    np.testing.assert_array_equal(await run(af.shape(af.zeros(chosen[0])), feeds), shape)


async def test_a_loop_variable_begins_as_a_shape(run: Run) -> None:
    matrix, data = af.placeholder("float32", (None, None)), af.placeholder("int64", (2,))
    n = af.placeholder("int64", ())
    doubled = af.while_loop(lambda v: af.sum(v) < 100, chain, af.shape(matrix))
    _, counted = af.while_loop(lambda i, v: i < n, lambda i, v: (i + 1, chain(v) + data), (0, af.shape(matrix)))
    feeds = {matrix: MATRIX, data: np.array([1, 4]), n: 2}
    first, second = await run([doubled, chain(counted)], feeds)
    np.testing.assert_array_equal(first, [63, 47])
    np.testing.assert_array_equal(second, [37, 47])


async def test_a_loop_variable_becomes_a_shape(run: Run) -> None:
    """The variable begins as data, is doubled, and takes the shape over; no iteration at all leaves the data."""
    matrix, data = af.placeholder("float32", (None, None)), af.placeholder("int64", (2,))
    n = af.placeholder("int64", ())
    _, turned, last = af.while_loop(
        lambda i, *_: i < n, lambda i, v, w: (i + 1, af.shape(matrix), chain(v)), (0, data, data)
    )
    for count, expected in ((0, [[3, 9], [3, 9]]), (1, [[7, 5], [3, 9]]), (2, [[7, 5], [7, 5]])):
        feeds = {matrix: MATRIX, data: np.array([1, 4]), n: count}
        actual = await run([chain(turned), last], feeds)
        np.testing.assert_array_equal(actual, expected if count else [[3, 9], [1, 4]])


async def test_an_array_of_counters(run: Run) -> None:
    """A stack of numbers of the host is a vector like any other."""
    n = af.placeholder("int64", ())
    stacked = af.TensorArray("int64", 2, element_shape=()).write(0, n).write(1, n + 1).stack()
    np.testing.assert_array_equal(await run(chain(stacked), {n: 3}), [7, 9])


async def test_a_gradient_by_way_of_a_branch_on_shapes(run: Run) -> None:
    matrix, n = af.placeholder("float32", (None, None)), af.placeholder("int64", ())
    weights = af.astype(af.cond(n > 2, lambda: af.shape(matrix), lambda: af.argmax(matrix, axis=0)), "float32")
    (gradient,) = af.gradients(af.sum(matrix[0] * weights), [matrix])
    np.testing.assert_array_equal(await run(gradient, {matrix: MATRIX, n: 3}), [[3, 2], [0, 0], [0, 0]])


@pytest.mark.parametrize(
    "view",
    [
        lambda scalar: af.expand_dims(scalar, axis=(0, 1)),
        lambda scalar: af.expand_dims(scalar, axis=-1),
        lambda scalar: scalar[None, None],
        lambda scalar: af.reshape(scalar, (1, 1)),
        lambda scalar: af.broadcast_to(scalar, (1, 2)),
    ],
    ids=["expand_dims", "expand_dims behind", "getitem", "reshape", "broadcast_to"],
)
async def test_a_view_of_a_scalar_is_an_array_as_others_are(run: Run, view: Callable[[af.Tensor], af.Tensor]) -> None:
    scalar, matrix = af.placeholder("float32", ()), af.placeholder("float32", (3, 2))
    feeds = {scalar: 3, matrix: MATRIX}
    np.testing.assert_array_equal(await run(chain(view(scalar) * matrix), feeds), 7 * MATRIX)
