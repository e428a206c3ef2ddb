"""`Edge`, an ASGI application around another: refuses requests before it reads them, and cuts failed streams off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from math import ceil
from typing import Final, cast

from asyncflow.errors import AsyncflowError, ClientDisconnected, OverloadedError, SessionClosedError
from asyncflow.runtime.session.session import Session
from asyncflow.serving.responses import Application, Message, Receive, Send, error_response

HEALTH: Final = ("/health", "/healthz", "/livez", "/metrics", "/readyz")
"""Paths of health checks and monitoring. An orchestrator stops a server that does not answer there."""

_MOST_HELD: Final = 1000
"""Maximum number of refusals held at a time. Each keeps a connection open, which takes some 20 KB."""
_REFUSALS_PER_S: Final = 100
_LINGER_S: Final = 1.0
_LINGER_BYTES: Final = 4 << 20
"""Maximum number of bytes of a body that are read and dropped after a refusal, within `_LINGER_S`."""
_SMALL_BODY: Final = 16 << 10
"""Bytes of a body that servers read before they call the application."""

_log: Final = logging.getLogger("asyncflow.serving")


class HeldRefusals:
    """Refusals that are held before they are sent, so that the server sends them evenly.

    A refusal costs half as much as an answer, and some clients ask again at once. With 192 such clients and 100
    refusals a second, each refusal is held for 1.92 s, and all of them take 2 % of the time. One client waits 10 ms.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._last_s = 0.0
        """Time at which the last of them is sent."""

    def plan(self, longest_s: float) -> float:
        """Return the seconds to hold the next refusal, at most `longest_s`; 0 if too many are held."""
        if len(self._waiting) >= _MOST_HELD:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        self._last_s = min(max(self._last_s, now_s) + 1 / _REFUSALS_PER_S, now_s + longest_s)
        return self._last_s - now_s

    async def wait(self, seconds: float) -> None:
        """Return after that time, or at `end`."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _let_go, waiting)
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self._waiting.discard(waiting)

    def end(self) -> None:
        """Release all refusals that are held."""
        for waiting in self._waiting:
            _let_go(waiting)


def _let_go(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class Edge:
    """An ASGI application around another; made by `Lifespan.shed`."""

    def __init__(
        self,
        app: Application,
        session: Session,
        held: HeldRefusals,
        *,
        passes: Collection[str],
        timeout: float | None,
        priority: Callable[[Message], int] | None,
        hold_s: float,
    ) -> None:
        self._app = app
        self._session = session
        self._held = held
        self._paths = frozenset(passes)
        self._folders = tuple(path[:-1] for path in passes if path.endswith("/*"))
        self._timeout = timeout
        self._priority = priority
        self._hold_s = hold_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let the application answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        if path in self._paths or path.rstrip("/") in self._paths or path.startswith(self._folders):
            await answer_or_cut(self._app, scope, receive, send)
            return
        priority = 0 if self._priority is None else self._priority(scope)
        try:
            expected = self._session.expect_run(timeout=self._timeout, priority=priority)
        except (OverloadedError, SessionClosedError) as error:
            refusal = error
        else:
            with expected:
                await answer_or_cut(self._app, scope, receive, send, expected.release)
            return
        await self._refuse(refusal, scope, receive, send)

    async def _refuse(self, error: AsyncflowError, scope: Message, receive: Receive, send: Send) -> None:
        status, headers, body = error_response(error)
        if isinstance(error, OverloadedError) and (hold_s := self._held.plan(self._hold_s)):
            headers["retry-after"] = str(max(int(headers["retry-after"]), ceil(hold_s)))
            await self._held.wait(hold_s)
        if str(scope.get("http_version", "1.1")).startswith("1"):  # HTTP/2 and later have no such header
            headers["connection"] = "close"
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        if _has_large_body(scope):
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await _linger(receive)
            body = b""
        await send({"type": "http.response.body", "body": body})


async def answer_or_cut(
    app: Application, scope: Message, receive: Receive, send: Send, on_start: Callable[[], object] | None = None
) -> None:
    """Let an application answer; cut a response off that fails after its start, and log it in one line.

    A request of a disconnected client ends likewise, as servers print the traceback of any error they are given.
    Returning before the response is complete has servers close the connection: clients see that something is missing.

    Args:
        app: of ASGI.
        scope: of the request.
        receive: of the server.
        send: of the server.
        on_start: is called when the response begins.
    """
    has_started = False

    def sending(message: Message) -> Awaitable[None]:
        nonlocal has_started
        if message["type"] == "http.response.start":
            has_started = True
            if on_start is not None:
                on_start()
        return send(message)

    try:
        await app(scope, receive, sending)
    except Exception as error:
        reason = _reason(error)
        if reason is None or not (has_started or _is_of_client(reason)):
            raise
        kind, line = type(reason).__name__, str(reason).partition("\n")[0]
        _log.warning("%s %s was cut off: %s", scope["method"], scope["path"], f"{kind}: {line}" if line else kind)


def _reason(error: BaseException | None) -> BaseException | None:
    """Return the error of a run, or of a client that has gone, that a framework may have wrapped in others."""
    while error is not None:
        if isinstance(error, AsyncflowError | OSError) or _is_of_client(error):
            return error
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = cast("BaseException", error.exceptions[0])
        else:
            error = error.__cause__
    return None


def _is_of_client(error: BaseException) -> bool:
    """Return True for an error that reports a disconnected client: a response would have no receiver.

    Starlette and FastAPI raise such an error in a handler whose client disconnects while the body is read.
    """
    kind = type(error)
    return kind is ClientDisconnected or (kind.__module__, kind.__name__) == ("starlette.requests", "ClientDisconnect")


def _has_large_body(scope: Message) -> bool:
    """Return True if the client is probably still sending the body."""
    for name, value in cast("Collection[tuple[bytes, bytes]]", scope["headers"]):
        if name == b"transfer-encoding":
            return True
        if name == b"content-length":
            return not value.isdigit() or int(value) > _SMALL_BODY
    return False


async def _linger(receive: Receive) -> None:
    """Read what the client still sends, for a while. If the server closed earlier, TCP would drop the response."""
    nbytes = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while nbytes < _LINGER_BYTES:
                message = await receive()
                if not message.get("more_body"):  # the end, or the client has gone
                    return
                nbytes += len(cast("bytes", message.get("body", b"")))
    except TimeoutError:
        pass
