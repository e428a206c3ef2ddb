"""Records of a traced run: firings, transfers, run spans and memory samples, in nanoseconds.

The runtime only appends to these lists; `asyncflow.profiler` turns them into timelines and tables, and nothing here
knows of it. Times are `time.perf_counter_ns`, or the virtual clock's time of the run.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from operator import add
from pathlib import Path
from threading import RLock
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from asyncflow.entered import Entered
from asyncflow.errors import counted
from asyncflow.runtime.watch.picks import PickLog

LOOP: Final = "loop"
"""The op of a loop that ran as a whole, inside a region; an interpreted loop is its nodes."""
LATE_COPY: Final = "late copy"
"""The op of a copy that brought a saved value back after its reader had begun to wait."""
WHOLE: Final = frozenset({LOOP, "region"})
"""Ops of several nodes that ran as a whole."""


# Records are tuples, as a trace may hold a million: objects with a `__dict__` would take several times the memory.
class Firing(NamedTuple):
    """A firing of a node: the times at which it became ready, its kernel started, and its outputs were there.

    From ``started_ns`` to ``ended_ns`` it computed, without a pause, on ``stream``; waiting has other names. A firing
    that gives way in between, or goes on elsewhere, is several of these: see ``part``.
    """

    run: int
    """Unique in the process."""
    node: str
    op: str
    tag: str
    """Frames and iterations, such as ``outer/3/inner/7``; empty outside loops."""
    device: str
    """Device name, such as ``cpu:0``."""
    stream: str
    """``inline`` (on the event loop), ``compute`` and ``compute:1`` (threads, streams), ``async`` (a coroutine op,
    which waits more than it computes); on a simulated device also ``host`` (a kernel on the host) and ``h2d``, ``d2h``
    and ``peer`` (copies)."""
    scheduled_ns: int
    started_ns: int
    ended_ns: int
    outputs: str
    """``dtype[shape]`` of each output, such as ``float32[64,64]``."""
    status: str
    """``ok``, ``error`` or ``cancelled``."""
    location: str
    """``file:line`` of the user's code that built the node."""
    queued_ns: int | None = None
    """Time at which it was given to a stream's thread, or began to wait for its turn by the limits of its function; up
    to ``started_ns`` it waited for others there. None: it did not."""
    part: int = 0
    """Counts the times in which one firing computed: 0 for the first, or only one."""
    iterations: int | None = None
    """Of a loop that ran as a whole, once it has ended."""
    nbytes: int = 0
    """Of a copy."""
    attempt: int = 0
    """Number of the attempt of a function with limits, from 1, each of which is a record of its own; 0 for others."""

    @property
    def label(self) -> str:
        """The name that people read: the node, and of a loop how often it went around."""
        if self.attempt > 1:
            return f"{self.node} (attempt {self.attempt})"
        if self.op != LOOP:
            return self.node
        around = "" if self.iterations is None else f", {counted(self.iterations, 'iteration')}"
        return f"{self.node} (loop{around})"

    @property
    def computing_ns(self) -> int:
        """Nanoseconds of computing; 0 for a coroutine, of which that is unknown."""
        return 0 if self.stream == "async" else self.ended_ns - self.started_ns

    @property
    def awaiting_ns(self) -> int:
        """Nanoseconds that a coroutine took, which is mostly waiting."""
        return self.ended_ns - self.started_ns if self.stream == "async" else 0

    @property
    def queueing_ns(self) -> int:
        """Nanoseconds of waiting for its stream's thread, or for its turn by the limits of its function."""
        return 0 if self.queued_ns is None else self.started_ns - self.queued_ns

    @property
    def pending_ns(self) -> int:
        """Nanoseconds between readiness and that: the event loop was busy, or it had given way to others."""
        return (self.started_ns if self.queued_ns is None else self.queued_ns) - self.scheduled_ns


class RunSpan(NamedTuple):
    """One ``await session.run(...)``."""

    run: int
    label: str
    started_ns: int
    ended_ns: int
    status: str
    """``ok``, ``error``, ``cancelled`` or ``deadline``."""


