"""The scheduler's rules, driven by hand: no event loop, and every firing completes when the test says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.plan import Dead
from asyncflow.runtime.scheduler.scheduler import Scheduler, SchedulingError
from tests.runtime.by_hand import NOTHING, ByHand, partition_of, step
from tests.runtime.hand_written import counting_loop


def at(name: str, *iterations: int) -> set[str]:
    """Firings of `name` in these iterations of a loop named ``loop``."""
    return {f"{name}@loop/{k}" for k in iterations}


@dataclass
class Room:
    """The stand-in for the memory of iterations: a fixed number fits at a time."""

    count: int

    def fits(self, count: int) -> bool:
        return count <= self.count


# -- straight lines ----------------------------------------------------------------------------------------------


def test_a_node_fires_once_all_its_inputs_are_there(graph: af.Graph) -> None:
    x = af.placeholder("int64", ())
    run = ByHand(step("both")(step("first")(x), step("second")(x)), {x: 3})
    assert run.held == {"first", "second"}
    run.complete("second")
    assert run.held == {"first"}
    run.complete("first")
    assert run.held == {"both"}
    run.complete("both")
    assert run.scheduler.done and run.results == [3]


def test_a_control_input_counts_as_an_input(graph: af.Graph) -> None:
    x = af.placeholder("int64", ())
    before = step("before")(x)
    with af.control_dependencies([before]):
        after = step("after")(x)
    run = ByHand(after, {x: 3})
    assert run.held == {"before"}
    run.complete("before")
    assert run.held == {"after"}


def test_a_graph_without_inputs_is_done_at_the_start(graph: af.Graph) -> None:
    run = ByHand(af.constant(7))
    assert run.scheduler.done and run.results == [7] and run.scheduler.statistics() == NOTHING


def test_values_are_dropped_once_they_are_used(graph: af.Graph) -> None:
    x = af.placeholder("float64", (3,))
    run = ByHand(step("last")(step("first")(x)), {x: np.ones(3)})
    root = run.scheduler.partition.root
    run.complete("first")
    run.complete("last")
    assert run.scheduler.done
    assert root.values == [None] * len(root.values), "the plan's own tables stay as they were"


# -- deadness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [False, True])
def test_a_switch_kills_one_side_with_all_that_depends_on_it(graph: af.Graph, taken: bool) -> None:
    """Behaviour 5: any dead data or control input makes a node dead, and with it its outputs and control edges."""
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    sides = af.raw.switch(x, pred, name="fork")
    by_data = [step(f"data_{side}")(tensor) for side, tensor in zip((False, True), sides, strict=True)]
    by_control = []
    for side, tensor in zip((False, True), by_data, strict=True):
        with af.control_dependencies([tensor]):
            by_control.append(step(f"control_{side}")(x))
    ends = [step(f"end_{side}")(x, control) for side, control in zip((False, True), by_control, strict=True)]
    run = ByHand(ends, {x: 3, pred: taken})
    run.complete_all_but()
    assert run.history == [f"data_{taken}", f"control_{taken}", f"end_{taken}"]
    assert run.results[taken] == 3
    assert isinstance(run.results[not taken], Dead) and run.results[not taken].killer == "fork"


def test_an_op_with_several_outputs_dies_with_all_of_them(graph: af.Graph) -> None:
    x, pred = af.placeholder("int64", (4,)), af.placeholder("bool", ())
    halves = af.unstack(af.reshape(af.raw.switch(x, pred, name="fork")[1], (2, 2)))
    run = ByHand(list(halves), {x: np.arange(4), pred: False})
    assert run.history == []
    assert [dead.killer for dead in run.results] == ["fork", "fork"]


def test_merge_fires_with_the_first_live_input(graph: af.Graph) -> None:
    """Behaviour 3: it neither waits for the other input nor fires again."""
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    on_false, on_true = af.raw.switch(x, pred)
    merged, index = af.raw.merge(step("slow")(on_false), step("quick")(on_true))
    run = ByHand([step("after")(merged), index], {x: 3, pred: True})
    assert run.held == {"quick"}
    run.complete("quick")
    assert run.held == {"after"} and run.results[1] == 1
    run.complete("after")
    assert run.scheduler.done and run.history == ["quick", "after"]


def test_merge_of_two_live_inputs_is_an_error(graph: af.Graph) -> None:
    """Behaviour 3: also when it has fired already."""
    x = af.placeholder("int64", ())
    merged, _ = af.raw.merge(step("one")(x), step("two")(x))
    run = ByHand(step("after")(merged), {x: 3})
    run.complete("one", "after")
    with pytest.raises(SchedulingError, match="two live inputs"):
        run.complete("two")


def test_merge_waits_for_its_control_inputs_dead_or_alive(graph: af.Graph) -> None:
    """Behaviour 4."""
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    on_false, on_true = af.raw.switch(x, pred)
    dead_control, live_control = step("dead")(on_false), step("live")(on_true)
    value, other = step("value")(on_true), step("other")(on_false)
    with af.control_dependencies([dead_control, live_control]):
        merged, _ = af.raw.merge(value, other)
    run = ByHand(step("after")(merged), {x: 3, pred: True})
    run.complete("value")
    assert run.held == {"live"}, "the merge has its value but waits for its control inputs"
    run.complete("live")
    assert run.held == {"after"}, "a dead control input does not kill it"


def test_merge_dies_when_all_its_data_inputs_are_dead(graph: af.Graph) -> None:
    """Behaviour 4: with live control inputs too, and not before they have come."""
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    dead, _ = af.raw.switch(x, pred, name="fork")
    live = step("live")(x)
    with af.control_dependencies([live]):
        merged, _ = af.raw.merge(dead, step("other")(dead))
    run = ByHand(merged, {x: 3, pred: True})
    assert not run.scheduler.done
    run.complete("live")
    assert run.scheduler.done and run.results[0].killer == "fork"


def test_a_control_trigger_runs_when_its_inputs_are_done_dead_or_alive(graph: af.Graph) -> None:
    """Behaviour 6."""
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    on_false, on_true = af.raw.switch(x, pred)
    with af.control_dependencies([step("dead")(on_false), step("live")(on_true)]):
        trigger = af.raw.control_trigger()
    with af.control_dependencies([trigger]):
        after = step("after")(x)
    run = ByHand(after, {x: 3, pred: True})
    assert run.held == {"live"}
    run.complete("live")
    assert run.held == {"after"}


# -- loops: frames and iterations --------------------------------------------------------------------------------


def test_a_frame_lives_from_its_first_enter_to_its_last_iteration(graph: af.Graph) -> None:
    n = af.placeholder("int64", ())
    gate = step("gate")(n)
    loop = counting_loop(gate)
    run = ByHand(step("after")(loop.total), {n: 2})
    assert run.scheduler.statistics()[2:] == (2, 2, 0), "the counter has entered, the limit has not"
    run.complete("gate")
    run.complete_all_but("after")
    assert run.scheduler.statistics()[2:] == (1, 1, 0), "only the root is left"
    run.complete("after")
    assert run.scheduler.statistics() == NOTHING and run.results == [2]


@pytest.mark.parametrize("bound", [1, 2, 3, 10])
def test_later_iterations_are_parked_at_the_bound(graph: af.Graph, bound: int) -> None:
    """Behaviour 10: the next iteration starts when the oldest ends."""
    n = af.placeholder("int64", ())
    quick, slow = step("quick"), step("slow")
    loop = af.while_loop(
        lambda i, s: i < n,
        lambda i, s: (quick(i) + 1, slow(s) + i),
        (0, 0),
        parallel_iterations=bound,
        name="loop",
    )
    run = ByHand(list(loop), {n: 6})
    for oldest in range(6):
        run.complete_all_but("slow")
        last = min(oldest + bound, 7)  # the seventh iteration only finds that the predicate fails
        assert run.live_iterations == last - oldest
        assert {name for name in run.history if name.startswith("quick")} == at("quick", *range(min(last, 6)))
        assert run.scheduler.statistics().parked == (1 if last < 7 else 0)
        assert run.held == at("slow", oldest)
        run.complete(f"slow@loop/{oldest}")
    run.complete_all_but()
    assert run.results == [6, 15] and run.scheduler.statistics() == NOTHING


def test_an_iteration_begins_as_another_ends_if_there_is_memory_for_as_many(graph: af.Graph) -> None:
    """Fault F32: what iterations save stays when they end. Without memory for two, the next one begins alone."""
    x = af.placeholder("int32", ())
    loop = af.while_loop(lambda i, s: i < 8, lambda i, s: (i + 1, step("work")(s)), (x, x), name="loop")
    run = ByHand(list(loop), {x: 0})
    room = Room(3)
    (info,) = {iteration.frame.info for _, iteration, _ in run.firings}
    info.working_set = room  # type: ignore[assignment]
    run.complete_all_but("work")
    assert run.live_iterations == 3
    room.count = 2
    run.complete("work@loop/0")
    run.complete_all_but("work")
    assert run.live_iterations == 2
    room.count = 0
    for number in range(1, 8):
        run.complete(f"work@loop/{number}")
        run.go_on()  # an iteration that begins alone asks for memory first
        run.complete_all_but("work")
        assert run.live_iterations == (number < 7)
    assert run.scheduler.statistics() == NOTHING


def test_a_late_loop_constant_reaches_the_iterations_already_started(graph: af.Graph) -> None:
    """Behaviour 9: and the iterations that start later; no iteration ends before it has come."""
    x = af.placeholder("int64", ())
    late, use = step("late")(x), step("use")
    loop = af.while_loop(
        lambda i, s: i < 5, lambda i, s: (i + 1, use(late, i)), (x, x), parallel_iterations=3, name="loop"
    )
    run = ByHand(list(loop), {x: 0})
    run.complete_all_but("late")
    assert run.live_iterations == 3 and run.held == {"late"}
    run.complete("late")
    assert run.held == at("use", 0, 1, 2)
    run.complete_all_but()
    assert run.scheduler.done and at("use", 0, 1, 2, 3, 4) <= set(run.history)


def test_what_needs_loop_constants_only_runs_in_every_iteration(graph: af.Graph) -> None:
    """Behaviour 9: also in iterations that start after the constants have come."""
    x = af.placeholder("int64", ())
    loop = counting_loop(3, bound=1)
    value = step("use")(loop.constant(x), loop.constant(x + 1))
    left = af.raw.exit(af.raw.switch(value, loop.every < loop.constant(3))[0])
    run = ByHand([loop.total, left], {x: 7})
    run.complete_all_but()
    assert run.results == [3, 7] and at("use", 0, 1, 2, 3) <= set(run.history)


def test_a_dead_loop_constant_kills_its_users_in_every_iteration(graph: af.Graph) -> None:
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    loop = counting_loop(3)
    dead = loop.constant(af.raw.switch(x, pred, name="fork")[1])
    value = af.raw.exit(af.raw.switch(step("use")(dead), loop.every < loop.constant(3))[0])
    run = ByHand([loop.total, value], {x: 0, pred: False})
    run.complete_all_but()
    assert run.results[0] == 3 and run.results[1].killer == "fork"
    assert not [name for name in run.history if name.startswith("use")]


def test_an_iteration_ends_after_its_predecessor(graph: af.Graph) -> None:
    """Behaviour 11."""
    x, side = af.placeholder("int64", ()), step("side")
    loop = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, side(i)), (x, x), name="loop")
    run = ByHand(list(loop), {x: 0})
    run.complete_all_but("side")
    assert run.held == at("side", 0, 1, 2) and run.live_iterations == 4
    run.complete("side@loop/1", "side@loop/2")
    assert run.live_iterations == 4, "all that is left is held by iteration 0"
    run.complete("side@loop/0")
    assert run.scheduler.statistics() == NOTHING and run.results == [3, 2]


def test_an_iteration_that_has_ended_keeps_no_other(graph: af.Graph) -> None:
    """A caller on the stack may hold an iteration that has ended while many others follow."""
    x, side = af.placeholder("int64", ()), step("side")
    loop = af.while_loop(lambda i, s: i < 9, lambda i, s: (i + 1, side(i)), (x, x), name="loop", parallel_iterations=2)
    run = ByHand(list(loop), {x: 0})
    run.complete_all_but("side")
    first = next(iteration for node, iteration, _ in run.firings if node.name.endswith("side"))
    run.complete("side@loop/0")
    run.complete_all_but("side")
    run.complete("side@loop/1")
    assert first.next is None and first.previous is None


def test_an_iteration_ends_after_its_child_frames(graph: af.Graph) -> None:
    """Behaviour 11."""
    x, inner_step = af.placeholder("int64", ()), step("inner_step")

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.while_loop(lambda j: j < 1, lambda j: inner_step(j) + 1, (x,), name="inner")[0]

    outer = af.while_loop(lambda i, s: i < 2, body, (x, x), name="outer")
    run = ByHand(list(outer), {x: 0})
    run.complete_all_but("inner_step")
    first, second = "inner_step@outer/0/inner/0", "inner_step@outer/1/inner/0"
    assert run.held == {first, second}
    assert run.scheduler.statistics()[2:4] == (4, 1 + 3 + 2)
    run.complete(second)
    run.complete_all_but("inner_step")
    assert run.scheduler.statistics()[2:4] == (3, 1 + 3 + 1), "the inner loop of iteration 1 has ended, iteration 1 not"
    run.complete(first)
    run.complete_all_but()
    assert run.scheduler.statistics() == NOTHING


def test_two_activations_of_an_inner_loop_share_nothing(graph: af.Graph) -> None:
    """Behaviour 12: the iterations of both, interleaved, keep their own values."""
    x, inner_step = af.placeholder("int64", ()), step("add_up")

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        inner = af.while_loop(lambda j, t: j < 2, lambda j, t: (j + 1, inner_step(t) + i), (x, x * 0), name="inner")
        return i + 1, s * 10 + inner[1]

    outer = af.while_loop(lambda i, s: i < 3, body, (x, x), name="outer")
    run = ByHand(outer[1], {x: 0})
    for k in range(2):
        run.complete_all_but("add_up")
        expected = {f"add_up@outer/{i}/inner/{k}" for i in range(3)}
        assert run.held == expected
        run.complete(*sorted(expected, reverse=True))
    run.complete_all_but()
    assert run.results == [24]  # 2·0, 2·1 and 2·2 as digits
    assert run.scheduler.statistics() == NOTHING


# -- loops: dead ends and exits ----------------------------------------------------------------------------------


def test_a_loop_on_an_untaken_branch_ends_at_once(graph: af.Graph) -> None:
    """Behaviour 7: a dead Enter makes the loop's Merge dead."""
    x, pred = af.placeholder("int64", ()), af.placeholder("bool", ())
    start = af.raw.switch(x, pred, name="fork")[1]
    run = ByHand(counting_loop(3, start=start).total, {x: 0, pred: False})
    assert run.history == [] and run.scheduler.statistics() == NOTHING
    assert run.results[0].killer == "fork", "the switch that decided, not the loop's own"


