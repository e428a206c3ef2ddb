"""Memory of a training step of an LSTM layer over a long sequence, most of it values kept for the gradient.

As in `memory`, every measurement is a process of its own, which runs this module, and nothing is measured without
Linux's ``/proc``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.lstm import AsyncflowStep, Model, Step, looped, random_model, tensorflow_step
from benchmarks.lstm_by_hand import ByHand
from benchmarks.lstm_peers import torch_loop
from benchmarks.memory import CAN_MEASURE, PROCESS, peak_of
from benchmarks.peers import NO_PEERS, NUMPY, TENSORFLOW_1, TORCH, Peers, load_tensorflow, load_torch
from benchmarks.processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "training_memory"
STEP = Figure("peak of the first step", "MiB")
TOLERANCE: Final = 1e-4
"""For the loss."""


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 1, steps: int = 1_000, batch: int = 64, hidden: int = 512
) -> list[Result]:
    """Measure MiB that the first step adds at its peak to the process with the graph in it, and MiB of the whole
    process.
    """
    if not CAN_MEASURE:
        return []
    systems = [ASYNCFLOW, NUMPY]
    if peers.tensorflow is not None:
        systems.append(TENSORFLOW_1)
    if peers.torch is not None:
        systems.append(TORCH)
    trials = {system: _trial(system, steps, batch, hidden) for system in systems}
    case = f"hidden {hidden}, batch {batch}, {steps:,} steps"
    return await compare(NAME, case, trials, repeats=repeats, warm_ups=0, tolerance=TOLERANCE)


def _trial(system: str, *sizes: int) -> Trial:
    async def trial() -> Sample:
        output = await run_python("-m", "benchmarks.training_memory", system, *map(str, sizes))
        step, whole, *answer = json.loads(output)
        return Sample({STEP: step, PROCESS: whole}, np.array(answer, np.float32))

    return trial


def _main(system: str, *sizes: int) -> None:
    model = random_model(*sizes)
    step = {ASYNCFLOW: _asyncflow, NUMPY: _numpy, TENSORFLOW_1: _tensorflow, TORCH: _torch}[system](model)
    with threadpool_limits(limits=1, user_api="blas"):
        added, peak, (loss, grads) = peak_of(step)
    size = model.xs.size * np.mean([np.abs(np.asarray(grad)).mean() for grad in grads])
    print(json.dumps([added, peak, float(loss), float(size)]))


def _asyncflow(model: Model) -> Callable[[], Step]:
    model.xs.flags.writeable = False  # so that it is not copied when it is fed
    step = AsyncflowStep(model, looped, model.xs.size, [_length(model)])
    runner = asyncio.Runner()
    runner.run(_entered(step))
    return lambda: runner.run(step.run())


async def _entered(step: AsyncflowStep) -> None:
    await step.session.__aenter__()


def _numpy(model: Model) -> Callable[[], Step]:
    def run() -> Step:
        # Its buffers are part of what it takes.
        return ByHand(model)()

    return run


def _tensorflow(model: Model) -> Callable[[], Step]:
    return tensorflow_step(load_tensorflow(), model, looped, model.xs.size, [_length(model)])


def _torch(model: Model) -> Callable[[], Step]:
    return torch_loop(load_torch(), model, model.xs.size)


def _length(model: Model) -> Any:
    return np.array(len(model.xs), np.int32)


if __name__ == "__main__":
    steps, batch, hidden = map(int, sys.argv[2:])
    _main(sys.argv[1], steps, batch, hidden)
