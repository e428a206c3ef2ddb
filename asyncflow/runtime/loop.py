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

    Raises:
        TypeError: `main` is not a coroutine.
        RuntimeError: an event loop is running in this thread; await `main` there.

    >>> async def main():
    ...     return 42
    >>> run(main())
    42
    """
    if not asyncio.iscoroutine(main):
        raise TypeError(_not_a_coroutine(main))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner(debug=debug, loop_factory=new_event_loop) as runner:
            return runner.run(main)
    main.close()  # or Python would warn that it was never awaited
    raise RuntimeError("af.run starts an event loop, and one is running in this thread already: await it instead")


def _not_a_coroutine(main: object) -> str:
    if callable(main):
        name = getattr(main, "__name__", "main")
        return f"af.run takes a coroutine, not the function that makes one; call it: af.run({name}())"
    return f"af.run takes a coroutine; got {type(main).__name__} {main!r}"
