"""Branches and loops inside loops that the device runs by itself, on a stand-in for CuPy and for `cuda.bindings`."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.cuda.graphs.conditional import ENDED, GIVEN_UP, STOPPED, TOO_LONG
from asyncflow.devices.decisions import Branch, Decision, Ended, Loop, advance, decisions
from tests.devices.cards import MIB
from tests.devices.test_cuda_loop import Card, by_numpy
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.graphs import Graph


@pytest.fixture
def card(fake: FakeCupy) -> Card:
    return Card(fake)


def decided(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of NumPy's arrays."""
    running = decisions(function, arguments)
    decision = advance(running, None)
    while not isinstance(decision, Ended):
        decision = advance(running, _results(decision))
    return decision.value


def _results(decision: Decision) -> list[Any]:
    if isinstance(decision, Branch):
        return list(decided(decision.on_true if decision.pred else decision.on_false, *decision.arguments))
    variables = list(decision.variables)
    while decided(decision.condition, *variables, *decision.captures):
        variables = list(decided(decision.body, *variables, *decision.captures))
    return variables


def wanted(condition: Callable[..., Any], body: Callable[..., Any], values: Sequence[Any]) -> tuple[list[Any], int]:
    """Return NumPy's result, and the number of iterations."""
    return by_numpy(lambda *v: decided(condition, *v), lambda *v: decided(body, *v), list(values))


# -- branches ----------------------------------------------------------------------------------------------------------


def is_not_one(xp: Any, n: Any, steps: Any) -> Any:
    return n != 1


