"""Runs that end with the request they are for: `run_or_disconnect`, `start_stream`, `stream_or_stall`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Final, Protocol, TypeVar, cast

from asyncflow.errors import ClientDisconnected, DeadlineExceeded, brief
from asyncflow.runtime.calls.options import as_seconds
from asyncflow.serving.responses import Receive

Result = TypeVar("Result")

_UNWATCHED_S: Final = 0.005
"""Seconds before a client is watched: a watch costs 10 µs, an eighth of a small request."""


class HasReceive(Protocol):
    """A request of Starlette or FastAPI."""

    @property
    def receive(self) -> Receive:
        """Awaits the server's next message."""


async def run_or_disconnect(client: HasReceive | Receive, run: Awaitable[Result]) -> Result:
    """Await a run; a client that goes away cancels it.

    Servers do not cancel the handler of a client that has gone: its result would be wasted. A run of less than 5 ms
    ends before the client is watched. Read the body of the request first, since messages of the server are consumed
    here until the client goes.

    Args:
        client: a Starlette or FastAPI request or WebSocket, or the ``receive`` that an ASGI application is called with.
        run: such as ``session.run(...)``, or any other coroutine.

    Raises:
        ClientDisconnected: the client has gone; the run was cancelled, and has ended.
        Exception: the run failed.
        TypeError: `client` is none; the run does not start.

    Cancellation: cancels the run, and waits until it has ended.
    """
    receive = client if callable(client) else getattr(client, "receive", None)
    if not callable(receive):
        if isinstance(run, Coroutine):
            run.close()
        raise TypeError(f"a client is a request, or the `receive` of an ASGI application; got {brief(client)}")
    watch = _DisconnectWatch(receive)
    try:
        result = await run
    except BaseException as error:
        await watch.end()
        if watch.has_cancelled():
            raise ClientDisconnected("the client has gone; its run was cancelled") from error
        raise
    await watch.end()
    if watch.has_cancelled():
        raise ClientDisconnected("the client has gone before its run ended, which could not be cancelled")
    return result


class _DisconnectWatch:
    """A watch that cancels the task it was made in when the client goes, until the watch is ended."""

    __slots__ = ("_before", "_has_cancelled", "_receive", "_starts", "_task", "_watcher")

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._before = task.cancelling()
        self._has_cancelled = False
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._starts = asyncio.get_running_loop().call_later(_UNWATCHED_S, self._start)

    async def end(self) -> None:
        """Return when the watcher has ended, however often the caller is cancelled meanwhile."""
        self._starts.cancel()
        watcher = self._watcher
        if watcher is None:
            return
        watcher.remove_done_callback(self._cancel)
        watcher.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not watcher.done():
            try:
                await asyncio.sleep(0)  # which is all that most need
                if not watcher.done():
                    await asyncio.wait((watcher,))
            except asyncio.CancelledError as error:
                cancelled = error
        if not watcher.cancelled():
            watcher.exception()  # retrieve it, or asyncio logs that it never was
        if cancelled is not None:
            raise cancelled

    def has_cancelled(self) -> bool:
        """Return True if the task was cancelled only because the client has gone; it then no longer counts as
        cancelled.

        Raises:
            Exception: what the server raised in place of a message.
        """
        if not self._has_cancelled or self._task.uncancel() > self._before:
            return False
        if self._watcher is not None:
            self._watcher.result()
        return True

    def _start(self) -> None:
        self._watcher = asyncio.ensure_future(_wait_disconnect(self._receive))
        self._watcher.add_done_callback(self._cancel)

    def _cancel(self, watcher: asyncio.Task[None]) -> None:
        self._has_cancelled = True
        self._task.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass


async def start_stream(
    client: HasReceive | Receive, items: AsyncGenerator[Result, None]
) -> AsyncGenerator[Result, None]:
    """Await the first item, and return an iterator over it and the following items.

    Failures before the first item, such as wrong feeds or an overloaded session, are raised here. The response has not
    begun then, and can have a status of its own: ``StreamingResponse(await serving.start_stream(request, items))``.

    Args:
        client: as in `run_or_disconnect`.
        items: such as ``session.stream(...)``; closed at the end.

    Raises:
        ClientDisconnected: the client has gone; the run was cancelled, and has ended.
        Exception: the run failed.
        TypeError: an argument is not that.
    """
    _require_generator(items, "start_stream")
    started = _started(items)
    await run_or_disconnect(client, anext(started))
    return cast("AsyncGenerator[Result, None]", started)


async def _started(items: AsyncGenerator[Result, None]) -> AsyncGenerator[Result | None, None]:
    """Gives None once there is an item, or will be none; then all."""
    async with aclosing(items):
        try:
            first = [await anext(items)]
        except StopAsyncIteration:
            first = []
        yield None
        while first:
            yield first.pop()
        async for item in items:
            yield item


def _require_generator(given: object, what: str) -> None:
    if not isinstance(given, AsyncGenerator):
        raise TypeError(f"{what} takes an asynchronous generator, `session.stream(x)`; got {brief(given)}")


def stream_or_stall(items: AsyncGenerator[Result, None], stall_timeout_s: float = 30.0) -> AsyncGenerator[Result, None]:
    """Iterate over the items of a stream; a consumer that takes too long between two items ends the run.

    A slow client holds the run back, and with it the run's memory and its place among `max_runs`: not for ever.

    Args:
        items: such as ``session.stream(...)``; closed at the end.
        stall_timeout_s: the longest time from an item to the consumer's asking for the next.

    Raises:
        DeadlineExceeded: when the consumer asks after all; the run has ended long since.
        TypeError, ValueError: an argument is not that; at once.
    """
    _require_generator(items, "stream_or_stall")
    return _unstalled(items, as_seconds(stall_timeout_s, "stall_timeout_s", may_be_zero=False))


async def _unstalled(items: AsyncGenerator[Result, None], stall_timeout_s: float) -> AsyncGenerator[Result, None]:
    loop = asyncio.get_running_loop()
    closing: asyncio.Task[None] | None = None

    def stop() -> None:
        nonlocal closing
        closing = loop.create_task(items.aclose())

    try:
        async for item in items:
            timer = loop.call_later(stall_timeout_s, stop)
            try:
                yield item
            finally:
                timer.cancel()
            if closing is not None:
                raise DeadlineExceeded(f"the client took no item for {stall_timeout_s} s; the run was stopped")
    finally:
        if closing is not None:
            await closing
        await items.aclose()
