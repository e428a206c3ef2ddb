"""Memory of a loop, and its growth with the number of iterations: `x = x * scale + offset` on 1 MiB.

Every measurement is a process of its own, which runs this module, for memory once taken stays with a process. It reads
Linux's ``/proc``; elsewhere nothing is measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, NUMPY, TENSORFLOW_1, TORCH, Peers, load_tensorflow, load_torch
from benchmarks.processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOP = Figure("peak of the loop", "MiB")
PROCESS = Figure("peak of the process", "MiB")
SHAPE = (512, 512)
SCALE, OFFSET = np.float32(0.5), np.float32(1.0)
_RESET_PEAK = Path("/proc/self/clear_refs")
CAN_MEASURE = _RESET_PEAK.exists()


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 2, iterations: Sequence[int] = (100, 2_000)
) -> list[Result]:
    """Measure MiB that the first run of the loop adds at its peak to the process, and MiB of the whole process."""
    if not CAN_MEASURE:
        return []
    systems = [ASYNCFLOW, NUMPY]
    if peers.tensorflow is not None:
        systems.append(TENSORFLOW_1)
    if peers.torch is not None:
        systems.append(TORCH)
    results = []
    for count in iterations:
        trials = {system: _trial(system, count) for system in systems}
        results += await compare("memory", f"{count:,} iterations", trials, repeats=repeats, warm_ups=0)
    return results


def _trial(system: str, iterations: int) -> Trial:
    async def trial() -> Sample:
        output = await run_python("-m", "benchmarks.memory", system, str(iterations))
        loop, whole, answer = json.loads(output)
        return Sample({LOOP: loop, PROCESS: whole}, np.float32(answer))

    return trial


def _main(system: str, iterations: int) -> None:
    work = {ASYNCFLOW: _asyncflow, NUMPY: _numpy, TENSORFLOW_1: _tensorflow, TORCH: _torch}[system]()
    added, peak, answer = peak_of(lambda: work(iterations))
    print(json.dumps([added, peak, float(answer[0, 0])]))


def peak_of(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the MiB that `work` adds to this process at its peak, the process's peak, and the result of `work`."""
    before = _resident("VmRSS")
    _RESET_PEAK.write_text("5", encoding="ascii")
    answer = work()
    peak = _resident("VmHWM")
    return max(peak - before, 0.0), peak, answer


def _resident(field: str) -> float:
    """MiB of this process in memory: now (``VmRSS``), or at most (``VmHWM``)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, status
    return int(found[1]) / 1024


def _program(system: Any, limit: Any) -> Any:
    start = (np.int32(0), np.ones(SHAPE, np.float32))
    return system.while_loop(lambda i, _: i < limit, lambda i, x: (i + 1, x * SCALE + OFFSET), start)[-1]


def _asyncflow() -> Callable[[int], Any]:
    with af.Graph() as graph:
        limit = af.placeholder("int32", ())
        last = _program(af, limit)
    runner = asyncio.Runner()
    session = runner.run(_entered(graph))

    async def run(iterations: int) -> Any:
        return await session.run(last, {limit: iterations})

    return lambda iterations: runner.run(run(iterations))


async def _entered(graph: af.Graph) -> af.Session:
    return await af.Session(graph).__aenter__()


def _numpy() -> Callable[[int], Any]:
    def run(iterations: int) -> Any:
        x = np.ones(SHAPE, np.float32)
        for _ in range(iterations):
            x *= SCALE
            x += OFFSET
        return x

    return run


def _tensorflow() -> Callable[[int], Any]:
    tensorflow = load_tensorflow()
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        limit = v1.placeholder(v1.int32, ())
        last = _program(v1, limit)
    session = tensorflow.session(graph, threads=1)
    return lambda iterations: session.run(last, {limit: iterations})


def _torch() -> Callable[[int], Any]:
    torch = load_torch()

    def run(iterations: int) -> Any:
        with torch.inference_mode():
            x = torch.ones(SHAPE)
            for _ in range(iterations):
                x = x * float(SCALE) + float(OFFSET)
            return x.numpy()

    return run


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
