"""Errors as HTTP responses: `error_response`."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, cast

from asyncflow.errors import (
    ClientDisconnected,
    DeviceLostError,
    FeedError,
    OutOfMemoryError,
    OverloadedError,
    SessionClosedError,
    brief,
)

if TYPE_CHECKING:
    from starlette.responses import Response

Message: TypeAlias = MutableMapping[str, object]
"""A message between an ASGI server and an application, or the scope of a connection."""
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI application."""

CLIENT_GONE: Final = 499
"""The status, nginx's, of a request whose client did not wait for its response. No client receives it; metrics show
it.
"""

_TEXTS: Final = {
    408: "the request took too long",
    499: "the client has gone",
    500: "the request failed on the server",
    503: "the server cannot take this request now",
    504: "the request took too long",
}
"""Replacements for messages meant for the server's operators, which name nodes and files."""
_PLACE: Final = re.compile(r"(?:,|\n *) built at [^\n]*")
"""Pattern of the part of a message that names the line where a tensor was built."""


class ErrorResponse(NamedTuple):
    """An HTTP response that describes an error, and sends itself when called as an ASGI application.

    Attributes:
        status: its code.
        headers: by their names.
        body: JSON: the kind of the ``error``, and a ``message``.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the response."""
        await send_response(send, self.status, self.headers, self.body)


async def send_response(send: Send, status: int, headers: MutableMapping[str, str], body: bytes) -> None:
    """Sends a whole response."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def status_code(
    error: BaseException | None, *, overloaded: Literal[429, 503] = 503, late: Literal[408, 504] = 504
) -> int:
    """The status code of a response to a request that ended so; 200 if there is no error. See `error_response`."""
    match error:
        case None:
            return 200
        case FeedError():
            return 422
        case OverloadedError():
            return overloaded
        case TimeoutError():
            return late
        case SessionClosedError() | DeviceLostError() | OutOfMemoryError():
            return 503
        case ClientDisconnected() | asyncio.CancelledError() | GeneratorExit():
            return CLIENT_GONE
    return 500


def error_response(
    error: BaseException,
    *,
    overloaded: Literal[429, 503] = 503,
    late: Literal[408, 504] = 504,
    details: bool = False,
) -> ErrorResponse:
    """Return the response to a request whose run raised `error`.

    ======================================================== =========================================================
    error                                                    status
    ======================================================== =========================================================
    `FeedError`                                              422, with the message: the feeds, and what fits
    `OverloadedError`                                        503, or 429, with the header ``Retry-After``
    `DeadlineExceeded`, and any other ``TimeoutError``       504, or 408
    `SessionClosedError`, which drained sessions raise, too  503, with ``Retry-After``
    `DeviceLostError`, `OutOfMemoryError`                    503, with ``Retry-After``
    `ClientDisconnected`, and a cancelled run                499, which no client receives
    any other                                                500
    ======================================================== =========================================================

    Args:
        error: the exception of the run.
        overloaded: 429 where clients have limits of their own, or a load balancer tries no other server for 503.
        late: 408 where ``timeout=`` was the client's wish.
        details: send the messages of all errors, with nodes, files and lines of the program, for its developers. No
            message has a file or line without it.

    Raises:
        TypeError: `error` is none.
    """
    given: object = error  # callers may pass a wrong type
    if not isinstance(given, BaseException):
        raise TypeError(f"error_response takes an exception; got {brief(given)}")
    status = status_code(error, overloaded=overloaded, late=late)
    message = str(error) if details or isinstance(error, FeedError | OverloadedError) else _TEXTS[status]
    if not details:
        message = _PLACE.sub("", message)
    body = json.dumps({"error": type(error).__name__, "message": message}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if status in (429, 503):
        # Whole seconds, as HTTP requires; 0 would invite an immediate retry.
        headers["retry-after"] = str(max(1, math.ceil(getattr(error, "retry_after_s", 0.0))))
    return ErrorResponse(status, headers, body)


async def respond(request: object, error: Exception) -> Response:
    """The `error_response`, for Starlette and FastAPI: ``exception_handlers={af.AsyncflowError: serving.respond}``.

    Where `asyncio.timeout` is around a run, with ``TimeoutError: serving.respond``, too.
    """
    return cast("Response", error_response(error))  # frameworks only call it
