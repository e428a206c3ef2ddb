"""A call of a session from another thread: its outcome reaches the caller, or the caller has cancelled, never both.

`asyncio.run_coroutine_threadsafe` hands a result over one turn of the event loop after the coroutine has ended. If the
caller cancels in between, the result is lost, with the elements that the run has taken from queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress

from asyncflow.streams.loop import thread_waits
from asyncflow.values import Nest


class ThreadCall:
    """One call, which `start` begins on the event loop.

    Attributes:
        future: what the caller waits for; it can be cancelled until the outcome is handed over.
    """

    __slots__ = ("_is_wanted", "_loop", "_work", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[Callable[[], bool]], Awaitable[Nest]]) -> None:
        """Store the work; ``work(is_wanted)`` may call `is_wanted` when it has the result."""
        self.future: Future[Nest] = Future()
        self._loop = loop
        self._work = work
        self._is_wanted: bool | None = None

    def start(self) -> None:
        """Begin, on the event loop's thread."""
        task = self._loop.create_task(self._deliver())

        def stop(future: Future[Nest]) -> None:
            if future.cancelled():
                with suppress(RuntimeError):  # the loop is closed, and the task is gone
                    self._loop.call_soon_threadsafe(task.cancel)

        self.future.add_done_callback(stop)

    def is_wanted(self) -> bool:
        """Return False if the caller has cancelled; else it cannot cancel any more."""
        if self._is_wanted is None:
            self._is_wanted = self.future.set_running_or_notify_cancel()
        return self._is_wanted

    async def _deliver(self) -> None:
        try:
            with thread_waits(self._loop):
                result = await self._work(self.is_wanted)
        except asyncio.CancelledError:
            if not self.future.cancel() and self.is_wanted():
                self.future.set_exception(asyncio.CancelledError())
            raise
        except BaseException as error:
            if self.is_wanted():
                self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            if self.is_wanted():
                self.future.set_result(result)
