"""A flag that one thread sets once, and that coroutines and other threads wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from asyncflow.streams.futures import resolve
from asyncflow.streams.handover import awaiting_a_thread


class Latch:
    """Set once, from any thread, and set for ever.

    Invariant: a callback is either in the list or has been called, exactly once; the lock guards the move.
    """

    __slots__ = ("_callbacks", "_lock", "_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._set = False

    def done(self) -> bool:
        """Return True if the latch is set."""
        return self._set

    def set(self) -> None:
        """Set the latch and wake all waiters; later calls do nothing."""
        with self._lock:
            self._set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def block(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread until the latch is set; False if ``timeout_s`` passed first."""
        gate = threading.Event()
        self._when_set(gate.set)
        if gate.wait(timeout_s):
            return True
        self._forget(gate.set)
        return self._set

    async def wait(self) -> None:
        """Return when the latch is set; any number of tasks, on any running loops, may wait.

        Cancellation: the waiter leaves; the latch and other waiters are untouched.
        """
        if self._set:
            return
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(resolve, woken)
            except RuntimeError:
                if not loop.is_closed():  # a closed loop has no task left to wake
                    raise

        self._when_set(wake)
        try:
            with awaiting_a_thread():
                await woken
        finally:
            self._forget(wake)

    def _when_set(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if not self._set:
                self._callbacks.append(callback)
                return
        callback()

    def _forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