def test_a_dead_next_iteration_starts_nothing(graph: af.Graph) -> None:
    """Behaviour 7: the last iteration sends a dead token around."""
    x = af.placeholder("int64", ())
    run = ByHand(counting_loop(x).total, {x: 2})
    run.complete_all_but()
    assert at("less", 0, 1, 2) <= set(run.history) and not at("less", 3) & set(run.history)
    assert run.scheduler.done


def test_a_live_exit_leaves_before_the_loop_has_ended(graph: af.Graph) -> None:
    """Behaviour 8."""
    n = af.placeholder("int64", ())
    loop, body_step = counting_loop(n), step("body_step")
    found = loop.found(af.equal(body_step(loop.every), loop.constant(1)))
    run = ByHand([step("after")(found), loop.total], {n: 3})
    run.complete("less@loop/0", "add@loop/0", "body_step@loop/0", "equal@loop/0")
    assert run.held == at("body_step", 1) | at("less", 1), "the dead exit of iteration 0 has been dropped"
    run.complete("body_step@loop/1", "equal@loop/1")
    assert run.held == at("less", 1) | {"after"}, "the live one left while iteration 1 was running"
    run.complete_all_but()
    assert run.results == [1, 3]


def test_an_exit_that_never_had_a_live_value_is_dead_once_its_frame_ends(graph: af.Graph) -> None:
    """Behaviour 8: and no sooner, because a later iteration might have brought one."""
    n = af.placeholder("int64", ())
    loop, last = counting_loop(n), step("last")
    never = loop.found(af.equal(last(loop.every), loop.constant(99)))
    with af.control_dependencies([never]):
        trigger = af.raw.control_trigger()
    with af.control_dependencies([trigger]):
        after = step("after")(n)
    run = ByHand([never, after], {n: 2})
    run.complete_all_but("last")
    assert run.held == at("last", 0, 1, 2)
    run.complete("last@loop/0", "last@loop/1")
    run.complete_all_but("last")
    assert run.held == at("last", 2) and run.results == [None, None]
    run.complete("last@loop/2")
    run.complete_all_but("after")
    assert isinstance(run.results[0], Dead) and run.held == {"after"}


