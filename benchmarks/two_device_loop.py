"""The trivial loop cut over two logical CPU devices, beside TensorFlow 1 with two CPU devices.

Each device counts. *Apart*, only the predicate goes from the first to the second. *Crossing*, the first one's counter
does too, in every iteration.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, TENSORFLOW_1, Peers
from benchmarks.plots import draw_bars
from benchmarks.simulation import require_bodies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from benchmarks.peers import TensorFlow

NAME = "two_device_loop"
RATE = Figure("rate", "iterations/s", higher_is_better=True)
GOAL = 20_000.0
"""The paper's figure on one machine, roughly."""


def _loop(system: Any, iterations: int, *, crossing: bool) -> Any:
    """Both counters at the end, in asyncflow and TensorFlow."""

    def body(step: Any, total: Any) -> Any:
        with system.device("/cpu:1" if system is not af else "cpu:1"):
            total = total + (step if crossing else 1)
        return step + 1, total

    with system.device("/cpu:0" if system is not af else "cpu:0"):
        # Equal counters would be one.
        return system.while_loop(lambda step, _: step < iterations, body, (np.int64(0), np.int64(1)))


def _tensorflow(tensorflow: TensorFlow, iterations: int, *, crossing: bool) -> Callable[[], Any]:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        counters = _loop(v1, iterations, crossing=crossing)
    config = v1.ConfigProto(
        device_count={"CPU": 2},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=2,
        use_per_session_threads=True,
    )
    session = v1.Session(graph=graph, config=config)
    return lambda: session.run(counters)


async def measure(peers: Peers = NO_PEERS, *, repeats: int = 5, iterations: int = 10_000) -> list[Result]:
    """Iterations/s, with and without a value that goes from device to device in each of them."""
    results = []
    for name, crossing in (("apart", False), ("crossing", True)):
        with af.Graph() as graph:
            counters = _loop(af, iterations, crossing=crossing)
        async with af.Session(graph, devices=["cpu:0", "cpu:1"]) as session:
            require_bodies(session.plan(counters), ["cpu:0", "cpu:1"])

            async def ours(session: af.Session = session, counters: Any = counters) -> Any:
                return await session.run(counters)

            trials = {ASYNCFLOW: _rate(iterations, ours)}
            if peers.tensorflow is not None:
                work = _tensorflow(peers.tensorflow, iterations, crossing=crossing)

                async def theirs(work: Callable[[], Any] = work) -> Any:
                    return work()

                trials[TENSORFLOW_1] = _rate(iterations, theirs)
            case = f"{name}, {iterations:,} iterations"
            results += await compare(NAME, case, trials, repeats=repeats)
    return results


def _rate(iterations: int, work: Callable[[], Awaitable[Any]]) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        answer = await work()
        return Sample({RATE: iterations / (perf_counter() - started)}, answer)

    return trial


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The measured rates."""
    bars = {
        f"{result.system}, {result.case.partition(',')[0]}": (result.median, result.worst, result.best)
        for result in results
        if result.workload == NAME
    }
    if not bars:
        return []
    return [
        draw_bars(
            folder / "two_device_loop.png", "A counter on each of two CPU devices", "iterations/s", bars, goal=GOAL
        )
    ]
