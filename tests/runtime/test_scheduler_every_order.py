"""Whatever the order in which nodes fire and kernels complete, a program has one result and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import asyncflow as af
from tests.runtime.every_order import explore
from tests.runtime.hand_written import counting_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    Program = Callable[[af.Tensor, af.Tensor], Any]


def branch(x: af.Tensor, pred: af.Tensor) -> Any:
    return af.cond(pred, lambda: (x + 1, x * 2), lambda: (x - 1, x))


def chained_branches(x: af.Tensor, pred: af.Tensor) -> Any:
    y = af.cond(pred, lambda: x + 1, lambda: x - 1)
    return af.cond(y > 0, lambda: af.cond(pred, lambda: y * 2, lambda: y), lambda: -y)


def two_variables(bound: int) -> Program:
    def program(x: af.Tensor, pred: af.Tensor) -> Any:
        variables = (x, x + 1)
        return af.while_loop(
            lambda i, s: i < 4, lambda i, s: (i + 1, s * 2 + i), variables, parallel_iterations=bound, name="loop"
        )

    return program


def branch_in_loop(x: af.Tensor, pred: af.Tensor) -> Any:
    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.cond(af.equal(i, 1), lambda: s * 2, lambda: s + 3)

    return af.while_loop(lambda i, s: i < 2, body, (x, x), parallel_iterations=2, name="loop")


def loop_in_branch(x: af.Tensor, pred: af.Tensor) -> Any:
    y = af.cond(pred, lambda: af.while_loop(lambda i: i < 2, lambda i: i + 1, (x,), name="loop")[0], lambda: -x)
    return y, y + x


def loop_in_loop(x: af.Tensor, pred: af.Tensor) -> Any:
    def body(i: af.Tensor) -> af.Tensor:
        return af.while_loop(lambda j: j < 1, lambda j: j + 1, (i,), parallel_iterations=1, name="inner")[0] + i

    return af.while_loop(lambda i: i < 2, body, (x,), parallel_iterations=1, name="loop")


def early_exit(x: af.Tensor, pred: af.Tensor) -> Any:
    loop = counting_loop(3, start=x, bound=2)
    found = loop.found(af.equal(loop.every, loop.constant(1)))
    return loop.total, found + x


@pytest.mark.parametrize(
    ("program", "pred", "expected", "most_live"),
    [
        (branch, True, [1, 0], {}),
        (branch, False, [-1, 0], {}),
        (chained_branches, True, [2], {}),
        (chained_branches, False, [1], {}),
        (two_variables(1), True, [4, 27], {"loop": 1}),
        (two_variables(2), True, [4, 27], {"loop": 2}),
        (two_variables(3), True, [4, 27], {"loop": 3}),
        (branch_in_loop, True, [2, 6], {"loop": 2}),
        (loop_in_branch, True, [2, 2], {"loop": 1}),
        (loop_in_branch, False, [0, 0], {"loop": 1}),
        (loop_in_loop, True, [2], {"loop": 1, "inner": 1}),
        (early_exit, True, [3, 1], {"loop": 2}),
    ],
)
def test_every_order_gives_the_same_result(
    graph: af.Graph, program: Program, pred: bool, expected: list[int], most_live: dict[str, int]
) -> None:
    x, which = af.placeholder("int64", (), name="x"), af.placeholder("bool", (), name="which")
    results = program(x, which)
    fetches = list(results) if isinstance(results, tuple | list) else [results]
    outcomes = explore(fetches, {x: 0, which: pred})
    assert outcomes.results == {tuple(expected)}
    assert len(outcomes.fired) == 1, "which kernels run is part of the result"
    assert {name: outcomes.most_live[name] for name in most_live} == most_live
    assert outcomes.complete > 1


def sent_there_and_back(x: af.Tensor, pred: af.Tensor) -> Any:
    with af.device("cpu:1"):
        y = x + 1
    with af.device("cpu:0"):
        return y * 2, x - 1


def loop_over_both(x: af.Tensor, pred: af.Tensor) -> Any:
    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:1"):
            s = s * 2
        return i + 1, s

    with af.device("cpu:0"):
        return af.while_loop(lambda i, s: i < 2, body, (x, x + 3), parallel_iterations=1, name="loop")


def branch_over_both(x: af.Tensor, pred: af.Tensor) -> Any:
    def elsewhere() -> af.Tensor:
        with af.device("cpu:1"):
            return x + 5

    with af.device("cpu:0"):
        return af.cond(pred, elsewhere, lambda: -x)


@pytest.mark.parametrize(
    ("program", "pred", "expected"),
    [
        (sent_there_and_back, True, (2, -1)),
        (loop_over_both, True, (2, 12)),
        (branch_over_both, True, (5,)),
        (branch_over_both, False, (0,)),
    ],
)
def test_every_order_of_two_executors(graph: af.Graph, program: Program, pred: bool, expected: tuple[int, ...]) -> None:
    """Whichever goes on, and whoever sends first; and a cancel in each of the states leaves nothing behind."""
    x, which = af.placeholder("int64", (), name="x"), af.placeholder("bool", (), name="which")
    results = program(x, which)
    fetches = list(results) if isinstance(results, tuple | list) else [results]
    outcomes = explore(fetches, {x: 0, which: pred}, devices=2)
    assert outcomes.results == {expected}
    assert len(outcomes.fired) == 1
    assert outcomes.complete > 1
