"""Nodes of branches and loops have classes of their own, and no code above the room looks behind them."""

from __future__ import annotations

import ast
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asyncflow.graph.graph import Graph
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode, levels
from asyncflow.graph.text.parse import parse_graph
from asyncflow.graph.text.text import print_graph
from asyncflow.graph.verify import verify
from tests.graph.programs import OPS, branching, counting_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(__file__).resolve().parents[2] / "asyncflow"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "graph")
BEHIND_VIEWS = {"body", "cond", "n_vars", "true_branch", "false_branch", "swap_memory"}


def loop_of(graph: Graph) -> WhileNode:
    node = graph.node("loop")
    assert isinstance(node, WhileNode)
    return node


def branch_of(graph: Graph) -> CondNode:
    node = graph.node("pick")
    assert isinstance(node, CondNode)
    return node


def test_a_loop_shows_its_parts() -> None:
    graph = counting_loop()
    loop = loop_of(graph)
    assert loop.subgraphs == (loop.predicate, loop.body)
    assert loop.n_vars == 1
    assert loop.carried == [(loop.body.inputs[0], loop.body.results[0])]
    assert loop.decision is loop.predicate.results[0]
    assert [tensor.node.name for tensor in loop.captures] == ["limit", "step"]
    for body in loop.subgraphs:
        assert loop.captured(body) == dict(zip(body.inputs[1:], loop.captures, strict=True))


def test_a_branch_shows_its_parts() -> None:
    pick = branch_of(branching())
    assert [body.label for body in pick.subgraphs] == ["pick/true", "pick/false"]
    assert pick.decision is pick.predicate is pick.inputs[0]
    assert pick.entering == pick.captures == pick.inputs[1:]
    assert [list(pick.captured(body).values()) for body in pick.subgraphs] == [pick.captures] * 2


@pytest.mark.parametrize("make", [counting_loop, branching])
def test_read_and_copied_graphs_have_the_same_classes(make: Callable[[], Graph]) -> None:
    graph = make()
    for again in (parse_graph(print_graph(graph), ops=OPS), deepcopy(graph)):
        kinds = [(node.name, type(node)) for node in again.walk()]
        assert kinds == [(node.name, type(node)) for node in graph.walk()]
        assert any(issubclass(kind, StructuredNode) for _, kind in kinds)


def test_levels_go_from_the_outside_inward() -> None:
    graph = counting_loop()
    loop = loop_of(graph)
    assert list(levels(graph)) == [graph, loop.body, loop.predicate]
    assert all(not node.subgraphs for node in graph.walk() if node is not loop)


def test_what_a_loop_is_given_later_is_seen_in_both_bodies() -> None:
    graph = counting_loop()
    loop = loop_of(graph)
    outer = graph.tensor("start")
    for body in loop.subgraphs:
        body.closed = False
    seen = loop.add_capture(outer, loop.body)
    variable, left = loop.add_variable(outer)
    loop.body.results.append(variable)
    verify(graph)
    assert loop.captured(loop.body)[seen] is outer
    assert (loop.n_vars, left.index, loop.inputs[1]) == (2, 1, outer)
    loop.drop_inputs([1])
    loop.keep_variables([0])
    verify(graph)
    assert (loop.n_vars, len(loop.inputs), len(loop.outputs)) == (1, 4, 1)


def hidden_questions(source: str) -> Iterator[str]:
    """Yield the places where a module compares the name of an op, or reads internals of `CondNode` and `WhileNode`."""
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
            if isinstance(node.value, ast.Attribute) and node.value.attr == "attrs":
                yield from _behind(node.slice, node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            asked = node.args
            if isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "attrs":
                yield from _behind(node.args[0], node)
        yield from (ast.unparse(node) for each in asked if _is_name_of_op(each))


def _behind(key: ast.expr, where: ast.AST) -> Iterator[str]:
    if isinstance(key, ast.Constant) and key.value in BEHIND_VIEWS:
        yield ast.unparse(where)


def _is_name_of_op(asked: ast.expr) -> bool:
    if not isinstance(asked, ast.Attribute) or asked.attr != "name":
        return False
    owner = asked.value
    return (isinstance(owner, ast.Attribute) and owner.attr == "op") or (
        isinstance(owner, ast.Name) and owner.id == "op"
    )


def test_ops_are_told_apart_by_themselves_and_structured_nodes_by_their_classes() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in MODULES}
    suspect = {name: source for name, source in sources.items() if "op.name" in source or ".attrs" in source}
    found = {name: list(hidden_questions(source)) for name, source in suspect.items()}
    assert len(found) > 20
    assert {name: questions for name, questions in found.items() if questions} == {}


def test_hidden_questions_are_found() -> None:
    source = """
node.op.name == "while"
"cond" != op.name
node.op.name in STRUCTURED
KNOWN.get(node.op.name)
KNOWN[op.name]
node.attrs["body"].results
loop.attrs.get("n_vars")
node.op is MERGE and node.attrs["frame"] and f"{node.op.name}"
"""
    assert set(hidden_questions(source)) == {
        "node.op.name == 'while'",
        "'cond' != op.name",
        "node.op.name in STRUCTURED",
        "KNOWN.get(node.op.name)",
        "KNOWN[op.name]",
        "node.attrs['body']",
        "loop.attrs.get('n_vars')",
    }
