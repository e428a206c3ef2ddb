"""Which runs may start, which wait, and which are refused: a pure state machine, with no clock and no event loop in it.

Runs that wait stand in one line a priority, by their deadlines, and of equal ones as they came.

============ ============================================================ ==============================================
event        state                                                        what happens
============ ============================================================ ==============================================
`offer`      there is room, and no run waits                              it starts
`offer`      as above, and it would end too late beside those in flight   it is refused: `OverloadedError`
`offer`      it would end too late after those before it                  it is refused: `OverloadedError`
`offer`      too many wait, and nobody gives way                          it is refused: `OverloadedError`
`offer`      too many wait, and others give way                           it waits; they are refused: `OverloadedError`
`offer`      else                                                         it waits
`withdraw`   it waits                                                     it leaves; the others are as they were
`end`        it is in flight                                              what it took is learnt; there is room
`step_aside` it is in flight                                              there is room; its memory stays reserved
`come_back`  there is room, and no run waits                              it is in flight again
`come_back`  else                                                         it waits, and is never refused
`end`        it has stepped aside, or waits to be in flight again         its memory is free
`let_go`     it has been in flight for too long                           there is room; it goes on
`decide`     there is room, and some wait                                 the first of the line whose turn it is starts
`decide`     as above, and it would end too late now                      it is not started: `DeadlineExceeded`
============ ============================================================ ==============================================

There is room while fewer than `max_runs` are in flight and, with a `memory_limit`, what runs of its kind needed before
fits beside what is reserved for those in flight. Where there is room, and none of its kind is in flight, a run starts
whatever is expected of it: that is how a wrong expectation is corrected, such as after the machine has paused.

It is the turn of the line with the lowest priority number, but for an eighth of the time: whatever starts, a seventh of
the time that it is expected to take is owed to each other line, and one that is owed what its first run is expected to
take goes next. For places in the queue it is the same: those of higher numbers give way, the last of the line with the
highest number first, down to an eighth of the places; and a line that has less than that makes any other give way.

**Runs that step aside.** A run that waits for other runs, at a queue say, does not take the place of a run that would
fill the queue. It steps aside meanwhile, and comes back later. For example, with ``max_runs=2`` two runs take elements
of an empty queue: both step aside, a third run starts and puts an element in, and the first run comes back for it.
A run that comes back stands in its line by its deadline and by when it was first offered, so runs of its priority that
have not started come behind it. It counts as what its last stay took, and not for `max_queued`. Runs that stepped aside
do not count for `max_queued` either, but against runs of their own kind: these would wait at the same queue. So no more
than `max_runs` and `max_queued` runs of a kind are there together, while runs of other kinds find the places free.

**Runs that take too long.** A run may wait for others in a way that the session cannot see, such as a lock that a
function of the user's takes. `let_go` therefore has runs count no longer that are in flight `_OVERDUE` times as long as
their kind takes. For example, four runs of 10 ms hold all four places, and wait for a fifth. After 80 ms the queue
lets go of them, and the fifth run starts. While no run ends, the next runs have `_OVERDUE` times as long as those had,
so a burst of runs of unknown length does not start all at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from asyncflow.compiler.run_cost import RunCost
from asyncflow.errors import AsyncflowError, DeadlineExceeded, OverloadedError
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import SHARE, share_of

_LEAST_RETRY_S = 0.01

_OVERDUE = 8
"""A run takes too long after so many times the mean of its kind; one of exponential ones in 3,000 does."""

_LEAST_OVERDUE_S = 0.016
"""No run takes too long before this."""

_UNKNOWN_S = 1e-6
"""What a run counts as while no run has told how long one takes."""


@dataclass(slots=True, eq=False)
class QueuedRun:
    """One run, from when it is asked for until it has ended.

    Attributes:
        cost: what such runs take; None for one of a kind that has never been run.
        priority: lower ones go first.
        deadline_s: when it has to have ended; infinity for no matter when.
        nbytes: of what is fed to it, held while it waits.
        charge_s: what such runs take on average, as was known when it was offered; 0 if nothing was.
        reserved: bytes of memory that it counts as while it is in flight.
        arrival: how many were offered before it.
        started_s: when it was let in, began, or came back.
        has_begun: whether all that it needs was there, so that the time from then on is its own.
        is_aside: True if it has stepped aside, and while it waits to come back.
        spent_s: what it took before it stepped aside last.
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
        """Whether nobody wants it any more; it will be withdrawn."""
        return False

    @property
    def place(self) -> tuple[float, int]:
        """Orders a line."""
        return self.deadline_s, self.arrival

    def is_late(self, start_s: float) -> bool:
        """Whether it would end too late if it started then, as far as can be expected."""
        return start_s + (0.0 if self.cost is None else self.cost.expected_s) > self.deadline_s

    def may_be_late(self, start_s: float) -> bool:
        """Whether it might well end too late if it started then."""
        return start_s + (0.0 if self.cost is None else self.cost.likely_s) > self.deadline_s


R = TypeVar("R", bound=QueuedRun)


@dataclass(slots=True)
class _Totals:
    """Sums over the waiting runs of one priority.

    Attributes:
        costs_s: what each of them is expected to take, in the order of the line; 0 if that is not known.
        nbytes: bytes of what is fed to those that have never started.
        new: number of these.
    """

    costs_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    new: int = 0


