"""Lanes: nothing on one row overlaps, and no more rows than needed."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.profiler.lanes import colour_spans, devices, firing_lanes, run_rows, time_bounds
from asyncflow.runtime.watch.trace import Firing, MemorySample, RunSpan, Trace, Transfer


def firing(start: int, end: int, *, device: str = "cpu:0", stream: str = "async", node: str = "n") -> Firing:
    return Firing(0, node, "op", "", device, stream, start, start, end, "", "ok", "")


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(spans)
def test_spans_of_one_colour_never_overlap(spans: list[tuple[int, int]]) -> None:
    colours = colour_spans(spans)
    assert len(colours) == len(spans)
    for colour in set(colours):
        row = sorted(span for span, other in zip(spans, colours, strict=True) if other == colour)
        assert all(before[1] <= after[0] for before, after in pairwise(row))


@given(spans)
def test_as_many_colours_as_spans_under_way_at_once(spans: list[tuple[int, int]]) -> None:
    ordered = sorted(spans)
    deepest = max(
        (1 + sum(end > start for _, end in ordered[:k]) for k, (start, _) in enumerate(ordered)),
        default=0,
    )
    assert sorted(set(colour_spans(spans))) == list(range(deepest))


def test_touching_spans_share_a_colour_and_nested_ones_do_not() -> None:
    assert colour_spans([(0, 10), (10, 20), (20, 20)]) == [0, 0, 0]
    assert colour_spans([(0, 10), (2, 5)]) == [0, 1]


def test_overlapping_async_firings_go_to_numbered_sub_lanes() -> None:
    trace = Trace(firings=[firing(0, 10), firing(5, 15), firing(8, 9), firing(10, 12)])
    lanes = firing_lanes(trace)
    assert [lane.label for lane in lanes] == ["async", "async 2", "async 3"]
    assert [[f.started_ns for f in lane.firings] for lane in lanes] == [[0, 10], [5], [8]]


def test_lanes_are_ordered_by_device_number_then_stream() -> None:
    trace = Trace(
        firings=[
            firing(0, 1, device=device, stream=stream)
            for device in ("cpu:10", "cpu:2")
            for stream in (
                "zeta",
                "async",
                "peer",
                "compute:10",
                "compute:2",
                "compute",
                "d2h",
                "h2d",
                "host",
                "inline",
            )
        ]
    )
    assert [(lane.device, lane.stream) for lane in firing_lanes(trace)] == [
        (device, stream)
        for device in ("cpu:2", "cpu:10")
        for stream in ("inline", "host", "compute", "compute:2", "compute:10", "h2d", "d2h", "peer", "async", "zeta")
    ]


def test_a_device_that_only_holds_memory_is_listed() -> None:
    trace = Trace(firings=[firing(0, 1)], memory=[MemorySample("cpu:1", 5, 64)])
    assert devices(trace) == ["cpu:0", "cpu:1"]


def test_a_device_that_only_receives_is_listed_and_its_values_are_on_the_timeline() -> None:
    trace = Trace(firings=[firing(3, 4)], transfers=[Transfer(0, "n/recv", "", "cpu:0", "cpu:1", 2, 9, 8)])
    assert devices(trace) == ["cpu:0", "cpu:1"]
    assert time_bounds(trace) == (2, 9)


def test_a_firing_cancelled_before_it_started_is_an_instant_where_it_was_scheduled() -> None:
    trace = Trace(firings=[Firing(0, "n", "op", "", "cpu:0", "async", 700, 0, 0, "", "cancelled", "")])
    (lane,) = firing_lanes(trace)
    assert (lane.firings[0].started_ns, lane.firings[0].ended_ns) == (700, 700)
    assert time_bounds(trace) == (700, 700)


def test_concurrent_runs_get_rows_of_their_own() -> None:
    trace = Trace(runs=[RunSpan(0, "", 0, 10, "ok"), RunSpan(1, "", 5, 15, "ok"), RunSpan(2, "", 10, 20, "ok")])
    assert [[run.run for run in row] for row in run_rows(trace)] == [[0, 2], [1]]


def test_time_bounds_of_an_empty_trace() -> None:
    assert time_bounds(Trace()) == (0, 0)
