"""CopyThread of large arrays, in and out of runs: made on a thread of the session's, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from asyncflow.devices.machine.heap import process_heap
from asyncflow.runtime.values.feeds import LargeFeed
from asyncflow.runtime.values.fetches import is_fresh
from asyncflow.state.variables.immutable import LARGE_BYTES
from asyncflow.state.waiting.awaiting import work_beside
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.streams.futures import resolve
from asyncflow.streams.loop import is_virtual
from asyncflow.values import Value


def has_large(values: Sequence[object]) -> bool:
    """Return True if some value is too large to be copied on the event loop."""
    for value in values:  # noqa: SIM110 - every result comes here, and a generator is slow
        if type(value) is np.ndarray and value.nbytes > LARGE_BYTES:
            return True
    return False


class CopyThread(ThreadStream):
    """Makes the copies, on a thread that starts with the first one: the application's pool may be full.

    On virtual time, of which copies take none, they are made at once, so that the same happens every time.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("copies")

    async def of_feeds(self, values: Sequence[Value]) -> list[Value]:
        """The fed values of a run, with each `LargeFeed` copied."""
        return [await self._made(value.copied) if type(value) is LargeFeed else value for value in values]

    async def of_results(self, values: Sequence[Any], *, shared: bool = False) -> list[Value]:
        """Return fetched values, with copies of large values that other code references: also the run, if they are
        `shared`.
        """
        results = list(values)
        for index, value in enumerate(values):
            if type(value) is np.ndarray and value.nbytes > LARGE_BYTES and (shared or not is_fresh(value)):
                results[index] = await self._made(value.copy)
        return results

    def drop(self, values: list[object]) -> None:
        """Drop values without other references: giving back hundreds of megabytes takes a while."""
        loop = asyncio.get_running_loop()
        if is_virtual(loop):
            values.clear()
        else:
            self.submit(process_heap.drop, (values,), lambda *_: None, loop)

    async def _made(self, copy: Callable[[], Value]) -> Value:
        loop = asyncio.get_running_loop()
        if is_virtual(loop):
            return copy()
        made: asyncio.Future[Value] = loop.create_future()
        submission = self.submit(copy, (), lambda result, error, *_: resolve(made, result, error), loop)
        try:
            return await made
        except asyncio.CancelledError:
            submission.withdraw()
            raise


def _on_a_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    if is_virtual(loop):
        work()
    else:
        threading.Thread(target=work, name="asyncflow:copies").start()


work_beside(_on_a_thread)  # for waiting lines, in the room `state`
