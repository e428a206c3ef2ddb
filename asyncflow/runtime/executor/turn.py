"""A session's share of the event loop: the time that its runs may take before other coroutines get their turn.

All runs of a session share one budget of `BURST_NS` per pass of the event loop. When it is spent, runs with ready work
wait in a queue. The queue goes on in the next pass, first come, first served.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from typing import Protocol
from weakref import ref

from asyncflow.runtime.executor.kernels.limited_calls import LimitedCalls
from asyncflow.runtime.executor.kernels.single_call import quiet_context
from asyncflow.streams.loop import burst_clock, clock_of

BURST_NS = 1_000_000
"""Longest time for which a session's runs may hold the event loop (1 ms)."""


class Driven(Protocol):
    """Work of one run that goes on in a session's share of the event loop."""

    is_queued: bool
    """True while it waits for a later pass."""

    def drive(self, deadline_ns: int, /) -> bool:
        """Goes on until nothing is ready (False) or the deadline has passed (True)."""


class Flushed(Protocol):
    """Work that several runs share, which is started where nothing else can go on."""

    def flush(self, *, is_idle: bool) -> bool:
        """Start due work; see `Batches.flush`."""


class Turn:
    """The queue of runs with ready work, and the budget of the current pass of the event loop."""

    __slots__ = (
        "_batches",
        "_burst_end",
        "_queue",
        "_quiet",
        "_scheduled",
        "clock",
        "limited",
        "loop",
        "now",
        "number",
    )

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self.now = burst_clock(loop)
        """Nanoseconds by which the budget is measured."""
        self.clock = clock_of(loop)
        """Clock in nanoseconds, as a trace shows them."""
        self._queue: deque[Driven] = deque()
        self._quiet = quiet_context()
        self._scheduled = False
        self._burst_end = 0
        self.number = 0
        """Counts passes, so that failures of one pass can be told from later ones."""
        self._batches: ref[Flushed]
        self.limited: LimitedCalls
        """Functions with limits, and the calls that wait for their turn."""

    @property
    def batches(self) -> Flushed:
        """Firings that are computed together; they hold the turn, and it does not hold them."""
        batches = self._batches()
        assert batches is not None
        return batches

    @batches.setter
    def batches(self, batches: Flushed) -> None:
        self._batches = ref(batches)

    def drive_now(self, driven: Driven) -> None:
        """Drive at once if the current pass has time left; queue the rest."""
        if not self.has_time():
            self.enqueue(driven)
            return
        # A copy, as a run may be driven from inside another, and a context cannot be entered twice.
        if self._quiet.copy().run(driven.drive, self._burst_end):
            self.enqueue(driven)

    def drive_in_caller(self, driven: Driven) -> None:
        """Drive a run in its caller's task, which was woken for that; queue the rest.

        The task has waited for its turn already, so it gets an eighth of a pass at least: it would have to wait for the
        next pass, and to be woken again, for ever while other runs are always ready.
        """
        self.has_time()  # starts a pass if its time is over
        if self._quiet.copy().run(driven.drive, max(self._burst_end, self.now() + BURST_NS // 8)):
            self.enqueue(driven)

    @property
    def is_idle(self) -> bool:
        """True if no run has ready work that waits for the next pass."""
        return not self._queue

    def has_time(self) -> bool:
        """Return True if work may start in the current pass."""
        if self._burst_end == 0:
            self._burst_end = self.now() + BURST_NS
            self.wake()
            return True
        return not self._queue and self.now() < self._burst_end

    def count(self) -> int:
        """Return the number of the current pass; later passes have higher ones."""
        self.wake()
        return self.number

    def enqueue(self, driven: Driven) -> None:
        """Drive in a later pass, or later in this one."""
        if not driven.is_queued:
            driven.is_queued = True
            self._queue.append(driven)
            self.wake()

    def wake(self) -> None:
        """Has a pass come, though no run may have ready work."""
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._pass)

    def _pass(self) -> None:
        self._scheduled = False
        self._burst_end = 0
        self.number += 1
        queue, batches = self._queue, self._batches()
        end = self.now() + BURST_NS
        goes_on = True
        while goes_on:
            while queue and self.now() < end:
                driven = queue.popleft()
                driven.is_queued = False
                if self._quiet.copy().run(driven.drive, end):
                    self.enqueue(driven)
            # A request computed alone goes on in this pass: waiting would cost more than batching gains.
            goes_on = batches is not None and batches.flush(is_idle=not queue) and bool(queue) and self.now() < end
        if queue:
            self.wake()
