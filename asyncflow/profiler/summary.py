"""The time in a trace, as numbers and as a plain-text table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import counted
from asyncflow.profiler.lanes import TimelineLane, device_order, devices, firing_lanes, time_bounds
from asyncflow.runtime.watch.trace import LOOP, DeviceRequests, Firing, Trace

COPY_STREAMS = ("h2d", "d2h", "peer")

Spans: TypeAlias = NDArray[np.int64]
"""Starts and ends in nanoseconds, as two rows: arrays, as a simulation records a million firings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """A summary of one stream: how busy the stream was."""

    device: str
    stream: str
    firings: int
    busy_ns: int
    """Time with at least one firing under way."""
    busy_fraction: float
    """``busy_ns`` of the trace's wall time, 0 to 1."""
    max_concurrency: int
    """Most firings under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """All firings of one node, or of a loop or a stretch of nodes that ran as a whole."""

    node: str
    op: str
    count: int
    total_ns: int
    """Nanoseconds of computing; of a coroutine, nanoseconds of awaiting."""
    mean_ns: float
    max_ns: int
    queued_ns: int
    """Time behind others in the queue of a stream's thread, or in the line of a function with limits."""
    iterations: int
    """Of a loop that ran as a whole, over all its firings; 0 for anything else."""

    @property
    def label(self) -> str:
        """The node, and of a loop how often it went around."""
        if self.op != LOOP:
            return self.node
        around = f", {counted(round(self.iterations / self.count), 'iteration')}" if self.iterations else ""
        return f"{self.node} (loop{around})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """A summary of one device over all its streams."""

    device: str
    compute_ns: int
    """Time with at least one kernel under way, on whichever compute stream."""
    copy_ns: int
    """Time with at least one copy under way."""
    hidden_copy_ns: int
    """Time with both: copies that cost nothing."""
    peak_nbytes: int
    """Peak number of bytes held, as far as sampled."""

    @property
    def overlap_fraction(self) -> float:
        """Share of the copying hidden behind kernels, 0 to 1."""
        return self.hidden_copy_ns / self.copy_ns if self.copy_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSummary:
    """All that went from one device to another."""

    source: str
    target: str
    count: int
    nbytes: int
    max_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """Counts of the requests of all runs to a card; see `DeviceRequests`."""

    device: str
    runs: int
    """Number of runs on the card."""
    total: DeviceRequests
    """Sums over these runs, with the number of the last one."""
    last: DeviceRequests
    """Counts of the last run, of which a warm program has no captures and no first copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The totals of a trace."""

    wall_ns: int
    """From the first to the last recorded moment."""
    computing_ns: int
    """Time with at least one kernel or copy under way, wherever."""
    awaiting_ns: int
    """Time in which coroutine ops were awaited and nothing computed."""
    queueing_ns: int
    """Time in which work waited for a thread or by the limits of a function, and nothing computed or was awaited."""
    runtime_ns: int
    """The rest of the time of runs: scheduling, and whatever else the event loop did meanwhile."""
    runs: int
    firings: int
    inline: int
    """Firings on the event loop, or on the host of simulated devices."""
    offloaded: int
    """Firings on stream threads and devices."""
    copies: int
    """Copies from, to and between devices."""
    awaited: int
    """Firings of coroutine ops."""
    errors: int
    cancelled: int
    dropped: int
    """Firings that did not fit the trace's capacity and are in no other figure."""
    lanes: tuple[LaneSummary, ...]
    """By device, then stream."""
    devices: tuple[DeviceSummary, ...]
    transfers: tuple[TransferSummary, ...]
    """By source, then target."""
    requests: tuple[RequestSummary, ...]
    """By card; none for devices without a memory of their own."""
    nodes: tuple[NodeSummary, ...]
    """Longest total time first."""


def summarize(trace: Trace) -> Summary:
    """Count and add up the firings of ``trace``."""
    # Use the lanes' firings: there each starts before it ends, even if cancelled before its kernel began.
    first, last = time_bounds(trace)
    lanes = firing_lanes(trace)
    spans = [_spans(lane.firings) for lane in lanes]
    firings = [firing for lane in lanes for firing in lane.firings]
    streams = Counter[str]()
    for lane in lanes:
        streams[lane.stream] += len(lane.firings)
    statuses = Counter(map(attrgetter("status"), firings))
    inline = streams["inline"] + streams["host"]
    copies = sum(streams[stream] for stream in COPY_STREAMS)
    return Summary(
        wall_ns=last - first,
        **_divide_time(trace, lanes, spans),
        runs=len(trace.runs),
        firings=len(firings),
        inline=inline,
        offloaded=len(firings) - inline - copies - streams["async"],
        copies=copies,
        awaited=streams["async"],
        errors=statuses["error"],
        cancelled=statuses["cancelled"],
        dropped=trace.dropped,
        lanes=tuple(_summarize_streams(lanes, spans, last - first)),
        devices=_summarize_devices(trace, lanes, spans),
        transfers=_summarize_transfers(trace),
        requests=_summarize_requests(trace),
        nodes=_summarize_nodes(firings),
    )


