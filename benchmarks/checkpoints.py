"""Saving and restoring a session's variables, beside writing and reading the same bytes by hand.

By hand is one file, written or read in chunks on a thread, without a checksum. At its end the written bytes are on the
disk, as in a checkpoint. The disk differs from moment to moment by more than the compared times, so ratios of
neighbouring trials count. Both sides read the checkpoint's own file, as two files of the same bytes differ by half,
depending on their places in memory. A program restores when it starts, so each trial is a process of its own, which
gets all its memory from the kernel. In one process, the earlier trial decided which of them had pages cleared. The gap
is seen by a coroutine that always wants its turn, while a checkpoint is saved or restored, or a thread does it by hand,
with `numpy.save`, or with `torch.save`. Training steps run beside a save in the same way, or without one: the ratio of
the two medians is the cost of a save for a step.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare, timed_await
from benchmarks.loop_gap import IDLE, idle, watched
from benchmarks.peers import NO_PEERS, NUMPY, TORCH, Peers
from benchmarks.processes import run_python

BY_HAND = "by hand"
DURABLE = Figure("until it is on the disk", "ms")
READ = Figure("until it is there", "ms")
STEP = Figure("training step", "ms")
NO_SAVE: Final = "without a save"
CHUNK: Final = 8 << 20


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 7, megabytes: int = 1000, variables: int = 20
) -> list[Result]:
    """Measure milliseconds to save and to restore, the gaps of the event loop meanwhile, and the time of a training
    step.
    """
    rng = np.random.default_rng(0)
    values = [rng.random(megabytes * 125_000 // variables) for _ in range(variables)]
    graph, step = _graph(values)
    case = f"{megabytes} MB in {variables} variables"
    with tempfile.TemporaryDirectory() as folder:
        root, plain = Path(folder, "steps"), Path(folder, "plain")
        async with af.Session(graph) as session:
            saves: dict[str, Callable[[], Awaitable[object]]] = {
                ASYNCFLOW: lambda: session.save(root),
                BY_HAND: partial(asyncio.to_thread, _written, plain, values),
            }
            libraries = dict(saves)
            libraries[NUMPY] = partial(asyncio.to_thread, _written_by_numpy, plain, values)
            if peers.torch is not None:
                libraries[TORCH] = partial(asyncio.to_thread, _written_by_torch, plain, values, peers.torch)

            async def cleared() -> None:
                for path in (root, plain):
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
                await asyncio.to_thread(plain.mkdir)

            async def save(work: Callable[[], Awaitable[object]]) -> Sample:
                await cleared()
                return _without_answer(await timed_await(DURABLE, 1e3, work)())

            async def gaps_of_saving(work: Callable[[], Awaitable[object]]) -> Sample:
                await cleared()
                return _without_answer(await watched(work))

            async def steps(work: Callable[[], Awaitable[object]]) -> Sample:
                await cleared()
                return await _steps(session, step, work)

            async def restored(system: str) -> Sample:
                sizes = str(megabytes), str(variables)
                return Sample(
                    {READ: float(await run_python("-m", "benchmarks.checkpoints", system, str(root), *sizes))}
                )

            async def gaps_of_restoring() -> Sample:
                return _without_answer(await watched(lambda: session.restore(root)))

            async def gaps_of_reading() -> Sample:
                return _without_answer(await watched(lambda: asyncio.to_thread(_read, root, values)))

            beside = dict(libraries)
            beside[NO_SAVE] = partial(asyncio.sleep, megabytes / 1000)
            gaps: dict[str, Trial] = {system: partial(gaps_of_saving, work) for system, work in libraries.items()}
            pairs: list[tuple[str, int, dict[str, Trial]]] = [
                ("train beside a save of", 0, {system: partial(steps, work) for system, work in beside.items()}),
                ("save", 1, {system: partial(save, work) for system, work in saves.items()}),
                ("save", 0, {**gaps, IDLE: idle}),
                ("restore", 1, {system: partial(restored, system) for system in (ASYNCFLOW, BY_HAND)}),
                ("restore", 1, {ASYNCFLOW: gaps_of_restoring, BY_HAND: gaps_of_reading, IDLE: idle}),
            ]
            results: list[Result] = []
            for what, lead_ins, trials in pairs:
                if what == "restore":
                    await cleared()
                    await session.save(root)
                results += await compare(
                    "checkpoints", f"{what} {case}", trials, repeats=repeats, lead_ins=lead_ins, baselines=[IDLE]
                )
            return results


def _training_step(width: int) -> list[af.Tensor]:
    """A step of gradient descent through three layers."""
    rng = np.random.default_rng(0)
    x = af.constant(rng.random((64, width)))
    weights = [af.Variable(rng.random((width, width)) / width, name=f"layer{k}") for k in range(3)]
    read = [weight.read() for weight in weights]
    y = x
    for weight in read:
        y = af.tanh(y @ weight)
    gradients = af.gradients(af.sum(y * y), read)
    return [weight.assign(value - 1e-3 * g) for weight, value, g in zip(weights, read, gradients, strict=True)]


async def _steps(session: af.Session, step: Any, work: Callable[[], Awaitable[object]]) -> Sample:
    """The median of the training steps that run while `work` goes on."""
    times: list[float] = []
    saving = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    while not saving.done() or not times:
        started = perf_counter()
        await session.run(step)
        times.append((perf_counter() - started) * 1e3)
    await saving
    return Sample({STEP: statistics.median(times)})


def _graph(values: Sequence[np.ndarray]) -> tuple[af.Graph, list[af.Tensor]]:
    """Variables to save, and a training step of a small model beside them."""
    with af.Graph() as graph:
        for k, value in enumerate(values):
            af.Variable(value, name=f"v{k}").read()
        return graph, _training_step(256)


async def _restore(system: str, root: Path, megabytes: int, variables: int) -> float:
    """Milliseconds until a process that starts has the values of the only step under `root`."""
    values = [np.zeros(megabytes * 125_000 // variables) for _ in range(variables)]
    async with af.Session(_graph(values)[0]) as session:
        # The host of a virtual machine takes pages that are free, and gives them back at ten times what they cost.
        np.ones(2 * megabytes * 125_000)
        started = perf_counter()
        await (session.restore(root) if system == ASYNCFLOW else asyncio.to_thread(_read, root, values))
        return (perf_counter() - started) * 1e3


def _without_answer(sample: Sample) -> Sample:
    return Sample(sample.figures)


def _written(folder: Path, values: list[np.ndarray]) -> None:
    file = os.open(folder / "bytes", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for value in values:
            view = value.view(np.uint8).data
            while view:
                view = view[os.write(file, view[:CHUNK]) :]
        os.fsync(file)
    finally:
        os.close(file)


def _written_by_numpy(folder: Path, values: list[np.ndarray]) -> None:
    for number, value in enumerate(values):
        with open(folder / f"{number}.npy", "wb") as file:
            np.save(file, value)
            os.fsync(file.fileno())


def _written_by_torch(folder: Path, values: list[np.ndarray], torch: Any) -> None:
    with open(folder / "values.pt", "wb") as file:
        torch.save([torch.from_numpy(value) for value in values], file)
        os.fsync(file.fileno())


def _read(root: Path, values: list[np.ndarray]) -> list[np.ndarray]:
    """The arrays of the only step under `root`."""
    found = []
    (path,) = root.glob("step-*/variables.safetensors")
    with open(path, "rb", buffering=0) as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for value in values:
            found.append(np.empty_like(value))
            view = found[-1].view(np.uint8).data
            while view:
                view = view[file.readinto(view[:CHUNK]) :]
    return found


if __name__ == "__main__":
    print(asyncio.run(_restore(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))))
