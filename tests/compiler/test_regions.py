"""`make_regions`: which nodes become one function, and which must not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import asyncflow as af
from asyncflow.compiler import regions as regions_module
from asyncflow.compiler.regions import Region, is_compilable
from asyncflow.graph.graph import Graph
from tests.compiler.stages import regions_made
from tests.conformance.gates import Gate, settle

INT = af.spec("int64", ())


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("int64", (), name="x")


@af.op(outputs=INT, name="ask")
async def ask(x: Any) -> Any:
    """A coroutine op: whoever depends on it waits."""
    return x


@af.op(outputs=INT, name="plain")
def plain(x: Any) -> Any:
    """The user's own function, which may block."""
    return x


def members(graph: Graph) -> list[str]:
    """The regions of one level, as the names of their nodes in order."""
    return [" ".join(node.name for node in region_of(node).nodes) for node in graph.nodes if node.op.name == "region"]


def region_of(node: af.Node) -> Region:
    region = node.attrs["region"]
    assert isinstance(region, Region)
    return region


def all_members(graph: Graph) -> list[str]:
    """The regions of every level, outer before inner."""
    return [
        " ".join(inner.name for inner in region_of(node).nodes) for node in graph.walk() if node.op.name == "region"
    ]


# -- what joins ------------------------------------------------------------------------------------------------------


def test_what_never_waits_is_one_region(graph: af.Graph, x: af.Tensor) -> None:
    """Branches and loops whole; values that nobody outside needs stay inside."""
    picked = af.cond(x > 3, lambda: x * 2, lambda: x, name="pick")
    (count,) = af.while_loop(lambda i: i < picked, lambda i: i + 1, (0,), name="loop")
    made = regions_made(graph, [count, picked])
    (region,) = (region_of(node) for node in made.nodes if node.op.name == "region")
    assert members(made) == ["greater pick loop"]
    assert [tensor.node.op.name for tensor in region.inputs] == ["feed"]
    assert [tensor.name for tensor in region.outputs] == ["pick:0", "loop:0"]
    assert [node.op.name for node in made.nodes] == ["feed", "constant", "constant", "region", "fetch", "fetch"]


def test_one_node_is_no_region_unless_it_is_a_loop_or_branch(graph: af.Graph, x: af.Tensor) -> None:
    """A function around one kernel would only add a call."""
    assert members(regions_made(graph, [x * 2])) == []
    (count,) = af.while_loop(lambda i: i < x, lambda i: i + 1, (0,), name="loop")
    made = regions_made(graph, [count])
    assert members(made) == ["loop"]
    assert "loop/region" in [node.name for node in made.nodes]


def test_constants_are_bound_and_not_passed(graph: af.Graph, x: af.Tensor) -> None:
    made = regions_made(graph, [(x + af.constant(5)) * af.constant(7)])
    (region,) = (region_of(node) for node in made.nodes if node.op.name == "region")
    assert [tensor.node.op.name for tensor in region.inputs] == ["feed"]


# -- barriers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", [ask, plain], ids=["coroutine op", "user's function"])
def test_before_and_behind_a_barrier(graph: af.Graph, x: af.Tensor, barrier: Any) -> None:
    """What a barrier waits for must not wait with what waits for the barrier."""
    before = -(x * 2)
    answer = barrier(before)
    made = regions_made(graph, [-(answer + 1)])
    assert members(made) == ["multiply negative", "add negative_1"]


def test_two_barriers_have_four_sides(graph: af.Graph, x: af.Tensor) -> None:
    """Before both, behind the first alone, the second alone, and both."""
    shared = -(x * 2)
    one, two = ask(shared), ask(shared)
    behind_one, behind_two = -(one + 1), -(two + 1)
    both = -(behind_one + behind_two)
    assert members(regions_made(graph, [both])) == [
        "multiply negative",
        "add_1 negative_2",
        "add negative_1",
        "add_2 negative_3",
    ]


def test_what_needs_no_barrier_does_not_wait_for_one(graph: af.Graph, x: af.Tensor) -> None:
    """A value beside the barrier is not swallowed by the region behind it."""
    answer = ask(x)
    beside = -(x * 2)
    behind = -(answer + beside)
    assert members(regions_made(graph, [behind, beside])) == ["multiply negative", "add negative_1"]


