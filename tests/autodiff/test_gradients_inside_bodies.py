"""Gradients taken inside bodies and inside gradients, differentiated in turn: against central differences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


def loop(n: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """`body` of a counter and a value, `n` times."""
    return af.while_loop(lambda i, v: i < n, lambda i, v: (i + 1, body(i, v)), (0, start))[1]


def by_a_value_outside(x: Any) -> Any:
    q = af.sin(x)
    return loop(3, lambda i, t: af.tanh(t + af.gradients(q * q * x + t, x)), 0.1)


def by_values_of_two_bodies(x: Any) -> Any:
    def outer(i: Any, v: Any) -> Any:
        q = af.sin(v) * x

        def inner(j: Any, t: Any) -> Any:
            by_x, by_v = af.gradients(q * t * v, [x, v])
            return t + af.cos(by_x) * by_v * 0.3

        return loop(2, inner, 0.3) + v * 0.1

    return loop(3, outer, x)


def through_a_loop_outside(x: Any) -> Any:
    z = loop(3, lambda i, v: af.sin(v) * x, x)
    return loop(2, lambda i, t: af.tanh(t * af.gradients(z * z, x)), 0.4)


def through_a_branch_outside(x: Any) -> Any:
    z = af.cond(x > 0, lambda: af.sin(x) * x, lambda: x)
    return af.cond(x > 0.1, lambda: af.gradients(z * z * z, x), lambda: x)


def through_elements_outside(x: Any) -> Any:
    xs = af.stack([x, x * x, af.sin(x)])
    return loop(3, lambda i, t: t + af.gradients(xs[i] ** 3, x) * x, x)


@af.custom_gradient
def computed_again(x: Any, w: Any) -> Any:
    """Compute a value that saves nothing: its gradient computes it again."""

    def value(x: Any, w: Any) -> Any:
        return af.sin(x * w) * x

    return value(x, w), lambda grad: tuple(af.gradients(value(x, w), [x, w], grad))


def in_a_gradient_of_a_branch_in_a_loop(x: Any) -> Any:
    def body(i: Any, v: Any) -> Any:
        return af.cond(i < 2, lambda: computed_again(v, x), lambda: computed_again(v * x, v))

    return loop(3, body, x)


@af.custom_gradient
def loop_computed_again(v: Any) -> Any:
    def value() -> Any:
        return loop(2, lambda i, u: af.sin(u) * v, v)

    return value(), lambda grad: grad * af.gradients(value(), v)


def of_a_loop_in_a_gradient_of_a_loop(x: Any) -> Any:
    return loop(2, lambda i, v: loop_computed_again(v) * 1.1, x)


@af.custom_gradient
def of_a_value_in_two_shapes(v: Any) -> Any:
    """The second shape is not kept but made again from the first, which is."""
    flat = af.reshape(v, (1,))
    return af.sum(flat * v), lambda grad: grad * af.gradients(af.sum(flat * v), v)


def in_a_gradient_of_values_made_again(x: Any) -> Any:
    return loop(2, lambda i, v: of_a_value_in_two_shapes(af.sin(v)), x)


@af.custom_gradient
def kept(v: Any) -> Any:
    r = loop(2, lambda i, u: af.sin(u), v)
    return r, lambda grad: grad * af.gradients(r, v)


def of_a_loop_kept_by_a_loop(x: Any) -> Any:
    return loop(2, lambda i, v: kept(v) * 1.1, x)


@af.custom_gradient
def loop_of_such(x: Any, w: Any) -> Any:
    def value(x: Any, w: Any) -> Any:
        return loop(2, lambda j, u: computed_again(u, w) * x, x)

    return value(x, w), lambda grad: tuple(af.gradients(value(x, w), [x, w], grad))


def of_gradients_in_gradients_in_a_loop(x: Any) -> Any:
    return loop(2, lambda i, v: af.cond(i > 0, lambda: loop_of_such(v, x), lambda: v * x), x)


def in_gradients_of_nested_loops(x: Any) -> Any:
    def body(i: Any, v: Any) -> Any:
        return loop(2, lambda j, u: computed_again(u, v) + computed_again(x, u), v)

    return loop(2, body, x)


PROGRAMS = [
    by_a_value_outside,
    by_values_of_two_bodies,
    through_a_loop_outside,
    through_a_branch_outside,
    through_elements_outside,
    in_a_gradient_of_a_branch_in_a_loop,
    of_a_loop_in_a_gradient_of_a_loop,
    of_a_loop_kept_by_a_loop,
    in_a_gradient_of_values_made_again,
    of_gradients_in_gradients_in_a_loop,
    in_gradients_of_nested_loops,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
async def test_against_differences(run: Run, program: Callable[[Any], Any]) -> None:
    """First and second order."""
    x = af.placeholder("float64", ())
    orders = [program(x)]
    for _ in range(2):
        orders.append(af.gradients(orders[-1], x))
    at, step = 0.7, 1e-5
    found, above, below = [await run(orders, {x: value}) for value in (at, at + step, at - step)]
    differences = [(up - down) / (2 * step) for up, down in zip(above, below, strict=True)]
    assert found[1:] == pytest.approx(differences[:-1], rel=1e-6, abs=1e-8)
