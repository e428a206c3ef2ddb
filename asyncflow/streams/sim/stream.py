"""Streams and events on virtual time, with the vector clocks that find a missing event.

Nothing here computes. A `SimStream` says *when* work would begin and end; whoever gives it work computes the result at
once, and must not show it to anyone before the event of the work.

**Vector clocks.** Each stream counts its work. It also knows, of every other stream, up to which count that stream's
work comes before its own next work: it learns that by waiting for an event, which carries what *its* stream knew. The
host knows the same of every stream, from events it has awaited or seen done, and passes it on with everything that it
launches. Work A comes before work B exactly when B's stream has seen A's count; that a virtual clock happens to show
A's end first proves nothing, because on a real device the times are others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from asyncflow.errors import SessionClosedError
from asyncflow.streams.failures import KeptFailures, without_this_frame
from asyncflow.streams.futures import resolve
from asyncflow.streams.protocol import Event
from asyncflow.streams.virtual import VirtualClockLoop

_Seen: TypeAlias = "Mapping[SimStream, int]"
"""Up to which count of each other stream work comes before. Never changed, only replaced: events share it."""


@dataclass(slots=True, eq=False)
class HostClock:
    """The virtual time, and the host's knowledge of every stream.

    Attributes:
        loop: the event loop on virtual time.
        seen: the host's vector clock.
        version: goes up when `seen` changes, so that streams need not compare.
    """

    loop: VirtualClockLoop
    seen: _Seen = field(default_factory=dict)
    version: int = 0

    def now_ns(self) -> int:
        """The virtual time."""
        return self.loop.now_ns

    def observe(self, event: SimEvent) -> None:
        """Learn that an event is done: whatever the host launches from here on comes after it."""
        if not self.has_seen(event):
            self.seen = _merged(self.seen, event.known())
            self.version += 1

    def has_seen(self, event: SimEvent) -> bool:
        """Return True if the host knows that the event is done."""
        return self.seen.get(event.stream, 0) >= event.count or event.stream.is_over

    def forget(self, streams: Iterable[SimStream]) -> None:
        """Leave closed streams out of all clocks: the host has seen their end, so all streams have seen all their work.

        Else clocks would grow with every session that a machine has ever had.
        """
        for stream in streams:
            stream.is_over = True
        self.seen = {stream: count for stream, count in self.seen.items() if not stream.is_over}


@dataclass(slots=True, eq=False, repr=False)
class SimEvent:
    """A point in a `SimStream`'s order, and the work that ends there.

    Attributes:
        stream: the stream in whose order it is.
        count: the stream's count there; with the stream it names the work.
        seen: counts of other streams whose work comes before.
        started_ns: when the work began.
        time_ns: when it ends, and the event is done.
        label: name of the work.
    """

    stream: SimStream
    count: int
    seen: _Seen
    started_ns: int
    time_ns: int
    label: str

    def __repr__(self) -> str:
        return f"<SimEvent {self.stream.name} #{self.count} {self.label} done at {self.time_ns} ns>"

    def done(self) -> bool:
        """Return True if all work before this point is done; the host then knows it."""
        host = self.stream.host
        if host.now_ns() < self.time_ns:
            return False
        host.observe(self)  # the program may rely on the answer, as on a card: this orders later launches
        return True

    async def wait(self) -> None:
        """Return when the work before this point is done.

        Raises:
            BaseException: what enqueued work before this point failed with, as a group if there were several.

        Cancellation: leaves the event and the stream as they were.
        """
        await self.passed()
        self.stream.raise_failures(self)

    async def passed(self) -> None:
        """Return when the work before this point is done, whether or not it failed.

        Cancellation: leaves the event and the stream as they were.
        """
        host = self.stream.host
        if host.now_ns() < self.time_ns:
            done = host.loop.create_future()
            timer = host.loop.call_at_ns(self.time_ns, resolve, done)
            try:
                await done
            finally:
                timer.cancel()
        host.observe(self)

    def known(self) -> Iterable[tuple[SimStream, int]]:
        """Return the counts of work, by stream, that are known to be done by a waiter of this event."""
        return (*self.seen.items(), (self.stream, self.count))


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class SimStream:
    """A FIFO queue of work on virtual time.

    Work is given in one of two ways: `launch` occupies the stream for a known time, and `enqueue` calls a function when
    the stream gets there, which takes no virtual time.

    Attributes:
        name: such as ``sim:0/compute``.
        host: the clock that all streams of a machine share.
        free_at_ns: when all work given so far has ended.
        is_over: it is closed, and all know that its work is done.
    """

    name: str
    host: HostClock
    free_at_ns: int = 0
    is_over: bool = False
    _waits_ns: int = 0
    _count: int = 0
    _seen: _Seen = field(default_factory=dict)
    _host_version: int = 0
    _ends: deque[int] = field(default_factory=deque)
    _jobs: deque[_SimJob] = field(default_factory=deque)
    _failures: KeptFailures = field(default_factory=KeptFailures)
    _stopped: bool = False

    def __repr__(self) -> str:
        return f"<SimStream {self.name} free at {self.free_at_ns} ns>"

    # -- on virtual time -----------------------------------------------------------------------------------------

    def ready_ns(self, earliest_ns: int = 0) -> int:
        """Return the earliest time at which new work could begin."""
        return max(self.host.now_ns(), self.free_at_ns, self._waits_ns, earliest_ns)

    def launch(self, duration_ns: int, earliest_ns: int = 0, label: str = "") -> SimEvent:
        """Occupy the stream for `duration_ns`, after all earlier work and all events waited for.

        Args:
            duration_ns: how long the work takes.
            earliest_ns: it does not begin before.
            label: description for messages.

        Returns:
            The event of its end, which also says when it began.

        Raises:
            SessionClosedError: the stream is closed.
        """
        if self._stopped:
            self._refuse_if_stopped()
        host = self.host
        started_ns = now_ns = host.loop.now_ns
        # Comparisons, as `max` would double the time of this method.
        if started_ns < self.free_at_ns:
            started_ns = self.free_at_ns
        if started_ns < self._waits_ns:
            started_ns = self._waits_ns
        if started_ns < earliest_ns:
            started_ns = earliest_ns
        self.free_at_ns = ended_ns = started_ns + duration_ns
        self._count += 1
        ends = self._ends
        if self._jobs or (ends and ends[0] <= now_ns):  # else a long line of launches would grow without bound
            self._settle()
        ends.append(ended_ns)
        if self._host_version != host.version:
            self._learn()
        return SimEvent(self, self._count, self._seen, started_ns, ended_ns, label)

    def origin(self, label: str = "") -> SimEvent:
        """An event before all work: everyone has seen it."""
        return SimEvent(self, 0, {}, 0, 0, label)

    def has_seen(self, event: SimEvent) -> bool:
        """Return True if the work before `event` precedes all work given to this stream from here on."""
        return event.stream is self or self._seen.get(event.stream, 0) >= event.count or self.host.has_seen(event)

    # -- the `Stream` protocol -----------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of items given to the stream and not done yet."""
        self._settle()
        return len(self._ends)

    def enqueue(self, work: Callable[..., object], *args: object) -> None:
        """Call ``work(*args)`` after all earlier work; its failure is kept for the next event that is awaited.

        Raises:
            SessionClosedError: the stream is closed.
        """
        event = self.launch(0)  # takes no time, but a place in the order
        self._jobs.append(_SimJob(event, partial(work, *args)))
        self.host.loop.call_at_ns(event.time_ns, self._settle)

    def record(self) -> SimEvent:
        """An event that completes when all work given so far is done.

        Raises:
            SessionClosedError: the stream is closed.
        """
        self._refuse_if_stopped()
        return self.end()

    def end(self) -> SimEvent:
        """`record`, also on a stream that is closed."""
        time_ns = max(self.free_at_ns, self._waits_ns)
        if self._host_version != self.host.version:
            self._learn()
        return SimEvent(self, self._count, self._seen, time_ns, time_ns, "event")

    def wait(self, event: Event) -> None:
        """Make work given from here on wait for ``event``; the host does not wait.

        Raises:
            TypeError: the event is not one of a simulated stream.
            SessionClosedError: the stream is closed.
        """
        if not isinstance(event, SimEvent):
            raise TypeError(f"stream {self.name} can wait for a SimEvent, not for {type(event).__name__}")
        self._refuse_if_stopped()
        # A stream that has seen an event has waited for it, or for a later one: its time counts already.
        if not self.has_seen(event):
            self._seen = _merged(self._seen, event.known(), self)
            self._waits_ns = max(self._waits_ns, event.time_ns)
            self._count += 1  # events with equal counts must have seen the same events

    def stop(self) -> None:
        """Refuse further work; finish the work already given. Idempotent."""
        self._stopped = True

    async def aclose(self, grace_s: float) -> bool:
        """`stop`, then wait up to ``grace_s`` seconds of virtual time for the work to end; True if it did. Idempotent.

        Cancellation: the stream stays stopped, and the work it has still ends.
        """
        self.stop()
        try:
            async with asyncio.timeout(grace_s):
                await self.end().passed()
        except TimeoutError:
            return False
        self._settle()
        self._failures.log(self.name)
        return True

    def raise_failures(self, event: SimEvent) -> None:
        """Raise failures of functions before an event that have not been reported yet."""
        self._settle()
        self._failures.raise_before(event.count + 1, self.name)

    # -- inside --------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Take over the host's knowledge: work given from here on comes after it."""
        host = self.host
        self._host_version = host.version
        # Usually all of this is known. Keep the same object then, as events share it.
        if any(self._seen.get(stream, 0) < count for stream, count in host.seen.items() if stream is not self):
            self._seen = _merged(self._seen, host.seen.items(), self)

    def _settle(self) -> None:
        """Run the work that is due; called by timers and by every look at the stream."""
        now, jobs = self.host.now_ns(), self._jobs
        while jobs and jobs[0].event.time_ns <= now:
            job = jobs.popleft()
            try:
                job.call()
            except BaseException as exc:
                self._failures.keep(job.event.count, without_this_frame(exc))
        while self._ends and self._ends[0] <= now:
            self._ends.popleft()

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise SessionClosedError(f"stream {self.name} is closed and takes no more work; open a new session")


class _SimJob(NamedTuple):
    """A function that a stream calls at an event of its own."""

    event: SimEvent
    call: Callable[[], object]


def _merged(seen: _Seen, counts: Iterable[tuple[SimStream, int]], own: SimStream | None = None) -> _Seen:
    """Merge `seen` and `counts`, without the stream's own count and without streams that are over."""
    merged = {stream: count for stream, count in seen.items() if not stream.is_over}
    for stream, count in counts:
        if stream is not own and not stream.is_over and merged.get(stream, 0) < count:
            merged[stream] = count
    return merged