class Transfer(NamedTuple):
    """A value that went from one device to another: what a Recv took."""

    run: int
    node: str
    """The Recv."""
    tag: str
    source: str
    """Device name, such as ``sim:0``."""
    target: str
    sent_ns: int
    received_ns: int
    nbytes: int
    """0 for a control edge, and for values on the host."""


class MemorySample(NamedTuple):
    """Bytes a device held at one moment.

    Attributes:
        saved, host, disk, moved_out, moved_in: see `DeviceMemory`.
        coming: of those saved, the ones on their way back.
    """

    device: str
    time_ns: int
    nbytes: int
    saved: int = 0
    host: int = 0
    disk: int = 0
    moved_out: int = 0
    moved_in: int = 0
    coming: int = 0


class DeviceRequests(NamedTuple):
    """Counts of the requests of one run to one card.

    Moves of saved values are among the copies. The requests to a simulated card are simulated.
    """

    run: int
    device: str
    """Name of the card, such as ``cuda:0`` or ``sim:0``."""
    launches: int
    """Kernels launched one by one, not as parts of a CUDA graph. The kernel of a node counts once, also if CuPy makes
    several launches of one node."""
    graph_launches: int
    copies: int
    """Within the card's memory, to it, and from it."""
    allocations: int
    """Arrays; the pool has memory for most of them."""


_Records: TypeAlias = "tuple[list[Firing], list[MemorySample]]"

_making = RLock()
"""A lock held while records are made: two readers must not make the same records. It serves all traces.

A finalizer or signal handler may read a trace on the thread that makes records. A plain lock would stop that thread for
ever.
"""


