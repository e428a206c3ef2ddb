"""Work given to a stream, and its results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncflow.streams import ThreadStream
from tests.patience import PATIENCE_S


def outcome(stream: ThreadStream, work: Callable[..., object], *args: object) -> asyncio.Future[tuple[object, object]]:
    """The result and the error of what the stream runs, delivered on the loop that asks."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[object, object]] = loop.create_future()

    def deliver(result: object, error: BaseException | None, started_ns: int, ended_ns: int) -> None:
        assert asyncio.get_running_loop() is loop
        assert started_ns <= ended_ns
        future.set_result((result, error))

    stream.submit(work, args, deliver, loop)
    return future


def fail(error: BaseException) -> None:
    """Work that raises."""
    raise error


def see_off(stream: ThreadStream) -> None:
    """Stops a stream, and blocks until its thread has ended."""
    stream.stop()
    thread = stream._thread
    if thread is not None:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
