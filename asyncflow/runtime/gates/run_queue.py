"""The queue of runs that start, wait or are refused: a pure state machine, without clock or event loop.

Waiting runs stand in one line per priority, by deadline, and then by arrival.

============ ============================================================ ==============================================
event        state                                                        action
============ ============================================================ ==============================================
`offer`      there is room, and no run waits                              it starts
`offer`      as above, and it would end too late beside runs in flight    it is refused: `OverloadedError`
`offer`      it would end too late after the runs before it               it is refused: `OverloadedError`
`offer`      too many wait, and no run gives way                          it is refused: `OverloadedError`
`offer`      too many wait, and others give way                           it waits; they are refused: `OverloadedError`
`offer`      else                                                         it waits
`withdraw`   it waits                                                     it leaves; the others are as they were
`end`        it is in flight                                              its time is learnt; there is room
`step_aside` it is in flight                                              there is room; its memory stays reserved
`come_back`  there is room, and no run waits                              it is in flight again
`come_back`  else                                                         it waits, and is never refused
`end`        it has stepped aside, or waits to be in flight again         its memory is free
`let_go`     it has been in flight for too long                           there is room; it goes on
`decide`     there is room, and some wait                                 the first of the line whose turn it is starts
`decide`     as above, and it would end too late now                      it is not started: `DeadlineExceeded`
============ ============================================================ ==============================================

There is room while fewer than `max_runs` are in flight. With a `memory_limit`, the memory that runs of its kind needed
must also fit beside the memory reserved for runs in flight. Where there is room, and no run of its kind is in flight, a
run starts whatever is expected of it: so a wrong expectation is corrected, such as after the machine has paused.

The line with the lowest priority number goes first, but for an eighth of the time. Whichever run starts, a seventh of
its expected time is owed to each other line. A line that is owed the expected time of its first run goes next. Places
in the queue are shared likewise. Runs of higher numbers give way, the last of the highest first, down to an eighth of
the places; a line with less than that makes any other give way.

**Runs that step aside.** A run that waits for other runs leaves its place to them, such as to a run that fills its
queue. It steps aside meanwhile, and comes back later. For example, with ``max_runs=2`` two runs take elements of an
empty queue: both step aside, a third run starts and puts an element in, and the first run comes back for it. A run that
comes back stands in its line by its deadline and its first arrival. Runs of its priority that have not started come
behind it. It counts as the time of its last stay, and not for `max_queued`. Runs that stepped aside do not count for
`max_queued` either, but against runs of their own kind: these would wait at the same queue. So no more than `max_runs`
and `max_queued` runs of a kind are there together, while runs of other kinds find the places free.

**Runs that take too long.** The session may not see that a run waits for others, such as at a lock of a user's
function. So `let_go` stops counting runs that are in flight `_OVERDUE` times as long as runs of their
kind take. For example, four runs of 10 ms hold all four places, and wait for a fifth. After 80 ms the queue lets go of
them, and the fifth run starts. While no run ends, the next runs have `_OVERDUE` times as long as the previous runs had.
So a burst of runs of unknown length does not start all at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from asyncflow.compiler.run_cost import RunCost
from asyncflow.errors import AsyncflowError, DeadlineExceeded, OverloadedError, counted
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import SHARE, share_of

_LEAST_RETRY_S = 0.01
"""Least seconds after which a refused caller is told to ask again."""

_OVERDUE = 8
"""A run takes too long after this multiple of its kind's mean; of exponentially distributed runs, 1 in 3,000 does."""

_LEAST_OVERDUE_S = 0.016
"""Least time after which a run takes too long."""

_UNKNOWN_S = 1e-6
"""Expected time of a run while no run has shown how long runs take."""


