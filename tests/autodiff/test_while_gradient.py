"""Gradients of loops: nested, of higher order, taken again; and the nodes that they add to a graph."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.dependencies import Dependencies, nodes_behind
from asyncflow.graph.ir import Node
from tests.conftest import OpenSession

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


def repeat(times: Any, body: Callable[[Any], Any], initial: Any, **options: Any) -> Any:
    """Return a value after a number of applications of `body`."""
    return af.while_loop(lambda i, _: i < times, lambda i, x: (i + 1, body(x)), (0, initial), **options)[1]


def repeat_numbered(times: Any, body: Callable[[Any, Any], Any], initial: Any) -> Any:
    """As `repeat`; the body also gets the iteration's number."""
    return af.while_loop(lambda i, _: i < times, lambda i, x: (i + 1, body(i, x)), (0, initial))[1]


def power(x: Any, rows: Any = 2, columns: Any = 5) -> Any:
    """``x ** (rows * columns)``, by two nested loops."""
    return repeat(rows, lambda y: repeat(columns, lambda z: z * x, y, name="inner"), np.float64(1), name="outer")


def loop_of(tensor: af.Tensor) -> Node:
    """The loop that a gradient comes from."""
    node = tensor.node
    while node.op.name != "while":
        node = node.inputs[0].node
    return node


def computed_in(node: Node) -> list[af.Tensor]:
    """Return the values that each iteration of a loop computes, without values of inner loops."""
    body = node.attrs["body"]
    needed = {result.node for result in body.results}
    for inner in reversed(body.nodes):
        if inner in needed:
            needed.update(x.node for x in inner.inputs)
    return [x for inner in body.nodes for x in inner.outputs if inner in needed and inner.op.name != "parameter"]


# -- values ----------------------------------------------------------------------------------------------------------


async def test_three_levels_with_captures_at_each(run: Run) -> None:
    """``a**4 * b**8 * c**16 * x``, each factor used at its own level."""
    a, b, c, x = xs = [af.placeholder("float64", (), name=name) for name in "abcx"]

    def outer(y: Any) -> Any:
        return repeat(2, lambda z: repeat(2, lambda w: w * c * c, z * b * b), y * a * a)

    y = repeat(2, outer, x)
    at = {a: 1.1, b: 0.9, c: 1.05, x: 2.0}
    value, slopes = await run((y, af.gradients(y, xs)), at)
    np.testing.assert_allclose(value, 1.1**4 * 0.9**8 * 1.05**16 * 2)
    np.testing.assert_allclose(slopes, [n * value / at[z] for n, z in zip((4, 8, 16, 1), xs, strict=True)])


async def test_three_orders_through_nested_loops(run: Run) -> None:
    """``x ** 10``: 10 x**9, 90 x**8, 720 x**7."""
    x = af.placeholder("float64", ())
    found = [power(x)]
    for _ in range(3):
        found.append(af.gradients(found[-1], x))
    np.testing.assert_allclose(await run(found, {x: 1.1}), [1.1**10, 10 * 1.1**9, 90 * 1.1**8, 720 * 1.1**7])


async def test_trip_counts_that_depend_on_the_iteration(run: Run) -> None:
    """0, 1, 2 and 3 inner iterations: x ** 6."""
    x = af.placeholder("float64", ())

    def body(i: Any, y: Any) -> Any:
        return i + 1, repeat(i, lambda z: z * x, y)

    y = af.while_loop(lambda i, _: i < 4, body, (0, np.float64(1)))[1]
    slope = af.gradients(y, x)
    np.testing.assert_allclose(await run((slope, af.gradients(slope, x)), {x: 1.3}), [6 * 1.3**5, 30 * 1.3**4])


