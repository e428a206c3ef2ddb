"""Choice of a CPU's thread for each firing, made when it is launched: the thread with the least to do.

Why any thread will do. Elsewhere a kernel counts as done when it is enqueued, and the order of its stream is what makes
its value valid. On a CPU it counts as done when it has returned *and the event loop has been told*; only then does the
scheduler hand on its value, or let go of what an order edge held back. The user of a value, and the next node after an
effect, is launched after the end of its predecessors, on any thread: the threads order nothing that the scheduler has
not ordered before. (The loop hands over results and work by locks, which makes one thread's memory visible to the
next.) Nothing orders two runs; they share variables, whose writes are atomic on any threads (`VariableState`). The
exception is code that keeps state of its own and says so (`Conduct.alone`): two firings of such code are never under
way on two threads at once, but queue on one.

Which threads there are. A firing is *short*, *medium* or *long* by its expected time, or *unmeasured*::

    lane                  0 ... n-1    n    n+1    n: the device's share of the cores, at most 8, at least `planned`
    long                     x
    medium, unmeasured       x         x           so that a firing that proves long does not hold up short ones
    unmeasured, with others
    of its node under way    x                     so that a burst of them does not hold up the first of another node
    short                    x         x     x     so that it need not wait for anything but others of its kind

The expected time is the processor's time, except for users' functions, which may wait. On a busy machine all firings
take longer, but do not count as longer.

The streams that the compiler divides a plan over (`Session(compute_streams=)`) are the first lanes: a firing stays on
its own where that is idle.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable, Hashable
from time import perf_counter_ns, thread_time_ns
from typing import NamedTuple, TypeAlias

from asyncflow.devices.machine.hardware import usable_cores
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.values import Value

SHORT_NS = 5_000_000
"""A firing that is expected to take no longer is a short one (5 ms)."""

MEDIUM_NS = 50_000_000
"""Longest expected time of a medium firing (50 ms)."""

_UNMEASURED_NS = 1_000_000_000
"""Time assumed for an unmeasured firing, so that no other one chooses to wait behind it."""

_SPARE_NS = 1_000_000
"""To wait for so little is better than to wake one more thread, for the interpreter's lock is one for all."""

_STUCK_NS = 5_000_000
"""So much later than expected is no inaccuracy of measurement."""

_MOST = 8
"""Long firings at a time, on a machine with many cores."""


class Times(NamedTuple):
    """Times and lane of a firing; nanoseconds of `time.perf_counter_ns`.

    Attributes:
        lane: such as ``compute:1``.
        queued_ns: when the lane was given it.
        started_ns: when the thread began with it.
        ended_ns: when it was done.
        computed_ns: how long the processor worked on it.
    """

    lane: str
    queued_ns: int
    started_ns: int
    ended_ns: int
    computed_ns: int

    @classmethod
    def never(cls) -> Times:
        """Return the times of a firing that no lane has taken."""
        now = perf_counter_ns()
        return cls("compute", now, now, now, 0)


Deliver: TypeAlias = Callable[[object, BaseException | None, Times], None]
"""Takes ``(result, error, times)`` on the event loop."""


class _ThreadLane:
    """A thread and its work.

    Attributes:
        name: of the stream, as traces show it.
        stream: the thread.
        load_ns: what all that it was given and has not been delivered is expected to take.
        moved_ns: when it was given work while it had none, or when it last delivered some.
    """

    __slots__ = ("load_ns", "moved_ns", "name", "stream")

    def __init__(self, device: str, number: int) -> None:
        self.name = f"compute:{number}" if number else "compute"
        self.stream = ThreadStream(f"{device}/{self.name}")
        self.load_ns = 0
        self.moved_ns = 0

    def likely_ns(self, now_ns: int) -> int:
        """Return the time that work given now would wait here.

        Where nothing was delivered for much longer than all of it was to take, the thread is stuck: a function of the
        user's waits, for a lock or for an answer. As much as it has taken is then expected to come.
        """
        taken_ns = now_ns - self.moved_ns
        return self.load_ns + (taken_ns if self.load_ns and taken_ns > self.load_ns + _STUCK_NS else 0)


class _StatefulLane:
    """A lane with firings of code that keeps state of its own; the owner is kept alive so that its id stays unique."""

    __slots__ = ("count", "lane", "owner")

    def __init__(self, lane: _ThreadLane, owner: object) -> None:
        self.lane = lane
        self.owner = owner
        self.count = 0


