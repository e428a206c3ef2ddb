"""Behaviour 33-39: when a loop's effects run, in which order, and what ends a loop early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.gates import settle
from tests.conformance.journal import Journal
from tests.conftest import OpenSession

Run = Callable[..., Awaitable[Any]]


@pytest.fixture
def journal() -> Journal:
    return Journal()


# -- 33: control edges into, inside and out of a loop ----------------------------------------------------------------


async def test_an_outer_control_dependency_gates_the_entry(run: Run, graph: af.Graph, journal: Journal) -> None:
    """Behaviour 33: it runs once, before the loop, and no inner node waits for it."""
    with af.control_dependencies([journal.note("gate")]):
        (result,) = af.while_loop(lambda i: i < 3, lambda i: (journal.note("step", i), i + 1)[1], (0,))
    assert not any(node.control_inputs for body in result.node.subgraphs for node in body.nodes)
    assert await run(result) == 3
    assert journal.entries == ["gate", ("step", 0), ("step", 1), ("step", 2)]


async def test_a_gate_in_an_unordered_graph(run: Run, journal: Journal) -> None:
    """Behaviour 33: the edge itself brings the gate in and holds the loop back, not the order of effects."""
    release = asyncio.Event()

    @af.op(outputs=())
    async def gate() -> None:
        await release.wait()
        journal.entries.append("gate")

    @af.op(outputs=af.spec("int64", ()))
    def step(i: Any) -> Any:
        journal.entries.append("step")
        return i + 1

    with af.Graph(effects="unordered"):
        with af.control_dependencies([gate()]):
            (result,) = af.while_loop(lambda i: i < 2, step, (0,))
    pending = asyncio.ensure_future(run(result))
    await settle()
    assert journal.entries == []
    release.set()
    assert await pending == 2
    assert journal.entries == ["gate", "step", "step"]


async def test_a_control_dependency_on_an_outer_feed(run: Run, graph: af.Graph) -> None:
    """Behaviour 33: a node in the body may wait for a fed tensor."""
    fed = af.placeholder("float32", ())

    def body(i: Any) -> Any:
        with af.control_dependencies([fed]):
            return i + 1

    (result,) = af.while_loop(lambda i: i < 3, body, (0,))
    assert await run(result, {fed: 1.0}) == 3


async def test_a_control_edge_from_an_exit(run: Run, journal: Journal) -> None:
    """Behaviour 33: a node that waits for a loop's result runs after the loop, also without ordered effects."""
    with af.Graph(effects="unordered"):
        (result,) = af.while_loop(lambda i: i < 3, lambda i: stepped(journal, i), (0,))
        with af.control_dependencies([result]):
            after = journal.note("after")
    await run(after)
    assert journal.entries == [("step", 0), ("step", 1), ("step", 2), "after"]


def stepped(journal: Journal, i: Any) -> Any:
    with af.control_dependencies([journal.note("step", i)]):
        return i + 1


# -- 34: effects outside, groups -------------------------------------------------------------------------------------


async def test_an_external_effect_named_in_the_body_runs_once(run: Run, graph: af.Graph) -> None:
    """Behaviour 34: v goes from 0 to 1, not to the number of iterations."""
    v = af.Variable(0)
    bump = v.assign_add(1)

    def body(i: Any) -> Any:
        with af.control_dependencies([bump]):
            return i + 1

    (result,) = af.while_loop(lambda i: i < 10, body, (0,))
    assert await run((result, v)) == (10, 1)


async def test_an_empty_group(run: Run, graph: af.Graph) -> None:
    """Behaviour 34: nothing to wait for, in a body as outside."""

    def body(i: Any) -> Any:
        with af.control_dependencies([af.group()]):
            return i + 1

    assert await run([af.group(), *af.while_loop(lambda i: i < 3, body, (0,))]) == [None, 3]


