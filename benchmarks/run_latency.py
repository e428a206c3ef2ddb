"""What one run costs: graphs of one and of twenty scalar operations, run one after the other.

Both by `Session.run`, which looks at fetches and feeds every time, and by a call prepared for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Trial, compare, timed, timed_await
from benchmarks.peers import NO_PEERS, TENSORFLOW_1, Peers
from benchmarks.programs import chain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.peers import TensorFlow

TIME = Figure("time a run", "µs")
SCALE, OFFSET = np.float32(0.5), np.float32(1.0)
FED = np.float32(3.0)


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 11, runs: int = 500, nodes: Sequence[int] = (1, 20)
) -> list[Result]:
    """µs per run: asyncflow and TensorFlow."""
    results = []
    for count in nodes:
        results += await _measure(peers.tensorflow, repeats, runs, count)
    return results


async def _measure(tensorflow: TensorFlow | None, repeats: int, runs: int, nodes: int) -> list[Result]:
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = chain(x, af.constant(SCALE), af.constant(OFFSET), nodes)

    scale = 1e6 / runs
    async with af.Session(graph) as session:
        prepared = session.prepare(y, [x])
        one_by_one: dict[str, Trial] = {
            ASYNCFLOW: timed_await(TIME, scale, _repeat(lambda: session.run(y, {x: FED}), runs))
        }
        calls: dict[str, Trial] = {ASYNCFLOW: timed_await(TIME, scale, _repeat(lambda: prepared(FED), runs))}
        if tensorflow is not None:
            by_run, by_callable = _tensorflow(tensorflow, runs, nodes)
            one_by_one[TENSORFLOW_1] = timed(TIME, scale, by_run)
            calls[TENSORFLOW_1] = timed(TIME, scale, by_callable)
        case = f"{nodes} node{'s' * (nodes != 1)}"
        return [
            *await compare("run_latency", case, one_by_one, repeats=repeats),
            *await compare("run_latency", f"{case}, prepared", calls, repeats=repeats),
        ]


def _repeat(run: Callable[[], Awaitable[Any]], runs: int) -> Callable[[], Awaitable[Any]]:
    async def repeated() -> Any:
        answer = None
        for _ in range(runs):
            answer = await run()
        return answer

    return repeated


def _tensorflow(tensorflow: TensorFlow, runs: int, nodes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Runs by `Session.run`, and by what `Session.make_callable` prepares."""
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        x = v1.placeholder(v1.float32, ())
        y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), nodes)
    session = tensorflow.session(graph, threads=1)
    prepared = session.make_callable(y, [x])

    def by_run() -> Any:
        answer = None
        for _ in range(runs):
            answer = session.run(y, {x: FED})
        return answer

    def by_callable() -> Any:
        answer = None
        for _ in range(runs):
            answer = prepared(FED)
        return answer

    return by_run, by_callable
