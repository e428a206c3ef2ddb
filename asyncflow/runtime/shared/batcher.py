"""The choice of the firings that are computed together, and of the moment: a pure state machine, without clock or event
loop.

Members wait in *lanes*, one for each signature. Firings with the same code, dtypes, shapes, device and values in common
have one signature, and may share a call. One call of a lane is under way at a time, so that later members gather. On a
device of several threads a call may be made in parts at once, if that takes less time (`CallCosts.parts`). The lane is
free once all of them have ended.

======================== ============================================ ================================================
event                    state                                        action
======================== ============================================ ================================================
`offer`                                                               the member waits
`withdraw`               waits                                        it leaves; the others are as they were
`withdraw`               under way                                    its result is dropped when the call ends
`divide`                 `overdue`                                    the staying members wait in halves, in lanes of
                                                                      their own, so that none waits for the other
`set_apart`              `overdue`                                    it goes on in a lane of its own; the lane is free
`take`                   calls of the lane are under way              nothing
`take`                   pools go before the lane                     nothing
`take`                   its policy, the user's or `LeastTime`, lets  nothing, until it is asked again
                         no member join
`take`                   else                                         members past deadlines leave; a call is made
                                                                      of the others, of the size that is best, or
                                                                      several at once
`take`                   else, and several wait, all too late to be    nothing; one time in eight a member is called
                         answered in time, as far as is known
`ended`                  the last of the calls made at once           their time is learnt; the lane is free
`failed`                 of one member                                it is at fault; the lane is free
`failed`                 of several                                   both halves wait, apart and before all others
======================== ============================================ ================================================

**Order.** Members and lanes of the lowest priority number go first, but each other number that waits has an eighth of
the places (`PriorityShares`). Of one number, the member that is *due* first goes first: at its deadline, or a second
after it was offered. The call that takes the least time for all members may be late for its first deadline. Then a
call has the size with the most answers in time (`asyncflow.runtime.shared.call_sizes`), and only members that it can
answer in time.

For example, a call of n members takes 4 + 2 n ms. Member `a` comes at 0 ms to an idle lane, and is called alone. While
that call is under way `b`, `c` and `d` come at 1, 2 and 3 ms, and the deadline of `d` is at 15 ms. The call ends at
6 ms. A call for all three would end at 16 ms, too late for `d`; a call for two ends at 14 ms. So `d` and `b`, the
first ones due, share a call, and `c` has the next one. Members gather only while a call is under way: a single client
never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from math import inf
from random import Random
from typing import Generic, Protocol, TypeVar

from asyncflow.ops.user.batch import Batch
from asyncflow.ops.user.step_policy import NextStep, WaitingMember, decide
from asyncflow.runtime.lines.halving import halves
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import PATIENCE_S, PriorityShares
from asyncflow.runtime.shared.call_costs import EXPLORE, LONG, CallCosts
from asyncflow.runtime.shared.call_sizes import size_in_time
from asyncflow.runtime.shared.step_rules import LeastTime, WaitingLine

_SAFE = 1.1
"""A call is planned to take this multiple of its likely time, as times differ."""

_TRY = 8
"""One of 8 times when several wait and none can be answered in time, a member is called: costs may have changed."""


class Gathered(Protocol):
    """A firing, while it waits or is under way.

    Attributes:
        nbytes: of its inputs.
        offered_ns: since when it waits.
        deadline_ns: when its result is of no use any more; infinity for never.
        priority: lower ones go first.
        is_gone: True if its result is not wanted any more.
        signature: of the lane that it is in.
    """

    nbytes: int
    offered_ns: int
    deadline_ns: float
    priority: int
    is_gone: bool
    signature: Hashable


def _due_ns(member: Gathered) -> float:
    return min(member.deadline_ns, member.offered_ns + PATIENCE_S * 1e9)


def _seen(member: Gathered) -> WaitingMember:
    """Return what policies see of a member."""
    return WaitingMember(member.priority, member.offered_ns / 1e9, member.deadline_ns / 1e9)


M = TypeVar("M", bound=Gathered)


@dataclass(slots=True)
class CallGroup:
    """Calls that are made at once, and the times of the ended ones."""

    calls: int
    ended: int = 0
    size: int = 0
    taken_ns: float = 0.0
    sum_ns: float = 0.0
    """Sum over all members that had their results."""


@dataclass(slots=True, eq=False)
class BatchCall(Generic[M]):
    """Members that are computed together.

    Attributes:
        lane: the lane of its members.
        members: the members; some may have gone.
        failure: the error of a policy of the user's, with which its members fail; None without one.
        started_ns: time at which it was started, if it may never end; infinity if it ends by itself.
        left_ns: time at which a member was first found to have left; infinity while all stay.
        beside: the calls that are to be made with it.
        group: the group of these calls and this one.
    """

    lane: Lane[M]
    members: Sequence[M]
    started_ns: float = inf
    left_ns: float = inf
    beside: Sequence[BatchCall[M]] = ()
    group: CallGroup = field(default_factory=lambda: CallGroup(1))
    failure: Exception | None = None

    def overdue_ns(self) -> float:
        """Return when one of its members may be why the call has not ended, and keep the others from ending."""
        if self.started_ns == inf:
            return inf
        # Half of the time to the earliest deadline, so that other members can still end in time. After a member leaves,
        # the call also gets as much time as it had taken.
        halfway_ns = (self.started_ns + min(member.deadline_ns for member in self.members)) / 2
        expected_ns = self.lane.costs.predict_ns(len(self.members))
        again_ns = 2 * self.left_ns - self.started_ns
        return max(min(halfway_ns, again_ns), self.started_ns + LONG * expected_ns)


@dataclass(slots=True, eq=False)
class Lane(Generic[M]):
    """Members of one signature."""

    signature: Hashable
    policy: Batch
    costs: CallCosts
    label: str = ""
    waiting: PriorityLine[float, M] = field(default_factory=PriorityLine)
    """Waiting members by priority, the earliest due in front."""
    suspects: deque[Sequence[M]] = field(default_factory=deque)
    """Parts of calls that failed, which go before all others, each by itself."""
    under_way: list[BatchCall[M]] = field(default_factory=list)
    held_ns: float = -inf
    """Time until which pools go before it, as was known at the last `take`."""
    chosen: int = 0
    """Number of members that a policy of the user's lets join the next call."""
    asked_again_ns: float = inf
    """Time at which that policy is asked again."""
    failure: Exception | None = None
    """The error of that policy, if it has failed."""
    rule: LeastTime = field(init=False)
    """The rule that decides where users give no policy."""

    def __post_init__(self) -> None:
        self.rule = LeastTime(self.costs, self.policy)

    def __len__(self) -> int:
        return len(self.waiting)

    def everybody(self) -> Iterator[M]:
        """Return all members that wait or are under way."""
        return chain(self.waiting, *self.suspects, *(call.members for call in self.under_way))

    @property
    def rank(self) -> int:
        """Return the lowest number of priority in the lane."""
        taken = chain(*self.suspects, *(call.members for call in self.under_way))
        return min(chain(self.waiting.by_priority, (member.priority for member in taken)))

    @property
    def most(self) -> int:
        """Return the most members that may share a call."""
        return self.policy.max_size if self.costs.fits is None else min(self.policy.max_size, self.costs.fits)

    def add(self, member: M) -> None:
        """Let a member wait."""
        self.waiting.add(member.priority, _due_ns(member), member)

    def discard(self, member: M) -> None:
        """Remove a member from the line, if it waits."""
        self.waiting.discard(member.priority, _due_ns(member), member)

    def drop_late(self, now_ns: int) -> None:
        """Remove members that are past their deadlines."""
        # Late members are due, so they stand in front. A due member need not be late: it may have waited a second.
        for line in list(self.waiting.by_priority.values()):
            if _due_ns(line[0]) <= now_ns:
                for member in list(takewhile(lambda each: _due_ns(each) <= now_ns, line)):
                    if member.deadline_ns <= now_ns:
                        self.discard(member)

    def halfway_s(self) -> float:
        """Return when the first member of a priority has waited for half of the time until it is due."""
        return min([first.offered_ns + _due_ns(first) for first in self.waiting.firsts()]) / 2e9

    # The first member is taken whatever its size: otherwise it would wait for ever.
    def take(self, size: int) -> list[M]:
        """Take the next `size` members at most; of more than one, no more than the policy's bytes."""
        taken: list[M] = []
        nbytes, most = 0, self.policy.max_bytes
        while self.waiting.by_priority and len(taken) < size:
            member = self.waiting.take_turn()
            nbytes += member.nbytes
            if taken and most is not None and nbytes > most:
                break
            self.waiting.remove(member.priority)  # it is the first in its line
            taken.append(member)
        return taken

    def fit(self, members: list[M], now_ns: int) -> list[M]:
        """Return the members to call: the given members, or others, so that more are answered in time.

        Args:
            members: members taken from the line; all that are not called wait again.
            now_ns: the time.

        Returns:
            The members; none if several wait, and all of them will probably be late.
        """
        if self.policy.cost == "none" or (len(members) == 1 and not self.waiting.by_priority):
            return members
        first_ns = min([member.deadline_ns for member in members])
        if first_ns == inf or now_ns + self._safe_ns(len(members)) <= first_ns:
            return members
        lines: dict[int, list[float]] = {}
        for member in chain(members, self.waiting):
            lines.setdefault(member.priority, []).append(member.deadline_ns)
        # Consider all waiting members, not only the taken ones: a different call may answer more of them in time.
        for member in members:
            self.add(member)
        size = size_in_time([lines[priority] for priority in sorted(lines)], now_ns, self.most, self._safe_ns)
        if not size:
            return self.take_reachable(1, now_ns + self.costs.likely_ns(1))
        return self.take_reachable(size, now_ns + self._safe_ns(size))

    def _safe_ns(self, size: int) -> float:
        return _SAFE * self.costs.likely_ns(size)

    def take_reachable(self, size: int, end_ns: float) -> list[M]:
        """Return the next `size` members at most whose deadlines are not before `end_ns`."""
        late = [member for member in self.waiting if member.deadline_ns < end_ns]
        for member in late:
            self.discard(member)
        taken = self.take(size)
        for member in late:
            self.add(member)
        return taken