class Lanes:
    """The threads of one CPU device; threads that are never used do not exist. Used on the event loop's thread alone.

    Attributes:
        threads: how many long firings there may be at a time.

    Invariant: a lane's load is the sum over its firings under way. ``_holds`` has an entry for each firing under way
    anywhere, by the id of its owner, and ``_unmeasured`` a count of unmeasured ones by node.
    """

    __slots__ = ("_holds", "_lanes", "_planned", "_unmeasured", "threads")

    def __init__(self, device: str, planned: int, sharing: int = 1) -> None:
        """``planned``: how many streams the compiler divides plans over; ``sharing``: CPU devices of the session.

        More threads than cores for all devices together would only take turns, and lose what their caches hold.
        """
        self._planned = planned
        self.threads = max(planned, min(_MOST, usable_cores() // sharing))
        self._lanes = tuple(_ThreadLane(device, number) for number in range(self.threads + 2))
        self._holds: dict[int, _StatefulLane] = {}
        self._unmeasured: Counter[Hashable] = Counter()

    @property
    def planned(self) -> tuple[ThreadStream, ...]:
        """The streams that plans know of."""
        return self.streams[: self._planned]

    @property
    def streams(self) -> tuple[ThreadStream, ...]:
        """Streams of all lanes."""
        return tuple(lane.stream for lane in self._lanes)

    def holds(self, owner: object) -> bool:
        """Return True if a firing of code with this state is under way, so that another has to queue behind it."""
        return id(owner) in self._holds

    def submit(
        self,
        work: Callable[..., object],
        args: tuple[Value, ...],
        deliver: Deliver,
        loop: AbstractEventLoop,
        *,
        expected_ns: float | None,
        planned: int = 0,
        owner: object = None,
        node: Hashable = None,
    ) -> Callable[[], bool]:
        """Do ``work(*args)`` on one of the threads, then call `deliver`; see `ThreadStream.submit`.

        The function that is returned withdraws the work: it returns False if the work has started, and otherwise
        `deliver` is not called.

        Args:
            work: what to call.
            args: its arguments.
            deliver: takes the outcome.
            loop: calls `deliver`.
            expected_ns: how long it is expected to take; None if that has not been measured.
            planned: the stream that the compiler has chosen.
            owner: the object whose state the work changes; None without one, or if it is safe on any threads.
            node: the firing's node: an unmeasured firing may be as long as other firings of its node under way.

        Raises:
            SessionClosedError: the device is closed, or this process is a fork of its owner.
        """
        hold = None if owner is None else self._holds.get(id(owner))
        likely_ns = _UNMEASURED_NS if expected_ns is None and self._unmeasured[node] else expected_ns
        queued_ns, computed_ns = perf_counter_ns(), 0
        lane = self._choose(likely_ns, self._lanes[planned], queued_ns) if hold is None else hold.lane
        is_unmeasured = expected_ns is None
        load_ns = _UNMEASURED_NS if expected_ns is None else int(expected_ns)

        def timed(*given: Value) -> object:
            nonlocal computed_ns
            before = thread_time_ns()
            try:
                return work(*given)
            finally:
                computed_ns = thread_time_ns() - before

        def settle() -> None:
            lane.load_ns -= load_ns
            if is_unmeasured:
                self._unmeasured[node] -= 1
                if not self._unmeasured[node]:
                    del self._unmeasured[node]
            if hold is not None:
                self._let_go(hold)

        def done(result: object, error: BaseException | None, started_ns: int, ended_ns: int) -> None:
            settle()
            lane.moved_ns = perf_counter_ns()
            if error is not None and error.__traceback__ is not None:
                # Drop the frame of the timed kernel, which refers to its arguments.
                error = error.with_traceback(error.__traceback__.tb_next)
            deliver(result, error, Times(lane.name, queued_ns, started_ns, ended_ns, computed_ns))

        def withdraw() -> bool:
            if not submission.withdraw():
                return False
            settle()
            return True

        submission = lane.stream.submit(timed, args, done, loop)
        if not lane.load_ns:
            lane.moved_ns = queued_ns
        lane.load_ns += load_ns
        if is_unmeasured:
            self._unmeasured[node] += 1
        if owner is not None:
            if hold is None:
                hold = self._holds[id(owner)] = _StatefulLane(lane, owner)
            hold.count += 1
        return withdraw

    def _choose(self, expected_ns: float | None, planned: _ThreadLane, now_ns: int) -> _ThreadLane:
        more = 1 if expected_ns is None or expected_ns <= MEDIUM_NS else 0
        if expected_ns is not None and expected_ns <= SHORT_NS:
            more = 2
        if not planned.load_ns:
            return planned
        best, least_ns = planned, planned.likely_ns(now_ns)
        for number, lane in enumerate(self._lanes[: self.threads + more]):
            load_ns = lane.likely_ns(now_ns) + (_SPARE_NS if number >= self.threads else 0)
            if load_ns < least_ns:
                best, least_ns = lane, load_ns
        return best

    def _let_go(self, hold: _StatefulLane) -> None:
        hold.count -= 1
        if not hold.count:
            del self._holds[id(hold.owner)]
