"""Nodes that no value needs are removed, at any depth; nodes that may fail stay."""

from __future__ import annotations

from typing import Any

import asyncflow as af
from asyncflow.autodiff.stores.saved_values import NEW_STORE, READ_SAVED, SAVE
from asyncflow.compiler.optimize.prune import prune
from asyncflow.compiler.program.extract import extract
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.structured import CondNode, WhileNode


def needed(graph: af.Graph, *fetches: Any) -> Graph:
    """The part of a graph that passes get, with all placeholders fed."""
    fed = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    return extract(graph, list(fetches), fed).graph


def pruned(program: Graph) -> Graph:
    prune(program)
    af.verify(program)
    return program


def loops(program: Graph) -> list[WhileNode]:
    """Return the loops, outermost first, in the order of the program."""
    return [node for node in program.walk() if isinstance(node, WhileNode)]


def count(program: Graph, *ops: Any) -> int:
    return sum(node.op in ops for node in program.walk())


def nested(x: Any, w: Any, depth: int) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, nested(y, w, depth - 1) if depth > 1 else af.sin(y @ w) * y

    return af.while_loop(lambda i, _: i < 2, body, (0, x))[1]


def test_a_saved_value_that_the_innermost_gradient_no_longer_reads_is_not_saved(graph: af.Graph) -> None:
    """The read goes, the captures on its way, the reads of the stores around, the saves and the loop variables."""
    x, w = af.placeholder("float32", (2, 2)), af.placeholder("float32", (2, 2))
    program = needed(graph, af.gradients(nested(x, w, 3), x))
    read = [node for node in program.walk() if node.op is READ_SAVED and node.outputs[0].shape == (2, 2)]
    stores, reads, saves = (count(program, op) for op in (NEW_STORE, READ_SAVED, SAVE))
    captures = [len(loop.captures) for loop in loops(program)]
    pruned(program)
    assert (stores, reads, saves) == tuple(count(program, op) for op in (NEW_STORE, READ_SAVED, SAVE)), "all are used"
    value, body = read[0].outputs[0], read[0].graph
    assert isinstance(body, Subgraph)
    for node in body.nodes:
        node.inputs = [body.inputs[1] if each is value else each for each in node.inputs]
    pruned(program)
    assert (stores, reads, saves) == tuple(3 + count(program, op) for op in (NEW_STORE, READ_SAVED, SAVE))
    after = [len(loop.captures) for loop in loops(program)]
    assert sum(captures) - sum(after) >= 3


def test_loop_variables_and_results_of_branches_that_nothing_needs_go(graph: af.Graph) -> None:
    """Variables that only make one another are removed as well."""
    x, n = af.placeholder("float32", (3,)), af.placeholder("int32", ())

    def body(i: Any, y: Any, a: Any, b: Any) -> Any:
        kept, dropped = af.cond(i > 0, lambda: (af.sin(y), a + b), lambda: (y, a))
        return i + 1, kept, b + dropped, a * 2

    _, y, a, _ = af.while_loop(lambda i, *_: i < n, body, (0, x, x, x))
    program = needed(graph, y + a)
    (loop,) = loops(program)
    (add,) = [node for node in program.nodes if loop.outputs[2] in set(node.inputs)]
    add.inputs = [loop.outputs[1]] * 2
    pruned(program)
    assert loop.n_vars == 2
    (branch,) = [node for node in program.walk() if isinstance(node, CondNode)]
    assert len(branch.outputs) == 1
    assert all(len(body.results) == 1 for body in branch.subgraphs)


def test_what_may_fail_stays(graph: af.Graph) -> None:
    """The node stays, with the loop variables that it reads, though its results are unused."""
    x, k = af.placeholder("float32", (3,)), af.placeholder("int32", ())

    def body(i: Any, k: Any, y: Any, z: Any) -> Any:
        return i + 1, k + 1, y + x[k], z * 2

    _, _, y, z = af.while_loop(lambda i, *_: i < 2, body, (0, k, x, x))
    program = needed(graph, y, z)
    (loop,) = loops(program)
    program.nodes[:] = [node for node in program.nodes if loop.outputs[2] not in set(node.inputs)]
    (add,) = [node for node in loop.body.nodes if node.outputs[0] is loop.body.results[2]]
    add.inputs = [loop.body.inputs[2]] * 2
    pruned(program)
    assert "getitem" in {node.op.name for node in program.walk()}
    assert loop.n_vars == 3, "the counter, the index and what is fetched"
