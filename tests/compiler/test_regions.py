"""`make_regions`: which nodes become one function, and which must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.order_effects import order_effects
from asyncflow.compiler.regions import regions as regions_module
from asyncflow.compiler.regions.regions import Region, is_compilable, make_regions, waits_in_turn
from asyncflow.graph.graph import Graph
from asyncflow.graph.structured import WhileNode
from tests.compiler.stages import regions_made
from tests.conformance.gates import Gate, settle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
    """Branches and loops are whole; values that are not needed outside stay inside."""
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
    """Nodes that a barrier waits for must not wait together with nodes that wait for the barrier."""
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


Build = Callable[[af.Queue, af.Variable], af.Tensor]


def looping(body: Callable[..., Any], **options: Any) -> af.Tensor:
    """A loop that adds up what its body gives."""
    loop = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + body(i)), (0, 0), name="loop", **options)
    return loop[1]


def and_then(*nodes: Any) -> af.Tensor:
    with af.control_dependencies(nodes):
        return af.constant(0) + 0


WAITING: dict[str, tuple[bool, Build]] = {
    "takes": (True, lambda q, v: looping(lambda i: q.dequeue())),
    "puts": (True, lambda q, v: looping(lambda i: and_then(q.enqueue(i)))),
    "takes and computes": (True, lambda q, v: looping(lambda i: af.cond(i > 1, lambda: i, lambda: -i) * q.dequeue())),
    "puts and takes": (False, lambda q, v: looping(lambda i: and_then(q.enqueue(i)) + q.dequeue())),
    "takes at times": (False, lambda q, v: looping(lambda i: af.cond(i > 1, q.dequeue, lambda: i))),
    "takes and writes": (False, lambda q, v: looping(lambda i: q.dequeue() + v.assign_add(i))),
    "takes in an inner loop": (False, lambda q, v: looping(lambda i: looping(lambda k: q.dequeue()))),
    "takes many": (False, lambda q, v: looping(lambda i: af.sum(q.dequeue_many(10**6)))),
    "asks": (False, lambda q, v: looping(lambda i: ask(q.dequeue()))),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_loop_that_waits_in_turn_is_a_region_by_itself(graph: af.Graph, x: af.Tensor, name: str) -> None:
    """A loop that would hold up other work while it waits is no region, and nothing else joins it."""
    is_region, build = WAITING[name]
    total = build(af.FIFOQueue(10, INT, name="q"), af.Variable(0, name="v"))
    made = regions_made(graph, [-(x * 2), -(total + 1)])
    assert members(made) == ["multiply negative", *["loop"] * is_region, "add negative_1"]


def test_iterations_that_wait_in_a_pool_do_so_at_once(graph: af.Graph) -> None:
    def pooled(x: Any) -> af.Tensor:
        return af.while_loop(lambda i: i < x, lambda i: i + 1, (np.int64(0),), pool=af.Pool(4))[0]

    loop = looping(pooled).node
    assert isinstance(loop, WhileNode) and not waits_in_turn(loop)


@pytest.mark.parametrize(("parallel_iterations", "expected"), [(1, ["loop"]), (32, [])])
def test_unordered_iterations_do_not_wait_in_turn(parallel_iterations: int, expected: list[str]) -> None:
    queue = af.FIFOQueue(10, INT, name="q")
    with af.Graph(effects="unordered") as graph:
        total = looping(lambda i: queue.dequeue(), parallel_iterations=parallel_iterations)
    assert members(regions_made(graph, [total])) == expected


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
    """The consumer holds the loop back, so the loop stays primitive; the rest of its body may be a region."""
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
    """Both requests are sent before either is answered, and the nodes behind one do not wait for the other."""
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
    """Iterations still overlap: the loop stays primitive, with a region before the waiting node and one behind it."""

    def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        question = -(i * 2)
        return i + 1, total + (ask(question) * 3)

    count, _ = af.while_loop(lambda i, _: i < x, body, (0, 0), name="loop")
    made = regions_made(graph, [count, _])
    assert members(made) == []
    assert all_members(made) == ["loop/body/multiply loop/body/negative", "loop/body/multiply_1 loop/body/add_1"]


@pytest.mark.parametrize("most_bits", [regions_module._MOST_BITS, -1], ids=["sets", "counted"])
def test_awaited_inputs_of_the_next_iteration_are_kept_apart(
    graph: af.Graph, x: af.Tensor, monkeypatch: pytest.MonkeyPatch, most_bits: int
) -> None:
    """The next question is asked, and the next iteration begins, while what an answer is good for is computed.

    However crossings are told apart.
    """
    monkeypatch.setattr(regions_module, "_MOST_BITS", most_bits)

    def body(i: af.Tensor, question: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, ...]:
        answer = ask(question)
        return i + 1, (answer + 1) * 2, total + answer * 3 + i * 4

    found = af.while_loop(lambda i, *_: i < x, body, (0, 0, 0), name="loop")
    assert all_members(regions_made(graph, found)) == [
        "loop/body/add_1 loop/body/multiply",
        "loop/body/multiply_1 loop/body/add_2 loop/body/add_3",
    ]


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
    """A constant with a control edge is part of the order, unlike constants without one."""
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
    """Nodes of such loops belong to frames and may be dead, which a function knows nothing of."""
    if_false, if_true = af.raw.switch(x * 2 + 1, x > 0)
    merged, _ = af.raw.merge(-(if_false * 3), if_true + 1)
    made = regions_made(graph, [merged])
    assert all_members(made) == []


def test_compilable_nodes(graph: af.Graph, x: af.Tensor) -> None:
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


async def test_a_cut_line_gives_the_same(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "_LARGEST", 20)
    x = y = af.constant(1) + 0
    for _ in range(100):
        x, y = y, (x + y) % 1_000_003
    async with af.Session(graph) as session:
        got = await session.run([x, y])
    a = b = 1
    for _ in range(100):
        a, b = b, (a + b) % 1_000_003
    assert got == [a, b]


# -- lanes -----------------------------------------------------------------------------------------------------------

Lane = tuple[str, int]
FIRST: Lane = ("cpu:0", 0)
SECOND: Lane = ("cpu:0", 1)
OTHER: Lane = ("cpu:1", 0)
ACCELERATOR: Lane = ("sim:0", 0)


class Laned:
    """A graph whose nodes were given lanes, and its regions."""

    def __init__(self, graph: Graph, fetches: Sequence[Any], lane_of: Callable[[af.Node], Lane]) -> None:
        feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
        self.graph = extract(graph, fetches, feeds).graph
        order_effects(self.graph)
        given = {node: lane_of(node) for node in self.graph.walk()}
        for node, (device, _) in given.items():
            node.device = device
        streams = {node: stream for node, (_, stream) in given.items() if stream}
        self.inputs = {node: list(node.inputs) for node in given}
        self.levels = {level: list(level.nodes) for level in levels(self.graph)}
        self.streams = make_regions(self.graph, streams, {ACCELERATOR[0]})
        assert self.streams.items() >= streams.items()
        af.verify(self.graph)

    def lane(self, node: af.Node) -> Lane:
        assert node.device is not None
        return node.device, self.streams.get(node, 0)

    def regions(self) -> list[tuple[str, Lane]]:
        """Every region: its nodes, and where it runs."""
        found = (node for node in self.graph.walk() if node.op.name == "region")
        return [(" ".join(inner.name for inner in region_of(node).nodes), self.lane(node)) for node in found]


def levels(graph: Graph) -> Iterator[Graph]:
    """The graph, and the bodies that are not inside regions."""
    yield graph
    for node in graph.nodes:
        for body in node.subgraphs:
            yield from levels(body)


def by_name(lanes: Mapping[str, Lane], default: Lane = FIRST) -> Callable[[af.Node], Lane]:
    """Lanes of nodes by the start of their names."""
    return lambda node: next((lane for name, lane in lanes.items() if node.name.startswith(name)), default)


def step(x: Any, name: str) -> af.Tensor:
    """Two nodes, ``name/multiply`` and ``name/negative``."""
    with af.name_scope(name):
        return -(x * 2)


def both(name: str) -> str:
    """The nodes of a `step`, as `Laned.regions` shows them."""
    return f"{name}/multiply {name}/negative"


def test_a_region_keeps_to_one_lane(graph: af.Graph, x: af.Tensor) -> None:
    """Of one device and one stream; its node says which."""
    end = step(step(step(x, "a"), "b"), "c")
    made = Laned(graph, [end], by_name({"a": FIRST, "b": SECOND, "c": OTHER}))
    assert made.regions() == [(both("a"), FIRST), (both("b"), SECOND), (both("c"), OTHER)]
    assert all(node in made.streams for node in made.graph.nodes if node.op.name == "region")


def test_a_value_is_sent_as_soon_as_it_is_there(graph: af.Graph, x: af.Tensor) -> None:
    """Later work of its lane, and parallel work, are not in the same region."""
    first = step(x, "first")
    beside = step(x, "beside")
    sent, kept = step(first, "sent"), step(first, "kept")
    made = Laned(graph, [sent, kept, beside], by_name({"sent": SECOND}))
    assert sorted(made.regions()) == sorted(
        [(both("first"), FIRST), (f"{both('beside')} {both('kept')}", FIRST), (both("sent"), SECOND)]
    )


def test_what_waits_for_one_value_does_not_wait_for_another(graph: af.Graph, x: af.Tensor) -> None:
    one, two = step(x, "one"), step(x, "two")
    ends = [step(one, "behind_one"), step(two, "behind_two"), step(one, "also_behind_one")]
    made = Laned(graph, ends, by_name({"one": FIRST, "two": SECOND}, OTHER))
    assert sorted(made.regions()) == sorted(
        [
            (both("one"), FIRST),
            (both("two"), SECOND),
            (f"{both('behind_one')} {both('also_behind_one')}", OTHER),
            (both("behind_two"), OTHER),
        ]
    )


def test_two_regions_never_wait_for_each_other(graph: af.Graph, x: af.Tensor) -> None:
    """There and back between two lanes, twice."""
    a, b = step(x, "a0"), step(x, "b0")
    for number in (1, 2):
        a, b = step(a + b, f"a{number}"), step(b + a, f"b{number}")
    made = Laned(graph, [a, b], by_name({"a": FIRST, "b": SECOND}))
    check_regions(made)
    assert len(made.regions()) >= 6


def test_an_order_crosses_lanes_as_a_value_does(graph: af.Graph, x: af.Tensor) -> None:
    first, beside = step(x, "first"), step(x, "beside")
    with af.control_dependencies([first]):
        last = step(x, "last")
    made = Laned(graph, [last, beside], by_name({"last": SECOND}))
    assert (both("first"), FIRST) in made.regions()
    assert (both("beside"), FIRST) in made.regions()
    assert [lane for _, lane in made.regions()].count(SECOND) == 1


def test_constants_cross_nothing(graph: af.Graph, x: af.Tensor) -> None:
    """Feeds and constants, wherever they were placed."""
    made = Laned(graph, [step(x + af.constant(5), "a")], by_name({"feed": OTHER, "constant": OTHER}, SECOND))
    assert made.regions() == [(f"add {both('a')}", SECOND)]


def test_a_branch_of_one_lane_joins(graph: af.Graph, x: af.Tensor) -> None:
    """The branch runs where all its nodes do, and gets its predicate sent."""
    picked = af.cond(x > 3, lambda: step(x, "on"), lambda: step(x, "off"), name="pick")
    made = Laned(graph, [step(picked, "end")], by_name({"pick/": SECOND, "end": SECOND}))
    assert made.regions() == [(f"pick {both('end')}", SECOND)]


def test_a_branch_over_two_lanes_does_not_join(graph: af.Graph, x: af.Tensor) -> None:
    picked = af.cond(x > 3, lambda: step(x, "on"), lambda: step(x, "off"), name="pick")
    made = Laned(graph, [step(picked, "end")], by_name({"pick/true": SECOND}))
    assert sorted(made.regions()) == sorted(
        [(both("end"), FIRST), (both("pick/true/on"), SECOND), (both("pick/false/off"), FIRST)]
    )


def pipeline(x: af.Tensor, *stages: str) -> af.Tensor:
    """A loop whose body is a chain of stages, each with a state of its own: ``add`` and ``negative``."""

    def body(i: af.Tensor, *states: af.Tensor) -> Any:
        value, following = i, []
        for state, stage in zip(states, stages, strict=True):
            with af.name_scope(stage):
                value = -(value + state)
            following.append(value)
        return i + 1, *following

    return af.while_loop(lambda i, *_: i < 5, body, (0, *(x for _ in stages)), name="loop")[-1]


def test_a_loop_cut_over_lanes_keeps_its_iterations_apart(graph: af.Graph, x: af.Tensor) -> None:
    """The loop stays primitive, and what each lane does of its body is a region."""
    made = Laned(graph, [pipeline(x, "a", "b", "c", "d")], by_name({"loop/body/c": SECOND, "loop/body/d": SECOND}))
    assert [(nodes.replace("loop/body/", ""), lane) for nodes, lane in made.regions()] == [
        ("a/add a/negative b/add b/negative", FIRST),
        ("c/add c/negative d/add d/negative", SECOND),
    ]
    assert "loop" in [node.name for node in made.graph.nodes]


def test_a_loop_on_one_stream_is_one_region_wherever_that_is(graph: af.Graph, x: af.Tensor) -> None:
    made = Laned(graph, [pipeline(x, "a", "b")], by_name({"loop": SECOND}))
    assert made.regions() == [("loop", SECOND)]


def test_values_of_another_lane_one_iteration_before_are_not_awaited(graph: af.Graph, x: af.Tensor) -> None:
    """A region holds the next iteration back only as far as it has to."""

    def body(i: af.Tensor, a: af.Tensor, b: af.Tensor, c: af.Tensor) -> Any:
        return i + 1, step(a, "a"), step(b, "b"), step(b, "c")

    ends = af.while_loop(lambda i, *_: i < 5, body, (0, x, x, x), name="loop")
    made = Laned(graph, ends, by_name({"loop/body/b": SECOND}))
    assert [(nodes.replace("loop/body/", ""), lane) for nodes, lane in made.regions()] == [
        (f"add {both('a')}", FIRST),
        (both("b"), SECOND),
        (both("c"), FIRST),
    ]


def test_devices_that_launch_have_no_regions_and_are_no_barriers(graph: af.Graph, x: af.Tensor) -> None:
    """Beyond the edges that lead to them and from them."""
    launched = step(x, "launched")
    made = Laned(
        graph,
        [step(launched, "more_launched"), step(step(x, "a"), "b"), step(launched, "behind")],
        by_name({"launched": ACCELERATOR, "more_launched": ACCELERATOR}),
    )
    assert made.regions() == [(f"{both('a')} {both('b')}", FIRST), (both("behind"), FIRST)]


def test_many_launched_nodes_do_not_count(graph: af.Graph, x: af.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "_MOST_BARRIERS", 2)
    launched = x
    for number in range(5):
        launched = step(launched, f"launched{number}")
    made = Laned(graph, [launched, step(x, "a")], by_name({"launched": ACCELERATOR}))
    assert made.regions() == [(both("a"), FIRST)]


def test_crossings_that_are_too_many_for_sets_are_counted(
    graph: af.Graph, x: af.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions get coarser, and remain."""
    ends = [step(step(x, f"a{k}"), f"b{k}") for k in range(3)]
    lanes = by_name({"b": SECOND})
    assert len(Laned(graph, ends, lanes).regions()) == 6
    monkeypatch.setattr(regions_module, "_MOST_BITS", 0)
    made = Laned(graph, ends, lanes)
    check_regions(made)
    assert [lane for _, lane in made.regions()] == [FIRST, SECOND]