async def test_a_group_of_results_waits_for_all(run: Run, journal: Journal) -> None:
    """Behaviour 34: one result of each of two loops, and a node that waits for both of them."""
    with af.Graph(effects="unordered"):
        loops = [af.while_loop(lambda i: i < 4, lambda i: stepped(journal, i), (start,))[0] for start in (0, 2)]
        with af.control_dependencies([af.group(*loops)]):
            after = journal.note("after")
    await run(after)
    assert journal.entries[-1] == "after" and len(journal.values("step")) == 4 + 2


@pytest.mark.parametrize("wait", ["group", "scope"])
async def test_waiting_for_a_result_waits_for_what_makes_it(run: Run, journal: Journal, wait: str) -> None:
    """Behaviour 34: a loop variable and a branch's result that nothing reads are made all the same."""
    with af.Graph(effects="unordered"):
        after = af.group()
        results = [
            af.while_loop(lambda i, k: i < 2, lambda i, k: (i + 1, stepped(journal, k)), (0, 5))[1],
            af.cond(True, lambda: stepped(journal, af.constant(8)), lambda: 0),
        ]
        if wait == "group":
            after = af.group(*results)
        else:
            with af.control_dependencies(results):
                after = af.group()
    await run(after)
    assert sorted(journal.values("step")) == [5, 6, 8]


async def test_a_loop_result_named_in_a_body(run: Run, journal: Journal) -> None:
    """Behaviour 34: it is waited for outside, once, and all of what makes it has run before the first iteration."""
    with af.Graph(effects="unordered"):
        outer = af.while_loop(lambda i, k: i < 2, lambda i, k: (i + 1, stepped(journal, k)), (0, 5))[1]

        def body(i: Any) -> Any:
            with af.control_dependencies([outer]):
                return stepped(journal, i)

        (result,) = af.while_loop(lambda i: i < 2, body, (0,))
    assert not any(node.name.startswith("capture") for node in result.node.attrs["body"].nodes)
    assert await run(result) == 2
    assert journal.values("step") == [5, 6, 0, 1]


# -- 35: assigns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_assigns_ordered_by_control_edges(run: Run, effects: Any) -> None:
    """Behaviour 35: a is 10 and b is 55, in both modes."""
    a, b = af.Variable(0, name="a"), af.Variable(0, name="b")

    def body(i: Any) -> Any:
        with af.control_dependencies([a.assign_add(1)]):
            add_b = b.assign_add(a)
        with af.control_dependencies([add_b]):
            return i + 1

    with af.Graph(effects=effects):
        (result,) = af.while_loop(lambda i: i < 10, body, (0,), parallel_iterations=1)
    await run(result)
    with af.Graph():
        assert await run([a.read(), b.read()]) == [10, 55]


async def test_a_predicate_reads_what_the_body_changes(run: Run, graph: af.Graph) -> None:
    """Behaviour 35: 10 and 10."""
    a, b = af.Variable(0), af.Variable(0)

    def body(i: Any) -> Any:
        a.assign_add(1)
        b.assign_add(1)
        return i

    (result,) = af.while_loop(lambda i: b < 10, body, (0,))
    assert await run([result, a, b]) == [0, 10, 10]


async def test_effects_of_a_predicate_come_before_the_bodys(run: Run, graph: af.Graph) -> None:
    """Behaviour 35: also where the predicate is known before it has done them."""
    v = af.Variable(0)

    @af.op(outputs=lambda i: i)
    async def slowly(i: Any) -> Any:
        for _ in range(30):
            await asyncio.sleep(0)
        return i

    def goes_on(i: Any, seen: Any) -> Any:
        v.assign_add(slowly(i) * 0 + 1)
        return i < 3

    _, seen = af.while_loop(goes_on, lambda i, seen: (i + 1, seen * 10 + v.read()), (0, 0))
    assert await run([seen, v.read()]) == [123, 4]


