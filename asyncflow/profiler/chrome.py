"""A trace as Chrome Trace Events, for Perfetto and chrome://tracing.

One process per device with a thread per lane. Firings are complete events (``X``), transfers flow arrows between them
(``s``/``f``), memory counters (``C``). Runs are async spans (``b``/``e``) of a process "requests". Times are float
microseconds from the first event.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from asyncflow.profiler.arrows import Arrow, find_arrows
from asyncflow.profiler.lanes import TimelineLane, devices, firing_lanes, time_bounds
from asyncflow.runtime.watch.trace import DeviceRequests, Firing, MemorySample, Trace

Event: TypeAlias = dict[str, object]

REQUESTS_PID = 1
MARK_NS = 1_000
"""Length of the slice that stands for the end of a transfer where no firing does: to be seen, a flow needs one."""


def chrome_events(trace: Trace) -> Iterator[Event]:
    """The trace as Chrome trace events: metadata first, then firings lane by lane, transfers, runs, and memory."""
    origin, _ = time_bounds(trace)
    pids = {device: pid for pid, device in enumerate(devices(trace), start=REQUESTS_PID + 1)}
    lanes = firing_lanes(trace)
    arrows = find_arrows(trace, lanes)
    # Perfetto takes tid 0 for the process's main thread and merges a lane whose tid equals a pid into it, dropping the
    # slices that then overlap: lanes are numbered from above every pid.
    first_tid = REQUESTS_PID + len(pids) + 1
    marked = sorted({end.device for arrow in arrows for end in (arrow.start, arrow.end) if end.lane is None})
    mark_tids = {device: tid for tid, device in enumerate(marked, start=first_tid + len(lanes))}
    requests_tid = first_tid + len(lanes) + len(marked)
    if trace.runs:
        yield from _named("requests", pid=REQUESTS_PID)
        yield from _named("runs", pid=REQUESTS_PID, tid=requests_tid)
    for device, pid in pids.items():
        yield from _named(device, pid=pid)
    for tid, lane in enumerate(lanes, start=first_tid):
        yield from _named(lane.label, pid=pids[lane.device], tid=tid)
    for device, tid in mark_tids.items():
        yield from _named("transfers", pid=pids[device], tid=tid)
    for tid, lane in enumerate(lanes, start=first_tid):
        yield from _lane_events(lane, pids[lane.device], tid, origin)
    for device, tid in mark_tids.items():
        yield from _mark_events(arrows, device, pids[device], tid, origin)
    # After the slices: viewers process simultaneous events in file order.
    for flow_id, arrow in enumerate(arrows, start=1):
        for phase, end in (("s", arrow.start), ("f", arrow.end)):
            tid = mark_tids[end.device] if end.lane is None else first_tid + end.lane
            yield _flow_event(arrow, phase, flow_id, pids[end.device], tid, end.time_ns - origin)
    yield from _run_events(trace, requests_tid, origin)
    counters = _counters(trace)
    for sample in sorted(trace.memory, key=lambda sample: sample.time_ns):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": pids[sample.device],
            "ts": _microseconds(sample.time_ns - origin),
            "args": {"bytes": sample.nbytes, **{name: getattr(sample, name) for name in counters[sample.device]}},
        }


def _counters(trace: Trace) -> dict[str, list[str]]:
    """The figures ever counted of each device's saved values; viewers keep the last figure until there is another."""
    counted: dict[str, list[str]] = {}
    for device in devices(trace):
        samples = [sample for sample in trace.memory if sample.device == device]
        names = MemorySample._fields[3:]
        counted[device] = [name for name in names if any(getattr(sample, name) for sample in samples)]
    return counted


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


