"""Processor time of ``import asyncflow`` in a fresh process, beside NumPy (which it needs) and the peers.

It imports what a graph is built with when the first graph is made, and the rest for the first session.
"""

from __future__ import annotations

from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, NUMPY, Peers
from benchmarks.processes import run_python

TIME = Figure("CPU time to import", "ms")
PROGRAM = "from time import process_time; started = process_time(); import {}; {}\nprint(process_time() - started)"
CASES = {"import": "", "first graph": "asyncflow.Graph()", "first session": "asyncflow.Session(asyncflow.Graph())"}


async def measure(peers: Peers = NO_PEERS, *, repeats: int = 5) -> list[Result]:
    """ms of processor time to import, and to make a graph or a session; everything on disk already cached."""
    results = []
    for case, does in CASES.items():
        trials = {ASYNCFLOW: _trial(ASYNCFLOW, does)}
        trials |= {name: _trial(name) for name in (NUMPY, *peers.present)}
        results += await compare("import_time", case, trials, repeats=repeats, warm_ups=0)
    return results


def _trial(module: str, does: str = "") -> Trial:
    async def trial() -> Sample:
        return Sample({TIME: float(await run_python("-c", PROGRAM.format(module, does))) * 1e3})

    return trial