def collatz(xp: Any, n: Any, steps: Any) -> Any:
    (n,) = yield Branch(n % 2 == 0, lambda n: (n // 2,), lambda n: (3 * n + 1,), (n,))
    return n, steps + 1


@pytest.mark.parametrize("start", [1, 2, 6, 27])
def test_a_branch(card: Card, start: int) -> None:
    loop = card.loop(is_not_one, collatz)
    found, count = loop([np.asarray(start), np.int64(0)])
    assert (found, count) == wanted(is_not_one, collatz, [start, 0])


def test_one_capture_serves_all_values(card: Card) -> None:
    loop = card.loop(is_not_one, collatz)
    for start in (7, 1, 2, 7, 97):
        found, count = loop([np.asarray(start), np.int64(0)])
        assert (found, count) == wanted(is_not_one, collatz, [start, 0])
    assert loop.calls == {"condition": 6, "body": 3}


def test_a_branch_is_one_node_that_holds_both(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Graph] = []
    launch = Graph.launch

    def noted(graph: Graph, stream: Any = None) -> None:
        launched.append(graph)
        launch(graph, stream)

    monkeypatch.setattr(Graph, "launch", noted)
    card.loop(is_not_one, collatz)([np.asarray(3), np.int64(0)])
    names = [name for name in launched[0].captured.names() if "poison" not in name]
    assert names.count("conditional") == 1
    assert names.count("  conditional") == 1
    assert names.count("  set_branch") == 1
    assert {"    cupy_floor_divide", "    cupy_multiply", "    copyto"} <= set(names)


def test_a_branch_of_captures_numbers_and_aliases(card: Card) -> None:
    """The results may be inputs, the same value twice, numbers of the host, or empty."""

    def body(xp: Any, i: Any, x: Any, y: Any, kind: Any, none: Any, other: Any) -> Any:
        def swapped(x: Any, y: Any, none: Any) -> Any:
            return y, x, np.int32(1), none

        def doubled(x: Any, y: Any, none: Any) -> Any:
            return x, x, np.int32(2), none + 1

        x, y, kind, none = yield Branch(xp.less(other[0], i), swapped, doubled, (x, y, none))
        return i + np.int64(1), x, y, kind, none

    def condition(xp: Any, i: Any, *_: Any) -> Any:
        return i < 4

    loop = card.loop(condition, body)
    for other in (-1, 1, 2, 9):
        variables = [np.int64(0), np.arange(3.0), np.full(3, 7.0), np.int32(0), np.zeros((0, 2))]
        found, _ = loop(variables, [np.asarray([other])])
        expected, _ = by_numpy(
            condition,
            lambda xp, *v: (*decided(body, xp, *v, np.asarray([other])),),  # noqa: B023 - called at once
            list(variables),
        )
        for left, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(left, right)
            assert left.dtype == right.dtype


def test_a_branch_that_the_host_decides_is_only_the_taken_side(card: Card) -> None:
    taken: list[str] = []

    def noted(name: str, results: tuple[Any, ...]) -> tuple[Any, ...]:
        taken.append(name)
        return results

    def body(xp: Any, x: Any, flag: Any) -> Any:
        (x,) = yield Branch(flag, lambda x: noted("true", (x + 1,)), lambda x: noted("false", (x * 2,)), (x,))
        return (x,)

    loop = card.loop(lambda xp, x, flag: xp.max(x) < 9, body)
    assert [loop([np.ones(2)], [flag])[0][0][0] for flag in (np.bool_(True), np.bool_(False))] == [9, 16]
    assert taken == ["true"] * 3 + ["false"] * 3


def test_a_branch_in_the_condition(card: Card) -> None:
    def condition(xp: Any, i: Any, x: Any) -> Any:
        (limit,) = yield Branch(xp.max(x) > 20, lambda: (np.int64(3),), lambda: (np.int64(9),), ())
        return i < limit

    def body(xp: Any, i: Any, x: Any) -> Any:
        return i + 1, x * 2

    loop = card.loop(condition, body)
    for start in (0.0, 1.0, 4.0, 30.0):
        values = [np.int64(0), np.full(2, start)]
        found, count = loop(values)
        expected, times = wanted(condition, body, values)
        assert (found[0], count) == (expected[0], times)
        np.testing.assert_array_equal(found[1], expected[1])


# -- loops inside ------------------------------------------------------------------------------------------------------


def sums_below(xp: Any, i: Any, total: Any, n: Any) -> Any:
    """Adds the numbers below `i` to the total."""
    _, total = yield Loop(lambda j, total, i: j < i, lambda j, total, i: (j + 1, total + j), (np.int64(0), total), (i,))
    return i + 1, total


def is_below(xp: Any, i: Any, total: Any, n: Any) -> Any:
    return xp.less(i, n)


def triangles(n: int) -> int:
    return sum(i * (i - 1) // 2 for i in range(n))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 12])
def test_a_loop_inside_that_starts_anew_each_time(card: Card, n: int) -> None:
    """The inner loop makes no iteration the first time, nor the second."""
    (i, total), state = card.loop(is_below, sums_below).launched([np.int64(0), np.int64(5)], [np.asarray(n)])
    assert (i, total) == (n, 5 + triangles(n))
    assert state == [n, ENDED, n * (n - 1) // 2]


def test_loops_inside_are_launched_again_with_other_values(card: Card) -> None:
    loop = card.loop(is_below, sums_below)
    for n in (5, 0, 1, 9, 5):
        (_, total), _ = loop([np.int64(0), np.int64(0)], [np.asarray(n)])
        assert total == triangles(n)
    assert loop.calls["body"] == 3


@pytest.mark.parametrize("inside", [1, 2, 6, 7])
def test_a_launch_stops_when_loops_inside_have_gone_on_for_long(card: Card, inside: int) -> None:
    """After a whole iteration, from whose values another launch goes on."""
    loop = card.loop(is_below, sums_below, inside=inside)
    values: list[Any] = [np.int64(0), np.int64(0)]
    outcomes: list[int] = []
    while not outcomes or outcomes[-1] == STOPPED:
        before = values[0]
        values, (count, outcome, within) = loop.launched(values, [np.asarray(5)])
        outcomes.append(outcome)
        if outcome != TOO_LONG:
            assert values[0] == before + count
            assert within == sum(range(before, before + count))
    # Iteration i makes i iterations inside, and none may make more than 4 times as many as a launch.
    assert outcomes[-1] == ENDED
    assert values == [5, triangles(5)]
    assert len(outcomes) == {1: 4, 2: 3, 6: 2, 7: 1}[inside]


@pytest.mark.parametrize(
    ("limits", "n", "expected"),
    [({"inside": 1}, 6, TOO_LONG), ({"inner": 3}, 5, GIVEN_UP), ({"inner": 0}, 2, GIVEN_UP)],
)
def test_an_iteration_in_which_a_loop_inside_goes_on_for_too_long_is_given_up(
    card: Card, limits: dict[str, int], n: int, expected: int
) -> None:
    loop = card.loop(is_below, sums_below, **limits)
    _, (_, outcome, _) = loop.launched([np.int64(n - 1), np.int64(0)], [np.asarray(n)])
    assert outcome == expected
    # The next launch knows nothing of it.
    (_, total), _ = loop([np.int64(0), np.int64(0)], [np.asarray(2 if limits != {"inner": 0} else 1)])
    assert total == 0


def test_a_loop_inside_that_would_never_end_ends(card: Card) -> None:
    def forever(xp: Any, x: Any) -> Any:
        (x,) = yield Loop(lambda x: xp.max(x) > -1, lambda x: (x + 1,), (x,))
        (x,) = yield Loop(lambda x: xp.max(x) > -1, lambda x: (x + 1,), (x,))
        return (x,)

    _, (count, outcome, within) = card.loop(lambda xp, x: xp.max(x) < 5, forever, inside=50).launched([np.zeros(2)])
    assert (count, outcome, within) == (1, TOO_LONG, 200)


def test_what_a_loop_inside_captures_is_there_for_all_its_iterations(card: Card) -> None:
    """The memory of a capture is not freed in the body, where the next result would take it."""

    def body(xp: Any, i: Any, x: Any) -> Any:
        def inner(j: Any, x: Any, step: Any) -> Any:
            return j + 1, xp.tanh(x * 2) + step

        _, x = yield Loop(lambda j, x, step: j < 5, inner, (np.int64(0), x), (xp.cos(x) + 1,))
        return i + 1, x

    def condition(xp: Any, i: Any, x: Any) -> Any:
        return i < 3

    values = [np.int64(0), np.linspace(0, 1, 64)]
    found, _ = card.loop(condition, body)(values)
    expected, _ = wanted(condition, body, values)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)


# -- random programs ---------------------------------------------------------------------------------------------------

UPDATES: list[Callable[..., tuple[Any, Any, Any]]] = [
    lambda xp, x, y, k: (xp.tanh(x) + y[0, 1], y, k + 1),
    lambda xp, x, y, k: (x * 0.5, y.T, k),
    lambda xp, x, y, k: (x[::-1], y * 0.5 + xp.mean(x), k),
    lambda xp, x, y, k: (x, y, k * 3 % 7),
    lambda xp, x, y, k: (x + k % 5, y, k),
    lambda xp, x, y, k: (x, y + 0.25, np.int64(2)),
    lambda xp, x, y, k: (xp.where(x > 1, x, -x), y, k - 1),
]
PREDICATES: list[Callable[..., Any]] = [
    lambda xp, x, y, k: k % 2 == 0,
    lambda xp, x, y, k: xp.sum(x) > xp.sum(y),
    lambda xp, x, y, k: xp.all(x < 1).reshape(1),
    lambda xp, x, y, k: xp.max(y) < 2,
]
N_VARS = 3


class Program:
    """A random body of nested branches and loops, over a vector, a matrix and a counter."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.block = self._block(3)

    def _block(self, depth: int) -> list[tuple[Any, ...]]:
        kinds = ["update", "update", "branch", "loop"] if depth else ["update"]
        return [self._statement(self._random.choice(kinds), depth) for _ in range(self._random.randint(0, 3))]

    def _statement(self, kind: str, depth: int) -> tuple[Any, ...]:
        if kind == "update":
            return kind, self._random.choice(UPDATES)
        pred = self._random.choice(PREDICATES)
        if kind == "branch":
            return kind, pred, self._block(depth - 1), self._block(depth - 1)
        return kind, pred, self._random.randint(0, 3), self._block(depth - 1)

    def condition(self, xp: Any, i: Any, *values: Any) -> Any:
        return xp.logical_and(i < 4, xp.sum(values[0]) < 50)

    def body(self, xp: Any, i: Any, *values: Any) -> Any:
        return i + np.int64(1), *(yield from self._run(xp, self.block, values))

    def _run(self, xp: Any, block: list[tuple[Any, ...]], values: Sequence[Any]) -> Any:
        for statement in block:
            if statement[0] == "update":
                _, update = statement
                values = update(xp, *values)
            elif statement[0] == "branch":
                _, pred, *sides = statement
                on_true, on_false = [lambda *v, side=side: self._run(xp, side, v) for side in sides]
                values = yield Branch(xp.asarray(pred(xp, *values)), on_true, on_false, values)
            else:
                _, pred, most, inner = statement
                *values, _ = yield self._loop(xp, pred, most, inner, values)
        return tuple(values)

    def _loop(self, xp: Any, pred: Any, most: int, block: list[tuple[Any, ...]], values: Sequence[Any]) -> Loop:
        def condition(*v: Any) -> Any:
            return xp.logical_and(v[N_VARS] < v[N_VARS + 1], pred(xp, *v[:N_VARS]))

        def body(*v: Any) -> Any:
            return *(yield from self._run(xp, block, v[:N_VARS])), v[N_VARS] + 1

        return Loop(condition, body, (*values, np.int64(0)), (np.int64(most),))


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40))])
def test_random_programs_give_what_numpy_gives(seed: int) -> None:
    program, generator = Program(seed), np.random.default_rng(seed)
    with FakeCupy(nbytes=8 * MIB, seed=seed) as fake:
        card = Card(fake)
        loop = card.loop(program.condition, program.body)
        for _ in range(3):
            values = [np.int64(0), generator.normal(size=4), generator.normal(size=(2, 2)), np.int64(seed)]
            found, count = loop(values)
            expected, times = wanted(program.condition, program.body, values)
            assert count == times
            for left, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-12)
        assert loop.calls["body"] == 3
        loop.device._graphs.clear()
        gc.collect()
        assert card.pool.account.used == 0


# -- what is left to the host ------------------------------------------------------------------------------------------


def inside(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A body with `function`, of the module and an array, at each place of a branch or loop."""
    return {
        "true": lambda xp, x: (yield Branch(xp.max(x) > 0, lambda x: (function(xp, x),), lambda x: (x,), (x,))),
        "false": lambda xp, x: (yield Branch(xp.max(x) > 0, lambda x: (x,), lambda x: (function(xp, x),), (x,))),
        "loop": lambda xp, x: (yield Loop(lambda x: xp.max(x) < 1, lambda x: (function(xp, x),), (x,))),
    }


REFUSED: dict[str, Callable[..., Any]] = {
    "cuBLAS": lambda xp, x: xp.matmul(x, x),
    "a shape that changes": lambda xp, x: x[:1],
    "a dtype that changes": lambda xp, x: x.astype(np.float32),
    "a value of Python's": lambda xp, x: "text",
    "what waits for the device": lambda xp, x: x + xp.nonzero(x)[0].size,
}


@pytest.mark.parametrize("place", ["true", "false", "loop"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_inside_is_left_to_the_host(card: Card, name: str, place: str) -> None:
    """And no capture of a body is broken, which would end the process."""
    loop = card.loop(lambda xp, x: xp.max(x) < 3, inside(REFUSED[name])[place])
    assert loop.launch([np.zeros((2, 2))]) is None
    calls = dict(loop.calls)
    assert loop.launch([np.zeros((2, 2))]) is None
    assert loop.calls == calls
    assert card.cupy.engine.captures == []
    assert card.stream.pool is card.pool
    gc.collect()
    assert card.pool.account.used == 0


@pytest.mark.parametrize("pred", [lambda xp, x: x, lambda xp, x: x < 0, lambda xp, x: xp.max(x)])
def test_a_predicate_inside_that_is_none_is_left_to_the_host(card: Card, pred: Callable[..., Any]) -> None:
    def body(xp: Any, x: Any) -> Any:
        (x,) = yield Branch(pred(xp, x), lambda x: (x,), lambda x: (x,), (x,))
        return (x,)

    assert card.loop(lambda xp, x: xp.max(x) < 3, body).launch([np.zeros((2, 2))]) is None


def test_a_card_without_else_branches_leaves_the_loop_to_the_host(card: Card) -> None:
    card.cupy.bindings.has_else = False
    assert card.loop(is_not_one, collatz).launch([np.asarray(3), np.int64(0)]) is None
    assert card.cupy.engine.captures == []


@pytest.mark.parametrize("at", range(1, 8))
def test_a_failure_at_any_decision_while_it_is_captured_ends_all_captures(card: Card, at: int) -> None:
    calls = 0

    def breaks(x: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("now")
        return (x + 1,)

    def body(xp: Any, x: Any) -> Any:
        (x,) = yield Loop(lambda x: xp.max(x) < 0, breaks, (x,))
        (x,) = yield Branch(xp.max(x) < 2, breaks, lambda x: (x + 1,), (x,))
        return (x,)

    launched = card.loop(lambda xp, x: xp.max(x) < 3, body).launch([np.zeros(2)])
    assert (launched is None) == (at <= 6)
    assert card.cupy.engine.captures == []
    with card.stream:
        assert (card.cupy.ones(3) + 1).get().tolist() == [2, 2, 2]
