"""The outcomes of small programs: all of them, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import Exploration, explore
from asyncflow.inputs.input import InputState
from asyncflow.semantics.explore import _Exploring
from tests.semantics.programs import outcome_keys, stateful_program


def unordered() -> af.Graph:
    return af.Graph(effects="unordered")


def left_in(variable: af.Variable, found: Exploration) -> set[object]:
    assert not found.stopped
    values = [np.asarray(outcome.variables[variable]).tolist() for outcome in found.outcomes]
    return {tuple(value) if isinstance(value, list) else value for value in values}


# -- figure 1 of MAPL '17 ---------------------------------------------------------------------------------------------


def test_assign_add_has_one_outcome() -> None:
    """Behaviour 70: atomic additions whose values are not read give the sum."""
    with unordered() as graph:
        v = af.Variable(0, name="v")
        adds = [v.assign_add(k).node for k in (1, 2, 4)]
    assert left_in(v, explore(graph, adds)) == {7}


def test_assign_concat_has_two_outcomes() -> None:
    """Behaviour 70: two atomic appends in either order, each with the order that leads to it."""
    with unordered() as graph:
        text = af.Variable(np.zeros(0, np.int64), name="text", shape=(None,))
        appends = [text.update(lambda old, new: af.concat([old, new]), np.array([k])).node for k in (1, 2)]
    found = explore(graph, appends)
    assert left_in(text, found) == {(1, 2), (2, 1)}
    orders = {tuple(o.variables[text].tolist()): o.order for o in found.outcomes}
    assert orders == {(1, 2): ("text/update", "text/update_1"), (2, 1): ("text/update_1", "text/update")}


def test_read_add_write_may_lose_updates() -> None:
    """Behaviour 70: both updates, or one of them lost; a read before the other write loses that write."""
    with unordered() as graph:
        v = af.Variable(0, name="v")
        writes = [v.assign(v + 1).node, v.assign(v + 2).node]
    found = explore(graph, writes)
    assert left_in(v, found) == {1, 2, 3}
    lost = next(outcome for outcome in found.outcomes if outcome.variables[v] == 1)
    assert set(lost.order[:2]) == {"v/read", "v/read_1"} and lost.order[2:] == ("v/assign_1", "v/assign")


def test_runs_of_one_session() -> None:
    """Behaviour 70: three runs at once of one read-add-write, and of one atomic addition."""
    with af.Graph() as graph:
        v = af.Variable(1, name="v")
        write, add = v.assign(v + 1), v.assign_add(1)
    assert left_in(v, explore(graph, write.node, runs=3)) == {2, 3, 4}
    found = explore(graph, add, runs=3)
    assert left_in(v, found) == {4}
    assert {o.fetches for o in found.outcomes} == set(permutations((2, 3, 4)))
    assert all(step.startswith("run ") for step in found.outcomes[0].order)


# -- orders -----------------------------------------------------------------------------------------------------------


def test_a_read_beside_a_write() -> None:
    """Behaviour 71: A or B; with a control edge B; and an unfetched write never runs."""
    with unordered() as graph:
        v = af.Variable("A", name="letter")
        write, read = v.assign("B"), v.read()
        with af.control_dependencies([write]):
            after = v.read()
    assert {str(o.fetches[0]) for o in explore(graph, [read, write.node]).outcomes} == {"A", "B"}
    assert [str(o.fetches[0]) for o in explore(graph, after).outcomes] == ["B"]
    assert [str(o.fetches[0]) for o in explore(graph, read).outcomes] == ["A"]


def test_a_name_means_the_same_as_for_a_run() -> None:
    """As for `Session.run`: without an output a node's first value, if it has one."""
    with unordered() as graph:
        v = af.Variable(0, name="v")
        v.assign(v + 1)
    for name in ("v/assign", "v/assign:0"):
        assert [np.asarray(outcome.fetches).tolist() for outcome in explore(graph, name).outcomes] == [[1]]


