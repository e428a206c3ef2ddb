"""`lower`: branches and loops as primitives, in one flat graph."""
# ruff: noqa: E501 - a node is one line

from __future__ import annotations

import asyncflow as af
from tests.compiler.stages import golden, lowered


def test_a_graph_without_control_flow_stays_as_it_is(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    assert lowered(graph, [x * 2]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %constant = constant() {value=array(int64[], 2)} : int64[]
        %multiply = multiply(%feed, %constant) : int64[]
        %fetch = fetch(%multiply) : ()
    """)


def test_a_cond_is_a_switch_per_capture_and_a_merge_per_result(graph: af.Graph) -> None:
    pred, x, y = (
        af.placeholder("bool", (), name="pred"),
        af.placeholder("int64", (), name="x"),
        af.placeholder("int64", (), name="y"),
    )
    picked = af.cond(pred, lambda: (x * y, x), lambda: (x + y, y), name="pick")
    assert lowered(graph, list(picked)) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %feed_1 = feed() {index=1, spec=int64[]} : int64[]
        %feed_2 = feed() {index=2, spec=int64[]} : int64[]
        %pick/switch = switch(%feed_1, %feed) : (int64[], int64[])
        %pick/switch_1 = switch(%feed_2, %feed) : (int64[], int64[])
        %pick/true/multiply = multiply(%pick/switch:1, %pick/switch_1:1) : int64[]
        %pick/false/add = add(%pick/switch, %pick/switch_1) : int64[]
        %pick/merge = merge(%pick/false/add, %pick/true/multiply) : (int64[], int32[])
        %pick/merge_1 = merge(%pick/switch_1, %pick/switch:1) : (int64[], int32[])
        %fetch = fetch(%pick/merge) : ()
        %fetch_1 = fetch(%pick/merge_1) : ()
    """)


def test_what_nothing_else_holds_back_waits_for_its_branch(graph: af.Graph) -> None:
    """Constants cost nothing and need not wait; values made of them, and nodes without inputs, do wait."""
    pred, v = af.placeholder("bool", (), name="pred"), af.Variable(0, name="v")
    picked = af.cond(pred, v.read, lambda: af.negative(af.constant(7)), name="pick")
    assert lowered(graph, [picked]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %pick/switch = switch(%feed, %feed) : (bool[], bool[])
        %pick/switch/pivot = identity(%pick/switch:1) : bool[]
        %pick/true/v/read = variable_read() {variable=@v} after(%pick/switch/pivot) : int64[]
        %pick/false/constant = constant() {value=array(int64[], 7)} : int64[]
        %pick/switch/pivot_1 = identity(%pick/switch) : bool[]
        %pick/false/negative = negative(%pick/false/constant) after(%pick/switch/pivot_1) : int64[]
        %pick/merge = merge(%pick/false/negative, %pick/true/v/read) : (int64[], int32[])
        %fetch = fetch(%pick/merge) : ()
    """)


def test_a_constant_result_becomes_one_of_its_branch(graph: af.Graph) -> None:
    pred = af.placeholder("bool", (), name="pred")
    assert lowered(graph, [af.cond(pred, lambda: 1, lambda: 0, name="pick")]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %pick/true/constant = constant() {value=array(int64[], 1)} : int64[]
        %pick/false/constant = constant() {value=array(int64[], 0)} : int64[]
        %pick/switch = switch(%feed, %feed) : (bool[], bool[])
        %pick/switch/pivot = identity(%pick/switch) : bool[]
        %pick/result = identity(%pick/false/constant) after(%pick/switch/pivot) : int64[]
        %pick/switch/pivot_1 = identity(%pick/switch:1) : bool[]
        %pick/result_1 = identity(%pick/true/constant) after(%pick/switch/pivot_1) : int64[]
        %pick/merge = merge(%pick/result, %pick/result_1) : (int64[], int32[])
        %fetch = fetch(%pick/merge) : ()
    """)


def test_a_cond_in_a_branch(graph: af.Graph) -> None:
    a, b, x = (
        af.placeholder("bool", (), name="a"),
        af.placeholder("bool", (), name="b"),
        af.placeholder("int64", (), name="x"),
    )
    picked = af.cond(a, lambda: af.cond(b, lambda: x + x, lambda: x, name="inner"), lambda: -x, name="outer")
    assert lowered(graph, [picked]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %feed_1 = feed() {index=1, spec=bool[]} : bool[]
        %feed_2 = feed() {index=2, spec=int64[]} : int64[]
        %outer/switch = switch(%feed_1, %feed) : (bool[], bool[])
        %outer/switch_1 = switch(%feed_2, %feed) : (int64[], int64[])
        %outer/true/inner/switch = switch(%outer/switch_1:1, %outer/switch:1) : (int64[], int64[])
        %outer/true/inner/true/add = add(%outer/true/inner/switch:1, %outer/true/inner/switch:1) : int64[]
        %outer/true/inner/merge = merge(%outer/true/inner/switch, %outer/true/inner/true/add) : (int64[], int32[])
        %outer/false/negative = negative(%outer/switch_1) : int64[]
        %outer/merge = merge(%outer/false/negative, %outer/true/inner/merge) : (int64[], int32[])
        %fetch = fetch(%outer/merge) : ()
    """)


def test_a_loop(graph: af.Graph) -> None:
    """Enter, Merge, Switch, NextIteration and Exit per variable, one LoopCond, a constant Enter per capture.

    Constants belong to every frame, so they enter none.
    """
    n = af.placeholder("int64", (), name="n")
    results = af.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (0, n), name="loop", parallel_iterations=7)
    assert lowered(graph, list(results)) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %loop/enter = enter(%constant) {constant=false, frame="loop", loop="loop", parallel_iterations=7} : int64[]
        %loop/merge = merge(%loop/enter, %loop/next_iteration) : (int64[], int32[])
        %loop/enter_1 = enter(%feed) {constant=false, frame="loop", loop="loop", parallel_iterations=7} : int64[]
        %loop/merge_1 = merge(%loop/enter_1, %loop/next_iteration_1) : (int64[], int32[])
        %loop/enter_2 = enter(%feed) {constant=true, frame="loop", loop="loop", parallel_iterations=7} : int64[]
        %loop/cond/less = less(%loop/merge, %loop/enter_2) : bool[]
        %loop/loop_cond = loop_cond(%loop/cond/less) : bool[]
        %loop/switch = switch(%loop/merge, %loop/loop_cond) : (int64[], int64[])
        %loop/switch_1 = switch(%loop/merge_1, %loop/loop_cond) : (int64[], int64[])
        %loop/body/constant = constant() {value=array(int64[], 1)} : int64[]
        %loop/body/add = add(%loop/switch:1, %loop/body/constant) : int64[]
        %loop/body/add_1 = add(%loop/switch_1:1, %loop/switch:1) : int64[]
        %loop/next_iteration = next_iteration(%loop/body/add) : int64[]
        %loop/next_iteration_1 = next_iteration(%loop/body/add_1) : int64[]
        %loop/exit = exit(%loop/switch) : int64[]
        %loop/exit_1 = exit(%loop/switch_1) : int64[]
        %fetch = fetch(%loop/exit) : ()
        %fetch_1 = fetch(%loop/exit_1) : ()
    """)


def test_only_results_in_use_get_an_exit(graph: af.Graph) -> None:
    n = af.placeholder("int64", (), name="n")
    _, total = af.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s + i), (0, n), name="loop")
    assert lowered(graph, [total]).count(" = exit(") == 1


