"""Runs that wait for work that they hold up: every such wait works, or is refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession
from tests.patience import PATIENCE_S

LONG = 10_000_000
"""Operations enough that a kernel goes to a thread."""

Ask = Callable[[af.Session, af.Tensor], Any]


def _through_the_session(session: af.Session, fetch: af.Tensor) -> Any:
    return session.run_threadsafe(fetch).result(PATIENCE_S)


def _through_asyncio(session: af.Session, fetch: af.Tensor) -> Any:
    assert session._loop is not None
    return asyncio.run_coroutine_threadsafe(session.run(fetch), session._loop).result(PATIENCE_S)


def _asks(session: Callable[[], af.Session], ask: Ask, what: Callable[[], af.Tensor]) -> Any:
    @af.op(outputs=af.spec("float64", ()), cost=lambda *shapes: LONG, name="asks")
    def asks(x: np.ndarray[Any, Any]) -> Any:
        return np.float64(ask(session(), what()))

    return asks


@af.op(outputs=af.spec("float64", ()), cost=lambda *shapes: LONG, name="heavy")
def heavy(x: np.ndarray[Any, Any]) -> Any:
    return np.float64(x.sum())


@pytest.mark.parametrize("ask", [_through_the_session, _through_asyncio])
async def test_an_op_on_a_thread_waits_for_a_run_that_needs_one(ask: Ask, graph: af.Graph) -> None:
    """Fault F65: refused at once, whichever way it asks; the session stays usable."""
    x = af.constant([1.0, 2.0])
    inner = heavy(x)
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        outer = _asks(lambda: session, ask, lambda: inner)(x)
        with pytest.raises(af.KernelError, match="async def") as caught:
            await session.run(outer)
        assert isinstance(caught.value.__cause__, af.KernelError)
        assert await session.run(inner) == 3.0


async def test_two_at_once(graph: af.Graph) -> None:
    """Fault F65: nor does each wait for a thread that the other holds."""
    x = af.constant([1.0, 2.0])
    inner = heavy(x)
    async with af.Session(graph, compute_streams=2) as session, asyncio.timeout(PATIENCE_S):
        outer = _asks(lambda: session, _through_the_session, lambda: inner)(x)
        results = await asyncio.gather(session.run(outer), session.run(outer), return_exceptions=True)
        assert [type(result) for result in results] == [af.KernelError, af.KernelError]


async def test_by_way_of_another_session(graph: af.Graph) -> None:
    """Fault F65: a session may wait for another, but not for itself through another."""
    x = af.constant([1.0, 2.0])
    inner = heavy(x)
    async with af.Session(graph) as first, af.Session(graph) as second, asyncio.timeout(PATIENCE_S):
        there = _asks(lambda: second, _through_the_session, lambda: inner)(x)
        assert await first.run(there) == 3.0
        back = _asks(lambda: first, _through_the_session, lambda: inner)(x)
        there_and_back = _asks(lambda: second, _through_the_session, lambda: back)(x)
        with pytest.raises(af.KernelError, match="wait for itself"):
            await first.run(there_and_back)


async def test_what_ends_is_not_refused(graph: af.Graph) -> None:
    """Fault F65: a run that needs no thread, a run of a coroutine, and a run that begins after the op has ended."""
    x = af.constant([1.0, 2.0])
    light, inner = x[0] + x[1], heavy(x)
    later: list[asyncio.Task[Any]] = []
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        async def after_it() -> Any:
            await begun.wait()
            return await session.run(inner)

        @af.op(outputs=af.spec("float64", ()), cost=lambda *shapes: LONG)
        def leaves_one_behind(x: np.ndarray[Any, Any]) -> Any:
            loop.call_soon_threadsafe(lambda: later.append(loop.create_task(after_it())))
            return np.float64(0.0)

        @af.op(outputs=af.spec("float64", ()))
        async def awaits(x: np.ndarray[Any, Any]) -> Any:
            return await session.run(inner)

        assert await session.run(_asks(lambda: session, _through_the_session, lambda: light)(x)) == 3.0
        assert await session.run(awaits(x)) == 3.0
        assert await session.run(leaves_one_behind(x)) == 0.0
        begun.set()
        assert await later[0] == 3.0


async def test_the_applications_pool_is_full_of_callers(open_session: OpenSession, graph: af.Graph) -> None:
    """Fault F64: a large graph compiles, though every thread of the pool waits for that, and a trace is written."""
    x = total = af.placeholder("float64", ())
    for _ in range(300):
        total = af.sin(total)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        async with open_session(graph) as session, asyncio.timeout(PATIENCE_S):
            waiting = [
                loop.run_in_executor(pool, lambda: session.run_threadsafe(total, {x: 0.0}).result(PATIENCE_S))
                for _ in range(2)
            ]
            loop.set_default_executor(pool)
            assert await asyncio.gather(*waiting) == [0.0, 0.0]


@pytest.mark.parametrize("ask", [_through_the_session, _through_asyncio])
async def test_a_function_that_asks_stays_on_its_thread(ask: Ask, graph: af.Graph) -> None:
    """However short its waits were: on the event loop's thread the function would wait for a run that it holds up."""
    x = af.placeholder("float64", ())
    inner = x + 1.0
    threads: list[str] = []

    @af.op(outputs=af.spec("float64", ()), stateful=True)
    def sometimes_asks(x: np.float64) -> Any:
        threads.append(threading.current_thread().name)
        return np.float64(ask(session, inner_of_constant)) if len(threads) % 7 == 1 else x

    inner_of_constant = af.Variable(2.0).read() * 1.0
    outer = sometimes_asks(inner)
    async with af.Session(graph) as session, asyncio.timeout(PATIENCE_S):
        for _ in range(60):
            await session.run(outer, {x: 1.0})
    assert threading.current_thread().name not in threads
