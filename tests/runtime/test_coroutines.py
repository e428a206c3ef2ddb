"""Coroutine functions that ignore their cancellation hold up nothing for ever."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import asyncflow as af
from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import until

HERE = r"stubborn ignores cancellation: 5 s .* still waits at .*test_coroutines\.py:\d+ \(in stubborn\)"


class Stubborn:
    """A coroutine op that swallows the first cancel, and goes on until it is let go."""

    def __init__(self) -> None:
        self.started = 0
        self.let_go = asyncio.Event()

        @af.op(outputs=af.spec("int64", ()))
        async def stubborn(x: Any) -> Any:
            self.started += 1
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                await self.let_go.wait()
            return x

        self.op = stubborn


def on_virtual_time(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `main` where waiting takes no time, for a minute of that time at most."""

    async def bounded() -> None:
        done, _ = await asyncio.wait([asyncio.ensure_future(main())], timeout=60)
        assert done, "something waits for ever"
        done.pop().result()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(bounded())


async def _run_with_a_deadline(session: af.Session, fetch: af.Tensor, _: Stubborn) -> BaseException:
    with pytest.raises(af.DeadlineExceeded) as caught:
        await session.run(fetch, timeout=1)
    return caught.value


async def _cancelled_run(session: af.Session, fetch: af.Tensor, op: Stubborn) -> BaseException:
    task = asyncio.ensure_future(session.run(fetch))
    await until(lambda: op.started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value


async def _closed_session(session: af.Session, fetch: af.Tensor, op: Stubborn) -> BaseException:
    task = asyncio.ensure_future(session.run(fetch))
    await until(lambda: op.started)
    await session.aclose(grace_s=0)
    with pytest.raises(af.SessionClosedError) as caught:
        await task
    return caught.value


@pytest.mark.parametrize("end", [_run_with_a_deadline, _cancelled_run, _closed_session])
def test_a_coroutine_that_ignores_cancellation_is_left_behind_and_named(
    end: Callable[[af.Session, af.Tensor, Stubborn], Coroutine[Any, Any, BaseException]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        op = Stubborn()
        with af.Graph() as graph:
            fetch = op.op(1)
        async with af.Session(graph) as session:
            error = await end(session, fetch, op)
            assert session.statistics().runs == 0
            op.let_go.set()  # what it gives then goes nowhere
            await until(lambda: "stubborn" not in {task.get_name() for task in asyncio.all_tasks()})
        assert re.search(HERE, "".join(error.__notes__))

    on_virtual_time(main)
    assert "ignores cancellation" in caplog.text


def test_what_cleans_up_in_time_is_waited_for() -> None:
    async def main() -> None:
        done = []

        @af.op(outputs=af.spec("int64", ()))
        async def careful(x: Any) -> Any:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(4)
                done.append("cleaned up")

        with af.Graph() as graph:
            fetch = careful(1)
        async with af.Session(graph) as session:
            with pytest.raises(af.DeadlineExceeded) as caught:
                await session.run(fetch, timeout=1)
            assert done == ["cleaned up"]
            assert not hasattr(caught.value, "__notes__")

    on_virtual_time(main)