async def test_inside_a_body_by_what_an_inner_loop_starts_with(run: Run) -> None:
    """An outer loop adds up d(z**9)/dz at its own loop variable: 9 * 1, then 9 * 10**8."""
    x = af.placeholder("float64", ())

    def body(z: Any) -> Any:
        return z + af.gradients(repeat(2, lambda w: w * w * w, z), z)

    y = repeat(2, body, x)
    slope = af.gradients(y, x)
    assert await run(y, {x: 1.0}) == 1 + 9 + 9 * 10.0**8
    np.testing.assert_allclose(await run(slope, {x: 1.0}), (1 + 72 * 10.0**7) * (1 + 72))


async def test_two_gradients_that_read_one_store(run: Run) -> None:
    """The product of both gradients is differentiated: saved values get a gradient from both. x**3 a**3 has 3 x**2 a**3
    and so on.
    """
    x, a = af.placeholder("float64", ()), af.placeholder("float64", ())
    y = repeat(3, lambda y: y * x * a, np.float64(1))
    by_x, by_a = af.gradients(y, x), af.gradients(y, a)
    slope = af.gradients(by_x * by_a, x)  # of 9 x**5 a**5
    np.testing.assert_allclose(await run(slope, {x: 1.2, a: 0.9}), 45 * 1.2**4 * 0.9**5)


async def test_a_gradient_of_a_gradient_when_values_are_saved(open_session: OpenSession, graph: af.Graph) -> None:
    """The graph grows between runs: a gradient, the same again, and one of it."""
    x = af.placeholder("float64", ())
    y = power(x)
    async with open_session(graph) as session:
        assert await session.run(y, {x: 1.0}) == 1
        first = af.gradients(y, x)
        np.testing.assert_allclose(await session.run(first, {x: 1.1}), 10 * 1.1**9)
        again = af.gradients(y, x)
        second = af.gradients(again, x)
        np.testing.assert_allclose(await session.run((first, again), {x: 1.1}), [10 * 1.1**9] * 2)
        np.testing.assert_allclose(await session.run(second, {x: 1.1}), 90 * 1.1**8)


@pytest.mark.parametrize("start", [np.array([1, 2]), np.array([2]), np.uint64(2**63 + 1), np.int8(126)])
async def test_counters_of_every_kind(run: Run, start: Any) -> None:
    """The gradient loop sees the forward loop's counters: vectors, numbers beyond int64, and numbers that wrap
    around.
    """
    x = af.placeholder("float64", ())

    def body(i: Any, count: Any, y: Any) -> Any:
        return i + 1, count + start.dtype.type(1), y + x * af.sum(af.astype(count, af.float64))

    y = af.while_loop(lambda i, *_: i < 3, body, (0, start, np.float64(0)))[2]
    with np.errstate(over="ignore"):
        counts = [start + np.asarray(step, start.dtype) for step in range(3)]
    assert await run(af.gradients(y, x), {x: 1.0}) == sum(np.sum(np.float64(count)) for count in counts)


@pytest.mark.parametrize("start", [np.int64(5), np.int32(-3), np.int8(126), np.uint64(7)])
async def test_a_counter_is_counted_again(run: Run, start: Any) -> None:
    """From where it starts, in its own dtype; nothing is saved for it."""
    x = af.placeholder("float64", ())

    def body(i: Any, count: Any, y: Any) -> Any:
        return i + 1, count + start.dtype.type(1), y + x * af.astype(count, af.float64)

    y = af.while_loop(lambda i, *_: i < 3, body, (0, start, np.float64(0)))[2]
    with np.errstate(over="ignore"):
        counts = [start + start.dtype.type(step) for step in range(3)]
    trace = af.Trace()
    assert await run(af.gradients(y, x), {x: 1.0}, trace=trace) == sum(np.float64(count) for count in counts)
    assert "save_value" not in {firing.op for firing in trace.firings}


