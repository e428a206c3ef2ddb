"""Saving and restoring a session's variables, beside writing and reading the same bytes by hand.

By hand is one file, written or read in chunks on a thread, without a checksum; written bytes are on the disk when it
ends, as those of a checkpoint are. The disk differs from moment to moment by more than what is compared, so ratios of
neighbouring trials count. What is read is the checkpoint's own file on both sides, as two files of the same bytes
differ by half, depending on where they lie in memory. A program restores when it starts, so each trial is a process of
its own, which gets all its memory from the kernel: in one process it depended on the trial before who had to have pages
cleared. The gap is what a coroutine sees that always wants its turn, while a checkpoint is saved or restored, or a
thread does it by hand.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare, timed_await
from benchmarks.loop_gap import IDLE, idle, watched
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.processes import run_python

BY_HAND = "by hand"
DURABLE = Figure("until it is on the disk", "ms")
READ = Figure("until it is there", "ms")
CHUNK: Final = 8 << 20


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 7, megabytes: int = 500, variables: int = 20
) -> list[Result]:
    """Milliseconds to save and to restore, and the gaps of the event loop meanwhile."""
    rng = np.random.default_rng(0)
    values = [rng.random(megabytes * 125_000 // variables) for _ in range(variables)]
    graph = _graph(values)
    case = f"{megabytes} MB in {variables} variables"
    with tempfile.TemporaryDirectory() as folder:
        root, plain = Path(folder, "steps"), Path(folder, "plain", "bytes")
        plain.parent.mkdir()
        async with af.Session(graph) as session:

            async def save() -> Sample:
                shutil.rmtree(root, ignore_errors=True)
                return _without_answer(await timed_await(DURABLE, 1e3, lambda: session.save(root))())

            async def write() -> Sample:
                shutil.rmtree(plain.parent)
                plain.parent.mkdir()
                return _without_answer(
                    await timed_await(DURABLE, 1e3, lambda: asyncio.to_thread(_written, plain, values))()
                )

            async def gaps_of_saving() -> Sample:
                shutil.rmtree(root, ignore_errors=True)
                return _without_answer(await watched(lambda: session.save(root)))

            async def gaps_of_writing() -> Sample:
                return _without_answer(await watched(lambda: asyncio.to_thread(_written, plain, values)))

            async def restored(system: str) -> Sample:
                sizes = str(megabytes), str(variables)
                return Sample(
                    {READ: float(await run_python("-m", "benchmarks.checkpoints", system, str(root), *sizes))}
                )

            async def gaps_of_restoring() -> Sample:
                return _without_answer(await watched(lambda: session.restore(root)))

            async def gaps_of_reading() -> Sample:
                return _without_answer(await watched(lambda: asyncio.to_thread(_read, root, values)))

            pairs: list[tuple[str, dict[str, Trial]]] = [
                ("save", {ASYNCFLOW: save, BY_HAND: write}),
                ("restore", {system: partial(restored, system) for system in (ASYNCFLOW, BY_HAND)}),
                ("save", {ASYNCFLOW: gaps_of_saving, BY_HAND: gaps_of_writing, IDLE: idle}),
                ("restore", {ASYNCFLOW: gaps_of_restoring, BY_HAND: gaps_of_reading, IDLE: idle}),
            ]
            results: list[Result] = []
            for what, trials in pairs:
                results += await compare(
                    "checkpoints", f"{what} {case}", trials, repeats=repeats, lead_ins=1, baselines=[IDLE]
                )
            return results


def _graph(values: Sequence[np.ndarray]) -> af.Graph:
    with af.Graph() as graph:
        for k, value in enumerate(values):
            af.Variable(value, name=f"v{k}").read()
    return graph


async def _restore(system: str, root: Path, megabytes: int, variables: int) -> float:
    """Milliseconds until a process that starts has the values of the only step under `root`."""
    values = [np.zeros(megabytes * 125_000 // variables) for _ in range(variables)]
    async with af.Session(_graph(values)) as session:
        # The host of a virtual machine takes pages that are free, and gives them back at ten times what they cost.
        np.ones(2 * megabytes * 125_000)
        started = perf_counter()
        await (session.restore(root) if system == ASYNCFLOW else asyncio.to_thread(_read, root, values))
        return (perf_counter() - started) * 1e3


def _without_answer(sample: Sample) -> Sample:
    return Sample(sample.figures)


def _written(path: Path, values: list[np.ndarray]) -> Path:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for value in values:
            view = value.view(np.uint8).data
            while view:
                view = view[os.write(file, view[:CHUNK]) :]
        os.fsync(file)
    finally:
        os.close(file)
    return path


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
