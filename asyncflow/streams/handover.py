"""An event loop that is never idle hands the GIL over to the threads it waits for.

A thread that is done with its work needs the GIL to say so. Python hands it over after 5 ms at most: a thread that has
waited that long makes the owner of the GIL release it. But the waiting time restarts whenever the GIL was free in
between. A loop frees the GIL in each turn, to poll sockets, and takes it back within microseconds. An idle core needs
far longer to wake the other thread. On a machine with idle cores, threads beside a loop that always has a callback
ready were seen to wait for seconds, some without end.

So a loop that expects work from a thread checks every 5 ms whether it has been busy all the while. If so, it sleeps for
as long as a thread needs to wake up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from time import perf_counter, sleep, thread_time
from weakref import WeakKeyDictionary

from asyncflow.streams.virtual import VirtualClockLoop

INTERVAL_S = 5e-3
"""As long as Python lets a thread wait."""

GAP_S = 50e-6
"""Seconds of one sleep; 110 µs with the system's overhead on the machine measured: 2 % of a busy loop's time."""

BUSY = 0.25
"""The share of a core from which on a loop may have been busy; others are idle often enough."""


class Handover:
    """Hand-over of the GIL by one event loop; the methods belong to the loop's thread.

    Attributes:
        awaited: how much is to come from threads.
    """

    __slots__ = ("_busy_s", "_context", "_is_armed", "_since_s", "awaited")

    def __init__(self, *, is_virtual: bool) -> None:
        self.awaited = 0
        self._busy_s = self._since_s = 0.0
        # A timer would inherit the context of the caller that arms it, and keep its objects alive.
        self._context = Context()
        # A timer on virtual time would make it pass; such a loop waits for threads by itself.
        self._is_armed = is_virtual

    def expect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count one more completion expected from a thread."""
        self.awaited += 1
        if not self._is_armed:
            self._arm(loop)

    def arrived(self) -> None:
        """Count one expected completion less: it has come, or is no longer awaited."""
        self.awaited -= 1

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_armed = True
        self._busy_s, self._since_s = thread_time(), perf_counter()
        loop.call_later(INTERVAL_S, self._look, loop, context=self._context)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_armed = False
        if self.awaited > 0:
            if thread_time() - self._busy_s > BUSY * (perf_counter() - self._since_s):
                sleep(GAP_S)
            self._arm(loop)


_handovers: WeakKeyDictionary[asyncio.AbstractEventLoop, Handover] = WeakKeyDictionary()


def handover_of(loop: asyncio.AbstractEventLoop) -> Handover:
    """The loop's; on its thread."""
    found = _handovers.get(loop)
    if found is None:
        found = _handovers[loop] = Handover(is_virtual=isinstance(loop, VirtualClockLoop))
    return found


@contextmanager
def awaiting_a_thread() -> Iterator[None]:
    """Mark a block whose awaited result comes from a thread."""
    loop = asyncio.get_running_loop()
    handover = handover_of(loop)
    handover.expect(loop)
    try:
        yield
    finally:
        handover.arrived()
