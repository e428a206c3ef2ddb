"""CUDA events that are used again: a pool for each physical device, and what returns them to it."""

from __future__ import annotations

from typing import Any

DONE = 0
NOT_READY = 600
"""What `cudaEventQuery` returns; CuPy exports no constants for them."""


class EventPool:
    """CUDA events of one physical device, used again and again: making one costs microseconds.

    They sleep in the operating system when waited for (`block`), and take no time stamps, which is cheaper.
    """

    __slots__ = ("_cuda", "_free", "_made", "runtime")

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda
        self._free: list[Any] = []
        # Without this, the garbage collector, which finalizes all of a dead cycle, would destroy an event of one and
        # give it back as well.
        self._made: list[Any] = []
        self.runtime = cupy.cuda.runtime

    def take(self) -> Any:
        """A ``cupy.cuda.Event`` that nobody uses; the device must be current.

        Raises:
            CUDARuntimeError: the device makes no more of them.
        """
        try:
            return self._free.pop()
        except IndexError:
            event = self._cuda.Event(block=True, disable_timing=True)
            self._made.append(event)
            return event

    def give_back(self, raw: Any) -> None:
        """Nobody uses the event any more; from any thread."""
        self._free.append(raw)

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)


class PooledEvent:
    """A CUDA event that returns to its pool with the last reference to this.

    Recording an event anew while a thread sleeps on it would keep that thread asleep; so whoever waits refers to it.

    Attributes:
        raw: the ``cupy.cuda.Event``.
        seen_done: someone has found the work before this point done.
    """

    __slots__ = ("_pool", "raw", "seen_done")

    def __init__(self, pool: EventPool, raw: Any) -> None:
        self.raw = raw
        self._pool = pool
        self.seen_done = False

    def __del__(self) -> None:
        self._pool.give_back(self.raw)

    def done(self) -> bool:
        """Whether all work before this point is done; never blocks.

        Raises:
            CUDARuntimeError: the device failed. (``cupy.cuda.Event.done`` would say "not yet" for ever.)
        """
        if not self.seen_done:
            runtime = self._pool.runtime
            status = runtime.eventQuery(self.raw.ptr)
            if status not in (DONE, NOT_READY):
                raise runtime.CUDARuntimeError(status)
            self.seen_done = status == DONE
        return self.seen_done

    def block(self) -> None:
        """Put the calling thread to sleep until the work before this point is done.

        Raises:
            CUDARuntimeError: the device failed.
        """
        self._pool.runtime.eventSynchronize(self.raw.ptr)
        self.seen_done = True
