"""Behaviour 63, 64, 66: gradients of loops whose shapes are unknown or grow; of rows; and the values saved for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import Graph
from tests.conftest import OpenSession

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


def repeat(times: Any, body: Callable[..., Any], initial: Any, **options: Any) -> Any:
    """Return a value after `times` applications of `body`, which also gets the iteration's number."""
    return af.while_loop(lambda i, _: i < times, lambda i, x: (i + 1, body(i, x)), (0, initial), **options)[1]


# -- 63: shapes that are unknown, or grow ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(None,), None])
async def test_a_captured_value_of_unknown_shape(run: Run, shape: Any) -> None:
    """Behaviour 63: ``v = x * v`` five times from [2] gives 2 x**5, and 10 x**4 is 810 and 2560 at 3 and 4."""
    x = af.placeholder("float32", shape)
    y = repeat(5, lambda i, v: x * v, np.array([2.0], np.float32), shape_invariants=((), None))
    slope = af.gradients(y, x)
    assert slope.shape == shape
    np.testing.assert_allclose(await run(slope, {x: [3.0, 4.0]}), [810.0, 2560.0])


async def test_a_loop_that_joins(open_session: OpenSession, graph: Graph) -> None:
    """Behaviour 63: a variable joined to a growing vector twice moves by 2 * 0.01, to 0.98 and 1.98."""
    weights = af.Variable(np.array([1.0, 2.0]), name="weights")
    joined = repeat(2, lambda i, y: af.concat([y, weights.read()]), np.zeros(0), shape_invariants=((), (None,)))
    update = weights.assign_sub(af.gradients(af.sum(joined), weights) * 0.01)
    async with open_session(graph) as session:
        np.testing.assert_allclose(await session.run(update), [0.98, 1.98])


async def test_a_loop_variable_that_grows(run: Run) -> None:
    """Behaviour 63: ``y = concat(y, sin(y))``: the gradient shrinks as it goes back."""
    x = af.placeholder("float64", (2,))
    y = repeat(3, lambda i, y: af.concat([y, af.sin(y)]), x, shape_invariants=((), (None,)))
    slope = af.gradients(y, x)
    assert slope.shape == (2,)
    values = np.array([0.3, -0.7])
    expected, grown = np.ones(8)[:, None], [values]
    for _ in range(2):
        grown.append(np.concatenate([grown[-1], np.sin(grown[-1])]))
    expected = np.ones(16)
    for value in reversed(grown):
        expected = expected[: len(value)] + expected[len(value) :] * np.cos(value)
    np.testing.assert_allclose(await run(slope, {x: values}), expected)


@pytest.mark.parametrize("known", [True, False])
async def test_broadcasts_in_the_body(run: Run, known: bool) -> None:
    """Behaviour 63: broadcast axes are summed: a row, a column and a scalar added to a matrix three times."""
    parts = {"row": (3,), "column": (2, 1), "scalar": ()}
    inputs = [af.placeholder("float64", shape if known else (None,) * len(shape)) for shape in parts.values()]
    row, column, scalar = inputs
    y = repeat(3, lambda i, y: (y + row) + column * scalar, np.zeros((2, 3)), shape_invariants=((), (None, None)))
    slopes = await run(
        af.gradients(y, inputs), {row: np.ones(3), column: np.array([[1.0], [2.0]]), scalar: np.float64(5)}
    )
    totals: list[Any] = [[6.0, 6.0, 6.0], [[45.0], [45.0]], 27.0]
    for slope, expected in zip(slopes, totals, strict=True):
        np.testing.assert_allclose(slope, expected)


# -- 64: rows ---------------------------------------------------------------------------------------------------------


def embedded(table: Any, times: int, rows: Callable[[Any], Any]) -> Any:
    """The sum of the rows of a table that the iterations pick."""
    return repeat(times, lambda i, total: total + af.sum(af.take(table, rows(i), axis=0)), np.float64(0))


