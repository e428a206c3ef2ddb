"""Coroutines as tests, with nothing but pytest; and what an event loop's other coroutines notice."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from asyncflow.streams.cuda.stream import CudaStream
from asyncflow.streams.futures import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 100.0
"""No test takes as long, even on a machine whose kernels are not compiled yet."""

TICK_S = 1e-3


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine function on uvloop, in debug mode neither."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await test(*args, **fixtures)

        af.run(limited())

    return run


class Heartbeat:
    """Ticks every millisecond, if the loop lets it.

    Attributes:
        gaps_ms: between two ticks.
    """

    def __init__(self) -> None:
        self.gaps_ms: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._tick_s = perf_counter()
        self._handle: asyncio.TimerHandle | None = None
        self._ticked = asyncio.Event()

    @contextmanager
    def beating(self) -> Iterator[Heartbeat]:
        """Tick while the block runs."""
        self._tick_s = perf_counter()
        self._arm()
        try:
            yield self
        finally:
            assert self._handle is not None
            self._handle.cancel()

    def _arm(self) -> None:
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now = perf_counter()
        self.gaps_ms.append(1e3 * (now - self._tick_s))
        self._tick_s = now
        self._ticked.set()
        self._arm()

    async def ticks(self, count: int) -> None:
        """Return after `count` ticks."""
        for _ in range(count):
            self._ticked.clear()
            await self._ticked.wait()

    @property
    def p99_ms(self) -> float:
        return percentile(self.gaps_ms, 99)

    @property
    def worst_ms(self) -> float:
        return max(self.gaps_ms)


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` per cent of them are."""
    return float(np.percentile(values, share))


def ticket(stream: CudaStream, *holds: object) -> asyncio.Future[None]:
    """Done when all that the stream has been given is."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.notify(lambda error: resolve(future, error=error), *holds)
    return future