@dataclass(slots=True, eq=False)
class QueuedRun:
    """A run, from when it is asked for until it has ended.

    Attributes:
        cost: cost of runs of its kind; None if no run of the kind has ended.
        priority: lower ones go first.
        deadline_s: when it has to have ended; infinity without a deadline.
        nbytes: bytes of the values fed to it, held while it waits.
        charge_s: mean time of runs of its kind when it was offered; 0 if unknown.
        reserved: bytes of memory that it counts as while it is in flight.
        arrival: number of runs offered before it.
        started_s: when it was let in, began, or came back.
        has_begun: True once all its inputs were there, so that the time from then on is its own.
        is_aside: True if it has stepped aside, and while it waits to come back.
        spent_s: the time of its stays before it last stepped aside.
    """

    cost: RunCost | None
    priority: int = 0
    deadline_s: float = inf
    nbytes: int = 0
    charge_s: float = 0.0
    reserved: int = 0
    arrival: int = 0
    started_s: float = 0.0
    has_begun: bool = False
    is_aside: bool = False
    spent_s: float = 0.0

    @property
    def is_gone(self) -> bool:
        """True if no caller wants the run any more; it will be withdrawn."""
        return False

    @property
    def place(self) -> tuple[float, int]:
        """The key by which runs of one priority are ordered."""
        return self.deadline_s, self.arrival

    def is_late(self, start_s: float) -> bool:
        """Return whether the run is expected to end past its deadline if it starts at `start_s`."""
        return start_s + (0.0 if self.cost is None else self.cost.expected_s) > self.deadline_s

    def may_be_late(self, start_s: float) -> bool:
        """Return whether the run is likely to end past its deadline if it starts at `start_s`."""
        return start_s + (0.0 if self.cost is None else self.cost.likely_s) > self.deadline_s


R = TypeVar("R", bound=QueuedRun)


@dataclass(slots=True)
class _Totals:
    """Sums over the waiting runs of one priority.

    Attributes:
        costs_s: expected time of each run, in the order of the line; 0 if unknown.
        nbytes: bytes of the values fed to runs that have never started.
        new: number of these.
    """

    costs_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    new: int = 0


