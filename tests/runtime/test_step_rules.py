"""The rules of shared work are pure functions of waiting members, measured costs and the time: no session runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import pytest

import asyncflow as af
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.shared.call_costs import CallCosts
from asyncflow.runtime.shared.step_rules import LeastTime, WaitingLine, at_once, first_halfway_s, in_groups

START_S = 100.0


def members(*since_s: float, deadline_s: float = inf, priority: int = 0) -> list[af.WaitingMember]:
    return [af.WaitingMember(priority, START_S + each, START_S + deadline_s) for each in since_s]


def step(
    waiting: Sequence[af.WaitingMember],
    *,
    after_s: float = 0.0,
    joined: int = 0,
    capacity: float = inf,
    is_idle: bool = True,
) -> af.NextStep:
    return af.NextStep(START_S + after_s, waiting, joined, capacity, is_idle, lambda size: 0.0)


def learnt(*taken_ms: float) -> CallCosts:
    """Costs of sizes 1, 2, ..., each measured often enough."""
    costs = CallCosts()
    for size, each in enumerate(taken_ms, 1):
        for _ in range(3):
            costs.observe(size, each * 1e6)
    return costs


def least_time(costs: CallCosts | None = None, batch: af.Batch | None = None, *, is_ending: bool = False) -> LeastTime:
    return LeastTime(CallCosts() if costs is None else costs, af.Batch(8) if batch is None else batch, is_ending)


def until_s(found: int | af.WaitUntil) -> float:
    assert isinstance(found, af.WaitUntil)
    return found.time_s - START_S


@pytest.mark.parametrize("rule", [at_once, in_groups, least_time()], ids=["at once", "in groups", "least time"])
def test_every_rule_is_a_policy_that_a_user_could_give(rule: af.StepPolicy) -> None:
    assert isinstance(rule, af.StepPolicy)
    assert rule(step(members(0.0))) == 1
    assert af.Pool(policy=rule).policy is af.Batch(policy=rule).policy


@pytest.mark.parametrize("after_s", [0.0, 0.49])
def test_rows_that_grow_wait_for_as_many_as_there_are(after_s: float) -> None:
    assert in_groups(step(members(0.0, 0.1, 0.2), after_s=after_s, joined=4)) == af.WaitUntil(START_S + 0.5)
    assert in_groups(step(members(0.0, 0.1, 0.2, 0.3), after_s=after_s, joined=4)) == 4
    assert at_once(step(members(0.0, 0.1, 0.2), after_s=after_s, joined=4)) == 3


def test_rows_that_grow_wait_for_half_of_the_time_until_the_first_is_due() -> None:
    late = [*members(0.0, deadline_s=0.4), *members(0.0)]
    assert in_groups(step(late, after_s=0.1, joined=9)) == af.WaitUntil(START_S + 0.2)
    assert in_groups(step(late, after_s=0.2, joined=9)) == 2


def test_the_first_of_each_priority_counts() -> None:
    waiting = [*members(0.3, 0.4), *members(0.2, 0.1, priority=1), *members(0.25, 0.0, priority=7)]
    assert first_halfway_s(waiting) == pytest.approx(START_S + 0.7)
    assert first_halfway_s(waiting[:2]) == pytest.approx(START_S + 0.8)


def test_a_batch_is_called_where_nothing_else_goes_on_or_it_is_full() -> None:
    rule = least_time()
    assert rule(step(members(0.0, 0.0), capacity=8)) == 2
    assert rule(step(members(0.0, 0.0), capacity=8, is_idle=False)) == af.WaitUntil()
    assert rule(step(members(0.0, 0.0), capacity=8, is_idle=False, after_s=0.5)) == 2
    assert rule(step(members(*[0.0] * 8), capacity=8, is_idle=False)) == 8


def test_a_batch_has_the_size_that_takes_all_members_the_least_time() -> None:
    costs = learnt(1.0, 1.2, 9.0, 9.0)
    assert least_time(costs)(step(members(*[0.0] * 4), capacity=8)) == 2
    assert least_time(costs, af.Batch(8, cost="none"))(step(members(*[0.0] * 4), capacity=8)) == 4


def test_a_batch_waits_for_clients_that_were_just_answered() -> None:
    costs = learnt(10.0, 10.5, 11.0, 11.5)
    for _ in range(3):
        costs.returns.taken.observe(2, 1e6)
    costs.returns.answer(2, int(START_S * 1e9))
    waiting = step(members(0.0, 0.0), capacity=8, after_s=0.0001)
    assert 0.0001 < until_s(least_time(costs)(waiting)) < 0.01
    assert least_time(costs)(step(members(0.0, 0.0), capacity=8, after_s=0.02)) == 2
    assert least_time(costs, is_ending=True)(waiting) == 2
    assert least_time(costs, af.Batch(8, cost="none"))(waiting) == 2


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_delay_is_waited_for_whatever_goes_on(*, is_idle: bool) -> None:
    rule = least_time(learnt(1.0), af.Batch(8, max_delay_s=0.3))
    assert until_s(rule(step(members(0.2, 0.1), is_idle=is_idle, after_s=0.2))) == pytest.approx(0.4)
    assert rule(step(members(0.2, 0.1), is_idle=is_idle, after_s=0.4001)) == 2
    hurried = [*members(0.2, deadline_s=0.4), *members(0.1)]
    assert until_s(rule(step(hurried, is_idle=is_idle, after_s=0.2))) == pytest.approx(0.3)


def test_a_line_is_seen_in_its_order_and_each_member_when_it_is_looked_at() -> None:
    line, seen = PriorityLine[float, int](), []

    def as_seen(member: int) -> af.WaitingMember:
        seen.append(member)
        return af.WaitingMember(member // 10, float(member), inf)

    for member in (71, 5, 70, 3):
        line.add(member // 10, float(member), member)
    waiting = WaitingLine(line, as_seen)
    assert (len(waiting), seen) == (4, [])
    assert [each.since_s for each in waiting] == [3, 5, 70, 71]
    assert [waiting[k].since_s for k in (0, 2, -1)] == [3, 70, 71]
    assert [each.since_s for each in waiting[1:3]] == [5, 70]
    seen.clear()
    assert in_groups(step(waiting, joined=4)) == 4
    assert seen == []
    assert in_groups(step(waiting, joined=5)) == 4
    assert sorted(seen) == [3, 5, 70, 71]


def test_one_rule_decides_the_same_of_a_line_and_of_a_list() -> None:
    line = PriorityLine[float, af.WaitingMember]()
    waiting = [*members(0.0, 0.1), *members(0.05, priority=3)]
    for each in reversed(waiting):
        line.add(each.priority, each.since_s, each)
    rules: list[Callable[[af.NextStep], int | af.WaitUntil]] = [at_once, in_groups, least_time()]
    for rule in rules:
        for after_s in (0.0, 0.3, 0.6):
            for joined in (2, 5):
                one = step(WaitingLine(line, lambda each: each), after_s=after_s, joined=joined, is_idle=False)
                assert rule(one) == rule(step(waiting, after_s=after_s, joined=joined, is_idle=False))
