"""CUDA events that are used again: a pool for each physical device, and what returns them to it."""

from __future__ import annotations

from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING

from asyncflow.streams.cuda.flags import WRAP, Flag, Flags

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw

DONE = 0
NOT_READY = 600
"""Codes that `cudaEventQuery` returns; CuPy exports no constants for them."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3
"""Between two looks at an event that no thread can sleep on."""


class EventPool:
    """CUDA events of one physical device, used again and again: making one costs microseconds.

    They take no time stamps, which is cheaper. A thread can sleep in the operating system only on events made for it
    (``cudaEventBlockingSync``). On an H100, recording the 57th such event on a stream that lags behind blocked the
    caller until the first was done. Many other events may be recorded.
    """

    __slots__ = ("_cuda", "_made", "flags", "free", "runtime")

    def __init__(self, cupy: Cupy, flags: Flags | None = None) -> None:
        """Begin without events; `flags` belong to the device's streams, if these can write any."""
        self.flags = flags
        self._cuda = cupy.cuda
        self.free: tuple[list[Raw], list[Raw]] = ([], [])  # by whether threads sleep on them
        # Without this, the garbage collector, which finalizes all of a dead cycle, would destroy an event of one and
        # give it back as well.
        self._made: list[Raw] = []
        self.runtime = cupy.cuda.runtime

    def take(self, *, sleeps: bool = False) -> PooledEvent:
        """Take a free event, or make one; the device must be current.

        Args:
            sleeps: whether a thread can sleep on it.

        Raises:
            CUDARuntimeError: the device makes no more of them.
        """
        try:
            raw = self.free[sleeps].pop()
        except IndexError:
            raw = None
        if raw is None:  # outside of the handler: a failure must not keep the frames that led to an empty list
            raw = self._cuda.Event(block=sleeps, disable_timing=True)
            self._made.append(raw)
        return PooledEvent(self, raw, sleeps)

    def __len__(self) -> int:
        """Number of free events."""
        return sum(map(len, self.free))


@dataclass(slots=True, eq=False, repr=False)
class PooledEvent:
    """A CUDA event that returns to its pool when the last reference to this object is dropped, on whatever thread.

    Recording an event anew while a thread sleeps on it would keep that thread asleep; so whoever waits refers to it.

    Attributes:
        pool: where it returns to.
        raw: the ``cupy.cuda.Event``.
        sleeps: whether a thread can sleep on it; else it looks now and then.
        seen_done: someone has found the work before this point done.
        flag: of the stream, if that has written `number` into it before this point; else None.
        number: see `flag`.
    """

    pool: EventPool
    raw: Raw
    sleeps: bool
    seen_done: bool = False
    flag: Flag | None = None
    number: int = 0

    def __del__(self) -> None:
        self.pool.free[self.sleeps].append(self.raw)

    def done(self) -> bool:
        """Return True if all work before this point is done; never blocks.

        Raises:
            CUDARuntimeError: the device failed. (``cupy.cuda.Event.done`` would say "not yet" for ever.)
        """
        if not self.has_passed():
            runtime = self.pool.runtime
            status = runtime.eventQuery(self.raw.ptr)
            if status not in (DONE, NOT_READY):
                raise runtime.CUDARuntimeError(status)
            self.seen_done = status == DONE
        return self.seen_done

    def has_passed(self) -> bool:
        """Return True if the work is known to be done, without a call of CUDA; a lost device does not show here."""
        flag = self.flag
        if not self.seen_done and flag is not None:  # `Flag.has_reached`, without a call: this is asked at every turn
            self.seen_done = (flag.words[flag.index] - self.number) % WRAP < WRAP // 2
        return self.seen_done

    def block(self) -> None:
        """Put the calling thread to sleep until the work before this point is done.

        Raises:
            CUDARuntimeError: the device failed.
        """
        if self.sleeps:
            self.pool.runtime.eventSynchronize(self.raw.ptr)
            self.seen_done = True
            return
        pause_s = FIRST_PAUSE_S
        while not self.done():  # `eventSynchronize` would spin
            sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
