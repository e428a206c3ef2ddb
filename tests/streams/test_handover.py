"""A loop that is never idle hands the GIL over while something is to come from a thread, and only then.

On the machine of the card, which has sixteen cores, a thread beside a busy loop waited for seconds for the GIL; with
two cores it has it soon. So these tests count how often the loop's thread sleeps.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING

import pytest

from asyncflow.streams import handover
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.streams.futures import resolve
from asyncflow.streams.handover import awaiting_a_thread, handover_of
from asyncflow.streams.virtual import VirtualClockLoop
from tests.patience import PATIENCE_S
from tests.streams.outcomes import see_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clocks:
    """The times of a loop's thread, which `handover` reads, and its sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gaps: list[float] = []
        self.looks = 0
        self.busy = 1.0
        """The share of a core that the thread seems to take."""
        self._now_s = 0.0
        monkeypatch.setattr(handover, "sleep", self.gaps.append)
        monkeypatch.setattr(handover, "thread_time", self._thread_time)
        monkeypatch.setattr(handover, "perf_counter", self._perf_counter)

    def _thread_time(self) -> float:
        self.looks += 1
        return self.busy * self._now_s

    def _perf_counter(self) -> float:
        """However late the loop looks: what counts is the share."""
        self._now_s += handover.INTERVAL_S
        return self._now_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.fixture
def stream() -> Iterator[ThreadStream]:
    stream = ThreadStream("cpu:0/test")
    yield stream
    see_off(stream)


async def _busy_until(is_enough: Callable[[], bool]) -> None:
    """Always has a callback ready."""
    until_s = perf_counter() + PATIENCE_S
    while not is_enough():
        assert perf_counter() < until_s
        await asyncio.sleep(0)


async def test_a_busy_loop_makes_way_for_a_stream(clocks: Clocks, stream: ThreadStream) -> None:
    gate = threading.Event()
    delivered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    stream.submit(
        gate.wait,
        (PATIENCE_S,),
        lambda result, error, *_: resolve(delivered, result, error),
        asyncio.get_running_loop(),
    )
    await _busy_until(lambda: len(clocks.gaps) == 3)
    assert set(clocks.gaps) == {handover.GAP_S}
    gate.set()
    assert await delivered
    assert handover_of(asyncio.get_running_loop()).awaited == 0


async def test_it_makes_way_for_events_and_other_threads(clocks: Clocks, stream: ThreadStream) -> None:
    gate = threading.Event()
    stream.enqueue(gate.wait, PATIENCE_S)
    waiting = asyncio.ensure_future(stream.record().wait())
    await _busy_until(lambda: len(clocks.gaps) == 2)
    gate.set()
    await waiting
    gate.clear()

    async def beside() -> None:
        with awaiting_a_thread():
            await asyncio.to_thread(gate.wait, PATIENCE_S)

    waiting = asyncio.ensure_future(beside())
    await _busy_until(lambda: len(clocks.gaps) == 4)
    gate.set()
    await waiting
    assert handover_of(asyncio.get_running_loop()).awaited == 0


async def test_a_loop_that_is_idle_does_not_sleep(clocks: Clocks) -> None:
    clocks.busy = 0.1
    with awaiting_a_thread():
        await _busy_until(lambda: clocks.looks >= 6)
    assert clocks.gaps == []


async def test_no_look_is_taken_without_an_expected_completion(clocks: Clocks) -> None:
    with awaiting_a_thread():
        await _busy_until(lambda: len(clocks.gaps) == 1)
    looked = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(3 * handover.INTERVAL_S, looked.set_result, None)
    looks = clocks.looks
    await looked
    assert clocks.looks == looks
    assert len(clocks.gaps) == 1


def test_virtual_time_does_not_pass(clocks: Clocks) -> None:

    async def main() -> float:
        with awaiting_a_thread():
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    loop = VirtualClockLoop()
    try:
        assert loop.run_until_complete(main()) == 1.0
        assert (loop.ticks, clocks.looks) == (1, 0)
    finally:
        loop.close()


class Request:
    """Something that a context variable refers to."""


async def test_the_timer_keeps_no_context_alive(clocks: Clocks) -> None:
    variable: ContextVar[Request] = ContextVar("request")
    clocks.busy = 0.0
    kept: list[weakref.ref[Request]] = []

    async def request() -> None:
        variable.set(Request())
        kept.append(weakref.ref(variable.get()))
        handover_of(asyncio.get_running_loop()).expect(asyncio.get_running_loop())

    await asyncio.create_task(request())
    await asyncio.sleep(0)
    gc.collect()
    assert kept[0]() is None
    handover_of(asyncio.get_running_loop()).arrived()