LANES = (FIRST, SECOND, OTHER, ACCELERATOR)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int | None]]:
    """Nodes: kind, two operands as distances back, and a node to wait for in the same way."""
    kinds = st.sampled_from(["add"] * 8 + ["ask", "cond", "while", "plain"])
    distance = st.integers(1, 8)
    return draw(st.lists(st.tuples(kinds, distance, distance, st.none() | distance), min_size=2, max_size=30))


def write(program: Iterable[tuple[str, int, int, int | None]], values: list[af.Tensor]) -> list[af.Tensor]:
    for kind, left, right, before in program:
        a, b = values[-min(left, len(values))], values[-min(right, len(values))]
        awaited = [] if before is None else [values[-min(before, len(values))]]
        with af.control_dependencies([tensor for tensor in awaited if tensor.node.op.name != "parameter"]):
            values.append(operation(kind, a, b))
    return values


def operation(kind: str, a: af.Tensor, b: af.Tensor) -> af.Tensor:
    if kind == "cond":
        return af.cond(a > 3, lambda: -(a * b), lambda: -(a + b))
    if kind == "while":
        return af.while_loop(lambda i, *_: i < 2, lambda i, s, t: (i + 1, -(s * b), t + s), (0, a, b))[1]
    return {"add": lambda: a + b, "ask": lambda: ask(a + b), "plain": lambda: plain(a + b)}[kind]()


