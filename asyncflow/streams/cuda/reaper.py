"""Completion of a GPU's work, reported to the host without blocking the event loop and without code on driver threads.

A *ticket* is an event recorded on one CUDA stream, what to call when it completes, and what to keep alive until then.
Each stream has a `Reaper`. Where the stream writes completion flags (`flags.py`), a busy loop looks at them, and an
idle one does for a moment (`lookout.py`). In all other cases a thread waits. It sleeps on the oldest ticket's event
(`cudaEventSynchronize` of a blocking event, which releases the GIL). The thread then takes every further ticket whose
event is done, and wakes the loop once for all::

    loop's thread   give ──▶ look at the flag ──────────────────────────────────────────────────────▶ deliver
                         └─▶ queue ──▶ reaper's thread: synchronize, query, query, ... ──▶ Mailbox ──▶ deliver

A ticket may go both ways: the loop also looks while the thread is waking up. The first to come delivers it.

A stream does its work in order, so the oldest ticket never holds up another that could be delivered. Python code never
runs on a driver thread. A host function would stall its stream until it has the GIL. It may deadlock with a thread that
has the GIL and waits for the driver. The driver does not call it at all once the device is in error.

| state of a `Reaper` | enters by                 | giving a ticket      | the thread                                 |
|---------------------|---------------------------|----------------------|--------------------------------------------|
| idle                | creation                  | appends              | does not exist                             |
| serving             | first ticket              | appends              | starts with the first ticket left to it    |
| lost                | a CUDA error              | appends              | fails its tickets old and new, no calls    |
| stopped             | `stop`, or stream dropped | `SessionClosedError` | completes its tickets, then ends           |
| forked              | fork, in the child        | `SessionClosedError` | does not exist                             |
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from asyncflow.streams.cuda.flags import Flag
from asyncflow.streams.cuda.lookout import lookout_of, lookouts
from asyncflow.streams.cuda.pooled_event import DONE, NOT_READY, EventPool, PooledEvent
from asyncflow.streams.lifecycle import Lifecycle
from asyncflow.streams.mailbox import Mailbox

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw

Notice: TypeAlias = Callable[[BaseException | None], object]
"""Callback with None, or with the error that the stream failed with."""

MOST_ASLEEP = 32
"""Tickets of a stream, not delivered yet, with events that the thread can sleep on; CUDA has room for 56. Where there
are more, work waits for the card anyway, and the thread looks every millisecond."""

MAX_BATCH = 256
"""Maximum number of tickets posted to the loop at once: a stream of tiny work must not hold up the first."""


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """A point in a stream's order, awaited on the event loop.

    Attributes:
        deliver: callback at that point; None until then, and for tickets without a waiter.
        holds: what to refer to until then.
        event: the point; None until the ticket is given, and where a lost stream could record none.
        error: what the stream failed with, if the work before the point did not end well.
        counts: True if a thread can sleep on the event; few events allow that.
        mailbox: of the loop that it is delivered on.
        is_over: it was delivered.
        given: the stream's `StreamWork.given` at the point; 0 for an older point.
    """

    deliver: Notice | None
    holds: tuple[object, ...] = ()
    event: PooledEvent | None = None
    given: int = 0
    error: BaseException | None = None
    counts: bool = False
    mailbox: Mailbox[Ticket] | None = None
    is_over: bool = False

    def finish(self) -> None:
        """Drop the held references, then call `deliver`; on the event loop."""
        deliver = self.deliver
        self.drop()  # first, so that `deliver` reads correct memory accounts
        if deliver is not None:
            deliver(self.error)

    def drop(self) -> None:
        """Drop all references: a thread may still refer to the ticket."""
        self.is_over = True
        self.deliver = None
        self.holds = ()
        self.event = None


@dataclass(slots=True, eq=False, repr=False)
class StreamWork:
    """A count of the work of a stream, with the objects to hold for that; on the thread of the event loop.

    Code that gives a stream work, or makes it wait, adds to `given`. So equal numbers say that nothing is left to do.
    Then neither the host nor another stream has to wait for the stream, and no event is recorded.

    Attributes:
        given: a number that grows with each piece of work, from before the launch on.
        passed: the number that a delivered ticket has shown to be done.
        held: objects for the next ticket.
        launched: number of these, the first ones, that belong to work that the stream has.
        is_due: the end of the turn gives a ticket, if no other did before.
        follows: work of other streams that this stream has waited for: by its own number, and that of the other work.
    """

    given: int = 0
    passed: int = 0
    held: list[object] = field(default_factory=list)
    launched: int = 0
    is_due: bool = False
    follows: deque[tuple[int, StreamWork, int]] = field(default_factory=deque)

    def follow(self, other: StreamWork, number: int) -> None:
        """Note that work from now on comes after another stream's work up to `number`."""
        self.follows.append((self.given, other, number))

    def pass_to(self, number: int) -> None:
        """Note that work up to `number` is done, and so all work that the stream had waited for by then."""
        self.passed = max(self.passed, number)
        while self.follows and self.follows[0][0] <= self.passed:
            _, other, reached = self.follows.popleft()
            other.pass_to(reached)
        if self.passed == self.given:
            self.held.clear()
            self.launched = 0


