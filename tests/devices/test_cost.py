from __future__ import annotations

import random

import pytest

from asyncflow.devices import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.devices.machine.cost import Proof, UserCost


def test_it_begins_as_the_static_estimate() -> None:
    cost = MeasuredCost(base_ns=1000.0, slope_ns=2.0)
    assert cost.predict_ns(500) == 2000.0


def test_the_first_measurement_replaces_the_estimate() -> None:
    cost = MeasuredCost(base_ns=1e9)
    cost.observe(100, 5000)
    assert cost.predict_ns(100) == 5000


def test_a_cold_first_measurement_counts_for_nothing() -> None:
    """The measurement would keep a short kernel off the event loop for dozens of firings."""
    cost = MeasuredCost()
    cost.observe(100, 50_000_000)
    cost.observe(100, 5_000)
    assert cost.predict_ns(100) == 5_000
    cost.observe(100, 9_000)
    assert cost.predict_ns(100) == 6_000


def test_a_second_measurement_that_took_longer_counts_for_a_quarter() -> None:
    cost = MeasuredCost()
    cost.observe(100, 5_000)
    cost.observe(100, 9_000)
    assert cost.predict_ns(100) == 6_000


def test_from_one_size_larger_costs_in_proportion_and_smaller_no_less() -> None:
    cost = MeasuredCost()
    for _ in range(3):
        cost.observe(100, 5000)
    assert (cost.predict_ns(200), cost.predict_ns(50)) == (10000, 5000)


def test_it_finds_the_line() -> None:
    cost = MeasuredCost()
    sizes = random.Random(0)
    for _ in range(200):
        size = sizes.randrange(1, 10_000)
        cost.observe(size, 3000 + 7 * size)
    assert cost.predict_ns(10) == pytest.approx(3070, rel=1e-6)
    assert cost.predict_ns(100_000) == pytest.approx(703_000, rel=1e-6)


def test_it_follows_a_change() -> None:
    cost = MeasuredCost()
    for _ in range(20):
        cost.observe(100, 5000)
    for _ in range(40):
        cost.observe(100, 50_000)
    assert cost.predict_ns(100) == pytest.approx(50_000, rel=1e-3)


def test_noise_never_predicts_that_more_work_is_faster_or_free() -> None:
    noise = random.Random(1)
    cost = MeasuredCost()
    for _ in range(500):
        cost.observe(noise.randrange(0, 50), noise.randrange(100, 100_000))
        assert 0 <= cost.predict_ns(0) <= cost.predict_ns(10) <= cost.predict_ns(1000)


def test_size_zero_is_a_size() -> None:
    cost = MeasuredCost()
    cost.observe(0, 700)
    cost.observe(0, 700)
    assert cost.predict_ns(0) == 700


def test_the_static_estimate_holds_until_the_first_measurement() -> None:
    cost = MeasuredCost(base_ns=500, slope_ns=2)
    assert cost.predict_ns(10) == 520
    cost.observe(10, INLINE_LIMIT_NS)
    assert cost.predict_ns(10) == INLINE_LIMIT_NS < cost.predict_ns(11)


def test_a_user_function_proves_itself_again_after_each_slow_call() -> None:
    """Behaviour 108: eight short calls, then 64 after a call that held the loop, at each node that calls the
    function.
    """
    proof = Proof()
    cost, other = UserCost([proof]), UserCost([proof])
    for node in (cost, other):
        assert _short_calls_until_proved(node) == 8
    cost.observe(1, 2 * INLINE_LIMIT_NS)
    assert cost.predict_ns(1) > INLINE_LIMIT_NS and other.predict_ns(1) > INLINE_LIMIT_NS
    assert _short_calls_until_proved(cost) == 64
    for _ in range(512 - 64):
        cost.observe(1, 1_000)
    cost.observe(1, 2 * INLINE_LIMIT_NS)
    assert _short_calls_until_proved(cost) == 8, "a long good record counts"


def test_the_deviation_counts_and_sizes_do_not_disprove() -> None:
    """Behaviour 108: a mean below the limit is not enough, and work on more elements may take longer."""
    cost = UserCost([Proof()])
    for ns in (10_000, INLINE_LIMIT_NS) * 4:
        cost.observe(1, ns)
    assert cost.predict_ns(1) > INLINE_LIMIT_NS
    cost = UserCost([Proof()])
    assert _short_calls_until_proved(cost) == 8
    assert cost.predict_ns(1_000) > INLINE_LIMIT_NS
    cost.observe(1_000, 1_000_000)
    assert cost.predict_ns(1) < INLINE_LIMIT_NS


def _short_calls_until_proved(cost: UserCost) -> int:
    calls = 0
    while cost.predict_ns(1) > INLINE_LIMIT_NS:
        cost.observe(1, 1_000)
        calls += 1
    return calls
