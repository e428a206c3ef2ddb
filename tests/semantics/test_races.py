"""Races that are found without a search: all that can show, through branches and loops, and few others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

import asyncflow as af
from asyncflow import Node, Race, find_races
from asyncflow.semantics.program import NeededGraph, conflict
from asyncflow.semantics.rules import Rules
from asyncflow.semantics.state import Firing
from tests.semantics.programs import Program, stateful_program
from tests.state.queue_kinds import KINDS


def unordered() -> af.Graph:
    return af.Graph(effects="unordered")


def pairs(races: Sequence[Race]) -> list[tuple[str, str, str]]:
    return [(race.first.name, race.second.name, race.between) for race in races]


# -- straight lines ---------------------------------------------------------------------------------------------------


def test_a_read_beside_a_write_is_a_race() -> None:
    """Behaviour 71: A or B without a control edge; none with one, and none with a write that is not fetched."""
    with unordered() as graph:
        v = af.Variable("A", name="letter")
        write, read = v.assign("B"), v.read()
        with af.control_dependencies([write]):
            after = v.read()
    assert pairs(find_races(graph, [read, write.node])) == [("letter/assign", "letter/read", "nodes")]
    assert find_races(graph, after) == find_races(graph, read) == ()
    assert pairs(find_races(graph, [write.node, v])) == [("letter/assign", "letter/read", "nodes")]


def test_a_race_tells_the_resource_and_both_lines() -> None:
    with unordered() as graph:
        w = af.Variable(0.5, name="w")
        step = w.assign_sub(0.1)
        loss = w * w
    told = str(find_races(graph, [step, loss])[0])
    found = re.fullmatch(r"race on variable w: assign_sub \((.+):(\d+)\) and read \((.+):(\d+)\) have no order", told)
    assert found and found[1] == found[3] and found[1].endswith("test_races.py") and int(found[4]) == int(found[2]) + 1


def test_additions_are_no_race_until_a_read() -> None:
    """Behaviour 70: Assign-Add has one outcome, unless what one gives is used, or they round; concat has two."""
    with unordered() as graph:
        v, f = af.Variable(0, name="v"), af.Variable(0.0, name="f")
        adds = [v.assign_add(1), v.assign_sub(2)]
        rounded = [f.assign_add(0.1).node, f.assign_add(0.2).node]
        concat = [v.update(lambda old, new: 3 * old + new, k).node for k in range(2)]
    assert find_races(graph, [add.node for add in adds]) == ()
    assert len(find_races(graph, adds)) == len(find_races(graph, rounded)) == len(find_races(graph, concat)) == 1
    assert pairs(find_races(graph, [adds[0], adds[1].node])) == [("v/assign_add", "v/assign_sub", "nodes")]


def test_unread_or_unrun_accesses_are_no_race() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        read, write = v.read(), v.assign(2)
    assert find_races(graph, [read.node, write]) == ()
    assert find_races(graph, [read + 1, write], feeds=[read]) == ()
    assert len(find_races(graph, None)) == 0


def test_ordered_effects_race_between_runs_alone() -> None:
    """Behaviour 71: in one run soft orders leave nothing open; between runs only what commutes is no race."""
    with af.Graph() as graph:
        v, n = af.Variable(0, name="v"), af.Variable(0, name="n")
        last = af.while_loop(lambda i: i < 3, lambda i: v.assign(v + i) * 0 + i + 1, (0,))
        count = n.assign_add(1)
    fetches = [last, v, count.node]
    assert find_races(graph, fetches) == ()
    names = {(race.first.op.name, race.second.op.name) for race in find_races(graph, fetches, runs=2)}
    read, write = "variable_read", "variable_assign"
    assert names == {(write, write), (read, write), (write, read)}
    assert {race.between for race in find_races(graph, fetches, runs=2)} == {"runs"}
    assert "race on variable v: assign (" in str(find_races(graph, last, runs=2)[-1])


def test_races_that_are_meant_are_not_told() -> None:
    with unordered() as graph:
        v, u = af.Variable(0, name="v"), af.Variable(0, name="u")
        writes = [each.assign(k) for each in (v, u) for k in range(2)]
    af.allow_races(v)
    assert [race.resource for race in find_races(graph, writes)] == ["variable u"]
    with pytest.raises(af.GraphError, match="allow_races takes variables and other resources; got 'u'"):
        af.allow_races("u")  # type: ignore[arg-type]


def test_users_ops_and_prints_race_and_assertions_do_not() -> None:
    @af.op
    def beep() -> None: ...

    with unordered() as graph:
        nodes = [beep(), beep(), af.print(1).node, af.print(2).node]
        nodes += [af.assert_that(True).node, af.assert_that(True).node]
    assert [race.resource for race in find_races(graph, nodes)] == ["<op beep>", "stdout"]


def test_it_stops_after_so_many() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        writes = [v.assign(k) for k in range(10)]
    assert len(find_races(graph, writes)) == 45
    assert len(find_races(graph, writes, most=7)) == 7
    assert len(find_races(graph, writes, runs=2, most=50)) == 50


def test_fetches_are_any_nest_and_names() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        loss, step = v.read(), v.assign(1)
    assert len(find_races(graph, {"loss": loss, "rest": ["v/assign"]})) == 1
    assert len(find_races(graph, ("v/read:0", step))) == 1
    for wrong in (3, af.constant, unordered):
        with pytest.raises(af.FetchError, match="a fetch is a tensor, node or variable of the graph, or a name"):
            find_races(graph, [wrong])


def test_primitives_written_by_hand_are_refused() -> None:
    with unordered() as graph:
        left = af.raw.switch(af.constant(1), af.constant(True))[0]
    with pytest.raises(af.GraphError, match="written by hand"):
        find_races(graph, left)


# -- branches and loops -----------------------------------------------------------------------------------------------


def test_branches_of_one_cond_exclude_one_another() -> None:
    with unordered() as graph:
        x = af.placeholder("int64", ())
        v = af.Variable(0, name="v")
        inside = af.cond(x > 0, lambda: v.assign(x), lambda: v.assign(-x))
        with af.control_dependencies([inside]):
            after = v.read()
        beside = v.read() + inside
    assert find_races(graph, after) == ()
    assert pairs(find_races(graph, beside)) == [
        ("cond/true/v/assign", "v/read_1", "nodes"),
        ("cond/false/v/assign", "v/read_1", "nodes"),
    ]


def test_a_result_waits_only_for_what_both_branches_wait_for() -> None:
    """Accesses before one branch alone are before the result only if that branch is taken."""
    with unordered() as graph:
        x = af.placeholder("bool", ())
        v = af.Variable(0, name="v")
        write = v.assign(1)
        one, both = af.cond(x, lambda: write, lambda: 3), af.cond(x, lambda: write + 1, lambda: write)
        with af.control_dependencies([af.identity(one)]):
            after_one = v.read()
        with af.control_dependencies([af.identity(both)]):
            after_both = v.read()
    assert len(find_races(graph, after_one)) == 1
    assert find_races(graph, after_both) == ()


@pytest.mark.parametrize("window", [1, 8])
def test_iterations_overlap_unless_values_or_the_window_order_them(window: int) -> None:
    with unordered() as graph:
        v, u = af.Variable(0, name="v"), af.Variable(0, name="u")

        def body(i: af.Tensor, last: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            free = v.assign(i)
            with af.control_dependencies([last]):
                chained = u.assign(i)
            return i + 1, chained + 0 * free

        _, last = af.while_loop(lambda i, _: i < 3, body, (0, 0), parallel_iterations=window)
        with af.control_dependencies([last]):
            after = v + u
    found = find_races(graph, after)
    if window == 1:
        assert found == ()
    else:
        assert [(race.resource, race.between) for race in found] == [("variable v", "iterations")]
        assert "assign (" in str(found[0]) and str(found[0]).endswith("has no order in different iterations")


def test_a_read_in_the_predicate_comes_after_writes_that_the_loop_waits_for() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")

        def body(i: af.Tensor) -> af.Tensor:
            with af.control_dependencies([i]):
                return v.assign_add(1)

        chained = af.while_loop(lambda i: v.read() + 0 * i < 3, body, (0,))

        def free(i: af.Tensor) -> af.Tensor:
            return v.assign_add(1) * 0 + i + 1

        beside = af.while_loop(lambda i: v < 3, free, (0,))
    assert [race for race in find_races(graph, chained) if race.between == "nodes"] == []
    assert {race.between for race in find_races(graph, beside)} == {"iterations"}


def test_values_leave_a_loop_and_enter_iterations_before_other_writes() -> None:
    """A counter leaves before the writes are done; its last value is out before the writes of earlier iterations."""
    with unordered() as graph:
        v, u = af.Variable(0, name="v"), af.Variable(0, name="u")

        def body(i: af.Tensor, last: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor, af.Tensor]:
            with af.control_dependencies([last]):
                total = total + u.read()
            return i + 1, u.assign(i), total + v.assign(i)

        count, last, total = af.while_loop(lambda i, *_: i < 3, body, (0, 0, 0))
        with af.control_dependencies([af.identity(count)]):
            early = v.read()
        with af.control_dependencies([af.identity(total)]):
            late = v.read()
        with af.control_dependencies([af.identity(last)]):
            behind = u.read()
    write, read, other = "while/body/v/assign", "while/body/u/read", "while/body/u/assign"
    found = pairs(find_races(graph, [early, late, behind]))
    assert (write, "v/read", "nodes") in found and (write, "v/read_1", "nodes") not in found
    assert (read, other, "nodes") in found and (other, "u/read", "nodes") in found


def test_an_iteration_waits_for_the_last_one_alone() -> None:
    """A write of the last iteration is before this one's read; that does not say so of the write before it."""
    with unordered() as graph:
        v = af.Variable(0, name="v")

        def body(i: af.Tensor, last: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor, af.Tensor]:
            with af.control_dependencies([last]):
                read = v.read()
            with af.control_dependencies([read]):
                return i + 1, v.assign(i), total + read

        _, _, total = af.while_loop(lambda i, *_: i < 3, body, (0, 0, 0))

        def apart(i: af.Tensor, last: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor, af.Tensor]:
            with af.control_dependencies([last]):
                read = v.read()
            return i + 1, v.assign(i), total + read

        _, _, open_total = af.while_loop(lambda i, *_: i < 3, apart, (0, 0, 0))
    assert find_races(graph, total) == ()
    assert len(find_races(graph, open_total)) == 2


