"""Copies of nodes, and of branches and loops with their bodies."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.building.copying import Copier
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, WhileNode


class Known(Copier):
    """A rule that notes its questions, and the number of loops around each copy."""

    def __init__(self, target: Graph, tensors: dict[Tensor, Tensor]) -> None:
        super().__init__(target)
        self.given = tensors
        self.asked: list[str] = []
        self.depths: dict[str, int] = {}

    def known(self, x: Tensor) -> Tensor | None:
        self.asked.append(x.name)
        return self.given.get(x)

    def made(self, node: Node) -> Node:
        self.depths[node.op.name] = self.loops
        return super().made(node)


async def test_a_value_is_copied_with_the_nodes_behind_it() -> None:
    with af.Graph() as graph:
        x, other = af.placeholder("float64", ()), af.placeholder("float64", ())
        y = af.sin(x) * af.cos(x)
        copier = Known(graph, {x: other})
        again = copier.value(y)
        assert copier.value(y) is again
    assert copier.asked.count(x.name) == 1
    assert [node.op.name for node in copier.nodes] == ["sin", "cos", "multiply"], "in the order of the inputs"
    async with af.Session(graph) as session:
        assert await session.run([y, again], {x: 1.0, other: 2.0}) == [
            np.sin(1.0) * np.cos(1.0),
            np.sin(2.0) * np.cos(2.0),
        ]


def test_long_chains_are_copied_without_recursion() -> None:
    with af.Graph() as graph:
        x = y = af.placeholder("float64", ())
        for _ in range(3000):
            y = af.sin(y)
        copier = Known(graph, {x: x})
        copier.value(y)
    assert len(copier.nodes) == 3000


async def test_loops_in_loops_and_branches_are_copied() -> None:
    with af.Graph() as graph:
        x, other = af.placeholder("float64", ()), af.placeholder("float64", ())

        def body(i: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            _, inner = af.while_loop(lambda j, t: j < 2, lambda j, t: (j + 1, af.sin(t) + x), (0, s))
            return i + 1, af.cond(inner > 0, lambda: inner * x, lambda: af.cos(inner))

        _, y = af.while_loop(lambda i, s: i < 3, body, (0, x), parallel_iterations=4)
        copier = Known(graph, {x: other})
        again = copier.value(y)
    assert copier.depths["sin"] == 2
    assert copier.depths["cos"] == 1
    loop = again.node
    assert isinstance(loop, WhileNode)
    assert loop.parallel_iterations == 4
    assert loop.location == y.node.location
    outside = [x.name for x in loop.inputs]
    assert other.name in outside
    assert x.name not in outside
    async with af.Session(graph) as session:
        for value in (0.5, -0.5):
            first, second = await session.run([y, again], {x: value, other: value})
            assert first == second
        assert await session.run(again, {x: 0.0, other: 0.5}) == await session.run(y, {x: 0.5, other: 0.0})


def test_copies_wait_for_copies_and_are_placed_like_their_originals() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        with af.device("cpu:0"):
            first = af.sin(x)
        with af.control_dependencies([first]), af.colocate_with(first):
            second = af.cos(x)
        copier = Known(graph, {x: x})
        copier.copy([first.node, second.node])
    made = copier.nodes[second.node]
    assert made.control_inputs == [copier.nodes[first.node]]
    assert copier.nodes[first.node].device == "cpu:0"
    assert made.colocated_with == first.node.name


def test_a_parameter_without_a_stand_in_is_refused() -> None:
    with af.Graph() as graph:
        _, y = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, af.sin(s)), (0, 1.0))
        result = y.node.subgraphs[1].results[1]
        assert result.node.inputs[0].node.op is PARAMETER
        with pytest.raises(AssertionError, match="has no stand-in"):
            Known(graph, {}).value(result)


def test_a_captured_value_keeps_the_shape_that_a_body_was_built_with() -> None:
    """Nodes of the body need not take the shape of the stand-in, such as that of an empty array."""
    with af.Graph() as graph:
        x, empty = af.placeholder("float64", (4, 4)), af.placeholder("float64", (0, 0))
        y = af.cond(af.placeholder("bool", ()), lambda: af.sin(x), lambda: af.cos(x))
        copier = Known(graph, {x: empty, **{each: each for each in y.node.inputs[:1]}})
        again = copier.value(y)
    assert isinstance(again.node, CondNode)
    assert [body.inputs[0].spec for body in again.node.subgraphs] == [x.spec, x.spec]
