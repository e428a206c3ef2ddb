"""Liveness and readiness of the process: `livez`, `readyz`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from asyncflow.runtime.calls.options import as_seconds
from asyncflow.serving.arguments import check_count, check_kind
from asyncflow.serving.lifespan import Lifespan
from asyncflow.serving.responses import Message, Receive, Send, send_response


class HealthEndpoint:
    """An ASGI application that answers 200, or 503 and why; made by `livez` and `readyz`.

    It is an endpoint of Starlette's ``Route``; called with nothing, it gives the reasons, none of which is well.
    """

    def __init__(self, reasons: Callable[[], Awaitable[list[str]]]) -> None:
        self.reasons = reasons

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers."""
        reasons = await self.reasons()
        body = json.dumps({"status": "unavailable", "reasons": reasons} if reasons else {"status": "ok"}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
        await send_response(send, 503 if reasons else 200, headers, body)


def livez(life: Lifespan, *, max_lag_s: float = 1.0) -> HealthEndpoint:
    """Return an endpoint that reports liveness: the event loop turns in time, and the session is open.

    Args:
        life: of the session.
        max_lag_s: what a pass of the event loop may take.

    Raises:
        TypeError, ValueError: an argument is not that.
    """
    check_kind(life, Lifespan, "livez")
    most_s = as_seconds(max_lag_s, "max_lag_s")

    async def reasons() -> list[str]:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        await asyncio.sleep(0)
        lag_s = loop.time() - asked_s
        found = [f"a pass of the event loop took {lag_s:.2f} s"] if lag_s > most_s else []
        return found + (["the session is closed"] if life.phase == "closed" else [])

    return HealthEndpoint(reasons)


def readyz(life: Lifespan, *, max_queued: int | None = None) -> HealthEndpoint:
    """Return an endpoint that reports readiness for requests: the server is warm, does not drain, and has room.

    Args:
        life: of the session.
        max_queued: how many runs may wait for their turn (`Session(max_runs=)`); None for any number.

    Raises:
        TypeError, ValueError: an argument is not that.
    """
    check_kind(life, Lifespan, "readyz")
    if max_queued is not None:
        check_count(max_queued, "max_queued")

    async def reasons() -> list[str]:
        if life.failure is not None:
            return ["the session could not be warmed up; the log says why"]
        if life.phase != "ready":
            return [f"the session is {life.phase}"]
        queued = life.session.statistics().queued
        if max_queued is None or queued <= max_queued:
            return []
        return ["1 run waits for its turn" if queued == 1 else f"{queued} runs wait for their turn"]

    return HealthEndpoint(reasons)
