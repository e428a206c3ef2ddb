"""Counts of requests to cards in a trace, run by run and card by card."""

from __future__ import annotations

import asyncio

import numpy as np

import asyncflow as af
from asyncflow.runtime.watch.trace import DeviceRequests
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in

CHAIN = 4
ONES = np.ones(8, np.float32)


def chain() -> tuple[af.Tensor, af.Tensor]:
    """A vector, and what as many products as `CHAIN` make of it."""
    x = af.placeholder("float32", (8,), name="x")
    y = x
    for _ in range(CHAIN):
        y = af.tanh(y @ af.constant(np.eye(8, dtype=np.float32)))
    return x, y


def counts(trace: af.Trace) -> list[tuple[int, ...]]:
    """The four counts of each record, by run."""
    return [asked[2:] for asked in sorted(trace.requests)]


async def test_runs_at_the_same_time_have_counts_of_their_own() -> None:
    """A run's counts have nothing of the kernels that other runs launch while it waits."""
    with stand_in(devices=1), af.Graph() as graph:
        x, y = chain()
        few = -x
        async with af.Session(graph, ["cuda:0"]) as session:
            await asyncio.gather(session.run(y, {x: ONES}), session.run(few, {x: ONES}))
            with af.Trace(detail="region") as trace:
                await asyncio.gather(session.run(y, {x: ONES}), session.run(few, {x: ONES}))
    long, short = counts(trace)
    assert long == (2 * CHAIN, 0, 2, 1 + 2 * CHAIN) and short == (1, 0, 2, 2)


async def test_runs_without_a_trace_are_counted_nowhere() -> None:
    with stand_in(devices=1), af.Graph() as graph:
        x, y = chain()
        async with af.Session(graph, ["cuda:0"]) as session:
            with af.Trace(detail="region") as trace:
                await session.run(y, {x: ONES})
            before = counts(trace)
            await session.run(y, {x: ONES})
            assert counts(trace) == before and len(before) == 1


async def test_feeds_and_fetches_in_pieces_are_counted() -> None:
    """A large value goes by pieces, each of them a copy; its tasks outlive the call that asked for it."""
    with stand_in(devices=1, pinned_nbytes=1 << 20) as cupy, af.Graph() as graph:
        x = af.placeholder("float32", (None,), name="x")
        fed = np.ones((3 << 20) // 4, np.float32)
        async with af.Session(graph, ["cuda:0"]) as session:
            with af.Trace(detail="region") as trace:
                await session.run(-x, {x: fed})
        copies = sum(name == "memcpyAsync" for _, name in cupy.engine.launches)
    assert counts(trace) == [(1, 0, copies, 2)] and copies > 2
    assert sum(firing.stream in ("h2d", "d2h") for firing in trace.firings) == copies


async def test_a_full_trace_counts_all_the_same() -> None:
    with stand_in(devices=1), af.Graph() as graph:
        x, y = chain()
        async with af.Session(graph, ["cuda:0"]) as session:
            await session.run(y, {x: ONES})
            with af.Trace(detail="region", capacity=0) as trace:
                await session.run(y, {x: ONES})
    assert not trace.firings and counts(trace) == [(2 * CHAIN, 0, 2, 1 + 2 * CHAIN)]


async def test_a_device_in_the_memory_of_the_host_is_asked_for_nothing() -> None:
    with af.Graph() as graph:
        x, y = chain()
        async with af.Session(graph) as session:
            with af.Trace(detail="region") as trace:
                await session.run(y, {x: ONES})
    assert trace.requests == []


def test_each_card_has_its_counts() -> None:
    """A copy between cards counts on the card that receives; both sides of a run are one record a card."""

    async def main() -> list[DeviceRequests]:
        with af.Graph() as graph:
            with af.device("cuda:0"):
                x, y = chain()
            with af.device("cuda:1"):
                z = y * 2
        async with af.Session(graph, ["cuda:0", "cuda:1"]) as session:
            await session.run([y, z], {x: ONES})
            trace = af.Trace(detail="region")
            await session.run([y, z], {x: ONES}, trace=trace)
            return trace.requests

    with stand_in(devices=2):
        asked = asyncio.run(main())
    assert {each.device: each[2:] for each in asked} == {
        "cuda:0": (2 * CHAIN, 0, 2, 1 + 2 * CHAIN),
        "cuda:1": (1, 0, 2, 2),
    }
    assert len({each.run for each in asked}) == 1 and len(asked) == 2


def test_a_simulated_card_counts_simulated_requests() -> None:
    """Kernels one by one at first; then one graph, whose input and output are copied, and whose inside counts not."""

    async def main(*, cuda_graphs: bool) -> list[tuple[int, ...]]:
        with af.Graph() as graph:
            x, y = chain()
        async with af.Session(graph, ["sim:0"], cuda_graphs=cuda_graphs) as session:
            traces = [af.Trace(detail="region") for _ in range(4)]
            for trace in traces:
                await session.run(y, {x: ONES}, trace=trace)
            return [counts(trace)[0] for trace in traces]

    with virtual_clock("1 x h100") as clock:
        launched = clock.run(main(cuda_graphs=False))
        captured = clock.run(main(cuda_graphs=True))
    assert launched == 4 * [(2 * CHAIN, 0, 2, 1 + 2 * CHAIN)]
    assert captured[0] == launched[0] and captured[-1] == (0, 1, 4, 2)
