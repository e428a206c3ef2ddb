"""`lower` on graphs cut over devices: transfers, control loops, gates (Behaviour 23, 74, 75)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import asyncflow as af
from asyncflow.compiler.program.loops.frames import assign_frames
from tests.compiler.cut import crossings, cut, of, text
from tests.compiler.stages import golden

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.frames import FramePath
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node


def lowered(graph: af.Graph, fetches: Sequence[Any], **options: Any) -> Graph:
    """Lowered, with the rules checked that hold for every graph."""
    flat = cut(graph, fetches, **options)
    assert crossings(flat) == []
    assert_transfers_match(flat)
    assert_loops_are_cut_soundly(flat)
    return flat


def assert_transfers_match(flat: Graph) -> None:
    """One Send and one Recv a transfer, that name each other's devices; a value goes to a device once."""
    sends = {node.attrs["transfer"]: node for node in of(flat, "send")}
    recvs = {node.attrs["transfer"]: node for node in of(flat, "recv")}
    assert len(sends) == len(of(flat, "send"))
    assert sends.keys() == recvs.keys()
    for number, send in sends.items():
        recv = recvs[number]
        assert (send.attrs["target"], recv.attrs["source"]) == (recv.device, send.device)
        assert send.attrs["is_acknowledged"] == recv.attrs["is_acknowledged"]
    carried = [(send.inputs[0], send.attrs["target"]) for send in sends.values() if send.inputs]
    assert len(carried) == len(set(carried))


def assert_loops_are_cut_soundly(flat: Graph) -> None:
    """Behaviour 75: Recvs in loops are gated; in each frame a device makes the predicate or receives it, once."""
    frames = assign_frames(flat)
    deciders: dict[tuple[FramePath, str | None], list[Node]] = {}
    for node in flat.nodes:
        if node.op.name == "recv" and frames[node]:
            assert node.control_inputs, node.name
        is_told = node.op.name == "recv" and node.attrs["is_acknowledged"]
        if node.op.name == "loop_cond" or is_told:
            deciders.setdefault((frames[node], node.device), []).append(node)
    present = {(frames[node], node.device) for node in flat.nodes if frames[node] and node.op.name != "constant"}
    assert deciders.keys() == present
    for (frame, device), nodes in deciders.items():
        assert len(nodes) == 1, (frame, device)
        merges = [node for node in of(flat, "merge", device) if frames[node] == frame and _has_back_edge(node)]
        assert merges, f"nothing starts the next iteration of {frame} on {device}"


def _has_back_edge(merge: Node) -> bool:
    return any(tensor.node.op.name == "next_iteration" for tensor in merge.inputs)


# -- values and news -------------------------------------------------------------------------------------------------


def test_a_value_goes_to_a_device_once_however_many_use_it_there(graph: af.Graph) -> None:
    """Behaviour 74: constants go nowhere: they are everywhere."""
    x = af.placeholder("float32", (3,), name="x")
    y = af.square(x)
    with af.device("cpu:1"):
        once, twice = y + 1.0, y * y
        total = once + twice
    with af.device("cpu:2"):
        elsewhere = y - 1.0
    assert text(lowered(graph, [total, elsewhere])) == golden("""
        cpu:0  feed = feed()
        cpu:0  square = square(feed)
        -  constant = constant()
        cpu:0  square/send = send[1](square)
        cpu:1  square/recv = recv[1]()
        cpu:1  add = add(square/recv, constant)
        cpu:1  multiply = multiply(square/recv, square/recv)
        cpu:1  add_1 = add(add, multiply)
        -  constant_1 = constant()
        cpu:0  square/send_1 = send[2](square)
        cpu:2  square/recv_1 = recv[2]()
        cpu:2  subtract = subtract(square/recv_1, constant_1)
        cpu:1  add_1/send = send[3](add_1)
        cpu:0  add_1/recv = recv[3]()
        cpu:0  fetch = fetch(add_1/recv)
        cpu:2  subtract/send = send[4](subtract)
        cpu:0  subtract/recv = recv[4]()
        cpu:0  fetch_1 = fetch(subtract/recv)
    """)


