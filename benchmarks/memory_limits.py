"""A training step of an LSTM over a long sequence, in less memory than its saved values need: time against memory.

The step of `training_memory`, with its length known beforehand, so that a plan can be made for a limit. Every
measurement is a process of its own: the growth of the process's memory at its peak, and the time of the second step.
On a machine that others use too, the processor's time of that step says more.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.lstm import STEP_TIME, Model, looped, random_model
from benchmarks.lstm_by_hand import ByHand
from benchmarks.memory import CAN_MEASURE, peak_of
from benchmarks.peers import NO_PEERS, NUMPY, Peers
from benchmarks.processes import run_python
from benchmarks.training_memory import STEP, TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

NAME = "memory_limits"
CPU_TIME: Final = Figure("processor's time a training step", "ms")
WAYS: Final[dict[str, dict[str, Any]]] = {
    "keeping": {},
    "limit 0.62": {"share": 0.62},
    "limit 1/2": {"share": 0.5},
    "limit 1/4": {"share": 0.25},
    "limit 1/2, with a file": {"share": 0.5, "spills": True},
    "running again": {"saved_values": "recompute"},
}
"""Limits are shares of what the loop saves, and the inputs, which count too."""


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 1, steps: int = 1_000, batch: int = 64, hidden: int = 512
) -> list[Result]:
    """MiB that the first step adds at its peak, and the times of the second, by the limit."""
    if not CAN_MEASURE:
        return []
    results = []
    for way in WAYS:
        trials = {ASYNCFLOW: _trial(way, steps, batch, hidden), NUMPY: _trial(NUMPY, steps, batch, hidden)}
        case = f"{way}, hidden {hidden}, batch {batch}, {steps:,} steps"
        results += await compare(NAME, case, trials, repeats=repeats, warm_ups=0, tolerance=TOLERANCE)
    return results


def _trial(way: str, *sizes: int) -> Trial:
    async def trial() -> Sample:
        output = await run_python("-m", "benchmarks.memory_limits", way, *map(str, sizes))
        added, seconds, cpu_s, *answer = json.loads(output)
        figures = {STEP: added, STEP_TIME: seconds * 1e3, CPU_TIME: cpu_s * 1e3}
        return Sample(figures, np.array(answer, np.float32))

    return trial


def _main(way: str, *sizes: int) -> None:
    model = random_model(*sizes)
    step = ByHand(model) if way == NUMPY else _asyncflow(model, **WAYS[way])
    with threadpool_limits(limits=1, user_api="blas"):
        added, _, (loss, grads) = peak_of(step)
        started, cpu_started = perf_counter(), process_time()
        step()
        seconds, cpu_s = perf_counter() - started, process_time() - cpu_started
    size = model.xs.size * np.mean([np.abs(np.asarray(grad)).mean() for grad in grads])
    print(json.dumps([added, seconds, cpu_s, float(loss), float(size)]))


def _asyncflow(
    model: Model, *, share: float | None = None, spills: bool = False, saved_values: Any = "auto"
) -> Callable[[], Any]:
    """A step in a session with so much of the memory that the loop's saved values and all else take if kept."""
    model.xs.flags.writeable = False  # so that it is not copied when it is fed
    steps, batch, hidden = model.xs.shape
    with af.Graph() as graph:
        tensors = model.map(lambda value: af.placeholder(value.dtype, value.shape))
        loss = looped(af, tensors, np.int32(steps)) / model.xs.size
        fetches = [loss, *af.gradients(loss, tensors.parameters)]
    feeds = dict(zip((tensors.xs, *tensors.parameters), (model.xs, *model.parameters), strict=True))
    saved = 6 * 4 * steps * batch * hidden
    options: dict[str, Any] = {"saved_values": saved_values}
    if share is not None:
        options["memory_limit"] = max(1 << 20, int(share * saved) + model.xs.nbytes)
    if spills:
        options["spill_directory"] = tempfile.gettempdir()
    session = af.Session(graph, devices=["cpu:0"], **options)
    runner = asyncio.Runner()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return runner.run(work)

    run(session.__aenter__())

    def step() -> Any:
        loss, *grads = run(session.run(fetches, feeds))
        return loss, grads

    return step


if __name__ == "__main__":
    _main(sys.argv[1], *map(int, sys.argv[2:]))
