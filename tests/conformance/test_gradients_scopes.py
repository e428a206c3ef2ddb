"""Behaviour 60, 61 and 67: gradients that are stopped, taken inside bodies, added later, and written by users."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


# -- 60: stop_gradient -----------------------------------------------------------------------------------------------


def squares(x: Any, y: Any, stop: Callable[[Any], Any] = lambda y: y) -> tuple[Any, Any]:
    """``y1 = y*y; x1 = x*x + y1`` while x is below 100 everywhere."""

    def body(x: Any, y: Any) -> Any:
        y1 = stop(y * y)
        return x * x + y1, y1

    rx, ry = af.while_loop(lambda x, y: af.all(x < 100.0), body, (x, y))
    return rx, ry


async def test_stopped_outside(run: Run) -> None:
    """Behaviour 60: from x=3, y=2, by y: 136 from x, 32 from y, 168 from both; stopped values add nothing."""
    x, y = af.constant(3.0), af.constant(2.0)
    rx, ry = squares(x, y)
    stop = af.stop_gradient
    sums = [rx, ry, rx + ry, rx + stop(ry), stop(rx) + ry]
    assert await run([af.gradients(total, y) for total in sums]) == [136.0, 32.0, 168.0, 136.0, 32.0]
    for cut in (stop(rx), stop(ry), stop(rx * rx), stop(rx + ry)):
        assert af.gradients(cut, [x, y]) == [None, None]


async def test_stopped_inside(run: Run) -> None:
    """Behaviour 60: y's square is stopped in the body: zeros by y, 156 by x."""
    x, y = af.constant(3.0), af.constant(2.0)
    rx, _ = squares(x, y, af.stop_gradient)
    assert await run(af.gradients(rx, [x, y], unconnected="zero")) == [156.0, 0.0]


async def test_stopped_inside_with_shapes_unknown(run: Run) -> None:
    """Behaviour 60: the same by elements of placeholders."""
    x, y = af.placeholder("float64"), af.placeholder("float64")
    rx, _ = squares(x, y, af.stop_gradient)
    slopes = await run(af.gradients(rx, [x, y], unconnected="zero"), {x: [3.0, 4.0], y: [2.0, 3.0]})
    np.testing.assert_array_equal(slopes, [[156.0, 400.0], [0.0, 0.0]])


async def test_a_stopped_gradient(run: Run) -> None:
    """Behaviour 60: y**2 + 2 y**6 and its stopped gradient, by y = 2: 4 + 384 and nothing more."""
    x, y = af.constant(2.0), af.constant(2.0)
    rx = af.while_loop(lambda x: x < 100.0, lambda x: x * y, x)
    stopped = af.stop_gradient(af.gradients(rx, y))
    assert await run(af.gradients(af.square(y) + rx + stopped, y)) == 388.0


async def test_other_paths_are_left(run: Run) -> None:
    """Behaviour 60: a loop that is stopped as a whole, and its initial value beside it."""
    v = af.constant(2.0)
    r = af.stop_gradient(af.while_loop(lambda x: x < 100.0, lambda x: x * x, v))
    assert await run(af.gradients(r + v, v)) == 1.0


async def test_a_variable_read_in_the_body_and_a_stopped_gradient(run: Run) -> None:
    """Behaviour 60: the sum of five times x after one iteration, plus its own gradient, stopped: 5."""
    x = af.Variable(1.0)

    def body(i: Any, y: Any, r: Any) -> Any:
        y = y * x
        return i + 1, y, r + af.sum(y)

    r = af.while_loop(lambda i, y, r: i < 1, body, (0, af.ones(5), 0.0))[2]
    z = r + af.stop_gradient(af.gradients(r, x))
    assert await run(af.gradients(z, x)) == 5.0


async def test_stop_gradients_by_argument(run: Run) -> None:
    """Behaviour 60: a tensor in `stop_gradients` counts as a constant, though it may be an x itself."""
    a = af.constant(3.0)
    b = a * 2.0
    assert await run(af.gradients(a + b, [a, b], stop_gradients=[a, b])) == [1.0, 1.0]
    assert await run(af.gradients(a * b, a, stop_gradients=b)) == 6.0
    assert af.gradients(b * b, a, stop_gradients=b) is None
    x, y = af.constant(3.0), af.constant(2.0)
    rx, ry = squares(x, y)  # one of two results of a node
    assert await run(af.gradients(rx + ry, [rx, y], stop_gradients=rx)) == [1.0, 32.0]


async def test_nests_are_stopped_leaf_by_leaf(run: Run) -> None:
    """Behaviour 60: values do not change."""
    stopped = af.stop_gradient({"a": af.constant(1.0), "b": [2, af.Variable(3.0)]})
    assert await run(stopped) == {"a": 1.0, "b": [2, 3.0]}


