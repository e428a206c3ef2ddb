"""`order_effects`: nodes that touch one resource wait for one another as they were written."""

from __future__ import annotations

import asyncflow as af
from tests.compiler.stages import golden, ordered


def test_reads_wait_for_the_last_write_and_writes_for_the_reads_since(graph: af.Graph) -> None:
    x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")
    fetches = [v.read(), v.read(), v.assign(x), v.read(), v.assign_add(x), v.read()]
    assert ordered(graph, fetches) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %v/read = variable_read() {variable=@v} : int64[]
        %v/read_1 = variable_read() {variable=@v} : int64[]
        %v/assign = variable_assign(%feed) {variable=@v} after(%v/read, %v/read_1) : int64[]
        %v/read_2 = variable_read() {variable=@v} after(%v/assign) : int64[]
        %v/assign_add = variable_assign_add(%feed) {variable=@v} after(%v/assign, %v/read_2) : int64[]
        %v/read_3 = variable_read() {variable=@v} after(%v/assign_add) : int64[]
        %fetch = fetch(%v/read) : ()
        %fetch_1 = fetch(%v/read_1) : ()
        %fetch_2 = fetch(%v/assign) : ()
        %fetch_3 = fetch(%v/read_2) : ()
        %fetch_4 = fetch(%v/assign_add) : ()
        %fetch_5 = fetch(%v/read_3) : ()
    """)


def test_resources_are_ordered_apart(graph: af.Graph) -> None:
    x, v, w = af.placeholder("int64", (), name="x"), af.Variable(0, name="v"), af.Variable(0, name="w")
    fetches = [v.assign(x), w.assign(x), v.read(), w.read()]
    assert ordered(graph, fetches) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %v/assign = variable_assign(%feed) {variable=@v} : int64[]
        %w/assign = variable_assign(%feed) {variable=@w} : int64[]
        %v/read = variable_read() {variable=@v} after(%v/assign) : int64[]
        %w/read = variable_read() {variable=@w} after(%w/assign) : int64[]
        %fetch = fetch(%v/assign) : ()
        %fetch_1 = fetch(%w/assign) : ()
        %fetch_2 = fetch(%v/read) : ()
        %fetch_3 = fetch(%w/read) : ()
    """)


def test_unrequested_nodes_are_not_brought_in(graph: af.Graph) -> None:
    x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")
    first = v.assign(x)
    v.assign_add(x)
    last = v.read()
    assert ordered(graph, [first, last]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %v/assign = variable_assign(%feed) {variable=@v} : int64[]
        %v/read = variable_read() {variable=@v} after(%v/assign) : int64[]
        %fetch = fetch(%v/assign) : ()
        %fetch_1 = fetch(%v/read) : ()
    """)


def test_unordered_effects_stay_as_they_are() -> None:
    with af.Graph(effects="unordered") as graph:
        x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")
        fetches = [v.assign(x), v.read(), v.assign_add(x)]
    assert "after" not in ordered(graph, fetches)


def test_a_branch_with_effects_has_a_result_for_their_end(graph: af.Graph) -> None:
    pred, v = af.placeholder("bool", (), name="pred"), af.Variable(0, name="v")
    first = v.assign(1)
    picked = af.cond(pred, lambda: (v.assign_add(2), 1)[1], lambda: 0, name="pick")
    assert ordered(graph, [first, picked, v]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %constant = constant() {value=array(int64[], 1)} : int64[]
        %v/assign = variable_assign(%constant) {variable=@v} : int64[]
        %pick = cond(%feed) after(%v/assign) : (int64[], bool[]) {
          true_branch "pick/true" () {
            %pick/true/constant = constant() {value=array(int64[], 2)} : int64[]
            %pick/true/v/assign_add = variable_assign_add(%pick/true/constant) {variable=@v} : int64[]
            %pick/true/constant_1 = constant() {value=array(int64[], 1)} : int64[]
            %pick/true/turn = constant() {value=array(bool[], true)} : bool[]
            %pick/true/turn_1 = identity(%pick/true/turn) after(%pick/true/v/assign_add) : bool[]
            return %pick/true/constant_1, %pick/true/turn_1
          }
          false_branch "pick/false" () {
            %pick/false/constant = constant() {value=array(int64[], 0)} : int64[]
            %pick/false/turn = constant() {value=array(bool[], true)} : bool[]
            %pick/false/turn_1 = identity(%pick/false/turn) : bool[]
            return %pick/false/constant, %pick/false/turn_1
          }
        }
        %fetch = fetch(%v/assign) : ()
        %fetch_1 = fetch(%pick) : ()
        %v/read = variable_read() {variable=@v} after(%pick) : int64[]
        %fetch_2 = fetch(%v/read) : ()
    """)