def test_a_control_edge_alone_sends_the_news_once(graph: af.Graph) -> None:
    """Behaviour 74: the Send has no input. Fed values are not sent either: each device takes its own."""
    x = af.placeholder("float32", (), name="x")
    first = af.square(x)
    with af.control_dependencies([first]), af.device("cpu:1"):
        total = af.negative(x) + af.abs(x)
    flat = lowered(graph, [total])
    assert text(flat) == golden("""
        cpu:0  feed = feed()
        cpu:0  square = square(feed)
        cpu:0  square/send = send[1]() after square
        cpu:1  square/recv = recv[1]()
        cpu:1  feed_1 = feed()
        cpu:1  negative = negative(feed_1) after square/recv
        cpu:1  abs = abs(feed_1) after square/recv
        cpu:1  add = add(negative, abs) after square/recv
        cpu:1  add/send = send[2](add)
        cpu:0  add/recv = recv[2]()
        cpu:0  fetch = fetch(add/recv)
    """)
    assert flat.node("square/recv").outputs[0].spec == af.spec("bool", ())


@pytest.mark.parametrize("is_value_first", [True, False])
def test_data_and_control_between_one_pair_share_the_transfer(graph: af.Graph, is_value_first: bool) -> None:
    """Behaviour 74: whichever of them is wanted first."""
    x = af.placeholder("float32", (), name="x")
    first = af.square(x)

    def use() -> af.Tensor:
        return af.negative(first)

    def wait() -> af.Tensor:
        with af.control_dependencies([first]):
            return af.abs(x)

    with af.device("cpu:1"):
        made = [use(), wait()] if is_value_first else [wait(), use()]
        total = made[0] + made[1]
    flat = lowered(graph, [total])
    assert [send.name for send in of(flat, "send", "cpu:0")] == ["square/send"]
    assert flat.node("square/send").inputs == [flat.node("square").outputs[0]]
    recv = flat.node("square/recv")
    assert flat.node("negative").inputs == [recv.outputs[0]]
    assert flat.node("abs").control_inputs == [recv]


def test_news_of_a_node_whose_value_only_a_third_device_uses_carries_no_value(graph: af.Graph) -> None:
    x = af.placeholder("float32", (), name="x")
    first = af.square(x)
    with af.device("cpu:1"), af.control_dependencies([first]):
        waited = af.abs(x)
    with af.device("cpu:2"):
        used = af.negative(first)
    flat = lowered(graph, [waited, used])
    inputs = {send.attrs["target"]: len(send.inputs) for send in of(flat, "send", "cpu:0")}
    assert inputs == {"cpu:1": 0, "cpu:2": 1}


def test_float32_values_go_in_short_form(graph: af.Graph) -> None:
    """Truncated where they are made, expanded once where they are used; nothing else is touched."""
    x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("float64", (3,), name="n")
    y, m = af.square(x), af.square(n)
    with af.device("cpu:1"):
        made = [y + y, m + m, y * y]
    with af.device("cpu:1"):
        ended = [af.sum(tensor) for tensor in made]
    flat = lowered(graph, [tensor.node for tensor in ended], truncate=True)
    assert (
        text(flat).splitlines()[:13]
        == golden("""
        cpu:0  feed = feed()
        cpu:0  feed_1 = feed()
        cpu:0  square = square(feed)
        cpu:0  square_1 = square(feed_1)
        cpu:0  square/truncate = truncate(square)
        cpu:0  square/send = send[1](square/truncate)
        cpu:1  square/recv = recv[1]()
        cpu:1  square/expand = expand(square/recv)
        cpu:1  add = add(square/expand, square/expand)
        cpu:0  square_1/send = send[2](square_1)
        cpu:1  square_1/recv = recv[2]()
        cpu:1  add_1 = add(square_1/recv, square_1/recv)
        cpu:1  multiply = multiply(square/expand, square/expand)
    """).splitlines()
    )
    assert flat.node("square/recv").outputs[0].spec == af.spec("uint16", (3,))
    assert flat.node("square/expand").outputs[0].spec == af.spec("float32", (3,))