@dataclass(slots=True, eq=False)
class RunQueue(Generic[R]):
    """Runs that are in flight, have stepped aside, or wait.

    Invariant, after `decide`: nobody waits while there is room.

    Args:
        max_runs: most in flight.
        max_queued: most that wait; None for no limit.
        max_queued_bytes: most bytes of what is fed to those that wait; None for no limit.
        memory_limit: bytes that those in flight may need, with those that stepped aside; None for no matter how many.
        is_auto: True if the session chose `max_runs`.

    Attributes:
        aside: runs that have stepped aside, or wait to come back.
        overdue: runs that took too long: they go on, and count no longer.
        queued: number of runs that wait and have never started.
        queued_bytes: of what is fed to these.
        offered_s: when the last run was offered.
    """

    max_runs: int
    max_queued: int | None = None
    max_queued_bytes: int | None = None
    memory_limit: int | None = None
    is_auto: bool = False
    in_flight: dict[R, None] = field(default_factory=dict, init=False)
    aside: dict[R, None] = field(default_factory=dict, init=False)
    overdue: dict[R, None] = field(default_factory=dict, init=False)
    queued: int = field(default=0, init=False)
    queued_bytes: int = field(default=0, init=False)
    offered_s: float = field(default=-inf, init=False)
    _line: PriorityLine[tuple[float, int], R] = field(default_factory=PriorityLine, init=False)
    """Those that wait; shares are of the time."""
    _totals: dict[int, _Totals] = field(default_factory=dict, init=False)
    """Of each priority that waits."""
    _refused: list[tuple[R, AsyncflowError]] = field(default_factory=list, init=False)
    """Those that gave way, until `decide` tells of them."""
    _reserved: int = field(default=0, init=False)
    _offered: int = field(default=0, init=False)
    _mean_s: float = field(default=0.0, init=False)
    """Of all runs, for those of which nothing is known."""
    _held_s: float = field(default=0.0, init=False)
    """How long the last one that took too long had been in flight; 0 once a run has ended."""
    _kinds_aside: Counter[RunCost | None] = field(default_factory=Counter, init=False)
    """Number of `aside` of each kind."""

    @property
    def has_room(self) -> bool:
        """Whether a run that is offered now need not wait, as far as its memory is not concerned."""
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
        """Whether a run starts; else it waits for what `decide` will say.

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
        """A run no longer waits; nothing happens to one that does not."""
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
            self._held_s = 0.0
        else:
            self.overdue.pop(run, None)
        self.aside[run] = None
        self._kinds_aside[run.cost] += 1
        run.is_aside = True
        # When it comes back it will take about as long: it may be a loop that waits in each iteration.
        run.charge_s = now_s - run.started_s
        run.spent_s += run.charge_s

    def come_back(self, run: R, now_s: float) -> bool:
        """Return True if a run that stepped aside goes on now; else it waits until `decide` gives it."""
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
        """Of those that wait, each whose turn has come: it has started, or it never will, for this reason."""
        while self._refused:
            yield self._refused.pop()
        while self._totals and len(self.in_flight) < self.max_runs:
            run = self._line.next(self._charge_s)
            if run.is_gone and not run.is_aside:
                self.withdraw(run)
            elif run.may_be_late(now_s) and not run.is_aside:
                self.withdraw(run)
                yield run, too_late()
            elif not self._fits(run):
                return
            else:
                self._line.shares.took(run.priority, self._charge_s(run), self._totals)
                self.withdraw(run)
                self._start(run, now_s)
                yield run, None

    def waiting(self) -> list[R]:
        """Those that wait, by priority and then by their places."""
        return [run for _, runs in sorted(self._line.by_priority.items()) for run in runs]

    def wait_s(self, run: R, now_s: float) -> float:
        """How long a run that is offered now would wait, as far as can be expected of those that are there."""
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
        # Each priority behind takes its share, and this one gets its own whatever stands before it.
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
            return True
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
        if not self._kinds_aside[run.cost]:
            del self._kinds_aside[run.cost]

    def _part(self, count: int, nbytes: int) -> float:
        """How much of the places is taken by so many runs with so many bytes."""
        places = 0.0 if self.max_queued is None else count / (self.max_queued or 0.5)
        space = 0.0 if self.max_queued_bytes is None else nbytes / (self.max_queued_bytes or 0.5)
        return max(places, space)

    def _make_way(self, run: R, now_s: float) -> None:
        """Has others give way, so that a run may wait.

        Raises:
            OverloadedError: nobody does.
        """
        for other_run in self._giving_way(run, now_s):
            self.withdraw(other_run)
            why = f"had to give way to one of priority {run.priority}, as many wait"
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
            why = f"would have to wait, as {self.queued} do ({'; '.join(limits)})"
            raise self._overloaded(self.wait_s(run, now_s), why)
        return giving

    def _check_kind(self, run: R, now_s: float) -> None:
        """Refuse a run that would wait where so many of its kind do already, as if those had kept their places.

        Raises:
            OverloadedError: it may not wait.
        """
        aside = 0 if run.cost is None else self._kinds_aside[run.cost]
        if not aside or self.max_queued is None:
            return
        if len(self.in_flight) + self.queued + aside >= self.max_runs + self.max_queued:
            why = f"would have to wait, as {self.queued} do and {aside} of its kind (max_queued={self.max_queued})"
            raise self._overloaded(self.wait_s(run, now_s), why)

    def _overloaded(self, wait_s: float, why: str) -> OverloadedError:
        retry_after_s = max(wait_s, _LEAST_RETRY_S)
        runs = len(self.in_flight)
        most = f'max_runs="auto", here {self.max_runs}' if self.is_auto else f"max_runs={self.max_runs}"
        return OverloadedError(
            f"the session is busy with {runs} run{'' if runs == 1 else 's'} ({most}), and this one {why}; it did not "
            "start; "
            f"ask again in {retry_after_s:.2g} s, or ask another",
            retry_after_s=retry_after_s,
            runs=runs,
            queued=self.queued,
        )


def too_late() -> DeadlineExceeded:
    """The error of a run that has waited until its time was up."""
    return DeadlineExceeded("the run waited too long for others to end within its timeout=; it did not start")