def format_table(summary: Summary, *, top: int = 20) -> str:
    """The summary as plain text, with the ``top`` longest nodes; ends without a newline."""
    if not summary.firings and not summary.runs:
        return "empty trace: no run or firing was recorded; is each `session.run(...)` awaited?"
    parts = [_totals(summary)]
    if summary.lanes:
        parts.append(_lane_table(summary))
    if len(summary.devices) > 1 or any(device.copy_ns or device.peak_nbytes for device in summary.devices):
        parts.append(_device_table(summary))
    if summary.transfers:
        parts.append(_transfer_table(summary))
    if summary.requests:
        parts.append(format_requests(summary.requests))
    if summary.nodes:
        parts.append(_node_table(summary, top))
    return "\n\n".join(parts)


def format_duration(ns: float) -> str:
    """Nanoseconds with three or four significant digits and a unit: ``1.25 ms``."""
    # A value that would print as 1000 belongs to the next unit.
    if round(ns) < 1_000:
        return f"{ns:.0f} ns"
    for scale, unit in ((1e3, "µs"), (1e6, "ms")):
        if round(ns / scale, 2) < 1_000:
            return f"{ns / scale:.2f} {unit}"
    return f"{ns / 1e9:.2f} s"


def format_bytes(nbytes: float) -> str:
    """Bytes with three or four significant digits and a unit: ``4.00 MiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(value, 2) < 1_024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1_024
    return f"{value:.2f} TiB"


def align(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, left: int) -> str:
    """Return a table with an underlined header; the first ``left`` columns are left-aligned, the others
    right-aligned.
    """
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    table.insert(1, tuple("-" * width for width in widths))  # after `widths`, which the row of dashes needs
    lines = []
    for row in table:
        cells = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _summarize_streams(lanes: Iterable[TimelineLane], spans: Iterable[Spans], wall_ns: int) -> Iterable[LaneSummary]:
    pairs = zip(lanes, spans, strict=True)
    for (device, stream), group in groupby(pairs, key=lambda pair: (pair[0].device, pair[0].stream)):
        rows = [own for _, own in group]
        busy = _length_ns(_union(rows))
        yield LaneSummary(
            device=device,
            stream=stream,
            firings=sum(row.shape[1] for row in rows),
            busy_ns=busy,
            busy_fraction=busy / wall_ns if wall_ns else 0.0,
            max_concurrency=len(rows),  # a stream has more lanes only where firings overlap
        )


def _summarize_devices(
    trace: Trace, lanes: Sequence[TimelineLane], spans: Iterable[Spans]
) -> tuple[DeviceSummary, ...]:
    samples: defaultdict[str, list[int]] = defaultdict(list)
    for sample in trace.memory:
        samples[sample.device].append(sample.nbytes)
    peaks = Counter({device: max(held) for device, held in samples.items()})
    kernels: defaultdict[str, list[Spans]] = defaultdict(list)
    copies: defaultdict[str, list[Spans]] = defaultdict(list)
    for lane, own in zip(lanes, spans, strict=True):
        if lane.stream in COPY_STREAMS:
            copies[lane.device].append(own)
        elif lane.stream.partition(":")[0] == "compute":
            kernels[lane.device].append(own)
    summaries = []
    for device in devices(trace):
        computing, copying = _union(kernels[device]), _union(copies[device])
        compute, copy = _length_ns(computing), _length_ns(copying)
        summaries.append(
            DeviceSummary(
                device=device,
                compute_ns=compute,
                copy_ns=copy,
                # The overlap counts in both unions, but once in the union of both.
                hidden_copy_ns=compute + copy - _length_ns(_union([computing, copying])),
                peak_nbytes=peaks[device],
            )
        )
    return tuple(summaries)


def _summarize_transfers(trace: Trace) -> tuple[TransferSummary, ...]:
    sizes: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for transfer in trace.transfers:
        sizes[transfer.source, transfer.target].append(transfer.nbytes)
    return tuple(
        TransferSummary(source=source, target=target, count=len(each), nbytes=sum(each), max_nbytes=max(each))
        for (source, target), each in sorted(sizes.items(), key=lambda item: [device_order(end) for end in item[0]])
    )


def _summarize_requests(trace: Trace) -> tuple[RequestSummary, ...]:
    by_device: defaultdict[str, list[DeviceRequests]] = defaultdict(list)
    for asked in trace.requests:
        by_device[asked.device].append(asked)
    return tuple(
        RequestSummary(
            device=device,
            runs=len(asked),
            total=DeviceRequests(asked[-1].run, device, *map(sum, zip(*(each[2:] for each in asked), strict=True))),
            last=asked[-1],
        )
        for device, asked in sorted(by_device.items(), key=lambda item: device_order(item[0]))
    )


def _spans(firings: Sequence[Firing]) -> Spans:
    return np.array([[f.started_ns for f in firings], [f.ended_ns for f in firings]], np.int64)


def _union(parts: Sequence[Spans]) -> Spans:
    """The same time as spans of which none touches another, by start."""
    starts, ends = np.concatenate([_NO_SPANS, *parts], axis=1)
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    reached = np.maximum.accumulate(np.maximum(starts, ends[order]))  # firings that have not ended take no time
    # A span starts a new part of the union if it starts after all earlier spans have ended.
    is_first = np.ones(len(starts), bool)
    is_first[1:] = starts[1:] > reached[:-1]
    return np.stack([starts[is_first], reached[np.roll(is_first, -1)]])


def _length_ns(spans: Spans) -> int:
    """Return the sum of the lengths of spans."""
    return int((spans[1] - spans[0]).sum())


_NO_SPANS: Spans = np.zeros((2, 0), np.int64)


def _divide_time(trace: Trace, lanes: Sequence[TimelineLane], spans: Sequence[Spans]) -> dict[str, int]:
    """Divide the time of runs among activities; the first listed activity wins where several overlap."""
    computing = [own for lane, own in zip(lanes, spans, strict=True) if lane.stream != "async"]
    awaiting = [own for lane, own in zip(lanes, spans, strict=True) if lane.stream == "async"]
    queueing = [(f.queued_ns, f.started_ns) for lane in lanes for f in lane.firings if f.queued_ns is not None]
    runs = [(run.started_ns, run.ended_ns) for run in trace.runs]
    # Each activity gets the time that it adds to the union of the activities before it. Only this union, which has few
    # spans, is kept: not all spans of all activities.
    reached, union = [0], _NO_SPANS
    for more in (computing, awaiting, *[[np.array(pairs, np.int64).reshape(-1, 2).T] for pairs in (queueing, runs)]):
        union = _union([union, *more])
        reached.append(_length_ns(union))
    names = ("computing_ns", "awaiting_ns", "queueing_ns", "runtime_ns")
    return {name: after - before for name, before, after in zip(names, reached, reached[1:], strict=False)}


@dataclass(slots=True)
class _Tally:
    """Sums over the firings of one node."""

    times: list[int] = field(default_factory=list)
    queued_ns: int = 0
    iterations: int = 0


def _summarize_nodes(firings: Sequence[Firing]) -> tuple[NodeSummary, ...]:
    # A loop that gave way, or a retried function, has several firings in the trace: part 0, 1, and so on. They count as
    # one firing, with the sum of their times. Lanes do not keep parts in order, and a full trace may have dropped part
    # 0. So place all other firings first, then the parts by number.
    tallies: defaultdict[tuple[str, str], _Tally] = defaultdict(_Tally)
    later = sorted([firing for firing in firings if firing.part], key=lambda firing: firing.part)
    running: dict[tuple[int, str, str, str], int | None] = {_whole(firing): None for firing in later}
    for firing in firings:
        _, node, op, _, _, _, _, started_ns, ended_ns, _, _, _, queued_ns, part, iterations, _, _ = firing
        tally = tallies[node, op]
        if queued_ns is not None:
            tally.queued_ns += started_ns - queued_ns
        if iterations:
            tally.iterations += iterations
        if not part:
            if running and _whole(firing) in running:  # most traces have no parts, and skip making keys
                running[_whole(firing)] = len(tally.times)
            tally.times.append(ended_ns - started_ns)
    for firing in later:
        tally, place = tallies[firing.node, firing.op], running[_whole(firing)]
        if place is not None:  # a later part of a counted firing
            tally.times[place] += firing.ended_ns - firing.started_ns
        else:
            running[_whole(firing)] = len(tally.times)
            tally.times.append(firing.ended_ns - firing.started_ns)
    nodes = [
        NodeSummary(
            node=node,
            op=op,
            count=len(tally.times),
            total_ns=sum(tally.times),
            mean_ns=sum(tally.times) / len(tally.times),
            max_ns=max(tally.times),
            queued_ns=tally.queued_ns,
            iterations=tally.iterations,
        )
        for (node, op), tally in tallies.items()
    ]
    return tuple(sorted(nodes, key=lambda node: (-node.total_ns, node.node, node.op)))


def _whole(firing: Firing) -> tuple[int, str, str, str]:
    """The key that the parts of a firing have in common."""
    return firing.run, firing.node, firing.op, firing.tag


def _totals(summary: Summary) -> str:
    how = f"{summary.inline} inline, {summary.offloaded} offloaded, {summary.awaited} awaited"
    if summary.copies:
        how += f", {summary.copies} copies"
    lines = [
        f"wall time  {format_duration(summary.wall_ns)}",
        f"runs       {summary.runs} ({_times(summary)})",
        f"firings    {summary.firings} ({how})",
    ]
    if summary.errors or summary.cancelled:
        lines.append(f"failed     {counted(summary.errors, 'error')}, {summary.cancelled} cancelled")
    if summary.dropped:
        lines.append(f"dropped    {summary.dropped} firings past the trace's capacity; raise Trace(capacity=...)")
    return "\n".join(lines)


def _times(summary: Summary) -> str:
    parts = {
        "computing": summary.computing_ns,
        "awaiting": summary.awaiting_ns,
        "queueing": summary.queueing_ns,
        "the runtime": summary.runtime_ns,
    }
    return ", ".join(f"{name} {format_duration(ns)}" for name, ns in parts.items() if ns or name == "the runtime")


def _lane_table(summary: Summary) -> str:
    rows = [
        (
            lane.device,
            lane.stream,
            f"{lane.busy_fraction:.1%}",
            format_duration(lane.busy_ns),
            str(lane.firings),
            str(lane.max_concurrency),
        )
        for lane in summary.lanes
    ]
    return align(("device", "stream", "busy %", "busy", "firings", "at once"), rows, left=2)


def _device_table(summary: Summary) -> str:
    rows = [
        (
            device.device,
            format_duration(device.compute_ns),
            format_duration(device.copy_ns) if device.copy_ns else "-",
            f"{device.overlap_fraction:.1%}" if device.copy_ns else "-",
            format_bytes(device.peak_nbytes),
        )
        for device in summary.devices
    ]
    return align(("device", "computing", "copying", "copies hidden", "peak memory"), rows, left=1)


def _transfer_table(summary: Summary) -> str:
    rows = [
        (each.source, each.target, str(each.count), format_bytes(each.nbytes), format_bytes(each.max_nbytes))
        for each in summary.transfers
    ]
    return align(("from", "to", "transfers", "bytes", "largest"), rows, left=2)


def format_requests(requests: Sequence[RequestSummary]) -> str:
    """Return a table of the requests to each card, in all runs and in the last."""
    rows = []
    # First runs compile, copy constants and capture graphs; the last one shows the cost of a warm run.
    for each in requests:
        rows.append((each.device, "the run" if each.runs == 1 else f"{each.runs} runs", *map(str, each.total[2:])))
        if each.runs > 1:
            rows.append((each.device, "the last", *map(str, each.last[2:])))
    return align(("card", "in", "launches", "graph launches", "copies", "allocations"), rows, left=2)


def _node_table(summary: Summary, top: int) -> str:
    shown = summary.nodes[:top]
    # Only programs with limits or offloaded kernels wait; other tables are narrower by a column.
    has_queued = any(node.queued_ns for node in shown)
    rows = [
        (
            node.label,
            node.op,
            str(node.count),
            format_duration(node.total_ns),
            format_duration(node.mean_ns),
            format_duration(node.max_ns),
            *([format_duration(node.queued_ns)] if has_queued else []),
        )
        for node in shown
    ]
    header = ("node", "op", "count", "total", "mean", "max", *(["queued"] if has_queued else []))
    table = align(header, rows, left=2)
    hidden = len(summary.nodes) - len(shown)
    return f"{table}\n... and {hidden} more nodes" if hidden else table
