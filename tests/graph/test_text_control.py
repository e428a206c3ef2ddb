"""Branches and loops as users write them print, read back and verify."""

from __future__ import annotations

import pytest

from asyncflow.control.cond import cond
from asyncflow.control.while_loop import while_loop
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import constant, identity, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.text.parse import parse_graph
from asyncflow.graph.text.text import print_graph
from asyncflow.graph.verify import verify


def nested() -> Graph:
    """A loop with a branch in it, one side of which is a loop that captures from both graphs around it."""
    with Graph() as graph:
        flag = placeholder("bool", (), name="flag")
        weights = placeholder("float32", (None,), name="weights")

        def inner(state: object) -> object:
            return while_loop(lambda x: flag, lambda x: (identity(weights),), (state,), name="inner")[0]

        while_loop(
            lambda count, state: flag,
            lambda count, state: (count, cond(flag, lambda: inner(state), lambda: state)),
            (constant(0), weights),
            maximum_iterations=5,
            name="outer",
        )
    return graph


def test_nested_control_flow_reads_back() -> None:
    graph = nested()
    verify(graph)
    text = print_graph(graph)
    parsed = parse_graph(text)
    verify(parsed)
    assert print_graph(parsed) == text


def test_damage_inside_nested_control_flow_is_found() -> None:
    graph = nested()
    graph.node("outer").attrs["body"].results.pop()
    with pytest.raises(
        GraphError, match=r"node 'outer' \(while\): its loop variables and results of .* differ in number"
    ):
        verify(graph)
