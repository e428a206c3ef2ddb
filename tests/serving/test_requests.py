"""Fault F21, F24, F47, F48: a run ends with its client, and a client that is slow holds nothing for ever."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import serving
from asyncflow.serving import requests
from asyncflow.streams.virtual import VirtualClockLoop
from tests.conftest import assert_baseline
from tests.faults.kernels import INT, CoroutineGate, in_flight, ticks, until
from tests.patience import PATIENCE_S
from tests.serving.clients import Client

pytestmark = pytest.mark.every_loop
ONE = np.int64(1)


class Gated:
    """A run that waits until it is let go."""

    def __init__(self) -> None:
        self.gate = CoroutineGate()
        with af.Graph() as self.graph:
            self.x = af.placeholder("int64", ())
            self.y = self.gate.op(self.x) + 1

    def run(self, session: af.Session) -> Any:
        return session.run(self.y, {self.x: ONE})


async def test_a_client_that_goes_cancels_its_run_within_a_tick() -> None:
    """Fault F21."""
    gated, client = Gated(), Client()
    async with af.Session(gated.graph) as session:
        work = serving.run_or_disconnect(client.receive, gated.run(session))
        async with in_flight(work, lambda: gated.gate.started and client.is_watched) as request:
            client.gone.set()
            passes = 0
            while not gated.gate.cancelled:
                await asyncio.sleep(0)
                passes += 1
            assert passes <= 5  # the event, the two tasks, the run and its coroutine, and nothing else
            with pytest.raises(af.ClientDisconnected, match="client has gone"):
                await request
        assert_baseline(session)
        gated.gate.opened.set()
        assert await gated.run(session) == 2


async def test_a_client_that_waits_gets_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F21."""
    monkeypatch.setattr(requests, "_UNWATCHED_S", PATIENCE_S)
    gated, client = Gated(), Client()
    gated.gate.opened.set()
    async with af.Session(gated.graph) as session:
        assert await serving.run_or_disconnect(client.receive, gated.run(session)) == 2
        assert not client.is_watched, "that takes longer than a short run"
        client.gone.set()  # too late to matter
        assert_baseline(session)


@pytest.mark.parametrize("leaves", ["http.disconnect", "websocket.disconnect"])
async def test_a_request_of_a_framework_is_told_by_its_receive(leaves: str) -> None:
    """Fault F21."""
    gated = Gated()

    class Request:
        def __init__(self, client: Client) -> None:
            self.receive = client.receive

    client = Client(leaves)
    client.gone.set()
    async with af.Session(gated.graph) as session:
        with pytest.raises(af.ClientDisconnected):
            await serving.run_or_disconnect(Request(client), gated.run(session))
        task = asyncio.current_task()
        assert task is not None and not task.cancelling(), "a timeout in the handler would take it for its own"
        assert_baseline(session)


async def test_a_run_that_fails_is_told_as_it_is() -> None:
    async def fails() -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        await serving.run_or_disconnect(Client().receive, fails())


async def test_a_server_that_fails_ends_the_run() -> None:
    gated = Gated()

    async def receive() -> Any:
        await until(lambda: gated.gate.started)
        raise OSError("the server is broken")

    async with af.Session(gated.graph) as session:
        with pytest.raises(OSError, match="is broken"):
            await serving.run_or_disconnect(receive, gated.run(session))
        assert gated.gate.cancelled == [1]
        assert_baseline(session)


