"""Devices of nodes that may run on several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.placement.place import place
from tests.compiler.placing import MS, Placed, devices, extracted, placed, work


def x4() -> af.Tensor:
    return af.placeholder("float32", (4,))


def by_op(found: Placed, op: str) -> set[str | None]:
    """The devices of all nodes of an op."""
    nodes = [node for node in found.graph.walk() if node.op.name == op]
    assert nodes
    return {node.device for node in nodes}


# -- one level -------------------------------------------------------------------------------------------------------


def test_one_device_takes_all() -> None:
    with af.Graph() as graph:
        y = work(work(x4()), work(x4()))
    found = placed(graph, [y], devices("sim:3"))
    assert found.why(y) == "the only device of the session"
    assert found.placement.explain().startswith("sim:3: 6 nodes\n")


def test_independent_work_is_shared() -> None:
    with af.Graph() as graph:
        ys = [work(work(x4())) for _ in range(4)]
    found = placed(graph, ys, devices("sim:0", "sim:1"))
    assert sorted(found[y] for y in ys) == ["sim:0", "sim:0", "sim:1", "sim:1"]
    assert all(found[y] == found[y.node.inputs[0]] for y in ys), "a chain is not cut"


def test_a_chain_stays() -> None:
    with af.Graph() as graph:
        y = x4()
        for _ in range(10):
            y = work(y)
    assert set(placed(graph, [y], devices("sim:0", "sim:1")).placement.devices.values()) == {"sim:0"}


def test_small_gains_do_not_tear_a_graph_apart() -> None:
    with af.Graph() as graph:
        head = work(x4(), ms=1.0)
        ys = [work(head, ms=0.06) for _ in range(2)]
        y = work(*ys, ms=1.0)
    assert set(placed(graph, [y], devices("cpu:0", "cpu:1")).placement.devices.values()) == {"cpu:0"}


def test_light_graphs_are_not_looked_at_closely() -> None:
    with af.Graph() as graph:
        ys = [x4() + float(k) for k in range(20)]
    found = placed(graph, ys, devices("cpu:0", "cpu:1"))
    assert set(found.placement.devices.values()) == {"cpu:0"}


def test_a_light_graph_is_where_it_asks_to_be() -> None:
    with af.Graph() as graph:
        a = x4() + 1
        with af.device("cpu:1"):
            b = a * 2
        c = b - 3
    assert set(placed(graph, [c], devices("cpu:0", "cpu:1")).placement.devices.values()) == {"cpu:1"}


def test_a_faster_device_gets_more() -> None:
    fast, slow = devices("sim:0", slowness=0.25) + devices("sim:1")
    with af.Graph() as graph:
        ys = [work(x4()) for _ in range(10)]
    found = placed(graph, ys, [fast, slow])
    assert [found[y] for y in ys].count("sim:0") == 8


def test_dear_transfers_keep_work_together() -> None:
    with af.Graph() as graph:
        head = work(x4(), shape=(1000, 1000))
        y = work(*(work(head) for _ in range(2)))
    near, far = (devices("sim:0", "sim:1", ns_per_byte=rate) for rate in (0.01, 1.0))
    assert by_op(placed(graph, [y], near), "work") == {"sim:0", "sim:1"}
    assert by_op(placed(graph, [y], far), "work") == {"sim:0"}


def test_measured_times_replace_estimates() -> None:
    with af.Graph() as graph:
        ys = [work(x4(), ms=0.001) for _ in range(2)]
    on = devices("sim:0", "sim:1")
    assert by_op(placed(graph, ys, on), "work") == {"sim:0"}
    measured = {y.node.name: 5 * MS for y in ys}
    assert by_op(placed(graph, ys, on, measured), "work") == {"sim:0", "sim:1"}


def test_requests_draw_their_neighbours() -> None:
    with af.Graph() as graph:
        before = work(x4(), shape=(1000, 1000))
        with af.device("sim:1"):
            y = work(work(before), ms=3.0)
        after = work(y)
    on = devices("sim:0", "sim:1", ns_per_byte=1.0)
    found = placed(graph, [after], on)
    assert found[before] == found[y] == found[after] == "sim:1"


# -- what does no work -----------------------------------------------------------------------------------------------


def test_feeds_and_constants_go_to_their_first_user_and_fetches_to_their_value() -> None:
    with af.Graph() as graph:
        x, c = x4(), af.constant(np.ones(4, "float32"))
        heavy = work(ms=10.0)
        with af.device("sim:1"):
            y = work(af.identity(x) + c)
    found = placed(graph, [heavy, y], devices("sim:0", "sim:1"))
    assert found[heavy] == "sim:0"
    for op in ("feed", "constant", "identity", "add"):
        assert by_op(found, op) == {"sim:1"}, op
    fetches = {node.inputs[0].node.name: node.device for node in found.graph.nodes if node.op.name == "fetch"}
    assert fetches == {heavy.node.name: "sim:0", y.node.name: "sim:1"}
    assert found.why(c) == f"with its first user, {y.node.inputs[0].node.name}"


def test_a_request_on_a_constant_counts() -> None:
    with af.Graph() as graph:
        with af.device("sim:1"):
            c = af.constant(np.ones(4, "float32"))
        with af.device("sim:0"):
            y = work(c)
    found = placed(graph, [y], devices("sim:0", "sim:1"))
    assert (found[c], found[y]) == ("sim:1", "sim:0")


def test_a_feed_without_users() -> None:
    with af.Graph() as graph:
        x4()
        ys = [work(ms=2.0), work(ms=2.0)]
    assert by_op(placed(graph, ys, devices("sim:0", "sim:1")), "feed") == {"sim:0"}


# -- loops and branches ----------------------------------------------------------------------------------------------


def count_to(n: int, step: Any, *more: Any, **options: Any) -> Any:
    """A loop that counts, and makes ``step(*more)`` of more loop variables in each iteration."""
    return af.while_loop(
        lambda i, *_: i < n, lambda i, *rest: (i + 1, *step(*rest)), (0, *more), name="loop", **options
    )


def test_a_light_loop_stays_whole() -> None:
    with af.Graph() as graph:
        ys = [work(x4(), ms=5.0) for _ in range(2)]
        out = count_to(10, lambda a, b: (a + 1, b * a), *ys)
    found = placed(graph, out, devices("sim:0", "sim:1"))
    assert by_op(found, "work") == {"sim:0", "sim:1"}
    inside = {
        node.device for node in found.graph.walk() if node.graph is not found.graph and node.op.name != "parameter"
    }
    assert len(inside) == 1
    assert found["loop"] in inside
    assert any(reason == "in loop, which stays whole" for reason in found.placement.reasons.values())


def test_two_heavy_loops_share_two_devices() -> None:
    with af.Graph() as graph:
        loops = [
            af.while_loop(lambda i, _: i < 5, lambda i, a: (i + 1, work(a, ms=2.0)), (0, x4()), name=name)
            for name in ("left", "right")
        ]
    found = placed(graph, [loop[1] for loop in loops], devices("sim:0", "sim:1"))
    assert {found["left"], found["right"]} == {"sim:0", "sim:1"}
    for node in found.graph.walk():
        if node.op.name == "work":
            assert node.device == found[node.name.partition("/")[0]]


def test_loops_that_could_be_cut_stay_whole_beside_one_another() -> None:
    """Each of the devices has one to do, and nothing goes from one to the other."""
    with af.Graph() as graph:
        found = []
        for name in ("left", "right"):
            with af.name_scope(name):
                found += count_to(5, lambda a, b: (work(a, ms=2.0), work(b, ms=2.0)), x4(), x4())[1:]
    both = placed(graph, found, devices("sim:0", "sim:1"))
    assert {both["left/loop"], both["right/loop"]} == {"sim:0", "sim:1"}
    for node in both.graph.walk():
        if node.op.name == "work":
            assert node.device == both[f"{node.name.partition('/')[0]}/loop"]
    alone = placed(graph, found[:2], devices("sim:0", "sim:1"))
    assert by_op(alone, "work") == {"sim:0", "sim:1"}


def test_chains_in_a_heavy_body_are_shared() -> None:
    with af.Graph() as graph:
        out = count_to(10, lambda a, b: (work(a, ms=3.0), work(b, ms=3.0)), x4(), x4())
    found = placed(graph, out, devices("sim:0", "sim:1"))
    assert by_op(found, "work") == {"sim:0", "sim:1"}
    for node in found.graph.walk():
        if node.op.name in ("less", "add", "while"):
            assert node.device == "sim:0", "counter, predicate and loop"


@pytest.mark.parametrize(("parallel_iterations", "is_cut"), [(32, True), (1, False)])
def test_layers_of_a_loop_become_a_pipeline_where_iterations_overlap(parallel_iterations: int, is_cut: bool) -> None:
    def layers(x: af.Tensor, *states: af.Tensor) -> tuple[af.Tensor, ...]:
        after: list[af.Tensor] = []
        for state in states:
            after.append(work(after[-1] if after else x, state, ms=2.0))
        return (x, *after)

    with af.Graph() as graph:
        out = count_to(50, layers, *(x4() for _ in range(9)), parallel_iterations=parallel_iterations)
    found = placed(graph, out, devices("sim:0", "sim:1"))
    layer_devices = [node.device for node in found.graph.walk() if node.op.name == "work"]
    assert layer_devices == (["sim:0"] * 4 + ["sim:1"] * 4 if is_cut else ["sim:0"] * 8)


def test_requests_in_a_body_are_honoured() -> None:
    def step(a: af.Tensor, b: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("sim:2"):
            a = a + 1
        with af.device("sim:1"):
            b = b + a
        return a, b

    with af.Graph() as graph:
        out = count_to(10, step, x4(), x4())
    found = placed(graph, out, devices("sim:0", "sim:1", "sim:2"))
    inside = {node.name: node.device for node in found.graph.walk() if node.graph is not found.graph}
    assert by_op(found, "less") == {"sim:0"}, "the counter and the predicate are on the first device"
    assert by_op(found, "add") == {"sim:0", "sim:1", "sim:2"}
    body = found.graph.node("loop").attrs["body"]
    variables = [tensor.node.device for tensor in body.inputs[:3]]
    assert variables == ["sim:0", "sim:2", "sim:1"], "where their next values are made"
    assert len(inside) > 5


def test_one_request_in_a_light_loop_draws_all_of_it() -> None:
    def body(i: af.Tensor) -> af.Tensor:
        with af.device("cpu:1"):
            return i + 1

    with af.Graph() as graph:
        heavy = work(x4(), ms=5.0)
        last = af.while_loop(lambda i: i < 3, body, 0, name="loop")
    found = placed(graph, [heavy, last], devices("cpu:0", "cpu:1"))
    assert found["loop"] == "cpu:1"
    assert by_op(found, "less") == by_op(found, "add") == {"cpu:1"}


def test_counters_follow_the_request_for_the_loop() -> None:
    def step(a: af.Tensor, b: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("sim:0"):
            a = work(a, ms=2.0)
        with af.device("sim:1"):
            b = work(b, ms=2.0)
        return a, b

    def body(i: af.Tensor, *rest: af.Tensor) -> tuple[af.Tensor, ...]:
        after = step(*rest)
        with af.device(None):
            return (i + 1, *after)

    with af.Graph() as graph, af.device("sim:2"):
        out = af.while_loop(lambda i, *_: i < 10, body, (0, x4(), x4()), name="loop")
    found = placed(graph, out, devices("sim:0", "sim:1", "sim:2"))
    assert by_op(found, "add") == by_op(found, "less") == {"sim:2"}
    assert found["loop"] == "sim:2"


def test_a_scope_around_a_loop_reaches_all_of_it() -> None:
    with af.Graph() as graph:
        heavy = work(x4(), ms=5.0)
        with af.device("sim:1"):
            out = count_to(10, lambda a: (work(a),), x4())
    found = placed(graph, [heavy, *out], devices("sim:0", "sim:1"))
    assert found[heavy] == "sim:0"
    inside = {node.device for node in found.graph.walk() if node.graph is not found.graph}
    assert inside == {"sim:1"} == {found["loop"]}


def test_captures_are_where_their_values_are() -> None:
    with af.Graph() as graph:
        with af.device("sim:1"):
            weights = work(x4(), name="weights")
        with af.device("sim:0"):
            out = af.while_loop(lambda a: af.sum(a) < 3, lambda a: work(a, weights), x4(), name="loop")
    found = placed(graph, [out], devices("sim:0", "sim:1"))
    captured = [node for node in found.graph.walk() if node.name.endswith("capture_weights")]
    assert captured
    assert {node.device for node in captured} == {"sim:1"}


def test_a_variable_that_never_changes_is_where_it_begins() -> None:
    with af.Graph() as graph:
        with af.device("sim:1"):
            begin = work(x4())
        with af.device("sim:0"):
            out = af.while_loop(
                lambda a, b, c: af.sum(a) < 3, lambda a, b, c: (work(a, b), b, c), (x4(), begin, x4()), name="loop"
            )
            after = work(out[1])
    found = placed(graph, [after, out[0], out[2]], devices("sim:0", "sim:1"))
    variables = found.graph.node("loop").attrs["body"].inputs
    assert [tensor.node.device for tensor in variables] == ["sim:0", "sim:1", "sim:0"]


def test_variables_that_change_places_agree() -> None:
    with af.Graph() as graph:
        with af.device("sim:1"):
            a, b = work(x4()), work(x4())
        out = af.while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b, a), (0, a, b), name="loop")
    found = placed(graph, out, devices("sim:0", "sim:1"))
    variables = found.graph.node("loop").attrs["body"].inputs
    assert [tensor.node.device for tensor in variables[1:]] == ["sim:1", "sim:1"]


def test_a_cond_is_with_its_predicate_and_its_branches_where_they_ask() -> None:
    def branch(device: str) -> Any:
        def make() -> af.Tensor:
            with af.device(device):
                return work(x, ms=2.0)

        return make

    with af.Graph() as graph:
        x = x4()
        with af.device("sim:2"):
            pred = af.sum(work(x)) > 0
        y = af.cond(pred, branch("sim:0"), branch("sim:1"), name="choice")
        z = work(y, ms=0.001)
    found = placed(graph, [z], devices("sim:0", "sim:1", "sim:2"))
    assert found["choice"] == "sim:2"
    assert by_op(found, "work") == {"sim:0", "sim:1", "sim:2"}
    assert found[z] == "sim:0", "the result is where the true branch has it"


def test_a_long_row_of_branches_is_no_deep_recursion() -> None:
    with af.Graph() as graph:
        y, p = x4(), af.placeholder("bool", ())
        for _ in range(400):
            before = y
            y = af.cond(p, lambda: before, lambda: work(before, ms=1.0))  # noqa: B023 - called at once
        out = af.while_loop(lambda a: af.sum(a) < 3, work, y)
    found = placed(graph, [out], devices("sim:0", "sim:1"))
    assert len(found.placement.devices) > 1200


def test_loops_in_loops_and_branches() -> None:
    def inner(a: af.Tensor) -> af.Tensor:
        with af.device("sim:1"):
            return af.while_loop(lambda j, _: j < 3, lambda j, b: (j + 1, work(b)), (0, a), name="inner")[1]

    def step(a: af.Tensor) -> tuple[af.Tensor, ...]:
        with af.device("sim:2"):
            a = work(a)
        return (af.cond(af.sum(a) > 0, lambda: inner(a), lambda: work(a)),)

    with af.Graph() as graph:
        out = count_to(3, step, x4())
    found = placed(graph, out, devices("sim:0", "sim:1", "sim:2"))
    assert found["loop"] == "sim:0"
    inner_node = next(node for node in found.graph.walk() if node.name.endswith("inner"))
    inside = {node.device for body in inner_node.subgraphs for node in body.walk() if node.op.name != "parameter"}
    assert inside == {"sim:1"}


# -- memory ----------------------------------------------------------------------------------------------------------

MIB = 1024 * 1024
QUARTER_MIB = (MIB // 4,)
"""A shape of float32, of one MiB."""


def test_values_that_do_not_fit_go_elsewhere() -> None:
    with af.Graph() as graph:
        ys = [work(shape=QUARTER_MIB, ms=0.2) for _ in range(6)]
        y = work(*ys, ms=0.1)
    roomy = placed(graph, [y], devices("sim:0", "sim:1", latency=1e7))
    tight = placed(graph, [y], devices("sim:0", latency=1e7, limit=5 * MIB) + devices("sim:1", latency=1e7))
    assert by_op(roomy, "work") == {"sim:0"}
    assert by_op(tight, "work") == {"sim:1"}


def test_only_one_device_has_room() -> None:
    with af.Graph() as graph:
        y = work(shape=QUARTER_MIB, ms=5.0)
    found = placed(graph, [y], devices("sim:0", limit=MIB // 2) + devices("sim:1", limit=2 * MIB))
    assert found[y] == "sim:1"
    assert found.why(y) == "only sim:1 has room, not sim:0"


def test_values_are_let_go_after_their_last_use() -> None:
    with af.Graph() as graph:
        y = work(shape=QUARTER_MIB)
        for _ in range(10):
            y = work(y, shape=QUARTER_MIB)
    limited = devices("sim:0", "sim:1", limit=int(2.5 * MIB))
    assert by_op(placed(graph, [y], limited), "work") == {"sim:0"}


def test_variables_take_room() -> None:
    variables = [af.Variable(np.zeros(QUARTER_MIB, "float32")) for _ in range(4)]
    with af.Graph() as graph:
        ys = [af.sum(work(v.read(), ms=0.3)) for v in variables]
    limited = devices("sim:0", "sim:1", limit=int(2.6 * MIB), latency=1e6)
    found = placed(graph, ys, limited)
    reads = [node.device for node in found.graph.walk() if node.op.name == "variable_read"]
    assert sorted(map(str, reads)) == ["sim:0", "sim:0", "sim:1", "sim:1"]


def test_nothing_has_room() -> None:
    with af.Graph() as graph:
        y = work(shape=QUARTER_MIB)
    small = devices("sim:0", limit=MIB // 4) + devices("sim:1", limit=MIB // 2)
    assert placed(graph, [y], small)[y] == "sim:1", "the one that lacks least; the run will tell"


# -- reasons, and effort ---------------------------------------------------------------------------------------------


def test_reasons() -> None:
    with af.Graph() as graph:
        with af.device("sim:1"):
            asked = af.exp(af.placeholder("float32", (4000, 1000)))
        free = [work(x4(), ms=ms) for ms in (9.0, 4.0)]
    found = placed(graph, [asked, *free], devices("sim:0", "sim:1"))
    assert found.why(asked).startswith("asked for 'sim:1' at ")
    assert "test_place.py:" in found.why(asked)
    reasons = [found.why(y) for y in free]
    assert "finishes first there: 8 ms, 13 ms on sim:0" in reasons
    assert set(found.placement.explain().splitlines()) >= {f"  {free[1].node.name}: {reasons[1]}"}


def test_effort_grows_with_the_graph_and_not_faster() -> None:
    def asked(n: int) -> int:
        on = devices(*(f"sim:{k}" for k in range(4)))
        with af.Graph() as graph:
            ys = [x4() for _ in range(8)]
            for k in range(n):
                ys[k % 8] = work(ys[k % 8], ys[(k * 5 + 3) % 8])
        copied = extracted(graph, ys)
        place(copied, on)
        return sum(device.n_asked for device in on)  # type: ignore[attr-defined]

    assert asked(800) < 2.5 * asked(400)