@dataclass(slots=True, eq=False)
class RunQueue(Generic[R]):
    """Runs that are in flight, have stepped aside, or wait.

    Invariant, after `decide`: no run waits while there is room.

    Args:
        max_runs: most runs in flight.
        max_queued: most runs that wait; None for no limit.
        max_queued_bytes: most bytes of values fed to waiting runs; None for no limit.
        memory_limit: bytes that runs in flight may need, with those aside; None for no limit.
        is_auto: True if the session chose `max_runs`.

    Attributes:
        aside: runs that have stepped aside, or wait to come back.
        overdue: runs that took too long: they go on, and count no longer.
        queued: number of runs that wait and have never started.
        queued_bytes: bytes of the values fed to these.
        offered_s: when the last run was offered.
    """

    max_runs: int
    max_queued: int | None = None
    max_queued_bytes: int | None = None
    memory_limit: int | None = None
    is_auto: bool = False
    # Dicts, not sets: sums and overdue runs follow the order of starts in every process.
    in_flight: dict[R, None] = field(default_factory=dict, init=False)
    aside: dict[R, None] = field(default_factory=dict, init=False)
    overdue: dict[R, None] = field(default_factory=dict, init=False)
    queued: int = field(default=0, init=False)
    queued_bytes: int = field(default=0, init=False)
    offered_s: float = field(default=-inf, init=False)
    _line: PriorityLine[tuple[float, int], R] = field(default_factory=PriorityLine, init=False)
    """Waiting runs; shares are of the time."""
    _totals: dict[int, _Totals] = field(default_factory=dict, init=False)
    """Sums of each priority that has waiting runs."""
    _refused: list[tuple[R, AsyncflowError]] = field(default_factory=list, init=False)
    """Runs that gave way, until `decide` reports them."""
    _reserved: int = field(default=0, init=False)
    _offered: int = field(default=0, init=False)
    _mean_s: float = field(default=0.0, init=False)
    """Mean time of all runs, for runs of unknown kind."""
    _held_s: float = field(default=0.0, init=False)
    """Time that the last overdue run had been in flight; 0 once a run has ended."""
    _kinds_aside: Counter[RunCost | None] = field(default_factory=Counter, init=False)
    """Number of `aside` of each kind."""

    @property
    def has_room(self) -> bool:
        """True if a run offered now need not wait, memory aside."""
        return not self._totals and len(self.in_flight) < self.max_runs

    @property
    def has_waiting(self) -> bool:
        """True if a run waits, to start or to come back."""
        return bool(self._totals)

    @property
    def is_idle(self) -> bool:
        """True if no run has started that has not ended."""
        return not (self.in_flight or self.aside or self.overdue)

    def offer(self, run: R, now_s: float) -> bool:
        """Return whether a run starts; if not, it waits until `decide` yields it.

        Raises:
            OverloadedError: it may not wait.
        """
        cost = run.cost
        if cost is not None:
            run.charge_s, run.reserved = cost.mean_s, cost.nbytes
        run.arrival = self._offered = self._offered + 1
        self.offered_s = now_s
        if self.aside:
            self._check_kind(run, now_s)
        if not self._totals and self._fits(run):
            # A run with no other of its kind in flight always starts: otherwise one slow run would cause refusals, and
            # its measured time would never be corrected.
            if run.deadline_s < inf and run.is_late(now_s) and any(each.cost is cost for each in self.in_flight):
                raise self._overloaded(self.wait_s(run, now_s), "would take too long to end in time")
            self._start(run, now_s)
            return True
        if run.deadline_s < inf and run.may_be_late(now_s + (wait_s := self.wait_s(run, now_s))):
            raise self._overloaded(wait_s, "would have to wait too long to end in time")
        self._make_way(run, now_s)
        self._insert(run)
        return False

    def refusal(self, run: R, now_s: float, coming: int = 0) -> OverloadedError | None:
        """Return the error that `offer` would raise for a run of an unknown kind, after `coming` other runs; or None.

        Nothing changes. `offer` may still refuse a run of a kind that takes longer than most.
        """
        # Requests ask before their run is known (`Admission.expect`), so use the mean time of all runs.
        free = 0 if self._totals else max(0, self.max_runs - len(self.in_flight))
        if coming < free:
            return None
        run.arrival = self._offered + 1
        if run.deadline_s < inf:
            wait_s = self.wait_s(run, now_s) + coming * self._mean_s / self.max_runs
            if now_s + wait_s + self._mean_s > run.deadline_s:
                return self._overloaded(wait_s, "would have to wait too long to end in time")
        try:
            self._giving_way(run, now_s, coming - free)
        except OverloadedError as error:
            return error
        return None

    def withdraw(self, run: R) -> None:
        """Remove a run from its line; do nothing if it does not wait."""
        index = self._line.discard(run.priority, run.place, run)
        if index is None:
            return
        totals = self._totals[run.priority]
        del totals.costs_s[index]
        if not totals.costs_s:
            del self._totals[run.priority]
        if not run.is_aside:
            self._count(totals, -1, -run.nbytes)

    def _insert(self, run: R) -> None:
        totals = self._totals.setdefault(run.priority, _Totals())
        totals.costs_s.insert(self._line.add(run.priority, run.place, run), run.charge_s)
        if not run.is_aside:
            self._count(totals, 1, run.nbytes)

    def _count(self, totals: _Totals, runs: int, nbytes: int) -> None:
        """Count runs that have never started."""
        totals.new += runs
        totals.nbytes += nbytes
        self.queued += runs
        self.queued_bytes += nbytes

    def begin(self, run: R, cost: RunCost, now_s: float) -> None:
        """All that a run in flight needs is there: the time from now on is its own."""
        run.has_begun, run.started_s, run.spent_s = True, now_s, 0.0
        if run.cost is not cost:
            run.cost, run.charge_s = cost, cost.mean_s
            self._reserved += cost.nbytes - run.reserved
            run.reserved = cost.nbytes

    def step_aside(self, run: R, now_s: float) -> None:
        """Take the place of a run in flight, which waits for others, but not its memory."""
        if run in self.in_flight:
            del self.in_flight[run]
            self._held_s = 0.0  # a slot is free, so a run that other runs wait for can start
        else:
            self.overdue.pop(run, None)
        self.aside[run] = None
        self._kinds_aside[run.cost] += 1
        run.is_aside = True
        # Expect the same time again when it comes back: it may be a loop that waits in each iteration.
        run.charge_s = now_s - run.started_s
        run.spent_s += run.charge_s

    def come_back(self, run: R, now_s: float) -> bool:
        """Return True if a run that stepped aside goes on now; else it waits until `decide` gives it."""
        # Queue behind waiting runs: otherwise loops that step aside for each element would block all new runs.
        if self._totals or not self._fits(run):
            self._insert(run)
            return False
        self._start(run, now_s)
        return True

    def has_started(self, run: R) -> bool:
        """Return True if a run is in flight, or has stepped aside."""
        return run in self.in_flight or run.is_aside or run in self.overdue

    def end(self, run: R, taken_s: float | None = None) -> None:
        """Note that a run has ended, and how long it took; None if that says nothing of others."""
        if run in self.in_flight:
            del self.in_flight[run]
            self._held_s = 0.0
        elif run.is_aside:
            self.withdraw(run)
            self._is_aside_no_more(run)
        else:
            self.overdue.pop(run, None)
        self._reserved -= run.reserved
        if taken_s is not None and run.cost is not None:
            run.cost.observe(taken_s)
            # Weight 1/8 for each new time, as in `RunCost`.
            self._mean_s += (taken_s - self._mean_s) / 8

    def let_go(self, now_s: float) -> None:
        """Have runs that take too long count no longer."""
        for run in list(self.in_flight):
            if self._overdue_s(run) <= now_s:
                del self.in_flight[run]
                self.overdue[run] = None
                self._held_s = max(self._held_s, now_s - run.started_s)

    def next_overdue_s(self) -> float:
        """Return when the next run in flight will have taken too long."""
        return min(map(self._overdue_s, self.in_flight), default=inf)

    def _overdue_s(self, run: R) -> float:
        kind_s = 0.0 if run.cost is None else run.cost.mean_s
        return run.started_s + max(_OVERDUE * max(self._charge_s(run), kind_s, self._held_s), _LEAST_OVERDUE_S)

    def reserved_by_others(self, run: R) -> int:
        """Bytes that others count as."""
        return self._reserved - run.reserved

    def decide(self, now_s: float) -> Iterator[tuple[R, AsyncflowError | None]]:
        """Yield each waiting run whose turn has come: it has started, or never will, for the error given."""
        while self._refused:  # refused runs are told even if no slot is free
            yield self._refused.pop()
        while self._totals and len(self.in_flight) < self.max_runs:
            run = self._line.next(self._charge_s)
            # A run that comes back has begun: even if cancelled or late, it must end by itself and release resources.
            if run.is_gone and not run.is_aside:
                self.withdraw(run)
            elif run.may_be_late(now_s) and not run.is_aside:
                self.withdraw(run)
                yield run, too_late()
            elif not self._fits(run):
                return  # no smaller run passes it: a run that needs much memory would wait for ever
            else:
                self._line.shares.took(run.priority, self._charge_s(run), self._totals)
                self.withdraw(run)
                self._start(run, now_s)
                yield run, None

    def waiting(self) -> list[R]:
        """Return the waiting runs, by priority and then by their places."""
        return [run for _, runs in sorted(self._line.by_priority.items()) for run in runs]

    def wait_s(self, run: R, now_s: float) -> float:
        """Return how long a run offered now is expected to wait for the runs before it."""
        left_s = sum(max(0.0, other.started_s + self._charge_s(other) - now_s) for other in self.in_flight)
        before_s = own_s = 0.0
        behind = 0
        for priority, totals in self._totals.items():
            if priority < run.priority:
                before_s += self._expected_s(totals.costs_s)
            elif priority > run.priority:
                behind += 1
            else:
                own_s = self._expected_s(totals.costs_s[: self._line.count_before(priority, run.place)])
        # Each lower priority takes its share, and this priority gets its own share whatever is ahead.
        share = share_of(len({*self._totals, run.priority}))
        before_s = (before_s + own_s) / (1 - behind * share)
        with_share_s = own_s / share + self._charge_s(run) * (1 / share - 1)
        return (left_s + min(before_s, with_share_s)) / self.max_runs

    def next_wait_s(self, probe: R, now_s: float) -> float:
        """Return how long a run like `probe` would wait if it came now; 0 where there is room."""
        probe.arrival = self._offered + 1
        return 0.0 if self.has_room else self.wait_s(probe, now_s)

    @property
    def is_full(self) -> bool:
        """True if there is no room for one more run, nor a place to wait."""
        return not self.has_room and self._part(self.queued + 1, self.queued_bytes) > 1

    def _expected_s(self, costs_s: list[float]) -> float:
        """Return what runs are expected to take in all; 0 among the costs is for a run of which nothing is known."""
        return sum(costs_s) + costs_s.count(0.0) * self._mean_s

    def _charge_s(self, run: R) -> float:
        return run.charge_s or self._mean_s or _UNKNOWN_S

    def _fits(self, run: R) -> bool:
        if not self.in_flight:
            return True  # even above the memory limit, as no other run could free memory
        if len(self.in_flight) >= self.max_runs:
            return False
        return run.is_aside or self.memory_limit is None or self._reserved + run.reserved <= self.memory_limit

    def _start(self, run: R, now_s: float) -> None:
        self.in_flight[run] = None
        if run.is_aside:
            self._is_aside_no_more(run)
        else:
            self._reserved += run.reserved
        run.started_s = now_s

    def _is_aside_no_more(self, run: R) -> None:
        run.is_aside = False
        del self.aside[run]
        self._kinds_aside[run.cost] -= 1
        if not self._kinds_aside[run.cost]:  # do not keep the cost of a dropped plan alive
            del self._kinds_aside[run.cost]

    def _part(self, count: int, nbytes: int) -> float:
        """Return the share of the places that `count` runs with `nbytes` bytes take."""
        # With a limit of 0, one run counts as twice the limit, which is too many.
        places = 0.0 if self.max_queued is None else count / (self.max_queued or 0.5)
        space = 0.0 if self.max_queued_bytes is None else nbytes / (self.max_queued_bytes or 0.5)
        return max(places, space)

    def _make_way(self, run: R, now_s: float) -> None:
        """Make other runs give way, so that a run may wait.

        Raises:
            OverloadedError: no run gives way.
        """
        for other_run in self._giving_way(run, now_s):
            self.withdraw(other_run)
            why = f"had to give way to a run of priority {run.priority}, as the queue is full"
            self._refused.append((other_run, self._overloaded(self.wait_s(other_run, now_s), why)))

    def _giving_way(self, run: R, now_s: float, coming: int = 0) -> list[R]:
        """Return the runs that would have to give way, so that a run may wait after `coming` others.

        Raises:
            OverloadedError: others do not.
        """
        count, nbytes = self.queued + coming + 1, self.queued_bytes + run.nbytes
        if self._part(count, nbytes) <= 1:
            return []
        own = self._totals.get(run.priority)
        held, held_bytes = (0, 0) if own is None else (own.new, own.nbytes)
        own_part = self._part(held + 1, held_bytes + run.nbytes)
        giving: list[R] = []
        for priority in sorted(self._totals, reverse=True):
            if priority == run.priority or (priority < run.priority and own_part > SHARE):
                continue
            left, left_bytes = self._totals[priority].new, self._totals[priority].nbytes
            # Runs that come back take no slot of the queue: refusing one would free no slot and lose its work.
            last_first = (each for each in reversed(self._line.by_priority[priority]) if not each.is_aside)
            while self._part(count, nbytes) > 1 and self._part(left, left_bytes) > SHARE:
                left -= 1
                giving.append(next(last_first))
                left_bytes -= giving[-1].nbytes
                count, nbytes = count - 1, nbytes - giving[-1].nbytes
        if self._part(count, nbytes) > 1:
            limits = [] if self.max_queued is None else [f"max_queued={self.max_queued}"]
            if self.max_queued_bytes is not None:
                limits.append(f"max_queued_bytes={self.max_queued_bytes}, of {self.queued_bytes} + {run.nbytes}")
            why = f"found the queue full, as {self.queued} wait ({'; '.join(limits)})"
            raise self._overloaded(self.wait_s(run, now_s), why)
        return giving

    def _check_kind(self, run: R, now_s: float) -> None:
        """Refuse a run of a kind of which too many runs wait already, counting those aside as if they had kept their
        places.

        Raises:
            OverloadedError: it may not wait.
        """
        aside = 0 if run.cost is None else self._kinds_aside[run.cost]
        if not aside or self.max_queued is None:
            return
        if len(self.in_flight) + self.queued + aside >= self.max_runs + self.max_queued:
            why = f"found the queue full, as {self.queued} wait and {aside} of its kind (max_queued={self.max_queued})"
            raise self._overloaded(self.wait_s(run, now_s), why)

    def _overloaded(self, wait_s: float, why: str) -> OverloadedError:
        retry_after_s = max(wait_s, _LEAST_RETRY_S)
        runs = len(self.in_flight)
        most = f'max_runs="auto", here {self.max_runs}' if self.is_auto else f"max_runs={self.max_runs}"
        return OverloadedError(
            f"overloaded: {counted(runs, 'run')} in flight ({most}), and this run {why}; it did not start; "
            f"retry in {retry_after_s:.2g} s, or ask another server",
            retry_after_s=retry_after_s,
            runs=runs,
            queued=self.queued,
        )


def too_late() -> DeadlineExceeded:
    """The error of a run that has waited until its time was up."""
    return DeadlineExceeded("the run waited too long for others to end within its timeout=; it did not start")
