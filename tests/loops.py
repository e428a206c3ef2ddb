"""Event loops on the clock of a test: their time moves when a timer fires, and no pause of the machine fires one early.

A timer fires after the loop has spent its delay in slices. A slice lasts a sixteenth of the rest, or a millisecond,
and counts as no more than that, however long it took. If the whole process was stopped meanwhile, work that was under
way on threads goes on first, as it would have without the stop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVarTuple, Unpack

import pytest
import uvloop

from asyncflow import errors
from asyncflow.streams import loop as library
from tests.clocks import ABOUT_THREADS, CLOCKS, WorkClock

_Args = TypeVarTuple("_Args")

# Below a task stands `FailingUvLoop`, which says of the user's line no more than asyncio does.
errors._STARTERS = (*errors._STARTERS, __file__)

LEAST_SLICE_S, MOST_SLICE_S = 0.001, 10.0
PARTS = 16

if TYPE_CHECKING:
    _Base = asyncio.SelectorEventLoop
else:
    _Base = object


class _SteadyTimers(_Base):
    """The timers of a loop; a subclass calls `_pass` at the end of each slice."""

    _clock: WorkClock

    def _begin(self, clock: WorkClock) -> None:
        self._clock = clock
        self._passed_s, self._looked_s = 0.0, clock.machine_s()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()

    def time(self) -> float:
        return self._clock.loop_s()

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Args]], object],
        *args: *_Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        due_s = self._passed_s + self._clock.waits_s(max(0.0, when - self.time()))
        heapq.heappush(self._timers, (due_s, next(self._count), timer))
        self._cut()
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave the timer in: `_slice` drops it, as it has no callback any more."""

    def _slice(self) -> float | None:
        """Return the length of the next slice in seconds; None if there is no timer."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        left_s = max(0.0, self._timers[0][0] - self._passed_s)
        return min(left_s, max(left_s / PARTS, LEAST_SLICE_S), MOST_SLICE_S)

    def _cut(self) -> None:
        """Make room for a timer that may be due before the slice ends."""

    def _pass(self, most_s: float) -> list[asyncio.TimerHandle]:
        """Count the slice that ends now; return the timers that fire."""
        now_s = self._clock.machine_s()
        self._passed_s += self._clock.counted_s(now_s - self._looked_s, most_s)
        self._looked_s = now_s
        due = []
        while self._timers and self._timers[0][0] <= self._passed_s:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                if getattr(timer._callback, "__module__", "") not in ABOUT_THREADS:  # type: ignore[attr-defined]
                    self._clock.reach(timer.when())
                due.append(timer)
        return due

    def close(self) -> None:
        super().close()
        self._timers.clear()


class SteadyLoop(_SteadyTimers, asyncio.SelectorEventLoop):
    """asyncio's loop."""

    def __init__(self, clock: WorkClock) -> None:
        self._begin(clock)
        super().__init__(_Selector(self))

    def select_slice(self, timeout: float | None, select: Callable[[float | None], list[Any]]) -> list[Any]:
        """Wait for events, for a slice at most; asyncio gives a timeout of 0 if a callback is ready, else None."""
        slice_s = self._slice()
        events = select(0 if timeout == 0 else slice_s)
        for timer in self._pass(slice_s or 0.0):
            self._ready.append(timer)  # type: ignore[attr-defined]
        return events


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: SteadyLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        return self._loop.select_slice(timeout, super().select)


class FailingUvLoop(uvloop.Loop):
    """uvloop's, which ends with the error of a test that has taken too long.

    The alarm of pytest raises that error wherever the program is. If it only waits, it is in the loop, and uvloop takes
    it for the error of a callback, tells of it, and waits on.
    """

    _failure: BaseException | None = None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, pytest.fail.Exception):
            self._failure = error
            self.stop()
        else:
            super().call_exception_handler(context)

    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        finally:
            if (failure := self._failure) is not None:
                self._failure = None
                raise failure


class SteadyUvLoop(_SteadyTimers, FailingUvLoop):  # type: ignore[misc]
    """uvloop's."""

    def __init__(self, clock: WorkClock) -> None:
        self._begin(clock)
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0
        self._no_context = Context()  # the alarm keeps nothing alive that a caller has
        super().__init__()

    def _cut(self) -> None:
        slice_s = self._slice()
        if slice_s is None:
            return
        if self._alarm is None:
            self._looked_s = self._clock.machine_s()
        elif slice_s >= self._alarm_s / 2:
            return
        else:
            self._alarm.cancel()
        self._alarm_s = slice_s
        self._alarm = uvloop.Loop.call_later(self, slice_s, self._ring, context=self._no_context)

    def _ring(self) -> None:
        self._alarm = None
        try:
            for timer in self._pass(self._alarm_s):
                if not timer.cancelled():
                    timer._run()
        finally:
            if not self.is_closed():
                self._cut()


KINDS: dict[str, Callable[[WorkClock], asyncio.AbstractEventLoop]] = {"asyncio": SteadyLoop, "uvloop": SteadyUvLoop}

_asyncio_loop = asyncio.new_event_loop


def new_loop() -> asyncio.AbstractEventLoop:
    """Return one of asyncio's loops, on the clock of the test."""
    return _asyncio_loop() if CLOCKS.current is None else KINDS["asyncio"](CLOCKS.current)


def new_uvloop() -> asyncio.AbstractEventLoop:
    """Return one of uvloop's loops, on the clock of the test."""
    return FailingUvLoop() if CLOCKS.current is None else KINDS["uvloop"](CLOCKS.current)


def install() -> None:
    """Have `asyncio.run` and `asyncflow.run` make such loops, too."""
    asyncio.new_event_loop = asyncio.events.new_event_loop = new_loop
    library.new_event_loop = new_uvloop
