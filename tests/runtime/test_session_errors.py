"""Mistakes of newcomers: every mistake is named at once, in the terms of the call that made it."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.calls.options import as_timeout

Use = Callable[[af.Session, Any], Any]


def endless() -> list[Any]:
    """A list that contains itself."""
    nest: list[Any] = []
    nest.append(nest)
    return nest


# -- options of sessions and runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        pytest.param(lambda s, y: s.run(y, [1]), af.FeedError, "feeds is a mapping .* got list", id="feeds"),
        pytest.param(lambda s, y: s.run(y, np.ones(2)), af.FeedError, "feeds is a mapping .* got ndarray", id="array"),
        pytest.param(lambda s, y: s.run(y, 0), af.FeedError, "feeds is a mapping .* got int", id="zero"),
        pytest.param(lambda s, y: s.prepare(y, y), af.FeedError, r"a list, such as \[x\]; got Tensor", id="prepare"),
        pytest.param(lambda s, y: s.run(y, timeout="1"), TypeError, "timeout is a number of seconds", id="timeout"),
        pytest.param(lambda s, y: s.run(y, timeout=float("nan")), ValueError, "timeout .* got nan", id="nan"),
        pytest.param(lambda s, y: s.run(y, trace=True), TypeError, "trace is a Trace .* or a path", id="trace"),
        pytest.param(lambda s, y: s.run(endless()), af.FetchError, "contain themselves", id="endless"),
        pytest.param(lambda s, y: anext(s.stream(endless())), af.FetchError, "contain themselves", id="endless stream"),
        pytest.param(lambda s, y: anext(s.stream(y, [1])), af.FeedError, "feeds is a mapping", id="stream feeds"),
        pytest.param(lambda s, y: s.run(af.on_device(af.on_device(y))), af.FetchError, "on_device twice", id="twice"),
        pytest.param(lambda s, y: s.run(af.on_device([y, 3])), af.FetchError, "a name, .* got int 3", id="stays"),
        pytest.param(lambda s, y: af.on_device(endless()), af.FetchError, "contain themselves", id="endless on_device"),
        pytest.param(
            lambda s, y: anext(s.stream(af.on_device(y))),
            af.FetchError,
            "stream has no on_device: .* stream <Tensor .* itself",
            id="stream on_device",
        ),
        pytest.param(lambda s, y: anext(s.stream("nope")), af.FetchError, "nope", id="stream name"),
        pytest.param(lambda s, y: anext(s.stream(y, trace="x.json")), TypeError, "trace is a Trace", id="stream trace"),
        pytest.param(lambda s, y: anext(s.stream(y, timeout=True)), TypeError, "timeout is", id="stream timeout"),
    ],
)
async def test_arguments_of_a_run(graph: af.Graph, use: Use, error: type[Exception], message: str) -> None:
    fetch = af.constant(1) + 1
    async with af.Session(graph) as session:
        with pytest.raises(error, match=message):
            await use(session, fetch)
        assert await session.run(fetch, timeout=np.float64(5)) == 2


@pytest.mark.parametrize("end", [af.Session.aclose, af.Session.drain], ids=["aclose", "drain"])
@pytest.mark.parametrize("grace_s", ["a", None, True, -1, float("nan")])
async def test_a_grace_period_is_checked_before_anything_ends(end: Any, grace_s: Any, graph: af.Graph) -> None:
    fetch = af.constant(1) + 1
    async with af.Session(graph) as session:
        with pytest.raises((TypeError, ValueError), match="grace_s is a number of seconds, 0 or more; got"):
            await end(session, grace_s)
        assert await session.run(fetch) == 2
        await end(session, float("inf"))
        with pytest.raises(af.SessionClosedError):
            await session.run(fetch)


async def test_a_streamed_name_without_a_graph(session: af.Session) -> None:
    with pytest.raises(af.FetchError, match="'nope' says nothing without a graph"):
        await anext(session.stream("nope"))


@pytest.mark.parametrize(
    ("timeout", "seconds"), [(None, None), (2, 2.0), (0, 0.0), (float("inf"), None), (1e300, None)]
)
def test_timeouts(timeout: Any, seconds: float | None) -> None:
    assert as_timeout(timeout) == seconds


def test_a_session_is_entered_with_async_with() -> None:
    with pytest.raises(TypeError, match="use `async with`"), af.Session():
        pass


async def test_a_tensor_array_is_no_fetch(session: af.Session, graph: af.Graph) -> None:
    array = af.TensorArray("float32", 2)
    with pytest.raises(af.FetchError, match=r"array\.stack\(\)"):
        await session.run(array)


def test_a_negative_number_of_iterations(graph: af.Graph) -> None:
    with pytest.raises(af.GraphError, match="maximum_iterations is at least 0; got -1"):
        af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,), maximum_iterations=-1)


async def test_a_graph_nested_too_deep(session: af.Session, graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> Any:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("asyncflow.runtime.session.session.compile_plan", exhausted)
    with pytest.raises(af.GraphError, match="nests branches and loops too deep"):
        await session.run(af.constant(1) + 1)


# -- af.run ----------------------------------------------------------------------------------------------------------


async def answer() -> int:
    return 42


async def test_run_inside_an_event_loop() -> None:
    """The coroutine is closed, so nothing warns that it was never awaited."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="await it instead"):
            af.run(answer())
        gc.collect()


