"""The hand-over between a streamed loop and the coroutine that iterates over it: one item at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from asyncflow.values import Value


class Channel:
    """Passes items to one consumer, in order.

    An item the consumer does not wait for stays with its producer, whose firing is not complete until it is taken:
    that holds the loop back to `parallel_iterations` ahead.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._offered: deque[tuple[tuple[Value, ...], Callable[[], None]]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def offer(self, values: tuple[Value, ...], taken: Callable[[], None]) -> None:
        """Keeps `values` until the consumer takes them, then calls `taken`."""
        self._offered.append((values, taken))
        self._wake()

    @property
    def has_consumer(self) -> bool:
        """True if a consumer waits for the next item."""
        return self._waiter is not None and not self._waiter.done()

    def close(self) -> None:
        """No more items will come."""
        self._closed = True
        self._wake()

    def discard(self) -> None:
        """Drop the items not taken yet."""
        self._offered.clear()

    async def get(self) -> tuple[Value, ...] | None:
        """The next item; None once the channel is closed and empty."""
        while not self._offered:
            if self._closed:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        values, taken = self._offered.popleft()
        taken()
        return values

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
