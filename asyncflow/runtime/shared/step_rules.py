"""The rules by which steps of shared work begin where users give no policy: policies themselves (`StepPolicy`).

Batched functions, pooled loops and shared vertex maps differ in what a step computes. When it begins, and with how many
members, is the decision of a policy in all of them: the user's, or one of these. Each is a pure function of the waiting
members, of measured costs and of the time, which a test can call without a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar, overload

from asyncflow.ops.user.batch import Batch
from asyncflow.ops.user.step_policy import NextStep, WaitingMember, WaitUntil
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import PATIENCE_S
from asyncflow.runtime.shared.call_costs import LONG, CallCosts

M = TypeVar("M")


class WaitingLine(Sequence[WaitingMember], Generic[M]):
    """The members of a line in its order, each made as policies see it when it is looked at.

    A rule that only counts members takes as long for a thousand as for one. The line must not change meanwhile; users
    get a tuple, which they may keep.

    Args:
        line: the members.
        seen: makes what policies see of a member.
    """

    __slots__ = ("_count", "_line", "_seen")

    def __init__(self, line: PriorityLine[float, M], seen: Callable[[M], WaitingMember]) -> None:
        self._line, self._seen, self._count = line, seen, len(line)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WaitingMember]:
        lines = self._line.by_priority
        return (self._seen(member) for priority in sorted(lines) for member in lines[priority])

    @overload
    def __getitem__(self, index: int) -> WaitingMember: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WaitingMember]: ...
    def __getitem__(self, index: int | slice) -> WaitingMember | Sequence[WaitingMember]:
        return [*self][index]


def at_once(step: NextStep) -> int:
    """Return the number of all waiting members: they join the next step, as far as there is room.

    This is the rule of pools whose rows keep their shapes and of shared vertex maps, on the host or on a device.
    One more row costs a step little, so a member that waits for others gains nothing, and they lose nothing.
    For example, a pool has room for 8 rows, 6 are there and 3 wait: 2 join now, and one when a row has ended.
    """
    return len(step.waiting)


def in_groups(step: NextStep) -> int | WaitUntil:
    """Return the number of all waiting members once they are as many as the rows, or one has waited for long enough.

    This is the rule of pools whose values grow: rows that begin at different steps never have equal shapes.
    Each group of rows is a step of its own, so a new one has to be as large as all before it together.
    For example, 4 rows are there and 3 members wait: they join with the fourth.
    They also join when the first due one has waited for half of its time, which ends at its deadline or in a second.
    """
    count = len(step.waiting)
    if count >= step.joined:  # checked first, so that a long line is only counted
        return count
    until_s = first_halfway_s(step.waiting)
    return count if step.now_s >= until_s else WaitUntil(until_s)


@dataclass(slots=True)
class LeastTime:
    """The rule of batched functions: a call is made when nothing else can go on, for as many as take the least time.

    A full call is made at once. So is a call with a member that has waited for half of its time.
    A call waits for clients that were just answered if one larger call saves more time than they are away (`Returns`).
    With `max_delay_s` it is made when a member has waited for so long, or for half of the time until its deadline.
    As many join as make all waiting members take the least time (`CallCosts.best`); with ``cost="none"`` all.

    Attributes:
        costs: of the calls.
        batch: the user's options.
        is_ending: True if no more members will come.
    """

    costs: CallCosts
    batch: Batch
    is_ending: bool = False

    def __call__(self, step: NextStep) -> int | WaitUntil:
        """See the class."""
        waiting, count, most = step.waiting, len(step.waiting), int(min(step.capacity, self.batch.max_size))
        if self.is_delayed and count < self.batch.max_size:
            until_s = self._delayed_until_s(waiting)
        else:
            until_s = self.until_s(step.now_s, count, most, step.is_idle, lambda: first_halfway_s(waiting))
        return WaitUntil(until_s) if step.now_s < until_s else self.size(count, most)

    @property
    def is_delayed(self) -> bool:
        """Return True if calls are made after `max_delay_s`, and not when nothing else can go on."""
        return self.batch.max_delay_s > 0 and not self.is_ending

    def until_s(self, now_s: float, count: int, most: int, is_idle: bool, halfway_s: Callable[[], float]) -> float:
        """Return until when `count` members wait where calls are not delayed; minus infinity for a call now."""
        if count >= self.batch.max_size:
            return -inf
        if not is_idle:  # asked again once other tasks have run
            return -inf if now_s >= halfway_s() else inf
        if self.is_ending or self.batch.cost == "none":
            return -inf
        until_ns = self.costs.returns.waits_until_ns(self.costs, count, most, round(now_s * 1e9))
        return -inf if until_ns == -inf else min(until_ns / 1e9, halfway_s())

    def size(self, count: int, most: int) -> int:
        """Return how many of `count` members join a call that is made now."""
        return min(count, most) if self.batch.cost == "none" or count == 1 else self.costs.best(count, most)

    def _delayed_until_s(self, waiting: Sequence[WaitingMember]) -> float:
        first = min(waiting, key=attrgetter("deadline_s"))
        # Predicted costs may be far off, so keep half of the time until the deadline in reserve.
        needed_s = LONG * self.costs.predict_ns(min(len(waiting), self.batch.max_size)) / 1e9
        last_s = min(first.deadline_s - needed_s, (first.since_s + first.deadline_s) / 2)
        return min(min(member.since_s for member in waiting) + self.batch.max_delay_s, last_s)


def first_halfway_s(waiting: Sequence[WaitingMember]) -> float:
    """Return when the first member of a priority has waited for half of the time until it is due."""
    firsts = [next(members) for _, members in groupby(waiting, attrgetter("priority"))]
    return min([each.since_s + min(each.deadline_s, each.since_s + PATIENCE_S) for each in firsts]) / 2
