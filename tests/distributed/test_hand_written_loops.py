"""Loops and branches written with the primitives are cut over devices like structured ones."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.gates import Gate, settle
from tests.conformance.journal import Journal
from tests.conftest import AuditedRun
from tests.distributed.by_hand import Loop, branch, random_program, write
from tests.distributed.clusters import Cluster
from tests.runtime.hand_written import counting_loop

if TYPE_CHECKING:
    from tests.conftest import OpenSession

On: TypeAlias = Callable[[int], str]
Built: TypeAlias = tuple[Any, Any]

SEEDS = int(os.environ.get("ASYNCFLOW_SEEDS", "1"))
KINDS = ("sim", "cpu", "cuda")


def counter(on: On, window: int) -> Built:
    """A loop with its predicate on one device and its counter's operands on another."""
    loop = Loop("counter", window)
    limit, one = loop.enter(7), loop.enter(1)

    def go_on(variables: list[af.Tensor]) -> af.Tensor:
        with af.device(on(0)):
            return variables[0] < limit

    def body(variables: list[af.Tensor]) -> list[af.Tensor]:
        with af.device(on(1)):
            return [variables[0] + one]

    return loop.write(go_on, body, [af.constant(0)]), [7]


def two_variables(on: On, window: int) -> Built:
    """Each on a device of its own, each made of both, and neither on that of the predicate."""
    loop = Loop("pair", window, marks=False)
    limit, one = loop.enter(6), loop.enter(1)

    def go_on(variables: list[af.Tensor]) -> af.Tensor:
        with af.device(on(0)):
            return variables[0] < limit

    def body(variables: list[af.Tensor]) -> list[af.Tensor]:
        i, x, y = variables
        with af.device(on(1)):
            x, before = x + x + y, x
        with af.device(on(2)):
            y = y - before
        return [i + one, x, y]

    x, y = np.array([1.0, 2.0]), np.array([3.0, -1.0])
    left = loop.write(go_on, body, [af.constant(0), af.constant(x), af.constant(y)])
    for _ in range(6):
        x, y = x * 2.0 + y, y - x
    return left, [6, x, y]


def nested(on: On, window: int) -> Built:
    """The inner loop on another device; it runs as often as the outer one has."""
    outer, inner = Loop("outer", window, until=True), Loop("inner", window)
    limit, one, zero = (outer.enter(value) for value in (4, 1, 0))

    def body(variables: list[af.Tensor]) -> list[af.Tensor]:
        i, total = variables
        with af.device(on(1)):
            bound, step = inner.enter(i), inner.enter(one)
            _, summed = inner.write(lambda v: v[0] < bound, lambda v: [v[0] + step, v[1] + v[1] + v[0]], [zero, total])
        with af.device(on(2)):
            summed = summed + i
        return [i + one, summed]

    with af.device(on(0)):
        left = outer.write(lambda v: v[0] < limit, body, [af.constant(0), af.constant(1)])
    total = 1
    for i in range(4):
        for j in range(i):
            total = total * 2 + j
        total += i
    return left, [4, total]


def branching(on: On, window: int) -> Built:
    """A branch in the body: its predicate on one device, one side on another, and a branch inside it."""
    loop = Loop("branching", window)
    limit, one, two, three = (loop.enter(value) for value in (9, 1, 2, 3))

    def odd(values: list[af.Tensor]) -> list[af.Tensor]:
        i, total, three = values
        with af.device(on(1)):
            pred = total > i
        with af.device(on(2)):
            return branch(pred, lambda v: [v[0] * v[1]], lambda v: [v[0] - v[1]], [total, three])

    def body(variables: list[af.Tensor]) -> list[af.Tensor]:
        i, total = variables
        with af.device(on(2)):
            is_odd = af.equal(i % two, one)
        with af.device(on(1)):
            (total,) = branch(is_odd, odd, lambda v: [v[1] - v[0]], [i, total, three])
        return [i + one, total]

    left = loop.write(lambda v: v[0] < limit, body, [af.constant(0), af.constant(5)])
    total = 5
    for i in range(9):
        total = (total * 3 if total > i else total - 3) if i % 2 else total - i
    return left, [9, total]


def exits_elsewhere(on: On, window: int) -> Built:
    """The result of a loop is used on a third device, and enters a loop there."""
    loop, again = Loop("first", window), Loop("second", window)
    limit, one = loop.enter(5), loop.enter(1)
    with af.device(on(1)):
        i, x = loop.write(
            lambda v: v[0] < limit, lambda v: [v[0] + one, v[1] + v[1]], [af.constant(0), af.constant([1.0, 3.0])]
        )
    with af.device(on(2)):
        scaled = x + 1.0
        last, step = again.enter(i), again.enter(af.constant(1))
        j, y = again.write(lambda v: v[0] < last, lambda v: [v[0] + step, v[1] - v[0]], [i - i, af.astype(i, "int64")])
    with af.device(on(0)):
        doubled = scaled * 2.0
    return [doubled, j, y], [np.array([66.0, 194.0]), 5, 5 - 10]