class Trace:
    """A trace: the record of one or more runs.

    Pass it as ``session.run(..., trace=trace)``, or use it as a context manager: then every run that starts inside is
    recorded, in whatever session. A trace made inside such a block records for itself; its records are added to the
    outer one when the outer block ends. At most ``capacity`` firings are kept; later ones are counted in ``dropped``.

    >>> with Trace() as trace:
    ...     pass  # await session.run(...)
    >>> len(trace.runs)
    0

    Records of launched work are made when they are read: a loop launches thousands of kernels, and its program may be
    the one whose time counts.

    Attributes:
        capacity: the most firings that are kept.
        detail: ``"node"`` records every node, for which traced runs are interpreted; ``"region"`` what really runs, a
            region as one firing. None takes the detail of the trace in whose block this one is made, or ``"node"``.
        runs: the runs that have ended.
        transfers: the values that went between devices.
        requests: counts of the requests of each run to each card, also where firings were dropped.
        dropped: number of firings that were not kept.
        interpreted: number of runs that traces made inside the block have recorded with every node, where this one
            would not.
        order: writes down, or says, which firing is next; None for a trace alone.
    """

    __slots__ = (
        "_added",
        "_firings",
        "_inner",
        "_is_making",
        "_made",
        "_memory",
        "_unmade",
        "capacity",
        "detail",
        "dropped",
        "interpreted",
        "order",
        "requests",
        "runs",
        "transfers",
    )

    def __init__(
        self,
        *,
        capacity: int = 1_000_000,
        detail: Literal["node", "region"] | None = None,
        firings: Iterable[Firing] = (),
        runs: Iterable[RunSpan] = (),
        memory: Iterable[MemorySample] = (),
        transfers: Iterable[Transfer] = (),
        requests: Iterable[DeviceRequests] = (),
        dropped: int = 0,
    ) -> None:
        """Begin a record, with these records in it.

        Raises:
            ValueError: `detail` is none of the three.
        """
        self.capacity = capacity
        self.detail = detail
        self.runs = list(runs)
        self.transfers = list(transfers)
        self.requests = list(requests)
        self.dropped = dropped
        self.interpreted = 0
        self.order: PickLog | None = None
        self._firings = list(firings)
        self._memory = list(memory)
        # A launch of a simulated card adds a function here: making its records takes as long as simulating it.
        self._unmade: deque[Callable[[], _Records]] = deque()
        # Two counters: one thread may add records while another reads, and changes to a shared counter could be lost.
        self._added = self._made = 0
        self._is_making = False
        self._inner: list[Trace] = []  # traces made inside the block, not added yet
        if self.detail not in (None, "node", "region"):
            raise ValueError(f"the detail of a trace is 'node' or 'region'; got {self.detail!r}")
        outer = _current.innermost()
        if self.detail is None:
            self.detail = "node" if outer is None else outer.detail
        if outer is not None:
            outer._inner.append(self)

    @property
    def firings(self) -> list[Firing]:
        """Firings, in the order in which they were recorded."""
        self._make()
        return self._firings

    @firings.setter
    def firings(self, firings: list[Firing]) -> None:
        self._make()
        self._firings = firings

    @property
    def memory(self) -> list[MemorySample]:
        """Samples of the memory of devices, in the order in which they were recorded."""
        self._make()
        return self._memory

    @property
    def count(self) -> int:
        """Number of firings."""
        return len(self._firings) + self._added - self._made

    def _add_later(self, count: int, make: Callable[[], _Records]) -> None:
        """Add this number of firings, with samples of memory, which a function makes once one is read."""
        if count:
            self._added += count
            self._unmade.append(make)

    def _add_one(self, firing: Firing, samples: list[MemorySample]) -> None:
        """Add a firing and its samples of memory, behind all records that are still to be made."""
        if self._unmade:  # not by `firings`, which would make a simulation's records while its program runs
            self._add_later(1, lambda: ([firing], samples))
        else:
            self._firings.append(firing)
            self._memory += samples

    def _ask(self, asked: DeviceRequests) -> None:
        """Add counts of a run and card to earlier counts of the same run and card, if there are any."""
        # All executors of a run end their records together, so counts of other runs do not come between.
        for place in range(len(self.requests) - 1, -1, -1):
            run, device, *counts = self.requests[place]
            if run != asked.run:
                break
            if device == asked.device:
                self.requests[place] = DeviceRequests(run, device, *map(add, counts, asked[2:]))
                return
        self.requests.append(asked)

    def _make(self) -> None:
        if not self._unmade:  # nearly every reader returns here, so no lock is taken
            return
        with _making:
            if self._is_making:  # this thread is inside the loop below: it reads the records made so far
                return
            self._is_making = True
            try:
                # A failing function stays in front: the next reader gets the error again, instead of a gap.
                while self._unmade:
                    firings, samples = self._unmade[0]()
                    self._firings += firings
                    self._memory += samples
                    self._made += len(firings)
                    self._unmade.popleft()
            finally:
                self._is_making = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self._compared() == other._compared()

    __hash__ = None  # type: ignore[assignment]  # records are added as time goes by

    def _compared(self) -> tuple[object, ...]:
        records = self.firings, self.runs, self.memory, self.transfers, self.requests
        return self.capacity, self.detail, self.dropped, *records

    def __repr__(self) -> str:
        dropped = f", {self.dropped} dropped" if self.dropped else ""
        return (
            f"<Trace: {counted(len(self.runs), 'run')}, {counted(self.count, 'firing')}{dropped}, "
            f"{counted(len(self.transfers), 'transfer')}, detail {self.detail!r}>"
        )

    def __enter__(self) -> Self:
        _current.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _current.leave(self)
        for inner in self._inner:
            self._add(inner)
        self._inner.clear()

    def _add(self, inner: Trace) -> None:
        # Above the capacity the first firings are kept, as when a trace records too many itself.
        room = max(0, self.capacity - self.count)
        self.firings.extend(inner.firings[:room])
        self.dropped += inner.dropped + len(inner.firings[room:])
        self.runs += inner.runs
        self.interpreted += len(inner.runs) if inner.detail == "node" != self.detail else inner.interpreted
        self.memory.extend(inner.memory)
        self.transfers += inner.transfers
        self.requests += inner.requests


_current: Entered[Trace] = Entered("asyncflow_trace")


current_trace = _current.innermost
"""The trace whose ``with`` block this code runs in, or None."""


Writer = Callable[[Trace, Path], None]
# A list of at most one element, which a function can fill without a `global` statement.
_writers: list[Writer] = []


def install_writer(writer: Writer) -> None:
    """Tells the runtime how to write a trace to a file; the profiler does, which the runtime must not know."""
    _writers[:] = [writer]


def write_trace(trace: Trace, path: Path) -> None:
    """Write `trace` in the format that the path's suffix names."""
    if not _writers:
        _ = sys.modules["asyncflow"].profiler  # importing it installs its writer
    _writers[0](trace, path)
