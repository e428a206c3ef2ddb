"""An event loop on virtual time: where another loop would sleep, it jumps to the next timer.

Rules, in the order in which they are tried whenever no callback is ready:

1. Timers that are due run.
2. While work is out on threads (`run_in_executor`, `asyncio.to_thread`, `VirtualClockLoop.outside_work`), the loop
   really waits for it and time stands still: no timeout passes because a thread was slow. Work that itself waits for
   the loop (`VirtualClockLoop.outside_waits`) does not stop time.
3. Time jumps to the next timer. A tick is one such jump; everything due at that nanosecond runs in it, in the order in
   which it was scheduled.
4. While sockets, pipes or signal handlers are registered, the loop really waits for them.
5. Nothing can ever happen again: `run_until_complete` and `run_forever` raise, rather than hang.

Time is an integer number of nanoseconds. asyncio's API speaks float seconds, so each time is rounded once, when its
timer is made. Times round up to the next nanosecond, unless the excess is only a float's rounding error (0.1 + 0.2 is
0.3).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import selectors
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar, TypeVarTuple, Unpack

from asyncflow.values import Value

_NS_PER_S = 1_000_000_000
_ROUNDING_ULPS = 4
"""Units in the last place by which a sum or two of float seconds may be off."""

_FEW_CANCELLED = 100
_MOST_SHOWN = 5

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock begins at 0.0 and moves only when nothing else is left to do.

    What runs on it is deterministic as long as it does not depend on threads, sockets or signals. A thread of the
    program's own that will call `call_soon_threadsafe` is unknown to the loop unless it is announced by `outside_work`.

    Args:
        start_ns: where the clock begins.

    Attributes:
        now_ns: the virtual time in nanoseconds, as `time_ns` gives it; only the loop sets it.
        on_tick: called after each jump with the new time in nanoseconds, before anything due then runs.

    >>> loop = VirtualClockLoop()
    >>> loop.run_until_complete(asyncio.sleep(3600))
    >>> loop.time(), loop.ticks
    (3600.0, 1)
    >>> loop.close()
    """

    now_ns: int
    on_tick: Callable[[int], None] | None

    def __init__(self, *, start_ns: int = 0) -> None:
        self.now_ns = start_ns
        self._now_s = start_ns / _NS_PER_S
        # (time, order of scheduling, timer). Cancelled timers stay until they reach the top or become too many.
        self._timers: list[tuple[int, int, _Timer]] = []
        self._order = itertools.count()  # breaks ties: timers of one nanosecond run in the order of their calls
        self._cancelled = 0
        self._outside = 0
        self._outside_waiting = 0
        self._signals: set[int] = set()
        self._ticks = 0
        self.on_tick = None
        super().__init__(_VirtualSelector(self))

    # -- the clock -----------------------------------------------------------------------------------------------

    @property
    def ticks(self) -> int:
        """Number of jumps of the virtual time."""
        return self._ticks

    def time_ns(self) -> int:
        """The virtual time in nanoseconds."""
        return self.now_ns

    def time(self) -> float:
        """The virtual time in seconds; never behind the time that a timer was made for, once that timer runs."""
        return self._now_s

    # -- timers --------------------------------------------------------------------------------------------------

    def call_at_ns(
        self, when_ns: int, callback: Callable[[Unpack[_Args]], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call ``callback(*args)`` when the clock shows exactly `when_ns`; as soon as possible if that has passed."""
        return self._schedule(when_ns, when_ns / _NS_PER_S, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Args]], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call ``callback(*args)`` at `when` seconds of virtual time."""
        return self._schedule(_as_ns(when), when, callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[_Args]], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call ``callback(*args)`` after `delay` seconds of virtual time, exact to the nanosecond."""
        delay_ns = _as_ns(delay)
        when_ns = None if delay_ns is None else self.now_ns + delay_ns
        return self._schedule(when_ns, self._now_s + delay, callback, args, context)

    def _schedule(
        self,
        when_ns: int | None,
        when: float,
        callback: Callable[..., object],
        args: tuple[Value, ...],
        context: Context | None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        if self.get_debug():
            self._check_thread()  # type: ignore[attr-defined]
        timer = _Timer(when, callback, args, self, context)
        timer.waiting = when_ns is not None
        if when_ns is not None:
            heapq.heappush(self._timers, (when_ns, next(self._order), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        # Each run with a timeout leaves a cancelled timer behind, so that they must not pile up.
        if isinstance(handle, _Timer) and handle.waiting:
            self._cancelled += 1
            if self._cancelled > max(_FEW_CANCELLED, len(self._timers) // 2):
                self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
                heapq.heapify(self._timers)
                self._cancelled = 0

    def _next_ns(self) -> int | None:
        """Return the time of the next timer; None if there is no timer."""
        while self._timers:
            when_ns, _, timer = self._timers[0]
            if not timer.cancelled():
                return when_ns
            heapq.heappop(self._timers)
            self._cancelled -= 1
        return None

    def _run_due(self) -> bool:
        """Hand over the timers that are due; False if none is."""
        any_due = False
        while (when_ns := self._next_ns()) is not None and when_ns <= self.now_ns:
            timer = heapq.heappop(self._timers)[2]
            timer.waiting = False
            # Not one ulp early: code may compare the time with the time it asked for.
            self._now_s = max(self._now_s, timer.when())
            self._add_callback(timer)  # type: ignore[attr-defined]
            any_due = True
        return any_due

    # -- jumping -------------------------------------------------------------------------------------------------

    def _move_on(self, files: int) -> bool:
        """Jump to the next timer; False if the loop has to wait for the world outside, which may use `files`.

        Raises:
            RuntimeError: there is nothing to wait for.
        """
        if self._outside > self._outside_waiting:  # a thread computes: time stands still until it reports
            return False
        when_ns = self._next_ns()
        if when_ns is None:
            if files or self._signals or self._outside:
                return False
            raise RuntimeError(self._deadlock())
        self.now_ns = when_ns
        self._now_s = max(self._now_s, when_ns / _NS_PER_S)
        self._ticks += 1
        if self.on_tick is not None:
            self.on_tick(when_ns)
        self._run_due()
        return True

    def _deadlock(self) -> str:
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: _natural(task.get_name()))
        waits = [f"{task.get_name()} in {_where(task.get_coro())}" for task in tasks[:_MOST_SHOWN]]
        if len(tasks) > _MOST_SHOWN:
            waits.append(f"and {len(tasks) - _MOST_SHOWN} more")
        return (
            f"every task waits and no timer is pending: at {self._now_s} s of virtual time nothing can ever happen "
            f"again; waiting: {'; '.join(waits) or 'no task at all'}. If a thread of your own will wake one of them, "
            "say so with loop.outside_work()"
        )

    # -- the world outside ---------------------------------------------------------------------------------------

    @contextmanager
    def outside_work(self) -> Iterator[None]:
        """Let time stand still, and take silence for no deadlock, while work goes on that the loop cannot see.

        Enter and leave it on the loop's thread. Work on executors is seen without it.
        """
        self._outside += 1
        try:
            yield
        finally:
            self._outside -= 1

    @contextmanager
    def outside_waits(self) -> Iterator[None]:
        """Let time move although one piece of outside work is under way, as that work waits for the loop itself.

        Enter and leave it on the loop's thread.
        """
        self._outside_waiting += 1
        try:
            yield
        finally:
            self._outside_waiting -= 1

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Args]], _Result], *args: *_Args
    ) -> asyncio.Future[_Result]:
        """Call ``func(*args)`` on a thread; time stands still until its result is here, or is no longer awaited."""
        future = super().run_in_executor(executor, func, *args)
        self._outside += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _future: object) -> None:
        self._outside -= 1

    async def shutdown_default_executor(self, *args: float | None, **options: Any) -> None:
        """Wait for the threads of the default executor; its timeout is virtual, and so never passes."""
        with self.outside_work():
            await super().shutdown_default_executor(*args, **options)

    def add_signal_handler(self, sig: int, callback: Callable[[Unpack[_Args]], object], *args: *_Args) -> None:
        """Call ``callback(*args)`` when the process receives the signal."""
        super().add_signal_handler(sig, callback, *args)
        self._signals.add(sig)

    def remove_signal_handler(self, sig: int) -> bool:
        """Undo `add_signal_handler`; False if there was no handler."""
        self._signals.discard(sig)
        return super().remove_signal_handler(sig)

    def close(self) -> None:
        """Close the loop; timers that are left never run."""
        super().close()
        self._timers.clear()


class _Timer(asyncio.TimerHandle):
    """A timer that knows whether it is in the heap."""

    __slots__ = ("waiting",)

    waiting: bool


class _VirtualSelector(selectors.DefaultSelector):
    """The selector in which the loop would wait: asyncio passes a timeout of 0 if a callback is ready, else None."""

    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        due = self._loop._run_due()
        if events or due or timeout == 0:
            return events
        # The loop's own pipe, by which threads and signals wake it, is always registered.
        return events if self._loop._move_on(len(self.get_map()) - 1) else super().select(None)


def _as_ns(seconds: float) -> int | None:
    """Nanoseconds, rounded up, but for the rounding error of a float; None for never.

    A positive delay is at least 1 ns: a program that waits for a moment in ever smaller steps has to get there.
    """
    if seconds == math.inf:
        return None
    ns = seconds * 1e9
    nearest = round(ns)
    return nearest if abs(ns - nearest) <= _ROUNDING_ULPS * math.ulp(ns) else math.ceil(ns)


def _where(coroutine: object) -> str:
    """Return the chain of awaits from the task's coroutine to the innermost one: ``main (serve.py:12) > Queue.get
    (...)``.
    """
    steps: list[str] = []
    while (place := _suspension(coroutine)) is not None:
        code, frame, awaited = place
        if frame is None:
            break
        steps.append(f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})")
        coroutine = awaited
    return " > ".join(steps) or repr(coroutine)


def _suspension(coroutine: object) -> tuple[CodeType, FrameType | None, object] | None:
    """Return code, frame and awaited object of a coroutine, generator or asynchronous generator; None for other
    objects.
    """
    for prefix, awaited in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
        code = getattr(coroutine, f"{prefix}_code", None)
        if isinstance(code, CodeType):
            return code, getattr(coroutine, f"{prefix}_frame"), getattr(coroutine, awaited)
    return None


def _natural(name: str) -> tuple[str, int]:
    """Sort key that puts Task-2 before Task-10."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, -1)