class Batcher(Generic[M]):
    """The lanes of a session, and the choice of the next calls; see the rules above.

    Args:
        seed: of the sizes that are tried out.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lanes: dict[Hashable, Lane[M]] = {}
        self.is_ending = False
        """True if no member waits longer than until nothing else can go on."""
        self._random = Random(seed)
        self._shares = PriorityShares()

    def offer(self, signature: Hashable, costs: CallCosts, policy: Batch, member: M, label: str = "") -> None:
        """Let a member wait in the lane of its signature.

        Args:
            signature: equal for members that may share a call.
            costs: learnt costs of such calls, shared by signatures whose calls take equally long.
            policy: the policy of the function.
            member: the member.
            label: the function, as errors of a policy of the user's name it.
        """
        lane = self.lanes.get(signature)
        if lane is None:
            lane = self.lanes[signature] = Lane(signature, policy, costs, label)
        lane.add(member)
        costs.returns.come(member.offered_ns)

    def withdraw(self, signature: Hashable, member: M) -> BatchCall[M] | None:
        """Note that a member's result is not wanted any more; return the call under way if that holds for all its
        members.
        """
        member.is_gone = True
        lane = self.lanes.get(signature)
        if lane is None:
            return None
        lane.discard(member)
        self._drop_if_empty(lane)
        calls = (call for call in lane.under_way if member in call.members)
        return next((call for call in calls if all(each.is_gone for each in call.members)), None)

    def take(
        self, now_ns: int, *, is_idle: bool, held_until_ns: Callable[[Lane[M]], float] | None = None
    ) -> Iterator[BatchCall[M]]:
        """Yield the calls to be made now, the most urgent first.

        Each is under way, as are those `beside` it, until it has `ended` or `failed`. A caller that has no time for
        more may stop asking.

        Args:
            now_ns: the time.
            is_idle: True if nothing else can go on, so that no member comes by itself.
            held_until_ns: until when pools go before a lane; infinity if that is not known.
        """
        ready = [lane for lane in list(self.lanes.values()) if self._is_ready(lane, now_ns, is_idle)]
        if held_until_ns is not None:
            for lane in ready:
                lane.held_ns = held_until_ns(lane)
            ready = [lane for lane in ready if lane.held_ns <= now_ns]
        for lane in ready if len(ready) < 2 else self._by_urgency(ready):
            parts = self._next(lane, now_ns, is_idle)
            if parts:
                group = CallGroup(len(parts))
                first, *beside = lane.under_way = [BatchCall(lane, part, group=group) for part in parts]
                first.beside, first.failure, lane.failure = beside, lane.failure, None
                yield first
            else:
                self._drop_if_empty(lane)

    def count(self) -> int:
        """Return the number of waiting members."""
        return sum(map(len, self.lanes.values()))

    def wake_ns(self, now_ns: int) -> float:
        """Return when a member has waited as long as it may, or a call is overdue; infinity if there is no such time.

        Args:
            now_ns: the time that `take` was told. At a later time, a member that was not taken might be due.
        """
        found = inf
        for lane in self.lanes.values():
            if lane.under_way:
                found = min(found, *(call.overdue_ns() for call in lane.under_way))
            elif now_ns < lane.held_ns:
                found = min(found, lane.held_ns)
            elif lane.waiting.by_priority:
                found = min(found, lane.asked_again_ns)
        return found

    def overdue(self, now_ns: int) -> list[BatchCall[M]]:
        """Return overdue calls, whose members might wait for a call that never ends: `divide` or `set_apart` them."""
        calls = [call for lane in self.lanes.values() for call in lane.under_way]
        for call in calls:
            if call.started_ns < inf == call.left_ns and any(member.is_gone for member in call.members):
                call.left_ns = now_ns
        return [call for call in calls if call.overdue_ns() <= now_ns]

    def divide(self, call: BatchCall[M]) -> None:
        """Put the staying members of a call into two new lanes, half in each; the call is to be stopped."""
        members = [member for member in call.members if not member.is_gone]
        for part in halves(members):
            self._lane_apart(call.lane, part).suspects.append(part)
        self._free(call)

    def set_apart(self, call: BatchCall[M]) -> None:
        """Let a call go on by itself, however long, so that other members of its lane need not wait for it."""
        self._free(call)
        call.lane, call.started_ns = self._lane_apart(call.lane, call.members), inf
        call.lane.under_way.append(call)

    def _lane_apart(self, lane: Lane[M], members: Sequence[M]) -> Lane[M]:
        # A unique signature, so that no later member joins a lane whose call may never end.
        apart = Lane[M]((lane.signature, object()), lane.policy, lane.costs, lane.label)
        self.lanes[apart.signature] = apart
        for member in members:
            member.signature = apart.signature
        return apart

    def ended(self, call: BatchCall[M], taken_ns: float, now_ns: int) -> None:
        """Note that a call has returned its results."""
        costs, group = call.lane.costs, call.group
        group.ended += 1
        group.size += len(call.members)
        group.taken_ns = max(group.taken_ns, taken_ns)
        group.sum_ns += len(call.members) * taken_ns
        if group.ended == group.calls:  # parts compete for cores, so only all parts together show the cost
            costs.observe(group.size, group.taken_ns, group.calls, group.sum_ns / group.size)
        costs.returns.answer(len(call.members), now_ns)
        self._free(call)

    def failed(self, call: BatchCall[M], *, divisible: bool, lacks_memory: bool = False) -> bool:
        """Note that a call has failed; return whether its members are at fault, or else wait again in halves.

        Args:
            call: the call.
            divisible: True if computing a member again does no harm.
            lacks_memory: True if memory did not suffice for the members.
        """
        members = [member for member in call.members if not member.is_gone]
        is_settled = len(call.members) == 1 or not divisible
        if lacks_memory and len(call.members) > 1:
            call.lane.costs.fits = (
                len(call.members) // 2
            )  # later calls keep this limit; `_next` tries larger ones now and then
        if not is_settled:
            # The halves go in order before the remaining parts: n members need at most 2 n - 1 calls.
            call.lane.suspects.extendleft(reversed(halves(members)))
        self._free(call)
        return is_settled

    def _by_urgency(self, lanes: Sequence[Lane[M]]) -> Iterator[Lane[M]]:
        ranked: PriorityLine[float, Lane[M]] = PriorityLine(self._shares)
        for lane in lanes:
            if lane.suspects:
                priority, due_ns = min(each.priority for part in lane.suspects for each in part), -inf
            else:
                priority, due_ns = min(lane.waiting.by_priority), min(map(_due_ns, lane.waiting.firsts()))
            ranked.add(priority, due_ns, lane)
        while ranked:
            yield ranked.pop()

    def _is_ready(self, lane: Lane[M], now_ns: int, is_idle: bool) -> bool:
        lane.held_ns = -inf
        if lane.under_way:
            return False
        if lane.suspects:
            return True
        # Drop late members before asking the policy: they must not affect when a call starts, or its size.
        lane.drop_late(now_ns)
        if not lane.waiting.by_priority:
            self._drop_if_empty(lane)
            return False
        return self._decides(lane, now_ns, is_idle)

    def _next(self, lane: Lane[M], now_ns: int, is_idle: bool) -> list[Sequence[M]]:
        if lane.suspects:
            while lane.suspects:
                suspects = [member for member in lane.suspects.popleft() if not member.is_gone]
                if suspects:
                    return [suspects]
            # All suspects have left, and the last decision was not about the members that wait now.
            if not self._is_ready(lane, now_ns, is_idle):
                return []
        if not lane.waiting.by_priority:
            return []
        if lane.policy.policy is not None and not self.is_ending:
            return [lane.take(lane.chosen)]
        chosen, costs = lane.chosen, lane.costs
        explores = len(lane) > 1 and self._random.randrange(EXPLORE) == 0
        if explores:  # try another size than the best known one
            if costs.fits is not None:
                costs.fits *= 2  # more memory may be free now
            chosen = min(len(lane), lane.most)
        members = lane.fit(lane.take(chosen), now_ns)
        if not members and (self.is_ending or self._random.randrange(_TRY) == 0):
            members = lane.take(1)
        size = len(members)
        if explores and lane.policy.max_bytes is None and costs.likely_ns(2 * size) > 2 * costs.likely_ns(size):
            # A call is never slower than its two halves in turn: a longer prediction is old, and would refuse members.
            members += lane.take_reachable(min(size, chosen - size), now_ns + costs.likely_ns(1))
            size = len(members)
        if not size:
            return []
        count = 1 if lane.policy.cost == "none" else costs.parts(size, self._random)
        return [members[size * part // count : size * (part + 1) // count] for part in range(count)]

    def _decides(self, lane: Lane[M], now_ns: int, is_idle: bool) -> bool:
        """Ask the policy; return True if there is something to do: a call, or an error to tell of."""
        costs, policy = lane.costs, None if self.is_ending else lane.policy.policy
        rule = lane.rule
        rule.is_ending, lane.failure = self.is_ending, None
        now_s, count, most = now_ns / 1e9, len(lane.waiting), lane.most
        if policy is None and not rule.is_delayed:
            # The usual path, taken several times for each call: plain numbers are enough.
            again_s = rule.until_s(now_s, count, most, is_idle, lane.halfway_s)
            lane.chosen = 0 if now_s < again_s else rule.size(count, most)
        else:
            # A copy, as user policies may keep it, and the line changes.
            line = WaitingLine(lane.waiting, _seen)
            step = NextStep(
                now_s,
                line if policy is None else tuple(line),
                0,
                most,
                is_idle,
                lambda size: costs.predict_ns(size) / 1e9,
            )
            try:
                lane.chosen, again_s = decide(rule if policy is None else policy, step, lane.label)
            except Exception as error:
                # Start a call that fails at once, so that its members get the error like any other failure.
                lane.chosen, again_s, lane.failure = count, inf, error
        # Later than now even after rounding to nanoseconds: otherwise a virtual clock would stand still.
        lane.asked_again_ns = inf if lane.chosen else max(again_s * 1e9, now_ns + 1)
        return lane.chosen > 0

    def _free(self, call: BatchCall[M]) -> None:
        if call in call.lane.under_way:  # else the call was split before, and stops only now
            call.lane.under_way.remove(call)
        self._drop_if_empty(call.lane)

    def _drop_if_empty(self, lane: Lane[M]) -> None:
        # A signature refers to values of runs, and must not keep them alive.
        if not (lane.waiting.by_priority or lane.suspects or lane.under_way) and self.lanes.get(lane.signature) is lane:
            del self.lanes[lane.signature]
