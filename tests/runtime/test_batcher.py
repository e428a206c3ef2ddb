"""The batcher as a pure machine: every order of its events, and the number of members that it takes at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import ceil, inf
from random import Random
from typing import Any

import pytest

import asyncflow as af
from asyncflow.runtime.shared.batcher import BatchCall, Batcher, Gathered
from asyncflow.runtime.shared.call_costs import CallCosts

COSTS = CallCosts()


class Named(Gathered):
    """A member that records its end."""

    def __init__(
        self, name: int, nbytes: int = 1, offered_ns: int = 0, deadline_ns: float = inf, priority: int = 0
    ) -> None:
        self.nbytes, self.offered_ns, self.deadline_ns, self.priority = nbytes, offered_ns, deadline_ns, priority
        self.is_gone = False
        self.signature: Hashable = None
        self.name = name
        self.computed = 0
        self.failed = 0


class InParts(CallCosts):
    """Costs that always cut members into the same number of calls; nothing is learnt."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def parts(self, size: int, random: Random) -> int:
        return min(self.count, size)

    def observe(self, size: int, taken_ns: float, parts: int = 1, mean_ns: float | None = None) -> int:
        return size


class World:
    """A batcher, its members, and the calls under way.

    The poisoned member makes every call fail that it is in, and one call may fail by itself. Time passes once, and with
    it the deadlines of all odd members.
    """

    def __init__(self, poisoned: int | None, lanes: int, members: int, parts: int = 1) -> None:
        self.costs = InParts(parts)
        self.policy = af.Batch(3, cost="none" if parts == 1 else "learned")
        self.batcher: Batcher[Named] = Batcher()
        self.members = [Named(name, deadline_ns=5 if name % 2 else inf) for name in range(members)]
        self.calls: list[BatchCall[Named]] = []
        self.offered: set[int] = set()
        self.poisoned, self.lanes = poisoned, lanes
        self.now_ns = 0
        self.may_fail = poisoned is None
        self.has_failed = False

    def lane_of(self, member: Named) -> int:
        return member.name // 2 % self.lanes

    def actions(self) -> list[tuple[str, int]]:
        found = [("offer", k) for k in range(len(self.members)) if k not in self.offered]
        found += [
            ("withdraw", k)
            for k in self.offered
            if not (self.members[k].is_gone or self.members[k].computed or self.members[k].failed)
        ]
        found += [("take", 0)] if self.batcher.lanes else []
        found += [("time passes", 0)] if self.now_ns == 0 and self.offered else []
        found += [("fail", place) for place in range(len(self.calls)) if self.may_fail]
        return found + [("end", place) for place in range(len(self.calls))]

    def do(self, action: str, which: int) -> None:
        batcher, member = self.batcher, self.members[which % len(self.members)]
        if action == "offer":
            self.offered.add(which)
            batcher.offer(self.lane_of(member), self.costs, self.policy, member)
        elif action == "withdraw":
            batcher.withdraw(self.lane_of(member), member)
        elif action == "time passes":
            self.now_ns = 10
        elif action == "take":
            for call in batcher.take(self.now_ns, is_idle=True):
                assert len({self.lane_of(each) for each in call.members}) == 1
                assert not any(each.is_gone for each in call.members)
                # What has failed is done again even if it is late.
                assert self.has_failed or all(each.deadline_ns > self.now_ns for each in call.members)
                self.calls += (call, *call.beside)
        else:
            self.may_fail = self.may_fail and action == "end"
            self.end(self.calls.pop(which), is_failure=action == "fail")

    def end(self, call: BatchCall[Named], *, is_failure: bool) -> None:
        if is_failure or any(each.name == self.poisoned for each in call.members):
            self.has_failed = True
            if self.batcher.failed(call, divisible=True):
                for each in call.members:
                    each.failed += not each.is_gone
        else:
            self.batcher.ended(call, 1.0, 0)
            for each in call.members:
                each.computed += not each.is_gone

    def state(self) -> str:
        lanes = [
            (
                key,
                [m.name for m in lane.waiting],
                [[m.name for m in part] for part in lane.suspects],
            )
            for key, lane in sorted(self.batcher.lanes.items(), key=str)
        ]
        under_way = sorted(([m.name for m in call.members] for call in self.calls), key=str)
        members = [(m.is_gone, m.computed, m.failed) for m in self.members]
        return repr((lanes, under_way, members, sorted(self.offered), self.now_ns, self.may_fail, self.has_failed))

    def check(self) -> None:
        """Once nothing is left to do, every member that stayed has come to exactly one end, or to its deadline."""
        assert not self.batcher.lanes
        for member in self.members:
            ends = member.computed + member.failed
            may_be_late = member.deadline_ns <= self.now_ns
            assert ends <= 1 if may_be_late else ends == (0 if member.is_gone else 1), member.name
            assert not member.failed or member.name == self.poisoned or self.poisoned is None