def test_an_exit_takes_one_value_out_of_a_frame(graph: af.Graph) -> None:
    loop = counting_loop(3)
    early = loop.found(af.less(loop.every, loop.constant(2)))
    run = ByHand(step("after")(early))
    with pytest.raises(SchedulingError, match="exit"):
        run.complete_all_but()


# -- control edges of the primitives -----------------------------------------------------------------------------


def test_a_control_edge_from_enter_holds_in_the_frame_it_leads_into(graph: af.Graph) -> None:
    x = af.placeholder("int64", ())
    loop = counting_loop(2)
    first = af.raw.enter(step("late")(x), "loop")
    every = loop.constant(step("later")(x))
    with af.control_dependencies([first]):
        once = step("once")(loop.every)
    with af.control_dependencies([every]):
        always = step("always")(loop.every)
    kept = [af.raw.exit(af.raw.switch(v, af.equal(loop.every, loop.constant(0)))[1]) for v in (once, always)]
    run = ByHand([*kept, loop.total], {x: 0})
    run.complete_all_but("late", "later", "always")
    assert run.held == {"late", "later"}
    run.complete("late")
    assert run.held == at("once", 0) | {"later"}
    run.complete("once@loop/0", "later")
    assert run.held >= at("always", 0, 1, 2)
    run.complete_all_but()
    assert run.results == [0, 0, 2] and run.scheduler.statistics() == NOTHING


