"""Gradients of branches: their values on either side, and the nodes that they add to a graph."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


@pytest.mark.parametrize(("taken", "expected"), [(True, [2.0, 4.0, 6.0]), (False, [2.0, 4.0, 2.0])])
async def test_results_of_different_shapes(run: Run, taken: bool, expected: list[float]) -> None:
    """Three elements on one side, two on the other: ``x * x`` and ``x[:2] * x[1:]``."""
    x, p = af.placeholder("float64", (3,)), af.placeholder("bool", ())
    y = af.cond(p, lambda: x * x, lambda: x[:2] * x[1:])
    assert y.shape == (None,)
    slope = af.gradients(y, x)
    assert slope.shape == (3,)
    np.testing.assert_array_equal(await run(slope, {x: [1.0, 2.0, 3.0], p: taken}), expected)


@pytest.mark.parametrize(("taken", "expected"), [(True, [32.0, 48.0]), (False, [12.0, 12.0])])
async def test_a_loop_on_one_side(run: Run, taken: bool, expected: list[float]) -> None:
    """The gradient's loop does not run if the branch is not taken: x**4 by squaring twice, or x**3."""
    x, p = af.placeholder("float64", ()), af.placeholder("bool", ())

    def squares() -> Any:
        return af.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * y), (0, x))[1]

    y = af.cond(p, squares, lambda: x * x * x)
    slope = af.gradients(y, x)
    trace = af.Trace()
    found = await run([slope, af.gradients(slope, x)], {x: 2.0, p: taken}, trace=trace)
    assert found == expected
    assert any("/while/" in firing.node for firing in trace.firings if firing.op == "multiply") == taken


async def test_branches_in_branches(run: Run) -> None:
    """All four combinations of ``x**2``, ``sin x``, ``a x``, ``a``, with second derivatives."""
    x, a, p, q = (af.placeholder(dtype, ()) for dtype in ("float64", "float64", "bool", "bool"))
    y = af.cond(
        p,
        lambda: af.cond(q, lambda: x * x, lambda: af.sin(x)),
        lambda: af.cond(q, lambda: a * x, lambda: a),
    )
    by_x, by_a = af.gradients(y, (x, a))
    crossed = af.gradients(by_x, (x, a))
    for first, second, expected in (
        (True, True, (1.4, 0, 2, 0)),
        (True, False, (np.cos(0.7), 0, -np.sin(0.7), 0)),
        (False, True, (3, 0.7, 0, 1)),
        (False, False, (0, 1, 0, 0)),
    ):
        found = await run((by_x, by_a, *crossed), {x: 0.7, a: 3.0, p: first, q: second})
        np.testing.assert_allclose(found, expected, atol=1e-15)


async def test_a_variable_read_on_one_side(run: Run) -> None:
    """Zeros, of its shape, if the other is taken."""
    weights, p = af.Variable(np.array([2.0, 3.0]), name="weights"), af.placeholder("bool", ())
    y = af.cond(p, lambda: weights.read() * weights.read(), lambda: np.ones(2))
    slope = af.gradients(y, weights)
    np.testing.assert_array_equal(await run(slope, {p: True}), [4.0, 6.0])
    np.testing.assert_array_equal(await run(slope, {p: False}), [0.0, 0.0])


def test_no_branch_is_made_if_nothing_flows() -> None:
    """The gradient is zeros if only ops without a derivative connect y to x."""
    x, p = af.placeholder("float64", (3,)), af.placeholder("bool", ())
    y = af.cond(p, lambda: af.astype(af.argmax(x), af.float64), lambda: np.float64(0))
    slope = af.gradients(y, x)
    assert slope.node.op.name == "full"
    assert [node.op.name for node in slope.graph.nodes].count("cond") == 1


def test_values_are_shown_once_and_existing_outputs_never_move() -> None:
    """The forward `cond` gets new outputs behind its present ones; a second gradient uses the same ones."""
    x, p = af.placeholder("float64", ()), af.placeholder("bool", ())
    y, z = af.cond(p, lambda: (af.sin(x * x), x), lambda: (af.sin(x) * x, x * 2))
    node = y.node
    af.gradients(y, x)
    count = len(node.outputs)
    af.gradients(y, x)
    assert len(node.outputs) == count > 2
    assert (node.outputs[0] is y, node.outputs[1] is z) == (True, True)


def test_what_looks_at_a_capture_in_another_way_is_not_shown() -> None:
    """A transposed capture is transposed again."""
    x, w, p = af.placeholder("float64", (2,)), af.placeholder("float64", (2, 3)), af.placeholder("bool", ())
    y = af.cond(p, lambda: w.mT @ x, lambda: af.zeros((3,)))
    af.gradients(y, (x, w))
    assert len(y.node.outputs) == 1