def test_a_loop_in_a_branch_enters_only_if_the_branch_is_taken(graph: af.Graph) -> None:
    """Also with nothing but constants: its Enters wait for the pivot of the branch."""
    pred = af.placeholder("bool", (), name="pred")

    def loop() -> af.Tensor:
        return af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,), name="loop")[0]

    assert lowered(graph, [af.cond(pred, loop, lambda: 0, name="pick")]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %pick/true/constant = constant() {value=array(int64[], 0)} : int64[]
        %pick/switch = switch(%feed, %feed) : (bool[], bool[])
        %pick/switch/pivot = identity(%pick/switch:1) : bool[]
        %pick/true/loop/enter = enter(%pick/true/constant) {constant=false, frame="pick/true/loop", loop="pick/true/loop"} after(%pick/switch/pivot) : int64[]
        %pick/true/loop/merge = merge(%pick/true/loop/enter, %pick/true/loop/next_iteration) : (int64[], int32[])
        %pick/true/loop/cond/constant = constant() {value=array(int64[], 3)} : int64[]
        %pick/true/loop/cond/less = less(%pick/true/loop/merge, %pick/true/loop/cond/constant) : bool[]
        %pick/true/loop/loop_cond = loop_cond(%pick/true/loop/cond/less) : bool[]
        %pick/true/loop/switch = switch(%pick/true/loop/merge, %pick/true/loop/loop_cond) : (int64[], int64[])
        %pick/true/loop/body/constant = constant() {value=array(int64[], 1)} : int64[]
        %pick/true/loop/body/add = add(%pick/true/loop/switch:1, %pick/true/loop/body/constant) : int64[]
        %pick/true/loop/next_iteration = next_iteration(%pick/true/loop/body/add) : int64[]
        %pick/true/loop/exit = exit(%pick/true/loop/switch) : int64[]
        %pick/false/constant = constant() {value=array(int64[], 0)} : int64[]
        %pick/switch/pivot_1 = identity(%pick/switch) : bool[]
        %pick/result = identity(%pick/false/constant) after(%pick/switch/pivot_1) : int64[]
        %pick/merge = merge(%pick/result, %pick/true/loop/exit) : (int64[], int32[])
        %fetch = fetch(%pick/merge) : ()
    """)


def test_a_loop_in_a_loop(graph: af.Graph) -> None:
    n = af.placeholder("int64", (), name="n")

    def body(i: af.Tensor) -> af.Tensor:
        return af.while_loop(lambda j: j < n, lambda j: j + i, (1,), name="inner")[0]

    assert lowered(graph, list(af.while_loop(lambda i: i < n, body, (0,), name="outer"))) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %outer/enter = enter(%constant) {constant=false, frame="outer", loop="outer"} : int64[]
        %outer/merge = merge(%outer/enter, %outer/next_iteration) : (int64[], int32[])
        %outer/enter_1 = enter(%feed) {constant=true, frame="outer", loop="outer"} : int64[]
        %outer/cond/less = less(%outer/merge, %outer/enter_1) : bool[]
        %outer/loop_cond = loop_cond(%outer/cond/less) : bool[]
        %outer/switch = switch(%outer/merge, %outer/loop_cond) : (int64[], int64[])
        %outer/body/constant = constant() {value=array(int64[], 1)} : int64[]
        %outer/switch/pivot = identity(%outer/switch:1) : int64[]
        %outer/body/inner/enter = enter(%outer/body/constant) {constant=false, frame="outer/body/inner", loop="outer/body/inner"} after(%outer/switch/pivot) : int64[]
        %outer/body/inner/merge = merge(%outer/body/inner/enter, %outer/body/inner/next_iteration) : (int64[], int32[])
        %outer/body/inner/enter_1 = enter(%outer/enter_1) {constant=true, frame="outer/body/inner", loop="outer/body/inner"} after(%outer/switch/pivot) : int64[]
        %outer/body/inner/cond/less = less(%outer/body/inner/merge, %outer/body/inner/enter_1) : bool[]
        %outer/body/inner/loop_cond = loop_cond(%outer/body/inner/cond/less) : bool[]
        %outer/body/inner/switch = switch(%outer/body/inner/merge, %outer/body/inner/loop_cond) : (int64[], int64[])
        %outer/body/inner/enter_2 = enter(%outer/switch:1) {constant=true, frame="outer/body/inner", loop="outer/body/inner"} : int64[]
        %outer/body/inner/body/add = add(%outer/body/inner/switch:1, %outer/body/inner/enter_2) : int64[]
        %outer/body/inner/next_iteration = next_iteration(%outer/body/inner/body/add) : int64[]
        %outer/body/inner/exit = exit(%outer/body/inner/switch) : int64[]
        %outer/next_iteration = next_iteration(%outer/body/inner/exit) : int64[]
        %outer/exit = exit(%outer/switch) : int64[]
        %fetch = fetch(%outer/exit) : ()
    """)


