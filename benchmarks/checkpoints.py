"""Saving and restoring a session's variables, beside writing and reading the same bytes by hand.

By hand is one file, written or read in chunks on a thread, without a checksum; written bytes are on the disk when it
ends, as those of a checkpoint are. The disk differs from moment to moment by more than what is compared, so ratios of
neighbouring trials count. What is read is the checkpoint's own file on both sides, as two files of the same bytes
differ by half, depending on where they lie in memory. It goes into memory that the process has given back before, into
a session that starts: which memory is free would else depend on what the other side has freed. The gap is what a
coroutine sees that always wants its turn, while a checkpoint is saved or restored, or a thread does it by hand.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare, timed_await
from benchmarks.loop_gap import IDLE, idle, watched
from benchmarks.peers import NO_PEERS, Peers

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
    with af.Graph() as graph:
        for k, value in enumerate(values):
            af.Variable(value, name=f"v{k}").read()
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

            async def restore() -> Sample:
                async with af.Session(graph) as starting:
                    _give_back()
                    return _without_answer(await timed_await(READ, 1e3, lambda: starting.restore(root))())

            async def read() -> Sample:
                async with af.Session(graph):
                    _give_back()
                    return _without_answer(
                        await timed_await(READ, 1e3, lambda: asyncio.to_thread(_read, root, values))()
                    )

            async def gaps_of_restoring() -> Sample:
                return _without_answer(await watched(lambda: session.restore(root)))

            async def gaps_of_reading() -> Sample:
                return _without_answer(await watched(lambda: asyncio.to_thread(_read, root, values)))

            pairs: list[tuple[str, dict[str, Trial]]] = [
                ("save", {ASYNCFLOW: save, BY_HAND: write}),
                ("restore", {ASYNCFLOW: restore, BY_HAND: read}),
                ("save", {ASYNCFLOW: gaps_of_saving, BY_HAND: gaps_of_writing, IDLE: idle}),
                ("restore", {ASYNCFLOW: gaps_of_restoring, BY_HAND: gaps_of_reading, IDLE: idle}),
            ]
            results: list[Result] = []
            for what, trials in pairs:
                results += await compare(
                    "checkpoints", f"{what} {case}", trials, repeats=repeats, lead_ins=1, baselines=[IDLE]
                )
            return results


def _give_back() -> None:
    """Gives free memory back to the kernel; else it depends on the trial before who has to have pages cleared."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


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
