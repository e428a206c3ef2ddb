from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import ClassVar
from weakref import ref

import pytest

from asyncflow.streams import VirtualClockLoop, call_beside
from asyncflow.streams.beside import background, giving_way
from asyncflow.streams.latch import Latch
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

_tag: ContextVar[str] = ContextVar("tag", default="nowhere")
_value: ContextVar[object] = ContextVar("value")


async def test_it_runs_on_a_thread_of_its_own_in_the_callers_context() -> None:
    _tag.set("here")
    thread, tag = await call_beside(lambda: (threading.current_thread(), _tag.get()))
    assert thread is not threading.current_thread() and thread.name.startswith("asyncflow:")
    assert tag == "here"
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


async def test_its_exception_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await call_beside(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        await call_beside(_exit)


def _exit() -> None:
    raise SystemExit(3)


async def test_it_needs_no_thread_of_the_applications_pool() -> None:
    """F64: its only thread waits for the call beside it."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        waiting = loop.run_in_executor(pool, lambda: asyncio.run_coroutine_threadsafe(_sum(), loop).result(PATIENCE_S))
        loop.set_default_executor(pool)
        assert await waiting == 6


async def _sum() -> int:
    return await call_beside(sum, [1, 2, 3])


async def test_a_cancelled_caller_leaves_the_thread_to_end() -> None:
    gate, threads = threading.Event(), list[threading.Thread]()

    def wait() -> None:
        threads.append(threading.current_thread())
        gate.wait(PATIENCE_S)

    task = asyncio.create_task(call_beside(wait))
    await until(lambda: threads)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    threads[0].join(PATIENCE_S)
    assert not threads[0].is_alive()


def test_virtual_time_stands_still_meanwhile() -> None:
    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(0.001):
            return await call_beside(lambda: sum(range(200_000))), loop.time()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        total, time_s = runner.run(main())
    assert total == 19_999_900_000 and time_s == 0.0


async def test_a_thread_that_ends_slowly_refers_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting code may go on, and count live objects, while the thread is still on its way out."""
    may_end = threading.Event()
    whole = Latch.set

    def set_slowly(latch: Latch) -> None:
        whole(latch)
        assert may_end.wait(PATIENCE_S)

    async def caller() -> Work:
        _value.set(Work())
        return await call_beside(Work())

    monkeypatch.setattr(Latch, "set", set_slowly)
    try:
        result = await asyncio.create_task(caller())  # in a context of its own
        await asyncio.sleep(0)  # the callback that tells of the task's end has it
        alive = [ref() for ref in Work.made]
        assert alive == [None, None, result]
        del result, alive
        assert [ref() for ref in Work.made] == [None, None, None]
    finally:
        may_end.set()


class Work:
    """Something to call, which gives another one; all that were made are known."""

    made: ClassVar[list[ref[Work]]] = []

    def __init__(self) -> None:
        self.made.append(ref(self))

    def __call__(self) -> Work:
        return Work()


def test_work_on_a_thread_gives_way_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda _: slept.append(now))
    seen = []
    for item in giving_way([3, 1, 4, 1, 5]):
        seen.append(item)
        now += 0.2e-3
    assert seen == [3, 1, 4, 1, 5]
    assert slept == pytest.approx([0.4e-3, 0.8e-3])


def test_background_work_leaves_the_collector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 110: it is the application's; `gc.freeze` puts its next full collection off."""
    called: list[str] = []
    for name in ("collect", "disable", "enable", "freeze", "set_threshold", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: called.append(name))
    with background:
        with background:
            pass
    assert called == []
