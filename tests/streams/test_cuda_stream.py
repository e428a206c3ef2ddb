from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from asyncflow.errors import InternalError, SessionClosedError
from asyncflow.streams import ThreadStream
from asyncflow.streams.cuda.stream import CudaEvent, CudaStream, active
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CUDARuntimeError
from tests.patience import PATIENCE_S
from tests.streams.outcomes import fail


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2) as fake:
        yield fake


@asynccontextmanager
async def opened(cupy: FakeCupy, name: str = "cuda:0/compute", physical: int = 0) -> AsyncIterator[CudaStream]:
    stream = CudaStream(cupy, physical, name)
    try:
        yield stream
    finally:
        cupy.resume()
        assert await stream.aclose(PATIENCE_S)


def launch(cupy: FakeCupy, work: Callable[[], None] = lambda: None) -> None:
    """A kernel on the current stream, as CuPy's would be."""
    stream = cupy.cuda.get_current_stream()
    cupy.engine.give(cupy.engine.queue(stream.ptr, cupy.cuda.runtime.getDevice()), "kernel", work)


def stalls(cupy: FakeCupy) -> list[str]:
    """The blocking calls of this thread, but for the memory of the flags, which a card's first stream pins."""
    return [name for name in cupy.blocking() if name != "hostAlloc"]


def ticket(stream: CudaStream, *holds: object) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(error: BaseException | None) -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    stream.notify(deliver, *holds)
    return future


def current(cupy: FakeCupy) -> tuple[int, Any, CudaStream | None]:
    return cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream(), active.stream


class Held:
    """Something that can be watched."""


# -- what is current -------------------------------------------------------------------------------------------------


async def test_a_stream_is_current_inside_its_block_only(cupy: FakeCupy) -> None:
    async with opened(cupy, "cuda:1/compute", 1) as stream:
        outside = current(cupy)
        assert outside == (0, cupy.cuda.Stream.null, None)
        for _ in range(2):
            with stream as entered:
                assert entered is stream
                assert current(cupy) == (1, stream.raw, stream)
            assert current(cupy) == outside
        assert stream.raw.is_non_blocking and stream.raw.device_id == 1