# -- loops -----------------------------------------------------------------------------------------------------------


def test_a_loop_over_two_devices(graph: af.Graph) -> None:
    """Behaviour 75: the device without the predicate has a control loop that receives it; the capture goes there
    before the loop."""
    n = af.placeholder("int32", (), name="n")
    w = af.square(n)

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:1"):
            product = s * w
        return i + 1, product

    results = af.while_loop(lambda i, _: i < n, body, (0, n), name="loop")
    assert text(lowered(graph, [results[1]])) == golden("""
        cpu:0  feed = feed()
        cpu:0  square = square(feed)
        -  constant = constant()
        cpu:0  loop/enter = enter[loop](constant)
        cpu:0  loop/merge = merge(loop/enter, loop/next_iteration)
        cpu:1  feed_1 = feed()
        cpu:1  loop/enter_1 = enter[loop](feed_1)
        cpu:1  loop/merge_1 = merge(loop/enter_1, loop/next_iteration_1)
        cpu:0  loop/enter_2 = enter[loop, constant](feed)
        cpu:0  loop/cond/less = less(loop/merge:0, loop/enter_2)
        cpu:0  loop/loop_cond = loop_cond(loop/cond/less)
        cpu:0  loop/switch = switch(loop/merge:0, loop/loop_cond)
        cpu:0  loop/loop_cond/send = send[1, acknowledged](loop/loop_cond)
        -  always = constant()
        cpu:1  loop/control_enter = enter[loop](always)
        cpu:1  loop/control_merge = merge(loop/control_enter, loop/next_iteration_2)
        cpu:1  loop/loop_cond/recv = recv[1, acknowledged]() after loop/control_merge
        cpu:1  loop/switch_1 = switch(loop/merge_1:0, loop/loop_cond/recv)
        cpu:0  square/send = send[2](square)
        cpu:1  square/recv = recv[2]()
        cpu:1  loop/enter_3 = enter[loop, constant](square/recv)
        cpu:1  loop/body/multiply = multiply(loop/switch_1:1, loop/enter_3)
        -  loop/body/constant = constant()
        cpu:0  loop/body/add = add(loop/switch:1, loop/body/constant)
        cpu:0  loop/next_iteration = next_iteration(loop/body/add)
        cpu:1  loop/next_iteration_1 = next_iteration(loop/body/multiply)
        cpu:1  loop/switch_2 = switch(loop/control_merge:0, loop/loop_cond/recv)
        cpu:1  loop/next_iteration_2 = next_iteration(loop/switch_2:1)
        cpu:1  loop/exit = exit(loop/switch_1:0)
        cpu:1  loop/exit/send = send[3](loop/exit)
        cpu:0  loop/exit/recv = recv[3]()
        cpu:0  fetch = fetch(loop/exit/recv)
    """)


