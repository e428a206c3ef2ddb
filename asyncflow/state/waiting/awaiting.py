"""Places in line, awaited on event loops: by firings, and by coroutines of the application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import TypeAlias

from asyncflow.state.waiting.lines import NOT_YET, PlaceInLine
from asyncflow.values import Value

Beside: TypeAlias = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], None]
"""``start(loop, work)`` has ``work()`` called on a thread, so that `loop` goes on meanwhile; from any thread."""

_beside: list[Beside] = []


def work_beside(start: Beside) -> None:
    """Register `start` to do slow work elsewhere: threads and virtual time are no concern of this room."""
    _beside[:] = [start]


def wake_on(loop: asyncio.AbstractEventLoop, place: PlaceInLine, wake: Callable[[], None]) -> None:
    """Has ``wake()`` called on `loop`, which this thread runs, when the place is called: at once if on this thread."""

    thread = get_ident()

    def call() -> None:
        if get_ident() == thread and not loop.is_closed():
            wake()
            return
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the loop is closed, and has no waiting tasks any more
            place.leave()

    place.when_called(call)
    if place.works:
        place.do_beside(partial(_beside[0], loop))


async def granted(found: Value | PlaceInLine) -> Value:
    """Wait for a state's result: `found` itself, or the result of the place in line.

    Cancellation: the place is given up, and nothing was taken or put.
    """
    if not isinstance(found, PlaceInLine):
        return found
    called = asyncio.Event()
    wake_on(asyncio.get_running_loop(), found, called.set)
    try:
        while (result := found.claim()) is NOT_YET:
            await called.wait()
            called.clear()
        return result
    except BaseException:
        found.leave()
        raise
