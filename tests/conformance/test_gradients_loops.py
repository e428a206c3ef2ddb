"""Behaviour 53-55, 57-59 and 62: gradients of loops, serial, parallel and nested."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


def squared_while_below_100(v: Any) -> Any:
    return af.while_loop(lambda x: x < 100.0, lambda x: x * x, v)


def times_two(v: Any, n: int) -> Any:
    """``v * 2 ** n``, with a counter beside it."""
    return af.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 2.0), (0, v))[1]


# -- 53, 54: one loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "slope"), [(lambda r: r, 1024.0), (lambda r: r * r, 524288.0), (lambda r: r + r, 2048.0)]
)
async def test_a_loop_of_squares(run: Run, use: Callable[[Any], Any], slope: float) -> None:
    """Behaviour 53: ``x -> x*x`` while below 100, from 2: 256 = 2**8; its result used once, twice, and added."""
    v = af.constant(2.0)
    assert await run(af.gradients(use(squared_while_below_100(v)), v)) == slope


@pytest.mark.parametrize("window", [1, 10])
async def test_a_captured_factor(run: Run, window: int) -> None:
    """Behaviour 54: ``v -> v*a`` while below 100, from v=2 with a=3: 2 * 3**4."""
    a, v = af.constant(3.0), af.constant(2.0)
    r = af.while_loop(lambda x: x < 100.0, lambda x: x * a, v, parallel_iterations=window)
    assert await run(af.gradients(r, [a, v])) == [216.0, 81.0]


@pytest.mark.parametrize("window", [1, 10])
async def test_a_variable_as_factor(run: Run, window: int) -> None:
    """Behaviour 54: the same with a variable, read outside and read anew in each iteration."""
    a, v = af.Variable(3.0), af.constant(2.0)
    inside = af.while_loop(lambda x: x < 100.0, lambda x: x * a, v, parallel_iterations=window)
    read = a.read()
    outside = af.while_loop(lambda x: x < 100.0, lambda x: x * read, v, parallel_iterations=window)
    assert await run(af.gradients(inside, [a, v])) == [216.0, 81.0]
    assert await run(af.gradients(outside, [a, v])) == [216.0, 81.0]


# -- 55: several loops -----------------------------------------------------------------------------------------------


def nested(body: Callable[[Any], Any], limit: float) -> Any:
    v = af.constant(1.0)
    return af.gradients(af.while_loop(lambda x: x < limit, body, v), v)


async def test_nested_simple(run: Run) -> None:
    """Behaviour 55: the inner loop doubles until 4 is reached, the outer one doubles that: 1 becomes 8."""
    slope = nested(lambda x: af.while_loop(lambda s: s < 4.0, lambda s: s * 2.0, x) * 2.0, 2.0)
    assert await run(slope) == 8.0


async def test_two_inner_loops_in_a_row(run: Run) -> None:
    """Behaviour 55: one multiplies by 16, and so does the next: one outer iteration, 256."""
    assert await run(nested(lambda x: times_two(times_two(x, 4), 4), 128.0)) == 256.0


async def test_two_inner_loops_side_by_side(run: Run) -> None:
    """Behaviour 55: their product is 256 x**2."""
    assert await run(nested(lambda x: times_two(x, 4) * times_two(x, 4), 128.0)) == 512.0


async def test_a_loop_in_a_branch_in_a_loop(run: Run) -> None:
    """Behaviour 55: the branch taken squares what its loop gives: 256 x**2."""

    def body(x: Any) -> Any:
        return af.cond(True, lambda: af.square(times_two(x, 4)), lambda: x * 2.0)

    assert await run(nested(body, 128.0)) == 512.0


async def test_two_loops_in_a_row(run: Run) -> None:
    """Behaviour 55: five doublings, and five more."""
    x = af.constant(2.0)
    assert await run(af.gradients(times_two(times_two(x, 5), 5), x)) == 1024.0


async def test_two_loops_side_by_side(run: Run) -> None:
    """Behaviour 55: the sum of two times five doublings."""
    x = af.constant(2.0)
    assert await run(af.gradients(times_two(x, 5) + times_two(x, 5), x)) == 64.0


# -- 57: several ys and xs -------------------------------------------------------------------------------------------


async def test_several_ys_and_xs(run: Run) -> None:
    """Behaviour 57: ``y1 = x + y; x1 = x * y1`` while x is below 100, from x=3, y=2; both results, and one."""
    x, y = af.constant(3.0), af.constant(2.0)

    def body(x: Any, y: Any) -> Any:
        y1 = x + y
        return x * y1, y1

    rx, ry = af.while_loop(lambda x, y: x < 100.0, body, (x, y), parallel_iterations=1)
    assert await run([af.gradients([rx, ry], x), af.gradients([rx, ry], y)]) == [304.0, 124.0]
    assert await run(af.gradients(rx, {"x": x, "y": y})) == {"x": 295.0, "y": 120.0}


async def test_an_integer_among_the_ys(run: Run) -> None:
    """Behaviour 57: the counter of a loop of ten doublings adds nothing."""
    x = af.constant(2.0)
    loop = af.while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, x * 2.0), (0, x))
    assert await run([af.gradients(loop, x), af.gradients(loop[1], x)]) == [1024.0, 1024.0]


async def test_one_output_waits_for_another(run: Run) -> None:
    """Behaviour 57: one iteration of ``x, x + y`` from 1 and 1; the second is used after the first is there."""
    x, y = af.constant(1.0), af.constant(1.0)

    def body(i: Any, x: Any, y: Any) -> Any:
        return i + 1, af.identity(x), x + y

    _, x_last, y_last = af.while_loop(lambda i, x, y: i < 1, body, (0, x, y))
    with af.control_dependencies([x_last]):
        used = af.identity(y_last)
    assert await run([used, af.gradients(used, x)]) == [2.0, 1.0]


# -- 58: loops that do little ----------------------------------------------------------------------------------------


async def test_no_iteration(run: Run) -> None:
    """Behaviour 58: nothing flows through the body of a loop that never runs it; ``x*x`` beside it gives 2x."""
    x = af.placeholder("float64", (None,))
    r = af.while_loop(lambda v: False, lambda v: v * x, af.constant([2.0, 2.0]), shape_invariants=(None,))
    slope = af.gradients([r, x * x], x)
    np.testing.assert_array_equal(await run(slope, {x: [1.0, 2.0]}), [2.0, 4.0])


async def test_the_initial_value_of_no_iteration(run: Run) -> None:
    """Behaviour 58: the initial value is the result, whatever the body would have made of it."""
    v = af.constant([2.0, 2.0])
    r = af.while_loop(lambda v: False, lambda v: v * 3.0, v)
    np.testing.assert_array_equal(await run(af.gradients(r, v)), [1.0, 1.0])


@pytest.mark.parametrize(("iterations", "slope"), [(0, 1.0), (3, 0.0)])
async def test_a_body_that_returns_a_constant(run: Run, iterations: int, slope: float) -> None:
    """Behaviour 58: of its argument, nothing is left after one iteration."""
    v, n = af.constant(4.0), af.placeholder("int64", ())
    r = af.while_loop(lambda i, v: i < n, lambda i, v: (i + 1, af.constant(0.0)), (0, v))[1]
    assert await run(af.gradients(r, v), {n: iterations}) == slope


async def test_a_variable_that_is_passed_through(run: Run) -> None:
    """Behaviour 58: also where another loop variable takes its value over."""
    v = af.Variable(np.ones((2, 3)))
    _, _, taken = af.while_loop(lambda i, x, y: i < 10, lambda i, x, y: (i + 1, x, x), (0, v, v))
    np.testing.assert_array_equal(await run(af.gradients(af.sum(taken), v)), np.ones((2, 3)))


# -- 59: a loop whose branch holds a loop ----------------------------------------------------------------------------


async def test_a_loop_that_adds_what_a_branch_with_a_loop_gives(run: Run) -> None:
    """Behaviour 59: four times ``y + (x counted up to 20)`` from y=1: 81, and each time x has slope 1."""
    x = af.constant(2.0)

    def body(i: Any, y: Any) -> Any:
        inner = af.cond(i >= 0, lambda: af.while_loop(lambda z: z < 20.0, lambda z: z + 1.0, x), lambda: x)
        return i + 1, y + inner

    value = af.while_loop(lambda i, y: i < 4, body, (0, 1.0))[1]
    assert await run([value, af.gradients(value, x)]) == [81.0, 4.0]


async def test_the_same_with_the_loop_variable_in_it(run: Run) -> None:
    """Behaviour 59: ``y + y*2`` four times, the doubling a loop in a branch: 81 y."""
    y = af.constant(1.0)

    def body(i: Any, y: Any) -> Any:
        return i + 1, y + af.cond(y > 0, lambda: times_two(y, 1), lambda: y)

    value = af.while_loop(lambda i, y: i < 4, body, (0, y))[1]
    assert await run([value, af.gradients(value, y)]) == [81.0, 81.0]


# -- 62: gradients of gradients --------------------------------------------------------------------------------------


async def test_three_gradients_of_a_loop_of_cosines(run: Run) -> None:
    """Behaviour 62: each order agrees with central differences of the one before."""
    x = af.placeholder("float64", ())
    orders = [af.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, af.cos(v)), (0, x))[1]]
    for _ in range(3):
        orders.append(af.gradients(orders[-1], x))
    at, step = 0.7, 1e-5
    found = await run(orders, {x: at})
    above, below = await run(orders, {x: at + step}), await run(orders, {x: at - step})
    assert found[0] == pytest.approx(np.cos(np.cos(np.cos(at))))
    differences = [(up - down) / (2 * step) for up, down in zip(above, below, strict=True)]
    assert found[1:] == pytest.approx(differences[:-1], rel=1e-6)


async def test_the_gradient_of_a_stopped_gradient(run: Run) -> None:
    """Behaviour 62: a stopped value counts as a constant: ``x * stop(d x**4/dx)`` has the slope 4 x**3."""
    x = af.placeholder("float64", ())
    y = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, v * v), (0, x))[1]
    stopped = af.stop_gradient(af.gradients(y, x))
    assert af.gradients(stopped, x) is None
    assert await run(af.gradients(x * stopped, x), {x: 2.0}) == 32.0


# -- counters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, np.int32(0), np.uint8(2)])
async def test_a_run_may_feed_what_a_counter_begins_with(run: Run, first: Any) -> None:
    """The feed changes the number of iterations, the saved values and the value of the counter."""
    start, x = af.constant(first), af.placeholder("float64", ())

    def body(i: Any, y: Any) -> Any:
        return i + 1, af.sin(y) * af.astype(i, "float64")

    y = af.while_loop(lambda i, _: i < 6, body, (start, x))[1]
    scaled = af.while_loop(lambda i, _: i < 6, lambda i, y: (i + 1, y * 2.0), (start, x))[1]
    slope = af.gradients(y, x)
    fetches = [slope, af.gradients(slope, x), af.gradients(scaled, x)]
    for begin in (int(first), 4):

        def by_hand(at: float, begin: int = begin) -> float:
            for i in range(begin, 6):
                at = np.sin(at) * i
            return at

        at, step = 0.7, 1e-4
        found = await run(fetches, {x: at, start: np.array(begin, start.dtype)})
        up, middle, down = by_hand(at + step), by_hand(at), by_hand(at - step)
        assert found[0] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-5)
        assert found[1] == pytest.approx((up - 2 * middle + down) / step**2, rel=1e-4, abs=1e-4)
        assert found[2] == 2.0 ** (6 - begin)