async def test_a_value_that_ends_the_loop_at_once(run: Run) -> None:
    """Without an iteration, gradients equal the given ones, and captures get none."""
    x, a = af.placeholder("float64", (2,)), af.placeholder("float64", (2,))
    y = repeat(0, lambda y: y * a, x)
    slopes = await run(af.gradients(y * 3, (x, a)), {x: np.ones(2), a: np.ones(2)})
    np.testing.assert_array_equal(slopes, [[3.0, 3.0], [0.0, 0.0]])


# -- what is added to a graph ----------------------------------------------------------------------------------------


def test_existing_outputs_never_move() -> None:
    """A loop gets new outputs behind its present ones, which stay the same tensors under the same names."""
    x = af.placeholder("float64", ())
    _, y, z = af.while_loop(lambda i, *_: i < 3, lambda i, y, z: (i + 1, af.sin(y * z), z * x), (0, x, x), name="loop")
    node, before = y.node, y.node.outputs
    first = af.gradients(y, x)
    af.gradients(first, x)
    assert len(node.outputs) > len(before)
    assert all(now is then for now, then in zip(node.outputs, before, strict=False))
    assert [output.index for output in node.outputs] == list(range(len(node.outputs)))
    assert node.graph.tensor("loop:2") is z


def test_two_gradients_save_each_value_once() -> None:
    """A second call finds what the first has saved."""
    x, a = af.placeholder("float64", ()), af.placeholder("float64", ())
    y = repeat(3, lambda y: af.sin(y * a), x)
    af.gradients(y, x)
    once = len(y.node.outputs)
    af.gradients(y, x)
    assert len(y.node.outputs) == once
    af.gradients(y, (x, a))
    assert len(y.node.outputs) == once


@pytest.mark.parametrize("window", [1, 7])
def test_the_window_of_the_forward_loop_is_kept(window: int) -> None:
    """`parallel_iterations` and `swap_memory` hold for both loops."""
    x = af.placeholder("float64", ())
    y = repeat(3, af.sin, x, parallel_iterations=window, swap_memory=True)
    for node in (y.node, loop_of(af.gradients(y, x))):
        assert node.attrs["parallel_iterations"] == window
        assert node.attrs["swap_memory"]


def test_constants_counters_captures_and_what_passes_through_are_not_saved() -> None:
    """Nor what only looks at them in another way: the one value saved here is what the sine is taken of."""
    x, a = af.placeholder("float64", (2,)), af.placeholder("float64", (2, 1))

    def body(i: Any, y: Any, same: Any) -> Any:
        factor = np.float64(3) * af.astype(i, af.float64)
        return i + 1, af.sin(y) * same * af.reshape(a, (2,)) * np.float64(2) + x * factor * 0, same

    _, y, _ = af.while_loop(lambda i, *_: i < 3, body, (np.int64(0), x, x))
    af.gradients(af.sum(y), x)
    saved = [node.inputs[2].node.op.name for node in y.node.attrs["body"].nodes if node.op.name == "save_value"]
    assert "constant" not in saved
    assert saved.count("parameter") == 1


def test_a_loop_has_no_sums_for_what_does_not_matter() -> None:
    """Captures that reach other outputs only, and variables that are not read in it, cost nothing."""
    a, b, x = (af.placeholder("float64", ()) for _ in range(3))
    variables = [af.Variable(np.float64(k), name=f"v{k}") for k in range(4)]
    total = sum(v.read() for v in variables)
    _, y, _ = af.while_loop(
        lambda i, *_: i < 3, lambda i, y, z: (i + 1, y * a * variables[0].read(), z * b), (0, x + total, x)
    )
    found = af.gradients(y, (a, b, x, *variables))
    assert found[1] is None
    assert loop_of(found[0]).attrs["n_vars"] == 4  # the counter, y, and the sums of a and of one variable


def test_nothing_flows_to_what_only_ops_without_a_derivative_connect() -> None:
    """No sum is kept for it: its gradient of zeros is made outside."""
    x, a = af.placeholder("float64", ()), af.placeholder("float64", (3,))
    y = repeat(3, lambda y: y * af.astype(af.argmax(a), af.float64), x)
    by_x, by_a = af.gradients(y, (x, a))
    assert by_a.node.op.name == "full"
    assert loop_of(by_x).attrs["n_vars"] == 2