@pytest.mark.parametrize("bound", [1, 32])
def test_a_control_edge_from_next_iteration_holds_in_the_next_iteration(graph: af.Graph, bound: int) -> None:
    loop = counting_loop(2, bound=bound)
    carried = af.raw.next_iteration(step("carried")(loop.i))
    with af.control_dependencies([carried]):
        after = step("after")(loop.every)
    kept = af.raw.exit(af.raw.switch(after, af.equal(loop.every, loop.constant(2)))[1])
    run = ByHand([kept, loop.total])
    run.complete_all_but()
    assert run.results == [2, 2]
    assert {name for name in run.history if name.startswith("after")} == at("after", 1, 2)
    assert run.scheduler.statistics() == NOTHING


def test_a_next_iteration_killed_by_a_control_input_stops_there(graph: af.Graph) -> None:
    """Behaviour 7: nothing behind it hears of it, not even along control edges."""
    loop, hold = counting_loop(3), step("hold")
    gate = af.identity(af.raw.switch(loop.every, af.equal(loop.every, loop.constant(1)))[1])
    with af.control_dependencies([gate]):
        carried = af.raw.next_iteration(loop.every)
    with af.control_dependencies([carried]):
        after = step("after")(hold(loop.every))
    run = ByHand([af.raw.exit(after), loop.total])
    run.complete_all_but("hold")
    run.complete_all_but()
    assert run.results == [2, 3] and {name for name in run.history if name.startswith("after")} == at("after", 2)