def _named(name: str, **place: int) -> Iterator[Event]:
    """Yield the events that name a process or thread, and sort it by its number."""
    kind = "thread" if "tid" in place else "process"
    yield {"ph": "M", "name": f"{kind}_name", **place, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", **place, "args": {"sort_index": place.get("tid", place["pid"])}}


def _lane_events(lane: TimelineLane, pid: int, tid: int, origin: int) -> Iterator[Event]:
    for firing in lane.firings:
        spent = firing.started_ns - origin, firing.ended_ns - firing.started_ns
        yield _slice(firing.label, firing.op, pid, tid, spent, _firing_args(firing))


def _slice(name: str, category: str, pid: int, tid: int, spent: tuple[int, int], args: Event) -> Event:
    """A complete event: `spent` is when it began, and for how long."""
    time = {"ts": _microseconds(spent[0]), "dur": _microseconds(spent[1])}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **time, "args": args}


def _firing_args(firing: Firing) -> Event:
    return {
        "node": firing.node,
        "op": firing.op,
        "tag": firing.tag,
        "run": firing.run,
        "outputs": firing.outputs,
        "location": firing.location,
        "pending_us": _microseconds(firing.pending_ns),
        "queued_us": _microseconds(firing.queueing_ns),
        "status": firing.status,
        **({"attempt": firing.attempt} if firing.attempt else {}),
    }


def _mark_events(arrows: Iterable[Arrow], device: str, pid: int, tid: int, origin: int) -> Iterator[Event]:
    """Short slices for the ends of transfers at which no firing is; ends of one moment share theirs."""
    ends: list[tuple[int, str]] = []
    for arrow in arrows:
        for verb, end in (("send", arrow.start), ("recv", arrow.end)):
            if end.lane is None and end.device == device:
                ends.append((end.time_ns, f"{verb} {arrow.tensor}"))
    marks: defaultdict[int, list[str]] = defaultdict(list)
    started = -MARK_NS
    for time_ns, name in sorted(ends):
        if time_ns >= started + MARK_NS:
            started = time_ns
        marks[started].append(name)
    for time_ns, names in marks.items():
        name = names[0] if len(names) == 1 else f"{len(names)} transfers"
        yield _slice(name, "transfer", pid, tid, (time_ns - origin, MARK_NS), {"transfers": names})


def _flow_event(arrow: Arrow, phase: str, flow_id: int, pid: int, tid: int, time_ns: int) -> Event:
    transfer = arrow.transfer
    event: Event = {
        "ph": phase,
        "name": arrow.tensor,
        "cat": "transfer",
        "id": flow_id,
        "pid": pid,
        "tid": tid,
        "ts": _microseconds(time_ns),
        "args": {"tag": transfer.tag, "run": transfer.run, "bytes": transfer.nbytes},
    }
    # Without "e" the arrow would end at the lane's next slice, not at the enclosing one.
    return event | {"bp": "e"} if phase == "f" else event


def _run_events(trace: Trace, tid: int, origin: int) -> Iterator[Event]:
    asked = _requests_by_run(trace)
    # Spans are paired by id. Run numbers are not unique: two sessions may record into one trace.
    for span_id, run in enumerate(sorted(trace.runs, key=lambda run: run.started_ns), start=1):
        span: Event = {
            "name": run.label or f"run {run.run}",
            "cat": "run",
            "id": span_id,
            "pid": REQUESTS_PID,
            "tid": tid,
        }
        end = max(run.started_ns, run.ended_ns)
        args: Event = {"run": run.run, "status": run.status, **asked.get(run.run, {})}
        yield {"ph": "b", **span, "ts": _microseconds(run.started_ns - origin), "args": args}
        yield {"ph": "e", **span, "ts": _microseconds(end - origin)}


def _requests_by_run(trace: Trace) -> dict[int, Event]:
    """Return the requests to each card, by number of the run and name of the card."""
    found: defaultdict[int, Event] = defaultdict(dict)
    for run, device, *counts in trace.requests:
        found[run][device] = dict(zip(DeviceRequests._fields[2:], counts, strict=True))
    return found


def _microseconds(ns: int) -> float:
    """Nanoseconds as the float of microseconds that a reader turns back into exactly ``ns``.

    Viewers compute ``int(us * 1000)``. Plain division would now and then lose a nanosecond there, and neighbouring
    slices would overlap.
    """
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.inf)