def untaken(on: On, window: int) -> Built:
    """Loops over both devices on either side of a branch; in one of them every second iteration has a third."""

    def powers(name: str, base: int, x: af.Tensor, numbers: list[af.Tensor]) -> af.Tensor:
        loop = Loop(name, window)
        zero, one, limit = numbers
        end, step = loop.enter(limit), loop.enter(one)

        def body(variables: list[af.Tensor]) -> list[af.Tensor]:
            i, value = variables
            with af.device(on(base)):
                value = value + value + i
            with af.device(on(base + 1)):
                return [i + step, value - step]

        return loop.write(lambda v: v[0] < end, body, [zero, x])[1]

    def sides(pred: af.Tensor, x: af.Tensor, numbers: list[af.Tensor], name: str) -> af.Tensor:
        (merged,) = branch(
            pred,
            lambda v: [powers(f"{name}_true", 1, v[0], v[1:])],
            lambda v: [powers(f"{name}_false", 0, v[0], v[1:])],
            [x, *numbers],
        )
        return merged

    loop = Loop("around", window)
    numbers = [loop.enter(value) for value in (0, 1, 3)]
    two = loop.enter(2)

    def body(variables: list[af.Tensor]) -> list[af.Tensor]:
        i, x = variables
        with af.device(on(2)):
            pred = af.equal(i % two, numbers[0])
        return [i + numbers[1], sides(pred, x, numbers, "side")]

    left = loop.write(lambda v: v[0] < numbers[2], body, [af.constant(0), af.constant(1)])
    x = 1
    for _ in range(3):
        for j in range(3):
            x = x * 2 + j - 1
    return left, [3, x]


def invariant(on: On, window: int) -> Built:
    """A product of what never changes, on a device that has nothing else of the loop."""
    loop = Loop("invariant", window)
    limit, one, w = loop.enter(4), loop.enter(1), loop.enter(af.constant([2.0, 0.5]))

    def body(variables: list[af.Tensor]) -> list[af.Tensor]:
        i, x = variables
        with af.device(on(1)):
            squared = w * w
        with af.device(on(2)):
            return [i + one, x * squared + w]

    with af.device(on(0)):
        i, x = loop.write(lambda v: v[0] < limit, body, [af.constant(0), af.constant([1.0, 1.0])])
    w_now, expected = np.array([2.0, 0.5]), np.ones(2)
    for _ in range(4):
        expected = expected * (w_now * w_now) + w_now
    return [i, x], [4, expected]


def triggered(on: On, window: int) -> Built:
    """In a loop, taken and not, something on one device waits for what runs on another, dead or not."""

    def waits(side: af.Tensor, name: str) -> af.Tensor:
        loop = Loop(name, window)
        limit, one = loop.enter(3), loop.enter(1)

        def body(variables: list[af.Tensor]) -> list[af.Tensor]:
            i, x = variables
            with af.device(on(1)), af.control_dependencies([x + x]):
                trigger = af.raw.control_trigger()
            with af.device(on(2)), af.control_dependencies([trigger]):
                return [i + one, x + one]

        with af.device(on(0)):
            return loop.write(lambda v: v[0] < limit, body, [af.constant(0), side])[1]

    dead, live = af.raw.switch(af.constant(4), af.constant(True))
    merged, _ = af.raw.merge(waits(dead, "untaken"), waits(live, "taken"))
    return [merged], [7]


def half_untaken(on: On, window: int) -> Built:
    """The counter of a loop in an untaken branch begins with ready values, and would count if it could."""
    zero, one_more, three, five = (af.constant(number) * 1 for number in (0, 1, 3, 5))

    def summed(side: af.Tensor, name: str) -> af.Tensor:
        loop = Loop(name, window)
        limit, one, w = loop.enter(five), loop.enter(one_more), loop.enter(three)

        def body(variables: list[af.Tensor]) -> list[af.Tensor]:
            i, x = variables
            with af.device(on(2)):
                weight = w * w
            with af.device(on(1)):
                return [i + one, x + i * weight]

        with af.device(on(0)):
            return loop.write(lambda v: v[0] < limit, body, [zero, side])[1]

    dead, live = af.raw.switch(af.constant(4), af.constant(True))
    merged, _ = af.raw.merge(summed(dead, "untaken"), summed(live, "taken"))
    return [merged], [94]


