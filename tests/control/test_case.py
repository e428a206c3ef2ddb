from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.control.case import case, switch_case

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]


def counted(calls: list[int], count: int) -> list[Callable[[], int]]:
    """Branches that give their own number, and note that they were called."""

    def branch(number: int) -> Callable[[], int]:
        def call() -> int:
            calls.append(number)
            return number

        return call

    return [branch(number) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("has_default", [False, True])
async def test_switch_case_takes_the_branch_of_the_index(
    graph: af.Graph, run: Run, count: int, has_default: bool
) -> None:
    calls: list[int] = []
    index = af.placeholder("int32", ())
    result = switch_case(index, counted(calls, count), (lambda: -7) if has_default else None)
    assert calls == list(range(count))
    outside = -7 if has_default else count - 1
    for value in (-(2**31), -1, *range(count), count, count + 5):
        want = value if 0 <= value < count else outside
        assert await run(result, {index: np.int32(value)}) == want


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", "int64"])
async def test_switch_case_takes_every_integer_dtype(graph: af.Graph, run: Run, dtype: str) -> None:
    index = af.placeholder(dtype, ())
    result = switch_case(index, counted([], 200))
    for value, want in ((0, 0), (100, 100), (np.iinfo(dtype).max, min(np.iinfo(dtype).max, 199))):
        assert await run(result, {index: np.array(value, dtype)}) == want


def test_switch_case_is_as_deep_as_the_logarithm(graph: af.Graph) -> None:
    def depth(body: af.Graph) -> int:
        inner = (depth(branch) for node in body.nodes if node.op.name == "cond" for branch in node.subgraphs)
        return max(inner, default=-1) + 1

    switch_case(af.placeholder("int64", ()), counted([], 256))
    assert depth(graph) == 8


def test_switch_case_refuses(graph: af.Graph) -> None:
    with pytest.raises(af.GraphError, match="at least one branch"):
        switch_case(0, [])
    with pytest.raises(af.DTypeError, match="an integer scalar"):
        switch_case(1.0, counted([], 2))
    with pytest.raises(af.ShapeError, match="an integer scalar"):
        switch_case([1], counted([], 2))
    with pytest.raises(af.GraphError, match="branches 0 and 2 of switch_case return different nests"):
        switch_case(0, [lambda: (1, 2), lambda: (3, 4), lambda: 5])
    with pytest.raises(af.DTypeError, match=r"result\['a'\] of switch_case is int64 in branch 0 and bool in branch 1"):
        switch_case(0, [lambda: {"a": af.constant(1)}, lambda: {"a": af.constant(True)}])


def cases(x: af.Tensor, **options: Any) -> Any:
    return case([(x > 1, lambda: 1), (x > 2, lambda: 2), (x < 0, lambda: 3)], **options)


async def test_case_takes_the_first_that_holds(graph: af.Graph, run: Run) -> None:
    calls: list[int] = []
    x = af.placeholder("int64", ())
    first, second, third, default = counted(calls, 4)
    result = case([(x > 1, first), (x > 2, second), (x < 0, third)], default)
    assert calls == [0, 1, 2, 3]
    for value, want in ((5, 0), (2, 0), (-1, 2), (0, 3), (1, 3)):
        assert await run(result, {x: value}) == want


@pytest.mark.parametrize("pairs", [1, 3])
async def test_case_without_default_fails_if_nothing_holds(graph: af.Graph, run: Run, pairs: int) -> None:
    x = af.placeholder("int64", ())
    y = af.constant(4)
    result = case([(x > bound, lambda: y) for bound in range(pairs)])
    assert await run(result, {x: 1}) == 4
    with pytest.raises(af.KernelError, match=r"none of the [13] predicates holds, and this case has no default"):
        await run(result, {x: 0})


async def test_exclusive_case_names_the_true_predicates(graph: af.Graph, run: Run) -> None:
    x = af.placeholder("int64", ())
    result = cases(x, default=lambda: 4, exclusive=True)
    assert [await run(result, {x: value}) for value in (2, -1, 0)] == [1, 3, 4]
    with pytest.raises(af.KernelError, match="predicates 0 and 1 of 3 hold") as caught:
        await run(result, {x: 3})
    assert isinstance(caught.value.__cause__, ValueError)
    assert await run(cases(x, default=lambda: 4), {x: 3}) == 1


def test_case_refuses(graph: af.Graph) -> None:
    no_pairs: list[Any] = [[], [lambda: 1]]
    for pairs in no_pairs:
        with pytest.raises(af.GraphError, match="at least one pair"):
            case(pairs)
    with pytest.raises(af.DTypeError, match="a predicate is a boolean scalar"):
        case([(1.0, lambda: 1)])
    with pytest.raises(af.GraphError, match="branches 0 and 1 of case return different nests"):
        case([(True, lambda: 1)], lambda: None)


async def test_predicates_may_be_python_bools_and_single_elements(graph: af.Graph, run: Run) -> None:
    assert await run(case([(False, lambda: 1), (np.array([[True]]), lambda: 2)], lambda: 3)) == 2


async def test_nests_and_nodes(graph: af.Graph, run: Run) -> None:
    index = af.placeholder("int64", ())
    result = switch_case(index, [partial(lambda k: {"a": (k, af.constant(float(k)))}, k) for k in range(3)])
    assert await run(result, {index: 1}) == {"a": (1, 1.0)}


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_effects_of_one_branch(graph: af.Graph, count: int) -> None:
    index = af.placeholder("int64", ())
    variable = af.Variable(0, name="v")
    by_result = switch_case(index, [partial(variable.assign_add, 10**k) for k in range(count)])
    async with af.Session(graph, debug=True) as session:
        for value in range(count):
            await session.run(by_result, {index: value})
        assert await session.run(variable) == sum(10**k for k in range(count))


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_branches_without_results(graph: af.Graph, count: int) -> None:
    index = af.placeholder("int64", ())
    variable = af.Variable(0, name="v")

    def branch(number: int) -> Callable[[], None]:
        def call() -> None:
            variable.assign_add(10**number)

        return call

    node = switch_case(index, [branch(number) for number in range(count)])
    async with af.Session(graph, debug=True) as session:
        for value in range(count):
            await session.run(node, {index: value})
        assert await session.run(variable) == sum(10**number for number in range(count))
