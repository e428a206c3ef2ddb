"""How places in line are waited for on event loops: by firings, and by coroutines of the application's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import get_ident

from asyncflow.state.waiting.lines import NOT_YET, PlaceInLine
from asyncflow.values import Value


def wake_on(loop: asyncio.AbstractEventLoop, place: PlaceInLine, wake: Callable[[], None]) -> None:
    """Has ``wake()`` called on `loop`, which this thread runs, when the place is called: at once if on this thread."""

    thread = get_ident()

    def call() -> None:
        if get_ident() == thread and not loop.is_closed():
            wake()
            return
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # it is closed, and nobody waits there any more
            place.leave()

    place.when_called(call)


async def granted(found: Value | PlaceInLine) -> Value:
    """Waits for what a state gives: `found` itself, or the result of the place in line.

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


__all__ = ["granted", "wake_on"]
