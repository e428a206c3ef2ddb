"""Where the time of a trace went, as numbers and as a plain-text table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from asyncflow.profiler.lanes import Lane, firing_lanes, time_bounds
from asyncflow.runtime.trace import Firing, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """How busy one stream of one device was."""

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
    """All firings of one node."""

    node: str
    op: str
    count: int
    total_ns: int
    mean_ns: float
    max_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a trace amounts to."""

    wall_ns: int
    """From the first to the last recorded moment."""
    runs: int
    firings: int
    inline: int
    """Firings on the event loop."""
    offloaded: int
    """Firings on stream threads and devices."""
    awaited: int
    """Firings of coroutine ops."""
    errors: int
    cancelled: int
    dropped: int
    """Firings that did not fit the trace's capacity and are in no other figure."""
    lanes: tuple[LaneSummary, ...]
    """By device, then stream."""
    nodes: tuple[NodeSummary, ...]
    """Longest total time first."""


def summarize(trace: Trace) -> Summary:
    """Count and add up the firings of ``trace``."""
    first, last = time_bounds(trace)
    lanes = firing_lanes(trace)
    firings = [firing for lane in lanes for firing in lane.firings]
    streams = Counter(firing.stream for firing in firings)
    statuses = Counter(firing.status for firing in firings)
    return Summary(
        wall_ns=last - first,
        runs=len(trace.runs),
        firings=len(firings),
        inline=streams["inline"],
        offloaded=len(firings) - streams["inline"] - streams["async"],
        awaited=streams["async"],
        errors=statuses["error"],
        cancelled=statuses["cancelled"],
        dropped=trace.dropped,
        lanes=tuple(_summarize_streams(lanes, last - first)),
        nodes=_summarize_nodes(firings),
    )


def format_table(summary: Summary, *, top: int = 20) -> str:
    """The summary as plain text, with the ``top`` longest nodes; ends without a newline."""
    if not summary.firings and not summary.runs:
        return "empty trace: no run or firing was recorded"
    parts = [_totals(summary)]
    if summary.lanes:
        parts.append(_lane_table(summary))
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


def _summarize_streams(lanes: Iterable[Lane], wall_ns: int) -> Iterable[LaneSummary]:
    for (device, stream), group in groupby(lanes, key=lambda lane: (lane.device, lane.stream)):
        rows = list(group)
        busy = _union_ns([(f.started_ns, f.ended_ns) for row in rows for f in row.firings])
        yield LaneSummary(
            device=device,
            stream=stream,
            firings=sum(len(row.firings) for row in rows),
            busy_ns=busy,
            busy_fraction=busy / wall_ns if wall_ns else 0.0,
            max_concurrency=len(rows),
        )


def _union_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of the spans."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        start = max(start, reached)
        if end > start:
            total += end - start
            reached = end
    return total


def _summarize_nodes(firings: Iterable[Firing]) -> tuple[NodeSummary, ...]:
    durations: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for firing in firings:
        durations[firing.node, firing.op].append(firing.ended_ns - firing.started_ns)
    nodes = [
        NodeSummary(
            node=node, op=op, count=len(each), total_ns=sum(each), mean_ns=sum(each) / len(each), max_ns=max(each)
        )
        for (node, op), each in durations.items()
    ]
    return tuple(sorted(nodes, key=lambda node: (-node.total_ns, node.node, node.op)))


def _totals(summary: Summary) -> str:
    how = f"{summary.inline} inline, {summary.offloaded} offloaded, {summary.awaited} awaited"
    lines = [
        f"wall time  {format_duration(summary.wall_ns)}",
        f"runs       {summary.runs}",
        f"firings    {summary.firings} ({how})",
    ]
    if summary.errors or summary.cancelled:
        lines.append(f"failed     {summary.errors} errors, {summary.cancelled} cancelled")
    if summary.dropped:
        lines.append(f"dropped    {summary.dropped} firings past the trace's capacity; raise Trace(capacity=...)")
    return "\n".join(lines)


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
    return _align(("device", "stream", "busy %", "busy", "firings", "at once"), rows, left=2)


def _node_table(summary: Summary, top: int) -> str:
    shown = summary.nodes[:top]
    rows = [
        (
            node.node,
            node.op,
            str(node.count),
            format_duration(node.total_ns),
            format_duration(node.mean_ns),
            format_duration(node.max_ns),
        )
        for node in shown
    ]
    table = _align(("node", "op", "count", "total", "mean", "max"), rows, left=2)
    hidden = len(summary.nodes) - len(shown)
    return f"{table}\n... and {hidden} more nodes" if hidden else table


def _align(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, left: int) -> str:
    """A table with its first ``left`` columns left-aligned and the others right-aligned."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    table.insert(1, tuple("-" * width for width in widths))
    lines = []
    for row in table:
        cells = (
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
