"""Which firings are computed together, and when: a pure state machine, with neither clock nor event loop in it.

Members wait in *lanes*, one for each signature: what has the same code, dtypes, shapes, device and values in common may
share a call. Of each lane one call is under way at a time, so that what comes meanwhile gathers.

======================== ============================================ ================================================
event                    state                                        what happens
======================== ============================================ ================================================
`offer`                                                               the member waits
`withdraw`               waits                                        it leaves; the others are as they were
`withdraw`               under way                                    its result is dropped when the call ends
`take`                   a call of the lane is under way              nothing
`take`, not idle         fewer than `max_size` wait, none is overdue  nothing: others may still come
`take`, idle             `is_ending`, whatever its `max_delay_s`      a call leaves: no others will come
`take`                   else                                         a call leaves, of the size that is best
`ended`                                                               what it took is learnt; the lane is free
`failed`                 of one member                                it is at fault; the lane is free
`failed`                 of several                                   both halves wait, apart and before all others
======================== ============================================ ================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from asyncflow.ops.batch import Batch

_MOST_SIZES = 64
"""Of so many sizes one keeps what calls took; larger ones are told from the largest."""

_FRESH = 0.25
"""The weight of a new measurement beside those before it."""

_SURE = 3
"""So many measurements of a size make it known; before, it may be better than it seemed."""

_NEWS = 0.1
"""A mean that has changed by this part makes other sizes the best ones."""

_EXPLORE = 32
"""One call in so many takes all that wait, whatever is known of that: what was slow once may not be any more."""


@dataclass(slots=True, eq=False)
class Gathered:
    """One firing, while it waits or is under way.

    Attributes:
        nbytes: of its inputs.
        offered_ns: since when it waits.
        is_gone: nobody wants its result any more.
    """

    nbytes: int
    offered_ns: int
    is_gone: bool = False


M = TypeVar("M", bound=Gathered)


@dataclass(slots=True)
class CallCosts:
    """How long calls of each size took, as a running mean; one member is a size of its own.

    A product of one row and of two take different kernels, so that two may cost more than twice one.
    """

    taken_ns: dict[int, float] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _used: dict[int, float] = field(default_factory=dict)
    """Times by which the sizes below were chosen."""
    _in_all: list[float] = field(default_factory=list)
    """The least time for so many members."""
    _first: list[int] = field(default_factory=list)
    """How many of so many go first, then."""

    def observe(self, size: int, taken_ns: float) -> None:
        """A call of that size took so long."""
        known = self.taken_ns.get(size)
        if known is None and size > 1 and len(self.taken_ns) >= _MOST_SIZES:
            size = min(self.taken_ns, key=lambda other: abs(other - size))
            known = self.taken_ns[size]
        count = self._counts[size] = self._counts.get(size, 0) + 1
        if known is None:
            mean = taken_ns
        elif count <= _SURE:  # the first ones were cold
            mean = min(known, taken_ns)
        else:
            mean = known + _FRESH * (taken_ns - known)
        self.taken_ns[size] = mean
        used = self._used.get(size)
        if used is None or count <= _SURE or abs(mean - used) > _NEWS * used:
            self._used.clear()

    def predict_ns(self, size: int) -> float:
        """How long a call of that size will take: between measured sizes on a line, beyond them as the nearest."""
        known = self.taken_ns.get(size)
        if known is not None and (self._counts[size] >= _SURE or size == 1):
            return known
        if size == 1:
            return 0.0  # so that it is tried
        smaller = max((n for n in self.taken_ns if 1 < n < size), default=0)
        larger = min((n for n in self.taken_ns if n > size), default=0)
        # Hopeful, so that it is tried: as if more cost nothing.
        hoped = self.taken_ns.get(smaller or larger or 1, 0.0)
        if smaller and larger:
            hoped += (size - smaller) / (larger - smaller) * (self.taken_ns[larger] - hoped)
        return hoped if known is None else min(hoped, known)

    def best(self, waiting: int, most: int) -> int:
        """Of `waiting` members, how many to take first, so that all of them take the least time in all.

        Args:
            waiting: how many there are.
            most: how many may share a call.
        """
        if not self.taken_ns:
            return min(waiting, most)
        if not self._used:
            self._used, self._in_all, self._first = dict(self.taken_ns), [0.0], [0]
        waiting = min(waiting, 2 * most)  # more do not change what is best first
        if waiting >= len(self._first):
            alone = np.array([self.predict_ns(size) for size in range(1, most + 1)])
            for count in range(len(self._first), waiting + 1):
                taken = alone[:count] + self._in_all[: -most - 1 : -1]
                # Of equals the largest: fewer calls.
                size = len(taken) - int(taken[::-1].argmin())
                self._in_all.append(float(taken[size - 1]))
                self._first.append(size)
        return self._first[waiting]


@dataclass(slots=True, eq=False)
class BatchCall(Generic[M]):
    """Members that are computed together."""

    lane: Lane[M]
    members: Sequence[M]


@dataclass(slots=True, eq=False)
class Lane(Generic[M]):
    """Members of one signature."""

    signature: Hashable
    policy: Batch
    costs: CallCosts
    waiting: deque[M] = field(default_factory=deque)
    suspects: deque[Sequence[M]] = field(default_factory=deque)
    """Parts of calls that failed, which go before all others, each by itself."""
    under_way: BatchCall[M] | None = None


class Batcher(Generic[M]):
    """Gathers members, and says what is to be called.

    Args:
        seed: of the sizes that are tried out.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lanes: dict[Hashable, Lane[M]] = {}
        self.is_ending = False
        """Nobody waits longer than until nothing else can go on."""
        self._random = Random(seed)

    def offer(self, signature: Hashable, costs: CallCosts, policy: Batch, member: M) -> None:
        """A member waits.

        Args:
            signature: equal for those that may share a call.
            costs: of such calls; signatures whose calls take equally long have the same.
            policy: of the function.
            member: who.
        """
        lane = self.lanes.get(signature)
        if lane is None:
            lane = self.lanes[signature] = Lane(signature, policy, costs)
        lane.waiting.append(member)

    def withdraw(self, signature: Hashable, member: M) -> None:
        """Nobody wants the member's result any more."""
        member.is_gone = True
        lane = self.lanes.get(signature)
        if lane is None:
            return
        if member in lane.waiting:
            lane.waiting.remove(member)
        self._drop_if_empty(lane)

    def take(self, now_ns: int, *, is_idle: bool) -> Iterator[BatchCall[M]]:
        """The calls that are to be made now; each is under way until it has `ended` or `failed`.

        Args:
            now_ns: the time.
            is_idle: nothing else can go on, so that nobody else will come by itself.
        """
        for lane in list(self.lanes.values()):
            if lane.under_way is None:
                members = self._next(lane, now_ns, is_idle)
                if members:
                    lane.under_way = BatchCall(lane, members)
                    yield lane.under_way
                else:
                    self._drop_if_empty(lane)

    def wake_ns(self) -> float:
        """When one has waited as long as it may; infinity if nobody waits for that."""
        found = inf
        for lane in self.lanes.values():
            if self._delays(lane) and lane.waiting and lane.under_way is None:
                found = min(found, lane.waiting[0].offered_ns + lane.policy.max_delay_s * 1e9)
        return found

    def ended(self, call: BatchCall[M], taken_ns: float) -> None:
        """The call has given its results."""
        call.lane.costs.observe(len(call.members), taken_ns)
        self._free(call)

    def failed(self, call: BatchCall[M], *, divisible: bool) -> bool:
        """The call has failed; whether its members are at fault, or else wait again in halves.

        Args:
            call: which.
            divisible: computing a member again does no harm.
        """
        members = [member for member in call.members if not member.is_gone]
        is_settled = len(call.members) == 1 or not divisible
        if not is_settled and members:
            half = (len(members) + 1) // 2
            call.lane.suspects.extendleft(part for part in (members[half:], members[:half]) if part)
        self._free(call)
        return is_settled

    def _next(self, lane: Lane[M], now_ns: int, is_idle: bool) -> Sequence[M]:
        while lane.suspects:
            suspects = [member for member in lane.suspects.popleft() if not member.is_gone]
            if suspects:
                return suspects
        waiting, policy = lane.waiting, lane.policy
        if not waiting:
            return ()
        is_due = now_ns >= waiting[0].offered_ns + policy.max_delay_s * 1e9 if self._delays(lane) else is_idle
        if not is_due and len(waiting) < policy.max_size:
            return ()
        size = self._size(lane)
        taken: list[M] = []
        nbytes = 0
        while waiting and len(taken) < size:
            nbytes += waiting[0].nbytes
            if taken and policy.max_bytes is not None and nbytes > policy.max_bytes:
                break
            taken.append(waiting.popleft())
        return taken

    def _delays(self, lane: Lane[M]) -> bool:
        return lane.policy.max_delay_s > 0 and not self.is_ending

    def _size(self, lane: Lane[M]) -> int:
        most = min(len(lane.waiting), lane.policy.max_size)
        if lane.policy.cost == "none" or most == 1:
            return most
        if self._random.randrange(_EXPLORE) == 0:
            return most
        return lane.costs.best(len(lane.waiting), lane.policy.max_size)

    def _free(self, call: BatchCall[M]) -> None:
        call.lane.under_way = None
        self._drop_if_empty(call.lane)

    def _drop_if_empty(self, lane: Lane[M]) -> None:
        # A signature names values that a run has brought, and must not outlive it.
        if not (lane.waiting or lane.suspects or lane.under_way):
            self.lanes.pop(lane.signature, None)
