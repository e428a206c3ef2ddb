"""Turns of priorities: shares hold for turns of any length, and debts are not kept for ever."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from asyncflow.runtime.lines.shares import SHARE, PriorityShares


def test_one_alone_has_all_turns_and_an_eighth_goes_to_each_other_one() -> None:
    shares = PriorityShares()
    assert [shares.pick([3]) for _ in range(4)] == [3] * 4
    assert [shares.pick([0, 5]) for _ in range(17)] == [0] * 7 + [5] + [0] * 7 + [5] + [0]


@pytest.mark.parametrize("count", [2, 3, 8, 11])
@pytest.mark.parametrize("seed", range(4))
def test_shares_hold_for_turns_of_any_length(seed: int, count: int) -> None:
    """While all wait, each has its share of the time, within the length of one turn; the first has the rest."""
    random, shares = Random(seed), PriorityShares()
    costs = {priority: random.uniform(0.1, 10) for priority in range(count)}
    taken: Counter[int] = Counter()
    for _ in range(2_000):
        priority = shares.next(costs)
        shares.took(priority, costs[priority], costs)
        taken[priority] += costs[priority]  # type: ignore[assignment]
        costs[priority] = random.uniform(0.1, 10)
    share = min(SHARE, 1 / count)
    for priority in range(1, count):
        assert taken[priority] == pytest.approx(share * taken.total(), abs=count * 10)


def test_debts_are_forgotten_with_the_waiting_members() -> None:
    """A member that comes again begins with no debt, and so do all members once one was alone."""
    shares = PriorityShares()
    for others in ([0], [0, 7]):
        for _ in range(7):
            shares.took(0, 1.0, [0, 5])
        shares.took(0, 1.0, others)
        assert shares.next({0: 1.0, 5: 1.0}) == 0


def test_a_burst_of_single_ones_keeps_the_order_of_their_priorities() -> None:
    shares, waiting, order = PriorityShares(), list(range(40))[::-1], []
    while waiting:
        order.append(shares.pick(waiting))
        waiting.remove(order[-1])
    assert order == list(range(40))
