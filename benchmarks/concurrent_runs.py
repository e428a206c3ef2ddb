"""Many clients of one session: each sends a request, waits for its answer, and sends the next.

With asyncflow, JAX and NumPy a client is a coroutine, with TensorFlow a thread. A request's latency begins when its
client has it, so waiting for the event loop, or for the interpreter's lock, is part of it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import JAX, NO_PEERS, NUMPY, TENSORFLOW_1, Peers
from benchmarks.programs import chain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks.peers import TensorFlow

THROUGHPUT = Figure("throughput", "runs/s", higher_is_better=True)
MEDIAN = Figure("latency p50", "ms")
P99 = Figure("latency p99", "ms")
SCALE, OFFSET = np.float32(0.5), np.float32(1.0)
NODES = 20
TOLERANCE = 1e-6
"""XLA rounds a product and the sum after it once, the others twice."""


async def measure(peers: Peers = NO_PEERS, *, repeats: int = 5, clients: int = 100, runs: int = 10_000) -> list[Result]:
    """Runs per second, and latencies, of a graph of twenty scalar operations; by `Session.run`, and prepared."""
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = chain(x, af.constant(SCALE), af.constant(OFFSET), NODES)

    each = runs // clients
    async with af.Session(graph) as session:
        prepared = session.prepare(y, [x])
        by_run: dict[str, Trial] = {ASYNCFLOW: _trial(lambda fed: session.run(y, {x: fed}), clients, each)}
        by_call: dict[str, Trial] = {ASYNCFLOW: _trial(prepared, clients, each)}
        if peers.tensorflow is not None:
            run, call = _tensorflow(peers.tensorflow)
            by_run[TENSORFLOW_1] = _thread_trial(run, clients, each)
            by_call[TENSORFLOW_1] = _thread_trial(call, clients, each)
        for system, call in _on_the_loop(peers).items():
            by_run[system] = by_call[system] = _trial(call, clients, each)
        case = f"{clients} clients, {runs:,} runs"
        return [
            *await compare("concurrent_runs", case, by_run, repeats=repeats, tolerance=TOLERANCE),
            *await compare("concurrent_runs", f"{case}, prepared", by_call, repeats=repeats, tolerance=TOLERANCE),
        ]


def _trial(run: Callable[[np.float32], Awaitable[Any]], clients: int, each: int) -> Trial:
    async def trial() -> Sample:
        latencies: list[float] = []

        async def client(number: int) -> object:
            answer = None
            for _ in range(each):
                began = perf_counter()
                # The others get their turn, as while a server reads the next request from a socket.
                await asyncio.sleep(0)
                answer = await run(np.float32(number))
                latencies.append(perf_counter() - began)
            return answer

        started = perf_counter()
        answers = await asyncio.gather(*map(client, range(clients)))
        return _sample(started, latencies, answers)

    return trial


def _on_the_loop(peers: Peers) -> dict[str, Callable[[np.float32], Awaitable[Any]]]:
    """The same work in coroutines that call a library right on the event loop: the graph is small enough for it."""

    async def numpy(fed: np.float32) -> np.float32:
        return chain(fed, SCALE, OFFSET, NODES)

    calls: dict[str, Callable[[np.float32], Awaitable[Any]]] = {NUMPY: numpy}
    if peers.jax is not None:
        jitted = peers.jax.jit(lambda x: chain(x, SCALE, OFFSET, NODES))

        async def jax(fed: np.float32) -> Any:
            return np.asarray(jitted(fed))[()]

        calls[JAX] = jax
    return calls


def _tensorflow(tensorflow: TensorFlow) -> tuple[Callable[[np.float32], Any], Callable[[np.float32], Any]]:
    """One run by `Session.run`, and one by what `Session.make_callable` prepares."""
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        x = v1.placeholder(v1.float32, ())
        y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), NODES)
    session = tensorflow.session(graph, threads=0)
    return lambda fed: session.run(y, {x: fed}), session.make_callable(y, [x])


def _thread_trial(run: Callable[[np.float32], Any], clients: int, each: int) -> Trial:
    async def trial() -> Sample:
        latencies: list[float] = []
        start = Barrier(clients + 1)

        def client(number: int) -> object:
            answer = None
            start.wait()
            for _ in range(each):
                began = perf_counter()
                answer = run(np.float32(number))
                latencies.append(perf_counter() - began)
            return answer

        with ThreadPoolExecutor(clients) as pool:
            pending = [pool.submit(client, number) for number in range(clients)]
            start.wait()
            started = perf_counter()
            answers = [future.result() for future in pending]
            return _sample(started, latencies, answers)

    return trial


def _sample(started: float, latencies: list[float], answers: list[object]) -> Sample:
    elapsed = perf_counter() - started
    median, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return Sample({THROUGHPUT: len(latencies) / elapsed, MEDIAN: float(median), P99: float(p99)}, np.asarray(answers))