def no_loop(on: On, window: int) -> Built:
    """A frame that has one iteration."""
    entered = af.raw.enter(af.constant([3.0, 4.0]), "once", parallel_iterations=window)
    with af.device(on(1)):
        doubled = entered * entered
    with af.device(on(2)):
        return [af.raw.exit(doubled - entered)], [np.array([6.0, 12.0])]


PROGRAMS = (
    counter,
    two_variables,
    nested,
    branching,
    exits_elsewhere,
    untaken,
    invariant,
    triggered,
    half_untaken,
    no_loop,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_hand_written_loop_over_devices(program: Callable[[On, int], Built], kind: Any) -> None:
    """Value for value what one device and NumPy give, in any order, and nothing is left of any run."""
    window = (1, 32)[(PROGRAMS.index(program) + KINDS.index(kind)) % 2]  # each program with both
    with af.Graph() as graph:
        fetches, expected = program(Cluster(3, kind=kind).device, window)
    with af.Graph() as alone:
        same, _ = program(lambda _: f"{kind}:0", window)

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph, seed=window, debug=True) as session:
            assert len(session.plan(fetches).partitions) > 1
            for _ in range(3):
                np.testing.assert_equal(await session.run(fetches), expected)
                assert AuditedRun.leftovers == []
        async with open_session(alone) as session:
            np.testing.assert_equal(await session.run(same), expected)

    Cluster(3, kind=kind, jitter=0.5, seed=window).run(main)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(6 * SEEDS))
def test_a_random_program_by_hand(number: int, kind: Any) -> None:
    """Nested loops and branches in any order, each node on a device picked at random: what NumPy gives."""
    random = Random(number)
    program = random_program(random)
    with af.Graph() as graph:
        fetches, feeds = write(program)

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph, seed=number, placement_seed=number, debug=True) as session:
            for _ in range(2):
                np.testing.assert_equal(await session.run(fetches, feeds), program.numbers())
                assert AuditedRun.leftovers == []

    Cluster(2 + number % 2, kind=kind, jitter=0.5, seed=number).run(main)


def test_an_invariant_enters_once_on_each_device_that_uses_it() -> None:
    """The invariant is sent before the loop, not in each iteration, and the loop begins where nothing else of it is."""
    cluster = Cluster(3)
    with af.Graph() as graph:
        fetches, _ = invariant(cluster.device, 32)

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph) as session:
            nodes = session.plan(fetches).graph.nodes
        w = [n for n in nodes if n.op.name == "enter" and n.attrs["constant"] and n.inputs[0].shape == (2,)]
        assert sorted(str(node.device) for node in w) == ["sim:1", "sim:2"]
        sent = [n.inputs[0].node.op.name for n in nodes if n.op.name == "send"]
        assert "enter" not in sent

    cluster.run(main)


@pytest.mark.parametrize("window", [1, 3])
def test_no_device_runs_ahead_of_another_by_more_than_the_window(window: int) -> None:
    """Behaviour 10: the predicate's device waits until the oldest iteration has ended on all others."""
    journal, gate = Journal(), Gate()
    with af.Graph() as graph:
        with af.device("sim:0"):
            loop = counting_loop(8, bound=window)
            started = journal.note("started", loop.every)
        with af.device("sim:1"):
            held = af.raw.exit(af.raw.switch(gate(loop.every), loop.every < loop.constant(8))[0])

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph) as session:
            running = asyncio.create_task(session.run([loop.total, started, held]))
            await settle()
            assert gate.arrived == window
            assert journal.values("started") == list(range(window))
            gate.open()
            assert (await running)[::2] == [8, 8]
            assert sorted(journal.values("started")) == list(range(9))

    Cluster(2).run(main)


# -- what cannot be cut ------------------------------------------------------------------------------------------------


def two_predicates() -> Built:
    """Two loops in one frame."""
    limit, one, many = (af.raw.enter(value, "f", constant=True) for value in (5, 1, 20))
    i, y = (af.raw.merge(af.raw.enter(value, "f"))[0] for value in (0, 3))
    i_left, i_stays = af.raw.switch(i, i < limit)
    y_left, y_stays = af.raw.switch(y, y < many)
    af.raw.add_back_edge(i, af.raw.next_iteration(i_stays + one))
    af.raw.add_back_edge(y, af.raw.next_iteration(y_stays + y_stays))
    return [af.raw.exit(i_left), af.raw.exit(y_left)], [5, 24]


def only_in_the_first_iteration() -> Built:
    """The entered value is used by itself."""
    loop = counting_loop(3, frame="f")
    first = af.raw.exit(af.raw.enter(7, "f") + loop.every)
    return [loop.total, first], [3, 7]


