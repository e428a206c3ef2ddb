"""An event loop that looks at completion flags by itself, at each of its turns.

A thread that sleeps on a card's event needs 60 µs to wake an idle loop. It needs milliseconds beside a busy one, which
has the GIL. A look at a flag takes a tenth of a microsecond. So while tickets are open, the loop looks at each turn:

| the loop | it looks | a ticket takes |
|---|---|---|
| is busy | at each turn | the rest of the turn |
| is idle | without a pause, for `SPIN_S` after the last ticket was given | some microseconds |
| stays idle | when the reaper's thread wakes it, and every `PROBE_S` | the thread's time |

A loop that looks at each turn never sleeps, so the time of its processor does not tell whether it has other work. Two
other things do. A turn of more than `LONG_S` had other work in it. And between two probes without looks at each turn,
the loop's thread takes much or little of a core. The second needs a pause, but is never wrong. It comes after `SPIN_S`
of short turns, and after `RECHECK_S` in any case. If the loop was idle although its turns were long, long turns are
usual on that machine. Only longer ones count from then on.

A probe also asks CUDA for the oldest tickets: a card that is lost writes no flag.
"""

from __future__ import annotations

from contextvars import Context
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from asyncflow.streams.virtual import VirtualClockLoop

if TYPE_CHECKING:
    import asyncio

SPIN_S = 50e-6
"""Seconds of turns without other work before the loop leaves the wait to threads."""

LONG_S = 30e-6
"""Seconds of a turn that had other work in it; turns of an idle loop take 2 to 15 µs."""

PROBE_S = 2e-3
"""Seconds between two questions to CUDA."""

RECHECK_S = 0.05
"""Seconds for which the loop takes for granted that it is busy."""

BUSY = 0.25
"""The share of a core from which on a loop is busy."""


class Watched(Protocol):
    """The open tickets of one stream."""

    def look(self) -> bool:
        """Deliver tickets whose work is done; return False if some are left."""

    def rest(self) -> None:
        """Leave the wait for the tickets to a thread."""

    def probe(self) -> None:
        """Ask CUDA for the oldest ticket."""


class Lookout:
    """The looks of one event loop; its methods belong to the loop's thread.

    Invariant: while `watched` has members, the loop has a turn of ours to come, or their threads wait; and a probe is
    to come.
    """

    __slots__ = (
        "_alone_s",
        "_at_s",
        "_context",
        "_is_looking",
        "_is_probing",
        "_long_s",
        "_rested_s",
        "_since_s",
        "_sure_until_s",
        "watched",
    )

    def __init__(self) -> None:
        """Begin with nothing to look at."""
        self.watched: dict[Watched, None] = {}
        # A timer would inherit the context of the first caller that adds a ticket, and keep its objects alive.
        self._context = Context()
        self._is_looking = self._is_probing = False
        self._long_s = LONG_S
        self._alone_s = self._at_s = self._since_s = 0.0
        self._sure_until_s = 0.0
        self._rested_s: tuple[float, float] | None = None  # processor and clock time at rest; None: has looked since

    def watch(self, tickets: Watched, loop: asyncio.AbstractEventLoop) -> None:
        """Look at `tickets` from now on until none are left."""
        self.watched[tickets] = None
        self._alone_s = 0.0
        if not self._is_looking:
            self._begin(loop)
        if not self._is_probing:
            self._is_probing = True
            loop.call_later(PROBE_S, self._probe, loop, context=self._context)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_looking = True
        self._rested_s = None
        self._at_s = self._since_s = perf_counter()
        loop.call_soon(self._turn, loop, context=self._context)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = perf_counter()
        took_s, self._at_s = now_s - self._at_s, now_s
        self._alone_s = 0.0 if took_s > self._long_s else self._alone_s + took_s
        try:
            for tickets in [*self.watched]:
                if tickets.look():
                    self.watched.pop(tickets, None)
        finally:  # a delivery that raises reaches the loop's exception handler
            if self.watched and (now_s < self._sure_until_s or not self._has_looked_enough(now_s)):
                loop.call_soon(self._turn, loop, context=self._context)
            else:
                self._is_looking = False
                for tickets in [*self.watched]:
                    tickets.rest()
                self._rested_s = thread_time(), now_s

    def _has_looked_enough(self, now_s: float) -> bool:
        return self._alone_s > SPIN_S or now_s - max(self._since_s, self._sure_until_s) > RECHECK_S

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_probing = False
        try:
            for tickets in [*self.watched]:
                tickets.probe()
                if tickets.look():
                    self.watched.pop(tickets, None)
        finally:
            if self.watched:
                self._is_probing = True
                loop.call_later(PROBE_S, self._probe, loop, context=self._context)
                self._learn(loop)

    def _learn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at each turn again if the loop has been busy without that."""
        if self._rested_s is None or self._is_looking:
            return
        processor_s, clock_s = self._rested_s
        self._rested_s = rested_s, now_s = thread_time(), perf_counter()
        if rested_s - processor_s > BUSY * (now_s - clock_s):
            self._long_s = max(LONG_S, self._long_s / 2)
            self._sure_until_s = now_s + RECHECK_S
            self._begin(loop)
        elif self._alone_s <= SPIN_S:  # turns that seemed busy had no other work
            self._long_s = min(2 * self._long_s, PROBE_S)
            self._alone_s = 2 * SPIN_S


lookouts: WeakKeyDictionary[asyncio.AbstractEventLoop, Lookout] = WeakKeyDictionary()
"""The looks of each loop that has some; `lookout_of` makes them."""


def lookout_of(loop: asyncio.AbstractEventLoop) -> Lookout | None:
    """The loop's; on its thread. None for a loop on virtual time, which waits for threads by itself."""
    if isinstance(loop, VirtualClockLoop):
        return None
    found = lookouts.get(loop)
    if found is None:
        found = lookouts[loop] = Lookout()
    return found