def test_writes_of_loops_within_loops() -> None:
    """An inner loop in order by itself is not in order across the iterations of the outer one, unless these are."""

    def program(window: int) -> tuple[af.Graph, af.Tensor]:
        with unordered() as graph:
            v = af.Variable(0, name="v")

            def inner(j: af.Tensor) -> af.Tensor:
                with af.control_dependencies([j]):
                    return v.update(lambda old, j: old * 2 + j, j) * 0 + j + 1

            def outer(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
                return i + 1, total + af.while_loop(lambda j: j < 2, inner, (0,))[0]

            _, total = af.while_loop(lambda i, _: i < 2, outer, (0, 0), parallel_iterations=window)
            with af.control_dependencies([total]):
                return graph, v.read()

    assert find_races(*program(1)) == ()
    assert [(race.first.op.name, race.between) for race in find_races(*program(4))] == [
        ("variable_update", "iterations")
    ]


def test_a_value_that_needs_many_iterations_to_come_round() -> None:
    """Loop variables that hand one value on: more of them than the analysis goes rounds, which gives up on none."""
    with unordered() as graph:
        v = af.Variable(0, name="v")

        def body(i: af.Tensor, *xs: af.Tensor) -> tuple[af.Tensor, ...]:
            return i + 1, v.assign(xs[-1]) + i, *xs[:-1]

        last = af.while_loop(lambda i, *_: i < 3, body, (0,) * 13)
    assert pairs(find_races(graph, last)) == [("while/body/v/assign", "while/body/v/assign", "iterations")]


# -- against the rules ------------------------------------------------------------------------------------------------


def one_order(rules: Rules, random: Random) -> list[Firing]:
    """Reads and writes in an order in which they may happen."""
    state, order = rules.start({}, {}, 1), list[Firing]()
    eager = random.choice((0, -1, None))
    while enabled := rules.enabled(state):
        order.append(random.choice(enabled) if eager is None or random.random() < 0.3 else enabled[eager])
        rules.fire(state, order[-1])
        rules.settle(state)
    return order


def open_pairs(program: Program, random: Random) -> set[frozenset[Node]]:
    """Pairs of nodes that fired now this, now that way round, and whose order may show."""
    needed = NeededGraph(program.graph, program.fetches)
    rules, firsts = Rules(needed), defaultdict[frozenset[Firing], set[Firing]](set)
    for _ in range(12):
        order = one_order(rules, random)
        for place, one in enumerate(order):
            for other in order[place + 1 :]:
                if conflict(needed.touches(one[0]), needed.touches(other[0])):
                    firsts[frozenset((one, other))].add(one)
    found = {frozenset(node for node, _ in pair) for pair, first in firsts.items() if len(first) > 1}
    unseen = {each for pair in found for each in pair if not any(map(needed.is_used, each.outputs))}
    reads = {each for each in unseen if each.op.name == "variable_read"}
    adds = {each for each in unseen if each.op.conduct.commutes}
    return {pair for pair in found if not pair & reads and not pair <= adds}


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1000), marks=pytest.mark.slow)])
def test_no_pair_that_rules_leave_open_is_missed(seeds: range) -> None:
    """Behaviour 70: in random programs, whatever happens in both orders has been named."""
    for seed in seeds:
        program = stateful_program(Random(seed))
        named = {frozenset((race.first, race.second)) for race in find_races(program.graph, program.fetches)}
        missed = open_pairs(program, Random(seed)) - named
        assert not missed, f"program {seed}: {missed} not among {named}\n{af.print_graph(program.graph)}"