def marked_twice() -> Built:
    limit, one = (af.raw.enter(value, "f", constant=True) for value in (4, 1))
    i, y = (af.raw.merge(af.raw.enter(value, "f"))[0] for value in (0, 1))
    goes_on = i < limit
    i_left, i_stays = af.raw.switch(i, af.raw.loop_cond(goes_on))
    y_left, y_stays = af.raw.switch(y, af.raw.loop_cond(goes_on))
    af.raw.add_back_edge(i, af.raw.next_iteration(i_stays + one))
    af.raw.add_back_edge(y, af.raw.next_iteration(y_stays + y_stays))
    return [af.raw.exit(i_left), af.raw.exit(y_left)], [4, 16]


def marked_in_vain() -> Built:
    """The loop_cond marks what no switch asks for."""
    limit, one = (af.raw.enter(value, "f", constant=True) for value in (4, 1))
    i, _ = af.raw.merge(af.raw.enter(0, "f"))
    marked = af.raw.loop_cond(i < one)
    left, stays = af.raw.switch(i, i < limit)
    af.raw.add_back_edge(i, af.raw.next_iteration(stays + one))
    done = af.raw.exit(left)
    return [done, af.raw.exit(af.raw.switch(marked, marked)[1])], [4, True]


def enters_perhaps() -> Built:
    """The entered value left another loop in one of its iterations."""
    found = counting_loop(6)
    start = found.found(af.equal(found.every, found.constant(2)))
    return [counting_loop(5, start=start, frame="f").total], [5]


def seen_where_it_is_not_taken() -> Built:
    """The counter of a loop on a branch not taken is written down once all the same."""
    dead, _ = af.raw.switch(af.constant(1), af.constant(True))
    log = af.Variable(0, name="log")
    limit, one = (af.raw.enter(value, "f", constant=True) for value in (4, 1))
    i, y = (af.raw.merge(af.raw.enter(value, "f"))[0] for value in (0, dead))
    noted = log.assign_add(i + one)
    goes_on = af.raw.loop_cond(i + y < limit)
    i_stays, y_stays = (af.raw.switch(value, goes_on)[1] for value in (i, y))
    af.raw.add_back_edge(i, af.raw.next_iteration(i_stays + one))
    af.raw.add_back_edge(y, af.raw.next_iteration(y_stays + y_stays))
    with af.control_dependencies([noted]):
        left = af.raw.exit(af.raw.switch(y, goes_on)[0])
    return [af.raw.merge(left, af.constant(8))[0], log.read()], [8, 1]


IRREGULAR: dict[Callable[[], Built], str] = {
    two_predicates: "its variables do not all go on by one predicate, which their switches share: see next_iteration ",
    only_in_the_first_iteration: r"add_1 \(add, built at .*\) uses enter_3, which not every iteration has",
    marked_twice: r"it has several predicates, loop_cond \(loop_cond, built at .*\), loop_cond_1 ",
    marked_in_vain: "its switches do not ask for its predicate, loop_cond ",
    enters_perhaps: "it is only known in a run whether what enters is dead: see enter_",
    seen_where_it_is_not_taken: "is live although frame 'f' may be on a branch not taken",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", IRREGULAR, ids=lambda program: program.__name__)
def test_an_irregular_loop_stays_on_one_device(program: Callable[[], Built], kind: Any) -> None:
    """The loop has the results of one device, whatever else is on others; the plan says why, and where that was
    written.
    """
    with af.Graph() as graph:
        fetches, expected = program()
        beside = af.constant(1) + af.constant(2)

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph, seed=0, placement_seed=1, debug=True) as session:
            for fetch, value in zip(fetches, expected, strict=True):
                assert await session.run([fetch, beside]) == [value, 3]
            text = session.plan([*fetches, beside]).explain()
            assert re.search(f"frame 'f' stays on one device: .*{IRREGULAR[program]}", text), text
            assert AuditedRun.leftovers == []

    Cluster(3, kind=kind).run(main)


@pytest.mark.parametrize("program", IRREGULAR, ids=lambda program: program.__name__)
def test_an_irregular_loop_over_two_devices_is_refused(program: Callable[[], Built]) -> None:
    """The message says why, where the loop was written, and where each device was requested."""
    with af.Graph() as graph:
        fetches, _ = program()
    inside = [node for node in graph.nodes if graph.frames.get(node) == ("f",) and node.op.name != "next_iteration"]
    inside[0].device, inside[-1].device = "cpu:0", "cpu:1"
    session = af.Session(graph, devices=["cpu:0", "cpu:1"])
    with pytest.raises(af.PlacementError, match=r"'cpu:1' asked for .*\.py:\d+") as caught:
        session.plan(fetches)
    assert re.search(f"in frame 'f', which stays on one device: .*{IRREGULAR[program]}", str(caught.value))
