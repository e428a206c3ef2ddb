"""`Admission` stands in front of the runs of a session with `max_runs`: whoever has to wait does so here.

Which run that is, and when its turn comes, says `asyncflow.runtime.run_queue`. Runs asked for by a run of the same
session are part of that one: they never wait here, where they might wait for themselves.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from asyncflow.errors import DeadlineExceeded, OverloadedError, SessionClosedError
from asyncflow.runtime.run_queue import QueuedRun, RunQueue, too_late

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.memory import MemoryAccount
    from asyncflow.runtime.session.session_options import SessionOptions
    from asyncflow.values import Value


@dataclass(slots=True, eq=False)
class AdmissionTicket(QueuedRun):
    """The leave to have one run in flight, or the wait for it.

    Attributes:
        turn: done when it may start, or never will; None for one that never had to wait.
    """

    turn: asyncio.Future[None] | None = None

    @property
    def is_gone(self) -> bool:
        """Whether its caller was cancelled."""
        return self.turn is not None and self.turn.done()


class Admission:
    """Lets runs in.

    Args:
        options: of the session.
        accounts: of the memory of its devices.

    Attributes:
        queue: who is in flight, and who waits.
        refused: how many runs were not started.
        late: how many of these because their time was up before their turn.
    """

    def __init__(self, options: SessionOptions, accounts: Sequence[MemoryAccount] = ()) -> None:
        assert options.max_runs is not None
        self.queue: RunQueue[AdmissionTicket] = RunQueue(
            options.max_runs, options.max_queued, options.max_queued_bytes, options.memory_limit
        )
        self.refused = 0
        self.late = 0
        self._accounts = accounts if options.memory_limit is not None else ()
        self._held: list[int] = []
        """Bytes of each that are there without runs."""

    def apply(
        self, plan: Plan | None, deadline_s: float, now_s: float, priority: int = 0, values: Sequence[Value] = ()
    ) -> AdmissionTicket:
        """The ticket of a run, which may start, or else has to `wait`; `leave` has to be called however it goes on.

        Args:
            plan: of such runs; None if there is none yet.
            deadline_s: when it has to have ended, in the event loop's time; infinity for no matter when.
            now_s: that time.
            priority: lower ones go first.
            values: what is fed to it.

        Raises:
            OverloadedError: it may not even wait.
        """
        ticket = AdmissionTicket(None if plan is None else plan.cost, priority, deadline_s)
        queue = self.queue
        if queue.max_queued_bytes is not None and not queue.has_room:
            ticket.nbytes = _held_bytes(values)
        if self._accounts and not queue.in_flight:
            self._look_at_idle()
        try:
            if not queue.offer(ticket, now_s):
                ticket.turn = asyncio.get_running_loop().create_future()
                self._settle(now_s)
        except OverloadedError:
            self.refused += 1
            raise
        return ticket

    async def wait(self, ticket: AdmissionTicket) -> None:
        """Waits until a run may start.

        Raises:
            OverloadedError: it gave way to more important ones.
            DeadlineExceeded: it has waited for so long that it would not end in time.
            SessionClosedError: the session was closed.
        """
        if ticket.turn is None:
            return
        try:
            async with asyncio.timeout_at(None if ticket.deadline_s == inf else ticket.deadline_s):
                await ticket.turn
        except OverloadedError:
            self.refused += 1
            raise
        except TimeoutError:  # here, or when its turn came
            self.refused += 1
            self.late += 1
            raise too_late() from None

    def leave(self, ticket: AdmissionTicket, now_s: float, *, is_whole: bool = False) -> None:
        """A run has ended, or will not start; `is_whole` says that it came to its end."""
        queue = self.queue
        if ticket not in queue.in_flight:
            queue.withdraw(ticket)
        else:
            taken_s = None
            if ticket.has_begun and ticket.cost is not None:
                taken_s = now_s - ticket.started_s
                if self._accounts:
                    ticket.cost.observe_bytes(self._needed(ticket))
                # One that was stopped would have taken longer still.
                if not is_whole and taken_s <= ticket.cost.expected_s:
                    taken_s = None
            queue.end(ticket, taken_s)
            if self._accounts and not queue.in_flight:
                self._look_at_idle()
        if queue.queued:
            self._settle(now_s)

    def _look_at_idle(self) -> None:
        self._held = [account.lap("runs")[1] for account in self._accounts]

    def _needed(self, ticket: AdmissionTicket) -> int:
        """Bytes that a run needed of the device on which that was most: what was there beside what others reserve."""
        most = max(account.lap("runs")[0] - held for account, held in zip(self._accounts, self._held, strict=True))
        return max(0, most - self.queue.reserved_by_others(ticket))

    def counts(self) -> tuple[int, int, int, int]:
        """How many wait, how many were refused, how many of these were late, and what is fed to those that wait."""
        return self.queue.queued, self.refused, self.late, self.queue.queued_bytes

    def close(self, reason: str) -> None:
        """Ends all waiting."""
        for ticket in self.queue.waiting():
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(SessionClosedError(reason))

    def _settle(self, now_s: float) -> None:
        for ticket, error in self.queue.decide(now_s):
            assert ticket.turn is not None
            if error is None:
                ticket.turn.set_result(None)
            elif not ticket.turn.done():
                ticket.turn.set_exception(error)


def _held_bytes(values: Sequence[Value]) -> int:
    """Bytes of fed values; of lists, as an array of eight bytes a number would have."""
    nbytes = 0
    for value in values:
        if isinstance(value, list | tuple):
            nbytes += _held_bytes(value)
        else:
            nbytes += getattr(value, "nbytes", 8)
    return nbytes


@asynccontextmanager
async def in_time(
    timeout: float | None, asked_s: float, what: str, then: str = "it did not start"
) -> AsyncIterator[None]:
    """Raises DeadlineExceeded, which says `what` and `then`, if what is done inside takes longer than a run may.

    Args:
        timeout: of the run; None for none.
        asked_s: when the run was asked for.
        what: is not done.
        then: is what comes of that.
    """
    try:
        async with asyncio.timeout_at(None if timeout is None else asked_s + timeout):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{what} within timeout={timeout} s; {then}") from None
