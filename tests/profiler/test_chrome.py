"""The Chrome trace: what viewers need, and the traps they silently lose slices in."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.profiler.chrome import chrome_events, render_chrome
from asyncflow.runtime.watch.trace import DeviceRequests, Firing, MemorySample, RunSpan, Trace, Transfer

Event = dict[str, Any]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def parse(trace: Trace) -> Event:
    document = json.loads("".join(render_chrome(trace)), parse_constant=refuse_constant)
    assert isinstance(document, dict)
    return document


def of_phase(events: list[Event], phase: str) -> list[Event]:
    return [event for event in events if event["ph"] == phase]


def viewer_ns(us: float) -> int:
    """Microseconds as Perfetto's importer reads them."""
    return int(us * 1000)


def assert_no_overlap(events: list[Event]) -> None:
    lanes: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in of_phase(events, "X"):
        start = viewer_ns(event["ts"])
        lanes[event["pid"], event["tid"]].append((start, start + viewer_ns(event["dur"])))
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_counts_by_phase(trace: Trace) -> None:
    events = parse(trace)["traceEvents"]
    # 3 processes, 4 firing lanes and the lane of runs, a name and a sort index each.
    assert Counter(event["ph"] for event in events) == {"X": 6, "b": 2, "e": 2, "C": 2, "M": 2 * (3 + 4 + 1)}


