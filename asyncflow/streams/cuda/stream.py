"""CUDA streams and events, made current for one synchronous block at a time, and awaited through a `Reaper`.

CuPy keeps the current device and the current stream of each *thread*. Two tasks that interleave on one thread would
take each other's stream, so a stream is current inside ``with stream:`` and nothing is awaited in there.

Work is given to a `CudaStream` by launching it inside such a block; the host learns of its end by a ticket::

    with compute:
        y = cupy.tanh(x)                    # launched, not done; y's memory comes from the stream's pool
    d2h.wait(compute.record())              # what d2h does from here on comes after tanh
    with d2h:
        copy(y, pinned)
    d2h.notify(deliver, y, pinned)          # `deliver(None)` when it is done; until then y and pinned stay

Memory that is freed is given out again at once, ordered on the stream it was allocated on and on no other. What another
stream reads or writes must therefore be kept, with `notify` or `hold`, until that stream is done with it.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from asyncflow.errors import InternalError
from asyncflow.streams.cuda.card import PhysicalCard, card_of
from asyncflow.streams.cuda.pooled_event import PooledEvent
from asyncflow.streams.cuda.reaper import Notice, Reaper, StreamWork, Ticket
from asyncflow.streams.failures import KeptFailures, without_this_frame
from asyncflow.streams.futures import resolve
from asyncflow.streams.protocol import Event

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw


class CupyPool(Protocol):
    """The memory pool that an active stream allocates from."""

    def malloc(self, nbytes: int) -> Raw:
        """A ``cupy.cuda.MemoryPointer`` to `nbytes` bytes."""


capturing = threading.RLock()
"""Lock held while a stream of this process captures a graph, and while the stream's memory belongs to that graph.

