"""Streams, events, faults and controls of the fake."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from tests.fake_cupy import FakeCupy
from tests.fake_cupy.engine import MOST_SLEEPERS
from tests.fake_cupy.errors import CUDARuntimeError, WouldBlockForEverError
from tests.patience import PATIENCE_S


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2) as fake:
        yield fake


def test_an_event_is_done_only_when_the_work_before_it_is(cupy: FakeCupy) -> None:
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    event = stream.record(cupy.cuda.Event(block=True, disable_timing=True))
    assert (runtime.eventQuery(event.ptr), runtime.streamQuery(stream.ptr), cupy.pending(stream)) == (600, 600, 1)
    assert cupy.step(5) == 1
    assert (runtime.eventQuery(event.ptr), runtime.streamQuery(stream.ptr), cupy.pending(stream)) == (0, 0, 0)
    assert cupy.blocking() == []


def test_a_stream_waits_for_the_record_that_was_the_last_when_it_was_told_to(cupy: FakeCupy) -> None:
    cupy.pause()
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    event = first.record()
    second.wait_event(event)
    mark = second.record()
    first.record(event)
    while not mark.done:
        assert cupy.step(1) == 1
    # Nothing says that the second record of `event` has happened; the first has.
    cupy.resume()
    event.synchronize()
    assert cupy.blocking() == ["eventSynchronize"]


def test_the_paused_thread_may_not_wait(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    stream.record()
    with pytest.raises(WouldBlockForEverError, match="streamSynchronize blocks"):
        stream.synchronize()


def test_another_thread_waits_until_resumed(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    stream.record()
    waiter = threading.Thread(target=stream.synchronize)
    waiter.start()
    cupy.resume()
    waiter.join()
    assert waiter.ident is not None and cupy.blocking(waiter.ident) == ["streamSynchronize"]


def test_a_fault_of_a_stream_loses_its_device_and_no_other(cupy: FakeCupy) -> None:
    runtime = cupy.cuda.runtime
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(1):
        other = cupy.cuda.Stream(non_blocking=True)
    before = stream.record()
    cupy.wait_idle()
    cupy.pause()
    cupy.fail_stream(stream, 700)
    after = stream.record()
    cupy.resume()
    cupy.wait_idle()
    assert [runtime.eventQuery(event.ptr) for event in (before, after)] == [700, 700]
    with pytest.raises(CUDARuntimeError, match="cudaErrorIllegalAddress: an illegal memory access") as raised:
        after.synchronize()
    assert raised.value.status == 700
    assert not after.done
    with cupy.cuda.Device(1):
        other.record().synchronize()


def test_a_finalizer_on_the_gpus_thread_may_allocate(cupy: FakeCupy) -> None:
    """It waits for no item that is under way there: that would be its own."""
    engine, has_allocated = cupy.engine, threading.Event()

    def finalize() -> None:
        cupy.cuda.memory.alloc(512)
        has_allocated.set()

    engine.give(engine.queue(0, 0), "poison", finalize, internal=True)
    assert has_allocated.wait(PATIENCE_S)


def test_a_waiter_gets_the_fault(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    cupy.fail_stream(stream, 719)
    event = stream.record()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            event.synchronize()
        except CUDARuntimeError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    cupy.resume()
    waiter.join()
    assert [type(error) for error in caught] == [CUDARuntimeError]


def test_fail_next_is_once_unless_the_code_is_sticky(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.fail_next(2, "malloc")
    stream.record()
    with pytest.raises(CUDARuntimeError, match="out of memory"):
        cupy.cuda.runtime.malloc(512)
    assert cupy.cuda.runtime.malloc(512) != 0
    cupy.fail_next(719)
    with pytest.raises(CUDARuntimeError, match="unspecified launch failure"):
        stream.record()
    with pytest.raises(CUDARuntimeError, match="unspecified launch failure"):
        cupy.cuda.runtime.memGetInfo()


def test_a_full_launch_queue_blocks() -> None:
    with FakeCupy(launch_limit=3) as cupy:
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.pause()
        for _ in range(3):
            stream.record(cupy.cuda.Event())
        with pytest.raises(WouldBlockForEverError, match="launch queue full"):
            stream.record(cupy.cuda.Event())
        assert cupy.blocking() == ["eventRecord: launch queue full"]


def test_events_that_a_thread_can_sleep_on_are_few() -> None:
    """As on an H100, where a stream that is behind has room for 56 of them, and for any number of others."""
    with FakeCupy(launch_limit=3) as cupy:
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.pause()
        for _ in range(1000):
            stream.record(cupy.cuda.Event(disable_timing=True))
        for _ in range(MOST_SLEEPERS):
            stream.record(cupy.cuda.Event(block=True, disable_timing=True))
        with pytest.raises(WouldBlockForEverError, match="launch queue full"):
            stream.record(cupy.cuda.Event(block=True, disable_timing=True))
        cupy.resume()


def test_streams_and_devices_are_current_per_thread(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    seen: list[object] = []
    with cupy.cuda.Device(0), stream:
        thread = threading.Thread(target=lambda: seen.append(cupy.cuda.get_current_stream()))
        thread.start()
        thread.join()
        assert cupy.cuda.get_current_stream() is stream
    assert seen == [cupy.cuda.Stream.null] == [cupy.cuda.get_current_stream()]
    with cupy.cuda.Device(1):
        assert cupy.cuda.runtime.getDevice() == 1
        with pytest.raises(RuntimeError, match="does not match with the current device"):
            stream.__enter__()
    assert cupy.cuda.runtime.getDevice() == 0


def test_an_event_of_another_device_cannot_be_recorded(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(1):
        event = cupy.cuda.Event()
    with pytest.raises(CUDARuntimeError, match="invalid resource handle"):
        stream.record(event)


def test_the_null_stream_and_blocking_streams_take_turns(cupy: FakeCupy) -> None:
    blocking, free = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    first = blocking.record()
    second = cupy.cuda.Stream.null.record()
    third = blocking.record()
    other = free.record()
    done = [event.done for event in (first, second, third)]
    order: list[list[bool]] = [done]
    while cupy.step(1):
        order.append([event.done for event in (first, second, third)])
    assert other.done
    assert all(earlier >= later for state in order for earlier, later in itertools.pairwise(state))


def test_the_order_of_streams_depends_on_the_seed() -> None:
    def order(seed: int) -> tuple[int, ...]:
        with FakeCupy(seed=seed) as cupy:
            cupy.pause()
            events = [cupy.cuda.Stream(non_blocking=True).record() for _ in range(4)]
            finished: list[int] = []
            while cupy.step(1):
                finished += [i for i, event in enumerate(events) if event.done and i not in finished]
            return tuple(finished)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(8)}) > 2


def test_elapsed_time_needs_timing_and_completion(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.pause()
    start, end = stream.record(), stream.record()
    with pytest.raises(CUDARuntimeError, match="not ready"):
        cupy.cuda.get_elapsed_time(start, end)
    cupy.resume()
    end.synchronize()
    assert cupy.cuda.get_elapsed_time(start, end) >= 0
    untimed = stream.record(cupy.cuda.Event(disable_timing=True))
    with pytest.raises(CUDARuntimeError, match="invalid resource handle"):
        cupy.cuda.get_elapsed_time(start, untimed)