@pytest.mark.parametrize("at", range(2, 12))
async def test_cancelled_twice_at_every_tick_nothing_is_left(at: int) -> None:
    """Fault F24."""
    gated, client = Gated(), Client()
    async with af.Session(gated.graph) as session:
        request = asyncio.ensure_future(serving.run_or_disconnect(client.receive, gated.run(session)))
        await ticks(at // 2)
        request.cancel()
        await ticks(at % 2)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await ticks(1)
        assert_baseline(session)


class Counting:
    """A loop that streams its counter, and notes how far it has come."""

    def __init__(self, limit: int, ahead: int) -> None:
        self.reached = 0

        @af.op(outputs=INT)
        async def note(i: Any) -> Any:
            self.reached = int(i)
            return i

        def body(i: Any) -> Any:
            self.item = note(i)
            return self.item + 1

        with af.Graph() as self.graph:
            af.while_loop(lambda i: i < limit, body, af.constant(0), parallel_iterations=ahead)


def test_a_slow_consumer_holds_the_loop_back_and_is_not_waited_for_for_ever() -> None:
    """Fault F47."""
    counting = Counting(1_000_000, ahead=4)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with af.Session(counting.graph) as session:
            items = serving.stream_or_stall(session.stream(counting.item), stall_timeout_s=5.0)
            for expected in range(10):
                assert await anext(items) == expected
                await asyncio.sleep(4.9)  # slow, and in time
            held = counting.reached
            assert held <= 10 + 4
            await asyncio.sleep(0.05)
            assert counting.reached == held
            assert session.statistics().runs == 1
            await asyncio.sleep(0.1)
            assert session.statistics().runs == 0  # nobody has come back, and it has ended
            with pytest.raises(af.DeadlineExceeded, match=r"took no item for 5\.0 s"):
                await anext(items)
            assert_baseline(session)
            assert loop.time() == pytest.approx(10 * 4.9 + 0.15)

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


async def test_a_consumer_that_leaves_ends_the_run() -> None:
    """Fault F48."""
    counting = Counting(1_000_000, ahead=4)
    async with af.Session(counting.graph) as session:
        async with aclosing(serving.stream_or_stall(session.stream(counting.item))) as items:
            async for item in items:
                if item == 3:
                    break
        assert_baseline(session)
        dropped = serving.stream_or_stall(session.stream(counting.item))
        assert await anext(dropped) == 0
        del dropped
        gc.collect()
        await until(lambda: session.statistics().runs == 0)
        await ticks(2)
        assert_baseline(session)


async def test_streaming_to_the_end_gives_every_item() -> None:
    counting = Counting(20, ahead=4)
    async with af.Session(counting.graph) as session:
        items = serving.stream_or_stall(session.stream(counting.item))
        assert [int(item) async for item in items] == list(range(20))


@pytest.mark.parametrize("length", [0, 1, 20])
async def test_a_started_stream_gives_every_item(length: int) -> None:
    counting = Counting(length, ahead=4)
    async with af.Session(counting.graph) as session:
        items = await serving.start_stream(Client().receive, session.stream(counting.item))
        assert session.statistics().runs == (length > 1)
        assert [int(item) async for item in items] == list(range(length))
        assert_baseline(session)


async def test_what_fails_before_the_first_item_is_raised_before_a_response_begins() -> None:
    counting = Counting(1_000_000, ahead=4)
    async with af.Session(counting.graph, max_runs=1, max_queued=0) as session:
        items = await serving.start_stream(Client().receive, session.stream(counting.item))
        with pytest.raises(af.OverloadedError):
            await serving.start_stream(Client().receive, session.stream(counting.item))
        await items.aclose()
        with pytest.raises(af.FeedError):
            await serving.start_stream(Client().receive, session.stream(counting.item, {counting.item: 1.0}))
        assert_baseline(session)
        dropped = await serving.start_stream(Client().receive, session.stream(counting.item))
        del dropped  # a response that never began
        gc.collect()
        await until(lambda: session.statistics().runs == 0)
        await ticks(2)
        assert_baseline(session)


async def test_a_client_that_goes_before_the_first_item_ends_the_stream() -> None:
    """Fault F21."""
    gate, client = CoroutineGate(), Client()
    with af.Graph() as graph:
        x, seen = af.placeholder("int64", ()), []

        def step(i: af.Tensor) -> af.Tensor:
            seen.append(gate.op(i))
            return i + 1

        af.while_loop(lambda i: i < 3, step, x)
    async with af.Session(graph) as session:
        work = serving.start_stream(client.receive, session.stream(seen[0], {x: ONE}))
        async with in_flight(work, lambda: gate.started) as request:
            client.gone.set()
            with pytest.raises(af.ClientDisconnected):
                await request
        assert_baseline(session)
