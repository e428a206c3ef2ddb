"""Arguments of a server are checked where they are given: not by the first request, nor in a log."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncflow as af
from asyncflow import serving
from tests.serving.clients import Client

Use = Callable[[Any], object]
parts: Any = serving
"""So that type checkers let wrong arguments pass."""


async def async_nothing() -> None:
    """Does nothing."""


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        pytest.param(lambda s: parts.lifespan(3), TypeError, "lifespan is made for a Session; got int 3", id="life"),
        pytest.param(lambda s: parts.lifespan(s, grace_s="a"), TypeError, "grace_s is .*; got str 'a'", id="grace"),
        pytest.param(lambda s: parts.lifespan(s, warm_up=3), TypeError, "warm_up is a coroutine .* 3", id="warm_up"),
        pytest.param(lambda s: parts.lifespan(s, beside=3), TypeError, "beside is a list of .*; got 3", id="beside"),
        pytest.param(lambda s: parts.lifespan(s, beside=[s, 3]), TypeError, "beside is .*; got .*, 3", id="beside 3"),
        pytest.param(
            lambda s: parts.lifespan(s).shed(3), TypeError, "shed takes an ASGI application; got 3", id="shed"
        ),
        pytest.param(
            lambda s: parts.lifespan(s).shed(print, passes="/livez"),
            TypeError,
            "passes is a list .* got '/l",
            id="passes",
        ),
        pytest.param(
            lambda s: parts.lifespan(s).shed(print, timeout=-1), ValueError, "timeout is .* got -1", id="late"
        ),
        pytest.param(lambda s: parts.lifespan(s).shed(print, priority=1), TypeError, "priority is a func", id="prior"),
        pytest.param(lambda s: parts.lifespan(s).shed(print, hold_s="a"), TypeError, "hold_s is .* 'a'", id="hold"),
        pytest.param(lambda s: parts.livez(None), TypeError, "livez is made for a Lifespan; got None", id="livez"),
        pytest.param(parts.readyz, TypeError, "readyz is made for a Lifespan; got Session", id="readyz"),
        pytest.param(
            lambda s: parts.readyz(parts.lifespan(s), max_queued=-1), ValueError, "max_queued is", id="queued"
        ),
        pytest.param(
            lambda s: parts.livez(parts.lifespan(s), max_lag_s="1"), TypeError, "max_lag_s is .* got str", id="lag"
        ),
        pytest.param(lambda s: parts.Metrics(3), TypeError, "Metrics is made for a Session", id="metrics"),
        pytest.param(lambda s: parts.Metrics(s, most_labels=-1), ValueError, "most_labels is .* got -1", id="labels"),
        pytest.param(lambda s: parts.Spans(3), TypeError, "Spans is made for a Session", id="spans"),
        pytest.param(
            parts.prometheus_collector, TypeError, r"takes a serving.Metrics\(session\); got <Session", id="collector"
        ),
        pytest.param(lambda s: parts.Reload(3, "x"), TypeError, "Reload is made for a Session", id="reload"),
        pytest.param(lambda s: parts.Reload(s, 3), TypeError, "path of a checkpoint is .* got 3", id="path"),
        pytest.param(lambda s: parts.Reload(s, Path(), every_s=0), ValueError, "every_s is .* than 0; got 0", id="0"),
        pytest.param(
            lambda s: parts.Reload(s, Path(), every_s="a"), TypeError, "every_s is .* got str 'a'", id="every"
        ),
        pytest.param(lambda s: parts.error_response(None), TypeError, "takes an exception; got None", id="no error"),
        pytest.param(lambda s: parts.start_stream(s, s.stream).send(None), TypeError, "; got ", id="start"),
        pytest.param(lambda s: parts.stream_or_stall(s.stream), TypeError, r"`session.stream\(x\)`; got", id="items"),
        pytest.param(
            lambda s: parts.stream_or_stall(s.stream("x"), 0), ValueError, "stall_timeout_s is .* got 0", id="stall"
        ),
    ],
)
def test_a_wrong_part_is_named_where_it_is_given(use: Use, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use(af.Session())


@pytest.mark.parametrize("client", [None, 3, "receive"])
async def test_a_run_without_a_client_does_not_start(client: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it was never awaited
        with pytest.raises(TypeError, match="a client is a request, or the `receive` of an ASGI application; got"):
            await parts.run_or_disconnect(client, async_nothing())
    await parts.run_or_disconnect(Client().receive, async_nothing())
