"""What an iteration of a loop costs: ``while i < n: i = i + 1`` on an int32, where everything is overhead."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.tensorflow1 import TENSORFLOW

if TYPE_CHECKING:
    from benchmarks.tensorflow1 import TensorFlow1

TIME = Figure("time an iteration", "µs")


async def measure(
    tensorflow: TensorFlow1 | None = None, *, repeats: int = 11, iterations: int = 20_000
) -> list[Result]:
    """µs per iteration: asyncflow, Python on NumPy scalars, TensorFlow."""
    with af.Graph() as graph:
        limit = af.placeholder("int32", ())
        (count,) = af.while_loop(lambda i: i < limit, lambda i: i + 1, [af.constant(0, "int32")])

    async with af.Session(graph) as session:

        async def run_asyncflow() -> Sample:
            started = perf_counter()
            answer = await session.run(count, {limit: iterations})
            return _sample(started, iterations, answer)

        async def run_python() -> Sample:
            stop, one, i = np.int32(iterations), np.int32(1), np.int32(0)
            started = perf_counter()
            while i < stop:
                i = i + one
            return _sample(started, iterations, i)

        trials: dict[str, Trial] = {ASYNCFLOW: run_asyncflow, "python": run_python}
        if tensorflow is not None:
            trials[TENSORFLOW] = _tensorflow_trial(tensorflow, iterations)
        return await compare("loop_overhead", f"{iterations:,} iterations", trials, repeats=repeats)


def _tensorflow_trial(tensorflow: TensorFlow1, iterations: int) -> Trial:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        limit = v1.placeholder(v1.int32, ())
        count = v1.while_loop(lambda i: i < limit, lambda i: i + 1, [v1.constant(0)])
    session = tensorflow.session(graph, threads=1)

    async def run_tensorflow() -> Sample:
        started = perf_counter()
        answer = session.run(count, {limit: iterations})
        return _sample(started, iterations, answer)

    return run_tensorflow


def _sample(started: float, iterations: int, answer: object) -> Sample:
    return Sample({TIME: (perf_counter() - started) / iterations * 1e6}, answer)