def test_lanes_are_named_threads_of_their_devices(trace: Trace) -> None:
    events = parse(trace)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["requests", "cpu:0", "cpu:1"]
    threads = {e["tid"]: (processes[e["pid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert sorted(threads.values()) == [
        ("cpu:0", "async"),
        ("cpu:0", "async 2"),
        ("cpu:0", "inline"),
        ("cpu:1", "compute"),
        ("requests", "runs"),
    ]
    on_lane = Counter(threads[e["tid"]] for e in of_phase(events, "X"))
    assert on_lane == {
        ("cpu:0", "inline"): 2,
        ("cpu:0", "async"): 2,
        ("cpu:0", "async 2"): 1,
        ("cpu:1", "compute"): 1,
    }


def test_thread_ids_are_positive_unique_and_no_process_id(trace: Trace) -> None:
    events = parse(trace)["traceEvents"]
    tids = [e["tid"] for e in events if e["name"] == "thread_name"]
    pids = {e["pid"] for e in events}
    assert min(tids) >= 1
    assert len(set(tids)) == len(tids)
    assert not pids & set(tids)


def test_a_firing_carries_its_story(trace: Trace) -> None:
    (event,) = (e for e in of_phase(parse(trace)["traceEvents"], "X") if e["cat"] == "matmul")
    assert (event["name"], event["ts"], event["dur"]) == ("loop/matmul", 4.0, 5.0)
    assert event["args"] == {
        "node": "loop/matmul",
        "op": "matmul",
        "tag": "loop/0",
        "run": 0,
        "outputs": "float32[64,64]",
        "location": "model.py:7",
        "pending_us": 0.999,
        "queued_us": 0.0,
        "status": "ok",
    }


def test_attempts_say_which_they_are(trace: Trace) -> None:
    trace.firings[:] = [firing._replace(attempt=2) for firing in trace.firings[:1]]
    (event,) = of_phase(parse(trace)["traceEvents"], "X")
    assert (event["name"], event["args"]["attempt"]) == ("loop/less (attempt 2)", 2)


def test_failed_and_cancelled_firings_say_so(trace: Trace) -> None:
    events = of_phase(parse(trace)["traceEvents"], "X")
    assert Counter(e["args"]["status"] for e in events) == {"ok": 4, "cancelled": 1, "error": 1}


def test_runs_are_async_spans_paired_by_id(trace: Trace) -> None:
    events = parse(trace)["traceEvents"]
    begins, ends = of_phase(events, "b"), of_phase(events, "e")
    assert [(e["name"], e["id"], e["ts"], e["args"]["status"]) for e in begins] == [
        ("predict", 1, 0.0, "ok"),
        ("run 1", 2, 2.0, "error"),
    ]
    assert [(e["name"], e["id"], e["cat"], e["ts"]) for e in ends] == [
        ("predict", 1, "run", 9.0),
        ("run 1", 2, "run", 10.0),
    ]


def test_runs_say_the_requests_to_each_card(trace: Trace) -> None:
    trace.requests.append(DeviceRequests(1, "cuda:1", 2, 0, 1, 2))
    _, second = of_phase(parse(trace)["traceEvents"], "b")
    assert second["args"] == {
        "run": 1,
        "status": "error",
        "cuda:0": {"launches": 0, "graph_launches": 1, "copies": 2, "allocations": 3},
        "cuda:1": {"launches": 2, "graph_launches": 0, "copies": 1, "allocations": 2},
    }


def test_two_sessions_may_number_their_runs_alike() -> None:
    trace = Trace(runs=[RunSpan(0, "a", 0, 10, "ok"), RunSpan(0, "b", 5, 15, "ok")])
    assert [e["id"] for e in of_phase(parse(trace)["traceEvents"], "b")] == [1, 2]


def test_values_counted_once_are_shown_at_all_times() -> None:
    """Viewers keep the last figure of a counter until there is another."""
    moved = [MemorySample("sim:0", 1, 9), MemorySample("sim:0", 2, 9, host=4), MemorySample("sim:0", 3, 9)]
    counters = of_phase(parse(Trace(memory=[*moved, MemorySample("sim:1", 2, 5)]))["traceEvents"], "C")
    assert [event["args"].get("host") for event in counters if event["args"]["bytes"] == 9] == [0, 4, 0]
    assert [event["args"] for event in counters if event["args"]["bytes"] == 5] == [{"bytes": 5}]


def test_memory_is_a_counter_in_time_order(trace: Trace) -> None:
    counters = of_phase(parse(trace)["traceEvents"], "C")
    assert [(e["ts"], e["args"]) for e in counters] == [(4.0, {"bytes": 8_192}), (9.0, {"bytes": 16_384})]


def flow_trace() -> Trace:
    """A tied transfer, two from and to moments without a firing 400 ns apart, and one a while later."""

    def firing(node: str, device: str, stream: str, start: int, end: int) -> Firing:
        return Firing(1, node, "op", "", device, stream, start, start, end, "", "ok", "")

    def transfer(node: str, sent: int, received: int, nbytes: int = 0) -> Transfer:
        return Transfer(1, node, "", "sim:0", "sim:1", sent, received, nbytes)

    return Trace(
        firings=[firing("mul", "sim:0", "compute", 1_000, 5_000), firing("mul/recv", "sim:1", "peer", 6_000, 7_000)],
        transfers=[
            transfer("mul/recv", 0, 100, 4_096),
            transfer("a/recv", 2_000, 3_000),
            transfer("b/recv", 2_400, 3_400),
            transfer("c/recv", 9_000, 9_000),
        ],
    )


def test_a_transfer_is_a_flow_from_the_slice_that_made_it_to_the_copy_that_brought_it() -> None:
    events = parse(flow_trace())["traceEvents"]
    slices = {e["name"]: e for e in of_phase(events, "X")}
    (start, *_), (end, *_) = of_phase(events, "s"), of_phase(events, "f")
    assert (start["pid"], start["tid"], start["ts"]) == (slices["mul"]["pid"], slices["mul"]["tid"], 4.999)
    assert (end["pid"], end["tid"], end["ts"]) == (slices["mul/recv"]["pid"], slices["mul/recv"]["tid"], 6.0)
    assert (start["id"], start["name"], start["cat"]) == (end["id"], end["name"], end["cat"]) == (1, "mul", "transfer")
    assert start["args"] == {"tag": "", "run": 1, "bytes": 4_096}
    assert "bp" not in start
    assert end["bp"] == "e"


def test_ends_without_a_firing_get_short_slices_on_a_lane_of_their_own() -> None:
    events = parse(flow_trace())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    marks = [e for e in of_phase(events, "X") if threads[e["tid"]] == "transfers"]
    assert [(e["ts"], e["dur"], e["name"], e["args"]["transfers"]) for e in marks] == [
        (2.0, 1.0, "2 transfers", ["send a", "send b"]),
        (9.0, 1.0, "send c", ["send c"]),
        (3.0, 1.0, "2 transfers", ["recv a", "recv b"]),
        (9.0, 1.0, "recv c", ["recv c"]),
    ]
    assert len({e["pid"] for e in marks}) == 2
    assert_no_overlap(events)


def test_slices_come_before_the_flows_tied_to_them() -> None:
    phases = "".join(e["ph"] for e in parse(flow_trace())["traceEvents"])
    assert phases.rindex("X") < phases.index("s")


def test_dropped_firings_are_reported(trace: Trace) -> None:
    assert parse(trace)["otherData"] == {"producer": "asyncflow", "dropped": 3}


def test_an_empty_trace_is_a_whole_file() -> None:
    assert parse(Trace())["traceEvents"] == []


def test_names_of_any_characters_survive() -> None:
    name = 'a"b\\c\n</script>\u2028é\ud800'
    trace = Trace(firings=[Firing(0, name, name, name, "cpu:0", "inline", 0, 1, 2, "", "ok", name)])
    (event,) = of_phase(parse(trace)["traceEvents"], "X")
    assert event["args"]["node"] == name


times = st.integers(0, 10**13)
firings = st.builds(
    lambda stream, start, wait, length: Firing(
        0, "n", "op", "", "cpu:0", stream, start, start + wait, start + wait + length, "", "ok", ""
    ),
    st.sampled_from(["inline", "compute", "async"]),
    times,
    st.integers(0, 3),
    st.integers(0, 2_000),
)


@given(st.lists(firings, max_size=30))
def test_no_slices_of_a_lane_overlap_for_a_viewer(firings: list[Firing]) -> None:
    # Neighbours that touch to the nanosecond are where rounding to microseconds would bite.
    chained = [f._replace(scheduled_ns=f.ended_ns, started_ns=f.ended_ns, ended_ns=f.ended_ns + 7) for f in firings]
    events = list(chrome_events(Trace(firings=firings + chained)))
    assert len(of_phase(events, "X")) == 2 * len(firings)
    assert_no_overlap(events)


@given(st.lists(firings, min_size=1, max_size=10))
def test_times_read_back_to_the_nanosecond(firings: list[Firing]) -> None:
    origin = min(f.started_ns for f in firings)
    read = Counter(
        (viewer_ns(e["ts"]), viewer_ns(e["dur"])) for e in of_phase(list(chrome_events(Trace(firings=firings))), "X")
    )
    assert read == Counter((f.started_ns - origin, f.ended_ns - f.started_ns) for f in firings)