# -- 61: gradients taken inside bodies -------------------------------------------------------------------------------


async def test_in_a_body_by_outer_tensors(run: Run) -> None:
    """Behaviour 61: ten times the gradient of [1, 2, 3] * p**2 by p = 5, where p**2 is built outside: 10 * 60."""
    p = af.constant(5.0)
    p_squared = p * p

    def body(i: Any, total: Any) -> Any:
        data = af.constant([1.0, 2.0, 3.0]) * p_squared
        return i + 1, total + af.gradients(data, p)

    assert await run(af.while_loop(lambda i, t: i < 10, body, (0, 0.0))[1]) == 600.0


async def test_two_bodies_away(run: Run) -> None:
    """Behaviour 61: a branch in a loop takes the gradient, through what the loop's body and the graph have built."""
    p, v = af.constant(5.0), af.Variable(2.0)
    q = p * p * v

    def body(i: Any, total: Any) -> Any:
        r = q * 3.0
        slopes = af.cond(i >= 0, lambda: tuple(af.gradients(r * v, [p, v])), lambda: (p, p))
        return i + 1, total + slopes[0] + slopes[1]

    # 3 p**2 v**2: by p 6 p v**2 = 120, by v 6 p**2 v = 300.
    assert await run(af.while_loop(lambda i, t: i < 2, body, (0, 0.0))[1]) == 840.0


async def test_through_a_loop_outside(run: Run) -> None:
    """Behaviour 61: what the body differentiates is a loop in front of it."""
    p = af.constant(2.0)
    power = af.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * p), (0, 1.0))[1]
    total = af.while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t + af.gradients(power * 2.0, p)), (0, 0.0))[1]
    assert await run(total) == 48.0


async def test_of_a_branch_in_nested_loops(run: Run) -> None:
    """Behaviour 61: the inner body gives the slope of ``2x if x < 1 else x`` at its variable, from 0: 2, 1, 1."""

    def inner(j: Any, x: Any) -> Any:
        y = af.cond(x < 1.0, lambda: 2.0 * x, lambda: x)
        return j + 1, af.gradients(y, x)

    def outer(i: Any, x: Any) -> Any:
        return i + 1, af.while_loop(lambda j, x: j < 3, inner, (0, 0.0))[1]

    assert await run(af.while_loop(lambda i, x: i < 3, outer, (0, 0.0))) == (3, 1.0)


def counted(n: Any, x: Any) -> Any:
    """`n` and as often `x` as it takes to reach 10."""
    return af.while_loop(lambda n: n < 10.0, lambda n: n + x, n)


async def test_of_a_loop_in_a_branch(run: Run) -> None:
    """Behaviour 61: from 1 in steps of x = 1: nine steps, so the slope is 9."""
    x = af.placeholder("float64", ())
    r = af.cond(af.constant(1) < 2, lambda: af.gradients(counted(af.constant(1.0), x), x), lambda: x)
    assert await run(r, {x: 1.0}) == 9.0


async def test_of_a_loop_in_a_loop(run: Run) -> None:
    """Behaviour 61: the outer loop goes on with the slope, from 1: nine, and then it is done."""
    x = af.placeholder("float64", ())
    r = af.while_loop(lambda n: n < 6.0, lambda n: af.gradients(counted(n, x), x), af.constant(1.0))
    assert await run(r, {x: 1.0}) == 9.0


async def test_a_loop_variable_is_a_value_of_its_own(run: Run) -> None:
    """Behaviour 61: in the body, by what the loop started with is an error; by the loop variable it works."""
    x = af.placeholder("float64", ())
    y = x + 1.0

    def body(i: Any, v: Any) -> Any:
        with pytest.raises(af.GraphError, match=r"only matters for what the loop starts with, .* by the loop variable"):
            af.gradients(v * 2.0, x)
        assert af.gradients(i * 2.0, x) is None
        return i + 1, af.gradients(v * v, v)

    r = af.while_loop(lambda i, v: i < 3, body, (0, y))[1]
    assert await run(r, {x: 1.0}) == 16.0


# -- 67: later, under control edges, and the user's own --------------------------------------------------------------


