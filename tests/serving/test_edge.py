"""`Lifespan.shed` refuses requests before they are read, evenly; a response that fails when it has begun is cut off."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import asyncflow as af
from asyncflow import serving
from asyncflow.serving import edge
from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import INT, CoroutineGate, in_flight, ticks
from tests.patience import PATIENCE_S
from tests.serving.clients import Client
from tests.serving.test_lifespan import Uvicorn, soon

ONE = np.int64(1)
LARGE = 700_000
"""Bytes of a body that neither the server nor the kernel takes before it is read."""


class Model:
    """A run that waits until it is let go, behind an application that reads its requests."""

    def __init__(self, **limits: Any) -> None:
        self.gate = CoroutineGate()
        with af.Graph() as graph:
            self.x = af.placeholder("int64", ())
            self.y = self.gate.op(self.x) + 1
        self.session = af.Session(graph, **limits)
        self.life = serving.lifespan(self.session)
        self.options: dict[str, Any] = {}

    def run(self, **options: Any) -> Any:
        return self.session.run(self.y, {self.x: ONE}, **options)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/predict":
            await PlainTextResponse("here")(scope, receive, send)
            return
        await receive()
        try:
            found = str(await self.run(**self.options))
        except af.AsyncflowError as error:
            await serving.error_response(error)(scope, receive, send)
        else:
            await PlainTextResponse(found)(scope, receive, send)


class Caller(Client):
    """A client that counts how often its body was asked for."""

    def __init__(self, **scope: Any) -> None:
        super().__init__()
        self.reads = 0
        self.has_read = asyncio.Event()
        self.body_is_there = asyncio.Event()
        self.body_is_there.set()
        self.scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [], **scope}

    async def receive(self) -> Any:
        self.reads += 1
        self.has_read.set()
        await self.body_is_there.wait()
        return await super().receive()

    async def ask(self, app: Any) -> int:
        await app(self.scope, self.receive, self.send)
        return self.status


@asynccontextmanager
async def busy(model: Model) -> AsyncIterator[asyncio.Task[Any]]:
    """Inside, a run takes the one place of the model until it is let go."""
    async with model.life(), in_flight(model.run(), lambda: model.gate.started) as run:
        yield run
        model.gate.opened.set()
        await run


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(run())


async def test_what_would_be_refused_is_not_read_and_health_is_answered() -> None:
    model = Model(max_runs=1, max_queued=0)
    app = model.life.shed(model.app, hold_s=0, passes=["/readyz", "/static/*"])
    async with model.life():
        async with in_flight(model.run(), lambda: model.gate.started) as run:
            refused = Caller()
            assert (await refused.ask(app), refused.reads) == (503, 0)
            assert refused.headers["connection"] == "close" and refused.headers["retry-after"] == "1"
            assert "max_runs=1" in json.loads(refused.body)["message"]
            assert await Caller(path="/api/predict", root_path="/api").ask(app) == 503
            passed = [
                {"path": "/readyz"},
                {"path": "/readyz/"},
                {"path": "/static/a/b"},
                {"path": "/api/readyz", "root_path": "/api"},
            ]
            assert [await Caller(**scope).ask(app) for scope in passed] == [200] * 4
            other = Caller(type="websocket")
            await app(other.scope, other.receive, other.send)
            assert other.sent, "a websocket is for the application to refuse"
            newer = Caller(http_version="2")
            assert await newer.ask(app) == 503 and "connection" not in newer.headers
            assert model.session.statistics().refused == 3
            model.gate.opened.set()
            await run
        assert await Caller().ask(app) == 200


async def test_of_simultaneous_requests_only_as_many_are_read_as_there_are_places() -> None:
    model = Model(max_runs=1, max_queued=1)
    app = model.life.shed(model.app, hold_s=0)
    async with model.life():
        callers = [Caller() for _ in range(5)]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(caller.ask(app)) for caller in callers]
            await asyncio.wait(asked[2:])
            model.gate.opened.set()
        assert [task.result() for task in asked] == [200, 200, 503, 503, 503]
        assert [caller.reads for caller in callers] == [1, 1, 0, 0, 0]
        assert not model.session._runs.admission.expected  # type: ignore[union-attr]


def test_a_body_that_comes_slowly_keeps_its_place_for_a_second() -> None:
    async def main() -> None:
        model = Model(max_runs=1, max_queued=0)
        model.gate.opened.set()
        app = model.life.shed(model.app, hold_s=0)
        async with model.life(), asyncio.TaskGroup() as group:
            slow = Caller()
            slow.body_is_there.clear()
            asked = group.create_task(slow.ask(app))
            await slow.has_read.wait()
            assert await Caller().ask(app) == 503
            await asyncio.sleep(1)
            assert await Caller().ask(app) == 200
            slow.body_is_there.set()
            assert await asked == 200

    virtually(main)


async def test_a_response_that_begins_without_a_run_gives_its_place_back() -> None:
    model = Model(max_runs=1, max_queued=0)
    page = Caller(path="/page")
    page.can_take.clear()
    app = model.life.shed(model.app)
    async with model.life():
        async with in_flight(page.ask(app), lambda: page.can_take._waiters) as asked:
            model.gate.opened.set()
            assert await Caller().ask(app) == 200
            page.can_take.set()
            assert await asked == 200


@pytest.mark.parametrize(("clients", "refused", "held_s"), [(40, 100, 32 / 100), (260, 252 / 2, 2)])
def test_refusals_go_out_evenly_and_none_is_held_for_longer_than_it_may(
    clients: int, refused: float, held_s: float
) -> None:
    """Clients that ask again at once, of a session that has room for eight."""

    async def main() -> None:
        with af.Graph() as graph:

            @af.op(outputs=INT)
            async def work(x: Any) -> Any:
                await asyncio.sleep(0.05)
                return x

            y = work(af.constant(0))
        session = af.Session(graph, max_runs=4, max_queued=4)
        life = serving.lifespan(session)

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            await session.run(y)
            await PlainTextResponse("here")(scope, receive, send)

        app = life.shed(inner)
        loop = asyncio.get_running_loop()
        end = loop.time() + 3
        found: Counter[int] = Counter()
        waits: list[float] = []

        async def client() -> None:
            while (asked := loop.time()) < end:
                caller = Caller()
                found[await caller.ask(app)] += 1
                if caller.status == 503:
                    waits.append(loop.time() - asked)
                    assert waits[-1] <= int(caller.headers["retry-after"]) + 1e-6

        async with life(), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        assert found[200] == pytest.approx(3 * 4 / 0.05, rel=0.1)
        assert found[503] == pytest.approx(3 * refused + clients - 8, rel=0.15)
        assert max(waits) == pytest.approx(held_s, rel=0.1)

    virtually(main)


def test_of_too_many_refusals_the_rest_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_MOST_HELD", 2)

    async def main() -> None:
        model = Model(max_runs=1, max_queued=0)
        app = model.life.shed(model.app)
        loop = asyncio.get_running_loop()
        async with busy(model):
            began = loop.time()
            held = [asyncio.ensure_future(Caller().ask(app)) for _ in range(2)]
            await ticks(1)
            assert await Caller().ask(app) == 503 and loop.time() == began
            assert await asyncio.gather(*held) == [503, 503] and loop.time() > began

    virtually(main)


async def test_a_drain_ends_held_refusals_and_refuses_the_rest_at_once() -> None:
    model = Model(max_runs=1, max_queued=0)
    app = model.life.shed(model.app, hold_s=3600)
    async with busy(model):
        held = [asyncio.ensure_future(Caller().ask(app)) for _ in range(3)]
        await ticks(2)
        assert not any(each.done() for each in held)
        model.life.start_drain()
        assert await asyncio.wait_for(asyncio.gather(*held), PATIENCE_S) == [503] * 3
        late = Caller()
        assert await late.ask(app) == 503 and json.loads(late.body)["error"] == "SessionClosedError"
    assert await Caller().ask(app) == 503


async def test_a_client_that_goes_while_it_is_held_leaves_nothing() -> None:
    model = Model(max_runs=1, max_queued=0)
    app = model.life.shed(model.app, hold_s=3600)
    async with busy(model):
        held = asyncio.ensure_future(Caller().ask(app))
        await ticks(2)
        held.cancel()
        await asyncio.wait((held,))
        assert held.cancelled() and not model.life._held._waiting


async def test_the_estimate_and_priorities_count_if_they_are_told() -> None:
    model = Model(max_runs=1, max_queued=2)
    plain = model.life.shed(model.app, hold_s=0)
    impatient = model.life.shed(model.app, hold_s=0, timeout=1.0)
    important = model.life.shed(model.app, hold_s=0, priority=lambda scope: -1)
    async with model.life():
        assert model.session._runs.admission is not None
        model.session._runs.admission.queues[0]._mean_s = 2.0
        async with in_flight(model.run(), lambda: model.gate.started) as run:
            refused = Caller()
            assert await refused.ask(impatient) == 503 and "in time" in json.loads(refused.body)["message"]
            others = [asyncio.ensure_future(Caller().ask(plain)) for _ in range(2)]
            await ticks(2)
            assert await Caller().ask(plain) == 503
            model.options = {"priority": -1}
            first = asyncio.ensure_future(Caller().ask(important))
            await ticks(2)
            model.gate.opened.set()
            assert await first == 200 and sorted([await each for each in others]) == [200, 503]
            await run


async def test_without_a_limit_nothing_is_refused() -> None:
    model = Model(max_runs=None)
    app = model.life.shed(model.app)
    async with model.life():
        asked = [asyncio.ensure_future(Caller().ask(app)) for _ in range(100)]
        model.gate.opened.set()
        assert set(await asyncio.gather(*asked)) == {200}


class Broken(Exception):
    """No error of ours."""


def chained(error: Exception) -> Exception:
    """Return Starlette's error for an error whose handler came too late."""
    try:
        raise RuntimeError("response already started") from error
    except RuntimeError as found:
        return found


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (af.DeadlineExceeded("too slow\n  node x"), "DeadlineExceeded: too slow"),
        (chained(af.SessionClosedError("it drains")), "SessionClosedError: it drains"),
        (ExceptionGroup("tasks", [chained(OSError("reset by peer"))]), "OSError: reset by peer"),
        (Broken("mine"), None),
        (ExceptionGroup("tasks", [af.SessionClosedError("x"), Broken("mine")]), None),
    ],
)
@pytest.mark.parametrize("has_started", [True, False])
async def test_a_response_that_fails_on_the_way_is_cut_off_in_one_line(
    error: Exception, line: str | None, has_started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if has_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    model, caller = Model(), Caller(path="/stream")
    async with model.life():
        for outer in (model.life.shed(app), model.life.around(app)):
            caplog.clear()
            with nullcontext() if has_started and line else pytest.raises(type(error)):
                await outer(caller.scope, caller.receive, caller.send)
            wanted = [f"POST /stream was cut off: {line}"] if has_started and line else []
            assert [record.getMessage() for record in caplog.records] == wanted
            assert all(record.exc_info is None for record in caplog.records)


@pytest.mark.parametrize("is_shed", [True, False])
async def test_a_client_that_leaves_within_its_body_costs_one_line(
    is_shed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def predict(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    async def gone(scope: Any, receive: Any, send: Any) -> None:
        raise af.ClientDisconnected("the client has gone")

    messages = [{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    model, caller = Model(), Caller(path="/p")
    wrap = model.life.shed if is_shed else model.life.around
    async with model.life():
        await wrap(Starlette(routes=[Route("/p", predict, methods=["POST"])]))(caller.scope, receive, caller.send)
        await wrap(gone)(caller.scope, receive, caller.send)
    lines = ["POST /p was cut off: ClientDisconnect", "POST /p was cut off: ClientDisconnected: the client has gone"]
    assert [record.getMessage() for record in caplog.records if record.name == "asyncflow.serving"] == lines
    assert all(record.exc_info is None for record in caplog.records)


async def test_a_real_server_reads_the_rest_of_a_large_body_and_cuts_streams_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    model = Model(max_runs=1, max_queued=0)
    with model.session.graph or af.Graph():
        items: list[af.Tensor] = []

        def body(i: Any) -> Any:
            items.append(af.index_update(af.zeros((2,), dtype="int64"), i, i))  # the third is out of range
            return i + 1

        af.while_loop(lambda i: i >= 0, body, af.constant(0), parallel_iterations=1)

    async def stream(request: Request) -> StreamingResponse:
        found = await serving.start_stream(request, model.session.stream(items[0]))
        return StreamingResponse(f"{item[0]}\n" async for item in found)

    async def predict(request: Request) -> PlainTextResponse:
        await request.body()
        return PlainTextResponse(str(await serving.run_or_disconnect(request, model.run())))

    app = Starlette(
        lifespan=model.life,
        routes=[Route("/predict", predict, methods=["POST"]), Route("/stream", stream)],
        exception_handlers={af.AsyncflowError: serving.respond},
        middleware=[Middleware(model.life.shed, hold_s=0.001)],
    )
    server = Uvicorn(app, grace_s=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.server, "capture_signals", nullcontext)
        await server.start()
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            async with in_flight(client.post("/predict"), lambda: model.gate.started) as first:
                head = f"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: {LARGE}\r\n\r\n"
                url, state = httpx.URL(server.url), server.server.server_state
                with socket.create_connection((url.host, url.port), PATIENCE_S) as connection:
                    await asyncio.to_thread(connection.sendall, head.encode() + b"x" * LARGE)
                    await soon(lambda: state.total_requests and len(state.connections) == 1)
                    refused = connection.recv(1 << 16)
                    assert connection.recv(1) == b"", "an error here stops clients that are still sending"
                assert refused.startswith(b"HTTP/1.1 503") and b"\r\nconnection: close\r\n" in refused
                model.gate.opened.set()
                assert (await first).text == "2"
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                await client.get("/stream")
        server.server.should_exit = True
        await soon(lambda: server.ended is not None and server.ended.done())
    lines = [record for record in caplog.records if record.name.startswith(("asyncflow", "uvicorn"))]
    assert [record.name for record in lines] == ["asyncflow.serving", "uvicorn.error"]
    assert lines[0].getMessage().startswith("GET /stream was cut off: KernelError: ")
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in lines)
