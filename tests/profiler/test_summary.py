"""The summary: sums that can be checked by hand."""

from __future__ import annotations

import pytest

from asyncflow.profiler import LaneSummary, NodeSummary, format_table, summarize
from asyncflow.profiler.summary import format_duration
from asyncflow.runtime.trace import RunSpan, Trace


def test_totals(trace: Trace) -> None:
    summary = summarize(trace)
    assert (summary.wall_ns, summary.runs, summary.firings) == (10_000, 2, 6)
    assert (summary.inline, summary.offloaded, summary.awaited) == (2, 1, 3)
    assert (summary.errors, summary.cancelled, summary.dropped) == (1, 1, 3)


def test_busy_time_counts_overlap_once(trace: Trace) -> None:
    assert summarize(trace).lanes == (
        LaneSummary(device="cpu:0", stream="inline", firings=2, busy_ns=2_500, busy_fraction=0.25, max_concurrency=1),
        LaneSummary(device="cpu:0", stream="async", firings=3, busy_ns=6_000, busy_fraction=0.6, max_concurrency=2),
        LaneSummary(device="cpu:1", stream="compute", firings=1, busy_ns=5_000, busy_fraction=0.5, max_concurrency=1),
    )


def test_nodes_by_total_time(trace: Trace) -> None:
    assert summarize(trace).nodes == (
        NodeSummary(node="loop/get", op="http_get", count=3, total_ns=9_500, mean_ns=9_500 / 3, max_ns=4_500),
        NodeSummary(node="loop/matmul", op="matmul", count=1, total_ns=5_000, mean_ns=5_000, max_ns=5_000),
        NodeSummary(node="loop/less", op="less", count=2, total_ns=2_500, mean_ns=1_250, max_ns=2_001),
    )


def test_table(trace: Trace) -> None:
    assert format_table(summarize(trace), top=2) == (
        "wall time  10.00 µs\n"
        "runs       2\n"
        "firings    6 (2 inline, 1 offloaded, 3 awaited)\n"
        "failed     1 errors, 1 cancelled\n"
        "dropped    3 firings past the trace's capacity; raise Trace(capacity=...)\n"
        "\n"
        "device  stream   busy %     busy  firings  at once\n"
        "------  -------  ------  -------  -------  -------\n"
        "cpu:0   inline    25.0%  2.50 µs        2        1\n"
        "cpu:0   async     60.0%  6.00 µs        3        2\n"
        "cpu:1   compute   50.0%  5.00 µs        1        1\n"
        "\n"
        "node         op        count    total     mean      max\n"
        "-----------  --------  -----  -------  -------  -------\n"
        "loop/get     http_get      3  9.50 µs  3.17 µs  4.50 µs\n"
        "loop/matmul  matmul        1  5.00 µs  5.00 µs  5.00 µs\n"
        "... and 1 more nodes"
    )


def test_an_empty_trace() -> None:
    summary = summarize(Trace())
    assert (summary.wall_ns, summary.firings, summary.lanes, summary.nodes) == (0, 0, (), ())
    assert format_table(summary) == "empty trace: no run or firing was recorded"


def test_a_run_that_fired_nothing() -> None:
    trace = Trace(runs=[RunSpan(0, "", 5, 5, "ok")])
    assert format_table(summarize(trace)) == (
        "wall time  0 ns\nruns       1\nfirings    0 (0 inline, 0 offloaded, 0 awaited)"
    )


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (999.6, "1.00 µs"),
        (1_000, "1.00 µs"),
        (999_994, "999.99 µs"),
        (999_999, "1.00 ms"),
        (999_999_999, "1.00 s"),
        (61e9, "61.00 s"),
    ],
)
def test_durations_change_unit_rather_than_round_up_to_a_thousand(ns: float, text: str) -> None:
    assert format_duration(ns) == text