def test_an_exit_killed_by_a_control_input_is_held_like_any_dead_exit(graph: af.Graph) -> None:
    x = af.placeholder("int64", ())
    loop = counting_loop(x)
    waiting = step("hold")(loop.every)
    for _ in range(20):  # nodes that wait, at all places where a token of the wrong frame might arrive
        waiting = af.negative(waiting)
    gate = af.identity(af.raw.switch(loop.every, af.equal(loop.every, loop.constant(1)))[1])
    with af.control_dependencies([gate]):
        left = af.raw.exit(loop.every)  # live only in iteration 1, where its control input is
    with af.control_dependencies([left]):
        after = step("after")(x)
    run = ByHand([left, after, af.raw.exit(af.raw.switch(waiting, loop.every < loop.constant(x))[0])], {x: 2})
    run.complete_all_but("hold")
    run.complete_all_but()
    assert run.results == [1, 2, 2] and run.scheduler.statistics() == NOTHING


# -- ending early ------------------------------------------------------------------------------------------------


def test_an_aborted_run_holds_nothing(graph: af.Graph) -> None:
    x, hold = af.placeholder("int64", ()), step("hold")
    loop = af.while_loop(lambda i, s: i < 9, lambda i, s: (i + 1, hold(s)), (x, x), parallel_iterations=3, name="loop")
    run = ByHand(list(loop), {x: 0})
    run.complete_all_but("hold")
    held = run.scheduler.statistics()
    assert (held.frames, held.iterations, held.parked, held.running) == (2, 4, 1, 1)
    run.scheduler.abort()
    assert run.scheduler.statistics() == NOTHING
    assert run.scheduler.next_firing() is None and run.scheduler.waiting() == []


