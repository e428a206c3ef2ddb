"""Errors as HTTP responses: every public error has one, and none tells a client about others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import asyncflow as af
from asyncflow import errors, serving
from tests.serving.clients import answer

PLACE: dict[str, Any] = {"node": "secret/matmul", "op": "matmul"}
MADE: dict[type, BaseException] = {
    af.KernelError: af.KernelError("singular", **PLACE),
    af.OutOfMemoryError: af.OutOfMemoryError("no room", requested=2, used=1, limit=1, **PLACE),
    af.OverloadedError: af.OverloadedError("busy", retry_after_s=1.2),
    af.DeadlineExceeded: af.DeadlineExceeded("late, while these waited:\n  secret/matmul, built at model.py:7"),
}
"""Errors that need more than a message, or whose response depends on it."""

STATUSES = {
    af.FeedError: 422,
    af.OverloadedError: 503,
    af.DeadlineExceeded: 504,
    af.SessionClosedError: 503,
    af.OutOfMemoryError: 503,
    af.ClientDisconnected: 499,
    errors.DeviceLostError: 503,
}

PUBLIC = [
    value
    for name in errors.__dict__
    if isinstance(value := getattr(errors, name), type) and issubclass(value, af.AsyncflowError)
]


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_every_public_error_has_a_response(kind: type[af.AsyncflowError]) -> None:
    error = MADE.get(kind) or kind("secret/matmul at model.py:7")
    status, headers, body = serving.error_response(error)
    assert status == serving.status_code(error) == STATUSES.get(kind, 500)
    told = json.loads(body)
    assert told["error"] == kind.__name__ and told["message"]
    assert headers["content-length"] == str(len(body)) and headers["content-type"] == "application/json"
    assert ("retry-after" in headers) == (status == 503)
    if kind not in (af.FeedError, af.OverloadedError):
        assert "secret" not in told["message"]
    assert json.loads(serving.error_response(error, details=True).body)["message"] == str(error)


@pytest.mark.parametrize(
    ("feeds", "told"),
    [
        ({"x": [1.0]}, "cannot feed x:0: expected float32[4], got a list: its shape is [1]"),
        ({}, "these placeholders are needed but not fed; pass them in feeds={...}\n  x:0 float32[4]"),
    ],
)
async def test_clients_are_told_no_lines_of_the_program(feeds: dict[str, list[float]], told: str) -> None:
    with af.Graph() as graph:
        y = af.placeholder("float32", (4,), name="x") * 2
    async with af.Session(graph) as session:
        with pytest.raises(af.FeedError, match=r"test_responses\.py") as caught:
            await session.run(y, feeds)
    assert json.loads(serving.error_response(caught.value).body)["message"] == told


def test_there_are_many_public_errors() -> None:
    assert len(PUBLIC) > 20


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.01, "1"), (1.0, "1"), (1.2, "2"), (60.0, "60")])
def test_retry_after_is_in_whole_seconds_and_never_0(seconds: float, header: str) -> None:
    assert serving.error_response(af.OverloadedError("busy", retry_after_s=seconds)).headers["retry-after"] == header


def test_limits_of_clients_are_429_and_408() -> None:
    busy = serving.error_response(af.OverloadedError("busy", retry_after_s=3), overloaded=429)
    assert (busy.status, busy.headers["retry-after"]) == (429, "3")
    assert serving.error_response(af.DeadlineExceeded("late"), late=408).status == 408
    assert serving.error_response(TimeoutError(), late=408).status == 408


async def test_a_timeout_around_a_run_is_a_deadline() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    response = serving.error_response(caught.value)
    assert response.status == 504 and json.loads(response.body)["message"] == "the request took too long"


def test_other_errors_and_cancels() -> None:
    assert serving.error_response(ZeroDivisionError("secret")).status == 500
    assert b"secret" not in serving.error_response(ZeroDivisionError("secret")).body
    assert serving.error_response(asyncio.CancelledError()).status == 499
    assert serving.status_code(None) == 200


async def test_a_response_sends_itself() -> None:
    client = await answer(serving.error_response(af.FeedError("x takes float32")))
    assert client.status == 422
    assert client.headers["content-type"] == "application/json"
    assert json.loads(client.body) == {"error": "FeedError", "message": "x takes float32"}
    assert (await answer(await serving.respond(None, af.FeedError("no")))).status == 422
