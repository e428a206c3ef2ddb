"""How long a cancelled coroutine may take to end, and what is said of one that does not."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Any

from asyncflow.errors import UNKNOWN_LOCATION, SourceLocation, is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("asyncflow.runtime")

GRACE_S = 5.0
"""Seconds for what a coroutine function does at its end, in ``finally`` and ``except asyncio.CancelledError``."""


class CancellationIgnoredError(Exception):
    """A coroutine that goes on though it was cancelled."""


def leave_behind(tasks: Mapping[asyncio.Task[object], Callable[..., None]]) -> None:
    """Ends the waiting for cancelled tasks that have not ended; each callback hears of it as of a failure."""
    for task, deliver in list(tasks.items()):
        place = _waits_at(task)
        message = (
            f"{task.get_name()} ignores cancellation: {GRACE_S:g} s after it was cancelled, its coroutine function "
            f"still waits at {place} (in {place.function}); the run ends without it. Let asyncio.CancelledError out of "
            f"the function, and keep short what has to be done before"
        )
        _log.warning("%s", message)
        deliver(None, CancellationIgnoredError(message))


def _waits_at(task: asyncio.Task[object]) -> SourceLocation:
    """The outermost line of the user's where a suspended coroutine is."""
    awaited: Any = task.get_coro()
    while inspect.iscoroutine(awaited):
        frame = awaited.cr_frame
        if frame is not None and is_users(frame.f_code.co_filename):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        awaited = awaited.cr_await
    return UNKNOWN_LOCATION


__all__ = ["GRACE_S", "CancellationIgnoredError", "leave_behind"]
