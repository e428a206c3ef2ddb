"""Behaviour 56: gradients of branches, and of values without a gradient."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


async def test_the_gradient_follows_the_predicate(run: Run) -> None:
    """Behaviour 56: 42 x on one side, 3 x on the other."""
    c, x = af.placeholder("int64", ()), af.constant(10.0)
    slope = af.gradients(af.cond(c < 2, lambda: x * 42.0, lambda: x * 3.0), x)
    assert [await run(slope, {c: 1}), await run(slope, {c: 3})] == [42.0, 3.0]


async def test_both_sides_pass_one_value_on(run: Run) -> None:
    """Behaviour 56: the slope is 1 whichever is taken."""
    x = af.constant(10.0)
    r = af.cond(x < 2.0, lambda: af.identity(x), lambda: x)
    assert await run(af.gradients(r, x)) == 1.0


async def test_a_gradient_taken_in_a_branch(run: Run) -> None:
    """Behaviour 56: of m = y*y with y = 7 x built outside, by x: 98 x; the other branch gives 3 x."""
    c, x = af.placeholder("int64", ()), af.constant(10.0)
    y = x * 7.0
    r = af.cond(c < 2, lambda: af.gradients(y * y, x), lambda: x * 3.0)
    assert [await run(r, {c: 1}), await run(r, {c: 3})] == [980.0, 30.0]


@pytest.mark.parametrize("shape", [(2, 3), None])
async def test_zeros_from_the_side_not_taken(run: Run, shape: Any) -> None:
    """Behaviour 56: of the shape of what only that side uses, known or not."""
    c, a, b = (af.placeholder("bool", ()), af.placeholder("float32", shape), af.placeholder("float32", shape))
    slopes = af.gradients(af.cond(c, lambda: af.sum(a * 2.0), lambda: af.sum(b * 3.0)), [a, b])
    fed = {a: np.ones((2, 3), "float32"), b: np.ones((2, 3), "float32")}
    for side, expected in ((True, (2.0, 0.0)), (False, (0.0, 3.0))):
        for got, value in zip(await run(slopes, {c: side, **fed}), expected, strict=True):
            assert got.dtype == "float32"
            np.testing.assert_array_equal(got, np.full((2, 3), value))


async def test_integer_outputs_have_no_gradient(run: Run) -> None:
    """Behaviour 56: an integer y gives None; beside a float it adds nothing; and so it is for an integer x."""
    x = af.constant(3.0)
    whole, part = af.cond(x > 2.0, lambda: (af.astype(x, "int64"), x * 2.0), lambda: (1, x))
    assert af.gradients(whole, x) is None
    assert await run(af.gradients([whole, part], x)) == 2.0
    n = af.placeholder("int64", ())
    assert af.gradients(x * n, n) is None
    assert af.gradients(x * n, n, unconnected="zero") is None


@pytest.mark.parametrize(
    "build",
    [
        lambda x: af.astype(af.argmin(x), "float64") * 2.0,
        lambda x: af.astype(af.astype(x, "int64"), "float64"),
        lambda x: af.cond(True, lambda: af.astype(af.argmin(x), "float64"), lambda: 1.0),
        lambda x: af.while_loop(lambda v: v < 5.0, lambda v: v + af.astype(af.argmax(x), "float64"), 0.0),
        af.floor,
    ],
    ids=["argmin", "cast", "cond", "while", "floor"],
)
async def test_zeros_through_ops_without_a_derivative(run: Run, build: Callable[[Any], Any]) -> None:
    """Behaviour 56: an x that only such ops connect has zeros of its shape, not None."""
    x = af.placeholder("float64", (None,))
    slope = af.gradients(build(x), x)
    np.testing.assert_array_equal(await run(slope, {x: [3.0, 1.0, 4.0]}), np.zeros(3))


async def test_values_that_are_not_connected(run: Run) -> None:
    """Behaviour 56: None, or zeros if asked for; also for a variable, and through branches and loops."""
    x, y, v = af.placeholder("float32", (2,)), af.constant(1.0), af.Variable(np.ones((3, 1)))
    other = af.cond(y > 0.0, lambda: times_three(y), lambda: y)
    assert af.gradients(other, [x, v]) == [None, None]
    zeros = await run(af.gradients(other, [x, v], unconnected="zero"), {x: [1.0, 2.0]})
    assert [(zero.dtype.name, zero.tolist()) for zero in zeros] == [
        ("float32", [0.0, 0.0]),
        ("float64", [[0.0], [0.0], [0.0]]),
    ]


def times_three(y: Any) -> Any:
    return af.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, y * 3.0), (0, y))[1]