def test_a_large_program_takes_no_more_than_its_size() -> None:
    """Ten thousand nodes: each is gone through once, and once more for a loop around them."""
    with unordered() as graph:
        v, x = af.Variable(0.0, name="v"), af.constant(0.0)
        for _ in range(2500):
            with af.control_dependencies([x]):
                x = v.assign(v + 1)
    assert len(graph.nodes) > 10_000 and find_races(graph, x) == ()


# -- queues -----------------------------------------------------------------------------------------------------------


def kinds_of(races: Sequence[Race]) -> set[tuple[str, str]]:
    return {(race.first.op.name, race.second.op.name) for race in races}


INT = af.spec("int64", ())
MIXED = {name: kind for name, kind in KINDS.items() if not kind.make(9, INT, "q").is_fifo}
"""Kinds whose other elements decide which leaves next."""


def test_puts_race_with_puts_and_takes_with_takes() -> None:
    """The order of elements follows theirs; each of the others waits for its element, or for room."""
    with unordered() as graph:
        queue = af.FIFOQueue(9, INT, name="q")
        puts, takes = [queue.enqueue(k) for k in range(2)], [queue.dequeue() for _ in range(2)]
        size, close = queue.size(), queue.close()
    assert kinds_of(find_races(graph, [puts, takes])) == {("enqueue", "enqueue"), ("dequeue", "dequeue")}
    assert find_races(graph, [puts[0], takes[0]]) == ()
    assert kinds_of(find_races(graph, [puts[0], takes[0], size])) == {
        ("enqueue", "queue_size"),
        ("dequeue", "queue_size"),
    }
    assert kinds_of(find_races(graph, [puts[0], takes[0], close])) == {("enqueue", "queue_close")}
    assert str(find_races(graph, puts)[0]).startswith("race on queue q: enqueue (")
    assert len(af.explore(graph, [puts, takes]).outcomes) == 2
    af.allow_races(queue)
    assert find_races(graph, [puts, takes, size]) == ()


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("effects", ["ordered", "unordered"])
def test_the_leaving_element_depends_on_the_present_ones(kind: str, effects: Any) -> None:
    """A queue that chooses depends on its elements, with ordered effects too; not if a control edge orders the puts."""
    with af.Graph(effects=effects) as graph:
        queue, element = MIXED[kind].make(9, INT, "q"), MIXED[kind].element
        many = queue.enqueue_many(element([1, 2], [1, 2]))
        put = queue.enqueue(element(5, 5))
        beside = queue.dequeue()
        with af.control_dependencies([put]):
            after = queue.dequeue()
        with af.control_dependencies([many, put]):
            behind = queue.dequeue()
    assert ("enqueue", "dequeue") in kinds_of(find_races(graph, [many, put, beside]))
    after_both = kinds_of(find_races(graph, [many, put, behind]))
    assert after_both == (set() if effects == "ordered" else {("enqueue_many", "enqueue")})
    # With ordered effects the first enqueue is before the second.
    assert (("enqueue_many", "dequeue") in kinds_of(find_races(graph, [many, put, after]))) == (effects == "unordered")
    af.allow_races(queue)
    assert find_races(graph, [many, put, beside]) == ()


def test_runs_race_for_the_elements_of_a_queue() -> None:
    with af.Graph() as graph:
        queue = af.PriorityQueue(9, INT, name="q")
        put, taken = queue.enqueue((5, 5)), queue.dequeue()
    pairs_of_runs = kinds_of([race for race in find_races(graph, [put, taken], runs=2) if race.between == "runs"])
    assert pairs_of_runs == {("enqueue", "enqueue"), ("dequeue", "dequeue"), ("enqueue", "dequeue")}


async def test_a_plan_warns_of_queues_as_of_variables() -> None:
    with unordered() as graph:
        queue = af.FIFOQueue(9, INT, name="q")
        puts = [queue.enqueue(k) for k in range(2)]
    async with af.Session(graph) as session:
        with pytest.warns(af.RaceWarning, match=r"race on queue q: enqueue .* and enqueue .* have no order"):
            plan = session.plan(puts)
        assert "race on queue q: enqueue" in plan.explain(races=True)
