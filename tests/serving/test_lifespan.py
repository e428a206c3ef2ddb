"""A session's life in a server: it opens, warms up, drains before the server stops (Fault F29), and closes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import asyncflow as af
from asyncflow import serving
from tests.faults.kernels import DEADLINES_S, CoroutineGate, in_flight, ticks, until
from tests.patience import PATIENCE_S
from tests.serving.clients import answer, health

ONE = np.int64(1)


class Model:
    """A program that waits until it is released, another that is never released, and a stream that ends when it is
    stopped.
    """

    def __init__(self) -> None:
        self.gate, self.shut = CoroutineGate(), CoroutineGate()
        with af.Graph() as self.graph:
            self.x = af.placeholder("int64", ())
            self.y, self.never = self.gate.op(self.x) + 1, self.shut.op(self.x)

            def body(i: Any) -> Any:
                self.item = i + 0
                return self.item + 1

            af.while_loop(lambda i: i >= 0, body, af.constant(0), parallel_iterations=2)
        self.session = af.Session(self.graph)

    def run(self, **options: Any) -> Any:
        return self.session.run(self.y, {self.x: ONE}, **options)


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await until(condition)


class Server:
    """Sends an application the lifespan messages, as a server does."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._to: asyncio.Queue[Any] = asyncio.Queue()
        self._from: asyncio.Queue[Any] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def tell(self, what: str) -> Any:
        if self._task is None:
            self._task = asyncio.ensure_future(self._app({"type": "lifespan"}, self._to.get, self._from.put))
        await self._to.put({"type": f"lifespan.{what}"})
        async with asyncio.timeout(PATIENCE_S):
            return await self._from.get()

    async def ended(self) -> None:
        assert self._task is not None
        await asyncio.wait_for(self._task, PATIENCE_S)


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("here")(scope, receive, send)


async def test_a_plain_application_opens_warms_drains_and_closes() -> None:
    model = Model()
    go_on = asyncio.Event()

    async def warm_up(session: af.Session) -> None:
        assert session is model.session
        await go_on.wait()

    life = serving.lifespan(model.session, warm_up=warm_up)
    ready, live = serving.readyz(life), serving.livez(life)
    assert await health(ready) == (503, ["the session is starting"])
    app = life.around(no_app)
    server = Server(app)
    assert await server.tell("startup") == {"type": "lifespan.startup.complete"}
    assert (await health(ready), (await health(live))[0]) == ((503, ["the session is warming"]), 200)
    go_on.set()
    await soon(lambda: life.phase == "ready")
    assert await health(ready) == (200, [])
    assert (await answer(app)).body == b"here"
    async with in_flight(model.run(), lambda: model.gate.started) as run:
        telling = asyncio.ensure_future(server.tell("shutdown"))
        await soon(lambda: life.phase == "draining")
        await ticks(1)
        assert await health(ready) == (503, ["the session is draining"])
        with pytest.raises(af.SessionClosedError) as refused:
            await model.run()
        assert serving.error_response(refused.value).status == 503
        model.gate.opened.set()
        assert await run == 2
    assert await telling == {"type": "lifespan.shutdown.complete"}
    await server.ended()
    assert await health(ready) == (503, ["the session is closed"])
    assert await health(live) == (503, ["the session is closed"])


async def test_a_warm_up_that_fails_leaves_the_server_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.gate.opened.set()

    async def warm_up(session: af.Session) -> None:
        await session.run(model.y, {model.x: np.float32(1)})

    life = serving.lifespan(model.session, warm_up=warm_up)
    async with life():
        await soon(lambda: life.failure is not None)
        assert await health(serving.readyz(life)) == (503, ["the session could not be warmed up; the log says why"])
        assert isinstance(life.failure, af.FeedError)
        assert await model.run() == 2
    assert "could not be warmed up" in caplog.text


async def test_a_warm_up_that_is_not_async_fails_the_start() -> None:
    model = Model()
    life = serving.lifespan(model.session, warm_up=lambda session: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"warm_up is a coroutine function of the session, `async def`; .* gave None"):
        await life().__aenter__()
    assert life.phase == "closed"
    with pytest.raises(af.SessionClosedError):
        await model.run()