@pytest.mark.parametrize("bound", [1, 32])
def test_a_loop_may_run_max_iterations_times_and_no_more(bound: int) -> None:
    with af.Graph():
        n = af.placeholder("int64", ())
        (total,) = af.while_loop(lambda i: i < n, lambda i: i + 1, (0,), parallel_iterations=bound, name="loop")
    run = ByHand(total, {n: 3}, max_iterations=3)
    run.complete_all_but()
    assert run.results == [3]
    run = ByHand(total, {n: 4}, max_iterations=3)
    with pytest.raises(SchedulingError, match="loop loop reached max_iterations=3"):
        run.complete_all_but()


def test_what_a_stalled_run_waits_for_is_named(graph: af.Graph) -> None:
    x = af.placeholder("int64", ())
    run = ByHand(step("both")(step("first")(x), step("second")(x)), {x: 3})
    run.complete("first")
    assert run.scheduler.waiting() == ["both has 1 of 2 inputs"]


# -- the order makes no difference -------------------------------------------------------------------------------


def _program() -> tuple[list[af.Tensor], dict[af.Tensor, int]]:
    """Nested loops with branches on both levels."""
    x = af.placeholder("int64", ())

    def inner(j: af.Tensor, t: af.Tensor, i: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return j + 1, af.cond(af.equal((i + j) % 2, 0), lambda: t * 3 + j, lambda: t - i)

    def outer(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        looped = af.while_loop(lambda j, t: j < i, lambda j, t: inner(j, t, i), (x * 0, s), parallel_iterations=2)[1]
        return i + 1, af.cond(looped % 2 > 0, lambda: looped, lambda: looped + s)

    return list(af.while_loop(lambda i, s: i < 6, outer, (x, x + 1), parallel_iterations=3)), {x: 0}


def _in_python() -> list[int]:
    s = 1
    for i in range(6):
        t = s
        for j in range(i):
            t = t * 3 + j if (i + j) % 2 == 0 else t - i
        s = t if t % 2 > 0 else t + s
    return [6, s]


@pytest.mark.parametrize("seed", [None, *range(20)])
def test_a_shuffled_ready_order_gives_the_same_results(graph: af.Graph, seed: int | None) -> None:
    fetches, feeds = _program()
    run = ByHand(fetches, feeds, seed=seed)
    run.complete_all_but()
    assert run.results == _in_python() and run.scheduler.statistics() == NOTHING


def test_a_seed_fixes_the_order(graph: af.Graph) -> None:
    fetches, feeds = _program()
    runs = [ByHand(fetches, feeds, seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        run.complete_all_but()
    assert runs[0].history == runs[1].history != runs[2].history


def test_a_long_loop_needs_no_more_than_the_bound(graph: af.Graph) -> None:
    n = af.placeholder("int64", ())
    (total,) = af.while_loop(lambda i: i < n, lambda i: i + 1, (0,), parallel_iterations=4)
    scheduler = Scheduler(partition_of(total, {n: 0}))
    scheduler.start([np.int64(5000)])
    most = 0
    while (firing := scheduler.next_firing()) is not None:
        node, iteration, inputs = firing
        assert node.kernel is not None
        scheduler.complete(node, iteration, node.kernel(*inputs))
        most = max(most, scheduler.statistics().iterations)
    assert scheduler.results == [5000] and most <= 1 + 4
    assert scheduler.statistics() == NOTHING
