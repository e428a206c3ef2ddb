"""How long ``import asyncflow`` takes in a fresh process, beside NumPy (which it needs) and TensorFlow."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.tensorflow1 import TENSORFLOW

if TYPE_CHECKING:
    from benchmarks.tensorflow1 import TensorFlow1

TIME = Figure("time to import", "ms")
PROGRAM = "from time import perf_counter; started = perf_counter(); import {}; print(perf_counter() - started)"


async def measure(tensorflow: TensorFlow1 | None = None, *, repeats: int = 5) -> list[Result]:
    """ms to import, everything on disk already cached."""
    trials = {ASYNCFLOW: _trial("asyncflow"), "numpy": _trial("numpy")}
    if tensorflow is not None:
        trials[TENSORFLOW] = _trial("tensorflow")
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
