"""`Admission` stands in front of the runs of a session with `max_runs`: whoever has to wait does so here.

Which run that is, and when its turn comes, says `asyncflow.runtime.run_queue`. Runs asked for by a run of the same
session are part of that one: they never wait here, where they might wait for themselves.

A run steps aside when all that is left of it waits in lines of queues, inputs, mutexes and barriers (`Run.look_aside`),
and comes back before a kernel of it goes on. It claims its element, or whatever else it was called for, before it has
its place again: others may stand behind it in the line of the queue. While a run is aside, runs that wait for atomic
ones step aside as well: the atomic run may be the one that waits at a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, TypeVar

from asyncflow.errors import DeadlineExceeded, OverloadedError, SessionClosedError
from asyncflow.runtime.run_queue import QueuedRun, RunQueue, too_late

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.memory import MemoryAccount
    from asyncflow.runtime.session.session_options import SessionOptions
    from asyncflow.values import Value

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class AdmissionTicket(QueuedRun):
    """The leave to have one run in flight, or the wait for it.

    Attributes:
        admission: that gave it; None after the end.
        turn: done when it may start, or never will; None for one that never had to wait.
        go_on: is called when it comes back after it has stepped aside; None where that is not waited for.
    """

    admission: Admission | None = None
    turn: asyncio.Future[None] | None = None
    go_on: Callable[[], None] | None = None

    def step_aside(self) -> None:
        """Give the place of the run to other runs, which it waits for from now on."""
        if self.admission is not None:
            self.admission.step_aside(self)

    def come_back(self, go_on: Callable[[], None]) -> bool:
        """Return True if the run, which stepped aside, has a place now; else ``go_on()`` is called when it has."""
        return self.admission is None or self.admission.come_back(self, go_on)

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
        self._held_up: dict[AdmissionTicket, None] = {}
        """Tickets of runs that wait for atomic ones."""

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
        ticket = AdmissionTicket(None if plan is None else plan.cost, priority, deadline_s, admission=self)
        queue = self.queue
        if queue.max_queued_bytes is not None and not queue.has_room:
            ticket.nbytes = _held_bytes(values)
        if self._accounts and queue.is_idle:
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
        ticket.admission = ticket.go_on = None
        if not queue.has_started(ticket):
            queue.withdraw(ticket)
        else:
            taken_s = None
            if ticket.has_begun and ticket.cost is not None:
                taken_s = ticket.spent_s + (0.0 if ticket.is_aside else now_s - ticket.started_s)
                if self._accounts:
                    ticket.cost.observe_bytes(self._needed(ticket))
                # One that was stopped would have taken longer still.
                if not is_whole and taken_s <= ticket.cost.expected_s:
                    taken_s = None
            queue.end(ticket, taken_s)
            if self._accounts and queue.is_idle:
                self._look_at_idle()
        if queue.has_waiting:
            self._settle(now_s)

    def step_aside(self, ticket: AdmissionTicket) -> None:
        """Give the place of a run to other runs, which it waits for."""
        now_s = asyncio.get_running_loop().time()
        for each in (ticket, *self._held_up):
            if not each.is_aside:
                self.queue.step_aside(each, now_s)
        if self.queue.has_waiting:
            self._settle(now_s)

    def come_back(self, ticket: AdmissionTicket, go_on: Callable[[], None]) -> bool:
        """Return True if a run that stepped aside has a place now; else ``go_on()`` is called when it has."""
        is_in_line, ticket.go_on = ticket.go_on is not None, go_on
        if is_in_line or not self.queue.come_back(ticket, asyncio.get_running_loop().time()):
            return False
        ticket.go_on = None
        return True

    async def held_up(self, ticket: AdmissionTicket | None, wait: Callable[[], Awaitable[T]]) -> T:
        """Give what ``await wait()`` does, which waits for atomic runs; the run may step aside meanwhile."""
        if ticket is None:
            return await wait()
        loop = asyncio.get_running_loop()
        if self.queue.aside:
            # In the next turn: there may be nothing to wait for.
            loop.call_soon(lambda: self.step_aside(ticket) if ticket in self._held_up else None)
        self._held_up[ticket] = None
        try:
            return await wait()
        finally:
            del self._held_up[ticket]

    async def back(self, ticket: AdmissionTicket) -> None:
        """Wait until a run that has stepped aside has a place again."""
        came = asyncio.Event()
        if not self.come_back(ticket, came.set):
            await came.wait()

    def _look_at_idle(self) -> None:
        self._held = [account.lap("runs")[1] for account in self._accounts]

    def _needed(self, ticket: AdmissionTicket) -> int:
        """Bytes that a run needed of the device on which that was most: what was there beside what others reserve."""
        most = max(account.lap("runs")[0] - held for account, held in zip(self._accounts, self._held, strict=True))
        return max(0, most - self.queue.reserved_by_others(ticket))

    def counts(self) -> tuple[int, int, int, int, int]:
        """Return `queued`, `refused`, `late`, `queued_bytes` and `aside` of `SessionStatistics`."""
        return self.queue.queued, self.refused, self.late, self.queue.queued_bytes, len(self.queue.aside)

    def close(self, reason: str) -> None:
        """Ends all waiting."""
        for ticket in self.queue.waiting():
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(SessionClosedError(reason))

    def _settle(self, now_s: float) -> None:
        for ticket, error in self.queue.decide(now_s):
            if ticket.go_on is not None:
                go_on, ticket.go_on = ticket.go_on, None
                go_on()
                continue
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
