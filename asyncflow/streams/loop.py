"""Event loops: `run` a coroutine on uvloop where there is one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Never, TypeGuard, TypeVar

from asyncflow.streams.virtual import VirtualClockLoop

_LOOK_NS = 20_000
"""The time that looking at the clock counts as, on a virtual one."""

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:  # Windows has no uvloop
    from asyncio import new_event_loop


T = TypeVar("T")


def run(main: Coroutine[object, Never, T], *, debug: bool | None = None) -> T:
    """Runs `main` to its end on a new event loop: uvloop's where uvloop is installed, else asyncio's.

    Raises:
        TypeError: `main` is not a coroutine.
        RuntimeError: an event loop is running in this thread; await `main` there.

    >>> async def main():
    ...     return 42
    >>> run(main())
    42
    """
    if not asyncio.iscoroutine(main):
        raise TypeError(_not_a_coroutine(main))
    if is_running_here():
        main.close()  # or Python would warn that it was never awaited
        raise RuntimeError("af.run starts an event loop, and one is running in this thread already: await it instead")
    with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
        return runner.run(main)


def is_running_here() -> bool:
    """Return True if this thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _not_a_coroutine(main: object) -> str:
    if callable(main):
        name = getattr(main, "__name__", "main")
        return f"af.run takes a coroutine, not the function that makes one; call it: af.run({name}())"
    return f"af.run takes a coroutine; got {type(main).__name__} {main!r}"


def is_virtual(loop: asyncio.AbstractEventLoop) -> TypeGuard[VirtualClockLoop]:
    """Return True if the loop's clock is virtual."""
    return isinstance(loop, VirtualClockLoop)


def thread_waits(loop: asyncio.AbstractEventLoop) -> AbstractContextManager[None]:
    """Inside, a thread waits for what `loop` does: virtual time must not stand still until that thread is done."""
    return loop.outside_waits() if is_virtual(loop) else nullcontext()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """Return the clock of traces, in nanoseconds: the virtual clock of `loop` where the loop has one."""
    return loop.time_ns if is_virtual(loop) else perf_counter_ns


def burst_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], int]:
    """Nanoseconds by which a session's share of `loop` is measured.

    Computing takes no time on a virtual clock, so the clock counts its calls there. Runs then take turns, and at the
    same points every time.
    """
    return itertools.count(step=_LOOK_NS).__next__ if is_virtual(loop) else perf_counter_ns