async def test_many_iterations_in_flight_keep_the_order(run: Run, graph: af.Graph) -> None:
    """Behaviour 35: x = 2 x + i does not commute, so one swap would show."""
    x = af.Variable(np.uint64(1))

    def body(i: Any) -> Any:
        x.assign(x * np.uint64(2) + af.astype(i, "uint64"))
        return i + 1

    await run(af.while_loop(lambda i: i < 40, body, (0,), parallel_iterations=32))
    expected = 1
    for i in range(40):
        expected = expected * 2 + i
    assert await run(x.read()) == expected


# -- 36: program order -----------------------------------------------------------------------------------------------


def noted_loop(journal: Journal) -> Any:
    """A in the predicate, then B and C in the body, and D, which the next value waits for."""

    def pred(i: Any) -> Any:
        journal.note("A")
        return i < 2

    def body(i: Any) -> Any:
        journal.note("B")
        journal.note("C")
        with af.control_dependencies([journal.note("D")]):
            return i + 1

    return af.while_loop(pred, body, (0,))[0]


@pytest.mark.parametrize(("effects", "expected"), [("ordered", "ABCDABCDA"), ("unordered", "DD")])
async def test_program_order(run: Run, journal: Journal, effects: Any, expected: str) -> None:
    """Behaviour 36: every effect in the order written, or only what the result needs."""
    with af.Graph(effects=effects):
        result = noted_loop(journal)
    await run(result)
    assert "".join(journal.entries) == expected


@pytest.mark.parametrize("seed", range(4))
async def test_program_order_does_not_depend_on_the_schedule(
    open_session: OpenSession, journal: Journal, seed: int
) -> None:
    """Behaviour 36: nor on which of the ready nodes fires first; inner loops and branches included."""
    with af.Graph() as graph:

        def inner(i: Any) -> Any:
            return af.while_loop(lambda j: j < i, lambda j: (journal.note("inner", i, j), j + 1)[1], (0,))

        def body(i: Any) -> Any:
            journal.note("first", i)
            inner(i)
            af.cond(i % 2 == 0, lambda: journal.note("even", i), lambda: journal.note("odd", i))
            return i + 1

        result = af.while_loop(lambda i: i < 3, body, (0,))
        after = journal.note("after")
    async with open_session(graph, seed=seed, regions=False) as session:
        await session.run([result, after])
    assert journal.entries == [
        ("first", 0),
        ("even", 0),
        ("first", 1),
        ("inner", 1, 0),
        ("odd", 1),
        ("first", 2),
        ("inner", 2, 0),
        ("inner", 2, 1),
        ("even", 2),
        "after",
    ]


async def test_two_resources_are_not_ordered_against_each_other(run: Run, graph: af.Graph) -> None:
    """Behaviour 36: a slow effect on one does not hold up the other's later iterations."""
    quick = Journal()
    release, third = asyncio.Event(), asyncio.Event()
    slow = []

    @af.op(outputs=(), stateful=True)
    async def waiting() -> None:
        await release.wait()
        slow.append("slow")

    @af.op(outputs=())
    async def tell(i: Any) -> None:
        if i == 2:
            third.set()

    def body(i: Any) -> Any:
        waiting()
        with af.control_dependencies([quick.note("quick")]):
            told = tell(i)
        with af.control_dependencies([told]):
            return i + 1

    pending = asyncio.ensure_future(run(af.while_loop(lambda i: i < 5, body, (0,), parallel_iterations=3)))
    await third.wait()
    assert slow == []
    release.set()
    await pending
    assert (len(slow), len(quick.entries)) == (5, 5)


# -- 37: an effect with a value per iteration ------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 32])
async def test_ordered_effects_see_the_values_in_order(
    run: Run, graph: af.Graph, journal: Journal, window: int
) -> None:
    """Behaviour 37: 0 to 9 in order. Decided: with ordered effects `parallel_iterations` does not matter."""

    def body(i: Any) -> Any:
        journal.note("i", i)
        return i + 1

    await run(af.while_loop(lambda i: i < 10, body, (0,), parallel_iterations=window))
    assert journal.values("i") == list(range(10))