def test_a_control_edge_to_a_cond_holds_back_its_predicate(graph: af.Graph) -> None:
    pred, x = af.placeholder("bool", (), name="pred"), af.placeholder("int64", (), name="x")
    first = af.square(x)
    with af.control_dependencies([first]):
        picked = af.cond(pred, lambda: x, lambda: -x, name="pick")
    with af.control_dependencies([picked]):
        last = af.negative(x)
    assert lowered(graph, [last]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %feed_1 = feed() {index=1, spec=int64[]} : int64[]
        %square = square(%feed_1) : int64[]
        %pick/pred = identity(%feed) after(%square) : bool[]
        %pick/switch = switch(%feed_1, %pick/pred) : (int64[], int64[])
        %pick/false/negative = negative(%pick/switch) : int64[]
        %pick/merge = merge(%pick/false/negative, %pick/switch:1) : (int64[], int32[])
        %identity = identity(%pick/merge) : int64[]
        %negative = negative(%feed_1) after(%identity) : int64[]
        %fetch = fetch(%negative) : ()
    """)


def test_a_control_edge_to_a_loop_holds_back_its_entry(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    first = af.square(x)
    with af.control_dependencies([first]):
        loop = af.while_loop(lambda i: i < 9, lambda i: i * i, (x,), name="loop")[0]
    with af.control_dependencies([loop]):
        last = af.negative(x)
    assert lowered(graph, [last]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %square = square(%feed) : int64[]
        %loop/enter = enter(%feed) {constant=false, frame="loop", loop="loop"} after(%square) : int64[]
        %loop/merge = merge(%loop/enter, %loop/next_iteration) : (int64[], int32[])
        %loop/cond/constant = constant() {value=array(int64[], 9)} : int64[]
        %loop/cond/less = less(%loop/merge, %loop/cond/constant) : bool[]
        %loop/loop_cond = loop_cond(%loop/cond/less) : bool[]
        %loop/switch = switch(%loop/merge, %loop/loop_cond) : (int64[], int64[])
        %loop/body/multiply = multiply(%loop/switch:1, %loop/switch:1) : int64[]
        %loop/next_iteration = next_iteration(%loop/body/multiply) : int64[]
        %loop/exit = exit(%loop/switch) : int64[]
        %identity = identity(%loop/exit) : int64[]
        %negative = negative(%feed) after(%identity) : int64[]
        %fetch = fetch(%negative) : ()
    """)


def test_a_control_edge_from_a_loop_variable_waits_for_the_body(graph: af.Graph) -> None:
    x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")

    def body(i: af.Tensor) -> af.Tensor:
        with af.control_dependencies([i]):
            return v.read()

    assert lowered(graph, list(af.while_loop(lambda i: i < 9, body, (x,), name="loop"))) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %loop/enter = enter(%feed) {constant=false, frame="loop", loop="loop"} : int64[]
        %loop/merge = merge(%loop/enter, %loop/next_iteration) : (int64[], int32[])
        %loop/cond/constant = constant() {value=array(int64[], 9)} : int64[]
        %loop/cond/less = less(%loop/merge, %loop/cond/constant) : bool[]
        %loop/loop_cond = loop_cond(%loop/cond/less) : bool[]
        %loop/switch = switch(%loop/merge, %loop/loop_cond) : (int64[], int64[])
        %loop/switch/pivot = identity(%loop/switch:1) : int64[]
        %loop/body/v/read = variable_read() {variable=@v} after(%loop/switch/pivot) : int64[]
        %loop/next_iteration = next_iteration(%loop/body/v/read) : int64[]
        %loop/exit = exit(%loop/switch) : int64[]
        %fetch = fetch(%loop/exit) : ()
    """)