@pytest.mark.parametrize("as_variable", [False, True])
async def test_one_row_in_every_iteration(run: Run, as_variable: bool) -> None:
    """Behaviour 64: row 0 is picked 24 times, no other ever."""
    values = np.arange(5.0)
    table = af.Variable(values, name="table") if as_variable else af.placeholder("float64", (5,))
    slope = af.gradients(embedded(table, 24, lambda i: np.array([0])), table)
    assert slope.shape == (5,)
    feeds = {} if as_variable else {table: values}
    np.testing.assert_array_equal(await run(slope, feeds), [24, 0, 0, 0, 0])


async def test_two_rows_in_every_iteration(run: Run) -> None:
    """Behaviour 64: rows 1 and 3, 12 times."""
    table = af.placeholder("float64", (5,))
    slope = af.gradients(embedded(table, 12, lambda i: np.array([1, 3])), table)
    np.testing.assert_array_equal(await run(slope, {table: np.arange(5.0)}), [0, 12, 0, 12, 0])


@pytest.mark.parametrize("shape", [(9,), (None,), None])
async def test_the_row_of_the_iteration(run: Run, shape: Any) -> None:
    """Behaviour 64: each row once, whatever is known of how many there are."""
    x = af.placeholder("float64", shape)
    slope = af.gradients(repeat(9, lambda i, total: total + af.reshape(x[i], ()), np.float64(0)), x)
    np.testing.assert_array_equal(await run(slope, {x: [4.0, 6, 0, 7, 0, 0, 1, 2, 0]}), np.ones(9))


async def test_rows_counted_from_the_end(run: Run) -> None:
    """Behaviour 64: -1 is the last row."""
    x = af.placeholder("float64", (6, 2))
    slope = af.gradients(repeat(3, lambda i, total: total + x[-i - 1] * x[i], np.zeros(2)), x)
    values = np.arange(12.0).reshape(6, 2)
    np.testing.assert_array_equal(await run(slope, {x: values}), values[::-1])


async def test_rows_that_repeat_and_change(run: Run) -> None:
    """Behaviour 64: rows add up within an iteration and between them."""
    table = af.placeholder("float64", (16, 2))
    slope = af.gradients(embedded(table, 4, lambda i: af.stack([i, i, i + 1])), table)
    expected = np.zeros((16, 2))
    for i in range(4):
        np.add.at(expected, [i, i, i + 1], 1)
    np.testing.assert_array_equal(await run(slope, {table: np.zeros((16, 2))}), expected)


