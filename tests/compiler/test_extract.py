"""`extract`: what a fetch needs and nothing else, as a copy."""

from __future__ import annotations

import pytest

import asyncflow as af
from asyncflow.compiler.program.extract import extract
from tests.compiler.stages import extracted, golden


def test_only_what_a_fetch_needs_is_kept(graph: af.Graph) -> None:
    x, _ = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="unused")
    needed = x * x
    af.negative(x)
    with af.control_dependencies([needed]):
        last = af.square(x)
    assert extracted(graph, [last]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %feed_1 = feed() {index=1, spec=int64[]} : int64[]
        %multiply = multiply(%feed, %feed) : int64[]
        %square = square(%feed) after(%multiply) : int64[]
        %fetch = fetch(%square) : ()
    """)


def test_a_fed_tensor_cuts_off_its_sources(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    middle = x * 2
    with graph:
        last = middle + 1
    copied = extract(graph, [last], [middle]).graph
    af.verify(copied)
    assert [node.name for node in copied.nodes] == ["feed", "constant_1", "add", "fetch"]


def test_an_unfed_placeholder_is_refused(graph: af.Graph) -> None:
    x = af.placeholder("float32", (2, None), name="x")
    unused = af.placeholder("int64", ())
    with pytest.raises(af.FeedError, match=r"needed but not fed.*\n  x:0 float32\[2,\?\], built at .*test_extract.py"):
        extract(graph, [x * 2], [unused])


@pytest.mark.parametrize("name", ["graph", "trees"])
def test_how_to_feed_an_input_graph_is_said(graph: af.Graph, name: str) -> None:
    trees = [af.InputGraph.placeholder(name=name) for _ in range(2)][-1]
    with pytest.raises(
        af.FeedError, match=r"; feed the placeholders of an af.InputGraph with \*\*trees.feeds\(data\)\n  "
    ):
        extract(graph, [af.sum(trees.offsets), af.sum(trees.children)], [])


def test_unused_results_of_a_branch_are_dropped(graph: af.Graph) -> None:
    pred, x, y = (
        af.placeholder(dtype, (), name=name) for dtype, name in (("bool", "p"), ("int64", "x"), ("int64", "y"))
    )
    first, _ = af.cond(pred, lambda: (x + 1, y * 2), lambda: (x, y), name="pick")
    assert extracted(graph, [first]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %feed_1 = feed() {index=1, spec=int64[]} : int64[]
        %feed_2 = feed() {index=2, spec=int64[]} : int64[]
        %pick = cond(%feed, %feed_1) : (int64[],) {
          true_branch "pick/true" (%pick/true/capture_x) {
            %pick/true/capture_x = parameter() {spec=int64[]} : int64[]
            %pick/true/constant = constant() {value=array(int64[], 1)} : int64[]
            %pick/true/add = add(%pick/true/capture_x, %pick/true/constant) : int64[]
            return %pick/true/add
          }
          false_branch "pick/false" (%pick/false/capture_x) {
            %pick/false/capture_x = parameter() {spec=int64[]} : int64[]
            return %pick/false/capture_x
          }
        }
        %fetch = fetch(%pick) : ()
    """)


