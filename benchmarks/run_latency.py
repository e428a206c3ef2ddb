"""What one `await session.run` costs: graphs of one and of twenty scalar operations, run one after the other."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.programs import chain
from benchmarks.tensorflow1 import TENSORFLOW

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.tensorflow1 import TensorFlow1

TIME = Figure("time a run", "µs")
SCALE, OFFSET = np.float32(0.5), np.float32(1.0)
FED = np.float32(3.0)


async def measure(
    tensorflow: TensorFlow1 | None = None, *, repeats: int = 11, runs: int = 500, nodes: Sequence[int] = (1, 20)
) -> list[Result]:
    """µs per run: asyncflow and TensorFlow."""
    results = []
    for count in nodes:
        results += await _measure(tensorflow, repeats, runs, count)
    return results


async def _measure(tensorflow: TensorFlow1 | None, repeats: int, runs: int, nodes: int) -> list[Result]:
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        y = chain(x, af.constant(SCALE), af.constant(OFFSET), nodes)

    async with af.Session(graph) as session:

        async def run_asyncflow() -> Sample:
            answer = None
            started = perf_counter()
            for _ in range(runs):
                answer = await session.run(y, {x: FED})
            return _sample(started, runs, answer)

        trials: dict[str, Trial] = {ASYNCFLOW: run_asyncflow}
        if tensorflow is not None:
            trials[TENSORFLOW] = _tensorflow_trial(tensorflow, runs, nodes)
        case = f"{nodes} node{'s' * (nodes != 1)}"
        return await compare("run_latency", case, trials, repeats=repeats)


def _tensorflow_trial(tensorflow: TensorFlow1, runs: int, nodes: int) -> Trial:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        x = v1.placeholder(v1.float32, ())
        y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), nodes)
    session = tensorflow.session(graph, threads=1)

    async def run_tensorflow() -> Sample:
        answer = None
        started = perf_counter()
        for _ in range(runs):
            answer = session.run(y, {x: FED})
        return _sample(started, runs, answer)

    return run_tensorflow


def _sample(started: float, runs: int, answer: object) -> Sample:
    return Sample({TIME: (perf_counter() - started) / runs * 1e6}, answer)
