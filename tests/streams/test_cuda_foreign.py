"""Streams of other libraries, awaited through the public `asyncflow.cuda` on a stand-in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import asyncflow as af
from asyncflow.streams.cuda import foreign
from asyncflow.streams.cuda.card import PhysicalCard, card_of
from tests.cells import SEEDS
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.engine import Item
from tests.fake_cupy.errors import CUDARuntimeError
from tests.fake_cupy.stand_in import stand_in


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with stand_in(devices=2) as fake:
        yield fake


@pytest.fixture
def card(cupy: FakeCupy) -> PhysicalCard:
    return card_of(cupy, 0)


@pytest.fixture
def theirs(cupy: FakeCupy) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def launch(cupy: FakeCupy, stream: Any, work: Callable[[], None] = lambda: None) -> None:
    cupy.engine.give(cupy.engine.queue(stream.ptr, max(stream.device_id, 0)), "kernel", work)


class Stuck:
    """Work of a stream that is not done inside the block."""

    def __init__(self, cupy: FakeCupy, stream: Any) -> None:
        self.engine = cupy.engine
        self.cause = Item("elsewhere", None, (), internal=True)
        self.engine.give(self.engine.queue(stream.ptr, 0), "kernel", None, (self.cause,))

    def __enter__(self) -> None:
        """Nothing: the work was given."""

    def __exit__(self, *_: object) -> None:
        with self.engine.condition:
            self.cause.finish()
            self.engine.condition.notify_all()


class Torch:
    """A stream as PyTorch has it."""

    def __init__(self, stream: Any) -> None:
        self.cuda_stream = stream.ptr
        self.device_index = stream.device_id


class Property:
    """A stream whose protocol is a property, as in early versions of it."""

    def __init__(self, stream: Any) -> None:
        self.__cuda_stream__ = (0, stream.ptr)


KINDS: dict[str, Callable[[Any], object]] = {
    "CuPy": lambda stream: stream,
    "PyTorch": Torch,
    "a property": Property,
    "a handle": lambda stream: stream.ptr,
}


@pytest.mark.every_loop
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [0, 1])
async def test_a_stream_is_awaited_while_the_loop_runs(cupy: FakeCupy, kind: str, device: int) -> None:
    with cupy.cuda.Device(device):
        theirs = cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    ran = list[int]()
    launch(cupy, theirs, lambda: ran.append(1))
    waits = [asyncio.create_task(af.cuda.done(KINDS[kind](theirs))) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    launch(cupy, theirs, lambda: ran.append(2))
    assert not any(wait.done() for wait in waits) and ran == []
    cupy.resume()
    await asyncio.gather(*waits)
    assert ran[0] == 1
    assert [name for name in cupy.blocking() if name != "hostAlloc"] == []


async def test_later_work_is_not_waited_for(cupy: FakeCupy, theirs: Any) -> None:
    cupy.pause()
    launch(cupy, theirs)
    wait = asyncio.create_task(af.cuda.done(theirs))
    await asyncio.sleep(0)
    with Stuck(cupy, theirs):
        cupy.resume()
        await wait
        assert cupy.pending(theirs) == 1


async def test_the_default_stream_is_that_of_the_current_device(cupy: FakeCupy) -> None:
    cupy.pause()
    ran = list[int]()
    with cupy.cuda.Device(1):
        cupy.engine.give(cupy.engine.queue(0, 1), "kernel", lambda: ran.append(1))
        wait = asyncio.create_task(af.cuda.done(0))
        await asyncio.sleep(0)
    cupy.resume()
    await wait
    assert ran == [1]


async def test_one_stream_does_not_hold_up_another(cupy: FakeCupy, theirs: Any) -> None:
    slow = cupy.cuda.Stream(non_blocking=True)
    with Stuck(cupy, slow):
        first = asyncio.create_task(af.cuda.done(slow))
        await asyncio.sleep(0)
        cupy.pause()
        launch(cupy, theirs)
        second = asyncio.create_task(af.cuda.done(theirs))
        await asyncio.sleep(0)
        cupy.resume()
        await second
        assert not first.done()
    await first


async def test_a_finished_stream_is_done_at_once(cupy: FakeCupy, card: PhysicalCard, theirs: Any) -> None:
    launch(cupy, theirs)
    cupy.wait_idle()
    made = len(card._made)
    finished = af.cuda.done(theirs)
    with pytest.raises(StopIteration):
        finished.send(None)  # it does not suspend
    assert len(card._made) == made and card.awaited == {}


async def test_waits_one_after_another_use_one_stream_of_ours(cupy: FakeCupy, card: PhysicalCard, theirs: Any) -> None:
    for _ in range(20):
        cupy.pause()
        launch(cupy, theirs)
        wait = asyncio.create_task(af.cuda.done(theirs))
        await asyncio.sleep(0)
        assert len(card.awaited) == 1
        cupy.resume()
        await wait
    assert card.awaited == {} and len(card._made) == 1


async def test_a_cancelled_wait_leaves_the_work_and_the_other_waits(
    cupy: FakeCupy, card: PhysicalCard, theirs: Any
) -> None:
    cupy.pause()
    launch(cupy, theirs)
    waits = [asyncio.create_task(af.cuda.done(theirs)) for _ in range(3)]
    await asyncio.sleep(0)
    waits[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[1]
    assert len(card.awaited) == 1 and cupy.pending(theirs) > 0
    cupy.resume()
    await asyncio.gather(waits[0], waits[2])
    await af.cuda.done(theirs)
    assert card.awaited == {}


async def test_a_lost_card_ends_every_wait(cupy: FakeCupy, card: PhysicalCard, theirs: Any) -> None:
    other = cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    for stream in (theirs, other):
        launch(cupy, stream)
    waits = [asyncio.create_task(af.cuda.done(stream)) for stream in (theirs, other, theirs)]
    await asyncio.sleep(0)
    cupy.fail_device(0)
    for outcome in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(outcome, af.DeviceLostError) and isinstance(outcome.__cause__, CUDARuntimeError)
    with pytest.raises(af.DeviceLostError, match=r"CUDA device 0 is lost.*restart the process"):
        await af.cuda.done(theirs)
    assert card.awaited == {}
    with cupy.cuda.Device(1):
        unharmed = cupy.cuda.Stream(non_blocking=True)
    await af.cuda.done(unharmed)


@pytest.mark.parametrize("call", ["streamWaitEvent", "eventRecord"])
async def test_a_card_that_is_lost_as_the_wait_begins_leaves_nothing(
    cupy: FakeCupy, card: PhysicalCard, theirs: Any, call: str
) -> None:
    cupy.pause()
    launch(cupy, theirs)
    cupy.fail_next(700, call)
    with pytest.raises(af.DeviceLostError):
        await af.cuda.done(theirs)
    assert card.awaited == {}


async def test_a_stream_that_captures_is_refused(cupy: FakeCupy, theirs: Any) -> None:
    theirs.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    with pytest.raises(ValueError, match=f"the stream {theirs.ptr:#x} captures a CUDA graph"):
        await af.cuda.done(theirs)
    theirs.end_capture()  # it was left as it was


@pytest.mark.parametrize("given", [None, "stream", 1.5, True, object()])
async def test_other_objects_are_refused(cupy: FakeCupy, given: object) -> None:
    with pytest.raises(TypeError, match=rf"takes a CUDA stream.*not {type(given).__name__}"):
        await af.cuda.done(given)


async def test_an_unknown_version_of_the_protocol_is_refused(cupy: FakeCupy, theirs: Any) -> None:
    theirs = Property(theirs)
    theirs.__cuda_stream__ = (1, 0)
    with pytest.raises(TypeError, match="has version 1; 0 is the known one"):
        await af.cuda.done(theirs)


async def test_handles_and_devices_that_are_not_there_are_refused(
    cupy: FakeCupy, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="device=2, but this machine has 2 CUDA devices"):
        await af.cuda.done(theirs, device=2)
    with pytest.raises(ValueError, match="CUDA has no stream 0xdead0 on device 0: pass device="):
        await af.cuda.done(0xDEAD0)
    cupy.pause()
    launch(cupy, theirs)
    with pytest.raises(ValueError, match="on device 1: pass device="):
        await af.cuda.done(theirs.ptr, device=1)
    with cupy.cuda.Device(1):
        second = cupy.cuda.Stream(non_blocking=True)
    launch(cupy, second)
    monkeypatch.setattr(foreign, "bindings_beside", lambda _: None)
    with pytest.raises(ValueError, match="on device 0: pass device="):
        await af.cuda.done(second.ptr)
    cupy.resume()
    await af.cuda.done(second.ptr, device=1)


def test_a_loop_that_was_closed_with_open_waits_does_not_disturb_the_next(
    cupy: FakeCupy, card: PhysicalCard, theirs: Any
) -> None:
    cupy.pause()
    launch(cupy, theirs)

    async def leave() -> None:
        wait = asyncio.create_task(af.cuda.done(theirs))
        await asyncio.sleep(0)
        wait.cancel()

    asyncio.run(leave())
    assert len(card.awaited) == 1
    cupy.resume()
    cupy.wait_idle()

    async def again() -> None:
        cupy.pause()
        launch(cupy, theirs)
        wait = asyncio.create_task(af.cuda.done(theirs))
        await asyncio.sleep(0)
        cupy.resume()
        await wait

    asyncio.run(again())
    assert card.awaited == {}


@pytest.mark.parametrize("seed", range(3 * SEEDS))
async def test_waits_end_after_their_work_in_any_order_of_the_card(seed: int) -> None:
    draw = random.Random(f"waits {seed}")
    with stand_in(devices=2, seed=seed) as cupy:
        streams = []
        for k in range(6):
            with cupy.cuda.Device(k % 2):
                streams.append(cupy.cuda.Stream(non_blocking=True))
        executed = [0] * 6

        def run(k: int) -> None:
            executed[k] += 1

        async def wait(k: int, count: int) -> None:
            await af.cuda.done(streams[k])
            assert executed[k] >= count, seed

        given, tasks = [0] * 6, list[asyncio.Task[None]]()
        for _ in range(300):
            k = draw.randrange(6)
            launch(cupy, streams[k], partial(run, k))
            given[k] += 1
            if draw.random() < 0.5:
                tasks.append(asyncio.create_task(wait(k, given[k])))
            if tasks and draw.random() < 0.1:
                draw.choice(tasks).cancel()
            if draw.random() < 0.3:
                await asyncio.sleep(0)
            if draw.random() < 0.05:
                draw.choice((cupy.pause, cupy.resume))()
        cupy.resume()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), seed
        for k in range(6):
            await wait(k, given[k])
        cards = [card_of(cupy, device) for device in range(2)]
        for card in cards:
            while card.awaited:  # of cancelled waits
                await af.cuda.done(streams[0])
                await asyncio.sleep(0)