@pytest.mark.slow
@pytest.mark.parametrize("poisoned", [None, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_every_order_of_four_members(poisoned: int | None, lanes: int) -> None:
    """Fault F20, F38, F40, F45: no member is lost, computed twice, or left behind when another fails, leaves or is
    late.
    """
    try_every_order(lambda: World(poisoned, lanes, 4))


@pytest.mark.parametrize("poisoned", [None, 2])
def test_every_order_of_three_members(poisoned: int | None) -> None:
    """Fault F20, F38, F40, F45: as above."""
    try_every_order(lambda: World(poisoned, 1, 3))


@pytest.mark.parametrize("poisoned", [None, 2])
def test_every_order_of_three_members_in_calls_made_at_once(poisoned: int | None) -> None:
    """Fault F20, F38, F40, F45: as above."""
    try_every_order(lambda: World(poisoned, 1, 3, parts=2))


def test_a_lane_is_free_when_all_calls_made_at_once_have_ended() -> None:
    batcher, costs = Batcher[Named](), CallCosts(threads=2)
    for size in 1, 2, 3, 4:
        for _ in range(3):
            costs.observe(size, 9e6, 1)
            costs.observe(size, 5e6, 2)
    before_ns = costs.taken_ns[4]
    members = [Named(name) for name in range(4)]
    for member in members:
        batcher.offer("lane", costs, af.Batch(4), member)
    (first,) = batcher.take(0, is_idle=True)
    (second,) = first.beside
    assert [[each.name for each in call.members] for call in (first, second)] == [[0, 1], [2, 3]]
    batcher.offer("lane", costs, af.Batch(4), Named(4))
    members[2].is_gone = members[3].is_gone = True
    assert batcher.withdraw("lane", members[0]) is None
    assert batcher.withdraw("lane", members[3]) is second  # the only one that nobody wants any more
    batcher.ended(second, 4e6, 4_000_000)
    assert not list(batcher.take(4_000_000, is_idle=True))
    batcher.ended(first, 6e6, 6_000_000)
    assert costs.taken_ns[4] == pytest.approx(before_ns + (6e6 - before_ns) / 4)  # all took as long as the longest
    assert [each.name for call in batcher.take(6_000_000, is_idle=True) for each in call.members] == [4]


def try_every_order(start: Callable[[], World]) -> None:
    seen: set[str] = set()
    stack: list[tuple[tuple[str, int], ...]] = [()]
    ends = 0
    while stack:
        done = stack.pop()
        world = start()  # done anew, which takes a tenth of the time of a copy
        for action in done:
            world.do(*action)
        state = world.state()
        if state in seen:
            continue
        seen.add(state)
        actions = world.actions()
        if not actions:
            world.check()
            ends += 1
        stack += [(*done, action) for action in actions]
    assert ends >= 2 ** len(start().members)  # each stays or leaves


def drained(batcher: Batcher[Named]) -> list[list[int]]:
    """The calls that are made, one after the other."""
    found = []
    while calls := list(batcher.take(0, is_idle=True)):
        for call in calls:
            found.append([member.name for member in call.members])
            batcher.ended(call, 1.0, 0)
    return found


def offered(count: int, policy: af.Batch, nbytes: int = 1) -> Batcher[Named]:
    batcher: Batcher[Named] = Batcher()
    for name in range(count):
        batcher.offer("lane", COSTS, policy, Named(name, nbytes))
    return batcher


def test_limits_of_size_and_bytes() -> None:
    assert drained(offered(5, af.Batch(2, cost="none"))) == [[0, 1], [2, 3], [4]]
    assert drained(offered(3, af.Batch(8, max_bytes=20, cost="none"), nbytes=10)) == [[0, 1], [2]]
    assert drained(offered(2, af.Batch(8, max_bytes=5, cost="none"), nbytes=10)) == [[0], [1]]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_calls_without_policy_delay_and_deadline_are_decided_by_numbers(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("every pass of the event loop would take longer")

    for seen in ("NextStep", "WaitingLine", "_seen", "size_in_time"):
        monkeypatch.setattr(f"asyncflow.runtime.shared.batcher.{seen}", fail)
    monkeypatch.setattr(Random, "randrange", lambda self, end: fail() if count == 1 else 1)
    batcher = Batcher[Named]()
    for name in range(count):
        batcher.offer("", CallCosts(), af.Batch(8), Named(name))
    assert [len(call.members) for call in batcher.take(0, is_idle=False)] == [8] * (count == 8)
    if count < 8:
        assert batcher.wake_ns(0) == inf
        assert [len(call.members) for call in batcher.take(0, is_idle=True)] == [count]


def test_a_delay_is_waited_for_unless_the_call_is_full() -> None:
    batcher: Batcher[Named] = Batcher()
    policy = af.Batch(3, max_delay_s=1e-6)
    for name in range(2):
        batcher.offer("lane", COSTS, policy, Named(name, offered_ns=500 + name))
    assert list(batcher.take(1_000, is_idle=True)) == []
    assert batcher.wake_ns(1_000) == pytest.approx(1_500)
    batcher.offer("lane", COSTS, policy, Named(2, offered_ns=600))
    (call,) = batcher.take(1_000, is_idle=False)
    assert [member.name for member in call.members] == [0, 1, 2]
    batcher.ended(call, 1.0, 0)
    batcher.offer("lane", COSTS, policy, Named(3, offered_ns=2_000))
    assert list(batcher.take(2_999, is_idle=True)) == []
    assert len(list(batcher.take(3_000, is_idle=False))) == 1


def test_the_lowest_number_goes_first_and_each_other_has_an_eighth() -> None:
    batcher: Batcher[Named] = Batcher()
    for name in range(300):
        batcher.offer("lane", COSTS, af.Batch(4, cost="none"), Named(name, priority=name % 3))
    order = [name % 3 for members in drained(batcher) for name in members]
    while_all_wait = order[:120]
    counts = [while_all_wait.count(priority) for priority in range(3)]
    assert min(counts[1:]) >= 120 / 8 - 1  # one may be owed still
    assert counts[0] >= 120 * 6 / 8
    assert sorted(order) == [0] * 100 + [1] * 100 + [2] * 100


def test_lanes_go_by_number_and_then_by_deadline() -> None:
    """No lane waits behind another for ever: of one number the oldest goes first, and each other has an eighth."""
    batcher: Batcher[Named] = Batcher()
    policy = af.Batch(4, cost="none")
    batcher.offer("late", COSTS, policy, Named(0, offered_ns=900))
    batcher.offer("early", COSTS, policy, Named(1, offered_ns=100))
    batcher.offer("urgent", COSTS, policy, Named(2, offered_ns=950, deadline_ns=2_000))
    batcher.offer("low", COSTS, policy, Named(3, offered_ns=0, priority=1))
    assert drained(batcher) == [[2], [1], [0], [3]]
    firsts = []
    for round_ in range(16):  # only the first call of each round is made
        for lane in range(2):
            batcher.offer(lane, COSTS, policy, Named(lane, offered_ns=round_, priority=lane))
        calls = batcher.take(1_000, is_idle=True)
        call = next(calls)
        calls.close()  # type: ignore[attr-defined]
        firsts.append(call.lane.signature)
        batcher.ended(call, 1.0, 0)
    assert firsts.count(1) == 2


def learnt(each_ns: float, sizes: int = 8) -> CallCosts:
    costs = CallCosts()
    for size in range(1, sizes + 1):
        for _ in range(3):
            costs.observe(size, each_ns * size)
    return costs


def test_deadlines_are_met_where_a_smaller_call_does() -> None:
    """Fault F45: late members leave; a call is small enough for the first deadline in it that can be met."""
    batcher: Batcher[Named] = Batcher()
    costs = learnt(1.0)  # 1 ns and a little a member, so that all together is best
    costs.observe(1, 2.0)
    for name, deadline_ns in enumerate([inf, inf, 104.5, inf, 100.0, 100.5, 900.0]):
        batcher.offer("lane", costs, af.Batch(8), Named(name, deadline_ns=deadline_ns))
    (call,) = batcher.take(100, is_idle=True)
    # 4 is late, 5 will be whatever is done and does not go, and 2 is in time if three go with it.
    assert [member.name for member in call.members] == [2, 6, 0, 1]
    batcher.ended(call, 4.0, 0)
    assert sorted(name for members in drained(batcher) for name in members) == [3, 5]


def test_a_delay_ends_before_a_deadline() -> None:
    batcher: Batcher[Named] = Batcher()
    batcher.offer("lane", learnt(100.0), af.Batch(8, max_delay_s=1.0), Named(0, deadline_ns=5_000))
    assert list(batcher.take(100, is_idle=True)) == []
    assert batcher.wake_ns(100) == pytest.approx(2_500)
    assert [len(call.members) for call in batcher.take(2_500, is_idle=False)] == [1]
    batcher.offer("others", learnt(2_000.0), af.Batch(8, max_delay_s=1.0), Named(1, deadline_ns=5_000))
    assert list(batcher.take(100, is_idle=True)) == []
    assert batcher.wake_ns(100) == pytest.approx(1_000)


def test_a_delay_leaves_half_of_the_time_where_nothing_is_learnt() -> None:
    """Fault F45: what a call takes besides is not known either."""
    batcher: Batcher[Named] = Batcher()
    for name in range(3):
        deadline_ns = 9_000 if name == 1 else inf
        batcher.offer(
            "lane", CallCosts(), af.Batch(8, max_delay_s=1.0), Named(name, offered_ns=1_000, deadline_ns=deadline_ns)
        )
    assert len(list(batcher.take(4_999, is_idle=True))) == 0
    assert batcher.wake_ns(4_999) == pytest.approx(5_000)
    assert [len(call.members) for call in batcher.take(5_000, is_idle=False)] == [3]


def test_a_waiting_member_goes_in_time_though_work_is_always_ready() -> None:
    """Some run may never end, or others come all the time: half of the time until a deadline, or of a second."""
    batcher: Batcher[Named] = Batcher()
    for name, deadline_ns in enumerate([3_000, inf]):
        batcher.offer(name, COSTS, af.Batch(8), Named(name, offered_ns=1_000, deadline_ns=deadline_ns))
    for now_ns, name in [(2_000, 0), (500_001_000, 1)]:
        assert list(batcher.take(now_ns - 1, is_idle=False)) == []
        (call,) = batcher.take(now_ns, is_idle=False)
        assert [member.name for member in call.members] == [name]


def endless(costs: CallCosts, *deadlines_ns: float) -> tuple[Batcher[Named], BatchCall[Named], list[Named]]:
    """A call that began at 1000 ns and does not end."""
    batcher: Batcher[Named] = Batcher()
    members = [Named(name, deadline_ns=deadline_ns) for name, deadline_ns in enumerate(deadlines_ns)]
    for member in members:
        batcher.offer("lane", costs, af.Batch(8, cost="none"), member)
    (call,) = batcher.take(0, is_idle=True)
    call.started_ns = 1_000
    return batcher, call, members


@pytest.mark.parametrize(("each_ns", "due_ns"), [(0.0, 1_600), (100.0, 1_800)])
def test_a_remaining_member_is_computed_without_a_left_one(each_ns: float, due_ns: int) -> None:
    """Fault F40: it waits until the call has taken twice the learnt time, and twice its time when the first member
    left.
    """
    batcher, call, members = endless(learnt(each_ns) if each_ns else CallCosts(), inf, inf, inf, inf)
    assert batcher.overdue(1_000_000) == []
    assert batcher.wake_ns(0) == inf
    batcher.withdraw("lane", members[1])
    assert batcher.overdue(1_300) == []
    assert batcher.wake_ns(0) == due_ns
    assert batcher.overdue(due_ns - 1) == []
    assert batcher.overdue(due_ns) == [call]
    batcher.divide(call)
    batcher.offer("lane", CallCosts(), af.Batch(8), Named(4))
    parts = list(batcher.take(due_ns, is_idle=True))
    assert sorted([member.name for member in part.members] for part in parts) == [[0, 2], [3], [4]]
    batcher.failed(call, divisible=False)  # it has stopped only now, and takes nobody with it
    assert batcher.count() == 0
    assert all(part.lane.under_way == [part] for part in parts)
    for part in parts:
        batcher.ended(part, 1.0, 0)
    assert not batcher.lanes


def test_halves_begin_while_the_first_still_has_half_of_its_time() -> None:
    """Fault F45: of members that are late at once, all that can end do so; the last one is alone in the end."""
    batcher, call, members = endless(CallCosts(), 9_000, 9_000, 9_000)
    assert batcher.wake_ns(0) == 5_000
    assert batcher.overdue(5_000) == [call]
    batcher.divide(call)
    pair, single = sorted(batcher.take(5_000, is_idle=False), key=lambda part: -len(part.members))
    batcher.ended(single, 1.0, 0)
    pair.started_ns = 5_000
    assert batcher.overdue(7_000) == [pair]
    batcher.divide(pair)
    first, second = batcher.take(7_000, is_idle=False)
    batcher.ended(first, 1.0, 0)
    assert second.members == [members[1]]
    assert members[1].signature in batcher.lanes
    assert batcher.withdraw(members[1].signature, members[1]) is second
    batcher.failed(second, divisible=False)
    assert not batcher.lanes


def test_a_call_that_may_not_be_done_again_is_set_apart() -> None:
    """Members that come later do not wait for it."""
    batcher, call, members = endless(CallCosts(), inf, inf)
    batcher.withdraw("lane", members[0])
    assert batcher.overdue(1_100) == []
    assert batcher.overdue(1_200) == [call]
    batcher.set_apart(call)
    assert batcher.overdue(10_000) == []
    assert batcher.wake_ns(0) == inf
    batcher.offer("lane", CallCosts(), af.Batch(8), Named(2))
    assert [[each.name for each in later.members] for later in batcher.take(1_200, is_idle=True)] == [[2]]
    assert batcher.withdraw(members[1].signature, members[1]) is call
    batcher.ended(call, 1.0, 0)
    assert list(batcher.lanes) == ["lane"]


def test_a_member_without_deadline_is_not_overtaken_for_ever() -> None:
    batcher: Batcher[Named] = Batcher()
    policy = af.Batch(1, cost="none")
    batcher.offer("lane", COSTS, policy, Named(-1))
    order = []
    for k in range(30):
        now_ns = k * 50_000_000
        batcher.offer("lane", COSTS, policy, Named(k, offered_ns=now_ns, deadline_ns=now_ns + 100_000_000))
        (call,) = batcher.take(now_ns, is_idle=True)
        order.append(call.members[0].name)
        batcher.ended(call, 1.0, 0)
    assert order.index(-1) == 18  # about a second


def test_calls_are_as_small_as_memory_needs() -> None:
    """Halves are tried if there is no memory for many; later calls are no larger, but for a try now and then."""
    batcher: Batcher[Named] = Batcher()
    costs = CallCosts()
    made: list[int] = []

    def round_of(count: int, room: int) -> None:
        for name in range(count):
            batcher.offer("lane", costs, af.Batch(64, cost="none"), Named(name))
        while calls := list(batcher.take(0, is_idle=True)):
            for call in calls:
                made.append(len(call.members))
                if len(call.members) > room:
                    assert not batcher.failed(call, divisible=True, lacks_memory=True)
                else:
                    batcher.ended(call, 1.0, 0)

    round_of(32, room=9)
    assert made[:3] == [32, 16, 8]
    made.clear()
    for _ in range(20):
        round_of(32, room=9)
    assert sum(size > 9 for size in made) <= 6
    made.clear()
    for _ in range(60):
        round_of(32, room=64)
    assert 32 in made


def test_others_gather_while_a_call_is_under_way_or_work_is_ready() -> None:
    batcher = offered(1, af.Batch(4, cost="none"))
    assert list(batcher.take(0, is_idle=False)) == []
    (first,) = batcher.take(0, is_idle=True)
    for name in range(1, 4):
        batcher.offer("lane", COSTS, af.Batch(4, cost="none"), Named(name))
    assert list(batcher.take(0, is_idle=True)) == []
    batcher.ended(first, 1.0, 0)
    assert drained(batcher) == [[1, 2, 3]]


def test_the_one_at_fault_is_found_by_halving() -> None:
    """Fault F38: of 32 members one fails alone, after at most two calls for each halving."""
    batcher = offered(32, af.Batch(32, cost="none"))
    good: list[int] = []
    bad: list[int] = []
    calls = 0
    while found := list(batcher.take(0, is_idle=True)):
        for call in found:
            calls += 1
            names = [member.name for member in call.members]
            if 13 not in names:
                batcher.ended(call, 1.0, 0)
                good += names
            elif batcher.failed(call, divisible=True):
                bad += names
    assert (sorted(good), bad) == ([k for k in range(32) if k != 13], [13])
    assert calls <= 1 + 2 * 5
    batcher = offered(3, af.Batch(32, cost="none"))
    (whole,) = batcher.take(0, is_idle=True)
    assert batcher.failed(whole, divisible=False)
    assert not batcher.lanes


@pytest.mark.parametrize("has_policy", [False, True])
def test_the_rule_is_asked_anew_once_all_members_of_a_failed_call_have_left(has_policy: bool) -> None:
    """Fault F38, F40, F45: the decision about a failed call does not hold for members that came later."""

    def in_pairs(step: af.NextStep) -> int | af.WaitUntil:
        return 2 if len(step.waiting) > 1 else af.WaitUntil()

    batcher = Batcher[Named]()
    members = [Named(name, deadline_ns=5 if name == 2 else inf) for name in range(4)]
    policy = af.Batch(8, policy=in_pairs if has_policy else None)
    for member in members[:2]:
        batcher.offer("lane", COSTS, policy, member)
    (call,) = batcher.take(0, is_idle=True)
    assert not batcher.failed(call, divisible=True)
    for member in members[:2]:
        batcher.withdraw("lane", member)
    for member in members[2:]:
        batcher.offer("lane", COSTS, policy, member)
    # One member is late by now, so the policy sees one member, and waits for another.
    found = [call.members for call in batcher.take(10, is_idle=True)]
    assert found == ([] if has_policy else [[members[3]]])


def test_an_error_of_a_policy_is_told_to_no_later_call() -> None:
    """Fault F38: its call was not made, and the policy does not fail any more when it is asked again."""
    is_broken = True

    def policy(step: af.NextStep) -> int:
        if is_broken:
            raise ValueError("broken")
        return len(step.waiting)

    batcher = Batcher[Named]()
    for name in range(2):
        batcher.offer(name, COSTS, af.Batch(8, policy=policy), Named(name))
    calls = batcher.take(0, is_idle=True)
    assert str(next(calls).failure) == "broken"
    calls.close()  # type: ignore[attr-defined]
    is_broken = False
    (call,) = batcher.take(1, is_idle=True)
    assert call.failure is None


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_is_under_way_or_known_to_wake(seed: int) -> None:
    """After a pass no lane waits for nothing, however calls of others that share its times have ended meanwhile.

    Clients ask again soon after they were answered, so earlier members wait for them; some clients leave. A pass comes
    when a client asks or a call has ended, and at the time that the last pass named. Leaving clients wake nothing.
    """
    random = Random(seed)
    batcher: Batcher[Named] = Batcher(seed)
    costs = CallCosts()
    under_way: list[tuple[int, BatchCall[Named]]] = []
    asks = [(random.randrange(1_000), client) for client in range(8)]
    now_ns, waits, left = 0, 0, 500
    wake_ns = inf

    def taken_ns(size: int) -> int:
        return random.randrange(9_000, 11_000) + 100 * size

    def answer(call: BatchCall[Named], took_ns: int) -> None:
        batcher.ended(call, took_ns, now_ns)
        asks.extend((now_ns + random.randrange(1, 2_000), member.name) for member in call.members)

    while asks or under_way or wake_ns < inf:
        now_ns = max(now_ns, ceil(min([wake_ns, *(time_ns for time_ns, _ in (*asks, *under_way))])))
        is_woken = wake_ns <= now_ns
        for time_ns, client in [each for each in asks if each[0] <= now_ns]:
            asks.remove((time_ns, client))
            if left:
                left -= 1
                batcher.offer(client % 2, costs, af.Batch(8), Named(client, offered_ns=now_ns))
                is_woken = True
        for time_ns, call in [each for each in under_way if each[0] <= now_ns]:
            under_way.remove((time_ns, call))
            answer(call, taken_ns(len(call.members)))
            is_woken = True
        while is_woken:
            is_woken = False
            pass_ns = now_ns
            for call in batcher.take(pass_ns, is_idle=True):
                now_ns += random.randrange(3_000)
                took_ns = taken_ns(len(call.members))
                if len(call.members) == 1 and random.random() < 0.5:
                    now_ns += took_ns
                    answer(call, took_ns)  # here and now
                    is_woken = True
                else:
                    under_way.append((now_ns + took_ns, call))
            now_ns += random.randrange(1_000)  # a pass takes time, in which others become due
            wake_ns = batcher.wake_ns(pass_ns)
            assert wake_ns > pass_ns
            is_waiting = any(not lane.under_way for lane in batcher.lanes.values())
            waits += is_waiting
            assert is_woken or not is_waiting or wake_ns < inf
        waiting = [each for lane in batcher.lanes.values() for each in lane.waiting]
        if waiting and random.random() < 0.1:
            member = random.choice(waiting)
            batcher.withdraw(member.name % 2, member)
            asks.append((now_ns + random.randrange(1, 2_000), member.name))
    assert not batcher.lanes
    assert waits > 20


@pytest.mark.parametrize("seed", range(5))
def test_what_calls_take_is_learnt(seed: int) -> None:
    """Few members go singly and many together if two cost more than twice one; trying all sizes finds the least
    time.
    """
    random = Random(seed)
    learnt = CallCosts()
    true_ns = {1: 100.0, **{size: 700.0 + 15 * size + random.random() for size in range(2, 33)}}
    batcher: Batcher[Named] = Batcher(seed)
    sizes: list[int] = []
    now_ns = 0

    def round_of(waiting: int) -> list[int]:
        nonlocal now_ns
        now_ns += 1_000_000  # nobody is back soon, which is learnt, too
        for name in range(waiting):
            batcher.offer("lane", learnt, af.Batch(32), Named(name, offered_ns=now_ns))
        made = []
        while batcher.count():
            for call in batcher.take(now_ns, is_idle=True):
                made.append(len(call.members))
                batcher.ended(call, true_ns[len(call.members)], now_ns)
            if (wake_ns := batcher.wake_ns(now_ns)) < inf:
                now_ns = int(wake_ns) + 1
        return made

    for _ in range(60):
        sizes = round_of(random.choice((2, 3, 5, 8, 20, 32)))
    taken: dict[int, list[float]] = {waiting: [] for waiting in (2, 5, 32)}
    for waiting, times in taken.items():
        for _ in range(20):
            times.append(sum(true_ns[size] for size in round_of(waiting)))
    assert sizes
    for waiting, times in taken.items():
        in_all = [0.0]
        for count in range(1, waiting + 1):
            in_all.append(min(true_ns[size] + in_all[count - size] for size in range(1, count + 1)))
        assert sorted(times)[10] <= 1.1 * in_all[waiting], waiting


def test_costs_are_remembered_by_few_sizes_and_change_with_the_machine() -> None:
    costs = CallCosts()
    for size in range(1, 200):
        for _ in range(3):
            costs.observe(size, 1000.0)
    assert len(costs.taken_ns) <= 65
    few = CallCosts()
    for size in (1, *range(10, 200)):
        few.observe(size, 1000.0)
    assert (few.observe(2, 9000.0), few.taken_ns[1]) == (10, 1000.0)
    assert costs.best(64, 64) == 64
    for _ in range(60):
        costs.observe(64, 1e9)
    assert costs.best(64, 64) < 64


@pytest.mark.parametrize(
    "options",
    [{"max_size": 0}, {"max_size": 2.5}, {"max_delay_s": -1}, {"max_delay_s": "2 ms"}, {"max_bytes": 0}, {"cost": 3}],
)
def test_options_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(af.GraphError, match=next(iter(options))):
        af.batched(lambda x: x, **options)


def test_the_example_of_members_that_come_during_a_call() -> None:
    """The example of the module: a call of n members takes 4 + 2 n ms, and the deadline of `d` is at 15 ms."""
    costs, ms = CallCosts(), 1_000_000
    for size in (1, 2, 3):
        for _ in range(3):
            costs.observe(size, (4 + 2 * size) * ms)
    batcher: Batcher[Named] = Batcher()
    a, b, c, d = [Named(k, offered_ns=k * ms, deadline_ns=15 * ms if k == 3 else inf) for k in range(4)]
    batcher.offer("lane", costs, af.Batch(8), a)
    (call,) = batcher.take(0, is_idle=True)
    assert call.members == [a]
    for each in (b, c, d):
        batcher.offer("lane", costs, af.Batch(8), each)
    assert list(batcher.take(3 * ms, is_idle=True)) == []
    batcher.ended(call, 6 * ms, 6 * ms)
    (call,) = batcher.take(6 * ms, is_idle=True)
    assert call.members == [d, b]
    batcher.ended(call, 8 * ms, 14 * ms)
    (call,) = batcher.take(14 * ms, is_idle=True)
    assert call.members == [c]
