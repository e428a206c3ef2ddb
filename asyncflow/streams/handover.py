"""An event loop that is never idle hands the GIL over to the threads it waits for.

A thread that is done with its work needs the GIL to say so. Python means to give it after 5 ms at most: a thread that
has waited so long makes the one that has the GIL hand it over. But it waits anew whenever the GIL has been free in
between, and a loop frees it in each of its turns, to look for sockets, and has it back within microseconds, long before
a core that was idle has woken the other thread. Beside a loop that always has a callback ready, on a machine with idle
cores, threads were seen to wait for seconds, and some for as long as anyone looked.

So where a loop is told of something that is to come from a thread, it looks every 5 ms whether it has been busy all the
while, and if so sleeps, for as long as it takes a thread to wake up.
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
"""With what the system adds to it, 110 µs on the machine where it was measured: 2 % of a busy loop's time."""

BUSY = 0.25
"""The share of a core from which on a loop may have been busy; others are idle often enough."""


class Handover:
    """Of one event loop; its methods belong to the loop's thread.

    Attributes:
        awaited: how much is to come from threads.
    """

    __slots__ = ("_busy_s", "_context", "_is_armed", "_since_s", "awaited")

    def __init__(self, *, is_virtual: bool) -> None:
        self.awaited = 0
        self._busy_s = self._since_s = 0.0
        # A timer would have the context of who happened to arm it, and keep all that is in there.
        self._context = Context()
        # A timer on virtual time would make it pass; such a loop waits for threads by itself.
        self._is_armed = is_virtual

    def expect(self, loop: asyncio.AbstractEventLoop) -> None:
        """Something more is to come from a thread."""
        self.awaited += 1
        if not self._is_armed:
            self._arm(loop)

    def arrived(self) -> None:
        """It has come, or nobody waits for it any more."""
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
    """A block in which what is awaited comes from a thread."""
    loop = asyncio.get_running_loop()
    handover = handover_of(loop)
    handover.expect(loop)
    try:
        yield
    finally:
        handover.arrived()