def check_regions(made: Laned) -> None:
    """No cycle, one lane a region, every node still there once, and nothing held up."""
    for level, before in made.levels.items():
        if level not in levels(made.graph):
            continue
        position = {node: index for index, node in enumerate(level.nodes)}
        for node in level.nodes:
            assert all(position[source] < position[node] for source in sources_of(node))
        inside = [inner for node in level.nodes if node.op.name == "region" for inner in region_of(node).nodes]
        outside = [node for node in level.nodes if node.op.name != "region"]
        assert sorted(node.name for node in (*inside, *outside)) == sorted(node.name for node in before)
        for node in level.nodes:
            if node.op.name == "region":
                check_region(made, node)


def sources_of(node: af.Node) -> list[af.Node]:
    return [*(tensor.node for tensor in node.inputs), *node.control_inputs]


def check_region(made: Laned, node: af.Node) -> None:
    region, lane = region_of(node), made.lane(node)
    assert lane[0] != ACCELERATOR[0]
    for inner in walk(region.nodes):
        if not inner.subgraphs and inner.op.name not in ("parameter", "constant"):
            assert made.lane(inner) == lane


def walk(nodes: Iterable[af.Node]) -> Iterator[af.Node]:
    for node in nodes:
        yield node
        for body in node.subgraphs:
            yield from walk(body.nodes)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(program=programs(), chance=st.randoms(use_true_random=False), counted=st.booleans(), in_loop=st.booleans())
