"""A session that lives as long as the server: `lifespan`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import Final, Literal, TypeAlias

from asyncflow.errors import brief
from asyncflow.runtime.calls.options import as_seconds
from asyncflow.runtime.session.session import Session
from asyncflow.serving.arguments import check_kind
from asyncflow.serving.edge import HEALTH, Edge, HeldRefusals, answer_or_cut
from asyncflow.serving.responses import Application, Message, Receive, Send

Phase: TypeAlias = Literal["starting", "warming", "ready", "draining", "closed"]

_WARM_UP: Final = "warm_up is a coroutine function of the session, `async def`"

_log: Final = logging.getLogger("asyncflow.serving")


class Lifespan:
    """Opens a session with the server, and drains and closes it at the end; made by `lifespan`.

    Called with an application, it is what Starlette and FastAPI take as ``lifespan=``.

    Attributes:
        session: that one.
        phase: where it is: ``starting``, ``warming`` (it runs already), ``ready``, ``draining``, ``closed``.
        failure: why it could not be warmed up, and so never is ready.
    """

    def __init__(
        self,
        session: Session,
        *,
        warm_up: Callable[[Session], Awaitable[object]] | None,
        beside: Sequence[AbstractAsyncContextManager[object]],
        grace_s: float,
        drain_on: signal.Signals | None,
    ) -> None:
        self.session = session
        self.phase: Phase = "starting"
        self.failure: Exception | None = None
        self._warm_up = warm_up
        self._beside = beside
        self._grace_s = grace_s
        self._drain_on = drain_on
        self._draining: asyncio.Task[None] | None = None
        self._held = HeldRefusals()

    def __call__(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """A context in which the session is open."""
        return self._opened()

    def around(self, app: Application) -> Application:
        """An ASGI application that answers the server's lifespan messages, and has the other one do the rest."""

        async def application(scope: Message, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._serve_lifespan(receive, send)
            elif scope["type"] == "http":
                await answer_or_cut(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return application

    def shed(
        self,
        app: Application,
        *,
        passes: Collection[str] = HEALTH,
        timeout: float | None = None,
        priority: Callable[[Message], int] | None = None,
        hold_s: float = 2.0,
    ) -> Application:
        """Return an ASGI application that refuses requests unread while the session would refuse a run.

        The other one answers the rest, and everything that is no HTTP request. A refusal is that of `error_response`,
        and closes the connection. Refusals go out at 100 a second, and are held for so long, as clients that ask again
        at once would take the time of others. Each is held for `hold_s` at most, and 1,000 at a time.

        For Starlette and FastAPI, ``middleware=[Middleware(life.shed)]``.

        Args:
            app: whose requests each ask for a run.
            passes: paths that are never refused; ``/static/*`` stands for all below ``/static/``.
            timeout: what the application gives its runs as ``timeout=``, if the estimate of `Session` is to count too.
            priority: gives the ``priority=`` of its run from the scope of a request; None for 0.
            hold_s: the longest time that a refusal is held; 0 to send all at once, for a load balancer that tries
                another server then.

        Raises:
            TypeError, ValueError: an argument is not that.
        """
        given: object = passes  # callers may pass a wrong type
        if isinstance(given, str) or not isinstance(given, Collection) or not all(type(each) is str for each in given):
            raise TypeError(f"passes is a list of paths, such as ['/livez', '/static/*']; got {brief(given)}")
        if not callable(app):
            raise TypeError(f"shed takes an ASGI application; got {brief(app)}")
        if priority is not None and not callable(priority):
            raise TypeError(f"priority is a function of a request's scope; got {brief(priority)}")
        return Edge(
            app,
            self.session,
            self._held,
            passes=passes,
            timeout=None if timeout is None else as_seconds(timeout, "timeout"),
            priority=priority,
            hold_s=as_seconds(hold_s, "hold_s"),
        )

    def start_drain(self) -> None:
        """Refuse new requests, and let runs in flight end; on the session's event loop."""
        if self._draining is None and self.phase != "closed":
            self.phase = "draining"
            self._held.end()
            self._draining = asyncio.get_running_loop().create_task(self.session.drain(self._grace_s))

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[None, None]:
        async with AsyncExitStack() as stack:
            stack.callback(self._closed)
            await stack.enter_async_context(self.session)
            for each in self._beside:
                await stack.enter_async_context(each)
            stack.enter_context(self._drains_on_signal(asyncio.get_running_loop()))
            stack.push_async_callback(self._drain)
            self.phase = "warming"
            warming = asyncio.get_running_loop().create_task(self._warm(self._begun_warm_up()))
            stack.push_async_callback(_cancelled, warming)
            yield

    def _begun_warm_up(self) -> Awaitable[object] | None:
        """The awaitable of `warm_up`; a function that gives none fails the start, where it is seen."""
        if self._warm_up is None:
            return None
        begun: object = self._warm_up(self.session)
        if not inspect.isawaitable(begun):
            raise TypeError(f"{_WARM_UP}; {brief(self._warm_up)} gave {brief(begun)}")
        return begun

    async def _warm(self, begun: Awaitable[object] | None) -> None:
        try:
            if begun is not None:
                await begun
        except Exception as error:
            self.failure = error
            _log.exception("the session could not be warmed up: the server is not ready, and will not be")
        else:
            if self.phase == "warming":
                self.phase = "ready"

    async def _drain(self) -> None:
        self.start_drain()
        if self._draining is not None:
            await self._draining

    def _closed(self) -> None:
        self.phase = "closed"

    @contextmanager
    def _drains_on_signal(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Inside, a signal that ends the server starts the drain before the server hears of it."""
        number = self._drain_on
        if number is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        servers = signal.getsignal(number)
        if not callable(servers):  # the signal does not stop the server
            yield
            return

        def drain_first(received: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.start_drain)
            servers(received, frame)

        signal.signal(number, drain_first)
        try:
            yield
        finally:
            if signal.getsignal(number) is drain_first:
                signal.signal(number, servers)

    async def _serve_lifespan(self, receive: Receive, send: Send) -> None:
        """Follow the lifespan protocol of the ASGI specification."""
        has_started = False
        try:
            await receive()
            async with self._opened():
                await send({"type": "lifespan.startup.complete"})
                has_started = True
                await receive()
        except Exception as error:
            _log.exception("the session could not be %s", "closed" if has_started else "opened")
            await send({"type": f"lifespan.{'shutdown' if has_started else 'startup'}.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})


def lifespan(
    session: Session,
    *,
    warm_up: Callable[[Session], Awaitable[object]] | None = None,
    beside: Sequence[AbstractAsyncContextManager[object]] = (),
    grace_s: float = 10.0,
    drain_on: signal.Signals | None = signal.SIGTERM,
) -> Lifespan:
    """A session's life in a server: it opens, warms up while the server runs, drains when that ends, and closes.

    For Starlette and FastAPI, ``Starlette(lifespan=serving.lifespan(session))``; for any other ASGI application,
    ``app = serving.lifespan(session).around(app)``.

    Args:
        session: not entered yet.
        warm_up: awaited with the open session; until it has returned, `readyz` says that the server is not ready. A
            warm-up that raises leaves the server unready, and is logged; a function that is not async fails the start.
        beside: contexts entered when the session is open, and left when it is drained: `Metrics`, `Reload`, `Spans`.
        grace_s: how long runs in flight may take to end when it drains; the others are stopped, and answered with 503.
            Give the server longer before it cancels requests: uvicorn's ``timeout_graceful_shutdown``.
        drain_on: a signal that starts to drain before the server, which handles it, stops: servers tell an application
            that they end only after the last request. None for none; nor is there one outside the main thread.

    Raises:
        TypeError, ValueError: an argument is not that.
    """
    check_kind(session, Session, "lifespan")
    grace_s = as_seconds(grace_s, "grace_s")
    if warm_up is not None and not callable(warm_up):
        raise TypeError(f"{_WARM_UP}; got {brief(warm_up)}")
    given: object = beside  # callers may pass a wrong type
    if not isinstance(given, Sequence) or not all(isinstance(each, AbstractAsyncContextManager) for each in given):
        raise TypeError(f"beside is a list of what `async with` takes, such as Metrics(session); got {brief(given)}")
    return Lifespan(session, warm_up=warm_up, beside=beside, grace_s=grace_s, drain_on=drain_on)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