def test_a_device_without_loop_variables_has_nothing_but_the_control_loop(graph: af.Graph) -> None:
    """Behaviour 75."""
    n = af.placeholder("int32", (), name="n")

    def body(i: af.Tensor) -> af.Tensor:
        with af.device("cpu:1"):
            squared = i * i
        return i + squared

    flat = lowered(graph, list(af.while_loop(lambda i: i < n, body, (1,), name="loop")))
    there = "\n".join(line for line in text(flat).splitlines() if line.startswith("cpu:1"))
    assert there == golden("""
        cpu:1  loop/control_enter = enter[loop](always)
        cpu:1  loop/control_merge = merge(loop/control_enter, loop/next_iteration_1)
        cpu:1  loop/loop_cond/recv = recv[2, acknowledged]() after loop/control_merge
        cpu:1  loop/switch_1 = switch(loop/control_merge:0, loop/loop_cond/recv)
        cpu:1  loop/switch_1/pivot = identity(loop/switch_1:1)
        cpu:1  loop/switch/recv = recv[1]() after loop/switch_1/pivot
        cpu:1  loop/body/multiply = multiply(loop/switch/recv, loop/switch/recv)
        cpu:1  loop/body/multiply/send = send[3](loop/body/multiply)
        cpu:1  loop/next_iteration_1 = next_iteration(loop/switch_1:1)
    """)
    # The value comes back behind the gate of the body.
    assert [node.name for node in flat.node("loop/body/multiply/recv").control_inputs] == ["loop/switch/pivot"]


def test_captures_are_sent_once_and_enter_on_every_device_that_uses_them(graph: af.Graph) -> None:
    x = af.placeholder("float32", (3,), name="x")
    w = af.square(x)

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:1"):
            first = s * w + w
        with af.device("cpu:2"):
            second = first - w
        return i + 1, second + w

    flat = lowered(graph, [af.while_loop(lambda i, _: i < 4, body, (0, x), name="loop")[1]])
    frames = assign_frames(flat)
    sends = [send for send in of(flat, "send") if send.inputs and send.inputs[0].node.name == "square"]
    assert sorted(send.attrs["target"] for send in sends) == ["cpu:1", "cpu:2"]
    assert {frames[send] for send in sends} == {()}
    enters = [node for node in of(flat, "enter") if node.attrs["constant"]]
    assert sorted((node.device, node.inputs[0].node.name) for node in enters) == [
        ("cpu:0", "square"),
        ("cpu:1", "square/recv"),
        ("cpu:2", "square/recv_1"),
    ]


# -- branches --------------------------------------------------------------------------------------------------------


def test_a_switch_is_where_its_data_is_and_only_the_taken_side_sends(graph: af.Graph) -> None:
    """Behaviour 23: the capture stays on cpu:1 for the true branch; the false one, on cpu:2, gets it from the
    Switch's own side.

    What receives it is gated by a Switch of the predicate there, so if the branch is not taken it is dead at once.
    """
    pred, x = af.placeholder("bool", (), name="pred"), af.placeholder("float32", (), name="x")
    with af.device("cpu:1"):
        y = af.square(x)

    def double() -> af.Tensor:
        with af.device("cpu:1"):
            return y + y

    def square() -> af.Tensor:
        with af.device("cpu:2"):
            return y * y

    assert text(lowered(graph, [af.cond(pred, double, square, name="pick")])) == golden("""
        cpu:0  feed = feed()
        cpu:0  feed_1 = feed()
        cpu:1  feed_1_1 = feed()
        cpu:1  square = square(feed_1_1)
        cpu:1  feed_2 = feed()
        cpu:1  pick/switch = switch(square, feed_2)
        cpu:1  pick/true/add = add(pick/switch:1, pick/switch:1)
        cpu:1  pick/switch/send = send[1](pick/switch:0)
        cpu:2  feed_3 = feed()
        cpu:2  pick/switch_1 = switch(feed_3, feed_3)
        cpu:2  pick/switch_1/pivot = identity(pick/switch_1:0)
        cpu:2  pick/switch/recv = recv[1]() after pick/switch_1/pivot
        cpu:2  pick/false/multiply = multiply(pick/switch/recv, pick/switch/recv)
        cpu:2  pick/false/multiply/send = send[2](pick/false/multiply)
        cpu:1  pick/switch/pivot = identity(pick/switch:0)
        cpu:1  pick/false/multiply/recv = recv[2]() after pick/switch/pivot
        cpu:1  pick/merge = merge(pick/false/multiply/recv, pick/true/add)
        cpu:1  pick/merge/send = send[3](pick/merge:0)
        cpu:0  pick/merge/recv = recv[3]()
        cpu:0  fetch = fetch(pick/merge/recv)
    """)


