"""Known values while a graph is built, and feeds that contradict them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.text.parse import parse_graph
from asyncflow.graph.text.text import print_graph
from asyncflow.ops.arrays.known_values import default_value, static_value
from asyncflow.semantics.explore import explore


@pytest.fixture(autouse=True)
def _graph(graph: af.Graph) -> None:
    """Every test builds."""


def test_what_depends_on_a_run_or_is_large_is_not_known() -> None:
    n = af.placeholder("int64", ())
    assert static_value(af.stack([n, 3])) is None
    assert static_value(af.arange(100)) is None or af.arange(100).node.op.name == "constant"
    assert static_value(af.random.integers((2,), high=9)) is None
    assert static_value(af.constant(7) // af.constant(2)) == 3
    with af.Graph():
        _, i = af.while_loop(lambda i, j: i < 3, lambda i, j: (i + 1, j), (0, 5))
        assert static_value(i) is None
    deep = af.constant(1)
    for _ in range(200):
        deep = deep + 1
    assert static_value(deep) is None
    assert static_value(af.constant(np.int64(3)) - 1) == 2


async def test_the_refusal_names_the_constant_the_node_and_both_lines(run: Any) -> None:
    n = af.constant(3, name="n")
    y = af.zeros((2, n)) + 1.0
    with pytest.raises(af.FeedError) as refused:
        await run(y, {n: 4})
    message = str(refused.value)
    assert message.startswith("cannot feed n:0 the value 4: node full was built for n:0 = 3, at ")
    assert message.count("test_known_values.py:") == 2
    assert "use a placeholder in place of n:0" in message
    assert (await run(y, {n: 3})).tolist() == [[1.0] * 3] * 2
    assert await run(n * 2, {n: 3}) == 6


async def test_values_computed_of_constants_may_not_be_fed_against_a_shape_either(run: Any) -> None:
    a, b = af.constant(2), af.constant(3)
    count = a * b
    y = af.arange(count)
    for fed in ({count: 7}, {a: 3}, {a: 3, b: 3}, {b: -1}):
        with pytest.raises(af.FeedError, match=r"the length of arange 6"):
            await run(y, fed)
    for fed in ({count: 6}, {a: 3, b: 2}, {a: 5, count: 6}):
        assert (await run(y, fed)).tolist() == [0, 1, 2, 3, 4, 5]


async def test_a_check_alone_builds_nothing_on_a_value(run: Any) -> None:
    q, low = af.constant(0.25), af.constant(1)
    assert default_value(q) == 0.25
    quartile = af.quantile(np.arange(5.0), q)
    drawn = af.random.integers((3,), low=low, high=9)
    found, numbers = await run([quartile, drawn], {q: 0.75, low: 8})
    assert found == 3.0
    assert numbers.tolist() == [8, 8, 8]


async def test_a_shape_built_after_the_first_run_counts_too(session: af.Session) -> None:
    n = af.constant(3)
    double = n * 2
    assert await session.run(double, {n: 5}) == 10
    prepared = session.prepare(double, [n])
    af.zeros(n)
    for ask in (lambda: session.run(double, {n: 5}), lambda: prepared(5)):
        with pytest.raises(af.FeedError, match="built for"):
            await ask()
    assert await prepared(3) == 6


async def test_copies_and_texts_of_a_graph_keep_its_assumptions(graph: af.Graph, session: af.Session) -> None:
    n = af.constant(3, name="n")
    af.identity(af.zeros((n,)), name="y")
    af.identity(af.arange(n, n + 2), name="z")
    text = print_graph(graph)
    assert 'assume "value" (%n) = array(int64[], 3)' in text
    for again in (copy.deepcopy(graph), parse_graph(text)):
        assert print_graph(again) == text
        with pytest.raises(af.FeedError, match=r"cannot feed n:0 the value 4"):
            await session.run(again.tensor("y"), {again.tensor("n"): 4})
        assert (await session.run(again.tensor("y"), {again.tensor("n"): 3})).tolist() == [0.0] * 3


@pytest.mark.parametrize("line", ['assume "value" () = 3', 'assume "value" (%m) = 3', "assume value (%n) = 3"])
def test_a_text_that_concludes_from_nothing_is_refused(graph: af.Graph, line: str) -> None:
    af.constant(3, name="n")
    with pytest.raises(af.GraphError):
        parse_graph(print_graph(graph) + line)


async def test_a_large_constant_is_compared_before_it_is_copied(run: Any) -> None:
    large = af.constant(np.zeros(300_000))

    @af.batched(max_size=2)
    def looked_up(x: Any) -> Any:
        return x + large[:2]

    y = looked_up(af.constant([1.0, 2.0]) * 1.0)
    with pytest.raises(af.FeedError, match=r"of shape \(300000,\)"):
        await run(y, {large: np.ones(300_000)})
    assert (await run(y, {large: np.zeros(300_000)})).tolist() == [1.0, 2.0]


def test_explore_refuses_it_as_a_run_does(graph: af.Graph) -> None:
    n = af.constant(3)
    y = af.zeros(n)
    with pytest.raises(af.FeedError, match="built for"):
        explore(graph, [y], {n: 4})


LIFTED: dict[str, Callable[[af.Tensor], af.Tensor]] = {
    "captured": lambda n: af.map_fn(lambda x: af.zeros(n) + x, af.ones(2)),
    "computed in the body": lambda n: af.map_fn(
        lambda x: af.reshape(af.ones(12), af.stack([n, 12 // n])) + x, af.ones(2)
    ),
    "in a derivative": lambda n: af.vmap(lambda x: af.gradients(af.sum(af.ones(n) * x), x))(af.ones(2)),
    "computed outside": lambda n: af.vmap(lambda x: af.zeros(n * 2 - 1) + x)(af.ones(2)),
    "rows of rows": lambda n: af.vmap(af.vmap(lambda x: af.sum(af.ones(n)) * x))(af.ones((2, 2))),
}


@pytest.mark.parametrize("name", LIFTED)
async def test_lifted_bodies_are_built_on_their_captures(name: str) -> None:
    """Behaviour 103: the nodes of the body go; values known for them are known for the nodes over all rows."""
    with af.Graph() as graph:
        n = af.constant(3)
        y = LIFTED[name](n)
    async with af.Session(graph) as session:
        as_it_is = await session.run(y)
        np.testing.assert_array_equal(await session.run(y, {n: 3}), as_it_is)
        with pytest.raises(af.FeedError, match="the fed value contradicts it"):
            await session.run(y, {n: 2})
