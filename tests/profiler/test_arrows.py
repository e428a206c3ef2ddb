"""Arrows: from the firing that made a value to the copy that brought it, or the moments the host knows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.profiler.arrows import Arrow, End, find_arrows, sent_tensor
from asyncflow.profiler.lanes import firing_lanes
from asyncflow.runtime.watch.trace import LATE_COPY, Firing, Trace, Transfer


def firing(node: str, device: str, stream: str, start: int, end: int, *, tag: str = "loop/3", run: int = 1) -> Firing:
    return Firing(run, node, "op", tag, device, stream, start, start, end, "", "ok", "")


def transfer(sent: int, received: int, *, node: str = "loop/mul/recv", tag: str = "loop/3", run: int = 1) -> Transfer:
    return Transfer(run, node, tag, "sim:0", "sim:1", sent, received, 64)


def arrow_of(*firings: Firing, moved: Transfer) -> Arrow:
    trace = Trace(firings=list(firings), transfers=[moved])
    (arrow,) = find_arrows(trace, firing_lanes(trace))
    return arrow


MADE = firing("loop/mul", "sim:0", "compute", 100, 200)
COPY = firing("loop/mul/recv", "sim:1", "peer", 230, 290)


def test_an_arrow_goes_from_the_kernel_to_the_copy_whatever_the_host_was_doing() -> None:
    arrow = arrow_of(MADE, COPY, moved=transfer(5, 6))
    assert arrow.tensor == "loop/mul"
    assert arrow.start == End("sim:0", 199, 0, 0)
    assert arrow.end == End("sim:1", 230, 1, 0)


@pytest.mark.parametrize(
    "other",
    [
        firing("loop/mul", "sim:0", "compute", 100, 200, tag="loop/2"),
        firing("loop/mul", "sim:0", "compute", 100, 200, run=2),
        firing("loop/mul", "sim:2", "compute", 100, 200),
        firing("loop/mul_1", "sim:0", "compute", 100, 200),
        firing("loop/mul", "sim:0", "compute", 150, 150),
    ],
    ids=["other iteration", "other run", "other device", "other node", "an instant"],
)
def test_a_value_that_no_firing_made_leaves_when_the_host_sent_it(other: Firing) -> None:
    assert arrow_of(other, COPY, moved=transfer(5, 6)).start == End("sim:0", 5, None, None)


def test_a_value_that_no_copy_brought_arrives_when_the_host_had_it() -> None:
    arrow = arrow_of(MADE, moved=transfer(210, 250))
    assert arrow.end == End("sim:1", 250, None, None)


def test_a_copy_out_of_the_target_brought_nothing() -> None:
    out = firing("loop/mul/recv", "sim:1", "d2h", 230, 290)
    assert arrow_of(MADE, out, moved=transfer(210, 250)).end.lane is None


def test_a_value_the_host_passed_on_before_its_kernel_ran_is_the_hosts() -> None:
    assert arrow_of(MADE, moved=transfer(5, 6)).start == End("sim:0", 5, None, None)


def test_of_several_spans_the_last_made_it_and_the_first_brought_it() -> None:
    earlier = firing("loop/mul", "sim:0", "host", 10, 20)
    later = firing("loop/mul/recv", "sim:1", "h2d", 400, 500)
    arrow = arrow_of(earlier, MADE, later, COPY, moved=transfer(5, 6))
    assert (arrow.start.time_ns, arrow.end.time_ns) == (199, 230)


@pytest.mark.parametrize(
    ("recv", "tensor"),
    [("a/b/recv", "a/b"), ("a/b/recv_12", "a/b"), ("recv/recv", "recv"), ("a/recv/b", "a/recv/b")],
)
def test_a_transfer_is_known_by_its_value(recv: str, tensor: str) -> None:
    assert sent_tensor(transfer(0, 1, node=recv)) == tensor


moments = st.integers(0, 60)
spans = st.tuples(moments, st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(spans, max_size=4), st.lists(spans, max_size=4), moments, moments)
def test_no_arrow_points_back_in_time_and_tied_ends_lie_inside_their_firings(
    made: list[tuple[int, int]], copied: list[tuple[int, int]], sent: int, received: int
) -> None:
    trace = Trace(
        firings=[firing("loop/mul", "sim:0", "compute", *span) for span in made]
        + [firing("loop/mul/recv", "sim:1", "peer", *span) for span in copied],
        transfers=[transfer(sent, received)],
    )
    lanes = firing_lanes(trace)
    (arrow,) = find_arrows(trace, lanes)
    assert arrow.start.time_ns <= arrow.end.time_ns
    for end in (arrow.start, arrow.end):
        if end.lane is not None and end.position is not None:
            tied = lanes[end.lane].firings[end.position]
            assert tied.device == end.device
            assert tied.started_ns <= end.time_ns < tied.ended_ns


@pytest.mark.parametrize("busy", [(250, 300), (100, 300)], ids=["a kernel begins", "a region goes on"])
def test_a_late_copy_points_to_what_its_device_computes_then(busy: tuple[int, int]) -> None:
    copy = firing("loop/tanh", "cpu:0", "h2d", 150, 200)._replace(op=LATE_COPY, nbytes=64)
    firings = [
        copy,
        firing("before", "cpu:0", "compute", 0, 90),
        firing("waiting", "cpu:0", "compute:1", *busy),
        firing("later", "cpu:0", "compute", 310, 400),
        firing("elsewhere", "cpu:1", "compute", 205, 210),
        firing("loop/sin", "cpu:0", "h2d", 260, 270)._replace(op="copy"),
    ]
    trace = Trace(firings=firings)
    lanes = firing_lanes(trace)
    (arrow,) = find_arrows(trace, lanes)
    assert arrow.is_stall
    assert (arrow.tensor, arrow.transfer.node, arrow.transfer.nbytes) == ("loop/tanh", "waiting", 64)
    assert arrow.start.time_ns == 199
    assert arrow.end.time_ns == max(busy[0], 200)
    assert arrow.end.lane is not None
    assert lanes[arrow.end.lane].stream == "compute:1"


def test_a_late_copy_before_no_computation_delays_nothing() -> None:
    trace = Trace(firings=[firing("a", "cpu:0", "h2d", 150, 200)._replace(op=LATE_COPY)])
    assert find_arrows(trace, firing_lanes(trace)) == []
