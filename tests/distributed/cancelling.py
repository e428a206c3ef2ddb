"""Cancels a run at a chosen moment of virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asyncflow.streams.virtual import VirtualClockLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine


def virtual_loop() -> VirtualClockLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    return loop


async def cancelled_at_tick(running: Coroutine[Any, Any, Any], tick: int, passes: int) -> bool:
    """Cancel after a number of jumps of the virtual clock, and then passes of the loop; return False if the run ended
    first.

    `CancelledError` is raised once, and a result that is there is not delivered after a cancel.
    """
    loop = virtual_loop()
    task = asyncio.ensure_future(running)
    left = tick

    def on_tick(_: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            cancel_after(passes)

    def cancel_after(more: int) -> None:
        if more:
            loop.call_soon(cancel_after, more - 1)
        else:
            task.cancel()

    loop.on_tick = on_tick
    if tick == 0:
        cancel_after(passes)
    try:
        await task
    except asyncio.CancelledError:
        assert task.cancelled()
        return True
    finally:
        loop.on_tick = None
    return False