@pytest.mark.parametrize(("taken", "messages"), [(True, 1), (False, 3)])
async def test_messages_of_a_branch(graph: af.Graph, taken: bool, messages: int) -> None:
    """Behaviour 23: the graph above, run: if cpu:1 has all that the taken branch needs, only the result is sent."""
    pred, x = af.placeholder("bool", (), name="pred"), af.placeholder("float32", (), name="x")
    with af.device("cpu:1"):
        y = af.square(x)

    def on(device: str, make: Any) -> Any:
        def branch() -> af.Tensor:
            with af.device(device):
                made: af.Tensor = make(y)
                return made

        return branch

    with af.device("cpu:0"):
        last = af.abs(af.cond(pred, on("cpu:1", lambda y: y + y), on("cpu:2", lambda y: y * y), name="pick"))
    async with af.Session(graph, devices=["cpu:0", "cpu:1", "cpu:2"], debug=True) as session:
        trace = af.Trace()
        assert await session.run(last, {pred: taken, x: 3.0}, trace=trace) == (18 if taken else 81)
    assert len(trace.transfers) == messages, trace.transfers


# -- nests -----------------------------------------------------------------------------------------------------------


def nest(n: af.Tensor, places: Sequence[str]) -> af.Tensor:
    """A loop in a branch in a loop; the values in each go round the devices."""
    outermost, branch, innermost = places

    def inner(j: af.Tensor, t: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device(innermost):
            product = t * n % 1009
        with af.device(branch):
            return j + 1, product + j

    def taken(i: af.Tensor, s: af.Tensor) -> af.Tensor:
        with af.device(branch):
            start = s + i
            return af.while_loop(lambda j, _: j < i, inner, (0, start), name="inner")[1]

    def outer(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device(branch):
            is_even = af.equal(i % 2, 0)
        picked = af.cond(is_even, lambda: taken(i, s), lambda: s - 1, name="pick")
        with af.device(outermost):
            return i + 1, picked + 1

    with af.device(outermost):
        return af.while_loop(lambda i, _: i < n, outer, (0, n), name="outer")[1]


def expected(n: int) -> int:
    s = n
    for i in range(n):
        t = s - 1
        if i % 2 == 0:
            t = s + i
            for j in range(i):
                t = t * n % 1009 + j
        s = t + 1
    return s


NESTS = [
    ("cpu:0", "cpu:1", "cpu:2"),
    ("cpu:2", "cpu:0", "cpu:1"),
    ("cpu:1", "cpu:1", "cpu:2"),
    ("cpu:0", "cpu:1", "cpu:1"),
]


@pytest.mark.parametrize("places", NESTS)
def test_nested_loops_over_three_devices_are_cut_soundly(graph: af.Graph, places: Sequence[str]) -> None:
    """Behaviour 75."""
    flat = lowered(graph, [nest(af.placeholder("int64", (), name="n"), places)])
    frames = assign_frames(flat)
    assert {len(frame) for frame in frames.values()} == {0, 1, 2}
    inner = {node.device for node, frame in frames.items() if len(frame) == 2 and node.op.name != "constant"}
    assert inner >= {places[1], places[2]}


@pytest.mark.parametrize("places", NESTS)
async def test_nested_loops_over_three_devices_run(graph: af.Graph, places: Sequence[str]) -> None:
    """Behaviour 75."""
    n = af.placeholder("int64", (), name="n")
    result = nest(n, places)
    async with af.Session(graph, devices=["cpu:0", "cpu:1", "cpu:2"], debug=True) as session:
        got = await asyncio.gather(*(session.run(result, {n: value}) for value in range(9)))
    assert [int(value) for value in got] == [expected(value) for value in range(9)]
