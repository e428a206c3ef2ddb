"""The summary: sums that can be checked by hand."""

from __future__ import annotations

import pytest

from asyncflow.profiler import DeviceSummary, LaneSummary, NodeSummary, TransferSummary, format_table, summarize
from asyncflow.profiler.summary import format_bytes, format_duration
from asyncflow.runtime.watch.trace import Firing, MemorySample, RunSpan, Trace, Transfer


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


NONE = {"queued_ns": 0, "iterations": 0}


def test_nodes_by_total_time(trace: Trace) -> None:
    assert summarize(trace).nodes == (
        NodeSummary(node="loop/get", op="http_get", count=3, total_ns=9_500, mean_ns=9_500 / 3, max_ns=4_500, **NONE),
        NodeSummary(node="loop/matmul", op="matmul", count=1, total_ns=5_000, mean_ns=5_000, max_ns=5_000, **NONE),
        NodeSummary(node="loop/less", op="less", count=2, total_ns=2_500, mean_ns=1_250, max_ns=2_001, **NONE),
    )


def test_table(trace: Trace) -> None:
    assert format_table(summarize(trace), top=2) == (
        "wall time  10.00 µs\n"
        "runs       2 (computing 7.50 µs, awaiting 1.00 µs, the runtime 1.50 µs)\n"
        "firings    6 (2 inline, 1 offloaded, 3 awaited)\n"
        "failed     1 error, 1 cancelled\n"
        "dropped    3 firings past the trace's capacity; raise Trace(capacity=...)\n"
        "\n"
        "device  stream   busy %     busy  firings  at once\n"
        "------  -------  ------  -------  -------  -------\n"
        "cpu:0   inline    25.0%  2.50 µs        2        1\n"
        "cpu:0   async     60.0%  6.00 µs        3        2\n"
        "cpu:1   compute   50.0%  5.00 µs        1        1\n"
        "\n"
        "device  computing  copying  copies hidden  peak memory\n"
        "------  ---------  -------  -------------  -----------\n"
        "cpu:0        0 ns        -              -          0 B\n"
        "cpu:1     5.00 µs        -              -    16.00 KiB\n"
        "\n"
        "card    in        launches  graph launches  copies  allocations\n"
        "------  --------  --------  --------------  ------  -----------\n"
        "cuda:0  2 runs          29               1       6           38\n"
        "cuda:0  the last         0               1       2            3\n"
        "\n"
        "node         op        count    total     mean      max\n"
        "-----------  --------  -----  -------  -------  -------\n"
        "loop/get     http_get      3  9.50 µs  3.17 µs  4.50 µs\n"
        "loop/matmul  matmul        1  5.00 µs  5.00 µs  5.00 µs\n"
        "... and 1 more nodes"
    )


def span(device: str, stream: str, start: int, end: int) -> Firing:
    return Firing(0, "n", "op", "", device, stream, start, start, end, "", "ok", "")


def two_cards() -> Trace:
    """Copies on two streams of sim:0, of whose 60 ns 30 lie under kernels of two others."""
    return Trace(
        firings=[
            span("sim:0", "host", 0, 5),
            span("sim:0", "compute", 0, 40),
            span("sim:0", "compute:1", 30, 60),
            span("sim:0", "h2d", 20, 45),
            span("sim:0", "peer", 40, 50),
            span("sim:0", "d2h", 70, 100),
            span("sim:2", "async", 0, 100),
        ],
        memory=[MemorySample("sim:2", 10, 700), MemorySample("sim:2", 20, 3_000), MemorySample("sim:2", 30, 0)],
        transfers=[
            Transfer(0, "n/recv", "", "sim:10", "sim:2", 0, 1, 0),
            Transfer(0, "n/recv", "", "sim:2", "sim:0", 0, 1, 512),
            Transfer(0, "n/recv", "", "sim:2", "sim:0", 0, 1, 1_024),
        ],
    )


def test_copies_hidden_behind_kernels_are_counted_once_over_all_streams() -> None:
    first, second, third = summarize(two_cards()).devices
    assert first == DeviceSummary(device="sim:0", compute_ns=60, copy_ns=60, hidden_copy_ns=30, peak_nbytes=0)
    assert first.overlap_fraction == 0.5
    assert second == DeviceSummary(device="sim:2", compute_ns=0, copy_ns=0, hidden_copy_ns=0, peak_nbytes=3_000)
    assert second.overlap_fraction == 0.0
    assert third.device == "sim:10"


def test_copies_are_neither_inline_nor_offloaded_and_the_simulated_host_is_inline() -> None:
    summary = summarize(two_cards())
    assert (summary.inline, summary.offloaded, summary.copies, summary.awaited) == (1, 2, 3, 1)


def test_transfers_are_added_up_by_pair_of_devices() -> None:
    assert summarize(two_cards()).transfers == (
        TransferSummary(source="sim:2", target="sim:0", count=2, nbytes=1_536, max_nbytes=1_024),
        TransferSummary(source="sim:10", target="sim:2", count=1, nbytes=0, max_nbytes=0),
    )


def test_tables_of_devices_and_transfers() -> None:
    table = format_table(summarize(two_cards()))
    assert "firings    7 (1 inline, 2 offloaded, 1 awaited, 3 copies)\n" in table
    assert (
        "device  computing  copying  copies hidden  peak memory\n"
        "------  ---------  -------  -------------  -----------\n"
        "sim:0       60 ns    60 ns          50.0%          0 B\n"
        "sim:2        0 ns        -              -     2.93 KiB\n"
        "sim:10       0 ns        -              -          0 B\n"
        "\n"
        "from    to     transfers     bytes   largest\n"
        "------  -----  ---------  --------  --------\n"
        "sim:2   sim:0          2  1.50 KiB  1.00 KiB\n"
        "sim:10  sim:2          1       0 B       0 B\n"
    ) in table


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**51, "2048.00 TiB"),
    ],
)
def test_bytes_change_unit_at_1024(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


def test_an_empty_trace() -> None:
    summary = summarize(Trace())
    assert (summary.wall_ns, summary.firings, summary.lanes, summary.nodes) == (0, 0, (), ())
    assert format_table(summary).startswith("empty trace: no run or firing was recorded; is each `session.run(...)` aw")


def test_a_run_that_fired_nothing() -> None:
    trace = Trace(runs=[RunSpan(0, "", 5, 5, "ok")])
    assert format_table(summarize(trace)) == (
        "wall time  0 ns\nruns       1 (the runtime 0 ns)\nfirings    0 (0 inline, 0 offloaded, 0 awaited)"
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