An event that another thread records there meanwhile would be the graph's, and so would memory that it allocates. The
event loop takes it to capture: whoever else holds it allocates and records, and waits for nothing.
"""


class _Active(threading.local):
    """The active stream of one thread, and the streams of enclosing blocks."""

    def __init__(self) -> None:
        self.stream: CudaStream | None = None
        self.outer: list[CudaStream | None] = []


active = _Active()
"""``active.stream`` is that of the calling thread."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CudaStream:
    """A non-blocking CUDA stream, whose completions arrive on the event loop.

    All methods belong to the thread of the event loop that owns the stream, but for ``with``, which any thread may
    use. None of them blocks, if no more than some hundred operations are in flight: the driver makes launches wait
    once about a thousand are.

    The first CUDA error of a device is its last: from then on `record` and `wait` raise it, and all tickets get it.

    A stream must be closed; a stream that is dropped instead warns, and its thread ends after the work given. The CUDA
    stream itself lives as long as the process, because memory pools tell streams apart by their address; a later
    `CudaStream` of the same device takes it over.

    Making one takes a CUDA stream of the device, or makes that, too.

    Attributes:
        cupy: the module.
        physical: the device's CUDA ordinal; several logical devices may share one.
        name: such as ``cuda:0/compute``.
        pool: where allocations come from while the stream is active; may be set later.
        on_lost: called with the error, once and on the event loop, when the device has failed.
        failures: of enqueued work.
        raw: the ``cupy.cuda.Stream``.
        work: a count of its work; code that launches without `enqueue` adds to ``work.given`` before.
        taken: objects that code in progress has to hold from one of its steps to the next; None while no step runs.

    Raises:
        CUDARuntimeError: there is no such device, or it fails.
    """

    cupy: Cupy
    physical: int
    name: str
    pool: CupyPool | None = None
    on_lost: Callable[[BaseException], object] | None = None
    raw: Raw = field(init=False)
    work: StreamWork = field(init=False)
    failures: KeptFailures = field(default_factory=KeptFailures)
    taken: list[object] | None = field(default=None, init=False)
    _failed: int = 0
    _closed: bool = False
    _card: PhysicalCard = field(init=False)
    _device: Raw = field(init=False)
    _reaper: Reaper = field(init=False)

    def __post_init__(self) -> None:
        self._card = card_of(self.cupy, self.physical)
        self._device = self.cupy.cuda.Device(self.physical)
        self.raw = self._card.take_stream()
        tell = partial(_tell, weakref.ref(self))
        self._reaper = Reaper(self.name, self.cupy, self.physical, self.raw, self._card.events, tell)
        self._reaper.watch(self)
        self.work = self._reaper.work

    def __repr__(self) -> str:
        return f"<CudaStream {self.name} on device {self.physical}, {self.pending} pending>"

    # -- current stream ------------------------------------------------------------------------------------------

    def __enter__(self) -> CudaStream:
        """Activate this stream on the thread, with its device and pool, for one block without ``await``.

        Blocks of any streams nest, and each restores the stream before it, whatever is raised in the block. Entering
        the active stream again costs next to nothing, because no other code is expected to make another stream or
        device current.
        """
        thread = active
        outer = thread.stream
        if outer is not self:
            device = self._device
            device.__enter__()
            try:
                self.raw.__enter__()
            except BaseException:
                device.__exit__(None, None, None)
                raise
            thread.stream = self
        thread.outer.append(outer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the stream, device and pool that were current before the block.

        Raises:
            InternalError: another stream is active: the block awaited something.
        """
        thread = active
        if thread.stream is not self:
            raise InternalError(
                f"stream {self.name} ends a block in which {thread.stream} is active; "
                "nothing may be awaited inside such a block"
            )
        outer = thread.outer.pop()
        if outer is not self:
            thread.stream = outer
            self.raw.__exit__(None, None, None)
            self._device.__exit__(None, None, None)

    # -- the `Stream` protocol -----------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of tickets not delivered yet; work without a ticket does not count."""
        return len(self._reaper.in_flight) + bool(self.work.held)

    @property
    def is_idle(self) -> bool:
        """True if all work given so far is known to be done, and nothing is held for it."""
        work = self.work
        # Held objects may be in use by other streams, whose work this one has not waited for.
        return work.given == work.passed and not (work.held or self._reaper.in_flight)

    def enqueue(self, work: Callable[..., object], *args: object) -> None:
        """Call ``work(*args)`` now, with this stream active: the call launches.

        Work that it launches is done after all earlier work. A failure to launch is kept, and raised by the next event
        that is awaited. Failures that no event has raised are logged when the stream is closed.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
        """
        self._reaper.refuse_if_closed()
        self.work.given += 1
        try:
            with self:
                work(*args)
        except Exception as exc:
            self.failures.keep(self._failed, without_this_frame(exc))
            self._failed += 1

    def record(self) -> CudaEvent:
        """An event that completes when all work given so far is done.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
            CUDARuntimeError: the device failed.
        """
        self._reaper.refuse_if_closed()
        return CudaEvent(self, self._reaper.record(), self._failed)

    def wait(self, event: Event) -> None:
        """Make work given from here on wait for ``event``, of any stream of any device; the host does not wait.

        Only the order changes: a failure before ``event`` is raised where ``event`` is awaited, not here.

        Raises:
            TypeError: ``event`` is of a kind that a GPU cannot wait for.
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
            CUDARuntimeError: the device failed.
        """
        if not isinstance(event, CudaEvent):
            raise TypeError(f"stream {self.name} can wait for a CudaEvent, not for {type(event).__name__}")
        self._reaper.refuse_if_closed()
        lost = event.stream._reaper.lost
        if lost is not None:
            raise lost.with_traceback(None)  # only the event's device is lost, perhaps not this one
        if event.stream is not self and not event.seen_done:
            self._reaper.follow(event.point)
            # Points inside a launch have no number, as work of that launch follows them.
            if event.given:
                self.work.follow(event.stream.work, event.given)

    def stop(self) -> None:
        """Refuse further work; finish the work already given. Idempotent, never blocks."""
        self._reaper.stop()

    async def aclose(self, grace_s: float) -> bool:
        """`stop`, then wait up to ``grace_s`` seconds for all work to be done; True if it is. Idempotent.

        All tickets have been delivered then. After the grace period, work in flight stays referenced, since the device
        may still use it. Tickets are delivered if the work ends after all.

        Cancellation: the stream stays stopped, and its thread still ends after the work it has.
        """
        reaper = self._reaper
        self.stop()
        if reaper.forked:
            return True
        try:
            async with asyncio.timeout(grace_s):
                await reaper.ended.wait()
        except TimeoutError:
            return False
        reaper.settle()
        if not self._closed:
            self._closed = True
            if reaper.lost is None:  # a stream of a lost device can never be used again
                self._card.give_back(self.raw)
        self.failures.log(self.name)
        return True

    # -- tickets -------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> BaseException | None:
        """The error that the device failed with, as far as this stream knows."""
        return self._reaper.lost

    def notify(self, deliver: Notice, *holds: object) -> None:
        """Call ``deliver(error)`` once, on the running event loop, when all work given so far is done.

        ``error`` is None, or what the device failed with. Tickets are delivered in order, with one wake-up of the loop
        for a whole batch. ``holds`` stay referenced until then, even if the waiters have gone, and are dropped right
        before the call. If the loop is closed by then, ``deliver`` is not called.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
            RuntimeError: tickets of a different loop are pending.
        """
        self._reaper.give(Ticket(deliver, holds))

    def conclude(self, deliver: Notice, *holds: object) -> CudaEvent:
        """Do `notify` and `record` for one point, with one event.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
            RuntimeError: tickets of a different loop are pending.
            CUDARuntimeError: the device failed, and ``deliver`` is not called.
        """
        reaper = self._reaper
        reaper.refuse_if_closed()
        point = reaper.record(for_ticket=True)  # first, as it may raise: then no ticket exists
        reaper.give(Ticket(deliver, holds, point, self.work.given))
        return CudaEvent(self, point, self._failed)

    def hold(self, *holds: object) -> None:
        """Refer to ``holds`` until all work given so far is done; calls in one turn of the loop share one event.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
            RuntimeError: tickets of a different loop are pending.
        """
        self._reaper.hold(holds)

    def keep(self, *holds: object) -> None:
        """Refer to ``holds`` until the next ticket after the work given so far, which a run gives at its end.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
            RuntimeError: tickets of a different loop are pending.
        """
        self._reaper.keep(holds)

    def note_launched(self) -> None:
        """Note, before a launch, that all held objects belong to earlier launches."""
        self._reaper.note_launched()

    def hand_over(self, heirs: Callable[[object], Collection[CudaStream] | None]) -> Iterator[None]:
        """Let go of the objects that tickets hold before their work is done, ticket by ticket, the oldest first.

        ``heirs(held)`` returns the streams in whose order the memory of `held` is used again, or None if `held` has to
        stay. Those streams now wait for the work in place of the host. Objects held since `note_launched` stay: their
        launch is under way, and no event comes after it yet.

        Raises:
            CUDARuntimeError: the device failed.
        """
        self._reaper.flush_launched()
        # Iterate over a copy: between two steps the caller may free memory, whose finalizers give tickets.
        for ticket in [*self._reaper.in_flight]:
            if ticket.holds and ticket.event is not None:
                ticket.holds = self._still_held(ticket.holds, ticket.event, heirs)
                yield

    def _still_held(
        self, holds: Iterable[object], event: PooledEvent, heirs: Callable[[object], Collection[CudaStream] | None]
    ) -> tuple[object, ...]:
        following = {self}
        kept = []
        for held in holds:
            streams = heirs(held)
            if streams is None:
                kept.append(held)
                continue
            for stream in streams:
                if stream not in following and not event.seen_done:
                    stream._reaper.follow(event)
                following.add(stream)
        return tuple(kept)

    # -- for events ----------------------------------------------------------------------------------------------

    async def reach(self, event: CudaEvent) -> None:
        """Return when the work before `event` is done."""
        reaper = self._reaper
        if reaper.stopped:  # the thread ends only once all work is done
            reaper.refuse_if_forked()
            await reaper.ended.wait()
            if reaper.lost is not None:
                raise reaper.lost.with_traceback(None)
        else:
            reached = asyncio.get_running_loop().create_future()
            reaper.give(Ticket(partial(resolve, reached, None), event=event.point))
            await reached

    def fail(self, error: BaseException) -> None:
        """The device failed: all tickets, pending and to come, get `error`."""
        self._reaper.lose(error)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class CudaEvent:
    """A point in a `CudaStream`'s order.

    Attributes:
        stream: the stream in whose order it is.
        point: the same point for objects that must not keep the stream alive, such as tickets.
        seen_done: True once a holder of this object has found the work done; sightings of the ticket's thread depend on
            time and do not count.
        given: `StreamWork.given` of the point, if no launch was under way there; 0 if it is not known.
    """

    stream: CudaStream
    point: PooledEvent
    _failed: int
    seen_done: bool = False
    given: int = 0

    def done(self) -> bool:
        """Return True if all work before this point is done; never blocks.

        Raises:
            CUDARuntimeError: the device failed.
        """
        try:
            self.seen_done = self.point.done()
        except Exception as exc:
            self.stream.fail(exc)
            raise
        return self.seen_done

    async def wait(self) -> None:
        """Return when the work before this point is done; any number of tasks may wait, on the loop of the stream.

        Raises:
            CUDARuntimeError: the device failed.
            Exception: what enqueued work before this point failed with, as a group if there were several.
            SessionClosedError: this process is a fork of the stream's owner.

        Ordering: after the tickets given before the call, tickets of later work included. Cancellation: leaves the
        event and the stream as they were.
        """
        if not self.done():
            await self.stream.reach(self)
            self.seen_done = True
        self.stream.failures.raise_before(self._failed, self.stream.name)


def _tell(stream: weakref.ref[CudaStream], error: BaseException) -> None:
    owner = stream()
    if owner is not None and owner.on_lost is not None:
        owner.on_lost(error)
