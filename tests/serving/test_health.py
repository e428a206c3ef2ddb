"""Health of a process: it lives, and may be sent requests; with the phases of a server's life, in `test_lifespan`."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

import asyncflow as af
from asyncflow import serving
from asyncflow.serving.responses import Message, Receive, Send, send_response
from tests.faults.kernels import CoroutineGate, until
from tests.patience import PATIENCE_S
from tests.serving.clients import answer, health


async def ready(life: serving.Lifespan) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: life.phase == "ready")


async def test_an_answer_is_json_that_is_not_cached() -> None:
    life = serving.lifespan(af.Session())
    starting = await answer(serving.readyz(life))
    assert json.loads(starting.body) == {"status": "unavailable", "reasons": ["the session is starting"]}
    async with life():
        await ready(life)
        here = await answer(serving.readyz(life))
        assert (here.status, json.loads(here.body)) == (200, {"status": "ok"})
        for client in (starting, here):
            assert client.headers["content-type"] == "application/json"
            assert client.headers["cache-control"] == "no-store"
            assert client.headers["content-length"] == str(len(client.body))


async def test_a_full_queue_is_not_ready_and_alive() -> None:
    gate = CoroutineGate()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = gate.op(x) + 1
    session = af.Session(graph, max_runs=1)
    life = serving.lifespan(session)
    async with life():
        await ready(life)
        runs = [asyncio.ensure_future(session.run(y, {x: np.int64(1)})) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: session.statistics().queued == 3)
        for most in (None, 3):
            assert await health(serving.readyz(life, max_queued=most)) == (200, [])
        assert await health(serving.readyz(life, max_queued=2)) == (503, ["3 runs wait for their turn"])
        assert await health(serving.livez(life)) == (200, [])
        for run in runs[2:]:
            run.cancel()
        await asyncio.wait(runs[2:])
        assert await health(serving.readyz(life, max_queued=0)) == (503, ["1 run waits for its turn"])
        gate.opened.set()
        assert await asyncio.gather(*runs[:2]) == [2] * 2


async def test_a_probe_is_answered_in_two_passes_of_the_loop_in_a_storm_of_requests() -> None:
    """A probe waits behind the callbacks of the others once, and behind no run, place or turn."""
    gate = CoroutineGate()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = gate.op(x) + 1
    session = af.Session(graph, max_runs=2, max_queued=100)
    life = serving.lifespan(session)
    probe = serving.livez(life)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] == "/livez":
            await probe(scope, receive, send)
        else:
            await session.run(y, {x: np.int64(1)})
            await send_response(send, 200, {}, b"")

    edge, passes, numbers = life.shed(app, hold_s=0), 0, list[int]()

    def count() -> None:
        nonlocal passes
        passes += 1
        if not all(client.done() for client in clients):
            loop.call_soon(count)

    async def is_live() -> None:
        before = passes
        assert (await answer(edge, path="/livez")).status == 200
        numbers.append(passes - before)

    async with life():
        await ready(life)
        loop = asyncio.get_running_loop()
        clients = [asyncio.ensure_future(answer(edge)) for _ in range(256)]
        loop.call_soon(count)
        await is_live()
        await until(lambda: session.statistics().queued == 100)
        for _ in range(3):
            await is_live()
        gate.opened.set()
        await is_live()
        statuses = [client.status for client in await asyncio.gather(*clients)]
        assert statuses.count(200) == 102
    assert max(numbers) <= 2


async def test_an_event_loop_that_lags_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    life = serving.lifespan(af.Session())
    slow = SimpleNamespace(time=iter((0.0, 1.5, 2.0, 2.5, 3.0, 3.1)).__next__)
    async with life():
        known = SimpleNamespace(get_running_loop=lambda: slow, sleep=asyncio.sleep)
        monkeypatch.setattr("asyncflow.serving.health.asyncio", known)
        assert await health(serving.livez(life)) == (503, ["a pass of the event loop took 1.50 s"])
        assert await health(serving.livez(life)) == (200, [])
        assert await health(serving.livez(life, max_lag_s=0.05)) == (503, ["a pass of the event loop took 0.10 s"])


async def test_a_closed_session_neither_lives_nor_is_ready() -> None:
    life = serving.lifespan(af.Session())
    async with life():
        await ready(life)
    for endpoint in (serving.livez(life), serving.readyz(life)):
        assert await health(endpoint) == (503, ["the session is closed"])
