"""The outcome of a future, set by a callback that may come late."""

from __future__ import annotations

import asyncio
from typing import Any


def resolve(future: asyncio.Future[Any], value: object = None, error: BaseException | None = None) -> None:
    """Set a future's result or exception, unless its task was cancelled meanwhile; on the future's loop."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
