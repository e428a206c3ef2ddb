"""Records of CUPTI for this process, by way of torch's profiler: calls of the CUDA runtime, kernels and copies.

It records CuPy's too. Used on a card only; torch is imported in the function that needs it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Any

SLACK_NS = 20_000
"""Most difference between the clocks."""

CALLS = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A call, or work of the card; times are on `perf_counter_ns`, to some microseconds."""

    name: str
    category: str
    thread: int
    """As CUPTI has it: of the process for calls, a number of the stream for work."""
    started_ns: float
    ended_ns: float


@contextmanager
def profiled() -> Iterator[list[Record]]:
    """Yield a list of records of the block, which is filled once the block has ended."""
    profiler = importlib.import_module("torch.profiler")
    found: list[Record] = []
    kinds = profiler.ProfilerActivity
    with profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        started_ns = perf_counter_ns()
        yield found
        ended_ns = perf_counter_ns()
        importlib.import_module("torch").cuda.synchronize()
    offset_ns = _unix_to_perf_counter_ns()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        everything = records(json.loads(path.read_text(encoding="utf-8")), offset_ns)
    # The profiler's own calls come before and after; work of the card may end later.
    found += [record for record in everything if started_ns - SLACK_NS <= record.started_ns <= ended_ns]


def records(trace: dict[str, Any], offset_ns: float) -> list[Record]:
    """Return the records of a Chrome trace, whose times are in µs since its base, plus `offset_ns`."""
    base_ns = float(trace.get("baseTimeNanoseconds", 0)) + offset_ns
    return [
        Record(
            name=event["name"],
            category=event["cat"],
            thread=int(event["tid"]),
            started_ns=base_ns + 1e3 * event["ts"],
            ended_ns=base_ns + 1e3 * (event["ts"] + event.get("dur", 0)),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in CALLS + WORK
    ]


def _unix_to_perf_counter_ns() -> float:
    """Return the difference to unix times; of a few tries the one with the least time in between."""
    tries = []
    for _ in range(20):
        before = perf_counter_ns()
        unix = time_ns()
        after = perf_counter_ns()
        tries.append((after - before, (before + after) / 2 - unix))
    return min(tries)[1]


def thread_names(native: int | None = None, ident: int | None = None) -> frozenset[int]:
    """The numbers under which CUPTI may know a thread, the calling one by default.

    It is the system's, or the low half of pthread's, as a number with a sign; which torch's traces leave out.
    """
    low = ctypes.c_int32(threading.get_ident() if ident is None else ident).value
    return frozenset({threading.get_native_id() if native is None else native, low, abs(low), low & 0xFFFFFFFF})


FORBIDDEN = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cuMemAlloc", "cuMemFree")


def blocking_calls(found: list[Record], threads: frozenset[int]) -> list[str]:
    """The names of calls from these threads that wait for the card, or may."""
    return [
        record.name
        for record in found
        if record.category in CALLS
        and record.thread in threads
        and (any(name in record.name for name in FORBIDDEN) or record.name in ("cudaMemcpy", "cudaMemset"))
    ]
