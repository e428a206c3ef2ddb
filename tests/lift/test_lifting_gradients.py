"""Gradients in a body, through loops that each row leaves for itself, equal the gradients row by row.

So do the gradients of their results, for the rows of one axis and of two.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(11)
X = RNG.normal(size=(2, 4, 3))
W = RNG.normal(size=(3, 3)) * 0.5


def grown(x: Any, w: Any) -> Any:
    return af.while_loop(lambda y: af.sum(y) < 4.0, lambda y: af.tanh(y @ w) * 0.2 + y + af.abs(x) + 0.5, (x,))[0]


def _times(x: Any, step: Callable[[Any, Any], Any]) -> Any:
    """`step` as often as the row says: not at all for some, and not the same for all."""
    count = af.astype(af.abs(x[0]) * 4, "int64")
    return af.while_loop(lambda i, y: i < count, lambda i, y: (i + 1, step(i, y)), (0, x))[1]


def counted(x: Any, w: Any) -> Any:
    return _times(x, lambda i, y: af.tanh(y @ w + x[i % 3] * y) + x)


def loop_in_loop(x: Any, w: Any) -> Any:
    return _times(x, lambda i, y: af.sin(grown(y, w) @ w))


def fixed_loop_in_loop(x: Any, w: Any) -> Any:
    step = lambda k, z: (k + 1, af.sin(z @ w) + z * x[k])  # noqa: E731
    return _times(x, lambda i, y: af.while_loop(lambda k, z: k < 3, step, (0, y))[1])


def branch_in_loop(x: Any, w: Any) -> Any:
    return _times(x, lambda i, y: af.cond(y[0] > 0.0, lambda: af.tanh(y @ w), lambda: y * y * 0.5 + x))


def piece_in_loop(x: Any, w: Any) -> Any:
    """A piece in a loop, whose gradient holds a barrier."""
    return _times(x, lambda i, y: af.recompute(lambda z: af.tanh(z @ w) * z + x)(y))


def loops_in_branches(x: Any, w: Any) -> Any:
    return af.cond(x[0] > 0.0, lambda: grown(x, w), lambda: counted(x * 2.0, w))


BODIES = [grown, counted, loop_in_loop, fixed_loop_in_loop, branch_in_loop, piece_in_loop, loops_in_branches]


@pytest.mark.parametrize("body", [branch_in_loop, loops_in_branches])
def test_gradients_inside_rows_of_rows_are_built(body: Any) -> None:
    """Lifting the inner rows drops their body, whose notes on what branches save the outer rows still need."""

    def slope(x: Any) -> Any:
        return af.gradients(af.sum(body(x, W)), [x])[0]

    with af.Graph():
        x = af.placeholder("float64", (None, None, 3))
        assert af.map_fn(partial(af.map_fn, slope), x, lift=True).spec == x.spec


@pytest.mark.slow
@pytest.mark.parametrize(("body", "regions"), [*((body, True) for body in BODIES), (counted, False)])
async def test_gradients_of_loops_of_rows(body: Any, regions: bool) -> None:
    def derived(x: Any, w: Any) -> Any:
        y = body(x, w)
        return y, *af.gradients(af.sum(y * y), [x, w])

    found = []
    with af.Graph() as graph:
        x, w = af.placeholder("float64", (None, None, 3)), af.constant(W)
        of_row = lambda row: derived(row, w)  # noqa: E731
        for lift in (True, False):
            inner = partial(af.map_fn, of_row, lift=lift)
            one, two = inner(x[0]), af.map_fn(inner, x, lift=lift)
            loss = sum(af.sum(each[1] ** 2) + af.sum(each[2]) for each in (one, two))
            found.append((*one, *two, *af.gradients(loss, [x])))
    async with af.Session(graph, regions=regions) as session:
        got, want = await session.run(found, {x: X})
        none = await session.run(found[0][:3], {x: X[:, :0]})
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert [each.shape for each in none] == [(0, 3), (0, 3), (0, 3, 3)]


@pytest.mark.slow
def test_gradients_of_loops_of_rows_on_devices_with_memories_of_their_own() -> None:
    """And where no row takes the branch that saves something."""
    with af.Graph() as graph:
        x, w = af.constant(X[0]), af.constant(W)
        losses = []
        for lift in (True, False):
            body = lambda row: af.gradients(af.sum(branch_in_loop(row, w) ** 2), [row])[0]  # noqa: E731
            losses.append(af.sum(af.map_fn(body, x, lift=lift) ** 2))
        slopes = [af.gradients(loss, [x])[0] for loss in losses]

    async def main() -> Any:
        async with af.Session(graph, devices=["sim:0", "sim:1"]) as session:
            return await session.run(slopes)

    with virtual_clock("2 x v100") as clock:
        got, want = clock.run(main())
    np.testing.assert_allclose(got, want, rtol=1e-9)


def _of_gradient(x: Any) -> Any:
    """A second derivative in the body."""
    y = counted(x, af.constant(W))
    (slope,) = af.gradients(af.sum(y * y), [x])
    return af.gradients(af.sum(slope * slope), [x])[0]


def _in_branch(x: Any) -> Any:
    """The loop stands around the branch, and its gradient in it."""
    y = af.sum(grown(x, af.constant(W)))
    return af.cond(x[0] > 0.0, lambda: af.gradients(y, [x])[0], lambda: x)


def _in_loop(x: Any) -> Any:
    y = af.sum(grown(x, af.constant(W)))
    return _times(x, lambda i, z: z + af.gradients(y, [x])[0])


def _array(x: Any) -> Any:
    array = af.TensorArray("float64", 3, clear_after_read=False).unstack(x)
    y = _times(x, lambda i, z: af.sin(z) * array.read(i % 3))
    return af.gradients(af.sum(y), [x])[0]


@pytest.mark.parametrize("body", [_of_gradient, _in_branch, _in_loop, _array])
async def test_unliftable_code_is_a_loop_and_right(body: Any) -> None:
    with af.Graph() as graph:
        x = af.constant(X[0])
        auto, looped = af.map_fn(body, x, name="auto"), af.map_fn(body, x, lift=False)
        assert "map_fn is a loop over rows" in graph.remarks["auto"]
    async with af.Session(graph) as session:
        got, want = await session.run((auto, looped))
    np.testing.assert_allclose(got, want, rtol=1e-9)
