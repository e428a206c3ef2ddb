"""Fault F18 and F19, Behaviour 84 and 85: runs over several devices that are cancelled at any moment."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import AuditedRun, small_cards
from tests.distributed.cancelling import cancelled_at_tick, virtual_loop
from tests.distributed.clusters import COUNTS, Cluster, assert_nothing_left, ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import OpenSession
    from tests.distributed.clusters import Ring


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_cancel_at_every_virtual_tick(count: int) -> None:
    """Fault F18, Behaviour 84: a loop cut over all devices, cancelled at each tick n = 0..N, early and late."""

    async def main(open_session: OpenSession) -> int:
        with af.Graph() as graph:
            program = ring(cluster)
        async with open_session(graph, debug=True) as session:
            fetches, feeds = [program.count, program.total], program.feeds()
            tick = 0
            while True:
                cancelled = [await cancelled_at_tick(session.run(fetches, feeds), tick, k) for k in (0, 1, 3)]
                assert_nothing_left(session)
                assert AuditedRun.leftovers == []
                if tick % 10 == 0 or not any(cancelled):
                    trips, total = await session.run(fetches, feeds)
                    assert trips == program.trips
                    assert total.tobytes() == program.expected().tobytes()
                if not any(cancelled):
                    return tick
                tick += 1

    cluster = Cluster(count, jitter=0.2, seed=count)
    assert cluster.run(main) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("count", COUNTS)
async def test_a_cancel_at_every_pass_of_a_real_loop(count: int, kind: Any) -> None:
    """Fault F18, Behaviour 84: the same on real time: cancelled after each number of the loop's passes."""
    cluster = Cluster(count, kind=kind)
    with af.Graph() as graph:
        program = ring(cluster)
    with small_cards(count) if kind == "cuda" else nullcontext():
        await _cancel_at_every_pass(cluster, graph, program)


async def _cancel_at_every_pass(cluster: Cluster, graph: af.Graph, program: Ring) -> None:
    async with af.Session(graph, devices=cluster.devices, debug=True) as session:
        fetch, feeds = program.total, program.feeds()
        session.plan(fetch, list(feeds))  # a caller that is gone leaves it to be compiled for the next
        for passes in range(10_000):
            task = asyncio.ensure_future(session.run(fetch, feeds))
            for _ in range(passes):
                await asyncio.sleep(0)
            if not task.cancel():
                assert task.result().tobytes() == program.expected().tobytes()
                break
            with pytest.raises(asyncio.CancelledError):
                await task
            assert_nothing_left(session)
        assert passes > 0
        assert (await session.run(fetch, feeds)).tobytes() == program.expected().tobytes()


LARGE = np.linspace(0, 1, 1 << 18, dtype=np.float32)
"""1 MiB, which takes a while to copy."""


def relay(cluster: Cluster) -> tuple[af.Tensor, af.Tensor]:
    """Return a value that goes from device to device, and its feeds."""
    x = passed = af.placeholder("float32", LARGE.shape, name="x")
    for index in range(cluster.count):
        with af.device(cluster.device(index)):
            passed = passed * 2
    return passed, x


@pytest.mark.parametrize("link", ["nvlink2", ""], ids=["peer", "staged"])
@pytest.mark.parametrize("count", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_cancel_during_a_copy(count: int, link: str) -> None:
    """Fault F19, Behaviour 84, 85: both ends are released, but not before the copy is done; the key is gone.

    The next run begins at once and uses the same memory; a value written or freed too early would be a hazard, and
    show in its result.
    """

    async def main(open_session: OpenSession) -> int:
        loop = virtual_loop()
        with af.Graph() as graph:
            fetch, x = relay(cluster)
        async with open_session(graph) as session:
            trace, origin = af.Trace(), loop.time_ns()
            await session.run(fetch, {x: LARGE}, trace=trace)
            copies = [f for f in trace.firings if f.stream in ("peer", "d2h", "h2d")]
            for copy in copies:
                begins, ends = copy.started_ns - origin, copy.ended_ns - origin
                for moment in (begins, (begins + ends) // 2, ends - 1):
                    started = loop.time_ns()
                    task = asyncio.ensure_future(session.run(fetch, {x: LARGE}))
                    held: list[int] = []

                    def inspect(held: list[int] = held) -> None:
                        (run,) = session._runs.in_flight.runs
                        assert not any(run.rendezvous.statistics())
                        held.extend(session.statistics().used_bytes.values())

                    def cancel(task: asyncio.Task[Any] = task, inspect: Callable[[], None] = inspect) -> None:
                        task.cancel()
                        loop.call_soon(loop.call_soon, inspect)  # when the run has heard of it

                    loop.call_at_ns(started + moment, cancel)
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert max(held) >= LARGE.nbytes
                    assert loop.time_ns() >= started + ends
                    assert AuditedRun.leftovers == []
                    assert_nothing_left(session)
                    np.testing.assert_array_equal(await session.run(fetch, {x: LARGE}), LARGE * 2**count)
            return len(copies)

    cluster = Cluster(count, link=link)
    assert cluster.run(main) >= count + 1


@pytest.mark.parametrize("count", COUNTS)
def test_a_cancel_before_the_start(count: int) -> None:
    """Behaviour 84: a task that has not begun runs nothing on any device."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            program = ring(cluster)
        async with open_session(graph) as session:
            task = asyncio.ensure_future(session.run(program.total, program.feeds()))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert session.statistics().completed == 0
            assert virtual_loop().time_ns() == 0

    cluster = Cluster(count)
    cluster.run(main)


@pytest.mark.parametrize("count", COUNTS)
def test_a_deadline_in_a_loop_over_devices(count: int) -> None:
    """Behaviour 84, Fault F15: a loop that would not end; virtual time is exact, and the session goes on."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            program = ring(cluster, trips=1 << 30)
        async with open_session(graph) as session:
            with pytest.raises(af.DeadlineExceeded):
                await session.run(program.total, program.feeds(), timeout=1e-2)
            # The host is at most a millisecond ahead of the clock, but for the region that it has begun to launch.
            assert 1e-2 <= virtual_loop().time() < 1.2e-2
            assert_nothing_left(session)
            with pytest.raises(af.DeadlineExceeded):
                await session.run(program.total, program.feeds(), timeout=1e-3)

    cluster = Cluster(count)
    cluster.run(main)
