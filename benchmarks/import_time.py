"""How long ``import asyncflow`` takes in a fresh process, beside NumPy (which it needs) and the peers."""

from __future__ import annotations

import asyncio
import sys

from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, NUMPY, Peers

TIME = Figure("time to import", "ms")
PROGRAM = "from time import perf_counter; started = perf_counter(); import {}; print(perf_counter() - started)"


async def measure(peers: Peers = NO_PEERS, *, repeats: int = 5) -> list[Result]:
    """ms to import, everything on disk already cached."""
    trials = {name: _trial(name) for name in (ASYNCFLOW, NUMPY, *peers.present)}
    return await compare("import_time", "new process", trials, repeats=repeats, warm_ups=0)


def _trial(module: str) -> Trial:
    async def trial() -> Sample:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM.format(module),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"import {module} failed in a new process:\n{errors.decode()}")
        return Sample({TIME: float(output) * 1e3})

    return trial
