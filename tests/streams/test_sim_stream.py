from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from asyncflow.errors import SessionClosedError
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.streams.protocol import Event, Stream
from asyncflow.streams.sim.stream import HostClock, SimStream
from asyncflow.streams.virtual import VirtualClockLoop
from tests.patience import PATIENCE_S


@pytest.fixture
def host() -> Iterator[HostClock]:
    loop = VirtualClockLoop()
    yield HostClock(loop)
    loop.close()


@pytest.fixture
def streams(host: HostClock) -> tuple[SimStream, SimStream, SimStream]:
    return SimStream("a", host), SimStream("b", host), SimStream("c", host)


def test_it_is_a_stream(host: HostClock) -> None:
    stream: Stream = SimStream("sim:0/compute", host)
    event: Event = stream.record()
    assert stream.name == "sim:0/compute" and event.done()


def test_work_begins_after_what_came_before_and_not_too_early(streams: tuple[SimStream, ...]) -> None:
    stream = streams[0]
    first = stream.launch(10, 5, "first")
    second = stream.launch(7, 3, "second")
    third = stream.launch(1, 100)
    times = [(event.started_ns, event.time_ns) for event in (first, second, third)]
    assert times == [(5, 15), (15, 22), (100, 101)]
    assert stream.free_at_ns == 101 and stream.pending == 3


def test_work_waits_for_events_and_knows_then_what_came_before(streams: tuple[SimStream, ...]) -> None:
    a, b, c = streams
    on_a = a.launch(50)
    assert not b.has_seen(on_a)
    b.wait(on_a)
    assert b.has_seen(on_a)
    on_b = b.launch(10)
    assert on_b.started_ns == 50
    c.wait(on_b)
    assert c.has_seen(on_a), "what b waited for comes before c's work, too"
    assert not a.has_seen(on_b)
    later = a.launch(1)
    assert not c.has_seen(later), "only what was given before the event is ordered by it"


def test_a_record_after_a_wait_passes_the_wait_on(streams: tuple[SimStream, ...]) -> None:
    a, b, c = streams
    own = b.launch(5)
    c.wait(own)
    on_a = a.launch(50)
    b.wait(on_a)
    c.wait(b.record())
    assert c.has_seen(on_a) and c.launch(1).started_ns == 50


def test_time_that_has_passed_is_no_event(host: HostClock, streams: tuple[SimStream, ...]) -> None:
    a, b, _ = streams
    event = a.launch(10)

    async def main() -> None:
        await asyncio.sleep(1)
        assert host.now_ns() > event.time_ns
        assert not b.has_seen(event), "nobody has looked"
        assert event.done()
        assert b.has_seen(event), "the host has, and passes it on with what it launches"
        b.launch(1)
        passed_on = b.record()
        assert (a, event.count) in passed_on.known()

    host.loop.run_until_complete(main())


def test_awaiting_an_event_takes_until_its_time(host: HostClock, streams: tuple[SimStream, ...]) -> None:
    a, b, _ = streams
    event = a.launch(1234)

    async def main() -> int:
        assert not event.done()
        await event.wait()
        return host.now_ns()

    assert host.loop.run_until_complete(main()) == 1234
    assert b.has_seen(event)
    assert a.pending == 0
    assert a.launch(1).started_ns == 1234, "nothing begins in the past"


def test_cancelling_a_wait_leaves_the_event(host: HostClock, streams: tuple[SimStream, ...]) -> None:
    event = streams[0].launch(100)

    async def main() -> None:
        waiting = asyncio.create_task(event.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert host.now_ns() == 0
        await event.wait()
        assert host.now_ns() == 100

    host.loop.run_until_complete(main())


def test_functions_are_called_in_order_when_the_stream_gets_there(
    host: HostClock, streams: tuple[SimStream, ...]
) -> None:
    stream, seen = streams[0], []
    stream.launch(10)
    stream.enqueue(lambda what: seen.append((what, host.now_ns())), "enqueued")
    stream.launch(10)
    assert stream.pending == 3 and seen == []
    host.loop.run_until_complete(stream.record().wait())
    assert seen == [("enqueued", 10)]
    assert stream.pending == 0


def test_a_failure_is_raised_by_the_next_event_that_is_awaited(host: HostClock, streams: tuple[SimStream, ...]) -> None:
    stream = streams[0]
    before = stream.record()
    stream.enqueue(divmod, 1, 0)
    after = stream.record()

    async def main() -> None:
        await before.wait()
        with pytest.raises(ZeroDivisionError):
            await after.wait()
        await after.wait()
        stream.enqueue(divmod, 1, 0)
        stream.enqueue(divmod, "", 0)
        with pytest.raises(BaseExceptionGroup, match="2 failures on stream a"):
            await stream.record().wait()

    host.loop.run_until_complete(main())


def test_a_closed_stream_ends_its_work(
    host: HostClock, streams: tuple[SimStream, ...], caplog: pytest.LogCaptureFixture
) -> None:
    stream = streams[0]
    stream.launch(2_000_000_000)
    stream.enqueue(divmod, 1, 0)
    assert not host.loop.run_until_complete(stream.aclose(1.0))
    assert host.now_ns() == 1_000_000_000
    assert host.loop.run_until_complete(stream.aclose(PATIENCE_S)) and host.now_ns() == 2_000_000_000
    assert "work on stream a failed and no event was awaited" in caplog.text
    for give in (lambda: stream.enqueue(int), lambda: stream.launch(1), stream.record):
        with pytest.raises(SessionClosedError, match="stream a is closed"):
            give()


def test_only_simulated_events(streams: tuple[SimStream, ...]) -> None:
    other = ThreadStream("thread")
    with pytest.raises(TypeError, match="can wait for a SimEvent, not for ThreadEvent"):
        streams[0].wait(other.record())
