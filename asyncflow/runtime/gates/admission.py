"""`Admission` stands before the runs of a session with `max_runs`: a run that has to wait for its place waits here.

`RunQueue` decides which run has to wait, and when its turn comes. Runs asked for by a run of the same session are part
of that run: they never wait here, where they might wait for themselves.

With ``max_runs="auto"`` runs wait for others of about their own length alone, so each length has a queue of its own: a
run of 5 ms does not wait behind one of a minute. A plan that has never been run has a queue for itself. A place is for
a run that computes. A run has no place while all of it waits, in a coroutine or for the consumer of its stream. It has
none once it takes too long (`RunQueue.let_go`). Runs that share batches or pools need none at all: the more there are,
the less each costs.

A run steps aside when all of it waits (`Run.look_aside`): in lines of queues, inputs, mutexes and waiting nodes, or for
the consumer of its stream. It comes back before a kernel of it goes on. It claims its element, or whatever it was
called for, before it has its place again: other runs may stand behind it in the line of the queue. While a run is
aside, runs that wait for atomic runs step aside as well: the atomic run may be the run that waits at a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from asyncflow.errors import DeadlineExceeded, OverloadedError, SessionClosedError
from asyncflow.runtime.gates.run_queue import QueuedRun, RunQueue, too_late
from asyncflow.runtime.lines.gate import Waiter
from asyncflow.streams.holding import is_within

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextvars import Token

    from asyncflow.compiler.plan import Plan
    from asyncflow.compiler.run_cost import RunCost
    from asyncflow.devices.memory import MemoryAccount
    from asyncflow.runtime.calls.session_options import SessionOptions
    from asyncflow.runtime.run.ask import Ask
    from asyncflow.values import Value

T = TypeVar("T")

_SPARE_PLACES = 2
"""With ``max_runs="auto"``, the number of places beyond the number of threads."""

_WAITING_S = 0.000_2
"""A run that has coroutines and computes for less than this only waits."""

_LEAST_RETRY_S = 0.05
"""Seconds after which a refused caller is told to ask again, where runs only wait and no time is known."""

_SHORTEST_S = 0.004
"""Runs that take less are of one length; others are where they take up to four times as long."""

_KEPT_S: Final = 1.0
"""The time for which a place is kept for an expected run: clients that send a body slowly must not fill the queue."""

_LATELY_S: Final = 10.0
"""With ``max_runs="auto"``, a length without a run for this time tells nothing of requests."""


class ExpectedRun:
    """A place in the line of a session for a run that a request will ask for.

    Inside ``with``, the first run that this context asks for takes the place. Without it, all requests that arrive in
    one pass of the event loop would be let in to the last free place.
    """

    __slots__ = ("_admission", "_token", "until_s")

    def __init__(self, admission: Admission | None, until_s: float) -> None:
        self._admission = admission
        self.until_s = until_s

    def __enter__(self) -> Self:
        self._token: Token[ExpectedRun | None] = _expected.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
        _expected.reset(self._token)

    def release(self) -> None:
        """Give up the place: the run has come, or never will."""
        if self._admission is not None:
            self._admission.expected.pop(self, None)
            self._admission = None  # copies of this context may outlive the session


_expected: ContextVar[ExpectedRun | None] = ContextVar("asyncflow_expected_run", default=None)


@dataclass(slots=True, eq=False)
class AdmissionTicket(QueuedRun):
    """The leave to have a run in flight, or the wait for it.

    Attributes:
        admission: the admission that gave the ticket; None after the end.
        turn: admitted when the run may start, refused if it never will; None for a run that never had to wait.
        go_on: is called when the run comes back after it has stepped aside; None where that is not waited for.
        queue: the queue in which the run stands, or has its place.
    """

    queue: RunQueue[AdmissionTicket] = field(kw_only=True)
    admission: Admission | None = None
    turn: Waiter | None = None
    go_on: Callable[[], None] | None = None

    def step_aside(self) -> None:
        """Give the place of the run to other runs, which it waits for from now on."""
        if self.admission is not None:
            self.admission.step_aside(self)

    def come_back(self, go_on: Callable[[], None]) -> bool:
        """Return True if the run, which stepped aside, has a place now; else ``go_on()`` is called when it has."""
        return self.admission is None or self.admission.come_back(self, go_on)

    @property
    def is_auto(self) -> bool:
        """True if the run gives its place to others for whatever it waits for."""
        return self.queue.is_auto

    @property
    def is_gone(self) -> bool:
        """True if the caller was cancelled."""
        return self.turn is not None and self.turn.is_leaving


class SessionLoad(NamedTuple):
    """The load of a session at one moment, for a server that decides whether to take a request (`Session.load`).

    With ``max_runs="auto"``, runs of each length have places of their own; `wait_s` and `is_full` then tell of the
    length that waits longest. Without a limit nothing waits: `queued` and `wait_s` are 0.

    Attributes:
        running: number of runs that have a place. With ``max_runs="auto"``, runs in flight that wait themselves, or
            share batches or pools, have none. Without a limit, all runs in flight count.
        queued: runs that wait for a place.
        wait_s: seconds that a run would wait for its place if it came now, as far as earlier runs tell.
        is_full: True if such a run would be refused, as `max_queued` or `max_queued_bytes` are reached.
    """

    running: int = 0
    queued: int = 0
    wait_s: float = 0.0
    is_full: bool = False


class Admission:
    """The places of a session's runs, and the wait for them.

    Args:
        options: options of the session.
        accounts: accounts of the memory of its devices.
        threads: number of long kernels that its devices compute at a time.

    Attributes:
        is_auto: True with ``max_runs="auto"``.
        queues: runs in flight and waiting runs. With `is_auto` there is a queue per length, or per cost where the
            length is unknown; else there is one queue.
        refused: number of runs that were not started.
        late: number of these whose deadline passed before their turn.
        expected: runs that requests will ask for, in the order of the requests.
    """

    def __init__(self, options: SessionOptions, accounts: Sequence[MemoryAccount] = (), threads: int = 1) -> None:
        assert options.max_runs is not None
        self.is_auto = options.max_runs == "auto"
        # Two more than threads: each CPU lane may hold a run, and the event loop, too.
        self.max_runs = threads + _SPARE_PLACES if options.max_runs == "auto" else options.max_runs
        memory_limit = None if self.is_auto else options.memory_limit
        self._limits = options.max_queued, options.max_queued_bytes, memory_limit, self.is_auto
        self.queues: dict[int | RunCost, RunQueue[AdmissionTicket]] = {0: RunQueue(self.max_runs, *self._limits)}
        self.refused = 0
        self.late = 0
        self.expected: dict[ExpectedRun, None] = {}
        self._accounts = accounts if memory_limit is not None else ()
        self._held: list[int] = []
        """Bytes of each that are there without runs."""
        self._held_up: dict[AdmissionTicket, None] = {}
        """Tickets of runs that wait for atomic runs."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """For each queue in which runs wait, when one in flight will have taken too long."""

    def enter(
        self, plan: Plan | None, ask: Ask, values: Sequence[Value], turn: object, calls: int, number: int
    ) -> AdmissionTicket | None:
        """Return the ticket of a run, as `apply` does; None for a run that needs no place.

        With `is_auto` a place costs a run 5 µs, or 15 µs with a coroutine. While few calls are in progress no run needs
        a place, nor do runs that wait and hardly compute. One run in 64 has a place all the same, from which the queue
        learns what runs of this plan take now.

        Args:
            plan: of such runs; None if there is none yet.
            ask: the options of the call.
            values: the values fed to it.
            turn: the session's share of the event loop; what runs of the session ask for is part of them.
            calls: how many are in progress.
            number: of the run.

        Raises:
            OverloadedError: it may not even wait.
        """
        if self.expected:
            self.arrived()
        if self.is_auto:
            if plan is None or plan.survey.gathers:  # only a compiled plan shows whether its runs need a slot
                return None
            cost = plan.cost
            may_do_without = 2 * calls <= self.max_runs or (plan.survey.awaits and cost.mean_s < _WAITING_S)
            # Measure one run in 64, and all runs of a plan whose time is unknown.
            if number & 63 and cost.is_known and may_do_without:
                return None
        if is_within(turn):
            return None
        end_s = inf if ask.timeout is None else ask.asked_s + ask.timeout
        return self.apply(plan, end_s, asyncio.get_running_loop().time(), ask.priority, values)

    @contextmanager
    def in_progress(self, cost: RunCost) -> Iterator[None]:
        """Count a run that has a deadline, and mostly waits, as long as it is in progress.

        Raises:
            OverloadedError: it would end too late, as runs of its plan did that had come beside as many.
        """
        crowd, loop = cost.crowd, asyncio.get_running_loop()
        if crowd.is_full(loop.time()):
            self.refused += 1
            raise OverloadedError(
                f'overloaded: {crowd.count} runs wait for others (max_runs="auto"), and this run would take too long '
                f"to end in time; it did not start; retry in {_LEAST_RETRY_S:.2g} s, or ask another server",
                retry_after_s=_LEAST_RETRY_S,
                runs=crowd.count,
            )
        ended = crowd.ended
        crowd.count += 1
        try:
            yield
            crowd.end()
        except DeadlineExceeded:
            crowd.miss(ended, loop.time())
            raise
        finally:
            crowd.count -= 1

    def _queue_for(self, cost: RunCost | None) -> RunQueue[AdmissionTicket]:
        if not self.is_auto or cost is None:
            return self.queues[0]
        # Each class of lengths spans a factor of 4: two bits of the ratio. A plan without a measured time has its own
        # queue, by its cost.
        length = (int(cost.mean_s / _SHORTEST_S).bit_length() + 1) // 2 if cost.mean_s else cost
        queue = self.queues.get(length)
        if queue is None:
            # Short-lived plans would each leave a queue: drop idle queues when a new one is added.
            if length is cost:
                for key in [key for key, each in self.queues.items() if key and each.is_idle and not each.has_waiting]:
                    del self.queues[key]
            queue = self.queues[length] = RunQueue(self.max_runs, *self._limits)
        return queue

    def expect(self, deadline_s: float, now_s: float, priority: int = 0) -> ExpectedRun:
        """Keep a place for a run that a request will ask for.

        With `is_auto` the length of the run is unknown, and so is whether it needs a place. The request is refused
        where runs of all recent lengths would be, and no place is kept.

        Raises:
            OverloadedError: as far as can be told before the run is known, `apply` would raise it.
        """
        while self.expected and (first := next(iter(self.expected))).until_s <= now_s:  # oldest first
            first.release()
        queues = self.queues.values()
        used = [queue for queue in queues if not queue.is_idle or queue.offered_s > now_s - _LATELY_S]
        refusal: OverloadedError | None = None
        for queue in used or queues:
            run = AdmissionTicket(None, priority, deadline_s, queue=queue)
            refusal = queue.refusal(run, now_s, len(self.expected))
            if refusal is None:
                break
        if refusal is not None:
            self.refused += 1
            raise refusal
        if self.is_auto:
            return ExpectedRun(None, inf)
        expected = ExpectedRun(self, now_s + _KEPT_S)
        self.expected[expected] = None
        return expected

    def arrived(self) -> None:
        """Note that a run of this context is asked for."""
        expected = _expected.get()
        if expected is not None:
            expected.release()

    def apply(
        self, plan: Plan | None, deadline_s: float, now_s: float, priority: int = 0, values: Sequence[Value] = ()
    ) -> AdmissionTicket:
        """Return the ticket of a run that may start, or has to `wait`; `leave` has to be called however the run goes
        on.

        Args:
            plan: of such runs; None if there is none yet.
            deadline_s: when the run has to have ended, in the event loop's time; infinity without a deadline.
            now_s: that time.
            priority: lower ones go first.
            values: the values fed to it.

        Raises:
            OverloadedError: it may not even wait.
        """
        cost = None if plan is None else plan.cost
        queue = self._queue_for(cost)
        ticket = AdmissionTicket(cost, priority, deadline_s, queue=queue, admission=self)
        if queue.max_queued_bytes is not None and not queue.has_room:
            ticket.nbytes = _held_bytes(values)
        # With no run in flight, all memory in use belongs to variables and constants: the baseline for runs.
        if self._accounts and queue.is_idle:
            self._look_at_idle()
        try:
            if not queue.offer(ticket, now_s):
                ticket.turn = Waiter()
                self._settle(queue, now_s)  # tell the runs that give way to this one
        except OverloadedError:
            self.refused += 1
            raise
        return ticket

    async def wait(self, ticket: AdmissionTicket) -> None:
        """Wait until a run may start.

        Raises:
            OverloadedError: it gave way to more important ones.
            DeadlineExceeded: it has waited for so long that it would not end in time.
            SessionClosedError: the session was closed.
        """
        if ticket.turn is None:
            return
        try:
            await ticket.turn.wait(ticket.deadline_s)
        except OverloadedError:
            self.refused += 1
            raise
        except TimeoutError:  # while waiting here, or when its turn came
            self.refused += 1
            self.late += 1
            raise too_late() from None

    def leave(self, ticket: AdmissionTicket, now_s: float, *, is_whole: bool = False) -> None:
        """Note that a run has ended, or will not start; `is_whole` is True if it came to its end."""
        queue = ticket.queue
        ticket.admission = ticket.go_on = None
        if not queue.has_started(ticket):
            queue.withdraw(ticket)
        else:
            taken_s = None
            if ticket.has_begun and ticket.cost is not None:
                taken_s = ticket.spent_s + (0.0 if ticket.is_aside else now_s - ticket.started_s)
                if self._accounts:
                    ticket.cost.observe_bytes(self._needed(ticket))
                # A stopped run would have taken longer: its time counts only if it already exceeds the expected time.
                if not is_whole and taken_s <= ticket.cost.expected_s:
                    taken_s = None
            queue.end(ticket, taken_s)
            if self._accounts and queue.is_idle:
                self._look_at_idle()
        if queue.has_waiting:
            self._settle(queue, now_s)

    def step_aside(self, ticket: AdmissionTicket) -> None:
        """Give the place of a run to other runs, which it waits for."""
        now_s = asyncio.get_running_loop().time()
        # Runs held up by an atomic run may wait for this one: it may be the atomic run, or a run it waits for.
        for each in (ticket, *self._held_up):
            if not each.is_aside:
                each.queue.step_aside(each, now_s)
                if each.queue.has_waiting:
                    self._settle(each.queue, now_s)

    def come_back(self, ticket: AdmissionTicket, go_on: Callable[[], None]) -> bool:
        """Return True if a run that stepped aside has a place now; else ``go_on()`` is called when it has."""
        is_in_line, ticket.go_on = ticket.go_on is not None, go_on
        if is_in_line:
            return False  # already in line for an earlier step; one call serves both
        now_s = asyncio.get_running_loop().time()
        if not ticket.queue.come_back(ticket, now_s):
            self._watch(ticket.queue)
            return False
        ticket.go_on = None
        return True

    async def held_up(self, ticket: AdmissionTicket | None, wait: Callable[[], Awaitable[T]]) -> T:
        """Give what ``await wait()`` does, which waits for atomic runs; the run may step aside meanwhile."""
        if ticket is None:
            return await wait()
        loop = asyncio.get_running_loop()
        if self.is_auto or ticket.queue.aside:
            # Step aside only in the next turn: the wait may be over by then.
            loop.call_soon(lambda: self.step_aside(ticket) if ticket in self._held_up else None)
        self._held_up[ticket] = None
        try:
            return await wait()
        finally:
            del self._held_up[ticket]

    async def back(self, ticket: AdmissionTicket) -> None:
        """Wait until a run that has stepped aside has a place again."""
        came = Waiter()
        if not self.come_back(ticket, came.admit):
            await came.wait()

    def _look_at_idle(self) -> None:
        self._held = [account.lap("runs")[1] for account in self._accounts]

    def _needed(self, ticket: AdmissionTicket) -> int:
        """Return the bytes that a run needed on its fullest device: the bytes held there, less other runs' reserves."""
        most = max(account.lap("runs")[0] - held for account, held in zip(self._accounts, self._held, strict=True))
        return max(0, most - ticket.queue.reserved_by_others(ticket))

    def counts(self) -> tuple[int, int, int, int, int]:
        """Return `queued`, `refused`, `late`, `queued_bytes` and `aside` of `SessionStatistics`."""
        queues = self.queues.values()
        queued, nbytes = sum(each.queued for each in queues), sum(each.queued_bytes for each in queues)
        return queued, self.refused, self.late, nbytes, sum(len(each.aside) for each in queues)

    def load(self, now_s: float) -> SessionLoad:
        """Return the session's load (`Session.load`)."""
        queues = self.queues.values()
        wait_s = max(each.next_wait_s(AdmissionTicket(None, queue=each), now_s) for each in queues)
        running, queued = sum(len(each.in_flight) for each in queues), sum(each.queued for each in queues)
        return SessionLoad(running, queued, wait_s, any(each.is_full for each in queues))

    def close(self, reason: str) -> None:
        """End all waiting."""
        for ticket in [ticket for queue in self.queues.values() for ticket in queue.waiting()]:
            if ticket.turn is not None:
                ticket.turn.refuse(SessionClosedError(reason))
        for timer in self._timers.values():
            timer.cancel()

    def _settle(self, queue: RunQueue[AdmissionTicket], now_s: float) -> None:
        for ticket, error in queue.decide(now_s):
            if ticket.go_on is not None:
                go_on, ticket.go_on = ticket.go_on, None
                go_on()
                continue
            assert ticket.turn is not None
            if error is None:
                ticket.turn.admit()
            else:
                ticket.turn.refuse(error)
        self._watch(queue)

    def _watch(self, queue: RunQueue[AdmissionTicket]) -> None:
        """While runs wait, with `is_auto`, stop counting runs in flight once they take too long."""
        if not self.is_auto:
            return
        timer = self._timers.get(id(queue))
        if not queue.has_waiting:
            if timer is not None:
                self._timers.pop(id(queue)).cancel()
        elif timer is None:
            loop = asyncio.get_running_loop()
            self._timers[id(queue)] = loop.call_at(queue.next_overdue_s(), self._look, queue)

    def _look(self, queue: RunQueue[AdmissionTicket]) -> None:
        now_s = asyncio.get_running_loop().time()
        del self._timers[id(queue)]
        queue.let_go(now_s)
        self._settle(queue, now_s)


def _held_bytes(values: Sequence[Value]) -> int:
    """Bytes of fed values; of lists, as an array of eight bytes a number would have."""
    nbytes = 0
    for value in values:
        if isinstance(value, list | tuple):
            nbytes += _held_bytes(value)
        else:
            nbytes += getattr(value, "nbytes", 8)
    return nbytes
