"""Waits of other coroutines while a graph runs: the gaps that a coroutine sees which always wants its turn.

The idle loop shows what the machine itself does to the figures. A gap in CPU time counts only the work that the loop's
own thread did between two turns: other processes of the machine do not show in it, nor does waiting for another thread.
TensorFlow runs in a thread of its own: on the event loop its `Session.run` would hold everything up until it is done.
"""

from __future__ import annotations

import asyncio
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, TENSORFLOW_1, Peers
from benchmarks.programs import chain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.peers import TensorFlow

WORST = Figure("worst gap", "ms")
P99 = Figure("gap p99", "ms")
WORST_CPU = Figure("worst gap, CPU time", "ms")
SCALE, OFFSET, FED = np.float32(0.5), np.float32(1.0), np.float32(3.0)
IDLE = "idle loop"
IDLE_S = 0.1


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 7, nodes: int = 10_000, iterations: int = 100_000
) -> list[Result]:
    """Worst and p99 gap in ms while a large graph and a long loop run, compiled before, and in a run that compiles."""
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = chain(x, af.constant(SCALE), af.constant(OFFSET), nodes)
        limit = af.placeholder("int32", ())
        (count,) = af.while_loop(lambda i: i < limit, lambda i: i + 1, [af.constant(0, "int32")])

    peer_graph: dict[str, Trial] = {}
    peer_loop: dict[str, Trial] = {}
    if peers.tensorflow is not None:
        peer_graph, peer_loop = _tensorflow_trials(peers.tensorflow, nodes, iterations)

    async def run_first() -> Any:
        async with af.Session(graph) as new:
            return await new.run(y, {x: FED})

    async with af.Session(graph) as session:
        large: dict[str, Trial] = {ASYNCFLOW: _trial(lambda: session.run(y, {x: FED})), IDLE: idle}
        long: dict[str, Trial] = {ASYNCFLOW: _trial(lambda: session.run(count, {limit: iterations})), IDLE: idle}
        first: dict[str, Trial] = {ASYNCFLOW: _trial(run_first), IDLE: idle}
        return [
            *await _compare(f"graph of {nodes:,} nodes", large | peer_graph, repeats),
            *await _compare(f"loop of {iterations:,} iterations", long | peer_loop, repeats),
            *await _compare(f"first run of {nodes:,} nodes", first, repeats),
        ]


async def _compare(case: str, trials: dict[str, Trial], repeats: int) -> list[Result]:
    return await compare("loop_gap", case, trials, repeats=repeats, baselines=[IDLE])


def _trial(work: Callable[[], Awaitable[Any]]) -> Trial:
    async def trial() -> Sample:
        return await watched(work)

    return trial


async def idle() -> Sample:
    """The gaps between turns while nothing goes on."""
    return await watched(lambda: asyncio.sleep(IDLE_S))


async def watched(work: Callable[[], Awaitable[Any]]) -> Sample:
    """The gaps between turns of another coroutine while `work` goes on."""
    gaps: list[float] = []
    cpu_gaps: list[float] = []

    async def heartbeat() -> None:
        last, last_cpu = perf_counter(), thread_time()
        while True:
            await asyncio.sleep(0)
            now, now_cpu = perf_counter(), thread_time()
            gaps.append(now - last)
            cpu_gaps.append(now_cpu - last_cpu)
            last, last_cpu = now, now_cpu

    beating = asyncio.create_task(heartbeat())
    await asyncio.sleep(0)
    answer = await work()
    # The gap that the end of the work falls into.
    await asyncio.sleep(0)
    beating.cancel()
    worst, p99 = np.percentile(gaps, (100, 99)) * 1e3
    return Sample({WORST: float(worst), P99: float(p99), WORST_CPU: max(cpu_gaps) * 1e3}, answer)


def _tensorflow_trials(
    tensorflow: TensorFlow, nodes: int, iterations: int
) -> tuple[dict[str, Trial], dict[str, Trial]]:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        x = v1.placeholder(v1.float32, ())
        y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), nodes)
        limit = v1.placeholder(v1.int32, ())
        count = v1.while_loop(lambda i: i < limit, lambda i: i + 1, [v1.constant(0)])
    session = tensorflow.session(graph, threads=1)
    large = _trial(lambda: asyncio.to_thread(session.run, y, {x: FED}))
    long = _trial(lambda: asyncio.to_thread(session.run, count, {limit: iterations}))
    return {TENSORFLOW_1: large}, {TENSORFLOW_1: long}
