"""Runs that pass the memory limit together are computed one after the other in place of failing.

A run that only computes (no effects, no functions or coroutines of the user's) can be done again. If such a run passes
the limit beside others of its kind, it is stopped, and done again alone: when the others have ended, in the order in
which runs were stopped. While a stopped run waits, new runs of its kind queue behind it, so none starves. A run that
passes the limit alone fails. The runs that are waited for compute and end, and wait for no other run, so every wait
ends. Work of pools and batches that goes on for stopped runs is waited for, too: it ends by itself. Runs of other kinds
never wait here, and their memory is not waited for: they may be waiting for the very run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from asyncflow.errors import OutOfMemoryError
from asyncflow.runtime.lines.gate import Gate
from asyncflow.values import Value


class MemoryTurns:
    """Turns of runs that are done again. Invariant: if a run waits, another one is active, and admits it at its end.

    Attributes:
        is_alone: True if the active run is computed again.
    """

    __slots__ = ("_active", "_begun", "_waiting", "is_alone")

    def __init__(self) -> None:
        self._active = self._begun = 0
        self.is_alone = False
        self._waiting = Gate[object](lost=lambda _: self._leave())

    async def values(
        self,
        attempt: Callable[[], Awaitable[list[Value]]],
        in_time: Callable[[], AbstractAsyncContextManager[None]],
        is_left_over: Callable[[], bool] = bool,
    ) -> list[Value]:
        """Return the result of ``await attempt()``, of the first time or the second.

        Args:
            attempt: runs.
            in_time: the context in which a turn is waited for.
            is_left_over: whether something is held for runs that have been stopped.

        Cancellation: leaves the queue.

        Raises:
            OutOfMemoryError: it passes the limit alone.
        """
        if not (self._waiting or self.is_alone):
            is_beside = self._active > 0 or is_left_over()
            self._active += 1
            self._begun += 1
            begun = self._begun
            try:
                return await attempt()
            except OutOfMemoryError:
                if not is_beside and begun == self._begun:
                    raise
            finally:
                self._leave()
        async with in_time():
            await self._wait()
        try:
            return await attempt()
        finally:
            self._leave()

    async def _wait(self) -> None:
        with self._waiting.stand(object()) as waiter:
            self._wake()
            await waiter.wait()

    def _leave(self) -> None:
        self._active -= 1
        self.is_alone = False
        self._wake()

    def _wake(self) -> None:
        if not self._active and self._waiting.admit_first() is not None:
            self._active = 1
            self.is_alone = True
