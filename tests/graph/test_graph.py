"""Graphs: names, scopes, control edges, constraints, captures, leaks, look-ups, versions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import asyncflow as af
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import add_control_input, apply, constant, group, identity, placeholder
from asyncflow.graph.building.scopes import colocate_with, control_dependencies, device, name_scope
from asyncflow.graph.graph import Graph, Subgraph, current_graph, encloses, has_side_effect, node_effects
from asyncflow.graph.op import Access, Op, find_op, register
from tests.graph.programs import COND, OPS, branching, counting_loop


@pytest.fixture
def graph() -> Any:
    with Graph() as graph:
        yield graph


# -- names -------------------------------------------------------------------------------------------------------


def test_names_count_up(graph: Graph) -> None:
    names = [constant(0, name=name).node.name for name in (None, None, "a", "a", "a_1", "a")]
    assert names == ["constant", "constant_1", "a", "a_1", "a_1_1", "a_2"]


def test_scopes_prefix_nest_and_count_up(graph: Graph) -> None:
    with name_scope("layer") as outer:
        with name_scope("inner") as inner:
            first = constant(0, name="x")
        second = constant(0, name="x")
    with name_scope("layer"):
        third = constant(0, name="x")
    assert (outer, inner) == ("layer/", "layer/inner/")
    assert [x.node.name for x in (first, second, third)] == ["layer/inner/x", "layer/x", "layer_1/x"]
    assert constant(0, name="x").node.name == "x"


@pytest.mark.parametrize("name", ["", "a:b"])
def test_bad_scope_names_are_refused(graph: Graph, name: str) -> None:
    with pytest.raises(GraphError, match="a scope's name is not empty and has no ':' in it"), name_scope(name):
        constant(0)


def test_scopes_end_when_their_block_fails(graph: Graph) -> None:
    with pytest.raises(KeyError), name_scope("s"), device("cpu"), control_dependencies([constant(0)]):
        raise KeyError
    after = constant(1, name="after").node
    assert (after.name, after.device, after.control_inputs) == ("after", None, [])


def test_a_hundred_thousand_equal_names_stay_linear(graph: Graph) -> None:
    for _ in range(20_000):
        graph.unique_name("same")
    assert graph.unique_name("same") == "same_20000"


# -- looking up --------------------------------------------------------------------------------------------------


def test_look_up_by_name(graph: Graph) -> None:
    a, b = apply(OPS["test_split"], constant(0), parts=2, name="s/x")
    assert graph.node("s/x") is a.node
    assert graph.tensor("s/x") is a
    assert graph.tensor("s/x:1") is b
    assert b.name == "s/x:1"


def test_look_up_reaches_into_bodies() -> None:
    loop = counting_loop()
    assert loop.tensor("loop/body/test_add").graph is loop.node("loop").attrs["body"]


def test_failed_look_ups_suggest(graph: Graph) -> None:
    constant(0, name="layer/weights")
    with pytest.raises(GraphError, match=r"no node is named 'layer/weight'; did you mean 'layer/weights'\?"):
        graph.node("layer/weight")
    with pytest.raises(GraphError, match=r"no node is named 'zzz'\n"):
        graph.node("zzz")


@pytest.mark.parametrize("name", ["c:1", "c:-1", "c:x", "c:²", "c:0:0"])
def test_bad_output_numbers_are_refused(graph: Graph, name: str) -> None:
    constant(0, name="c")
    with pytest.raises(GraphError, match=r"no tensor is named .*: node 'c' has 1 outputs"):
        graph.tensor(name)


# -- scopes ------------------------------------------------------------------------------------------------------


def test_device_scopes(graph: Graph) -> None:
    with device("cuda:1"):
        a = constant(0)
        with device(None):
            b = constant(0)
    assert (a.node.device, b.node.device, constant(0).node.device) == ("cuda:1", None, None)


def test_colocation(graph: Graph) -> None:
    a = constant(0, name="a")
    with colocate_with(a), name_scope("s"):
        b = constant(0)
    assert (b.node.colocated_with, constant(0).node.colocated_with) == ("a", None)


def test_control_dependencies_nest_and_lift(graph: Graph) -> None:
    a, b = constant(0, name="a"), group(name="b")
    with control_dependencies([a]):
        with control_dependencies([b, a]):
            both = constant(1).node
            with control_dependencies(None):
                none = constant(1).node
        one = constant(1).node
    assert both.control_inputs == [a.node, b]
    assert none.control_inputs == []
    assert one.control_inputs == [a.node]


def test_control_dependencies_refuse_other_things(graph: Graph) -> None:
    with pytest.raises(GraphError, match="control_dependencies: 3 is neither a tensor, a node nor a variable"):
        with control_dependencies([3]):  # type: ignore[list-item]
            constant(0)


def test_control_inputs_are_added_once(graph: Graph) -> None:
    a = constant(0).node
    last = group(a, a)
    add_control_input(last, a)
    assert last.control_inputs == [a]


# -- other graphs, captures, leaks -------------------------------------------------------------------------------


def test_tensors_of_other_graphs_are_refused_with_their_line() -> None:
    with Graph():
        foreign = constant(0, name="foreign")
    with Graph():
        with pytest.raises(
            GraphError, match=r"<Tensor foreign:0 int64\[\]> belongs to another graph.*\n  built at .*:\d"
        ):
            identity(foreign)
        with pytest.raises(GraphError, match="belongs to another graph"), control_dependencies([foreign]):
            constant(0)


def test_captures_are_shared_and_reach_through_nested_bodies(graph: Graph) -> None:
    x = constant(1.5, name="x")
    outer = Subgraph(graph, "outer")
    inner = Subgraph(outer, "inner")
    with inner:
        first, second = identity(x), identity(x)
    assert first.node.inputs[0] is second.node.inputs[0]
    captured = first.node.inputs[0]
    middle = outer.captures[x]
    assert inner.captures == {middle: captured}
    assert (captured.node.op.name, captured.spec) == ("parameter", x.spec)
    assert (outer.inputs, inner.inputs) == ([middle], [captured])
    assert captured.node.name == "inner/capture_x"


def test_captures_take_no_controls(graph: Graph) -> None:
    x = constant(0)
    body = Subgraph(graph, "body")
    with body:
        first = constant(0)
        with control_dependencies([first]):
            used = identity(x).node
    assert used.inputs[0].node.control_inputs == []
    assert used.control_inputs == [first.node]


def test_control_inputs_from_outside_move_to_the_body(graph: Graph) -> None:
    before = group(name="before")
    outer = Subgraph(graph, "outer")
    inner = Subgraph(outer, "inner")
    with inner, control_dependencies([before]):
        node = constant(0).node
    assert node.control_inputs == []
    assert list(inner.outer_controls) == []
    assert list(outer.outer_controls) == [before]


def test_leaks_out_of_a_body_are_refused(graph: Graph) -> None:
    body, sibling = Subgraph(graph, "loop/body"), Subgraph(graph, "cond/true")
    with body:
        inside = constant(0, name="inside")
    message = "loop/body/inside:0 .*was built inside loop/body and is used in {}, .*return it from the function"
    with pytest.raises(GraphError, match=message.format("this graph")):
        identity(inside)
    with sibling, pytest.raises(GraphError, match=message.format("cond/true")):
        identity(inside)
    with pytest.raises(GraphError, match="was built inside loop/body"), control_dependencies([inside]):
        constant(0)


def test_finished_bodies_are_closed(graph: Graph) -> None:
    body = counting_loop().node("loop").attrs["body"]
    with pytest.raises(GraphError, match="loop/body is finished: nodes can only be added while its function"), body:
        constant(0)


def test_encloses(graph: Graph) -> None:
    body = Subgraph(graph, "body")
    inner = Subgraph(body, "inner")
    assert encloses(graph, inner) and encloses(body, inner) and encloses(inner, inner)
    assert not encloses(inner, body)
    assert not encloses(Graph(), body)


def test_bodies_inherit_constraints(graph: Graph) -> None:
    with device("cuda:0"):
        body = Subgraph(graph, "body")
    with body:
        assert constant(0).node.device == "cuda:0"


# -- growing, walking, effects -----------------------------------------------------------------------------------


def test_versions_count_nodes_of_bodies_too() -> None:
    loop = counting_loop()
    assert loop.version == len(list(loop.walk())) == 12
    with loop:
        constant(0)
    assert loop.version == 13


def test_walk_goes_outer_before_inner() -> None:
    assert [node.name for node in counting_loop().walk()][:4] == ["start", "limit", "step", "loop"]


def test_effects_of_bodies_are_effects_of_their_node() -> None:
    graph = branching()
    pick = graph.node("pick")
    assert node_effects(pick) == ()
    write = Op(name="w", infer=lambda: (), effects=lambda node: (("v", Access.READ), ("v", Access.WRITE)))
    body = pick.subgraphs[0]
    body.closed = False
    body.add_node(write, (), {}, ())
    assert pick.op is COND
    assert node_effects(pick) == (("v", Access.WRITE),)
    assert has_side_effect(pick)
    assert not has_side_effect(graph.node("x"))


def test_an_unknown_effects_mode_is_refused() -> None:
    with pytest.raises(GraphError, match="effects must be 'ordered' or 'unordered'"):
        Graph(effects="some")  # type: ignore[arg-type]


def test_the_current_graph_nests_and_ends() -> None:
    assert current_graph() is None
    with Graph() as outer:
        with Graph() as inner:
            assert current_graph() is inner
        assert current_graph() is outer
    assert current_graph() is None
    with pytest.raises(GraphError, match=r"no graph is being built here; write `with af.Graph"):
        constant(0)


async def test_tasks_build_their_own_graphs() -> None:
    async def build(name: str) -> list[str]:
        with Graph() as graph:
            for _ in range(3):
                constant(0, name=name)
                await asyncio.sleep(0)
        return [node.name for node in graph.nodes]

    first, second = await asyncio.gather(build("a"), build("b"))
    assert (first, second) == (["a", "a_1", "a_2"], ["b", "b_1", "b_2"])


def test_nodes_remember_the_users_line(graph: Graph) -> None:
    node = constant(0).node
    assert (node.location.file, node.location.function) == (__file__, "test_nodes_remember_the_users_line")


# -- tensors as Python values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (bool, "has no truth value while the graph is built; use af.cond or af.while_loop"),
        (len, r"len\(\) of .* is not known to Python"),
        (int, "has no value until a run computes it"),
        (float, r"needs its value, .*; in the graph use af.sqrt for math.sqrt"),
        (complex, "has no value until a run computes it"),
        (range, r"needs its value, .*; in the graph use af.while_loop or af.arange for range\(\)"),
        (list, "cannot iterate over .*: its length is not known"),
        (lambda x: placeholder("int8", (1, 2, 3)).T, "needs rank 2"),
    ],
)
def test_tensors_refuse_to_be_python_values(graph: Graph, use: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        use(placeholder("int64", (None,)))


def test_tensors_are_keys_by_identity(graph: Graph) -> None:
    a, b = constant(0), constant(0)
    assert {a: 1, b: 2}[a] == 1


# -- ops ---------------------------------------------------------------------------------------------------------


def test_op_names_are_unique() -> None:
    with pytest.raises(GraphError, match="an op named 'identity' is already registered"):
        register(Op(name="identity", infer=lambda x: x))
    with pytest.raises(GraphError, match="no op is named 'xyzzy'; is the module that registers it imported"):
        find_op("xyzzy")


def test_completion_shows_what_programs_use() -> None:
    graph = af.Graph()
    shown = {name for name in dir(graph) if not name.startswith("_")}
    assert {"named", "nodes", "tensor"} <= shown and {"adopt", "take_back", "home"}.isdisjoint(shown)
    assert all(hasattr(graph, name) for name in shown)
    session = dir(af.Session(graph))
    assert {"run", "stream", "plan"} <= set(session) and "run_call" not in session