def test_a_region_is_convex(graph: af.Graph, x: af.Tensor) -> None:
    """No path leaves a region and comes back, or the region would wait for itself."""
    values = [x]
    for step in range(12):
        last = values[-1]
        values.append(ask(last) if step % 4 == 3 else last * 2 + values[step // 2])
    made = regions_made(graph, [values[-1], values[5]])
    position = {node: index for index, node in enumerate(made.nodes)}
    assert len(members(made)) == 3
    for node in made.nodes:
        assert all(position[tensor.node] < position[node] for tensor in node.inputs)


def test_a_streamed_value_is_a_barrier(graph: af.Graph, x: af.Tensor) -> None:
    """Its consumer holds the loop back, so the loop stays primitive; the rest of its body may be a region."""
    squares: list[af.Tensor] = []

    def body(i: af.Tensor) -> af.Tensor:
        squares.append(af.square(i + 1))
        return i + 1

    af.while_loop(lambda i: i < x, body, (0,), name="loop")
    made = regions_made(graph, [], streamed=squares)
    assert members(made) == []
    assert all_members(made) == ["loop/body/add loop/body/square"]


def test_more_barriers_than_can_be_told_apart(graph: af.Graph, x: af.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the graph stays as it is, rather than take for ever to compile."""
    monkeypatch.setattr(regions_module, "_MOST_BARRIERS", 2)
    few = ask(ask(x * 2 + 1))
    assert members(regions_made(graph, [few])) == ["multiply add"]
    assert members(regions_made(graph, [ask(few)])) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_no_concurrency_is_lost(run: Any, graph: af.Graph, order: tuple[int, int]) -> None:
    """Both requests are out before either has answered, and what is behind one does not wait for the other."""
    x = af.constant(1) + 1
    gates, passed = (Gate("first"), Gate("second")), (Gate("behind_first"), Gate("behind_second"))
    behind = [after((gate(x) * 2) + 1) for gate, after in zip(gates, passed, strict=True)]
    task = asyncio.ensure_future(run(behind[0] + behind[1]))
    await settle()
    assert [gate.arrived for gate in gates] == [1, 1]
    now, later = order
    gates[now].open()
    await settle()
    assert (passed[now].arrived, passed[later].arrived) == (1, 0)
    for gate in (*gates, *passed):
        gate.open()
    assert await task == 10


# -- loops that stay primitive ---------------------------------------------------------------------------------------


def test_regions_inside_a_loop_that_waits(graph: af.Graph, x: af.Tensor) -> None:
    """Iterations still overlap: the loop stays primitive, with a region before and one behind what waits."""

    def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        question = -(i * 2)
        return i + 1, total + (ask(question) * 3)

    count, _ = af.while_loop(lambda i, _: i < x, body, (0, 0), name="loop")
    made = regions_made(graph, [count, _])
    assert members(made) == []
    assert all_members(made) == ["loop/body/multiply loop/body/negative", "loop/body/multiply_1 loop/body/add_1"]


def test_an_inner_loop_that_never_waits(graph: af.Graph, x: af.Tensor) -> None:
    def body(i: af.Tensor) -> af.Tensor:
        (inner,) = af.while_loop(lambda j: j < i, lambda j: j + 1, (0,), name="inner")
        return ask(inner) + 1

    (outer,) = af.while_loop(lambda i: i < x, body, (0,), name="outer")
    assert all_members(regions_made(graph, [outer])) == ["outer/body/inner"]


def test_a_branch_that_waits_keeps_its_regions_to_itself(graph: af.Graph, x: af.Tensor) -> None:
    picked = af.cond(x > 0, lambda: ask(x * 2 + 1), lambda: -(x * 3), name="pick")
    made = regions_made(graph, [picked])
    assert members(made) == []
    assert all_members(made) == ["pick/false/multiply pick/false/negative", "pick/true/multiply pick/true/add"]


async def test_iterations_overlap_around_regions(run: Any, graph: af.Graph) -> None:
    """All iterations ask before the first is answered, though each begins with a region."""
    gate = Gate()

    def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, total + gate(i * 2 + 1) * 3

    _, total = af.while_loop(lambda i, _: i < 5, body, (0, 0))
    task = asyncio.ensure_future(run(total))
    await settle()
    assert gate.arrived == 5
    gate.open()
    assert await task == 75


@pytest.mark.parametrize(("depth", "primitive"), [(12, 0), (13, 1), (30, 18)])
def test_nesting_deeper_than_python_allows(graph: af.Graph, x: af.Tensor, depth: int, primitive: int) -> None:
    """The outer levels stay primitive, down to where a function can hold the rest."""

    def level(left: int, total: af.Tensor) -> af.Tensor:
        if not left:
            return total + 1
        return af.while_loop(lambda i, _: i < 1, lambda i, s: (i + 1, level(left - 1, s)), (0, total))[1]

    made = regions_made(graph, [level(depth, x)])
    whiles = [node for node in made.walk() if node.op.name == "while"]
    assert len(whiles) == primitive
    assert len(all_members(made)) == 1


async def test_deep_nesting_runs(graph: af.Graph) -> None:
    def level(left: int, total: Any) -> Any:
        if not left:
            return total + 1
        trips = 2 if left % 5 == 0 else 1
        return af.while_loop(lambda i, _: i < trips, lambda i, s: (i + 1, level(left - 1, s)), (0, total))[1]

    async with af.Session(graph) as session:
        assert await session.run(level(30, 0)) == 2**6


# -- order -----------------------------------------------------------------------------------------------------------


def test_control_edges_lead_to_and_from_regions(graph: af.Graph, x: af.Tensor) -> None:
    first = -(x * 2)
    with af.control_dependencies([first]):
        asked = ask(x)
    with af.control_dependencies([asked]):
        last = -(x * 3)
    made = regions_made(graph, [last])
    assert members(made) == ["multiply negative", "constant_1 multiply_1 negative_1"]
    before, behind = (node for node in made.nodes if node.op.name == "region")
    (asking,) = (node for node in made.nodes if node.op.name == "ask")
    assert asking.control_inputs == [before]
    assert behind.control_inputs == [asking]


def test_control_edges_inside_a_region_are_the_order_of_its_lines(graph: af.Graph, x: af.Tensor) -> None:
    first = -(x)
    with af.control_dependencies([first]):
        second = af.square(x)
    made = regions_made(graph, [second])
    assert members(made) == ["negative square"]
    assert all(not node.control_inputs for node in made.nodes)


def test_a_constant_that_waits_is_waited_for(graph: af.Graph, x: af.Tensor) -> None:
    """A constant with a control edge is part of the order, unlike those that are always there."""
    asked = ask(x)
    with af.control_dependencies([asked]):
        five = af.constant(5, name="five")
    made = regions_made(graph, [-(five * 2)])
    (region,) = (node for node in made.nodes if node.op.name == "region")
    assert members(made) == ["five multiply negative"]
    assert [node.op.name for node in region.control_inputs] == ["ask"]


async def test_a_constant_that_waits_holds_its_region_back(run: Any, graph: af.Graph) -> None:
    gate, behind = Gate(), Gate("behind")
    with af.control_dependencies([gate(1)]):
        five = af.constant(5)
    task = asyncio.ensure_future(run(behind(-(five * 2))))
    await settle()
    assert (gate.arrived, behind.arrived) == (1, 0)
    gate.open()
    behind.open()
    assert await task == -10


async def test_effects_keep_their_order_across_regions(run: Any, graph: af.Graph) -> None:
    """Writes before and behind a request stay on their side of it."""
    v = af.Variable(1, name="v")
    doubled = v.assign(v.read() * 2)
    asked = ask(doubled)
    v.assign_add(asked * 10)
    after = v.read()
    assert await run([after, doubled, asked]) == [2, 2, 2]
    with af.control_dependencies([asked]):
        added = v.assign_add(asked * 10)
    assert await run([v.read(), added]) == [44, 44]


# -- what is left alone ----------------------------------------------------------------------------------------------


def test_control_flow_written_by_hand_is_untouched(graph: af.Graph, x: af.Tensor) -> None:
    """Its nodes belong to frames and may be dead, which a function knows nothing of."""
    if_false, if_true = af.raw.switch(x * 2 + 1, x > 0)
    merged, _ = af.raw.merge(-(if_false * 3), if_true + 1)
    made = regions_made(graph, [merged])
    assert all_members(made) == []


def test_what_is_compilable(graph: af.Graph, x: af.Tensor) -> None:
    waiting = af.cond(x > 0, lambda: ask(x), lambda: x)
    assert not is_compilable(ask(x).node)
    assert not is_compilable(plain(x).node)
    assert not is_compilable(waiting.node)
    assert is_compilable(af.cond(x > 0, lambda: x, lambda: -x).node)
    assert is_compilable((x + 1).node)


# -- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "sizes"), [(20, [20]), (21, [20]), (45, [20, 20, 5])])
def test_long_lines_are_cut(
    graph: af.Graph, x: af.Tensor, length: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no region holds its thread for long; one node left over stays on its own."""
    monkeypatch.setattr(regions_module, "_LARGEST", 20)
    for _ in range(length):
        x = -x
    made = regions_made(graph, [x])
    assert [len(region_of(node).nodes) for node in made.nodes if node.op.name == "region"] == sizes


async def test_a_cut_line_gives_the_same(graph: af.Graph) -> None:
    x = y = af.constant(1) + 0
    for _ in range(2500):
        x, y = y, (x + y) % 1_000_003
    async with af.Session(graph) as session:
        got = await session.run([x, y])
    a = b = 1
    for _ in range(2500):
        a, b = b, (a + b) % 1_000_003
    assert got == [a, b]