async def test_a_gradient_added_after_a_run(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 67: the loop that has run keeps values from then on; its results do not change."""
    x = af.placeholder("float64", ())
    r = af.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, af.sin(v) * x), (0, x))[1]
    async with open_session(graph) as session:
        before = await session.run(r, {x: 0.8})
        slope = af.gradients(r, x)
        value, first = await session.run((r, slope), {x: 0.8})
        curvature = af.gradients(slope, x)
        again, second = await session.run((slope, curvature), {x: 0.8})
        up, down = [await session.run((r, slope), {x: 0.8 + step}) for step in (1e-6, -1e-6)]
    assert (value, again) == (before, first)
    assert (first, second) == pytest.approx([(a - b) / 2e-6 for a, b in zip(up, down, strict=True)], rel=1e-6)


async def test_under_a_control_dependency_scope(run: Run) -> None:
    """Behaviour 67: the gradient's nodes wait for what the scope names, and the forward ones do not."""
    count, x = af.Variable(0), af.constant(2.0)
    r = af.while_loop(lambda v: v < 100.0, lambda v: af.cond(v > 0.0, lambda: v * v, lambda: v), x)
    counted = count.assign_add(1)
    with af.control_dependencies([counted]):
        slope = af.gradients(r, x)
    assert await run((r, count.read())) == (256.0, 0)
    assert await run(slope) == 1024.0
    assert await run(count.read()) == 1


@af.custom_gradient
def doubled(x: Any, *, slope: float = 100.0) -> Any:
    """A function whose value is 2 x, and whose gradient is said to be `slope`."""
    return x * 2.0, lambda grad: grad * slope


async def test_a_custom_gradient_in_a_body(run: Run) -> None:
    """Behaviour 67: three doublings with the slope said to be 100, then 10, in a loop and in a branch of it."""
    x = af.constant(1.5)
    plain = af.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, doubled(v)), (0, x))[1]

    def body(i: Any, v: Any) -> Any:
        return i + 1, af.cond(i < 2, lambda: doubled(v), lambda: doubled(v, slope=10.0))

    mixed = af.while_loop(lambda i, v: i < 3, body, (0, x))[1]
    found = await run([plain, af.gradients(plain, x), mixed, af.gradients(mixed, x)])
    assert found == [12.0, 1e6, 12.0, 1e5]


@af.custom_gradient
def log1pexp(x: Any) -> Any:
    e = af.exp(x)
    return af.log(1.0 + e), lambda grad: grad * (1.0 - 1.0 / (1.0 + e))


async def test_higher_orders_of_a_custom_gradient(run: Run) -> None:
    """Behaviour 67: what grad_fn builds is differentiated in turn, through values of the function it uses."""
    x = af.placeholder("float64", ())
    y = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, log1pexp(v)), (0, x))[1]
    slope = af.gradients(y, x)
    curvature = af.gradients(slope, x)
    found = await run((y, slope, curvature), {x: 0.3})
    up, down = [await run((y, slope), {x: 0.3 + step}) for step in (1e-6, -1e-6)]
    assert found[1:] == pytest.approx([(a - b) / 2e-6 for a, b in zip(up, down, strict=True)], rel=1e-6)


async def test_the_gradient_of_an_op_in_a_body(run: Run) -> None:
    """Behaviour 67: `@af.op(gradient=...)` in a loop, its inputs and outputs kept from each iteration."""

    def of_power(inputs: Any, output: Any, grad: Any) -> Any:
        base, exponent = inputs
        return grad * exponent * output / base, grad * output * af.log(base)

    power = af.op(outputs=af.spec("float64", ()), gradient=of_power, name="power")(
        lambda base, exponent: base**exponent
    )
    x, n = af.placeholder("float64", ()), af.placeholder("float64", ())
    y = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, power(v, n)), (0, x))[1]
    # x**(n*n), of which the derivatives are n*n x**(n*n - 1) and 2 n x**(n*n) log x.
    expected = [9 * 1.1**8, 6 * 1.1**9 * np.log(1.1)]
    assert await run(af.gradients(y, [x, n]), {x: 1.1, n: 3.0}) == pytest.approx(expected)


async def test_a_custom_gradient_that_waits(run: Run) -> None:
    """Behaviour 67: under a control-dependency scope its node is there when the graph runs, and passes arrays on."""
    swapped = af.custom_gradient(lambda a, b: ((b, a * 2.0), lambda by_b, by_a: (by_a * 3.0, by_b)))
    count = af.Variable(0)
    a, b = af.placeholder("float64", (None,)), af.placeholder("float64", (None,))

    def body(i: Any, a: Any, b: Any) -> Any:
        with af.control_dependencies([count.assign_add(1)]):
            return i + 1, *swapped(a, b)

    _, x, y = af.while_loop(lambda i, a, b: i < 4, body, (0, a, b))
    fed = {a: np.arange(3.0), b: np.ones(3)}
    found = await run((x, y, af.gradients([x, y], [a, b])), fed)
    assert [value.tolist() for value in (found[0], found[1], *found[2])] == [
        [0.0, 4.0, 8.0],
        [4.0, 4.0, 4.0],
        [9.0, 9.0, 9.0],
        [9.0, 9.0, 9.0],
    ]
    assert await run(count.read()) == 4
