"""Many clients of one session: each sends a request, waits for its answer, and sends the next.

With asyncflow a client is a coroutine, with TensorFlow a thread. A request's latency begins when its client has it, so
waiting for the event loop, or for the interpreter's lock, is part of it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.programs import chain
from benchmarks.tensorflow1 import TENSORFLOW

if TYPE_CHECKING:
    from benchmarks.tensorflow1 import TensorFlow1

THROUGHPUT = Figure("throughput", "runs/s", higher_is_better=True)
MEDIAN = Figure("latency p50", "ms")
P99 = Figure("latency p99", "ms")
SCALE, OFFSET = np.float32(0.5), np.float32(1.0)
NODES = 20


async def measure(
    tensorflow: TensorFlow1 | None = None, *, repeats: int = 5, clients: int = 100, runs: int = 10_000
) -> list[Result]:
    """Runs per second, and latencies, of a graph of twenty scalar operations."""
    each = runs // clients
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = chain(x, af.constant(SCALE), af.constant(OFFSET), NODES)

    async with af.Session(graph) as session:

        async def run_asyncflow() -> Sample:
            latencies: list[float] = []

            async def client(number: int) -> object:
                answer = None
                for _ in range(each):
                    began = perf_counter()
                    # The others get their turn, as while a server reads the next request from a socket.
                    await asyncio.sleep(0)
                    answer = await session.run(y, {x: np.float32(number)})
                    latencies.append(perf_counter() - began)
                return answer

            started = perf_counter()
            answers = await asyncio.gather(*map(client, range(clients)))
            return _sample(started, latencies, answers)

        trials: dict[str, Trial] = {ASYNCFLOW: run_asyncflow}
        if tensorflow is not None:
            trials[TENSORFLOW] = _tensorflow_trial(tensorflow, clients, each)
        return await compare("concurrent_runs", f"{clients} clients, {runs:,} runs", trials, repeats=repeats)


def _tensorflow_trial(tensorflow: TensorFlow1, clients: int, each: int) -> Trial:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        x = v1.placeholder(v1.float32, ())
        y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), NODES)
    session = tensorflow.session(graph, threads=0)

    async def run_tensorflow() -> Sample:
        latencies: list[float] = []
        start = Barrier(clients + 1)

        def client(number: int) -> object:
            answer = None
            start.wait()
            for _ in range(each):
                began = perf_counter()
                answer = session.run(y, {x: np.float32(number)})
                latencies.append(perf_counter() - began)
            return answer

        with ThreadPoolExecutor(clients) as pool:
            pending = [pool.submit(client, number) for number in range(clients)]
            start.wait()
            started = perf_counter()
            answers = [future.result() for future in pending]
            return _sample(started, latencies, answers)

    return run_tensorflow


def _sample(started: float, latencies: list[float], answers: list[object]) -> Sample:
    elapsed = perf_counter() - started
    median, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Sample({THROUGHPUT: len(latencies) / elapsed, MEDIAN: float(median), P99: float(p99)}, np.asarray(answers))