async def test_what_cannot_start_is_told_to_the_server(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise OSError("no such folder")
        yield

    server = Server(serving.lifespan(model.session, beside=[broken()]).around(no_app))
    assert await server.tell("startup") == {"type": "lifespan.startup.failed", "message": "no such folder"}
    await server.ended()
    with pytest.raises(af.SessionClosedError):
        await model.run()


async def test_what_stands_beside_sees_the_open_session_until_it_is_drained() -> None:
    model = Model()
    model.gate.opened.set()
    seen: list[object] = []

    @asynccontextmanager
    async def beside() -> AsyncIterator[None]:
        seen.append(await model.run())
        yield
        seen.append(life.phase)
        assert model.session.is_bound_here()

    life = serving.lifespan(model.session, beside=[beside()])
    async with life():
        pass
    assert seen == [2, "draining"]


def starlette_app(model: Model, **options: Any) -> tuple[Starlette, serving.Lifespan]:
    async def predict(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(await serving.run_or_disconnect(request, model.run())))

    async def late(request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(await model.run(timeout=1e-9)))

    async def stream(request: Request) -> StreamingResponse:
        items = serving.stream_or_stall(model.session.stream(model.item))
        return StreamingResponse((f"{item}\n" async for item in items), media_type="text/plain")

    life = serving.lifespan(model.session, **options)
    routes = [
        Route("/predict", predict),
        Route("/late", late),
        Route("/stream", stream),
        Route("/readyz", serving.readyz(life)),
    ]
    return Starlette(lifespan=life, routes=routes, exception_handlers={af.AsyncflowError: serving.respond}), life


async def test_starlette_in_one_process() -> None:
    model = Model()
    model.gate.opened.set()
    app, life = starlette_app(model)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client,
    ):
        await soon(lambda: life.phase == "ready")
        assert (await client.get("/readyz")).json() == {"status": "ok"}
        assert (await client.get("/predict")).text == "2"
        late = await client.get("/late")
        assert (late.status_code, late.json()["error"]) == (504, "DeadlineExceeded")
        life.start_drain()
        await ticks(1)
        refused = await client.get("/predict")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await client.get("/readyz")).status_code == 503


class Uvicorn:
    """A real server, on a port of its own, in this process and on this event loop."""

    def __init__(self, app: Any, grace_s: int) -> None:
        config = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=grace_s, lifespan="on")
        self.server = uvicorn.Server(config)
        self.ended: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self.ended = asyncio.ensure_future(self.server.serve())
        await soon(lambda: self.server.started or self.ended is None or self.ended.done())
        assert self.server.started


@pytest.fixture
def heard() -> Any:
    """Signals that reach the process once the server has done with them: it raises them again."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


async def test_sigterm_drains_before_the_server_stops(heard: list[int]) -> None:
    """Fault F29: in flight at the signal are a run that ends in time, another that does not, and a stream."""
    answers: list[httpx.Response] = []
    for grace_s in DEADLINES_S:
        answers.append(await drained_by_sigterm(grace_s))
        if answers[-1].is_success:  # else so little time was too little for it
            break
    assert (answers[-1].status_code, answers[-1].text) == (200, "2")
    assert heard == [signal.SIGTERM] * len(answers)


async def drained_by_sigterm(grace_s: float) -> httpx.Response:
    """Return the answer of the run that may end; the others are stopped."""
    model = Model()

    async def hangs(request: Request) -> PlainTextResponse:
        run = model.session.run(model.never, {model.x: ONE})
        return PlainTextResponse(str(await serving.run_or_disconnect(request, run)))

    app, life = starlette_app(model, grace_s=grace_s)
    app.router.routes.append(Route("/hangs", hangs))
    server = Uvicorn(app, grace_s=60)
    await server.start()
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        await soon(lambda: life.phase == "ready")
        answers = [asyncio.ensure_future(client.get(path)) for path in ("/predict", "/hangs")]
        await soon(lambda: model.gate.started and model.shut.started)
        async with client.stream("GET", "/stream") as stream:
            lines = stream.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == ["0", "1", "2"]
            os.kill(os.getpid(), signal.SIGTERM)
            await soon(lambda: life.phase == "draining")
            model.gate.opened.set()
            good, stopped = await asyncio.gather(*answers)
            with pytest.raises(httpx.HTTPError):  # it was cut off
                while True:
                    await anext(lines)
    assert (stopped.status_code, stopped.headers["retry-after"]) == (503, "1")
    assert server.ended is not None
    await asyncio.wait_for(server.ended, PATIENCE_S)
    assert life.phase == "closed"
    return good


async def test_a_client_of_a_real_server_goes() -> None:
    """Fault F21."""
    model = Model()
    app, life = starlette_app(model)
    server = Uvicorn(app, grace_s=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.server, "capture_signals", nullcontext)
        await server.start()
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            await soon(lambda: life.phase == "ready")
            async with in_flight(client.get("/predict"), lambda: model.gate.started) as request:
                request.cancel()
                await soon(lambda: model.gate.cancelled)
                with pytest.raises(asyncio.CancelledError):
                    await request
            async with client.stream("GET", "/stream") as stream:
                assert await anext(stream.aiter_lines()) == "0"
            await soon(lambda: model.session.statistics().runs == 0)
        server.server.should_exit = True
        assert server.ended is not None
        await asyncio.wait_for(server.ended, PATIENCE_S)
