"""Reading ahead: how far, where, and its end."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

import pytest

import asyncflow as af
from asyncflow.inputs.read_ahead import ReadAhead
from asyncflow.inputs.stages import Batched, Repetition
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from asyncflow.inputs.stages import Element


class Numbers:
    """A source that notes how far it is read, on which threads, and whether it was closed."""

    def __init__(self, count: int = 1000, *, fail_at: int = -1) -> None:
        self.count, self.fail_at = count, fail_at
        self.read = self.closed = self.opened = 0
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.is_opened = threading.Event()

    def blocking(self) -> Generator[Element]:
        self.opened += 1
        self.is_opened.set()
        try:
            for number in range(self.count):
                assert self.gate.wait(PATIENCE_S)
                self.threads.add(threading.current_thread().name)
                if number == self.fail_at:
                    raise OSError("the disk is gone")
                self.read += 1
                yield (number,)
        finally:
            self.closed += 1

    async def awaiting(self) -> AsyncGenerator[Element]:
        self.opened += 1
        self.is_opened.set()
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                if not self.gate.is_set():
                    await asyncio.to_thread(self.gate.wait, PATIENCE_S)
                if number == self.fail_at:
                    raise OSError("the disk is gone")
                self.read += 1
                yield (number,)
        finally:
            self.closed += 1


KINDS = pytest.mark.parametrize("kind", ["blocking", "awaiting"])


async def idle(reading: ReadAhead) -> None:
    """Waits until no job is under way."""
    while (job := reading._job) is not None:
        await asyncio.wait([job], timeout=PATIENCE_S)


async def opened(source: Numbers) -> None:
    """Waits until the source is read, on whichever thread."""
    await asyncio.wait_for(asyncio.to_thread(source.is_opened.wait, PATIENCE_S), PATIENCE_S)


@KINDS
async def test_reads_so_far_and_no_further(kind: str) -> None:
    source = Numbers()
    reading = ReadAhead("in", getattr(source, kind), [], 4)
    assert source.opened == 0, "nothing is read before something is asked for"
    for taken in range(20):
        assert await reading.take() == (taken,)
        await idle(reading)
        assert taken + 1 + 2 <= source.read <= taken + 1 + 4
    await reading.aclose()
    assert source.closed == 1
    assert all(name.startswith("asyncflow reads in") for name in source.threads)
    with pytest.raises(af.EndOfInput, match="closed"):
        for _ in range(9):
            await reading.take()


@KINDS
async def test_a_step_waits_for_the_first_element_alone(kind: str) -> None:
    """Reading is faster than computing: 1 of 100 steps waits, under 2 %."""
    reading = ReadAhead("in", getattr(Numbers(), kind), [], 4)
    for _ in range(100):
        await reading.take()
        await idle(reading)  # the step computes for longer
    assert reading.waits == 1
    await reading.aclose()


@KINDS
async def test_ends_and_leaves_nothing(kind: str) -> None:
    source = Numbers(3)
    reading = ReadAhead("in", getattr(source, kind), [Repetition(2)], 4)
    assert [(await reading.take())[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert not await reading.has_more()
    for _ in range(2):
        with pytest.raises(af.EndOfInput, match="'in' has no more elements"):
            await reading.take()
    await idle(reading)
    assert (source.opened, source.closed) == (2, 2)
    assert reading._pool is None
    await reading.aclose()


@KINDS
async def test_a_failure_comes_after_the_read_elements_and_closes_the_source(kind: str) -> None:
    source = Numbers(9, fail_at=2)
    reading = ReadAhead("in", getattr(source, kind), [], 4)
    assert [(await reading.take())[0] for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            await reading.has_more()
    assert source.closed == 1 and reading._pool is None


@KINDS
async def test_a_stage_that_fails_closes_the_source(kind: str) -> None:
    source = Numbers(9)
    reading = ReadAhead("in", getattr(source, kind), [Batched(2, (), None, False)], 4)
    with pytest.raises(ValueError, match="zip"):
        await reading.take()
    assert source.closed == 1


@KINDS
async def test_fault_18_a_cancelled_take_takes_nothing(kind: str) -> None:
    """F18: whoever waits is cancelled, at its first step and later; the element is there for the next."""
    source = Numbers(9)
    source.gate.clear()
    reading = ReadAhead("in", getattr(source, kind), [], 4)
    for steps in range(4):
        waiting = asyncio.ensure_future(reading.take())
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    source.gate.set()
    assert [(await reading.take())[0] for _ in range(3)] == [0, 1, 2]
    await reading.aclose()
    assert source.closed == 1


@KINDS
async def test_closing_ends_waiting_consumers(kind: str) -> None:
    source = Numbers(9)
    source.gate.clear()
    reading = ReadAhead("in", getattr(source, kind), [], 4)
    waiting = [asyncio.ensure_future(reading.take()) for _ in range(3)]
    await opened(source)
    closing = asyncio.ensure_future(reading.aclose())
    found: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, af.EndOfInput) for each in found)
    source.gate.set()
    await closing
    assert source.closed == 1 and source.read <= 1


@KINDS
async def test_several_waiting_consumers_get_an_element_each(kind: str) -> None:
    source = Numbers(7)
    source.gate.clear()
    reading = ReadAhead("in", getattr(source, kind), [], 2)
    waiting = [asyncio.ensure_future(reading.take()) for _ in range(9)]
    await opened(source)
    source.gate.set()
    found: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
    numbers = [each[0] for each in found if isinstance(each, tuple)]
    assert sorted(numbers) == [*range(7)]
    assert sum(isinstance(each, af.EndOfInput) for each in found) == 2


@KINDS
async def test_returned_elements_are_taken_again_by_their_number(kind: str) -> None:
    """Also by whoever goes on from the progress of an earlier reading, where elements had been put back as well."""
    async with AsyncExitStack() as readings:

        async def begin(*progress: Any) -> ReadAhead:
            reading = ReadAhead("in", getattr(Numbers(9), kind), [], 4, *progress)
            return await readings.enter_async_context(aclosing(reading))

        first = await begin()
        assert [await first.take() for _ in range(5)] == [(number,) for number in range(5)]
        first._give_back([(1,), (3,)], [1, 3])
        assert first.progress == (5, [1, 3])
        second = await begin(*first.progress)
        assert [await second.take() for _ in range(4)] == [(1,), (3,), (5,), (6,)]
        second._give_back([(3,), (6,)], [1, 3])
        assert second.progress == (7, [3, 6])
        assert [await second.take() for _ in range(4)] == [(3,), (6,), (7,), (8,)]


async def test_what_would_end_the_interpreter_ends_the_reading() -> None:
    def source() -> Generator[Element]:
        yield (1,)
        raise SystemExit(3)

    reading = ReadAhead("in", source, [], 4)
    assert await reading.take() == (1,)
    with pytest.raises(RuntimeError, match=r"reading ended with SystemExit\(3\)"):
        await reading.take()
