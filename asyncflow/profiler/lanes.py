"""Rows of a timeline.

A lane is a row of a timeline on which nothing overlaps. Each (device, stream) pair has one, and as many more
("async", "async 2", ...) as it had firings under way at once: a coroutine op overlaps with its like, and trace viewers
silently drop slices that partially overlap on one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeVar

from asyncflow.runtime.watch.trace import Firing, RunSpan, Trace

_T = TypeVar("_T")
_STREAM_ORDER = ("inline", "host", "compute", "h2d", "d2h", "peer", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineLane:
    """Firings of one stream of one device, by start, none overlapping another."""

    device: str
    stream: str
    index: int
    """0 for the stream's first lane."""
    firings: tuple[Firing, ...]

    @property
    def label(self) -> str:
        """Name of the lane, such as ``compute`` or ``async 2``."""
        return lane_label(self.stream, self.index)


def lane_label(name: str, index: int) -> str:
    """The name of the ``index``-th lane of a stream, counted from 0."""
    return name if index == 0 else f"{name} {index + 1}"


def firing_lanes(trace: Trace) -> list[TimelineLane]:
    """The trace's firings on lanes, by device, then stream, then sub-lane."""
    streams: defaultdict[tuple[str, str], list[Firing]] = defaultdict(list)
    for firing in _in_order(trace.firings):
        streams[firing.device, firing.stream].append(firing)
    lanes: list[TimelineLane] = []
    for device, stream in sorted(streams, key=lambda pair: (device_order(pair[0]), stream_order(pair[1]))):
        rows = split_rows(streams[device, stream], [(f.started_ns, f.ended_ns) for f in streams[device, stream]])
        lanes += [TimelineLane(device=device, stream=stream, index=i, firings=tuple(row)) for i, row in enumerate(rows)]
    return lanes


def run_rows(trace: Trace) -> list[list[RunSpan]]:
    """The trace's runs on as few rows as hold them without overlap, each row by start."""
    runs = list(trace.runs)
    return split_rows(runs, [(run.started_ns, max(run.started_ns, run.ended_ns)) for run in runs])


def split_rows(items: Sequence[_T], spans: Sequence[tuple[int, int]]) -> list[list[_T]]:
    """Deal ``items`` into rows by their spans' colours, each row by start."""
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return [[*items]] if items else []  # usual: firings in order, without overlap
    order = sorted(range(len(items)), key=spans.__getitem__)
    colours = colour_spans(spans)
    rows: list[list[_T]] = [[] for _ in range(max(colours, default=-1) + 1)]
    for position in order:
        rows[colours[position]].append(items[position])
    return rows


def colour_spans(spans: Sequence[tuple[int, int]]) -> list[int]:
    """A colour from 0 for each half-open span ``(start, end)``; spans of one colour never overlap.

    Greedy by start with the lowest free colour: the number of colours is the most spans ever under way at once,
    which no colouring can beat.
    """
    colours = [0] * len(spans)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    opened = 0
    for position in sorted(range(len(spans)), key=spans.__getitem__):
        start, end = spans[position]
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            colour = heappop(free)
        else:
            colour, opened = opened, opened + 1
        colours[position] = colour
        heappush(busy, (end, colour))
    return colours


def devices(trace: Trace) -> list[str]:
    """Every device the trace names, ``cpu:2`` before ``cpu:10``."""
    names = {firing.device for firing in trace.firings} | {sample.device for sample in trace.memory}
    for transfer in trace.transfers:
        names |= {transfer.source, transfer.target}
    return sorted(names, key=device_order)


def device_order(device: str) -> tuple[str, int, str]:
    """Sort key of a device name: kind, then number."""
    kind, _, number = device.partition(":")
    return kind, int(number) if number.isdecimal() else -1, device


def stream_order(stream: str) -> tuple[int, int, str]:
    """Sort key of a stream name: the host's own work first, coroutine ops last but for unknown streams.

    ``compute:2`` comes before ``compute:10``.
    """
    kind, _, number = stream.partition(":")
    place = _STREAM_ORDER.index(kind) if kind in _STREAM_ORDER else len(_STREAM_ORDER)
    return place, int(number) if number.isdecimal() else 0, stream


def time_bounds(trace: Trace) -> tuple[int, int]:
    """The first and last moment anything drawn happened, in nanoseconds; ``(0, 0)`` for an empty trace."""
    firings = _in_order(trace.firings)
    samples = [sample.time_ns for sample in trace.memory]
    starts = [firing.started_ns for firing in firings]
    starts += samples
    ends = [firing.ended_ns for firing in firings]
    ends += samples
    for run in trace.runs:
        starts.append(run.started_ns)
        ends.append(max(run.started_ns, run.ended_ns))
    for transfer in trace.transfers:
        starts.append(transfer.sent_ns)
        ends.append(max(transfer.sent_ns, transfer.received_ns))
    return min(starts, default=0), max(ends, default=0)


def _in_order(firings: Iterable[Firing]) -> list[Firing]:
    """The firings, each with scheduled <= started <= ended.

    One cancelled before its kernel began has neither start nor end; it is drawn as an instant where it was scheduled.
    """
    return [
        firing if firing.scheduled_ns <= firing.started_ns <= firing.ended_ns else _as_instant(firing)
        for firing in firings
    ]


def _as_instant(firing: Firing) -> Firing:
    started = max(firing.scheduled_ns, firing.started_ns)
    return firing._replace(started_ns=started, ended_ns=max(started, firing.ended_ns))