@pytest.mark.parametrize(
    ("main", "message"), [(answer, r"call it: af\.run\(answer\(\)\)"), (42, "takes a coroutine; got int 42")]
)
def test_run_takes_a_coroutine(main: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        af.run(main)


# -- closing ---------------------------------------------------------------------------------------------------------


on_virtual_time = pytest.mark.asyncio(loop_factories=["virtual"])
"""There, whoever waits for a time jumps to it: waiting is seen on the clock, and a busy machine is not."""


@on_virtual_time
async def test_a_failing_block_stops_its_runs_at_once(graph: af.Graph) -> None:
    started = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def hang(x: Any) -> Any:
        started.set()
        await asyncio.Event().wait()

    hanging = hang(1)
    loop = asyncio.get_running_loop()
    with pytest.raises(LookupError):
        async with af.Session(graph) as session:
            run = asyncio.ensure_future(session.run(hanging))
            await started.wait()
            failed_s = loop.time()
            raise LookupError
    assert loop.time() == failed_s
    with pytest.raises(af.SessionClosedError):
        await run


@on_virtual_time
@pytest.mark.parametrize("slow", [False, True], ids=["items offered", "item being made"])
async def test_an_unconsumed_stream_does_not_hold_the_session(graph: af.Graph, slow: bool) -> None:
    """At close the run is stopped; the items it had made are not handed out any more."""

    @af.op(outputs=af.spec("int64", ()))
    async def wait_from_the_second_on(i: Any) -> Any:
        if slow and i > 0:
            await asyncio.Event().wait()
        return i

    seen: list[Any] = []

    def body(i: Any) -> Any:
        seen.append(wait_from_the_second_on(i))
        return seen[0] + 1

    af.while_loop(lambda i: i < 1000, body, (0,))
    loop = asyncio.get_running_loop()
    async with af.Session(graph) as session:
        stream = session.stream(seen[0])
        assert await anext(stream) == 0
        for _ in range(10):
            await asyncio.sleep(0)
        left_s = loop.time()
    assert loop.time() == left_s
    with pytest.raises(af.SessionClosedError):
        await anext(stream)


async def test_a_stream_that_is_awaited_ends_within_the_grace(graph: af.Graph) -> None:
    gate = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def wait(i: Any) -> Any:
        await gate.wait()
        return i

    seen: list[Any] = []

    def body(i: Any) -> Any:
        seen.append(wait(i))
        return i + 1

    af.while_loop(lambda i: i < 3, body, (0,))
    async with af.Session(graph) as session:

        async def collect() -> list[Any]:
            return [item async for item in session.stream(seen[0])]

        items = asyncio.ensure_future(collect())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(gate.set)
    assert await items == [0, 1, 2]


@pytest.mark.parametrize("way", ["once", "in rows", "in an attempt"])
async def test_errors_of_users_may_have_attributes_of_any_names(way: str) -> None:
    @dataclass(frozen=True)
    class ParseError(Exception):
        row: int
        attempt: int

    @af.op(outputs=af.spec("float64", ()), retries=int(way == "in an attempt"))
    def parse(x: Any) -> Any:
        raise ParseError(12, 7)

    with af.Graph() as graph:
        x = af.placeholder("float64", (2,))
        y = af.vmap(parse)(x) if way == "in rows" else parse(x[0])
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(y, {x: np.ones(2)})
    cause, told = caught.value.__cause__, str(caught.value)
    assert isinstance(cause, ParseError)
    assert (cause.row, cause.attempt) == (12, 7)
    assert ("vmap/0" in told, "(attempt 2 of 2)" in told) == (way == "in rows", way == "in an attempt")


async def test_a_feed_of_another_graph_is_a_feed_error(graph: af.Graph) -> None:
    """Servers answer feeds that do not fit with 422; the error names the line of the fed tensor."""
    x = af.placeholder("float64", ())
    with af.Graph():
        foreign = af.placeholder("float64", (), name="foreign")
    message = rf"cannot feed foreign:0, built at .*:{foreign.node.location.line}.*: it belongs to another graph"
    for session in (af.Session(graph), af.Session()):
        async with session:
            with pytest.raises(af.FeedError, match=message):
                await session.run(x * 2, {foreign: 1.0})
            with pytest.raises(af.FetchError, match="belongs to another graph"):
                await session.run([x, foreign])