def test_ordered_effects_have_one_outcome() -> None:
    """Behaviour 71: accesses happen in the written order, through branches and loops too."""
    with af.Graph() as graph:
        v, u = af.Variable(1, name="v"), af.Variable(0, name="u")

        def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            af.cond(i > 0, lambda: u.assign_add(i), lambda: u.assign(5))
            return i + 1, total + v.update(lambda old, k: old * 3 + k, i)

        _, total = af.while_loop(lambda i, _: i < 3, body, (0, 0))
        last = v.assign_sub(1)
    found = explore(graph, [total, last, v, u])
    # 1 → 3 → 10 → 32, and 5 + 1 + 2
    assert [tuple(map(int, o.fetches)) for o in found.outcomes] == [(45, 31, 31, 8)]


def test_effects_of_loops_and_branches_overlap_unordered() -> None:
    """Iterations whose writes nothing orders come in any order, each after its own predicate."""
    with unordered() as graph:
        text = af.Variable(np.zeros(0, np.int64), name="text", shape=(None,))

        def body(i: af.Tensor, done: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            text.update(lambda old, new: af.concat([old, new]), af.reshape(i, (1,)))
            written = text.update(lambda old, new: af.concat([old, new]), af.reshape(i, (1,)))
            return i + 1, done + af.size(written) * 0

        _, done = af.while_loop(lambda i, _: i < 3, body, (0, 0))
    assert left_in(text, explore(graph, done)) == set(permutations(range(3)))


def test_branches_not_taken_have_no_effect() -> None:
    with unordered() as graph:
        x = af.placeholder("int64", ())
        v = af.Variable(0, name="v")
        result = af.cond(x > 0, lambda: v.assign(x), lambda: v.assign_add(10 * x))
    assert left_in(v, explore(graph, result, {x: 3})) == {3}
    assert left_in(v, explore(graph, result, {x: np.int64(-3)})) == {-30}
    with pytest.raises(af.FeedError, match=r"placeholder:0 int64\[\] is needed"):
        explore(graph, result)
    assert left_in(v, explore(graph, result, {x.name: 3})) == {3}


def test_arguments_that_make_no_sense_are_refused() -> None:
    """As `Session.run` does, with the same words."""
    with unordered() as graph:
        x = af.placeholder("float32", (2,), name="x")
        w = af.Variable(0.5, name="w")
        result = [af.sum(x) + 0, w.assign_add(1.0)]
        af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,))
    good = np.ones(2, np.float32)
    assert left_in(w, explore(graph, result, {"x": good}, variables={w: 2})) == {3.0}
    for feeds, said in (
        ({x: np.ones(3, np.float32)}, r"cannot feed x:0: expected float32\[2\], got an ndarray: its shape is \[3\]"),
        ({x: np.ones(2)}, "its dtype is float64; convert it yourself"),
        ({"y": good}, "no node is named 'y'"),
        ({3: good}, "feeds are keyed by tensors or their names; got int 3"),
        ({w: 1.0}, r"got Variable .*; a variable is not fed: use w\.assign or session\.swap_variables"),
        ({x: good, "x": good}, "x:0 is fed twice"),
        ({"while/body/add": 1}, r"is inside .*; feed what enters the branch or loop instead"),
        ([x], "feeds is a mapping of tensors"),
    ):
        with pytest.raises(af.FeedError, match=said):
            explore(graph, result, feeds)  # type: ignore[arg-type]
    with unordered():
        other = af.placeholder("int64", ())
    with pytest.raises(af.FeedError, match="belongs to another graph"):
        explore(graph, result, {other: 1})
    for runs in (0, -1, 1.5):
        with pytest.raises(af.GraphError, match=r"explore\(runs=\) is a whole number of at least 1; got"):
            explore(graph, result, {x: good}, runs=runs)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="variables= are values by variables"):
        explore(graph, result, {x: good}, variables={"w": 1})  # type: ignore[dict-item]
    with pytest.raises(af.DTypeError, match="does not fit dtype float64"):
        explore(graph, result, {x: good}, variables={w: "x"})
    with pytest.raises(af.ShapeError, match="variable 'w' is"):
        explore(graph, result, {x: good}, variables={w: [1.0, 2.0]})
    for each in (explore, af.find_races):
        with pytest.raises(af.GraphError, match=r"graph is an af\.Graph; got str 'graph'"):
            each("graph", result)  # type: ignore[arg-type]
    for runs in (0, 3):
        with pytest.raises(af.GraphError, match=r"find_races\(runs=\) is 1 or 2; got"):
            af.find_races(graph, result, ["x"], runs=runs)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_has_no_effect_and_ends_the_run() -> None:
    """Behaviour 72: effects of other nodes until then stay; nodes that wait for the failed node do not run."""
    with unordered() as graph:
        v, u, w = (af.Variable(0, name=name) for name in "vuw")
        checked = af.assert_that(v.assign(1) == 2, "no")
        with af.control_dependencies([checked]):
            never = w.assign(1)
        beside = u.assign(1)
    found = explore(graph, [never, beside])
    assert {(int(o.variables[u]), int(o.variables[w])) for o in found.outcomes} == {(0, 0), (1, 0)}
    assert all(o.error == "assert: AssertionError: no" and o.fetches == () for o in found.outcomes)