@dataclass(slots=True, eq=False, repr=False)
class Reaper(Lifecycle):
    """The tickets of one CUDA stream, and the thread that completes them in order.

    It does not refer to its stream, so that dropping the stream ends the thread. All methods belong to the thread of
    the event loop that owns the stream, and none of them blocks.

    Attributes:
        name: of the stream, such as ``cuda:0/d2h``; the thread's name is ``asyncflow:<name>``.
        stopped: takes no more tickets.
        ended: set when all work is done and all tickets are on their way to the loop.
        cupy: the module.
        physical: the device's CUDA ordinal.
        raw: the ``cupy.cuda.Stream``.
        events: of the same device.
        on_lost: called once, on the event loop and before any ticket is failed, with what the device failed with.
        lost: what the device failed with, if it did.
        in_flight: tickets not delivered yet, the oldest first.
        queued: number of these that the thread has, the oldest ones.
        work: of the stream.
    """

    cupy: InitVar[Cupy]
    physical: int
    raw: Raw
    events: EventPool
    on_lost: Callable[[BaseException], object]
    lost: BaseException | None = None
    _device: Raw = None
    _asleep: int = 0
    in_flight: deque[Ticket] = field(default_factory=deque)
    queued: int = 0
    work: StreamWork = field(default_factory=StreamWork)
    _flag: Flag | None = None
    _mailbox: Mailbox[Ticket] | None = None
    _queue: SimpleQueue[Ticket | None] = field(default_factory=SimpleQueue)
    _end: PooledEvent | None = None
    _thread: threading.Thread | None = None
    after_fork = "CUDA does not survive a fork; start processes that use GPUs by 'spawn'"

    def __post_init__(self, cupy: Cupy) -> None:
        Lifecycle.__post_init__(self)
        self._device = cupy.cuda.Device(self.physical)
        if self.events.flags is not None:
            with self._device:
                self._flag = self.events.flags.of(self.raw.ptr)

    # -- on the loop's thread ------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of tickets not delivered yet; all held objects together count as one."""
        return len(self.in_flight) + bool(self.work.held)

    @property
    def is_used(self) -> bool:
        """True if it has had a ticket."""
        return self._mailbox is not None

    def give(self, ticket: Ticket, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Have a ticket finished on `loop`, or the running one, when all work that the stream has by now is done.

        A ticket that brings its event waits for that instead; an older one waits for the tickets before it too.

        Raises:
            SessionClosedError: stopped, or forked.
            RuntimeError: tickets of a different loop are pending.
        """
        self.refuse_if_closed()
        self._enter(ticket, self._mailbox_of(loop or asyncio.get_running_loop()))

    def hold(self, holds: tuple[object, ...]) -> None:
        """Refer to `holds` until all work that the stream has by now is done.

        All objects held in one turn of the loop share one event and one ticket, or the ticket of the next `give`.

        Raises:
            SessionClosedError: stopped, or forked.
            RuntimeError: tickets of a different loop are pending.
        """
        self.refuse_if_closed()
        loop, work = asyncio.get_running_loop(), self.work
        self._mailbox_of(loop)
        if not work.is_due:
            work.is_due = True
            loop.call_soon(self.flush)  # batched: an event for each object would cost more than most launches
        work.held.extend(holds)

    def keep(self, holds: tuple[object, ...]) -> None:
        """Refer to `holds` until all work that the stream has by now is done, or longer: up to the next ticket's end.

        That ticket is the one of the run's end at the latest. So this is for objects that no code waits for.

        Raises:
            SessionClosedError: stopped, or forked.
            RuntimeError: tickets of a different loop are pending.
        """
        self.refuse_if_closed()
        self._mailbox_of(asyncio.get_running_loop())
        self.work.held.extend(holds)

    def flush(self) -> None:
        """Give the ticket for the held objects."""
        self.work.is_due = False
        if self.work.held:
            assert self._mailbox is not None
            self._enter(Ticket(None), self._mailbox)

    def note_launched(self) -> None:
        """Note that all held objects belong to work that the stream has."""
        self.work.launched = len(self.work.held)

    def flush_launched(self) -> None:
        """Give a ticket for the objects held before `note_launched`, ahead of the end of the turn."""
        launched, self.work.launched = self.work.launched, 0
        if launched:
            assert self._mailbox is not None
            holds = tuple(self.work.held[:launched])
            del self.work.held[:launched]
            self._enter(Ticket(None, holds, self._marked()), self._mailbox)

    def record(self, *, for_ticket: bool = False) -> PooledEvent:
        """A new event after all work that the stream has by now.

        Args:
            for_ticket: a ticket is to bring it, so that the thread had better be able to sleep on it.

        Raises:
            CUDARuntimeError: the device failed, as every caller is told from then on.
        """
        if self.lost is not None:
            raise self.lost.with_traceback(None)
        try:
            with self._device:
                event = self.events.take(sleeps=for_ticket and self._asleep < MOST_ASLEEP)
                if for_ticket and self._flag is not None:  # before the event, so that its waiters find the flag written
                    event.flag, event.number = self._flag, self._flag.mark()
                self.events.runtime.eventRecord(event.raw.ptr, self.raw.ptr)
        except Exception as exc:
            self.lose(exc)
            raise
        return event

    def follow(self, event: PooledEvent) -> None:
        """Make work given to the stream from here on wait for `event`.

        Raises:
            CUDARuntimeError: the device failed, as every caller is told from then on.
        """
        if self.lost is not None:
            raise self.lost.with_traceback(None)
        self.work.given += 1
        try:
            self.events.runtime.streamWaitEvent(self.raw.ptr, event.raw.ptr)
        except Exception as exc:
            self.lose(exc)
            raise

    def lose(self, error: BaseException) -> None:
        """The device failed: tickets that are pending and tickets to come get `error`. The first one counts."""
        self._lose(error)
        self._tell()

    def stop(self) -> None:
        """Refuse further tickets; the thread ends after the tickets already given and all other work. Idempotent."""
        if self.stopped:
            return
        self.flush()  # these objects need a ticket, and a stopped reaper takes none
        self.rest()
        self.stopped = True
        if self._thread is None:
            if self._is_idle():
                self.ended.set()
                return
            self._start()  # work that has no ticket needs a thread that sees its end
        self._end = self._marked()
        self._queue.put(None)

    def settle(self) -> None:
        """Deliver the tickets still on their way and join the thread, which takes microseconds; only after `ended`."""
        if self._mailbox is not None:
            self._mailbox.settle()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> bool:
        """Deliver the oldest tickets whose work is done; return False if some are left."""
        tickets = self.in_flight
        for _ in range(min(len(tickets), MAX_BATCH)):
            ticket = tickets[0]
            # The thread discards tickets of a closed loop.
            if ticket.mailbox is not self._mailbox:
                break
            event = ticket.event
            if (event is None or not event.has_passed()) and not self._is_past_all_the_same(ticket):
                break
            self._deliver(ticket)
        return not tickets

    def rest(self) -> None:
        """Have the thread wait for the tickets that it does not have yet."""
        if self._thread is None and self.in_flight:
            self._start()
        for ticket in islice(self.in_flight, self.queued, None):
            self._queue.put(ticket)
        self.queued = len(self.in_flight)

    def probe(self) -> None:
        """Ask CUDA for the oldest ticket: a device that is lost writes no flag."""
        if self.in_flight and (event := self.in_flight[0].event) is not None:
            self._is_done(event)

    def _is_past_all_the_same(self, ticket: Ticket) -> bool:
        """Return True if a ticket without a written flag is done as well, or never will be; note the error then."""
        event = ticket.event
        if self.lost is None and event is not None and event.flag is None:
            self._is_done(event)  # such an event was recorded for another purpose, and is queried by itself
            if event.seen_done:
                return True
        ticket.error = self.lost
        return self.lost is not None

    def _deliver(self, ticket: Ticket) -> None:
        """Finish the oldest ticket, unless the other way to the loop was faster."""
        if ticket.is_over:
            return
        oldest = self.in_flight.popleft()
        assert oldest is ticket
        self.queued = max(0, self.queued - 1)
        self._asleep -= ticket.counts
        # The device is reported as lost before any waiter sees the error, so that a retry finds it lost.
        try:
            if ticket.error is not None:
                self._tell()
            elif ticket.given:
                self.work.pass_to(ticket.given)
        finally:
            ticket.finish()

    def _discard(self, ticket: Ticket) -> None:
        """Forget the oldest ticket, of a loop that is closed; also on the reaper's thread."""
        if not ticket.is_over:
            self.in_flight.popleft()
            self.queued = max(0, self.queued - 1)
            self._asleep -= ticket.counts
            ticket.drop()

    def _enter(self, ticket: Ticket, mailbox: Mailbox[Ticket]) -> None:
        if ticket.event is None:
            work = self.work
            if work.held:
                ticket.holds = (*work.held, *ticket.holds)
                work.held.clear()
                work.launched = 0
            ticket.given = work.given
            ticket.event = self._marked()
        ticket.counts = ticket.event is not None and ticket.event.sleeps
        self._asleep += ticket.counts
        ticket.mailbox = mailbox
        self.in_flight.append(ticket)
        loop = mailbox.loop
        lookout = None if self._flag is None else lookouts.get(loop) or lookout_of(loop)
        if lookout is None:
            mailbox.expect()
            self.rest()
        else:
            lookout.watch(self, loop)

    def _marked(self) -> PooledEvent | None:
        """A new event after all work so far; None if the device is lost."""
        if self.lost is not None:
            return None
        try:
            return self.record(for_ticket=True)
        except Exception as exc:  # `lose` has stored the error for the tickets
            exc.with_traceback(None)
            return None

    def _is_idle(self) -> bool:
        """Return True if the stream has no work, or the device is lost."""
        status: int = self.events.runtime.streamQuery(self.raw.ptr)
        if status not in (DONE, NOT_READY):
            self.lose(self.events.runtime.CUDARuntimeError(status))
        return status != NOT_READY

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> Mailbox[Ticket]:
        mailbox = self._mailbox
        if mailbox is not None:
            if mailbox.loop is loop:
                return mailbox
            if mailbox.loop.is_closed():
                self.flush()
                self.rest()
                mailbox.settle()
            elif self.pending:
                raise RuntimeError(
                    f"stream {self.name} is used on a different loop while {self.pending} of its tickets are to be "
                    "delivered on another; open one session per event loop"
                )
        self._mailbox = mailbox = Mailbox(loop, self._deliver, self._discard)
        return mailbox

    def _start(self) -> None:
        thread = threading.Thread(target=self.serve, name=f"asyncflow:{self.name}", daemon=True)
        thread.start()
        self._thread = thread

    def _tell(self) -> None:
        if self.lost is not None:
            tell, self.on_lost = self.on_lost, _is_told
            tell(self.lost)

    # -- on the reaper's thread ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """The thread: complete tickets in order until stopped, and then see all other work done."""
        try:
            try:
                self.events.runtime.setDevice(self.physical)  # of this thread
            except Exception as exc:
                self._lose(exc)
            ticket = self._queue.get()
            while ticket is not None:
                ticket = self._reap(ticket)
            if self._end is not None:
                self._block(self._end)
                self._end = None
        finally:
            self.ended.set()

    def _reap(self, ticket: Ticket) -> Ticket | None:
        """Sleep until `ticket` is done, post it with all further tickets that are done, and return the next ticket."""
        event = ticket.event  # kept here, as the loop may drop it meanwhile
        if event is not None:
            self._block(event)
        batch = [self._ended(ticket)]
        while True:
            try:
                following = self._queue.get_nowait()
            except Empty:
                _post(batch)
                return self._queue.get()
            # The next ticket is not done: post the finished tickets without waiting for it.
            if following is None or len(batch) == MAX_BATCH or not self._is_done(following.event):
                _post(batch)
                return following
            batch.append(self._ended(following))

    def _ended(self, ticket: Ticket) -> Ticket:
        ticket.error = self.lost
        return ticket

    def _block(self, event: PooledEvent) -> None:
        if self.lost is None:
            try:
                event.block()
            except Exception as exc:
                self._lose(exc)

    def _is_done(self, event: PooledEvent | None) -> bool:
        """Return True if the event is done; on a lost device every event is."""
        if self.lost is not None or event is None:
            return True
        try:
            return event.done()
        except Exception as exc:
            self._lose(exc)
            return True

    def _lose(self, error: BaseException) -> None:
        # Both threads may find an error. The first one stored counts, as later ones have the same cause.
        if self.lost is None:
            # Its frames refer to events and tickets, and each of many raises would add frames.
            self.lost = error.with_traceback(None)


def _is_told(_: BaseException) -> None:
    """Do nothing: the device was reported as lost."""


def _post(batch: list[Ticket]) -> None:
    """Post the tickets with one wake-up a loop; a second loop occurs only after the first was closed."""
    open_ones = [ticket for ticket in batch if not ticket.is_over]
    for mailbox, tickets in groupby(open_ones, attrgetter("mailbox")):
        mailbox.post(*tickets)
