"""The beginning and end of sessions, and their waits before a run: whatever goes wrong, nothing is left behind."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import SessionClosedError
from asyncflow.runtime.session.session import current_session
from asyncflow.state.containers import StateStore
from tests.conftest import small_cards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fake_cupy import FakeCupy

pytestmark = pytest.mark.every_loop

ONES = np.ones(3000, np.float32)


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with small_cards(0) as fake:
        yield fake


@af.op(outputs=af.spec("float32", (3000,)))
def doubled(x: Any) -> Any:
    return x * 2


@pytest.mark.parametrize("error", [RuntimeError("no"), asyncio.CancelledError()], ids=["fails", "is_cancelled"])
async def test_a_step_of_closing_that_fails_keeps_no_other_from_being_taken(
    cupy: FakeCupy, graph: af.Graph, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*_: Any) -> NoReturn:
        raise error

    y = af.placeholder("float32", (3000,), name="x") * 2
    session = af.Session(graph, ["cuda:0", "cuda:1"])
    await session.run(y, {"x": ONES})
    monkeypatch.setattr(StateStore, "leave", fails)
    with pytest.raises(type(error)):
        await session.aclose()
    for device in session.devices:
        assert device.memory.used == 0
        with pytest.raises(SessionClosedError):
            device.compute_streams[0].record()


@pytest.mark.parametrize("devices", [["cpu:0"], ["cuda:0"]], ids=str)
async def test_a_closed_session_plans_nothing(cupy: FakeCupy, graph: af.Graph, devices: list[str]) -> None:
    y = af.constant(1.0) + 1
    async with af.Session(graph, devices) as session:
        pass
    with pytest.raises(SessionClosedError, match="the session is closed; make a new one"):
        session.plan(y)


async def test_a_deadline_holds_while_another_session_writes(cupy: FakeCupy) -> None:
    """The wait for values that a CPU reads of a container comes before the run begins."""
    with af.Graph() as graph:
        v = af.Variable(ONES, name="v", container="deadlines")
        add = v.assign_add(ONES)
    async with af.Session(graph, ["cuda:0"]) as writing, af.Session(graph) as reading:
        await writing.run(add)
        await reading.run(v)  # else its time might be up before there is a plan
        cupy.pause()
        again = asyncio.create_task(writing.run(add.node))
        for _ in range(10):
            await asyncio.sleep(0)  # until the card has been given its work
        try:
            with pytest.raises(af.DeadlineExceeded, match=r"had not arrived within timeout=0.01 s; it did not start"):
                await reading.run(v, timeout=0.01)
        finally:
            cupy.resume()  # else the sessions would wait for the card for ever
        await again
        np.testing.assert_array_equal(await reading.run(v, timeout=60), ONES * 3)
    af.reset_container("deadlines")


async def test_a_function_of_the_user_waits_for_the_card_on_a_thread(cupy: FakeCupy, graph: af.Graph) -> None:
    """The event loop goes on while the variable that it is given is still being written."""
    v = af.Variable(np.zeros(3000, np.float32), name="v")
    added = v.assign_add(af.placeholder("float32", (3000,), name="x"))
    with af.control_dependencies([added.node]):
        changed = v.update(doubled)
    async with af.Session(graph, ["cuda:0"]) as session:
        await session.run(changed, {"x": ONES})
        cupy.pause()
        run = asyncio.create_task(session.run(changed, {"x": ONES}))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not run.done()
        cupy.resume()
        np.testing.assert_array_equal(await run, ONES * 6)


async def test_a_session_is_entered_by_one_task_and_left_by_another(graph: af.Graph) -> None:
    """Fault F67, Behaviour 94: as start-up and shutdown hooks do; it closes, and both tasks know."""
    x = af.constant(2.0) * 3.0
    stack = AsyncExitStack()

    async def starts() -> af.Session:
        session = await stack.enter_async_context(af.Session(graph))
        assert current_session() is session
        return session

    session = await asyncio.create_task(starts())
    assert await session.run(x) == 6.0
    await asyncio.create_task(stack.aclose())
    with pytest.raises(af.SessionClosedError):
        await session.run(x)
    assert current_session() is None


async def test_two_tasks_enter_one_session(graph: af.Graph) -> None:
    """Fault F67, Behaviour 94: the first that leaves closes it, once."""
    x = af.constant(2.0) * 3.0
    session = af.Session(graph)
    both, closed = asyncio.Barrier(2), list[Exception]()

    async def uses() -> None:
        async with session:
            await both.wait()
            try:
                assert await session.run(x) == 6.0
            except af.SessionClosedError as error:
                closed.append(error)
            await asyncio.sleep(0)
            assert current_session() in (session, None)

    await asyncio.gather(uses(), uses())
    assert len(closed) <= 1
    with pytest.raises(af.SessionClosedError):
        await session.run(x)


async def test_what_another_task_has_left_is_not_current(graph: af.Graph) -> None:
    """Behaviour 94: functions then run in the session around it."""
    async with af.Session(graph) as outer:
        inner = af.Session(graph)
        await inner.__aenter__()
        assert current_session() is inner
        await asyncio.create_task(inner.__aexit__(None))
        assert current_session() is outer
        async with af.Session(graph) as third:
            assert current_session() is third
        assert current_session() is outer


async def test_a_trace_is_entered_by_one_task_and_left_by_another(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 94."""
    trace, x = af.Trace(), af.constant(2.0) * 3.0

    async def records() -> None:
        trace.__enter__()
        await session.run(x)

    await asyncio.create_task(records())
    trace.__exit__(None, None, None)
    await session.run(x)
    assert len(trace.runs) == 1
