"""A trace as Chrome Trace Events, for Perfetto and chrome://tracing.

One process per device with a thread per lane, firings as complete events (``X``), memory as counters (``C``), and runs
as async spans (``b``/``e``) of a process "requests". Times are float microseconds from the first event.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TypeAlias

from asyncflow.profiler.lanes import Lane, devices, firing_lanes, time_bounds
from asyncflow.runtime.trace import Firing, Trace

Event: TypeAlias = dict[str, object]

REQUESTS_PID = 1


def chrome_events(trace: Trace) -> Iterator[Event]:
    """The trace as Chrome trace events: metadata first, then firings lane by lane, runs, and memory."""
    origin, _ = time_bounds(trace)
    pids = {device: pid for pid, device in enumerate(devices(trace), start=REQUESTS_PID + 1)}
    # Perfetto takes tid 0 for the process's main thread and merges a lane whose tid equals a pid into it, dropping the
    # slices that then overlap: lanes are numbered from above every pid.
    lanes = list(enumerate(firing_lanes(trace), start=REQUESTS_PID + len(pids) + 1))
    requests_tid = REQUESTS_PID + len(pids) + len(lanes) + 1
    if trace.runs:
        yield from _name_process(REQUESTS_PID, "requests")
        yield from _name_thread(REQUESTS_PID, requests_tid, "runs")
    for device, pid in pids.items():
        yield from _name_process(pid, device)
    for tid, lane in lanes:
        yield from _name_thread(pids[lane.device], tid, lane.label)
    for tid, lane in lanes:
        yield from _lane_events(lane, pids[lane.device], tid, origin)
    yield from _run_events(trace, requests_tid, origin)
    for sample in sorted(trace.memory, key=lambda sample: sample.time_ns):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": pids[sample.device],
            "ts": _microseconds(sample.time_ns - origin),
            "args": {"bytes": sample.nbytes},
        }


def render_chrome(trace: Trace) -> Iterator[str]:
    """The text of a strict-JSON Chrome trace file, in pieces."""
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    yield '{"displayTimeUnit":"ns","otherData":'
    yield encode({"producer": "asyncflow", "dropped": trace.dropped})
    yield ',"traceEvents":['
    separator = "\n"
    for event in chrome_events(trace):
        yield separator + encode(event)
        separator = ",\n"
    yield "\n]}\n"


def _name_process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _name_thread(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _lane_events(lane: Lane, pid: int, tid: int, origin: int) -> Iterator[Event]:
    for firing in lane.firings:
        yield {
            "ph": "X",
            "name": firing.node,
            "cat": firing.op,
            "pid": pid,
            "tid": tid,
            "ts": _microseconds(firing.started_ns - origin),
            "dur": _microseconds(firing.ended_ns - firing.started_ns),
            "args": _firing_args(firing),
        }


def _firing_args(firing: Firing) -> Event:
    return {
        "node": firing.node,
        "op": firing.op,
        "tag": firing.tag,
        "run": firing.run,
        "outputs": firing.outputs,
        "location": firing.location,
        "queued_us": _microseconds(firing.started_ns - firing.scheduled_ns),
        "status": firing.status,
    }


def _run_events(trace: Trace, tid: int, origin: int) -> Iterator[Event]:
    # Spans are paired by id. The run's own number will not do: two sessions may record into one trace.
    for span_id, run in enumerate(sorted(trace.runs, key=lambda run: run.started_ns), start=1):
        span: Event = {
            "name": run.label or f"run {run.run}",
            "cat": "run",
            "id": span_id,
            "pid": REQUESTS_PID,
            "tid": tid,
        }
        end = max(run.started_ns, run.ended_ns)
        args: Event = {"run": run.run, "status": run.status}
        yield {"ph": "b", **span, "ts": _microseconds(run.started_ns - origin), "args": args}
        yield {"ph": "e", **span, "ts": _microseconds(end - origin)}


def _microseconds(ns: int) -> float:
    """Nanoseconds as the float of microseconds that a reader turns back into exactly ``ns``.

    Viewers compute ``int(us * 1000)``. Plain division would now and then lose a nanosecond there, and neighbouring
    slices would overlap.
    """
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)
