"""Expectations of a run follow the times of earlier runs; neither a first run nor a slow one misleads them."""

from __future__ import annotations

import random

import pytest

from asyncflow.compiler.run_cost import RunCost


def observed(*taken_s: float) -> RunCost:
    cost = RunCost()
    for taken in taken_s:
        cost.observe(taken)
    return cost


def test_nothing_is_expected_before_the_first_run() -> None:
    cost = RunCost()
    assert (cost.expected_s, cost.likely_s, cost.mean_s, cost.nbytes) == (0, 0, 0, 0)


def test_one_run_is_told_from_the_last_five() -> None:
    cost = observed(9, 9, 9, 1, 2, 3, 4, 50)
    assert cost.expected_s == 3
    assert observed(2, 4).expected_s == 3


def test_the_time_that_a_run_will_hardly_exceed() -> None:
    """Of times that do not vary, that time; of bounded ones, no more than the longest; of exponential ones, most."""
    assert observed(*[2] * 9).likely_s == 2
    dice = random.Random(2)
    cost = observed(1, 1, 1)
    for _ in range(300):
        cost.observe(dice.uniform(0.5, 1.5))
    assert 1.4 <= cost.likely_s <= 1.5
    exceeded = 0
    for _ in range(2000):
        taken_s = dice.expovariate(1)
        exceeded += taken_s > cost.likely_s
        cost.observe(taken_s)
    assert 0.01 <= exceeded / 2000 <= 0.06
    for _ in range(64):
        cost.observe(1)
    likely_s = cost.likely_s
    cost.observe(1e6)  # one alone says little
    assert cost.likely_s <= max(4.0, 4 * likely_s)


def test_a_cold_start_does_not_count_for_long() -> None:
    assert observed(10, 1, 1).mean_s == 1
    assert observed(0, 2).mean_s == 2  # a clock that has not moved tells nothing


def test_a_slow_run_moves_the_mean_little() -> None:
    assert observed(1, 1, 1, 1e6).mean_s == pytest.approx(1.375)


def test_runs_that_have_become_slow_are_believed() -> None:
    assert observed(1, 1, 1, *[100] * 60).mean_s == pytest.approx(100, rel=0.05)


def test_the_mean_of_exponential_times() -> None:
    """On average over 4000 runs, within 5 %."""
    dice = random.Random(1)
    cost = observed(1, 1, 1)
    means = []
    for _ in range(4000):
        cost.observe(dice.expovariate(1))
        means.append(cost.mean_s)
    assert sum(means) / len(means) == pytest.approx(1, rel=0.05)


def test_bytes_rise_at_once_and_fall_by_and_by() -> None:
    cost = RunCost()
    seen = []
    for nbytes in (100, 800, 0, 0):
        cost.observe_bytes(nbytes)
        seen.append(cost.nbytes)
    assert seen == [100, 800, 700, 613]
