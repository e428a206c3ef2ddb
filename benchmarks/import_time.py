"""How long ``import asyncflow`` takes in a fresh process, beside NumPy (which it needs) and the peers."""

from __future__ import annotations

from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, NUMPY, Peers
from benchmarks.processes import run_python

TIME = Figure("time to import", "ms")
PROGRAM = "from time import perf_counter; started = perf_counter(); import {}; print(perf_counter() - started)"


async def measure(peers: Peers = NO_PEERS, *, repeats: int = 5) -> list[Result]:
    """ms to import, everything on disk already cached."""
    trials = {name: _trial(name) for name in (ASYNCFLOW, NUMPY, *peers.present)}
    return await compare("import_time", "new process", trials, repeats=repeats, warm_ups=0)


def _trial(module: str) -> Trial:
    async def trial() -> Sample:
        return Sample({TIME: float(await run_python("-c", PROGRAM.format(module))) * 1e3})

    return trial
