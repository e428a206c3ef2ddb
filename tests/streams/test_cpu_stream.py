from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from asyncflow.errors import SessionClosedError
from asyncflow.streams import ThreadEvent, ThreadStream
from tests.patience import PATIENCE_S
from tests.streams.outcomes import fail, outcome, see_off

pytestmark = pytest.mark.every_loop


@contextmanager
def opened(name: str = "cpu:0/test") -> Iterator[ThreadStream]:
    stream = ThreadStream(name)
    try:
        yield stream
    finally:
        see_off(stream)


@dataclass
class Gate:
    """Work that says when it began, and goes on when told."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


async def test_results_arrive_in_the_order_given() -> None:
    with opened() as stream:
        order: list[int] = []

        def work(k: int) -> int:
            order.append(k)
            return k

        results = await asyncio.gather(*(outcome(stream, work, k) for k in range(200)))
        assert [result for result, _ in results] == order == list(range(200))


async def test_work_runs_on_one_thread_that_is_not_the_loops() -> None:
    with opened() as stream:
        idents = {(await outcome(stream, threading.get_ident))[0] for _ in range(5)}
        assert len(idents) == 1 and threading.get_ident() not in idents


def test_the_thread_starts_with_the_first_work() -> None:
    stream = ThreadStream("lazy")
    assert "asyncflow:lazy" not in thread_names()
    stream.enqueue(int)
    assert "asyncflow:lazy" in thread_names()
    assert asyncio.run(stream.aclose(PATIENCE_S))
    assert "asyncflow:lazy" not in thread_names()


async def test_pending_counts_unfinished_work() -> None:
    with opened() as stream:
        gate = Gate()
        stream.enqueue(gate)
        last = outcome(stream, int)
        assert stream.pending == 2
        gate.opened.set()
        await last
        assert stream.pending == 0


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), StopIteration()])
async def test_any_exception_is_delivered_and_the_thread_goes_on(error: BaseException) -> None:
    with opened() as stream:
        assert await outcome(stream, fail, error) == (None, error)
        assert await outcome(stream, abs, -1) == (1, None)


async def test_a_traceback_begins_in_the_work() -> None:
    with opened() as stream:
        _, error = await outcome(stream, fail, ValueError("no"))
        assert isinstance(error, ValueError)
        assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["fail"]


async def test_a_floating_point_warning_is_not_one() -> None:
    with opened() as stream:
        result, error = await outcome(stream, np.divide, np.ones(2), np.zeros(2))
        assert error is None
        np.testing.assert_array_equal(result, [np.inf, np.inf])


async def test_an_idle_stream_holds_no_argument_and_no_result() -> None:
    with opened() as stream:
        argument, free = np.zeros(10), asyncio.Event()
        loop = asyncio.get_running_loop()
        watch = weakref.ref(argument, lambda _: loop.call_soon_threadsafe(free.set))
        result, _ = await outcome(stream, np.asarray, argument)
        assert result is argument
        del argument, result
        await asyncio.wait_for(free.wait(), PATIENCE_S)
        assert watch() is None


class Holder:
    """Work that holds values by itself, as regions do."""

    def work(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("is_method", [False, True])
def test_what_the_work_held_is_freed_before_the_loop_is_told(is_method: bool) -> None:
    class Loop:
        alive_when_woken: object = "never woken"

        def is_closed(self) -> bool:
            return False

        def call_later(self, *_timer: object, **_options: object) -> None:
            """Ignore timers: this loop never runs."""

        def call_soon_threadsafe(self, callback: object) -> None:
            self.alive_when_woken = watch()

    held = Holder()
    watch = weakref.ref(held)
    loop = Loop()
    with opened() as stream:
        gate = Gate()
        stream.enqueue(gate)
        work, args = (held.work, ()) if is_method else (id, (held,))
        stream.submit(work, args, lambda *_: None, cast(asyncio.AbstractEventLoop, loop))
        del held, work, args
        gate.opened.set()
    assert loop.alive_when_woken is None


async def test_a_deliver_that_raises_does_not_lose_the_others() -> None:
    with opened() as stream:
        loop = asyncio.get_running_loop()
        seen: list[object] = []
        loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        gate, error = Gate(), ValueError("deliver")
        stream.enqueue(gate)
        stream.submit(int, (), lambda *_: fail(error), loop)
        last = outcome(stream, abs, -2)
        gate.opened.set()
        assert await last == (2, None)
        assert seen == [error]


async def test_an_enqueued_failure_is_raised_by_the_next_event_awaited_and_once() -> None:
    with opened() as stream:
        error = ValueError("no")
        stream.enqueue(fail, error)
        never_awaited, awaited = stream.record(), stream.record()
        with pytest.raises(ValueError, match="no") as caught:
            await awaited.wait()
        assert caught.value is error
        assert never_awaited.done()
        await stream.record().wait()


async def test_several_failures_are_raised_as_a_group() -> None:
    with opened("cpu:0/x") as stream:
        stream.enqueue(fail, ValueError("first"))
        stream.enqueue(fail, KeyError("second"))
        with pytest.raises(ExceptionGroup, match="2 failures on stream cpu:0/x") as caught:
            await stream.record().wait()
        assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


async def test_a_failure_is_raised_by_an_event_of_an_idle_stream() -> None:
    with opened() as stream:
        stream.enqueue(fail, ValueError("no"))
        await outcome(stream, int)
        event = stream.record()
        assert event.done()
        with pytest.raises(ValueError, match="no"):
            await event.wait()


def test_a_failure_that_no_event_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="asyncflow.streams"), opened("cpu:0/x") as stream:
        stream.enqueue(fail, ValueError("lost?"))
    assert "work on stream cpu:0/x failed" in caplog.text and "lost?" in caplog.text


async def test_an_event_is_done_when_the_work_before_it_is() -> None:
    with opened() as stream:
        gate, later = Gate(), Gate()
        stream.enqueue(gate)
        event = stream.record()
        stream.enqueue(later)
        assert gate.entered.wait(PATIENCE_S) and not event.done()
        waiters = [asyncio.create_task(event.wait()) for _ in range(3)]
        gate.opened.set()
        await asyncio.gather(*waiters)
        assert event.done() and stream.pending == 1
        await event.wait()
        later.opened.set()


async def test_an_idle_stream_records_done_events_without_a_thread() -> None:
    with opened("idle") as stream:
        event = stream.record()
        assert event.done()
        await event.wait()
        assert "asyncflow:idle" not in thread_names()


async def test_cancelling_a_wait_leaves_the_event_to_others() -> None:
    with opened() as stream:
        gate = Gate()
        stream.enqueue(gate)
        event = stream.record()
        cancelled, waiting = asyncio.create_task(event.wait()), asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        gate.opened.set()
        await waiting


async def test_an_event_may_be_awaited_on_another_loop() -> None:
    with opened() as stream:
        gate = Gate()
        stream.enqueue(gate)
        event = stream.record()
        elsewhere = asyncio.create_task(asyncio.to_thread(asyncio.run, event.wait()))
        gate.opened.set()
        await elsewhere
        await event.wait()


async def test_a_stream_waits_for_an_event_of_another_and_the_host_does_not() -> None:
    with opened("producer") as producer, opened("consumer") as consumer:
        gate, order = Gate(), list[str]()
        producer.enqueue(gate)
        producer.enqueue(order.append, "written")
        consumer.enqueue(order.append, "before")
        before = consumer.record()
        consumer.wait(producer.record())
        consumer.enqueue(order.append, "read")
        read = consumer.record()
        await before.wait()
        assert order == ["before"] and not read.done()
        gate.opened.set()
        await read.wait()
        assert order == ["before", "written", "read"]


async def test_a_failure_before_an_event_is_not_the_waiting_streams() -> None:
    with opened("producer") as producer, opened("consumer") as consumer:
        producer.enqueue(fail, ValueError("producer's"))
        event = producer.record()
        consumer.wait(event)
        assert await outcome(consumer, abs, -1) == (1, None)
        await consumer.record().wait()
        with pytest.raises(ValueError, match="producer's"):
            await event.wait()


def test_a_stream_does_not_wait_for_itself_nor_for_finished_work() -> None:
    with opened() as stream, opened() as other:
        gate = Gate()
        stream.enqueue(gate)
        stream.wait(stream.record())
        stream.wait(other.record())
        assert stream.pending == 2
        gate.opened.set()


def test_a_thread_cannot_wait_for_a_foreign_event() -> None:
    class Foreign:
        def done(self) -> bool:
            return False

        async def wait(self) -> None:
            return

    with opened("cpu:0/x") as stream, pytest.raises(TypeError, match="cpu:0/x can wait for a ThreadEvent, not for For"):
        stream.wait(Foreign())


async def test_closing_finishes_the_work_and_refuses_more() -> None:
    stream = ThreadStream("cpu:0/x")
    done: list[int] = []
    for k in range(50):
        stream.enqueue(done.append, k)
    assert await stream.aclose(PATIENCE_S)
    assert done == list(range(50))
    for give in (lambda: stream.enqueue(int), stream.record, lambda: outcome(stream, int)):
        with pytest.raises(SessionClosedError, match="stream cpu:0/x is closed"):
            give()
    assert await stream.aclose(PATIENCE_S)


async def test_an_event_raises_a_failure_though_the_stream_has_ended_meanwhile() -> None:
    """The waiting code may learn of the event only when the thread is gone, and must not take it for a success."""
    stream = ThreadStream("cpu:0/x")
    stream.enqueue(fail, ValueError("no"))
    event = stream.record()
    assert await stream.aclose(PATIENCE_S)
    with pytest.raises(ValueError, match="no"):
        await event.wait()


async def test_a_stream_without_a_thread_closes_at_once() -> None:
    stream = ThreadStream("unused")
    assert await stream.aclose(0.0)
    with pytest.raises(SessionClosedError):
        stream.enqueue(int)


async def test_the_loop_goes_on_while_a_stream_closes() -> None:
    stream, gate = ThreadStream("closing"), Gate()
    stream.enqueue(gate)
    closing = asyncio.create_task(stream.aclose(PATIENCE_S))
    await asyncio.to_thread(gate.entered.wait, PATIENCE_S)
    assert not closing.done()
    gate.opened.set()
    assert await closing


async def test_work_that_outlives_the_grace_is_left_and_the_rest_refused() -> None:
    stream, gate, ran = ThreadStream("cpu:0/x"), Gate(), list[int]()
    first = outcome(stream, gate)
    second = outcome(stream, ran.append, 1)
    assert gate.entered.wait(PATIENCE_S)
    assert not await stream.aclose(0.0)
    gate.opened.set()
    assert await first == (None, None)
    _, error = await second
    assert isinstance(error, SessionClosedError) and "grace passed" in str(error)
    assert ran == []
    assert await stream.aclose(PATIENCE_S)


async def test_cancelling_a_close_leaves_the_stream_stopped() -> None:
    stream, gate = ThreadStream("cancelled"), Gate()
    stream.enqueue(gate)
    closing = asyncio.create_task(stream.aclose(PATIENCE_S))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(SessionClosedError):
        stream.enqueue(int)
    gate.opened.set()
    assert await stream.aclose(PATIENCE_S)


def test_a_dropped_stream_warns_and_its_thread_ends_after_its_work() -> None:
    stream, gate, done = ThreadStream("dropped"), Gate(), list[int]()
    stream.enqueue(gate)
    stream.enqueue(done.append, 1)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "asyncflow:dropped")
    handles = [stream]
    del stream
    with pytest.warns(ResourceWarning, match="stream dropped was dropped and not closed"):
        handles.clear()
    gate.opened.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and done == [1]


def test_a_stream_outlives_the_loop_that_had_work_on_it() -> None:
    with opened() as stream:
        gate = Gate()

        async def leave() -> None:
            outcome(stream, gate)

        asyncio.run(leave())
        gate.opened.set()

        async def again() -> tuple[object, object]:
            return await outcome(stream, abs, -3)

        assert asyncio.run(again()) == (3, None)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    with opened("cpu:0/x") as stream, opened() as unused:
        gate = Gate()
        stream.enqueue(gate)
        event = stream.record()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, _use_in_child(stream, unused, event).encode())
            finally:  # else the child went on with all the tests after this one
                os._exit(0)
        os.close(write)
        killer = threading.Timer(PATIENCE_S, os.kill, (child, signal.SIGKILL))  # reading and waiting end, at the latest
        killer.start()
        with os.fdopen(read) as pipe:
            lines = pipe.read().splitlines()
        os.waitpid(child, 0)
        killer.cancel()
        gate.opened.set()
        assert lines[:3] == ["SessionClosedError"] * 3 and "open a new session in the child" in lines[3]
        assert lines[4:] == ["True"]
        stream.enqueue(int)


def _use_in_child(stream: ThreadStream, unused: ThreadStream, event: ThreadEvent) -> str:
    said = []
    text = ""
    uses: list[Callable[[], object]] = [
        lambda: stream.enqueue(int),
        unused.record,
        lambda: asyncio.run(event.wait()),
    ]
    for use in uses:
        try:
            use()
        except BaseException as error:
            said.append(type(error).__name__)
            text = str(error)
    return "\n".join([*said, text, str(asyncio.run(stream.aclose(PATIENCE_S)))])
