"""Which runs may start: limits, queueing and deadlines in front of `Runs._start`.

With `Session(max_runs=, max_queued=)`, a run that is asked for

==============================================================  ====================================================
while fewer than `max_runs` are in flight, and none waits       starts
and would end too late, after those in flight and before it     is refused at once: `OverloadedError`
while `max_queued` wait                                         is refused at once: `OverloadedError`
else                                                            waits its turn, first come, first served
and whose turn comes too late for it to end in time             is not started: `DeadlineExceeded`
and whose caller has been cancelled by then                     is forgotten
==============================================================  ====================================================

How long a run will take is the median of what the last runs of its plan took, so that one slow run refuses no others.
That is enough for one that can start at once. Under load there are always more to choose from than can run, and those
that wait do so until their time is almost up: if only the median had to fit, half of them would be computed for nobody.
So one that waits has to fit with the second longest of those times. While nothing is in flight any run starts, whatever
is expected of it: that is how a wrong expectation is corrected. Runs asked for by a run of the same session are part of
that one: they never wait here, where they might wait for themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from asyncflow.errors import DeadlineExceeded, OverloadedError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from asyncflow.compiler.plan import Plan

_LEAST_RETRY_S = 0.01


@dataclass(slots=True, eq=False)
class AdmissionTicket:
    """The leave to have one run in flight, or the wait for it.

    Attributes:
        plan: what is to run; None while it is not compiled.
        deadline_s: when it has to have ended, in the event loop's time; None for no matter when.
        started_s: when it was let in, or began.
        has_begun: whether all that it needs was there, so that the time from then on is its own.
        turn: done when it may start.
    """

    plan: Plan | None
    deadline_s: float | None
    started_s: float = 0.0
    has_begun: bool = False
    turn: asyncio.Future[None] | None = None

    @property
    def expected_s(self) -> float:
        """How long it will take."""
        return 0.0 if self.plan is None else self.plan.expected_s

    @property
    def likely_s(self) -> float:
        """The time that it will hardly exceed."""
        recent_s = () if self.plan is None else self.plan.recent_s
        return max(self.expected_s, *sorted(recent_s)[-2:-1], 0.0)

    def is_late(self, start_s: float) -> bool:
        """Whether it would end too late if it started then, as far as can be expected."""
        return self.deadline_s is not None and start_s + self.expected_s > self.deadline_s

    def may_be_late(self, start_s: float) -> bool:
        """Whether it might well end too late if it started then."""
        return self.deadline_s is not None and start_s + self.likely_s > self.deadline_s


@dataclass(slots=True, eq=False)
class Admission:
    """Counts the runs in flight and queues the others.

    Invariant: nobody waits while fewer than `max_runs` are in flight.
    """

    max_runs: int
    max_queued: int | None
    refused: int = 0
    """How many runs were not started."""
    _in_flight: dict[AdmissionTicket, None] = field(default_factory=dict)
    _queue: deque[AdmissionTicket] = field(default_factory=deque)

    @property
    def queued(self) -> int:
        """How many runs wait."""
        return len(self._queue)

    def apply(self, plan: Plan | None, deadline_s: float | None) -> AdmissionTicket:
        """A ticket for a run that may start, or wait, as things are now; it is not counted yet.

        Raises:
            OverloadedError: it may not.
        """
        now = asyncio.get_running_loop().time()
        ticket = AdmissionTicket(plan, deadline_s)
        if len(self._in_flight) < self.max_runs:
            if self._in_flight and ticket.is_late(now):
                self._refuse(now, "would take too long to end in time")
        elif self.max_queued is not None and len(self._queue) >= self.max_queued:
            self._refuse(now, f"would have to wait, as {len(self._queue)} do (max_queued={self.max_queued})")
        elif ticket.may_be_late(now + self._wait_s(now)):
            self._refuse(now, "would have to wait too long to end in time")
        return ticket

    async def enter(self, plan: Plan | None, deadline_s: float | None) -> AdmissionTicket:
        """Waits until the run may start; `leave` has to be called when it has ended.

        Raises:
            OverloadedError: it was refused, before anything was waited for.
            DeadlineExceeded: it has waited for so long that it would not end in time.
            SessionClosedError: the session was closed.

        Cancellation: the run is forgotten.
        """
        ticket = self.apply(plan, deadline_s)
        loop = asyncio.get_running_loop()
        if len(self._in_flight) < self.max_runs:
            self._start(ticket, loop.time())
            return ticket
        ticket.turn = loop.create_future()
        self._queue.append(ticket)
        try:
            async with asyncio.timeout_at(deadline_s):
                await ticket.turn
        except TimeoutError:  # here, or when its turn came
            self._drop(ticket)
            self.refused += 1
            raise _too_late() from None
        except BaseException:
            self._drop(ticket)
            raise
        return ticket

    def begin(self, ticket: AdmissionTicket, plan: Plan) -> None:
        """A run starts: all that it needs is there."""
        ticket.plan = plan
        ticket.has_begun = True
        ticket.started_s = asyncio.get_running_loop().time()

    def leave(self, ticket: AdmissionTicket, *, is_whole: bool = False) -> None:
        """A run has ended, or will not start; `is_whole` says that it came to its end."""
        now = asyncio.get_running_loop().time()
        del self._in_flight[ticket]
        plan, taken_s = ticket.plan, now - ticket.started_s
        # One that was stopped would have taken longer still.
        if plan is not None and ticket.has_begun and (is_whole or taken_s > plan.expected_s):
            plan.recent_s.append(taken_s)
            plan.expected_s = _median(plan.recent_s)
        self._advance(now)

    def close(self, reason: str) -> None:
        """Ends all waiting."""
        for ticket in self._queue:
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(SessionClosedError(reason))

    def _start(self, ticket: AdmissionTicket, now: float) -> None:
        self._in_flight[ticket] = None
        ticket.started_s = now

    def _drop(self, ticket: AdmissionTicket) -> None:
        """The caller of a run that has not begun is gone, or it is too late."""
        if ticket in self._in_flight:
            self.leave(ticket)
        elif ticket in self._queue:
            self._queue.remove(ticket)

    def _advance(self, now: float) -> None:
        while self._queue and len(self._in_flight) < self.max_runs:
            ticket = self._queue.popleft()
            assert ticket.turn is not None
            if ticket.turn.done():  # cancelled, in this pass of the event loop
                continue
            if ticket.may_be_late(now):
                ticket.turn.set_exception(_too_late())
            else:
                self._start(ticket, now)
                ticket.turn.set_result(None)

    def _wait_s(self, now: float) -> float:
        """How long a run asked for now would wait."""
        left_s = sum(max(0.0, ticket.started_s + ticket.expected_s - now) for ticket in self._in_flight)
        return (left_s + sum(ticket.expected_s for ticket in self._queue)) / self.max_runs

    def _refuse(self, now: float, why: str) -> NoReturn:
        self.refused += 1
        runs, queued = len(self._in_flight), len(self._queue)
        retry_after_s = max(self._wait_s(now), _LEAST_RETRY_S)
        raise OverloadedError(
            f"the session is busy with {runs} runs (max_runs={self.max_runs}), and this one {why}; it did not start; "
            f"ask again in {retry_after_s:.2g} s, or ask another",
            retry_after_s=retry_after_s,
            runs=runs,
            queued=queued,
        )


def _median(seconds: Iterable[float]) -> float:
    """The middle one, or the mean of the middle two; to import `statistics` takes 10 ms."""
    ordered = sorted(seconds)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the run waited too long for others to end within its timeout=; it did not start")


@asynccontextmanager
async def in_time(timeout: float | None, asked_s: float, what: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded, which says `what`, if what is done inside takes longer than a run may.

    Args:
        timeout: of the run; None for none.
        asked_s: when the run was asked for.
        what: is not done then.
    """
    try:
        async with asyncio.timeout_at(None if timeout is None else asked_s + timeout):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} within timeout={timeout} s; it did not start") from None


__all__ = ["Admission", "AdmissionTicket", "in_time"]
