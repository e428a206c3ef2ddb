"""Placement constraints: requests, colocation, kernels, and the messages of constraints that cannot be met."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import raw
from asyncflow.compiler.placement.constraints import needs_all_kernels, resolve_requests, usable_devices
from tests.compiler.placing import devices, extracted, placed, work


def x4() -> af.Tensor:
    return af.placeholder("float32", (4,))


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "request_", "expected"),
    [
        (["sim:0"], None, "sim:0"),
        (["sim:0", "sim:1"], "sim:1", "sim:1"),
        (["sim:0", "cpu:0"], "cpu", "cpu:0"),
        (["cpu:0", "sim:2", "sim:3"], "sim", "sim:2"),
        (["cpu:3"], "cpu:3", "cpu:3"),
    ],
)
def test_a_request_may_be_partial(on: list[str], request_: str | None, expected: str) -> None:
    with af.Graph() as graph, af.device(request_):
        y = work(x4())
    assert placed(graph, [y], devices(*on))[y] == expected


def test_no_device_fits_a_request() -> None:
    with af.Graph() as graph, af.device("cuda"):
        y = af.identity(x4(), name="y")
    expected = (
        r"no device fits 'cuda': this session has cpu:0, cpu:1; ask for one of these, or add it to the session's: "
        r"Session\(devices=\['cpu:0', \.\.\., 'cuda'\]\)"
        r"\n  asked for by y \(identity\), built at .*test_constraints\.py:\d+"
    )
    with pytest.raises(af.PlacementError, match=expected):
        placed(graph, [y], devices("cpu:0", "cpu:1"))


def test_a_missing_device_is_added_to_the_present_ones() -> None:
    """In a simulation, naming a CPU alone would leave the cards idle."""
    with af.Graph() as graph, af.device("cpu:0"):
        y = work(x4())
    with pytest.raises(af.PlacementError, match=r"Session\(devices=\['sim:0', 'cpu:0'\]\)"):
        placed(graph, [y], devices("sim:0"))


def test_colocated_with_a_variable() -> None:
    """The variable is on the device of the nodes that use it."""
    with af.Graph() as graph:
        variable = af.Variable(np.zeros(4, np.float32))
        with af.device("sim:1"):
            read = variable.read()
        with af.colocate_with(variable):
            y = work(x4())
    result = placed(graph, [read, y], devices("sim:0", "sim:1"))
    assert result[y] == result[read] == "sim:1"


def test_one_device_is_no_excuse() -> None:
    with af.Graph() as graph, af.device("cpu:1"):
        y = work(x4())
    with pytest.raises(af.PlacementError, match="no device fits 'cpu:1': this session has cpu:0;"):
        placed(graph, [y], devices("cpu:0"))


def test_a_request_that_is_no_device() -> None:
    with af.Graph() as graph, af.device("gpu:0"):
        y = af.identity(x4(), name="y")
    with pytest.raises(af.PlacementError, match=r"did you mean 'cuda'[^$]*asked for by y .*constraints\.py:\d+"):
        placed(graph, [y], devices("cpu:0", "cpu:1"))


# -- colocation ------------------------------------------------------------------------------------------------------


def test_colocation_is_transitive() -> None:
    with af.Graph() as graph:
        with af.device("sim:2"):
            a = work(x4())
        with af.colocate_with(a):
            b = work(x4())
        with af.colocate_with(b):
            c = work(x4())
    on = devices("sim:0", "sim:1", "sim:2")
    found = placed(graph, [a, b, c], on)
    assert [found[node] for node in (a, b, c)] == ["sim:2"] * 3
    assert found.why(c) == f"colocated with {a.node.name}"


def test_requests_of_a_group_are_intersected() -> None:
    with af.Graph() as graph:
        with af.device("sim"):
            a = work(x4())
        with af.colocate_with(a), af.device("sim:1"):
            b = work(x4())
    copied = extracted(graph, [a, b])
    resolve_requests(copied, graph, devices("cpu:0", "sim:0", "sim:1"))
    nodes = [copied.node(tensor.node.name) for tensor in (a, b)]
    assert [node.device for node in nodes] == ["sim:1", "sim:1"]
    assert [node.colocated_with for node in nodes] == [a.node.name] * 2


def test_a_node_without_company_has_no_label() -> None:
    with af.Graph() as graph, af.device("sim:1"):
        a = work(x4())
    copied = extracted(graph, [a])
    resolve_requests(copied, graph, devices("sim:0", "sim:1"))
    node = copied.node(a.node.name)
    assert (node.device, node.colocated_with) == ("sim:1", None)


def test_a_pruned_node_still_says_where() -> None:
    with af.Graph() as graph:
        with af.device("sim:1"):
            unused = work(x4())
        with af.colocate_with(unused):
            between = work(x4())
        with af.colocate_with(between):
            used = work(x4())
    found = placed(graph, [used], devices("sim:0", "sim:1"))
    assert unused.node.name not in {node.name for node in found.graph.walk()}
    assert found[used] == "sim:1"


def test_a_pruned_node_joins_the_nodes_placed_with_it() -> None:
    with af.Graph() as graph:
        pruned = work(x4())
        with af.colocate_with(pruned):
            a, b = work(x4(), ms=5), work(x4(), ms=5)
        c = work(x4(), ms=8)
    found = placed(graph, [a, b, c], devices("sim:0", "sim:1"))
    assert found[a] == found[b] != found[c]


def test_conflict_names_requests_places_and_reasons() -> None:
    with af.Graph() as graph:
        with af.device("sim:0"):
            a = af.identity(x4(), name="a")
        with af.colocate_with(a):
            b = af.identity(x4(), name="b")
        with af.colocate_with(b), af.device("sim:1"):
            c = af.identity(x4(), name="c")
    with pytest.raises(af.PlacementError) as caught:
        placed(graph, [a, b, c], devices("sim:0", "sim:1"))
    lines = str(caught.value).splitlines()
    assert lines[0] == ("nodes that have to be on one device ask for different ones; this session has sim:0, sim:1")
    here = "test_constraints.py:"
    assert lines[1].startswith("  'sim:0' asked for by a (identity), built at ") and here in lines[1]
    assert lines[2].startswith("  'sim:1' asked for by c (identity), built at ") and here in lines[2]
    assert lines[3] == "they have to be together because"
    assert {line.split(", ")[0] for line in lines[4:6]} == {"  b is colocated with a", "  c is colocated with b"}
    assert lines[6] == "ask for one device for all of them, or take away what joins them"


def test_conflict_of_kinds_with_a_pruned_node() -> None:
    with af.Graph() as graph:
        with af.device("cpu"):
            pruned = work(x4(), name="pruned")
        with af.colocate_with(pruned), af.device("sim"):
            used = work(x4(), name="used")
    with pytest.raises(af.PlacementError, match=r"'sim' asked for by used[^$]*'cpu' asked for by pruned"):
        placed(graph, [used], devices("cpu:0", "sim:0"))


# -- state -----------------------------------------------------------------------------------------------------------


def test_a_variable_lives_on_one_device() -> None:
    v = af.Variable(np.zeros(4, "float32"), name="v")
    with af.Graph() as graph:
        with af.device("sim:1"):
            first = v.read()
        second = v.assign_add(work(first, ms=3))
        last = work(v.read())
    found = placed(graph, [second, last], devices("sim:0", "sim:1"))
    state = {node.name for node in found.graph.walk() if node.op.effects is not None}
    assert len(state) == 3
    assert {found[name] for name in state} == {"sim:1"}


def test_variables_that_share_a_value_are_one() -> None:
    v, w = (af.Variable(0.0, name="shared", container="placement") for _ in range(2))
    with af.Graph() as graph:
        with af.device("sim:1"):
            a = v.read()
        b = w.assign_add(1.0)
    assert placed(graph, [a, b], devices("sim:0", "sim:1"))[b] == "sim:1"


def test_conflict_over_a_variable_names_it() -> None:
    v = af.Variable(0.0, name="v")
    with af.Graph() as graph:
        with af.device("sim:0"):
            a = v.read()
        with af.device("sim:1"):
            b = v.assign_add(1.0)
    with pytest.raises(af.PlacementError, match=r"v/read uses Variable\('v'\)[^$]*v/assign_add uses Variable\('v'\)"):
        placed(graph, [a, b], devices("sim:0", "sim:1"))


def test_a_variable_used_in_a_loop_is_where_it_is_used_outside() -> None:
    v = af.Variable(np.zeros(4, "float32"), name="v")
    with af.Graph() as graph:
        last = af.while_loop(
            lambda i: i < 3, lambda i: i + af.astype(af.sum(v.assign_add(work(v.read(), ms=5))), "int64") * 0 + 1, 0
        )
        with af.device("sim:1"):
            after = v.read()
    found = placed(graph, [last, after], devices("sim:0", "sim:1"))
    state = [node for node in found.graph.walk() if "variable" in node.op.name]
    assert len(state) == 3
    assert {node.device for node in state} == {"sim:1"}


# -- hand-written control flow ---------------------------------------------------------------------------------------


def by_hand(*specs: str | None, is_regular: bool = True) -> tuple[af.Graph, Any, Any]:
    """A loop whose sum and back edge ask for these, and work that has nothing to do with it."""
    with af.Graph() as graph:
        i = af.placeholder("int64", (), name="i")
        apart = work(x4(), ms=20)
        merged, _ = raw.merge(raw.enter(i, "loop"))
        pred = raw.loop_cond(merged < raw.enter(3, "loop", constant=is_regular))
        done, again = raw.switch(merged, pred)
        with af.device(specs[0]):
            total = raw.enter(1, "loop", constant=True) + again
        with af.device(specs[-1]):
            following = raw.next_iteration(total)
        raw.add_back_edge(merged, following)
        left = raw.exit(done)
    return graph, left, work(apart, ms=20, name="apart")


def of_loop(found: Any) -> set[str]:
    """The devices of the primitives."""
    primitives = ("enter", "merge", "switch", "loop_cond", "next_iteration", "exit", "add", "less")
    return {device for name, device in found.placement.devices.items() if name.rstrip("_0123456789") in primitives}


def test_a_loop_by_hand_stays_together_where_one_device_is_asked_for() -> None:
    graph, left, apart = by_hand("sim:1")
    with graph, af.device("sim:0"):
        other = work(apart, name="other")
    found = placed(graph, [left, other], devices("sim:0", "sim:1"))
    assert of_loop(found) == {"sim:1"}
    assert found.placement.devices["other"] == "sim:0"


def test_a_loop_by_hand_is_cut_where_two_are_asked_for() -> None:
    """B11. Requested nodes are on their devices, and the others on one of the two or anywhere."""
    graph, left, _ = by_hand("sim:1", "sim:2")
    found = placed(graph, [left], devices("sim:0", "sim:1", "sim:2"))
    assert found.placement.devices["add"] == "sim:1"
    variable = {found.placement.devices[name] for name in ("enter", "merge", "next_iteration")}
    assert variable == {"sim:2"}, "a loop variable is on one device"
    assert found.placement.notes == ()


def test_a_loop_by_hand_that_cannot_be_cut_says_why() -> None:
    graph, left, _ = by_hand("sim:1", is_regular=False)
    found = placed(graph, [left], devices("sim:0", "sim:1"))
    assert of_loop(found) == {"sim:1"}
    (note,) = found.placement.notes
    place = r"test_constraints.py:\d+"
    assert re.search(rf"frame 'loop' stays on one device: less \(less, built at .*{place}\) uses enter_1", note)
    assert note in found.placement.explain()
    graph, left, _ = by_hand("sim:1", "sim:0", is_regular=False)
    with pytest.raises(af.PlacementError, match=rf"in frame 'loop', which stays on one device: less .*{place}"):
        placed(graph, [left], devices("sim:0", "sim:1"))


# -- kernels ---------------------------------------------------------------------------------------------------------


@af.op(outputs=af.spec("float32", ()))
def user_function(value: Any) -> Any:
    return value


def test_what_runs_where() -> None:
    v = af.Variable(0.0, name="v")
    with af.Graph():
        nodes = {
            "plain": work(x4()).node,
            "user": user_function(af.constant(1.0, "float32")).node,
            "state": v.read().node,
            "string": af.constant("text").node,
            "variant": af.TensorArray("float32", 3).write(0, 1.0).read(0).node,
        }
    assert {name for name, node in nodes.items() if needs_all_kernels(node)} == {"user", "string"}
    mixed, alike = devices("cpu:0", "cuda:0", "sim:0"), devices("cuda:0", "cuda:1")
    assert usable_devices([nodes["plain"]], "cuda", mixed) == ((1,), True)
    assert usable_devices(nodes.values(), "cuda", mixed) == ((0, 2), False)
    assert usable_devices(nodes.values(), "sim", mixed) == ((2,), True)
    assert usable_devices(nodes.values(), "cuda:1", alike) == ((1,), True)


def test_soft_placement_finds_a_device_with_the_kernel() -> None:
    with af.Graph() as graph, af.device("cuda"):
        y = user_function(af.sum(x4()))
    found = placed(graph, [y], devices("cuda:0", "cpu:0"))
    assert found[y] == "cpu:0"
    assert found.why(y).startswith("asked for 'cuda' at ")
    assert "where no kernel of it runs" in found.why(y)
    assert found[y.node.inputs[0]] == "cuda:0", "what can be there is"


def test_strict_placement_refuses() -> None:
    with af.Graph() as graph, af.device("cuda"):
        y = user_function(x4()[0])
    expected = r"user_function \(user_function\) is asked to be on 'cuda', and no kernel of it[^$]*soft_placement"
    with pytest.raises(af.PlacementError, match=expected):
        placed(graph, [y], devices("cuda:0", "cpu:0"), soft=False)


def test_soft_placement_does_not_make_up_devices() -> None:
    with af.Graph() as graph, af.device("cuda:1"):
        y = user_function(x4()[0])
    with pytest.raises(af.PlacementError, match="no device fits 'cuda:1'"):
        placed(graph, [y], devices("cuda:0", "cpu:0"))


def test_nodes_without_kernel_go_elsewhere_unasked() -> None:
    with af.Graph() as graph:
        y = user_function(x4()[0])
    assert placed(graph, [y], devices("cuda:0", "cpu:0"))[y] == "cpu:0"


def test_no_device_has_the_kernel() -> None:
    with af.Graph() as graph:
        y = user_function(x4()[0])
    assert placed(graph, [y], devices("cuda:0"))[y] == "cuda:0", "the host computes it on the device's behalf"
    assert placed(graph, [y], devices("cuda:0", "cuda:1"))[y] in ("cuda:0", "cuda:1")
