"""Dependencies of loop variables: everything that reaches them in any number of iterations, and the cost to find it."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest

import asyncflow as af
from asyncflow.autodiff.dependencies import _closed


def one_iteration_more(closed: list[int], step: list[int]) -> list[int]:
    n_vars = len(step)
    wider = []
    for mask, each in zip(closed, step, strict=True):
        mask |= each >> n_vars << n_vars
        for place in range(n_vars):
            mask |= closed[place] if each >> place & 1 else 0
        wider.append(mask)
    return wider


def test_dependencies_hold_for_any_number_of_iterations() -> None:
    """Against iterations one by one, over random sets of variables and of three inputs behind them."""
    random = Random(0)
    for _ in range(1_000):
        n_vars, density = random.randint(0, 8), random.random()
        step = [sum((random.random() < density) << place for place in range(n_vars + 3)) for _ in range(n_vars)]
        before: list[int] = []
        expected = [1 << place for place in range(n_vars)]
        while before != expected:
            before, expected = expected, one_iteration_more(expected, step)
        assert _closed(step) == expected


def calls_of_a_gradient(n_vars: int, feeder: Any) -> int:
    """Count the Python functions that building the gradient of a loop calls."""
    with af.Graph():
        first = [af.constant(1.0) for _ in range(n_vars)]

        def body(i: af.Tensor, *values: af.Tensor) -> Any:
            return (i + 1, *[af.sin(values[feeder(k) % n_vars]) for k in range(n_vars)])

        _, last, *_ = af.while_loop(lambda i, *_: i < 3, body, (0, *first))
        count = 0

        def counted(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            af.gradients(last, first[0])
        finally:
            sys.setprofile(before)
    return count


@pytest.mark.parametrize("feeder", [lambda k: k + 1, lambda k: max(k - 1, 0)], ids=["ring", "chain"])
def test_variables_that_feed_one_another_cost_their_number(feeder: Any) -> None:
    """The gradient of a loop of 80 variables takes 2**1.2 times the calls of one of 40, or less."""
    assert calls_of_a_gradient(80, feeder) < 2**1.2 * calls_of_a_gradient(40, feeder)