async def test_a_loop_that_only_integers_connect(run: Run) -> None:
    """The gradient does not go through the loop again."""
    a = af.placeholder("float64", (3,))
    place = af.argmax(a)
    y = repeat(3, lambda y: y + af.astype(place, af.float64), af.constant(0.0))
    slope = af.gradients(y, a)
    assert [node for node in slope.graph.nodes if node.op.name == "while"] == [y.node]
    assert (await run(slope, {a: np.ones(3)})).tolist() == [0.0, 0.0, 0.0]


def test_what_a_grown_loop_depends_on_is_looked_at_anew() -> None:
    """Captures stand further behind when values have been saved."""
    x, a = af.placeholder("float64", ()), af.placeholder("float64", ())
    y = repeat(3, lambda y: af.sin(y * a), x)
    dependencies = Dependencies({})
    before = dependencies.of(y.graph.nodes, {a: 1})[y]
    af.gradients(y, x)
    assert dependencies.of(y.graph.nodes, {a: 1})[y] == before == 1


def test_only_what_a_value_is_made_of_is_looked_at() -> None:
    """So that many gradients in one graph do not look at each other's nodes."""
    x = af.placeholder("float64", ())
    y = repeat(3, lambda y: y * x, x)
    first = af.gradients(y, x)
    assert first.node not in nodes_behind(y.graph, [y])
    assert {node.op.name for node in nodes_behind(y.graph, [y])} == {"placeholder", "constant", "while", "saved_values"}
    behind = nodes_behind(y.graph, [first])
    assert {first.node, y.node, x.node} <= set(behind)
    assert behind == [node for node in y.graph.nodes if node in set(behind)]


@pytest.mark.parametrize("shape", [(100, 8), (None, 8)])
def test_rows_are_not_made_as_large_as_the_whole(shape: Any) -> None:
    """Gradients of rows go to a store; gradients of a row that all iterations read are added up directly."""
    x = af.placeholder("float64", shape)
    y = repeat_numbered(50, lambda i, y: y + x[i] * x[i] + x[3], np.zeros(8))
    slope = af.gradients(y, x)
    (loop,) = [node for node in slope.graph.nodes if node.op.name == "while" and node is not y.node]
    assert not [value for value in (*computed_in(loop), *loop.outputs) if value.ndim == 2]


def test_an_embedding_is_not_made_anew_in_each_iteration() -> None:
    """Rows of a variable that is read in the body."""
    table = af.Variable(np.zeros((1000, 4)), name="table")
    y = repeat_numbered(50, lambda i, y: y + af.take(table, af.stack([i, i * 2]), axis=0), np.zeros((2, 4)))
    slope = af.gradients(y, table)
    (loop,) = [node for node in slope.graph.nodes if node.op.name == "while" and node is not y.node]
    assert not [value for value in (*computed_in(loop), *loop.outputs) if value.shape == (1000, 4)]


async def test_rows_of_two_loops_in_one_another(run: Run) -> None:
    """Rows by a captured number are added up as they are, in either loop."""
    x, k = af.placeholder("float64", (4, 3)), af.placeholder("int64", ())
    y = repeat(2, lambda y: repeat(3, lambda z: z + x[k] * x[k], y), np.zeros(3))
    slope = af.gradients(y, x)
    values = np.arange(12.0).reshape(4, 3)
    expected = np.zeros((4, 3))
    expected[2] = 12 * values[2]
    np.testing.assert_array_equal(await run(slope, {x: values, k: 2}), expected)
    (loop,) = [node for node in slope.graph.nodes if node.op.name == "while" and node is not y.node]
    assert not [value for value in computed_in(loop) if value.shape == (4, 3)]
