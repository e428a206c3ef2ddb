"""Random draws of a body that several runs compute together: each row draws by a key of its own.

A draw depends on the seed, the run and the iteration of its firing. Rows of a call come from other runs and iterations
than the call itself, so these numbers are a column: the *key* (`asyncflow.ops.random.random_again`). A row then draws
the bits that its run would draw by itself. In a pooled loop the last number of a key counts the iterations of its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from asyncflow.graph.graph import Graph, Subgraph, reopened
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode, WhileNode, add_parameter, deep, levels
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.control.parted import PartedRows
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.random.random_again import draw_by_key, draws_numbers, random_key
from asyncflow.ops.rows.rule import CannotLift, LiftedValue


def draws(*bodies: Subgraph) -> bool:
    """Return True if something in bodies draws random numbers."""
    return any(draws_numbers(node.op) for body in bodies for node in body.walk())


def capture_key(body: Subgraph) -> None:
    """Have a body draw by the key of the firing that it is computed for, which becomes a capture."""
    outer = _key_in(body.parent)
    with reopened(body):
        key = add_parameter(body, outer.spec, "key", outer.node.location, 0)
    body.inputs.append(key)
    body.captures[outer] = key
    _draw_by_key(body.nodes, key, 0)


def carry_key(condition: Subgraph, body: Subgraph, n_vars: int) -> Tensor:
    """Have predicate and body of a loop draw by a key, which becomes the last loop variable; return its first value."""
    outer = body.parent
    first = _key_in(outer, counts=True)
    for part in (condition, body):
        key = add_parameter(part, first.spec, "key", first.node.location, 0)
        part.inputs.insert(n_vars, key)
        _draw_by_key(part.nodes, key, 0)
    with body:
        body.results.append(_next_key(body.inputs[n_vars]))
    return first


def _key_in(graph: Graph, *, counts: bool = False) -> Tensor:
    """The key of a firing in a graph: of a whole program, it is known that no loop is around."""
    with graph:
        return random_key(None if graph.is_subgraph else 0, counts=counts)


def _next_key(key: Tensor) -> Tensor:
    """The key of the next iteration."""
    if key.shape and key.shape[0] is not None:
        return add(key, np.eye(1, key.shape[0], key.shape[0] - 1, np.int64)[0])
    return concat([key[:-1], add(key[-1:], 1)])


def draw_by_parameter(body: Subgraph, nodes: Sequence[Node], reduced: Sequence[Node] = ()) -> Tensor | None:
    """Have some nodes of a body draw by a key that is a new parameter, and return it; None if none of them draws.

    Args:
        body: the body.
        nodes: of the body.
        reduced: of these, the nodes that reduce children by a function that draws.
    """
    if not reduced and not any(draws_numbers(each.op) for each in deep(nodes)):
        return None
    with reopened(body):
        key = add_parameter(body, Spec(int64, (None,)), "key", nodes[0].location, 0)
    _draw_by_key(nodes, key, 0)
    for node in reduced:
        draw_in_each(node, key)
    return key


def draw_in_each(node: Node, key: Tensor) -> None:
    """Have the function of each child of a node that reduces children draw by a key of the child.

    Args:
        node: it gets the vertex's key as one more input, after the captures of the function.
        key: of the vertex.
    """
    each: Subgraph = node.attrs["each"]
    with reopened(each):
        of_child = add_parameter(each, key.spec, "key", node.location, 0)
    node.inputs.insert(len(each.captures), key)
    each.inputs.append(of_child)
    node.attrs = {**node.attrs, "keyed": True}
    _draw_by_key(each.nodes, of_child, 0)


def _draw_by_key(nodes: Sequence[Node], key: Tensor, inside: int, *, of_rows: bool = False) -> None:
    """Change the nodes that draw random numbers; `inside`: the number of loops around them since the key was taken."""
    for node in nodes:
        parted = node.graph.parted.get(node)
        if parted is not None and draws(*parted.node.subgraphs):
            _draw_parted_by_key(node.graph, parted, key, inside)
        if isinstance(node, StructuredNode):
            _draw_inside_by_key(node, key, inside, of_rows=of_rows)
        elif draws_numbers(node.op):
            draw_by_key(node, key, inside, of_rows=of_rows)


def _draw_inside_by_key(node: StructuredNode, key: Tensor, inside: int, *, of_rows: bool) -> None:
    if not draws(*node.subgraphs):
        return
    with ExitStack() as opened:
        for part in node.subgraphs:
            opened.enter_context(reopened(part))
        node.add_capture(key, node.subgraphs[0])
    for part in node.subgraphs:
        part.captures[key] = part.inputs[-1]
        _draw_by_key(part.nodes, part.inputs[-1], inside + isinstance(node, WhileNode), of_rows=of_rows)


def _draw_parted_by_key(graph: Graph, parted: PartedRows, key: Tensor, inside: int) -> None:
    """Change a branch or loop of rows as it was written, of which it is lifted anew over rows of rows."""
    shape, rows = parted.numbers.shape, parted.rows
    assert shape is not None
    assert shape[1] is not None
    # In a tag, a row's numbers precede the iteration numbers of inner loops. They replace the numbers of loops that
    # would bring the rows in turn.
    around = rows.own_loops + sum(loops for *_, loops in rows.outer)
    _draw_inside_by_key(parted.node, key, inside + shape[1] - around, of_rows=True)
    keyed = replace(parted, inputs=(*parted.inputs, LiftedValue(key, has_rows=False)))
    graph.parted.update((node, keyed) for node, each in list(graph.parted.items()) if each is parted)


@contextmanager
def left_as_written(outer: Graph, *bodies: Subgraph) -> Iterator[None]:
    """Undo the changes of `carry_key` to bodies, and remove nodes added to `outer`, if the bodies cannot be lifted."""
    parts = [part for body in bodies for part in (body, *(x for node in body.walk() for x in node.subgraphs))]
    written_rows = {each.node: each for part in parts for each in part.parted.values()}
    parts += [x for node in written_rows for part in node.subgraphs for x in levels(part) if isinstance(x, Subgraph)]
    changed = [*written_rows, *(node for part in parts for node in part.nodes)]
    nodes = [(node, node.op, node.attrs, list(node.inputs)) for node in changed]
    lists = [(part, list(part.nodes), list(part.inputs), list(part.results), dict(part.captures)) for part in parts]
    rows = [(part, dict(part.parted)) for part in parts]
    count = len(outer.nodes)
    try:
        yield
    except CannotLift:
        for node, op, attrs, inputs in nodes:
            node.op, node.attrs, node.inputs = op, attrs, inputs
        for part, written, given, results, captures in lists:
            known = set(written)
            part.nodes = [*written, *(node for node in part.nodes if node not in known)]
            part.take_back(len(written))
            part.inputs, part.results, part.captures = given, results, captures
        for part, parted in rows:
            part.parted = parted
        for part in bodies:
            part.closed = False
        outer.take_back(count)
        raise
