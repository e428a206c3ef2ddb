"""Behaviour 49-52, 65: gradients of map_fn, scan, foldl and foldr, with the values TensorFlow gives.

The folds and scans go over 1 to 6. TensorFlow's tests fold ``(state + x) * 2`` for the values, and ``state * x`` from
v = 2 for the gradients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.gradients import gradients

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

ELEMENTS = np.arange(1.0, 7.0)
WINDOWS = pytest.mark.parametrize("window", [1, 10])


def source(value: Any) -> af.Tensor:
    """A value that nothing is known of while compiling, so that its gradients are computed in the run."""
    return af.Variable(np.asarray(value, "float64"), name="source").read()


def slopes(f: Callable[[Any], Any], at: Any) -> np.ndarray[Any, Any]:
    """Central differences of a NumPy function with one number as its result."""
    x, step = np.asarray(at, "float64"), 1e-6
    found = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        shift = np.zeros(x.shape)
        shift[place] = step
        found[place] = (f(x + shift) - f(x - shift)) / (2 * step)
    return found


# -- 52: folds -------------------------------------------------------------------------------------------------------


@WINDOWS
@pytest.mark.parametrize(
    ("fold", "initial", "value", "of_initial", "of_elements"),
    [
        (af.foldl, None, 208, None, [32, 32, 16, 8, 4, 2]),
        (af.foldl, 10.0, 880, 64, [64, 32, 16, 8, 4, 2]),
        (af.foldr, None, 450, None, [2, 4, 8, 16, 32, 32]),
        (af.foldr, 10.0, 1282, 64, [2, 4, 8, 16, 32, 64]),
    ],
)
async def test_folds(
    run: Run,
    fold: Callable[..., Any],
    initial: float | None,
    value: float,
    of_initial: float | None,
    of_elements: list[float],
    window: int,
) -> None:
    """Behaviour 52: foldl 208 and 880, foldr 450 and 1282; each element counts double for every step after it."""
    elems = source(ELEMENTS)
    start = None if initial is None else source(initial)
    folded = fold(lambda state, x: (state + x) * 2, elems, start, parallel_iterations=window)
    found, grad, grad_of_start = await run(
        (folded, gradients(folded, elems), None if start is None else gradients(folded, start))
    )
    assert found == value
    np.testing.assert_array_equal(grad, of_elements)
    assert grad_of_start == of_initial


@WINDOWS
@pytest.mark.parametrize("fold", [af.foldl, af.foldr])
async def test_gradient_of_a_fold(run: Run, fold: Callable[..., Any], window: int) -> None:
    """Behaviour 52: the product of v = 2 and 1 to 6: d/dv is 720, d/dx is 1440 / x; both mixed: 720 / x."""
    v, elems = source(2.0), source(ELEMENTS)
    product = fold(lambda state, x: state * x, elems, v, parallel_iterations=window)
    of_v, of_elems = gradients(product, [v, elems])
    value, by_v, by_elems, mixed = await run((product, of_v, of_elems, gradients(of_v, elems)))
    assert value == 1440 and by_v == 720
    np.testing.assert_allclose(by_elems, 1440 / ELEMENTS)
    np.testing.assert_allclose(mixed, 720 / ELEMENTS)


# -- 52: scans -------------------------------------------------------------------------------------------------------


@WINDOWS
@pytest.mark.parametrize(
    ("reverse", "value", "of_v"),
    [(False, [2, 4, 12, 48, 240, 1440], 873), (True, [1440, 1440, 720, 240, 60, 12], 1956)],
)
async def test_gradient_of_a_scan(run: Run, reverse: bool, value: list[float], of_v: float, window: int) -> None:
    """Behaviour 52: running products from v = 2; d/dv is 873 = 1 + 2 + 6 + 24 + 120 + 720, in reverse 1956."""
    v, elems = source(2.0), source(ELEMENTS)
    scanned = af.scan(lambda state, x: state * x, elems, v, reverse=reverse, parallel_iterations=window)
    found, (by_v, by_elems) = await run((scanned, gradients(scanned, [v, elems])))
    np.testing.assert_array_equal(found, value)
    assert by_v == of_v

    def total(x: Any) -> Any:
        return 2.0 * np.cumprod(x[::-1] if reverse else x).sum()

    np.testing.assert_allclose(by_elems, slopes(total, ELEMENTS), rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_that_begins_with_its_first_row(run: Run, reverse: bool) -> None:
    """Behaviour 52: without initializer the first row is a state; the second derivative holds, too."""
    elems = source(ELEMENTS)
    scanned = af.scan(lambda state, x: state * x, elems, reverse=reverse)
    weights = np.arange(1.0, 7.0)
    once = gradients(scanned, elems, weights)
    by_elems, twice = await run((once, gradients(once, elems)))

    def total(x: Any) -> Any:
        return weights @ (np.cumprod(x[::-1])[::-1] if reverse else np.cumprod(x))

    np.testing.assert_allclose(by_elems, slopes(total, ELEMENTS), rtol=1e-6)
    # The sum of the gradient's elements is a sum of products, each without one of its factors.
    np.testing.assert_allclose(
        twice, slopes(lambda x: slopes_of_products(x, weights, reverse).sum(), ELEMENTS), rtol=1e-5
    )


def slopes_of_products(x: np.ndarray[Any, Any], weights: Any, reverse: bool) -> np.ndarray[Any, Any]:
    """The derivative of the weighted running products, as a formula, to be differentiated again."""
    if reverse:
        return slopes_of_products(x[::-1], weights[::-1], False)[::-1]
    products = weights * np.cumprod(x)
    return np.cumsum(products[::-1])[::-1] / x


async def test_a_scan_of_nothing(run: Run) -> None:
    """Behaviour 52: results of shape [0,2,4]; its initializer gets zeros, and elements a gradient of their shape."""
    elems, start = af.placeholder("float64", (None, 2, 4)), source(np.ones((2, 4)))
    scanned = af.scan(lambda state, x: state * x, elems, start)
    value, (of_elems, of_start) = await run((scanned, gradients(scanned, [elems, start])), {elems: np.zeros((0, 2, 4))})
    assert value.shape == of_elems.shape == (0, 2, 4)
    np.testing.assert_array_equal(of_start, np.zeros((2, 4)))


async def test_nests(run: Run) -> None:
    """Behaviour 52: a state of one structure over elements of another: a running mean and a running product."""
    x, y = source(ELEMENTS), source(ELEMENTS[::-1].copy())

    def step(state: Any, row: Any) -> Any:
        return {"mean": state["mean"] * 0.5 + row[0], "product": state["product"] * row[1] + state["mean"]}

    scanned = af.scan(step, (x, y), {"mean": 1.0, "product": 1.0})
    found = await run(gradients([scanned["mean"], scanned["product"]], [x, y]))

    def total(both: Any) -> Any:
        mean, product, summed = 1.0, 1.0, 0.0
        for a, b in zip(*both, strict=True):
            mean, product = mean * 0.5 + a, product * b + mean
            summed += mean + product
        return summed

    np.testing.assert_allclose(found, slopes(total, [ELEMENTS, ELEMENTS[::-1]]), rtol=1e-6)


# -- map_fn ----------------------------------------------------------------------------------------------------------


@WINDOWS
async def test_gradient_of_a_map(run: Run, window: int) -> None:
    """Behaviour 49: rows and a captured factor: y = a * x^3 and 2 * x; with second derivative."""
    x, a = source(ELEMENTS), source(3.0)
    mapped = af.map_fn(lambda row: (a * row * row * row, 2 * row), x, parallel_iterations=window)
    of_x, of_a = gradients(mapped, [x, a])
    by_x, by_a, twice = await run((of_x, of_a, gradients(of_x, x)))
    np.testing.assert_allclose(by_x, 9 * ELEMENTS**2 + 2)
    np.testing.assert_allclose(by_a, (ELEMENTS**3).sum())
    np.testing.assert_allclose(twice, 18 * ELEMENTS)


async def test_a_map_with_loops_and_branches(run: Run) -> None:
    """Behaviour 49: row k is multiplied k times by a variable if it is over 2, and else negated."""
    x, w = source([1.0, 3.0, 2.0, 4.0]), af.Variable(1.5, name="w")
    counts = np.arange(4)

    def row(both: Any) -> Any:
        value, count = both

        def powers() -> Any:
            return af.while_loop(lambda k, v: k < count, lambda k, v: (k + 1, v * w), (0, value))[1]

        return af.cond(value > 2.0, powers, lambda: -value)

    mapped = af.map_fn(row, (x, counts))
    value, (of_x, of_w) = await run((mapped, gradients(mapped, [x, w])))
    np.testing.assert_allclose(value, [-1, 3 * 1.5, -2, 4 * 1.5**3])
    np.testing.assert_allclose(of_x, [-1, 1.5, -1, 1.5**3])
    np.testing.assert_allclose(of_w, 3 + 4 * 3 * 1.5**2)


async def test_elements_of_unknown_number(run: Run) -> None:
    """Behaviour 52: gradients have the shape of the elements fed, none included."""
    xs = af.placeholder("float64", (None,))
    total = af.foldl(lambda t, x: t + x * x, xs, 0.0)
    running, mapped = af.scan(lambda t, x: t + x, xs, 0.0), af.map_fn(lambda x: x * x * x, xs)
    found = [gradients(y, xs) for y in (total, running, mapped)]
    for n in (0, 1, 5):
        values = np.arange(float(n))
        of_total, of_running, of_mapped = await run(found, {xs: values})
        np.testing.assert_array_equal(of_total, 2 * values)
        np.testing.assert_array_equal(of_running, np.arange(n, 0, -1))
        np.testing.assert_array_equal(of_mapped, 3 * values**2)


# -- 65: nested maps -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@WINDOWS
async def test_nested_maps(run: Run, window: int) -> None:
    """Behaviour 65: what inner iterations save comes back by outer iteration, with 10 of each in flight.

    A table of 10 x 10 shares w is mapped row by row, element by element, to (v * w)^2. Their sum has a gradient of 1
    for v = 3 as the shares are made so; a step of gradient descent by 0.001 takes v to 2.999. Were shares mixed up
    between outer iterations, the gradient of the table, 2 v^2 w, would have them at other places.
    """
    v = af.Variable(3.0, name="v")
    shares = np.random.default_rng(7).uniform(0.5, 1.5, (10, 10))
    shares /= np.sqrt(6.0 * (shares**2).sum())
    table = source(shares)

    def element(w: Any) -> Any:
        return (v.read() * w) ** 2

    squares = af.map_fn(
        lambda row: af.map_fn(element, row, parallel_iterations=window), table, parallel_iterations=window
    )
    of_v, of_table = gradients(af.sum(squares), [v, table])
    grad = await run(of_table)
    assert await run(v.assign_sub(0.001 * of_v)) == pytest.approx(2.999, abs=1e-12)
    np.testing.assert_allclose(grad, 2 * 9 * shares)