def test_any_lanes_give_sound_regions(
    program: list[tuple[str, int, int, int | None]], chance: Any, counted: bool, in_loop: bool
) -> None:
    """Random graphs, with random lanes for all their nodes."""
    with af.Graph() as graph, pytest.MonkeyPatch.context() as patch:
        if counted:
            patch.setattr(regions_module, "_MOST_BITS", 0)
        x = af.placeholder("int64", (), name="x")
        if in_loop:
            fetches = list(
                af.while_loop(
                    lambda i, *_: i < 3, lambda i, *states: (i + 1, *write(program, [*states])[-3:]), (0, x, x, x)
                )
            )
        else:
            fetches = write(program, [x])[1:]
        made = Laned(graph, fetches, lambda node: chance.choice(LANES))
    check_regions(made)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(program=programs(), chance=st.randoms(use_true_random=False))
def test_no_value_is_held_up(program: list[tuple[str, int, int, int | None]], chance: Any) -> None:
    """All of a region is needed for each value that it sends to another lane, and needs each that it gets from one."""
    with af.Graph() as graph:
        fetches = write(
            [("add", left, right, None) for _, left, right, _ in program], [af.placeholder("int64", (), name="x")]
        )[1:]
        made = Laned(graph, fetches, lambda node: chance.choice((FIRST, SECOND, OTHER)))
    nodes = made.levels[made.graph]
    region_at = {
        inner: node for node in made.graph.nodes if node.op.name == "region" for inner in region_of(node).nodes
    }
    needs: dict[af.Node, set[af.Node]] = {}
    consumers: dict[tuple[af.Tensor, Lane], set[af.Node]] = {}
    for node in nodes:
        needs[node] = {node}.union(*(needs[tensor.node] for tensor in made.inputs[node]))
        for tensor in made.inputs[node]:
            if tensor.node.op.name not in ("feed", "constant") and node.op.name != "fetch":
                consumers.setdefault((tensor, made.lane(node)), set()).add(node)
    for (tensor, lane), found in consumers.items():
        if made.lane(tensor.node) != lane:
            for member in members_beside(tensor.node, region_at):
                assert member in needs[tensor.node]
            for consumer in found:
                for member in members_beside(consumer, region_at):
                    assert needs[member] & found


def members_beside(node: af.Node, region_at: Mapping[af.Node, af.Node]) -> tuple[af.Node, ...]:
    """The nodes of the region that it is in."""
    return region_of(region_at[node]).nodes if node in region_at else ()
