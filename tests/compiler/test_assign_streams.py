"""`assign_streams`: which compute stream each node of a device gets."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

import asyncflow as af
from asyncflow.compiler.placement.assign_streams import assign_streams
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.order_effects import order_effects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node

DEVICE = "cpu:0"
TWO = {DEVICE: 2}
SIZE = 256


class Assigned:
    """A graph after placement, and the streams that its nodes were given."""

    def __init__(
        self,
        graph: Graph,
        fetches: Sequence[Any],
        counts: Mapping[str, int] = TWO,
        *,
        costs: Mapping[str, float] | None = None,
        place: Callable[[Node], str] = lambda node: DEVICE,
    ) -> None:
        feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
        self.graph = extract(graph, fetches, feeds).graph
        order_effects(self.graph)
        for node in self.graph.walk():
            node.device = place(node)
        self.streams = assign_streams(self.graph, counts, dict.fromkeys(("cpu:0", "cpu:1"), 50_000.0), costs)

    def __getitem__(self, name: str) -> int:
        return self.streams.get(self.graph.node(name), 0)

    def of_op(self, op: str) -> list[int]:
        """The streams of all nodes of that op, in the order they were built."""
        return [self.streams.get(node, 0) for node in self.graph.walk() if node.op.name == op]

    def within(self, part: str) -> set[int]:
        """The streams of the nodes with that in their names."""
        found = {
            self.streams.get(node, 0)
            for node in self.graph.walk()
            if part in node.name and node.op.name not in ("parameter", "constant")
        }
        assert found, f"no node is named like {part}"
        return found


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return matrix("x")


def matrix(name: str) -> af.Tensor:
    """A product of two of them takes 3.4 ms, their sum 0.07 ms."""
    return af.placeholder("float32", (SIZE, SIZE), name=name)


def product(x: af.Tensor, name: str, times: int = 1) -> af.Tensor:
    """Return the square, `times` times; the nodes are called ``name/matmul``, ``name/matmul_1``, ..."""
    with af.name_scope(name):
        for _ in range(times):
            x = x @ x
    return x


# -- nothing to do ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [{}, {DEVICE: 1}, {"cpu:1": 4}])
def test_devices_with_one_stream_cost_nothing(graph: af.Graph, x: af.Tensor, counts: dict[str, int]) -> None:
    assert not Assigned(graph, [product(x, "a"), product(x, "b")], counts).streams


def test_light_work_stays_together(graph: af.Graph) -> None:
    """Handing it over would cost more than running it."""
    x = af.placeholder("float32", (8, 8), name="x")
    assert not Assigned(graph, [product(x, "a", 20), product(x, "b", 20)]).streams


def test_a_chain_has_nothing_to_overlap(graph: af.Graph, x: af.Tensor) -> None:
    assert not Assigned(graph, [product(x, "a", 10)]).streams


# -- straight lines --------------------------------------------------------------------------------------------------


def test_independent_chains_go_to_streams_of_their_own(graph: af.Graph, x: af.Tensor) -> None:
    made = Assigned(graph, [product(x, "a", 5), product(x, "b", 5)])
    assert sorted([made.within("a/"), made.within("b/")], key=min) == [{0}, {1}]


def test_the_longest_way_to_the_end_begins_first(graph: af.Graph, x: af.Tensor) -> None:
    """Five units behind one another and four beside them take five, though the four were built first."""
    short = [product(x, f"short{k}") for k in range(4)]
    made = Assigned(graph, [*short, product(x, "long", 5)])
    (of_long,) = made.within("long/")
    assert made.within("short") == {1 - of_long}


def test_light_nodes_follow_their_inputs(graph: af.Graph, x: af.Tensor) -> None:
    ends = [product(product(x, f"{name}1")[:2, :2] + 1, f"{name}2") for name in "ab"]
    heavy = [product(x, f"{name}3") for name in "cd"]
    made = Assigned(graph, [*ends, *heavy])
    for name in "ab":
        source = made.graph.node(f"{name}1/matmul")
        followers = [node for node in made.graph.nodes if node.inputs and node.inputs[0].node is source]
        assert followers and all(made.streams.get(node, 0) == made[f"{name}1/matmul"] for node in followers)
        assert made[f"{name}2/matmul"] == made[f"{name}1/matmul"]
    assert made["a1/matmul"] != made["b1/matmul"]


def test_light_nodes_at_the_beginning_go_with_what_uses_them(graph: af.Graph, x: af.Tensor) -> None:
    small = af.placeholder("float32", (), name="small")
    light = [af.sin(small), af.cos(small)]
    ends = [product(x + value, f"heavy_{name}") for name, value in zip("ab", light, strict=True)]
    made = Assigned(graph, ends)
    assert made["heavy_a/matmul"] != made["heavy_b/matmul"]
    assert [made["sin"], made["cos"]] == [made["heavy_a/matmul"], made["heavy_b/matmul"]]


def test_a_fetch_goes_with_its_value(graph: af.Graph, x: af.Tensor) -> None:
    made = Assigned(graph, [product(x, "a"), product(x, "b")])
    assert sorted(made.of_op("fetch")) == [0, 1]
    assert all(
        made.streams.get(node, 0) == made.streams.get(node.inputs[0].node, 0)
        for node in made.graph.nodes
        if node.op.name == "fetch"
    )


def test_measured_costs_go_before_estimates(graph: af.Graph) -> None:
    """Small kernels with long measured times are spread, and large ones with short times are not."""
    x = af.placeholder("float32", (2, 2), name="x")
    fetches = [product(x, "a"), product(x, "b")]
    assert not Assigned(graph, fetches).streams
    made = Assigned(graph, fetches, costs={"a/matmul": 1e6, "b/matmul": 1e6})
    assert {made["a/matmul"], made["b/matmul"]} == {0, 1}


def test_short_measured_times_are_believed(graph: af.Graph, x: af.Tensor) -> None:
    fetches = [product(x, "a"), product(x, "b")]
    assert not Assigned(graph, fetches, costs={"a/matmul": 1e3, "b/matmul": 1e3}).streams


def test_sizes_that_are_not_known_may_be_large(graph: af.Graph) -> None:
    x = af.placeholder("float32", (None, None), name="x")
    made = Assigned(graph, [product(x, "a"), product(x, "b")])
    assert {made["a/matmul"], made["b/matmul"]} == {0, 1}


def test_other_devices_keep_to_their_stream(graph: af.Graph, x: af.Tensor) -> None:
    fetches = [product(x, name) for name in ("one0", "two0", "two1")]
    made = Assigned(graph, fetches, {"cpu:1": 2}, place=lambda node: "cpu:1" if "two" in node.name else "cpu:0")
    assert {made["two0/matmul"], made["two1/matmul"]} == {0, 1}
    assert made["one0/matmul"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_list_scheduling_is_close_to_the_best(graph: af.Graph, seed: int) -> None:
    """Compare with every assignment of a small random graph; a stream takes ready kernels first."""
    chance = random.Random(seed)
    x = af.placeholder("float32", (2, 2), name="x")
    costs: dict[str, float] = {}
    values = [x]
    for _ in range(9):
        one, other = chance.choice(values), chance.choice(values)
        values.append(af.matmul(one, other))
        costs[values[-1].node.name] = chance.choice([2e5, 1e6, 3e6])
    made = Assigned(graph, values[1:], costs=costs)

    inputs = {name: [tensor.node.name for tensor in made.graph.node(name).inputs] for name in costs}
    sources = {name: [source for source in inputs[name] if source in costs] for name in costs}

    def makespan(streams: Mapping[str, int]) -> float:
        ends: dict[str, float] = {}
        free = [0.0, 0.0]

        def start(name: str) -> float:
            stream = streams[name]
            crossing = (ends[source] + 50_000 * (streams[source] != stream) for source in sources[name])
            return max(free[stream], *crossing, 0.0)

        while len(ends) < len(costs):
            ready = [name for name in costs if name not in ends and all(source in ends for source in sources[name])]
            chosen = min(ready, key=start)
            ends[chosen] = free[streams[chosen]] = start(chosen) + costs[chosen]
        return max(ends.values())

    every = (dict(zip(costs, (0, *streams), strict=True)) for streams in itertools.product((0, 1), repeat=8))
    assert makespan({name: made[name] for name in costs}) <= 1.3 * min(map(makespan, every))


# -- loops whose iterations overlap ----------------------------------------------------------------------------------


def lstm_stack(layers: int, hidden: int = 512, batch: int = 64, **options: Any) -> tuple[af.Tensor, ...]:
    """A stack of LSTM layers over a sequence; layer k's nodes are named so."""
    xs = af.placeholder("float32", (None, batch, hidden), name="xs")
    steps = af.placeholder("int32", (), name="steps")
    weights = [
        [af.placeholder("float32", (hidden, 4 * hidden), name=f"w{kind}{layer}") for kind in "xh"]
        for layer in range(layers)
    ]
    zeros = af.placeholder("float32", (batch, hidden), name="zeros")
    inputs = af.TensorArray("float32", size=steps, element_shape=(batch, hidden)).unstack(xs)
    outputs = af.TensorArray("float32", size=steps, element_shape=(batch, hidden))

    def cell(layer: int, x: af.Tensor, h: af.Tensor, c: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.name_scope(f"layer{layer}"):
            w_x, w_h = weights[layer]
            gates = x @ w_x + h @ w_h
            into, forget, candidate, out = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
            c = af.sigmoid(forget) * c + af.sigmoid(into) * af.tanh(candidate)
            return af.sigmoid(out) * af.tanh(c), c

    def body(t: af.Tensor, states: Any, outputs: af.TensorArray) -> Any:
        x, following = inputs.read(t), []
        for layer, (h, c) in enumerate(states):
            x, c = cell(layer, x, h, c)
            following.append((x, c))
        return t + 1, following, outputs.write(t, x)

    start = (af.constant(0, "int32"), [(zeros, zeros) for _ in range(layers)], outputs)
    _, states, written = af.while_loop(lambda t, *_: t < steps, body, start, name="loop", **options)
    return written.stack(), *(tensor for state in states for tensor in state)


@pytest.mark.parametrize(
    ("count", "groups"),
    [(2, [0, 0, 0, 0, 1, 1, 1, 1]), (4, [0, 0, 1, 1, 2, 2, 3, 3]), (8, list(range(8)))],
)
def test_a_stack_of_layers_becomes_a_pipeline(graph: af.Graph, count: int, groups: list[int]) -> None:
    made = Assigned(graph, lstm_stack(8), {DEVICE: count})
    assert [made.within(f"layer{layer}/") for layer in range(8)] == [{group} for group in groups]


def test_counter_and_predicate_run_ahead_on_the_first_stream(graph: af.Graph) -> None:
    made = Assigned(graph, lstm_stack(8))
    counter = [node.name for node in made.graph.node("loop").attrs["body"].nodes if node.op.name == "add"][-1]
    assert [made["loop"], made["loop/cond/less"], made[counter]] == [0, 0, 0]
    assert made.of_op("tensor_array_read") == [0]
    assert made.of_op("tensor_array_write") == [1], "it goes with the layer that gives the value"


def test_one_layer_is_cut_where_it_does_not_wait_for_itself(graph: af.Graph) -> None:
    """The product with the input of a step is done ahead of the product with the state, which is recurrent."""
    made = Assigned(graph, lstm_stack(1))
    assert sorted(made.streams.get(node, 0) for node in made.graph.walk() if node.op.name == "matmul") == [0, 1]


def test_a_loop_that_waits_for_itself_alone_is_left_whole(graph: af.Graph, x: af.Tensor) -> None:
    _, y = af.while_loop(lambda i, _: i < 9, lambda i, y: (i + 1, product(y, "p", 4)), (0, x), name="loop")
    assert not Assigned(graph, [y]).streams


def test_a_wide_loop_that_waits_for_itself_is_list_scheduled(graph: af.Graph, x: af.Tensor) -> None:
    """Iterations cannot overlap, but the two halves of each can."""
    _, y = af.while_loop(
        lambda i, _: i < 9, lambda i, y: (i + 1, product(y, "a", 4) + product(y, "b", 4)), (0, x), name="loop"
    )
    made = Assigned(graph, [y])
    assert sorted([made.within("a/"), made.within("b/")], key=min) == [{0}, {1}]


def test_a_loop_on_its_own_results_does_not_overlap(graph: af.Graph, x: af.Tensor) -> None:
    """With a predicate that needs the last product, no iteration begins before the one before it has ended."""

    def body(i: af.Tensor, y: af.Tensor, z: af.Tensor) -> Any:
        y = product(y, "a", 2)
        return i + 1, y, product(z + y, "b", 2)

    counted = af.while_loop(lambda i, *_: i < 9, body, (0, x, x), name="counted")
    assert Assigned(graph, counted).streams
    asked = af.while_loop(lambda i, y, z: af.sum(z) < 9, body, (0, x, x), name="asked")
    assert not Assigned(graph, asked).streams


def test_the_predicate_runs_ahead_whatever_uses_its_counter(graph: af.Graph, x: af.Tensor) -> None:
    """Though only the second stage does."""

    def body(i: af.Tensor, y: af.Tensor, z: af.Tensor) -> Any:
        y = product(y, "a", 4)
        return i + 1, y, product(z + y, "b", 4) * af.astype(i, "float32")

    made = Assigned(graph, af.while_loop(lambda i, *_: i < 9, body, (0, x, x), name="loop"))
    assert (made.within("a/"), made.within("b/")) == ({0}, {1})
    assert (made["loop/cond/less"], made["loop/body/add"]) == (0, 0)


def test_iterations_one_at_a_time_are_list_scheduled(graph: af.Graph, x: af.Tensor) -> None:
    """A layer waits for the one below it; its product with its state does not, and runs beside that one."""
    made = Assigned(graph, lstm_stack(8, parallel_iterations=1))
    streams = made.of_op("matmul")
    below, above = streams[:8], streams[8:]
    assert 0 in below and 1 in above, "products of upper layers need not wait for lower ones"
    assert sorted(streams) == [0] * 8 + [1] * 8


def test_independent_chains_inside_a_body_are_balanced(graph: af.Graph, x: af.Tensor) -> None:
    """Each whole, by weight: the two heavy ones, which stand side by side, do not go together."""

    def body(i: af.Tensor, *states: af.Tensor) -> Any:
        return i + 1, *(product(state, f"s{k}", 4 if k < 2 else 2) for k, state in enumerate(states))

    made = Assigned(graph, af.while_loop(lambda i, *_: i < 9, body, (0, x, x, x, x), name="loop"))
    streams = [made.within(f"s{k}/") for k in range(4)]
    assert sorted(streams[:2], key=min) == sorted(streams[2:], key=min) == [{0}, {1}]


def test_a_body_with_less_to_do_than_a_handover_costs_stays_whole(graph: af.Graph) -> None:
    assert not Assigned(graph, lstm_stack(8, hidden=8, batch=2)).streams


def test_edges_lead_forward_in_a_pipeline(graph: af.Graph) -> None:
    """From the first stage to the last, those between iterations included: none ever waits for a later one."""
    made = Assigned(graph, lstm_stack(8), {DEVICE: 3})
    body = made.graph.node("loop").attrs["body"]
    given = {inner.node: result.node for inner, result in zip(body.inputs, body.results, strict=False)}
    assert set(made.streams.values()) == {1, 2}
    for node in body.nodes:
        for tensor in node.inputs:
            source = given.get(tensor.node, tensor.node)
            if source.op.name != "parameter" and node.op.name != "parameter":
                assert made.streams.get(source, 0) <= made.streams.get(node, 0)


def test_a_loop_over_two_devices_is_cut_on_each(graph: af.Graph) -> None:
    def place(node: Node) -> str:
        return "cpu:1" if any(f"layer{layer}/" in node.name for layer in range(4, 8)) else "cpu:0"

    made = Assigned(graph, lstm_stack(8), {"cpu:0": 2, "cpu:1": 2}, place=place)
    assert [made.within(f"layer{layer}/") for layer in range(8)] == [{0}, {0}, {1}, {1}] * 2


# -- branches and loops as nodes -------------------------------------------------------------------------------------


def loop_of(x: af.Tensor, name: str) -> af.Tensor:
    """Two products, a recurrent one and another, so that the loop can be cut."""
    return af.while_loop(
        lambda i, *_: i < 9,
        lambda i, y, z: (i + 1, product(y, f"{name}_y"), z + product(y, f"{name}_z")),
        (0, x, x),
        name=name,
    )[2]


def test_loops_beside_one_another_stay_whole(graph: af.Graph, x: af.Tensor) -> None:
    made = Assigned(graph, [loop_of(x, "one"), loop_of(x, "other")])
    streams = made.within("one"), made.within("other")
    assert sorted(streams, key=min) == [{0}, {1}]


def test_loops_behind_one_another_are_cut_each(graph: af.Graph, x: af.Tensor) -> None:
    """As a loop and its gradient are."""
    made = Assigned(graph, [loop_of(loop_of(x, "one"), "other")])
    assert (made["one"], made["other"]) == (0, 0)
    assert made.within("one/") == made.within("other/") == {0, 1}


def test_a_loop_that_cannot_be_cut_leaves_the_other_stream_to_the_rest(graph: af.Graph, x: af.Tensor) -> None:
    _, y = af.while_loop(lambda i, _: i < 9, lambda i, y: (i + 1, product(y, "p")), (0, x), name="loop")
    made = Assigned(graph, [y, product(x, "beside", 3)])
    (beside,) = made.within("beside")
    assert made.within("loop") == {1 - beside}


def test_an_inner_loop_that_does_all_the_work_is_cut(graph: af.Graph, x: af.Tensor) -> None:
    _, y = af.while_loop(lambda i, _: i < 9, lambda i, y: (i + 1, loop_of(y, "inner")), (0, x), name="outer")
    made = Assigned(graph, [y])
    assert made.within("inner/") == {0, 1}
    assert made["outer/body/inner"] == 0


def test_inner_loops_that_share_the_work_stay_whole(graph: af.Graph, x: af.Tensor) -> None:
    def body(i: af.Tensor, y: af.Tensor, z: af.Tensor) -> Any:
        return i + 1, loop_of(y, "first"), loop_of(z, "second")

    made = Assigned(graph, af.while_loop(lambda i, *_: i < 9, body, (0, x, x), name="outer"))
    assert sorted([made.within("first"), made.within("second")], key=min) == [{0}, {1}]


def test_branches_that_do_all_the_work_are_divided(graph: af.Graph, x: af.Tensor) -> None:
    pred = af.placeholder("bool", (), name="pred")
    picked = af.cond(pred, lambda: product(x, "a", 3) + product(x, "b", 3), lambda: x, name="pick")
    made = Assigned(graph, [picked])
    assert made["pick"] == 0
    assert sorted([made.within("a/"), made.within("b/")], key=min) == [{0}, {1}]


def test_control_flow_written_by_hand_stays_on_one_stream(graph: af.Graph, x: af.Tensor) -> None:
    if_false, if_true = af.raw.switch(x, af.placeholder("bool", (), name="pred"))
    merged, _ = af.raw.merge(product(if_false, "a", 3), product(if_true, "b", 3))
    assert not Assigned(graph, [merged]).streams


def test_the_same_graph_gets_the_same_streams(graph: af.Graph) -> None:
    fetches = lstm_stack(8)
    first, second = ({n.name: s for n, s in Assigned(graph, fetches).streams.items()} for _ in range(2))
    assert first == second and list(first) == list(second)
