"""Event loops: `run` a coroutine on uvloop where there is one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

try:
    import uvloop
except ImportError:  # Windows has no uvloop
    uvloop = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Runs `main` to its end on a new event loop: uvloop's where it is installed, else asyncio's.

    >>> async def main():
    ...     return 42
    >>> run(main())
    42
    """
    factory = asyncio.new_event_loop if uvloop is None else uvloop.new_event_loop
    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        return runner.run(main)