def test_a_branch_that_only_reads_has_none(graph: af.Graph) -> None:
    pred, v = af.placeholder("bool", (), name="pred"), af.Variable(0, name="v")
    picked = af.cond(pred, v.read, lambda: af.constant(0), name="pick")
    assert ordered(graph, [picked, v.assign(1)]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %pick = cond(%feed) : (int64[],) {
          true_branch "pick/true" () {
            %pick/true/v/read = variable_read() {variable=@v} : int64[]
            return %pick/true/v/read
          }
          false_branch "pick/false" () {
            %pick/false/constant = constant() {value=array(int64[], 0)} : int64[]
            return %pick/false/constant
          }
        }
        %constant = constant() {value=array(int64[], 1)} : int64[]
        %v/assign = variable_assign(%constant) {variable=@v} after(%pick) : int64[]
        %fetch = fetch(%pick) : ()
        %fetch_1 = fetch(%v/assign) : ()
    """)


def test_a_loop_that_writes_carries_a_turn_around(graph: af.Graph) -> None:
    v = af.Variable(0, name="v")
    (count,) = af.while_loop(lambda i: v < 9, lambda i: af.negative(v.assign_add(i)), (af.constant(0),), name="loop")
    assert ordered(graph, [count, v]) == golden("""
        %first_turn = constant() {value=array(bool[], true)} : bool[]
        %constant = constant() {value=array(int64[], 0)} : int64[]
        %loop = while(%constant, %first_turn) {n_vars=2} : (int64[], bool[]) {
          cond "loop/cond" (%loop/cond/var, %loop/cond/turn) {
            %loop/cond/turn = parameter() {spec=bool[]} : bool[]
            %loop/cond/var = parameter() {spec=int64[]} : int64[]
            %loop/cond/v/read = variable_read() {variable=@v} after(%loop/cond/turn) : int64[]
            %loop/cond/constant = constant() {value=array(int64[], 9)} : int64[]
            %loop/cond/less = less(%loop/cond/v/read, %loop/cond/constant) : bool[]
            %loop/cond/pred = identity(%loop/cond/less) after(%loop/cond/v/read) : bool[]
            return %loop/cond/pred
          }
          body "loop/body" (%loop/body/var, %loop/body/turn) {
            %loop/body/turn = parameter() {spec=bool[]} : bool[]
            %loop/body/var = parameter() {spec=int64[]} : int64[]
            %loop/body/v/assign_add = variable_assign_add(%loop/body/var) {variable=@v} after(%loop/body/turn) : int64[]
            %loop/body/negative = negative(%loop/body/v/assign_add) : int64[]
            %loop/body/turn_1 = constant() {value=array(bool[], true)} : bool[]
            %loop/body/turn_2 = identity(%loop/body/turn_1) after(%loop/body/v/assign_add) : bool[]
            return %loop/body/negative, %loop/body/turn_2
          }
        }
        %fetch = fetch(%loop) : ()
        %v/read = variable_read() {variable=@v} after(%loop) : int64[]
        %fetch_1 = fetch(%v/read) : ()
    """)


def test_a_loop_that_only_reads_needs_no_turn(graph: af.Graph) -> None:
    x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")
    before = v.assign(x)
    (count,) = af.while_loop(lambda i: i < v, lambda i: i + v, (x,), name="loop")
    text = ordered(graph, [before, count, v.assign(x)])
    assert "turn = " not in text
    assert "%loop = while(%feed) {n_vars=1} after(%v/assign)" in text
    assert "%v/assign_1 = variable_assign(%feed) {variable=@v} after(%v/assign, %loop)" in text


def test_order_edges_do_not_carry_deadness_of_switches_written_by_hand(graph: af.Graph) -> None:
    pred, x, v = (
        af.placeholder("bool", (), name="pred"),
        af.placeholder("int64", (), name="x"),
        af.Variable(0, name="v"),
    )
    maybe = v.assign(af.raw.switch(x, pred)[1])
    assert ordered(graph, [maybe, v.assign_add(x)]) == golden("""
        %feed = feed() {index=0, spec=bool[]} : bool[]
        %feed_1 = feed() {index=1, spec=int64[]} : int64[]
        %switch = switch(%feed_1, %feed) : (int64[], int64[])
        %v/assign = variable_assign(%switch:1) {variable=@v} with %v/assign : int64[]
        %order = control_trigger() after(%v/assign) with %v/assign : ()
        %v/assign_add = variable_assign_add(%feed_1) {variable=@v} after(%order) : int64[]
        %fetch = fetch(%v/assign) : ()
        %fetch_1 = fetch(%v/assign_add) : ()
    """)


def test_frames_written_by_hand_are_ordered_within(graph: af.Graph) -> None:
    x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")
    inner = af.raw.enter(x, "frame")
    written = v.assign_add(v.assign(inner))
    outer = v.assign_sub(x)
    assert ordered(graph, [af.raw.exit(written), outer]) == golden("""
        %feed = feed() {index=0, spec=int64[]} : int64[]
        %enter = enter(%feed) {constant=false, frame="frame"} : int64[]
        %v/assign = variable_assign(%enter) {variable=@v} with %v/assign : int64[]
        %order = control_trigger() after(%v/assign) with %v/assign : ()
        %v/assign_add = variable_assign_add(%v/assign) {variable=@v} after(%order) : int64[]
        %v/assign_sub = variable_assign_sub(%feed) {variable=@v} : int64[]
        %exit = exit(%v/assign_add) : int64[]
        %fetch = fetch(%exit) : ()
        %fetch_1 = fetch(%v/assign_sub) : ()
    """)
