"""Each rule of `verify`, broken once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import apply, constant, group, identity, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import NodeId, Tensor
from asyncflow.graph.values.spec import spec
from asyncflow.graph.verify import verify
from tests.graph.programs import MERGE, add, branching, counting_loop, handwritten_loop

if TYPE_CHECKING:
    from collections.abc import Callable


def chain() -> Graph:
    """a -> b -> c -> d, all identities but the first."""
    with Graph() as graph:
        x = placeholder("float32", (2,), name="a")
        for name in "bcd":
            x = identity(x, name=name)
    return graph


@pytest.mark.parametrize("program", [Graph, chain, counting_loop, branching, handwritten_loop])
def test_sound_graphs_pass(program: Callable[[], Graph]) -> None:
    verify(program())


def _foreign_input(graph: Graph) -> None:
    graph.node("c").inputs[0] = chain().tensor("b")


def _forgotten_output(graph: Graph) -> None:
    graph.node("c").inputs[0] = Tensor(graph.node("b"), 0, spec("float32", (2,)))


def _later_input(graph: Graph) -> None:
    with graph:
        late = placeholder("float32", (2,), name="late")
    graph.node("c").inputs[0] = late


def _later_control(graph: Graph) -> None:
    graph.node("b").control_inputs.append(group(graph.tensor("a"), name="late"))


def _foreign_control(graph: Graph) -> None:
    graph.node("b").control_inputs.append(chain().node("a"))


def _cycle(graph: Graph) -> None:
    graph.node("b").inputs[0] = graph.tensor("d")


def _control_cycle(graph: Graph) -> None:
    graph.node("b").control_inputs.append(graph.node("c"))


def _self_cycle(graph: Graph) -> None:
    graph.node("b").inputs[0] = graph.tensor("b")


def _wrong_dtype(graph: Graph) -> None:
    graph.node("c").outputs[0].spec = spec("int8", (2,))


def _wrong_shape(graph: Graph) -> None:
    graph.node("c").outputs[0].spec = spec("float32", (3,))


def _tuple_for_single(graph: Graph) -> None:
    graph.node("c").single = False


def _wrong_arity(graph: Graph) -> None:
    graph.node("c").inputs.append(graph.tensor("a"))


def _two_of_one_name(graph: Graph) -> None:
    graph.node("c").name = "b"


def _renamed(graph: Graph) -> None:
    node = graph.node("c")
    node.name = "e"
    graph._by_name["e"] = graph.node("b")


def _two_of_one_id(graph: Graph) -> None:
    graph.node("c").id = NodeId(1)


def _id_past_version(graph: Graph) -> None:
    graph.node("d").id = NodeId(99)


def _wrong_graph(graph: Graph) -> None:
    graph.node("c").graph = Graph()


CHAIN_FAULTS: list[tuple[Callable[[Graph], None], str]] = [
    (_foreign_input, r"node 'c' \(identity\): input 0, b:0, is not in the same graph"),
    (_forgotten_output, "input 0, b:0, is not an output of the node it names"),
    (_later_input, "node 'c' .*: input 0, late:0, comes later"),
    (_later_control, "it waits for itself|control input late, comes later"),
    (_foreign_control, "control input a, is not in the same graph"),
    (_cycle, "node 'b' .*: it waits for itself: b -> c -> d -> b; a cycle has to pass from a next_iteration"),
    (_control_cycle, "it waits for itself: b -> c -> b;"),
    (_self_cycle, "it waits for itself: b -> b;"),
    (_wrong_dtype, r"its outputs are int8\[2\], but its op makes float32\[2\] of float32\[2\]"),
    (_wrong_shape, r"its outputs are float32\[3\], but its op makes float32\[2\]"),
    (_tuple_for_single, r"its outputs are \(float32\[2\]\), but its op makes float32\[2\]"),
    (_wrong_arity, "its op does not take .*TypeError"),
    (_two_of_one_name, "another node has its name"),
    (_renamed, "the root graph finds another node under its name"),
    (_two_of_one_id, "its id 1 is that of node 'b' too"),
    (_id_past_version, "its id 99 is not below the graph's version 4"),
    (_wrong_graph, "it is listed in .* but says that it belongs to"),
]


@pytest.mark.parametrize(("damage", "message"), CHAIN_FAULTS, ids=[damage.__name__ for damage, _ in CHAIN_FAULTS])
def test_broken_nodes_are_found(damage: Callable[[Graph], None], message: str) -> None:
    graph = chain()
    damage(graph)
    with pytest.raises(GraphError, match=message):
        verify(graph)


def test_a_fault_shows_its_place_and_neighbours() -> None:
    graph = chain()
    _wrong_dtype(graph)
    with pytest.raises(GraphError) as caught:
        verify(graph)
    assert caught.value.reason == (
        "node 'c' (identity): its outputs are int8[2], but its op makes float32[2] of float32[2]\n"
        f"  built at {graph.node('c').location}\n"
        "  it stands here:\n"
        "    %a = placeholder() {spec=float32[2]} : float32[2]\n"
        "    %b = identity(%a) : float32[2]\n"
        "  > %c = identity(%b) : int8[2]\n"
        "    %d = identity(%c) : float32[2]"
    )
    assert "test_verify.py:" in str(caught.value)


def test_a_back_edge_needs_a_next_iteration() -> None:
    graph = handwritten_loop()
    graph.node("merge").inputs[1] = graph.tensor("sum")
    with pytest.raises(GraphError, match="it waits for itself: merge -> sum -> merge"):
        verify(graph)


def test_a_next_iteration_only_leads_back_to_a_merge() -> None:
    with Graph() as graph:
        x = placeholder("int32", ())
        first = identity(x, name="first")
        first.node.inputs[0] = apply(MERGE, first)[0]
    with pytest.raises(GraphError, match="it waits for itself"):
        verify(graph)


def test_faults_inside_bodies_are_found() -> None:
    graph = counting_loop()
    inner = graph.node("loop/body/test_add")
    inner.inputs[1] = graph.tensor("step")
    with pytest.raises(GraphError, match=r"node 'loop/body/test_add' .*: input 1, step:0, is not in the same"):
        verify(graph)


def test_long_chains_are_checked_in_linear_time_without_recursion() -> None:
    with Graph() as graph:
        x = first = placeholder("float32", (), name="first")
        for _ in range(5_000):
            x = identity(x)
    verify(graph)
    start = identity(first).node
    del start
    graph.nodes[1].inputs[0] = x
    with pytest.raises(GraphError, match="it waits for itself: identity -> identity_1 -> "):
        verify(graph)


# -- branches and loops ------------------------------------------------------------------------------------------


def _outside(graph: Graph, dtype: str = "int32") -> Any:
    with graph:
        return constant(0, dtype, name="outside")


LOOP_FAULTS: list[tuple[str, Callable[[Any, Any, Any], object], str]] = [
    ("parent", lambda g, c, b: setattr(b, "parent", Graph()), "its body 'loop/body' does not belong to the node's"),
    (
        "no body",
        lambda g, c, b: g.node("loop").attrs.update(body=3),
        "its attr 'body' must be a body of nodes; it is 3",
    ),
    ("n_vars", lambda g, c, b: g.node("loop").attrs.update(n_vars=9), "n_vars is 9"),
    (
        "too few inputs",
        lambda g, c, b: g.node("loop").inputs.pop(),
        "(captures limit:0|captures step:0|differ in number)",
    ),
    (
        "body input",
        lambda g, c, b: b.inputs.__setitem__(0, b.results[0]),
        "input loop/body/test_add:0 of its body is not",
    ),
    (
        "result outside",
        lambda g, c, b: b.results.__setitem__(0, g.tensor("start")),
        "result start:0 of its body is not",
    ),
    ("capture", lambda g, c, b: b.captures.update({g.tensor("start"): b.inputs[2]}), "captures start:0 as"),
    ("no predicate", lambda g, c, b: c.results.clear(), "'loop/cond' gives 0 results; a loop's predicate gives one"),
    ("predicate dtype", lambda g, c, b: c.results.__setitem__(0, c.inputs[0]), r"must be a bool scalar, bool\[\]"),
    (
        "results",
        lambda g, c, b: b.results.clear(),
        "loop variables and results of 'loop/body' differ in number: 1 and 0",
    ),
    (
        "control",
        lambda g, c, b: b.outer_controls.update({b.nodes[0]: None}),
        "its body waits for 'loop/body/i', which is not in the graph",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in LOOP_FAULTS], ids=[case[0] for case in LOOP_FAULTS]
)
def test_broken_loops_are_found(damage: Callable[[Any, Any, Any], object], message: str) -> None:
    graph = counting_loop()
    damage(graph, *graph.node("loop").subgraphs)
    with pytest.raises(GraphError, match=f"node 'loop' .*{message}"):
        verify(graph)


def test_loop_results_of_another_dtype_are_found() -> None:
    graph = counting_loop()
    body = graph.node("loop").subgraphs[1]
    body.closed = False
    with body:
        body.results[0] = constant(1.5, name="half")
    with pytest.raises(
        GraphError, match=r"results of 'loop/body' differ at 0: .*int32\[\] and loop/body/half:0 float64"
    ):
        verify(graph)


BRANCH_FAULTS: list[tuple[str, Callable[[Any, Any, Any], object], str]] = [
    (
        "no inputs",
        lambda g, t, f: (g.node("pick").inputs.clear(), t.captures.clear(), f.captures.clear()),
        "it has no inputs",
    ),
    (
        "predicate",
        lambda g, t, f: g.node("pick").inputs.__setitem__(0, g.tensor("x")),
        r"its predicate is x:0 float32\[\?\]; it must be a bool scalar",
    ),
    ("results", lambda g, t, f: f.results.clear(), "results of 'pick/false' and outputs differ in number: 0 and 1"),
    (
        "inputs",
        lambda g, t, f: (t.inputs.clear(), t.captures.clear()),
        "inputs after the predicate and inputs of 'pick/true' differ in number: 1 and 0",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in BRANCH_FAULTS], ids=[case[0] for case in BRANCH_FAULTS]
)
def test_broken_branches_are_found(damage: Callable[[Any, Any, Any], object], message: str) -> None:
    graph = branching()
    damage(graph, *graph.node("pick").subgraphs)
    with pytest.raises(GraphError, match=f"node 'pick' .*{message}"):
        verify(graph)


def test_inputs_of_another_dtype_than_the_body_takes_are_found() -> None:
    graph = counting_loop()
    graph.node("loop").inputs[0] = graph.tensor("limit")
    verify(graph)
    graph.tensor("start").spec = spec("int8", ())
    graph.node("loop").inputs[0] = graph.tensor("start")
    with pytest.raises(GraphError, match="node 'start'"):
        verify(graph)
    with Graph() as sums:
        add(placeholder("int32", (2,)), placeholder("int32", (2,)), name="sum")
    sums.node("sum").inputs[1].spec = spec("int32", (3,))
    sums.node("placeholder_1").attrs["spec"] = spec("int32", (3,))
    with pytest.raises(GraphError, match=r"node 'sum' .*its op does not take .*ShapeError"):
        verify(sums)


@pytest.mark.parametrize("is_on_a_branch", [True, False])
def test_a_branch_that_is_never_taken_may_contradict_known_values(is_on_a_branch: bool) -> None:
    """Once lowered, a branch is nodes like others: the known shape of a value that it uses may not suit it."""
    with af.Graph() as graph:
        rows, two = constant(np.zeros(0, np.int64)), constant(np.ones(2, np.int64))
        if is_on_a_branch:
            rows, _ = af.raw.switch(rows, placeholder("bool", ()))
        graph.add_node(af.add(two, two).node.op, (rows, two), {}, two.spec)
    if is_on_a_branch:
        verify(graph)
    else:
        with pytest.raises(GraphError, match="does not take"):
            verify(graph)
