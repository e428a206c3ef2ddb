"""Clients of ASGI applications that go when a test says so, and what applications send them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow.serving import HealthEndpoint


class Client:
    """A connection: ``receive`` and ``send`` of an application, with a body sent already."""

    def __init__(self, leaves: str = "http.disconnect") -> None:
        self._leaves = leaves
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self.can_take = asyncio.Event()
        self.can_take.set()
        self.is_watched = False
        self._has_body = False

    async def receive(self) -> Any:
        if not self._has_body:
            self._has_body = True
            return {"type": "http.request", "body": b"", "more_body": False}
        self.is_watched = True
        await self.gone.wait()
        return {"type": self._leaves}

    async def send(self, message: Any) -> None:
        await self.can_take.wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


async def answer(app: Any, path: str = "/") -> Client:
    """The client of one request that has been answered."""
    client = Client()
    await app({"type": "http", "method": "GET", "path": path, "headers": []}, client.receive, client.send)
    return client


async def health(endpoint: HealthEndpoint) -> tuple[int, list[str]]:
    """Return the answer of an endpoint: the status, and the reasons."""
    client = await answer(endpoint)
    return client.status, json.loads(client.body).get("reasons", [])
