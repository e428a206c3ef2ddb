"""Ops whose moment of running, and of failing, a test decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import asyncflow as af
from asyncflow.runtime.run.run import Run
from asyncflow.streams.virtual import VirtualClockLoop
from tests.patience import PATIENCE_S

SLOW = 1e12
"""A ``cost=`` that sends a kernel to the device's stream thread."""

DEADLINES_S = (0.05, 0.5, 5.0, 50.0)
"""Of these a test takes the first that lets the run begin: how long that takes is for the machine to say."""

INT = af.spec("int64", ())
VECTOR = af.spec("float32", (None,))


def raising(error: Callable[[], BaseException], *, on_thread: bool = False) -> Callable[..., Any]:
    """An op that takes one integer and raises."""

    @af.op(outputs=INT, name="failing", cost=SLOW if on_thread else 1.0)
    def failing(x: Any) -> Any:
        raise error()

    return failing


class ThreadGate:
    """An op that blocks the device's stream thread, with its integer input as output, until it is opened."""

    def __init__(self, *, error: BaseException | None = None) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.error = error
        self.op = af.op(outputs=INT, name="thread_gate", cost=SLOW)(self.block)

    def block(self, x: Any) -> Any:
        """Block in the op's kernel."""
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return x


class CoroutineGate:
    """A coroutine op that calls `on_start` and waits until it is opened; `started` and `cancelled` hold its inputs."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.on_start: Callable[[], object] = bool
        self.started: list[int] = []
        self.cancelled: list[int] = []
        self.op = af.op(outputs=INT, name="coroutine_gate")(self._wait)

    async def _wait(self, x: Any) -> Any:
        self.started.append(int(x))
        self.on_start()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.append(int(x))
            raise
        return x


def double_vector() -> tuple[af.Tensor, af.Tensor]:
    """A placeholder and its double: the smallest program whose values the memory account counts."""
    x = af.placeholder("float32", (None,))
    return x, x * 2


LARGE = np.ones(100_000, np.float32)


async def until(condition: Callable[[], object]) -> None:
    """Lets the event loop go on until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)


async def late(
    session: af.Session, fetches: Any, feeds: Any = None, *, once: Callable[[], object] = lambda: True, **options: Any
) -> str:
    """Return the error of a run whose time is up once it waits; after some seconds it may not have come so far.

    Args:
        session: runs it.
        fetches: of the run.
        feeds: of the run.
        once: must hold besides, for a run that waits for several things one after the other.
        options: of the run.
    """
    others = set(session._runs.in_flight.runs)
    task = asyncio.ensure_future(session.run(fetches, feeds, timeout=PATIENCE_S, **options))

    def waiting() -> list[Run]:
        ours = session._runs.in_flight.runs - others
        return [run for run in ours if any(each.waiting() for each in run.executors if not each.is_closed)]

    # On virtual time, which passes when nobody has anything to do, it is up by itself.
    if not isinstance(asyncio.get_running_loop(), VirtualClockLoop):
        await until(lambda: (waiting() and once()) or task.done())
        for run in waiting():
            run._expire(PATIENCE_S)
    try:  # not with pytest, which the programs of `tests.faults.programs` would import as well
        await task
    except af.DeadlineExceeded as error:
        return str(error)
    raise AssertionError("the run ended before its deadline")


async def ticks(count: int) -> None:
    """Lets the event loop make `count` passes."""
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def in_flight(awaitable: Any, started: Callable[[], object]) -> AsyncIterator[asyncio.Task[Any]]:
    """A task for `awaitable`, entered once ``started()``; it has ended when the block ends."""
    task = asyncio.ensure_future(awaitable)
    await until(lambda: started() or task.done())
    yield task
    assert task.done()
