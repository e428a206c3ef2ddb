"""Work that would block the event loop, on a thread of its own.

Not on the event loop's default executor: that is the application's. The default executor's threads may all be waiting
for the very run that needs a thread: a deadlock.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack, cast

from asyncflow.streams.failures import without_this_frame
from asyncflow.streams.latch import Latch
from asyncflow.streams.virtual import VirtualClockLoop

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_TURN_S = 0.3e-3
"""Seconds that a worker keeps the GIL before it gives way."""
_SWITCH_S = 0.000_5


async def call_beside(
    work: Callable[[Unpack[_Args]], _Result], *args: *_Args, outlasts_program: bool = True
) -> _Result:
    """``work(*args)`` on a new thread, in a copy of the caller's context; virtual time stands still meanwhile.

    Args:
        work: a function.
        args: its arguments.
        outlasts_program: an interpreter that ends waits for the work, so that a file is not left half written.

    Cancellation: the caller leaves; the thread ends after the work, whose outcome is dropped.

    Raises:
        BaseException: what `work` raises.
    """
    loop, ended = asyncio.get_running_loop(), Latch()
    outcome: list[tuple[_Result | None, BaseException | None]] = []
    call: Callable[[], _Result] = partial(copy_context().run, partial(work, *args))
    name = getattr(work, "__name__", type(work).__name__).strip("_")
    del work, args

    def run() -> None:
        nonlocal call
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, without_this_frame(error)))  # avoid a cycle
        finally:
            # The waiting task may go on before this thread has ended, and count references. The context refers to the
            # session and the run.
            del call
            ended.set()

    threading.Thread(target=run, name=f"asyncflow:{name}", daemon=not outlasts_program).start()
    with loop.outside_work() if isinstance(loop, VirtualClockLoop) else nullcontext():
        await ended.wait()
    result, failure = outcome.pop()
    if failure is None:
        return cast("_Result", result)
    try:
        raise failure
    finally:
        del failure


def giving_way(items: Iterable[_Item]) -> Iterator[_Item]:
    """Yield the items, and release the GIL now and then: other threads would otherwise wait 5 ms for it."""
    since = time.perf_counter()
    for item in items:
        if time.perf_counter() - since > _TURN_S:
            time.sleep(0)  # takes 70 µs
            since = time.perf_counter()
        yield item


class Background:
    """Lets the event loop go on while a thread makes many objects, such as the plan of a large graph.

    Python hands the GIL over every 5 ms. That is a setting of the whole process, so it changes only meanwhile: the GIL
    is handed over every 0.5 ms. The garbage collector is the application's, and left alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._interval_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._interval_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_S, self._interval_s))
            self._holders += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            sys.setswitchinterval(self._interval_s)


background = Background()