async def test_blocks_of_two_streams_and_two_devices_nest(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b") as b, opened(cupy, "c", 1) as c:
        draw = random.Random(1)

        def nest(depth: int) -> None:
            before = current(cupy)
            stream = draw.choice([a, b, c])
            with stream:
                assert current(cupy) == (stream.physical, stream.raw, stream)
                for _ in range(draw.randrange(3) if depth else 0):
                    nest(depth - 1)
                assert current(cupy) == (stream.physical, stream.raw, stream)
            assert current(cupy) == before

        for _ in range(30):
            nest(6)


async def test_an_exception_restores_the_current_stream(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b", 1) as b:
        with a:
            with pytest.raises(ValueError, match="inside"), a, b, b:
                raise ValueError("inside")
            assert current(cupy) == (0, a.raw, a)
        assert current(cupy) == (0, cupy.cuda.Stream.null, None)


async def test_a_stream_that_cannot_be_made_current_leaves_all_as_it_was(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b", 1) as b:
        b.raw.device_id = 0  # CuPy refuses a stream of another device than the current one
        with a:
            with pytest.raises(RuntimeError, match="does not match"), b:
                pass
            assert current(cupy) == (0, a.raw, a)
        b.raw.device_id = 1
        assert current(cupy) == (0, cupy.cuda.Stream.null, None)


async def test_an_active_stream_is_entered_again_without_a_call_of_cuda(cupy: FakeCupy) -> None:
    async with opened(cupy, "cuda:1/compute", 1) as stream:
        with stream:
            entered = cupy.cuda._streams.entered
            before = list(entered)
            cupy.cuda.runtime.setDevice(0)  # trusted not to happen: entering again would notice
            with stream:
                assert cupy.cuda.runtime.getDevice() == 0 and entered == before
            cupy.cuda.runtime.setDevice(1)


async def test_each_thread_has_its_own_active_stream(cupy: FakeCupy) -> None:
    async with opened(cupy, "a", 1) as a, opened(cupy, "b") as b:
        seen = list[object]()

        def elsewhere() -> None:
            seen.append(current(cupy))
            with b, a:
                seen.append(current(cupy))
            seen.append(current(cupy))

        with a:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert current(cupy) == (1, a.raw, a)
        nothing = (0, cupy.cuda.Stream.null, None)
        assert seen == [nothing, (1, a.raw, a), nothing]


async def test_awaiting_inside_a_block_is_found_out(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b") as b:

        async def leave_open() -> None:
            with b:
                await asyncio.sleep(0)

        task = asyncio.create_task(leave_open())
        with pytest.raises(InternalError, match=r"stream a ends a block in which <CudaStream b .*> is active"):
            with a:
                await asyncio.sleep(0)
        await task
        a.__exit__(None, None, None)  # what the bug left open
        assert current(cupy) == (0, cupy.cuda.Stream.null, None)


# -- the protocol ----------------------------------------------------------------------------------------------------


async def test_work_is_launched_at_once_and_done_in_order(cupy: FakeCupy) -> None:
    async with opened(cupy, "cuda:1/compute", 1) as stream:
        launched, done = list[object](), list[int]()

        def work(k: int) -> None:
            launched.append(current(cupy))
            launch(cupy, lambda: done.append(k))

        cupy.pause()
        for k in range(101):
            stream.enqueue(work, k)
        last = ticket(stream)
        assert launched == [(1, stream.raw, stream)] * 101 and done == [] and stream.pending == 1
        cupy.resume()
        await last
        assert done == list(range(101)) and stream.pending == 0


async def test_an_interrupt_is_not_kept_for_later(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        with pytest.raises(KeyboardInterrupt):
            stream.enqueue(fail, KeyboardInterrupt())
        with pytest.raises(SystemExit):
            stream.enqueue(fail, SystemExit(3))
        assert active.stream is None and stream.pending == 0


async def test_an_enqueued_failure_is_raised_by_the_next_event_awaited_and_once(cupy: FakeCupy) -> None:
    async with opened(cupy, "cuda:0/x") as stream:
        error = ValueError("no")
        earlier = stream.record()
        stream.enqueue(fail, error)
        never_awaited, awaited, again = stream.record(), stream.record(), stream.record()
        await earlier.wait()
        with pytest.raises(ValueError, match="no") as caught:
            await awaited.wait()
        assert caught.value is error and never_awaited.done()
        await again.wait()
        stream.enqueue(fail, ValueError("first"))
        stream.enqueue(fail, KeyError("second"))
        with pytest.raises(ExceptionGroup, match="2 failures on stream cuda:0/x") as group:
            await stream.record().wait()
        assert [type(failure) for failure in group.value.exceptions] == [ValueError, KeyError]


async def test_a_failure_that_no_event_raised_is_logged(cupy: FakeCupy, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="asyncflow.streams"):
        async with opened(cupy, "cuda:0/x") as stream:
            stream.enqueue(fail, ValueError("lost?"))
        assert await stream.aclose(PATIENCE_S)
    assert caplog.messages == ["work on stream cuda:0/x failed and no event was awaited"]
    assert "lost?" in caplog.text


async def test_an_event_is_done_when_the_work_before_it_is(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        cupy.pause()
        stream.enqueue(launch, cupy)
        event = stream.record()
        stream.enqueue(launch, cupy)
        waiters = [asyncio.create_task(event.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        assert not event.done()
        waiters.pop().cancel()
        assert cupy.step(2) == 2
        await asyncio.gather(*waiters)
        assert event.done() and cupy.pending(stream.raw) == 1
        await event.wait()
        assert stalls(cupy) == []


async def test_work_waits_for_another_streams_event_and_the_host_does_not(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b", 1) as b:
        for _ in range(50):
            order: list[str] = []
            a.enqueue(launch, cupy, partial(order.append, "producer"))
            b.wait(a.record())
            b.enqueue(launch, cupy, partial(order.append, "consumer"))
            await ticket(b)
            assert order == ["producer", "consumer"]


async def test_waiting_for_itself_or_for_finished_work_costs_nothing(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b") as b:
        event = a.record()
        await event.wait()
        cupy.pause()
        b.wait(event)
        a.wait(a.record())
        assert (cupy.pending(a.raw), cupy.pending(b.raw)) == (1, 0)  # the event


async def test_a_kind_of_event_that_a_gpu_cannot_wait_for_is_refused(cupy: FakeCupy) -> None:
    cpu = ThreadStream("cpu:0/x")
    async with opened(cupy, "cuda:0/x") as stream:
        with pytest.raises(TypeError, match="stream cuda:0/x can wait for a CudaEvent, not for ThreadEvent"):
            stream.wait(cpu.record())
    assert await cpu.aclose(PATIENCE_S)


async def test_events_are_used_again_without_references(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        made = cupy.cuda.runtime._events
        for _ in range(100):
            stream.record()
        assert len(made) == 1
        kept: list[CudaEvent] = [stream.record() for _ in range(3)]
        assert len(made) == 3 and len({event.point.raw.ptr for event in kept}) == 3
        cupy.pause()
        waiter = asyncio.create_task(kept.pop().wait())
        await asyncio.sleep(0)
        cupy.resume()
        await waiter


async def test_an_event_in_a_dead_cycle_can_be_used_again(cupy: FakeCupy) -> None:
    """The garbage collector finalizes all of a cycle, the card's event too if nothing else refers to it."""
    async with opened(cupy) as stream:
        cycle: list[object] = [stream.record()]
        cycle.append(cycle)
        del cycle
        gc.collect()
        await stream.record().wait()


async def test_an_event_that_someone_waits_for_is_not_used_again(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        cupy.pause()
        stream.enqueue(launch, cupy)
        event = stream.record()
        ptr = event.point.raw.ptr
        waiter = asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])
        del event, waiter
        gc.collect()
        assert ptr not in {stream.record().point.raw.ptr for _ in range(3)}
        cupy.resume()
        await ticket(stream)


# -- tickets ---------------------------------------------------------------------------------------------------------


async def test_held_objects_stay_until_the_work_is_done(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        cupy.pause()
        stream.enqueue(launch, cupy)
        held = [Held() for _ in range(2)]
        watches = [weakref.ref(one) for one in held]
        future = ticket(stream, held.pop())
        stream.hold(held.pop())
        future.cancel()
        gc.collect()
        assert stream.pending == 2
        assert all(watch() is not None for watch in watches)
        cupy.resume()
        await ticket(stream)
        assert [watch() for watch in watches] == [None, None]
        assert stream.pending == 0


async def test_one_event_tells_of_a_point_and_orders_by_it(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream, opened(cupy, "cuda:0/d2h") as other:
        cupy.pause()
        stream.enqueue(launch, cupy)
        held, told = Held(), asyncio.Event()
        watch = weakref.ref(held)
        event = stream.conclude(lambda _: told.set(), held)
        assert cupy.pending(stream.raw) == 2  # the kernel, and the event
        other.wait(event)
        behind = ticket(other)
        del held
        gc.collect()
        assert watch() is not None and not event.done() and not told.is_set()
        cupy.resume()
        await asyncio.gather(behind, told.wait(), event.wait())
        assert watch() is None and event.done()


async def test_without_a_recordable_event_no_call_comes_later(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        told: list[BaseException | None] = []
        cupy.fail_next(999, "eventRecord")
        for _ in range(2):
            with pytest.raises(CUDARuntimeError):
                stream.conclude(told.append)
        with pytest.raises(CUDARuntimeError):
            await ticket(stream)
        assert told == [] and stream.pending == 0


async def test_a_ticket_does_not_keep_its_stream(cupy: FakeCupy) -> None:
    """A session that is dropped ends its threads, whatever is in flight."""
    cupy.pause()
    stream = CudaStream(cupy, 0, "cuda:0/h2d")
    stream.enqueue(launch, cupy)
    told, watch = asyncio.Event(), weakref.ref(stream)
    stream.conclude(lambda _: told.set())
    owner = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="cuda:0/h2d was dropped"):
        owner.clear()
    assert watch() is None
    cupy.resume()
    await told.wait()


async def test_a_lost_device_fails_tickets_events_and_whatever_comes(cupy: FakeCupy) -> None:
    async with opened(cupy, "a") as a, opened(cupy, "b", 1) as b:
        lost: list[BaseException] = []
        a.on_lost = lost.append
        cupy.pause()
        event = a.record()
        cupy.fail_stream(a.raw)
        future = ticket(a)
        waiter = asyncio.create_task(a.record().wait())
        await asyncio.sleep(0)
        cupy.resume()
        with pytest.raises(CUDARuntimeError) as caught:
            await future
        error = caught.value
        assert lost == [error] and a.lost is error
        for use in (waiter, event.wait(), ticket(a)):
            with pytest.raises(CUDARuntimeError, match="illegal memory access"):
                await use
        for call in (a.record, event.done, lambda: a.wait(b.record()), lambda: b.wait(event)):
            with pytest.raises(CUDARuntimeError, match="illegal memory access"):
                call()
        assert lost == [error]
        await ticket(b)
        assert b.lost is None


async def test_an_event_that_finds_its_device_lost_tells_the_stream(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        lost: list[BaseException] = []
        stream.on_lost = lost.append
        event = stream.record()
        cupy.wait_idle()
        cupy.fail_device(0, 719)
        with pytest.raises(CUDARuntimeError, match="launch failure"):
            event.done()
        assert len(lost) == 1 and stream.lost is lost[0]


# -- the end ---------------------------------------------------------------------------------------------------------


async def test_closing_waits_for_work_in_flight_and_delivers_all(cupy: FakeCupy) -> None:
    stream = CudaStream(cupy, 0, "cuda:0/close")
    done, held = list[int](), Held()
    watch = weakref.ref(held)
    cupy.pause()
    futures = [ticket(stream, held) for _ in range(5)]
    stream.hold(held)
    stream.enqueue(launch, cupy, lambda: done.append(1))  # without a ticket
    del held
    closing = asyncio.create_task(stream.aclose(PATIENCE_S))
    await asyncio.sleep(0)
    assert not closing.done()
    cupy.resume()
    assert await closing
    assert all(future.done() for future in futures) and done == [1] and watch() is None and stream.pending == 0
    assert "asyncflow:cuda:0/close" not in {thread.name for thread in threading.enumerate()}
    assert await stream.aclose(0.0)
    assert stalls(cupy) == []
    async with opened(cupy, "a") as a, opened(cupy, "b") as b:
        assert a.raw is not b.raw  # it was given back once


async def test_a_closed_stream_takes_nothing(cupy: FakeCupy) -> None:
    async with opened(cupy, "cuda:0/x") as stream:
        event = stream.record()
        stream.stop()
        stream.stop()
        uses: list[Callable[[], object]] = [
            lambda: stream.enqueue(int),
            lambda: ticket(stream),
            lambda: stream.hold(1),
            lambda: stream.wait(event),
            stream.record,
        ]
        for use in uses:
            with pytest.raises(SessionClosedError, match="stream cuda:0/x is closed"):
                use()


async def test_an_event_of_a_closed_stream_can_be_awaited(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        cupy.pause()
        stream.enqueue(launch, cupy)
        event = stream.record()
        stream.stop()
        waiter = asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        assert not waiter.done()
        cupy.resume()
        await waiter
        assert event.done()


async def test_a_closed_stream_whose_device_is_lost_says_so(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        cupy.pause()
        cupy.fail_stream(stream.raw)
        event = stream.record()
        stream.stop()
        waiter = asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        cupy.resume()
        with pytest.raises(CUDARuntimeError, match="illegal memory access"):
            await waiter


async def test_a_grace_that_passes_leaves_everything_referenced(cupy: FakeCupy) -> None:
    stream, held = CudaStream(cupy, 0, "cuda:0/x"), Held()
    watch = weakref.ref(held)
    cupy.pause()
    future = ticket(stream, held)
    del held
    assert not await stream.aclose(0.0)
    assert watch() is not None and not future.done()
    cupy.resume()
    await future
    assert watch() is None
    assert await stream.aclose(PATIENCE_S)


async def test_closing_can_be_cancelled_and_done_again(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        cupy.pause()
        future = ticket(stream)
        closing = asyncio.create_task(stream.aclose(PATIENCE_S))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(SessionClosedError):
            stream.record()
        cupy.resume()
        assert await stream.aclose(PATIENCE_S) and future.done()


async def test_a_cuda_stream_is_never_destroyed_and_serves_again(cupy: FakeCupy) -> None:
    ptrs = set()
    for round_ in range(3):
        async with opened(cupy, f"cuda:0/{round_}") as stream:
            ptrs.add(stream.raw.ptr)
            await ticket(stream)
    assert len(ptrs) == 1
    async with opened(cupy, "a") as a, opened(cupy, "b") as b, opened(cupy, "c", 1) as c:
        assert len({a.raw.ptr, b.raw.ptr, c.raw.ptr}) == 3 and a.raw.ptr in ptrs
        assert c.raw.device_id == 1


async def test_a_stream_that_lost_its_device_does_not_serve_again(cupy: FakeCupy) -> None:
    async with opened(cupy) as stream:
        ptr = stream.raw.ptr
        cupy.fail_next(999, "eventRecord")
        with pytest.raises(CUDARuntimeError):
            await ticket(stream)
    del stream
    gc.collect()
    cupy.engine.lost.clear()
    async with opened(cupy) as stream:
        assert stream.raw.ptr != ptr


async def test_a_dropped_stream_warns_and_its_thread_ends_after_its_work(cupy: FakeCupy) -> None:
    stream, done, held = CudaStream(cupy, 0, "dropped"), list[int](), Held()
    watch = weakref.ref(held)
    await ticket(stream)
    cupy.pause()
    stream.enqueue(launch, cupy, lambda: done.append(1))
    stream.hold(held)
    del held
    handles = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="stream dropped was dropped and not closed"):
        handles.clear()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "asyncflow:dropped")
    assert watch() is not None
    cupy.resume()
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not thread.is_alive() and done == [1] and watch() is None


async def test_a_dropped_stream_that_never_had_a_ticket_says_nothing(cupy: FakeCupy) -> None:
    stream = CudaStream(cupy, 0, "cuda:0/x")
    stream.enqueue(launch, cupy)
    watch = weakref.ref(stream)
    del stream
    assert watch() is None


def test_a_stream_outlives_the_loop_that_had_work_on_it(cupy: FakeCupy) -> None:
    stream, held = CudaStream(cupy, 0, "cuda:0/x"), Held()
    watch = weakref.ref(held)
    cupy.pause()
    made: list[asyncio.Future[None]] = []

    async def leave() -> None:
        nonlocal held
        made.append(ticket(stream, held))
        del held

    asyncio.run(leave())
    assert watch() is not None

    async def again() -> None:
        future = ticket(stream)
        cupy.resume()
        await future

    asyncio.run(again())
    assert watch() is None and not made[0].done()
    assert asyncio.run(stream.aclose(PATIENCE_S))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_forked_child_is_refused_and_the_parent_goes_on(cupy: FakeCupy) -> None:
    async with opened(cupy, "cuda:0/x") as stream, opened(cupy, "unused") as unused:
        cupy.pause()
        future, event = ticket(stream), stream.record()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, _use_in_child(stream, unused).encode())
            finally:  # else the child went on with all the tests after this one
                os._exit(0)
        os.close(write)
        killer = threading.Timer(PATIENCE_S, os.kill, (child, signal.SIGKILL))  # reading and waiting end, at the latest
        killer.start()
        with os.fdopen(read) as pipe:
            lines = pipe.read().splitlines()
        await asyncio.to_thread(os.waitpid, child, 0)
        killer.cancel()
        assert lines[:2] == ["SessionClosedError"] * 2 and "belongs to the parent" in lines[2]
        cupy.resume()
        await future
        await event.wait()


def _use_in_child(stream: CudaStream, unused: CudaStream) -> str:
    said = []
    text = ""
    uses: list[Callable[[], object]] = [lambda: stream.enqueue(int), unused.record]
    for use in uses:
        try:
            use()
        except BaseException as error:
            said.append(type(error).__name__)
            text = str(error)
    return "\n".join([*said, text])


def test_importing_asyncflow_and_its_cuda_streams_imports_no_cupy() -> None:
    code = "import asyncflow, asyncflow.streams.cuda.stream, sys; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@pytest.mark.parametrize("seed", range(2))
async def test_stress(cupy: FakeCupy, seed: int) -> None:
    """2,000 tickets on four streams of two devices, with events between them, cancelled waiters and nested blocks."""
    draw = random.Random(seed)
    streams = [CudaStream(cupy, k % 2, f"cuda:{k % 2}/{k}") for k in range(4)]
    executed = [0] * 4
    awaited: list[asyncio.Future[None]] = []
    watches: list[weakref.ref[Held]] = []
    latest: list[tuple[CudaEvent, int, int]] = []

    def run(which: int, after: list[tuple[int, int]]) -> None:
        assert all(executed[other] >= count for other, count in after)
        executed[which] += 1

    given = [0] * 4
    after: list[list[tuple[int, int]]] = [[] for _ in range(4)]
    for _ in range(2000):
        which = draw.randrange(4)
        stream, held = streams[which], Held()
        if latest and draw.random() < 0.3:
            event, other, count = draw.choice(latest)
            stream.wait(event)
            after[which].append((other, count))
        with streams[draw.randrange(4)], stream:
            launch(cupy, partial(run, which, after[which][-5:]))
        given[which] += 1
        if draw.random() < 0.2:
            latest[-20:] = [*latest[-19:], (stream.record(), which, given[which])]
        watches.append(weakref.ref(held))
        future = ticket(stream, held)
        if draw.random() < 0.2:
            stream.hold(held)
        del held
        if draw.random() < 0.1:
            future.cancel()
        else:
            awaited.append(future)
        if draw.random() < 0.02:
            await draw.choice(awaited)
    latest.clear()
    await asyncio.gather(*awaited)
    assert all(await asyncio.gather(*(stream.aclose(PATIENCE_S) for stream in streams)))
    assert executed == given and sum(given) == 2000
    assert not [watch for watch in watches if watch() is not None]
    assert stalls(cupy) == [] and current(cupy) == (0, cupy.cuda.Stream.null, None)
