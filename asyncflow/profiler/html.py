"""A trace as one HTML page that opens offline: the template, its style and script, and the data, in one file.

The page asks the network for nothing, which its content security policy also enforces. Names reach it as JSON data and
are only ever shown as text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator
from importlib.resources import files
from typing import TypeAlias, cast

from asyncflow.profiler.arrows import End, find_arrows
from asyncflow.profiler.colours import CONTROL_FLOW_COLOUR, OTHERS_COLOUR, PALETTE, family, family_colours
from asyncflow.profiler.lanes import TimelineLane, devices, firing_lanes, lane_label, run_rows, time_bounds
from asyncflow.runtime.watch.trace import RunSpan, Trace

Json: TypeAlias = dict[str, object]


def render_html(trace: Trace) -> Iterator[str]:
    """The text of a self-contained HTML timeline, in pieces."""
    page = _resource("timeline.html")
    for slot, content in (
        ("/*{{style}}*/", _resource("timeline.css")),
        ("{{data}}", _embed(timeline_data(trace))),
        ("/*{{script}}*/", _resource("timeline.js")),
    ):
        # Split, not replace: a node may be named like a slot that is still to be filled.
        before, _, page = page.partition(slot)
        yield before
        yield content
    yield page


def timeline_data(trace: Trace) -> Json:
    """The data that the page draws: a column of integers per property and lane, with the strings in tables beside them.

    Times are integer nanoseconds from the first event. ``sites`` holds ``[node, op, location]``, and ``families`` the
    number of each site's family among the pairs of ``legend``. A transfer's ends give their group, and their lane among
    the lanes of all groups; -1 without a firing. ``requests`` holds run, card, and the four counts of `DeviceRequests`.
    """
    first, last = time_bounds(trace)
    tables = _Tables(dict)
    lanes = firing_lanes(trace)
    groups: list[Json] = [
        {
            "device": device,
            "lanes": [_lane_columns(lane, tables, first) for lane in lanes if lane.device == device],
            "memory": list(_memory_columns(trace, device, first)),
        }
        for device in devices(trace)
    ]
    colours = family_colours(trace.firings)
    numbers = {name: number for number, name in enumerate(colours)}
    # In the order of the table of sites, which the lanes have filled.
    families = [numbers[family(node, op)] for node, op, _ in cast(dict[tuple[str, str, str], int], tables["sites"])]
    return {
        "wall": last - first,
        "dropped": trace.dropped,
        "groups": groups,
        "transfers": _transfer_columns(trace, lanes, tables, first),
        "legend": list(colours.items()),
        "families": families,
        "colours": {"iterations": PALETTE, "control flow": CONTROL_FLOW_COLOUR, "others": OTHERS_COLOUR},
        "runs": [_run_columns(row, index, first) for index, row in enumerate(run_rows(trace))],
        "requests": trace.requests,
        **{name: list(tables[name]) for name in ("sites", "tags", "outputs", "statuses", "tensors")},
    }


class _Tables(defaultdict[str, dict[Hashable, int]]):
    """Distinct strings of a trace, numbered from 0 in the order they came: each is written once."""

    def number(self, table: str, value: Hashable) -> int:
        """The number of a value in the table of that name."""
        return self[table].setdefault(value, len(self[table]))


def _lane_columns(lane: TimelineLane, tables: _Tables, origin: int) -> Json:
    firings = lane.firings
    return {
        "label": lane.label,
        "start": [f.started_ns - origin for f in firings],
        "duration": [f.ended_ns - f.started_ns for f in firings],
        "queued": [f.started_ns - f.scheduled_ns for f in firings],
        "behind": [f.queueing_ns for f in firings],
        "iterations": [f.iterations for f in firings],
        "attempt": [f.attempt for f in firings],
        "site": [tables.number("sites", (f.node, f.op, f.location)) for f in firings],
        "tag": [tables.number("tags", f.tag) for f in firings],
        "output": [tables.number("outputs", f.outputs) for f in firings],
        "run": [f.run for f in firings],
        "status": [tables.number("statuses", f.status) for f in firings],
    }


def _transfer_columns(trace: Trace, lanes: list[TimelineLane], tables: _Tables, origin: int) -> Json:
    arrows = sorted(find_arrows(trace, lanes), key=lambda arrow: arrow.start.time_ns)
    groups = {device: number for number, device in enumerate(devices(trace))}
    return {
        "tensor": [tables.number("tensors", arrow.tensor) for arrow in arrows],
        "tag": [tables.number("tags", arrow.transfer.tag) for arrow in arrows],
        "run": [arrow.transfer.run for arrow in arrows],
        "nbytes": [arrow.transfer.nbytes for arrow in arrows],
        "stall": [arrow.is_stall for arrow in arrows],
        "source": _end_columns([arrow.start for arrow in arrows], groups, origin),
        "target": _end_columns([arrow.end for arrow in arrows], groups, origin),
    }


def _end_columns(ends: list[End], groups: dict[str, int], origin: int) -> Json:
    return {
        "group": [groups[end.device] for end in ends],
        "lane": [-1 if end.lane is None else end.lane for end in ends],
        "index": [-1 if end.position is None else end.position for end in ends],
        "time": [end.time_ns - origin for end in ends],
    }


def _run_columns(row: list[RunSpan], index: int, origin: int) -> Json:
    return {
        "label": lane_label("runs", index),
        "start": [run.started_ns - origin for run in row],
        "duration": [max(0, run.ended_ns - run.started_ns) for run in row],
        "run": [run.run for run in row],
        "name": [run.label or f"run {run.run}" for run in row],
        "status": [run.status for run in row],
    }


def _memory_columns(trace: Trace, device: str, origin: int) -> Iterator[Json]:
    """Bytes that the device held; and of saved values, where any have moved, those away and those coming back."""
    samples = sorted((s for s in trace.memory if s.device == device), key=lambda sample: sample.time_ns)
    time = [sample.time_ns - origin for sample in samples]
    yield {"label": "memory", "time": time, "nbytes": [sample.nbytes for sample in samples]}
    away, coming = [s.host + s.disk for s in samples], [s.coming for s in samples]
    for label, nbytes in (("saved, away", away), ("saved, coming back", coming)):
        if any(nbytes):
            yield {"label": label, "time": time, "nbytes": nbytes}


def _embed(data: Json) -> str:
    """JSON that is safe inside a script element: no ``<`` can end it or open another."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("asyncflow.profiler").joinpath(name).read_text(encoding="utf-8")