async def test_rows_and_the_whole(run: Run) -> None:
    """Behaviour 64: sparse and dense add: two slices, a row, and all of it."""
    x = af.placeholder("float64", (8,))
    y = repeat(3, lambda i, total: total + x[i] * 2 + af.sum(x[:2]) + x[1] + af.sum(x), np.float64(0))
    expected = np.full(8, 3.0) + [2, 2, 2, 0, 0, 0, 0, 0] + [3, 6, 0, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(await run(af.gradients(y, x), {x: np.arange(8.0)}), expected)


async def test_rows_in_nested_loops(run: Run) -> None:
    """Behaviour 64: ``x[i] * x[j]`` over all i and j: twice the sum, and second derivatives of 2."""
    x = af.placeholder("float64", (5,))
    y = repeat(
        5, lambda i, total: total + repeat(5, lambda j, inner: inner + x[i] * x[j], np.float64(0)), np.float64(0)
    )
    slope = af.gradients(y, x)
    curvature = af.gradients(slope, x)
    first, second = await run((slope, curvature), {x: np.arange(5.0)})
    np.testing.assert_allclose(first, np.full(5, 20.0))
    np.testing.assert_allclose(second, np.full(5, 10.0))


@pytest.mark.slow
async def test_windows_in_branches_and_nested_loops(run: Run) -> None:
    """Behaviour 100: windows and rows by vectors, read where they are added up as parts; second derivatives."""
    x = af.placeholder("float64", (24, 2))

    def inner(i: Any, j: Any, total: Any) -> Any:
        window = af.cond(i > 1, lambda: x[i : i + 2], lambda: af.take(x, af.stack([-j - 1, i]), axis=0) * 2)
        return total + af.sum(window**2)

    y = repeat(4, lambda i, total: repeat(3, lambda j, t: inner(i, j, t), total), np.float64(0))
    slope = af.gradients(y, x)
    values = np.random.default_rng(0).normal(size=(24, 2))
    weights = np.zeros((24, 1))
    for i in range(4):
        for j in range(3):
            np.add.at(weights, [i, i + 1] if i > 1 else [-j - 1, i], 2 if i > 1 else 8)
    first, second = await run((slope, af.gradients(slope, x)), {x: values})
    np.testing.assert_allclose(first, weights * values, rtol=1e-12)
    np.testing.assert_allclose(second, np.broadcast_to(weights, (24, 2)), rtol=1e-12)


# -- 66: what is saved ------------------------------------------------------------------------------------------------


async def saves(session: af.Session, fetches: Any, feeds: Any) -> Counter[str]:
    """Return how often each loop saves a value in a run."""
    trace = af.Trace()
    await session.run(fetches, feeds, trace=trace)
    return Counter(firing.node.rpartition("/body/")[0] for firing in trace.firings if firing.op == "save_value")


def nested(x: Any) -> Any:
    """Three loops of 5, 3 and 3 iterations."""

    def outer(i: Any, y: Any) -> Any:
        return repeat(3, lambda j, z: repeat(3, lambda k, w: af.sin(w) * x, z, name="inner"), y, name="middle")

    return repeat(5, outer, x, name="outer")


async def test_saves_are_the_product_of_trip_counts(open_session: OpenSession, graph: Graph) -> None:
    """Behaviour 66: 5 * 3 * 3 = 45 saves of each value; of inner stores one for each iteration around them."""
    x = af.placeholder("float64", ())
    slope = af.gradients(nested(x), x)
    async with open_session(graph) as session:
        found = await saves(session, slope, {x: 0.5})
    inner, middle, outer = "outer/body/middle/body/inner", "outer/body/middle", "outer"
    assert found[inner] == 2 * 45  # sin's input, and what is multiplied
    assert found[middle] == 3 * 15  # the stores of both, and how many there are
    assert found[outer] == 4 * 5  # the stores of all three, and of how many there are
    assert set(found) == {inner, middle, outer}


async def test_uses_of_a_shape_save_no_value(open_session: OpenSession, graph: Graph) -> None:
    """Behaviour 66: a sum needs a shape, which is saved instead, and nothing where it is known."""
    for shape, count in (((4,), 0), ((None,), 3)):
        x = af.placeholder("float64", shape)
        slope = af.gradients(repeat(3, lambda i, y: y + af.sum(y), x, shape_invariants=((), shape)), x)
        trace = af.Trace()
        async with open_session(graph) as session:
            np.testing.assert_array_equal(await session.run(slope, {x: np.ones(4)}, trace=trace), np.full(4, 125.0))
        assert [firing.op for firing in trace.firings].count("save_value") == count


@pytest.mark.parametrize("flag", [True, False])
async def test_predicates_are_saved(open_session: OpenSession, graph: Graph, flag: bool) -> None:
    """Behaviour 66: which branch an iteration took; what the branches share needs no more."""
    x = af.placeholder("float64", ())
    p = af.placeholder("bool", ())

    def body(i: Any, y: Any) -> Any:
        return af.cond(af.logical_xor(i % 2 == 0, p), lambda: y * 2, lambda: y + x)

    slope = af.gradients(repeat(4, body, x, name="loop"), x)
    async with open_session(graph) as session:
        trace = af.Trace()
        assert await session.run(slope, {x: 1.0, p: flag}, trace=trace) == (10 if flag else 7)
    assert Counter(firing.outputs for firing in trace.firings if firing.op == "saved_value") == {"bool[]": 4}


async def test_what_a_run_does_not_fetch_saves_nothing(open_session: OpenSession, graph: Graph) -> None:
    """Behaviour 66: a run of the loop alone saves nothing for gradients that stand in the graph."""
    x = af.placeholder("float64", ())
    y = nested(x)
    af.gradients(y, x)
    async with open_session(graph) as session:
        assert await saves(session, y, {x: 0.5}) == {}
