"""Event loops: `run` a coroutine on uvloop where there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    from uvloop import new_event_loop
except ImportError:  # Windows has no uvloop
    from asyncio import new_event_loop

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
    with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
        return runner.run(main)
