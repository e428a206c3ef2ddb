from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from asyncflow.streams.cuda import flags
from asyncflow.streams.cuda.bindings import bindings_beside
from asyncflow.streams.cuda.flags import PAGE, WRAP, Flag, Flags
from asyncflow.streams.cuda.stream import CudaStream
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CUDARuntimeError
from tests.patience import PATIENCE_S


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2) as fake:
        yield fake


@pytest.fixture
def stream(cupy: FakeCupy) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@pytest.fixture
def flag(cupy: FakeCupy, stream: Any) -> Flag:
    found = Flags(cupy).of(stream.ptr)
    assert found is not None
    return found


def test_a_number_is_reached_when_the_work_before_it_is_done(cupy: FakeCupy, stream: Any, flag: Flag) -> None:
    cupy.pause()
    seen: list[bool] = []

    def look(number: int) -> None:
        seen.append(flag.has_reached(number))

    numbers = []
    for _ in range(3):
        number = flag.mark()
        numbers.append(number)
        cupy.engine.give(cupy.engine.queue(stream.ptr, 0), "kernel", partial(look, number))
    assert numbers == [1, 2, 3] and not any(map(flag.has_reached, numbers))
    assert cupy.step(1) == 1
    cupy.resume()
    cupy.wait_idle()
    assert seen == [True] * 3 and all(map(flag.has_reached, numbers))
    assert not flag.has_reached(4)


def test_numbers_begin_again_after_the_last_one(cupy: FakeCupy, flag: Flag) -> None:
    cupy.wait_idle()
    flag.given = WRAP - 2
    flag.words[flag.index] = WRAP - 2
    cupy.pause()
    numbers = [flag.mark() for _ in range(3)]
    assert numbers == [WRAP - 1, 0, 1] and not any(map(flag.has_reached, numbers))
    cupy.resume()
    cupy.wait_idle()
    assert all(map(flag.has_reached, numbers)) and not flag.has_reached(2)


def test_each_stream_has_a_word_of_its_own(cupy: FakeCupy) -> None:
    made = Flags(cupy)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2 * PAGE + 1)]
    words = [made.of(stream.ptr) for stream in streams]
    cupy.wait_idle()
    for flag in words[::2]:
        assert flag is not None
        flag.mark()
    cupy.wait_idle()
    assert [flag is not None and flag.has_reached(1) for flag in words] == [k % 2 == 0 for k in range(2 * PAGE + 1)]
    assert made.of(streams[3].ptr) is words[3]
    assert [name for _, name in cupy.calls] == ["hostAlloc"] * 3


def test_a_stream_without_pinned_memory_has_no_flag_and_others_keep_theirs(cupy: FakeCupy) -> None:
    made = Flags(cupy)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(PAGE + 3)]
    first = [made.of(stream.ptr) for stream in streams[:PAGE]]
    cupy.fail_next(2, "hostAlloc")
    assert made.of(streams[PAGE].ptr) is None
    later = [made.of(stream.ptr) for stream in streams[PAGE + 1 :]]
    addresses = {(id(flag.words), flag.index) for flag in (*first, *later) if flag is not None}
    assert len(addresses) == PAGE + 2


def test_an_error_of_the_driver_is_raised(cupy: FakeCupy, flag: Flag) -> None:
    cupy.fail_next(700, "cuStreamWriteValue32")
    with pytest.raises(CUDARuntimeError) as caught:
        flag.mark()
    assert caught.value.status == 700 and flag.given == 0


def test_a_graph_may_not_capture_a_flag(cupy: FakeCupy, stream: Any, flag: Flag) -> None:
    """Each launch of the graph would write the number of one ticket again."""
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
    with pytest.raises(CUDARuntimeError):
        flag.mark()
    with pytest.raises(CUDARuntimeError):
        stream.end_capture()


@pytest.mark.parametrize("lacks", ["the driver's support", "the function", "cuda.bindings"])
async def test_without_flags_a_thread_waits(cupy: FakeCupy, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "the driver's support":
        cupy.bindings.can_write = False
    elif lacks == "the function":
        del cupy.bindings.driver.cuStreamWriteValue32
    else:
        monkeypatch.setattr(flags, "bindings_beside", lambda _: None)
    stream = CudaStream(cupy, 0, "cuda:0/compute")
    cupy.pause()
    stream.enqueue(lambda: None)
    delivered = asyncio.Event()
    stream.notify(lambda error: delivered.set())
    assert stream._reaper.queued == 1
    cupy.resume()
    await delivered.wait()
    assert await stream.aclose(PATIENCE_S)
    assert "eventSynchronize" in {name for thread, name in cupy.calls if thread != threading.get_ident()}


def test_a_stand_in_brings_its_own_bindings(cupy: FakeCupy) -> None:
    assert bindings_beside(cupy) is cupy.bindings
