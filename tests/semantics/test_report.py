"""Races in words, and the warning of them when a plan is compiled."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import asyncflow as af
from asyncflow.semantics import report
from asyncflow.semantics.report import describe_races
from tests.conftest import OpenSession


def unordered() -> af.Graph:
    return af.Graph(effects="unordered")


# -- in words ---------------------------------------------------------------------------------------------------------


def test_one_race_with_two_outcomes_is_told_in_a_sentence() -> None:
    with unordered() as graph:
        w = af.Variable(0.5, name="w")
        step, x = w.assign_sub(0.1), w.read()
        loss = x * x
    race, outcomes, advice = describe_races(graph, [step, loss])
    assert race.startswith("race on variable w: assign_sub (") and race.endswith(") have no order")
    assert outcomes == "  outcomes: multiply 0.16 if the assign_sub is first, 0.25 if the read is"
    assert advice == "  order them with control_dependencies, or say af.allow_races(w)"


def test_two_of_one_kind_are_told_apart_by_their_lines() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        one = v.assign(1).node
        two = v.assign(2).node
    lines = list(describe_races(graph, [one, two]))
    first, second = one.location.line, two.location.line
    assert lines[1] == (
        f"  outcomes: v afterwards 2 if the assign of line {first} is first, 1 if the assign of line {second} is"
    )


def test_several_races_list_their_outcomes_with_orders() -> None:
    """Behaviour 70: read-add-write, with the lost updates and the orders that lose them."""
    with unordered() as graph:
        v = af.Variable(0, name="v")
        writes = [v.assign(v + k).node for k in (1, 2)]
    lines = list(describe_races(graph, writes))
    assert lines[-5:-1] == [
        "  outcomes, each with an order that leads to it:",
        "    v afterwards 3 after v/read, v/assign, v/read_1, v/assign_1",
        "    v afterwards 2 after v/read, v/read_1, v/assign, v/assign_1",
        "    v afterwards 1 after v/read, v/read_1, v/assign_1, v/assign",
    ]


def test_runs_of_one_session_are_told_apart() -> None:
    with af.Graph() as graph:
        v = af.Variable(0, name="v")
        write = v.assign(v + 1).node
    assert list(describe_races(graph, write)) == []
    lines = list(describe_races(graph, write, runs=2))
    assert [line.rpartition(" have ")[2] for line in lines[:1]] == ["no order in two runs"]
    assert lines[1].endswith("has no order in two runs")
    assert "    v afterwards 1 after run 1: v/read, run 2: v/read, run 1: v/assign, run 2: v/assign" in lines
    assert lines[-1] == "  run one after the other, or each as one step with atomic=True, or say af.allow_races(v)"


def test_one_node_in_two_runs_is_told_with_its_run() -> None:
    with af.Graph() as graph:
        add = af.Variable(0, name="v").assign_add(1)
    assert list(describe_races(graph, add, runs=2))[1:4] == [
        "  outcomes, each with an order that leads to it:",
        "    run 1: v/assign_add 1, run 2: v/assign_add 2 after run 1: v/assign_add, run 2: v/assign_add",
        "    run 1: v/assign_add 2, run 2: v/assign_add 1 after run 2: v/assign_add, run 1: v/assign_add",
    ]


def test_outcomes_that_cannot_be_found_say_why() -> None:
    @af.op(outputs=af.spec("int64", ()), stateful=True)
    def ask() -> np.int64:
        return np.int64(1)

    with unordered() as graph:
        v = af.Variable(0, name="v")
        x = af.placeholder("int64", (), name="x")
        fed, asked = [v.assign(x), v.read()], [v.assign(ask()), v.read()]
        same = [v.assign(0), v.read()]
    assert list(describe_races(graph, fed, [x]))[1] == "  outcomes depend on the feeds, so none are listed"
    assert "0 if the read is" in list(describe_races(graph, fed, [x], {x: np.int64(4)}))[1]
    assert list(describe_races(graph, asked))[1].startswith("  outcomes are not listed: ask (ask) acts on the world")
    assert list(describe_races(graph, same))[1] == "  outcomes: one with these values, whatever is first"
    assert list(describe_races(graph, fed, [x], known=list(describe_races(graph, fed, [x])))) == []


def test_orders_tell_only_what_races_and_of_that_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MOST_STATES", 60)
    with unordered() as graph:
        v, beside = af.Variable(0, name="v"), af.Variable(0, name="beside")

        def worker(by: int) -> af.Tensor:
            def body(i: af.Tensor) -> af.Tensor:
                with af.control_dependencies([v.update(lambda old: old * 2 + by), beside.assign_add(1)]):
                    return i + 1

            return af.while_loop(lambda i: i < 7, body, (0,))[0]

        done = [worker(0), worker(1)]
    lines = [line for line in describe_races(graph, done) if line.startswith("    v afterwards ")]
    assert len(lines) > 1 and all(line.count("v/update [") == 12 for line in lines)
    assert all(" after ..., while" in line and "beside" not in line for line in lines)


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MOST_STATES", 150)
    with unordered() as graph:
        variables = [af.Variable(0, name=f"v{k}") for k in range(22)]
        fetches = [[v.assign(1).node, v.read()] for v in variables]
    lines = list(describe_races(graph, fetches))
    assert lines[20] == "... and 2 more"
    assert lines[21].endswith("; there may be more, as the search ended after max_states=150 states:")
    assert len(lines) == 30 and lines[28].startswith("    ... and ")


def test_a_plan_tells_its_races() -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        write, read = v.assign(1), v.read()
    session = af.Session(graph)
    af.allow_races(v)
    assert session.plan([write, read]).explain(races=True) == "there are no races"
    v.allows_races = False
    with pytest.warns(af.RaceWarning):
        told = session.plan([read, write]).explain(races=True)
    assert told.splitlines()[1] == "  outcomes: v 1 if the assign is first, 0 if the read is"


# -- warnings ---------------------------------------------------------------------------------------------------------


async def test_a_plan_with_races_warns_once_and_names_the_line(open_session: OpenSession) -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        write, read = v.assign(1), v.read()
    line = write.node.location.line
    async with open_session(graph) as session:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default", af.RaceWarning)
            await session.run([write, read])
            await session.run([write, read])
            await session.run([read, write])
    (warned,) = caught
    assert warned.category is af.RaceWarning and (warned.filename, warned.lineno) == (__file__, line)
    assert str(warned.message).startswith("race on variable v: assign (")
    assert "af.allow_races(v)" in str(warned.message)


async def test_allowed_ordered_or_hand_written_effects_do_not_warn(open_session: OpenSession) -> None:
    with unordered() as graph:
        v = af.Variable(0, name="v")
        racing, ordered = [v.assign(1), v.read()], v.assign(v + 1)
    with unordered() as by_hand:
        racing_by_hand = [af.raw.switch(v.assign(2), af.constant(True))[1], v.assign(2)]
    async with open_session(by_hand) as session:
        assert await session.run(racing_by_hand) == [2, 2]
    async with open_session(graph) as session:
        assert await session.run(ordered) == 1
        with pytest.raises(af.RaceWarning, match="variable v"):
            await session.run(racing)
        af.allow_races(v)
        assert (await session.run(racing))[0] == 1


async def test_streams_and_functions_warn_too(open_session: OpenSession) -> None:
    u = af.Variable(0, name="u")
    with unordered() as graph:
        v = af.Variable(0, name="v")
        inner: list[af.Tensor] = []

        def body(i: af.Tensor) -> af.Tensor:
            inner.append(v.assign(i))
            return i + 1

        af.while_loop(lambda i: i < 3, body, (0,))

    @af.function(effects="unordered")
    def both() -> af.Tensor:
        u.assign(1)
        return u.read()

    async with open_session(graph) as session:
        with pytest.raises(af.RaceWarning, match=r"variable v: assign .* has no order in different iterations"):
            [item async for item in session.stream(inner[0])]
        with pytest.raises(af.RaceWarning, match=r"variable u: assign .* and read "):
            await both()