async def test_unordered_effects_with_one_iteration_at_a_time(run: Run, journal: Journal) -> None:
    """Behaviour 37: `parallel_iterations=1` orders iterations by itself."""
    with af.Graph(effects="unordered"):
        result = af.while_loop(lambda i: i < 10, lambda i: stepped(journal, i), (0,), parallel_iterations=1)
    await run(result)
    assert journal.values("step") == list(range(10))


# -- 38: deadlines ---------------------------------------------------------------------------------------------------


async def test_an_infinite_loop_meets_its_deadline(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 38: a deadline error, and the same session runs again."""
    limit = af.placeholder("int64", ())
    (result,) = af.while_loop(lambda i: i != limit, lambda i: i + 1, (0,))
    with pytest.raises(af.DeadlineExceeded, match=r"timeout=0\.01"):
        await session.run(result, {limit: -1}, timeout=0.01)
    assert session.statistics().runs == 0
    assert await session.run(result, {limit: 5}, timeout=30) == 5


async def test_a_loop_may_be_limited_by_the_session(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 38: `max_iterations` ends runaway loops by count."""
    (result,) = af.while_loop(lambda i: i >= 0, lambda i: i + 1, (0,), name="runaway")
    async with open_session(graph, max_iterations=50) as session:
        with pytest.raises(af.KernelError, match="loop runaway reached max_iterations=50"):
            await session.run(result)


# -- 39: exceptions in an iteration ----------------------------------------------------------------------------------


def failing_at(k: int) -> Any:
    @af.op(outputs=af.spec("int64", ()), name="fragile")
    def fragile(i: Any) -> Any:
        if i == k:
            raise LookupError(f"no {i}")
        return i + 1

    return fragile


async def test_an_exception_at_iteration_k(run: Run, graph: af.Graph, journal: Journal) -> None:
    """Behaviour 39: the error names node, path and iteration; nothing of later iterations happens."""

    fragile = failing_at(3)

    def body(i: Any) -> Any:
        with af.control_dependencies([journal.note("i", i)]):
            return fragile(i)

    (result,) = af.while_loop(lambda i: i < 10, body, (0,), name="outer", parallel_iterations=32)
    with pytest.raises(af.KernelError, match=r"fragile.* in iteration outer/3[\s\S]*test_while_effects.py") as caught:
        await run(result)
    assert isinstance(caught.value.__cause__, LookupError)
    assert (caught.value.tag, caught.value.op) == ("outer/3", "fragile")
    assert journal.values("i") == [0, 1, 2, 3]


async def test_the_path_of_an_inner_iteration(run: Run, graph: af.Graph) -> None:
    """Behaviour 39: outer and inner frames with their iterations."""

    def body(i: Any) -> Any:
        j = af.while_loop(lambda j: j < i + 2, failing_at(3), (0,), name="inner")[0]
        return i + 1 + 0 * j

    with pytest.raises(af.KernelError) as caught:
        await run(af.while_loop(lambda i: i < 10, body, (0,), name="outer"))
    assert caught.value.tag == "outer/2/inner/3"


async def test_siblings_are_cancelled_and_later_assigns_do_not_happen(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 39: a coroutine in flight is cancelled; the variable keeps its value of iteration k."""
    v = af.Variable(0)
    cancelled = []

    @af.op(outputs=(), stateful=True)
    async def waiting() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    @af.op(outputs=af.spec("int64", ()))
    async def fails_in_a_task(i: Any) -> Any:
        if i == 2:
            raise ValueError("two")
        return i + 1

    def body(i: Any) -> Any:
        with af.control_dependencies([v.assign(i)]):
            failing = fails_in_a_task(i)
        with af.control_dependencies([failing]):
            return i + 1

    with pytest.raises(af.KernelError, match="two"):
        await session.run([waiting(), af.while_loop(lambda i: i < 10, body, (0,), parallel_iterations=1)])
    assert cancelled == [True]
    assert await session.run(v.read()) == 2