def test_what_fails_in_some_orders_only() -> None:
    """Behaviour 72: a run may fail in one order, and end in another."""
    with unordered() as graph:
        v = af.Variable(1, name="v")
        checked, write = af.assert_that(v > 0, "no"), v.assign(-1)
    found = explore(graph, [checked, write.node])
    assert sorted((int(o.variables[v]), bool(o.error)) for o in found.outcomes) == [(-1, False), (-1, True)]


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_it_says_when_it_stopped() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        writes = [v.assign(v * 2 + k).node for k in range(8)]
        endless = af.while_loop(lambda i: i >= 0, lambda i: i * 0, (0,))
    found = explore(graph, writes, max_states=50)
    assert found.stopped == "after max_states=50 states" and found.states == 50
    assert explore(graph, endless, max_seconds=0.01).stopped == "after max_seconds=0.01 seconds"


def test_what_nothing_else_touches_is_not_tried_in_other_orders() -> None:
    """Independent writes commute: one order of twelve is enough, and the states grow with their number alone."""
    with unordered() as graph:
        own = [af.Variable(0, name=f"v{k}") for k in range(12)]
        writes = [each.assign(each + 1).node for each in own]
    found = explore(graph, writes)
    assert len(found.outcomes) == 1 and found.states <= 25


def test_programs_that_act_outside_are_refused() -> None:
    @af.op(outputs=af.spec("int64", ()))
    async def ask(x: object) -> object:
        return x

    with af.Graph() as graph:
        answer = ask(af.constant(1))
    with pytest.raises(af.GraphError, match="acts on the world outside"):
        explore(graph, answer)
    with af.Graph() as by_hand:
        left = af.raw.switch(af.constant(1), af.constant(True))[0]
    with pytest.raises(af.GraphError, match="written by hand"):
        explore(by_hand, left)