def test_unused_variables_of_a_loop_are_dropped(graph: af.Graph) -> None:
    n, x = af.placeholder("int64", (), name="n"), af.placeholder("int64", (), name="x")
    _, total, _ = af.while_loop(lambda i, s, t: i < n, lambda i, s, t: (i + 1, s + i, t * x), (0, x, x), name="loop")
    assert extracted(graph, [total]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %feed_1 = feed() {index=1, spec=int64[]} : int64[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %loop = while(%constant, %feed_1, %feed) {n_vars=2} : (int64[], int64[]) {
          cond "loop/cond" (%loop/cond/var, %loop/cond/var_1, %loop/cond/capture_n) {
            %loop/cond/var = parameter() {spec=int64[]} : int64[]
            %loop/cond/var_1 = parameter() {spec=int64[]} : int64[]
            %loop/cond/capture_n = parameter() {spec=int64[]} : int64[]
            %loop/cond/less = less(%loop/cond/var, %loop/cond/capture_n) : bool[]
            return %loop/cond/less
          }
          body "loop/body" (%loop/body/var, %loop/body/var_1, %loop/body/capture_n) {
            %loop/body/var = parameter() {spec=int64[]} : int64[]
            %loop/body/var_1 = parameter() {spec=int64[]} : int64[]
            %loop/body/capture_n = parameter() {spec=int64[]} : int64[]
            %loop/body/constant = constant() {value=array(int64[], 1)} : int64[]
            %loop/body/add = add(%loop/body/var, %loop/body/constant) : int64[]
            %loop/body/add_1 = add(%loop/body/var_1, %loop/body/var) : int64[]
            return %loop/body/add, %loop/body/add_1
          }
        }
        %fetch = fetch(%loop:1) : ()
    """)


def test_variables_that_others_need_are_kept(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    results = af.while_loop(lambda a, b, c, d: a < 9, lambda a, b, c, d: (b, c, a + 1, d), (x, x, x, x), name="loop")
    (loop,) = (node for node in extract(graph, [results[0]], [x]).graph.nodes if node.op.name == "while")
    assert loop.attrs["n_vars"] == 3


def test_effects_inside_branches_are_kept_if_effects_are_ordered(graph: af.Graph) -> None:
    pred, counter = af.placeholder("bool", (), name="pred"), af.Variable(0, name="counter")
    picked = af.cond(pred, lambda: (1, counter.assign_add(1)), lambda: (2, counter.read()), name="pick")
    assert extracted(graph, [picked[0]]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %pick = cond(%feed) : (int64[],) {
          true_branch "pick/true" () {
            %pick/true/constant = constant() {value=array(int64[], 1)} : int64[]
            %pick/true/counter/assign_add = variable_assign_add(%pick/true/constant) {variable=@counter} : int64[]
            %pick/true/constant_1 = constant() {value=array(int64[], 1)} : int64[]
            return %pick/true/constant_1
          }
          false_branch "pick/false" () {
            %pick/false/constant = constant() {value=array(int64[], 2)} : int64[]
            return %pick/false/constant
          }
        }
        %fetch = fetch(%pick) : ()
    """)


def test_effects_inside_branches_are_pruned_if_effects_are_unordered() -> None:
    with af.Graph(effects="unordered") as graph:
        pred, counter = af.placeholder("bool", (), name="pred"), af.Variable(0, name="counter")
        picked = af.cond(pred, lambda: (1, counter.assign_add(1)), lambda: (2, counter.read()), name="pick")
    assert "variable" not in extracted(graph, [picked[0]])


@pytest.mark.parametrize("all_effects", [False, True])
def test_a_function_keeps_unfetched_effects(graph: af.Graph, all_effects: bool) -> None:
    x, counter = af.placeholder("int64", (), name="x"), af.Variable(0, name="counter")
    counter.assign(x)
    counter.read()
    text = extracted(graph, [x], all_effects=all_effects)
    assert ("variable_assign" in text) == all_effects and "variable_read" not in text


def test_a_fetched_variable_is_read_after_all_else(graph: af.Graph) -> None:
    x, counter = af.placeholder("int64", (), name="x"), af.Variable(0, name="counter")
    written = counter.assign(x)
    assert extracted(graph, [counter, written]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %counter/assign = variable_assign(%feed) {variable=@counter} : int64[]
        %counter/read = variable_read() {variable=@counter} : int64[]
        %fetch = fetch(%counter/read) : ()
        %fetch_1 = fetch(%counter/assign) : ()
    """)


def test_a_loop_written_by_hand_is_copied_with_its_back_edge(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    i, _ = af.raw.merge(af.raw.enter(x, "loop"))
    done, again = af.raw.switch(i, af.raw.loop_cond(i < af.raw.enter(x, "loop", constant=True)))
    af.raw.add_back_edge(i, af.raw.next_iteration(af.negative(again)))
    assert extracted(graph, [af.raw.exit(done)]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %enter = enter(%feed) {constant=false, frame="loop"} : int64[]
        %merge = merge(%enter, %next_iteration) : (int64[], int32[])
        %enter_1 = enter(%feed) {constant=true, frame="loop"} : int64[]
        %less = less(%merge, %enter_1) : bool[]
        %loop_cond = loop_cond(%less) : bool[]
        %switch = switch(%merge, %loop_cond) : (int64[], int64[])
        %negative = negative(%switch:1) : int64[]
        %next_iteration = next_iteration(%negative) : int64[]
        %exit = exit(%switch) : int64[]
        %fetch = fetch(%exit) : ()
    """)


def test_streamed_tensors_get_an_emit_in_their_body(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    inner: list[af.Tensor] = []

    def body(i: af.Tensor) -> af.Tensor:
        inner.append(i * i)
        return i + 1

    af.while_loop(lambda i: i < x, body, (0,), name="loop")
    assert extracted(graph, [], streamed=inner) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %loop = while(%constant, %feed) {n_vars=1} : (int64[],) {
          cond "loop/cond" (%loop/cond/var, %loop/cond/capture_x) {
            %loop/cond/var = parameter() {spec=int64[]} : int64[]
            %loop/cond/capture_x = parameter() {spec=int64[]} : int64[]
            %loop/cond/less = less(%loop/cond/var, %loop/cond/capture_x) : bool[]
            return %loop/cond/less
          }
          body "loop/body" (%loop/body/var, %loop/body/capture_x) {
            %loop/body/var = parameter() {spec=int64[]} : int64[]
            %loop/body/capture_x = parameter() {spec=int64[]} : int64[]
            %loop/body/multiply = multiply(%loop/body/var, %loop/body/var) : int64[]
            %loop/body/constant = constant() {value=array(int64[], 1)} : int64[]
            %loop/body/add = add(%loop/body/var, %loop/body/constant) : int64[]
            %loop/body/emit = emit(%loop/body/multiply) : ()
            return %loop/body/add
          }
        }
    """)