@pytest.mark.parametrize("seed", range(6))
def test_omitted_nodes_show_nowhere(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Persistent sets leave out orders, and no outcome."""
    graph, fetches, _ = stateful_program(Random(seed))
    reduced = explore(graph, fetches)
    monkeypatch.setattr(_Exploring, "_persistent", lambda self, state, enabled: enabled)
    whole = explore(graph, fetches)
    assert not reduced.stopped and not whole.stopped
    assert outcome_keys(reduced) == outcome_keys(whole) and reduced.states <= whole.states


# -- queues -----------------------------------------------------------------------------------------------------------


def fetched(found: Exploration) -> set[str]:
    assert not found.stopped
    return {o.error or " ".join(str(np.asarray(value)) for value in o.fetches) for o in found.outcomes}


def test_enqueues_that_nothing_orders_come_in_any_order() -> None:
    """Behaviour 37: any order where none is said, one with ordered effects, and never more than there is room for."""
    for effects, orders in (("unordered", set(permutations(range(3)))), ("ordered", {(0, 1, 2)})):
        with af.Graph(effects=effects) as graph:  # type: ignore[arg-type]
            queue = af.FIFOQueue(2, af.spec("int64", ()), name="q")
            puts = [queue.enqueue(k) for k in range(3)]
            taken = queue.dequeue_many(2), queue.dequeue()
        found = explore(graph, [puts, taken])
        assert {(*map(int, o.fetches[0]), int(o.fetches[1])) for o in found.outcomes} == orders
        assert all(outcome.variables[queue] == () for outcome in found.outcomes)


def test_large_elements_are_copied_in_no_time() -> None:
    """Behaviour 78: that threads copy them elsewhere shows in no outcome."""
    with af.Graph() as graph:
        queue = af.FIFOQueue(2, af.spec("float32", (1 << 18,)), name="q")
        put = queue.enqueue_many(af.ones((2, 1 << 18), dtype="float32"))
        total = af.sum(queue.dequeue_many(2))
    assert fetched(explore(graph, [put, total])) == {"524288.0"}


def test_what_waits_for_a_queue() -> None:
    """Behaviour 78: the wait lasts for ever, until the queue is closed, or until a larger take makes room."""
    with af.Graph() as graph:
        queue = af.FIFOQueue(2, af.spec("int64", ()), name="q")
        put, many = queue.enqueue(7), queue.enqueue_many([1, 2, 3])
        close = queue.close()
        take, up_to = queue.dequeue(), queue.dequeue_up_to(4)
    assert fetched(explore(graph, [put, take])) == {"7"}
    assert fetched(explore(graph, [many, up_to])) == {"q/dequeue_up_to: TimeoutError: waits for ever"}
    assert fetched(explore(graph, many)) == {"q/enqueue_many: TimeoutError: waits for ever"}
    assert fetched(explore(graph, [close, take])) == {
        "q/dequeue: QueueClosedError: dequeue of queue 'q' can never be served, as queue 'q' is closed; "
        "0 elements are left"
    }
    left = explore(graph, [put, close])
    assert [value.tolist() for o in left.outcomes for element in o.variables[queue] for value in element] == [7]
    with af.Graph() as graph:
        queue = af.FIFOQueue(2, af.spec("int64", ()), name="q")
        three, batch = queue.enqueue_many([1, 2, 3]), queue.dequeue_many(3)
    assert fetched(explore(graph, [three, batch])) == {"[1 2 3]"}


def test_an_enqueue_with_a_failed_input_puts_nothing_in() -> None:
    """Behaviour 72: a node with an error input has no effect."""
    with unordered() as graph:
        queue = af.FIFOQueue(2, af.spec("bool", ()), name="q")
        put = queue.enqueue(af.assert_that(af.constant(1) == 2, "no"))
    (outcome,) = explore(graph, put).outcomes
    assert outcome.error == "assert: AssertionError: no" and outcome.variables[queue] == ()


def test_the_smallest_present_element_leaves_first() -> None:
    with unordered() as graph:
        first = af.PriorityQueue(9, af.spec("int64", ()), name="first")
        puts = [first.enqueue((k, 10 * k)) for k in (3, 1, 2)]
        with af.control_dependencies(puts):
            smallest = first.dequeue()
        beside = first.dequeue()
    assert fetched(explore(graph, smallest)) == {"1 10"}
    assert fetched(explore(graph, [puts, beside])) == {"1 10", "2 20", "3 30"}


def test_sections_of_a_mutex_lose_no_update() -> None:
    """Behaviour 70: read-add-write in sections is atomic, in one run and in several at once."""
    with unordered() as graph:
        mutex, v = af.Mutex(name="m"), af.Variable(0, name="v")
        writes = []
        for by in (1, 2):
            with mutex:
                writes.append(v.assign(v + by).node)
    assert left_in(v, explore(graph, writes)) == {3}
    assert left_in(v, explore(graph, writes[0], runs=3)) == {3}
    assert {race.resource for race in af.find_races(graph, writes)} == {"variable v"}
    with unordered() as graph:
        text = af.Variable(0, name="text")
        with mutex:
            first = text.update(lambda old: old * 3 + 1).node
            after = text.update(lambda old: old * 3 + 2).node
        with mutex:
            last = text.assign(text * 3).node
    # The two in one section have no order between them; the section beside them is before or behind both.
    assert left_in(text, explore(graph, [first, after, last])) == {5, 7, 15, 21}


# -- barriers and inputs ----------------------------------------------------------------------------------------------


def test_firings_that_meet_at_a_barrier_go_on_together() -> None:
    """Nodes behind it on one side come after nodes before it on the other."""
    with unordered() as graph:
        v, barrier = af.Variable(0, name="v"), af.Barrier(2, name="b")
        with af.control_dependencies([v.assign(1)]):
            here = barrier.wait()
        there = barrier.wait()
        with af.control_dependencies([there]):
            read = v.read()
        beside = v.read()
    assert fetched(explore(graph, [here, read])) == {"1"}
    assert fetched(explore(graph, [here, there, beside])) == {"0", "1"}
    assert fetched(explore(graph, read)) == {"b/wait_1: TimeoutError: waits for ever"}
    assert fetched(explore(graph, read, runs=2)) == {"0 0"}
    assert all("waits for ever" in end for end in fetched(explore(graph, read, runs=3)))


async def test_runs_meet_at_a_barrier_as_the_rules_say() -> None:
    with unordered() as graph:
        v, barrier = af.Variable(0, name="v"), af.Barrier(2, name="b")
        sides = []
        for by in (1, 2):
            with (
                af.control_dependencies([v.update(lambda old, by=by: old * 3 + by)]),
                af.control_dependencies([barrier.wait()]),
            ):
                sides.append(v.update(lambda old, by=by: old * 5 + by))
    af.allow_races(v)
    allowed = left_in(v, explore(graph, [side.node for side in sides]))
    assert len(allowed) == 4
    for seed in range(12):
        async with af.Session(graph, seed=seed) as session:
            await session.run([side.node for side in sides])
            assert int(await session.run(v)) in allowed


def test_elements_of_an_input_are_taken_once_each(tmp_path: Path) -> None:
    """Every open order is tried; a firing that finds no element fails, and asking takes none."""
    (tmp_path / "lines").write_text("a\nb\n")
    lines = af.read_lines(tmp_path / "lines", name="lines")
    with unordered() as graph:
        taken, asked = [lines.next() for _ in range(3)], lines.has_more()
    found = explore(graph, taken[:2])
    assert fetched(found) == {"a b", "b a"}
    assert all(outcome.variables[lines] == 2 for outcome in found.outcomes)
    assert all("EndOfInput" in end for end in fetched(explore(graph, taken)))
    assert fetched(explore(graph, [*taken[:2], asked])) == {f"{x} {y}" for x in ("a b", "b a") for y in (True, False)}
    with af.Graph() as graph:
        first, second, more = lines.next(), lines.next(), lines.has_more()
    assert fetched(explore(graph, [second, more, first])) == {"b False a"}
    assert fetched(explore(graph, first, runs=2)) == {"a b", "b a"}


def test_an_input_that_never_comes_ends_the_search_in_time() -> None:
    async def never() -> AsyncIterator[int]:
        await asyncio.Event().wait()
        yield 1

    with af.Graph() as graph:
        element = af.from_async_generator(never, af.Spec(np.dtype(np.int64), ())).next()
    found = explore(graph, element, max_seconds=0.05)
    assert found.stopped == "after max_seconds=0.05 seconds" and not found.outcomes


def test_an_input_is_closed_whatever_ends_its_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an error that is no `Exception`, such as an interrupt, closes the input."""
    closed = []

    async def interrupted(self: InputState) -> Any:
        raise KeyboardInterrupt

    async def noted(self: InputState) -> None:
        closed.append(self.name)

    monkeypatch.setattr(InputState, "next", interrupted)
    monkeypatch.setattr(InputState, "aclose", noted)
    with af.Graph() as graph:
        element = af.read_lines("nowhere", name="lines").next()
    with pytest.raises(KeyboardInterrupt):
        explore(graph, element)
    assert closed == ["lines"]


async def test_a_loop_over_an_input_is_explored(tmp_path: Path) -> None:
    """On a thread on which an event loop runs, too; and no further than there are bounds to."""
    (tmp_path / "lines").write_text("1\n2\n3\n")
    with af.Graph() as graph:
        v = af.Variable(0, name="v")
        lines = af.read_lines(tmp_path / "lines", name="lines")
        count = af.loop_over(lines, lambda line, k: v.assign_add(k) * 0 + k + 1, 0)
        endless = lines.repeat()
        total = af.loop_over(endless, lambda line, k: k + 1, 0)
    assert fetched(explore(graph, count)) == {"3"} and left_in(v, explore(graph, count)) == {3}
    assert explore(graph, total).stopped == "after 100 elements of an input"


def test_an_input_that_fails_fails_whoever_asks() -> None:
    async def broken() -> Any:
        yield 1
        raise OSError("the disk is gone")

    with af.Graph() as graph:
        elements = af.from_async_generator(broken, af.spec("int64", ()), name="in")
        first, more = elements.next(), elements.has_more()
    assert fetched(explore(graph, first)) == {"1"}
    assert fetched(explore(graph, [first, more])) == {"in/has_more: OSError: the disk is gone"}


# -- loops in graphs with ordered effects -----------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "allowed"), [(32, {0, 1, 2}), (2, {0, 1}), (1, {0})])
async def test_each_resource_in_a_loop_has_its_own_turn(window: int, allowed: set[int]) -> None:
    """Behaviour 71: of two queues in one loop, the one runs ahead while the other waits, as far as the window is."""
    with af.Graph() as graph:
        late = af.FIFOQueue(3, af.spec("int64", ()), name="late")
        first = af.PriorityQueue(9, af.spec("int64", ()), name="first")

        def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            first.enqueue((-i, i))
            return i + 1, total + late.dequeue()

        total = af.while_loop(lambda i, _: i < 3, body, (0, 0), parallel_iterations=window)[1]
        taken = first.dequeue()[1]
        with af.control_dependencies([taken]):
            puts = [late.enqueue(k) for k in range(3)]
    found = explore(graph, [taken, total, puts])
    assert not found.stopped and {int(outcome.fetches[0]) for outcome in found.outcomes} == allowed
    seen = set[int]()
    for seed in range(16):
        async with af.Session(graph, ["cpu:0", "cpu:1"][: 1 + seed % 2], seed=seed, placement_seed=seed) as session:
            seen.add(int((await session.run([taken, total, puts]))[0]))
    assert seen <= allowed and (window == 1 or seen > {0})


async def test_two_loops_with_two_queues_between_them_end() -> None:
    """Behaviour 71: a loop that takes all of one queue, and then all of the other, does not wait for ever."""
    with af.Graph() as graph:
        small, large = (af.FIFOQueue(room, af.spec("int64", ()), name=f"q{room}") for room in (1, 2))

        def produce(i: af.Tensor) -> af.Tensor:
            small.enqueue(i)
            large.enqueue(10 * i)
            return i + 1

        made = af.while_loop(lambda i: i < 4, produce, (0,))
        first = af.while_loop(lambda i, s: i < 4, lambda i, s: (i + 1, s * 10 + small.dequeue()), (0, 0))[1]
        with af.control_dependencies([first]):
            second = af.while_loop(lambda i, s: i < 4, lambda i, s: (i + 1, s + large.dequeue()), (0, first))[1]
    assert fetched(explore(graph, [made, second])) == {"4 183"}
    for seed in range(4):
        async with af.Session(graph, seed=seed) as session:
            assert int((await session.run([made, second]))[-1]) == 183
