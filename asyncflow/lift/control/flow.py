"""Values of a body that have rows, found before anything is built: loops need this for their variables.

A TensorArray has rows if a value with rows is written to it, in a loop or branch too. The array is made before that. So
its users *demand* its rows, and nodes are looked at again until no further array is demanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.lift.control.parted import parted_at
from asyncflow.ops.rows.rule import has_rows_on_demand, outputs_with_rows


class RowFlow(NamedTuple):
    """The flow of rows through some nodes: values with rows, and arrays that get rows.

    Attributes:
        known: True for each value that has rows, and False for each other one.
        sources: for each array, the given and new arrays that it is made of by writes.
        demanded: arrays without rows that must get some, as values with rows are written to them.
    """

    known: dict[Tensor, bool]
    sources: dict[Tensor, set[Tensor]]
    demanded: set[Tensor]


Memo: TypeAlias = "dict[tuple[Subgraph, tuple[bool, ...]], RowFlow]"
"""Findings on bodies, keyed by the inputs with rows; valid for one question, as gradients add to bodies."""


def find_rows(nodes: Iterable[Node], given: Mapping[Tensor, bool], memo: Memo | None = None) -> RowFlow:
    """Return which values made by `nodes` have rows, given the values that do."""
    arrays: set[Tensor] = set()
    memo = {} if memo is None else memo
    while True:
        found = _found_with(nodes, given, arrays, memo)
        more = {x for x in found.demanded if x not in given and has_rows_on_demand(x.node.op)}
        if not more:
            return found
        arrays |= more


def _found_with(nodes: Iterable[Node], given: Mapping[Tensor, bool], arrays: set[Tensor], memo: Memo) -> RowFlow:
    """See `find_rows`; of the arrays that the nodes make, `arrays` have rows."""
    rows = RowFlow(dict(given), {x: {x} for x in given if x.dtype == VARIANT}, set())
    for node in nodes:
        if not node.outputs or node.outputs[0] in rows.known or not all(x in rows.known for x in node.inputs):
            continue
        inputs = [rows.known[x] for x in node.inputs]
        asked: Sequence[Tensor] = ()
        made: Sequence[Sequence[Tensor]] = [[x for x in node.inputs if x.dtype == VARIANT]] * len(node.outputs)
        if (parted := parted_at(node)) is not None:
            flags: Sequence[bool] = [parted.gives_rows([rows.known[x] for x in parted.needs])] * len(node.outputs)
        elif isinstance(node, StructuredNode):
            flags = _structured(node, inputs, memo)
            if made and made[0]:
                asked, made = _arrays_inside(node, inputs, flags, memo)
        elif has_rows_on_demand(node.op):
            flags = [x in arrays for x in node.outputs]
        else:
            flags = outputs_with_rows(node, inputs)
        rows.known.update(zip(node.outputs, flags, strict=True))
        for y, has_rows, of in zip(node.outputs, flags, made, strict=True):
            if y.dtype == VARIANT:
                rows.sources[y] = set().union(*(rows.sources[x] for x in of)) or {y}
                asked = [*asked, y] if has_rows else asked
        rows.demanded.update(x for array in asked for x in rows.sources[array] if not rows.known[x])
    return rows


def _structured(node: StructuredNode, inputs: Sequence[bool], memo: Memo) -> list[bool]:
    """Return for each output of a branch or loop if it has rows."""
    if isinstance(node, CondNode):
        return branches_with_rows(node, inputs, memo)
    assert isinstance(node, WhileNode)
    variables = variables_with_rows(node, inputs, memo)
    return [True] * node.n_vars if decided_by_row(node, variables, inputs, memo) else variables


def _arrays_inside(
    node: StructuredNode, inputs: Sequence[bool], flags: Sequence[bool], memo: Memo
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the arrays that a branch or loop takes and that are to have rows, and of which each output is made."""
    entering = list(inputs[node.body_offset :])
    if isinstance(node, WhileNode):
        entering[: node.n_vars] = flags
    asked: list[Tensor] = []
    made: list[set[int]] = [set() for _ in node.outputs]
    for body in node.subgraphs:
        rows = _of_body(body, entering, memo)
        places = {x: place for place, x in enumerate(body.inputs)}
        asked += [x for x, inner in zip(node.entering, body.inputs, strict=True) if inner in rows.demanded]
        if not isinstance(node, WhileNode) or body is node.body:
            for of, result in zip(made, body.results, strict=True):
                of.update(places[x] for x in rows.sources.get(result, ()) if x in places)
    if isinstance(node, WhileNode):
        made = _closed([of | {place} for place, of in enumerate(made)])
        asked += [x for x, has_rows in zip(node.entering, flags, strict=False) if has_rows and x.dtype == VARIANT]
    return asked, [[x for x in (node.entering[place] for place in of) if x.dtype == VARIANT] for of in made]


def _closed(made: Sequence[set[int]]) -> list[set[int]]:
    """Return the inputs that each loop variable depends on after any iteration, given the ones for a single
    iteration.
    """
    while True:
        wider = [of.union(*(made[place] for place in of if place < len(made))) for of in made]
        if wider == list(made):
            return wider
        made = wider


def _of_body(body: Subgraph, inputs: Sequence[bool], memo: Memo) -> RowFlow:
    """Return the flow of rows in a body, given which inputs have rows."""
    key = body, tuple(inputs)
    if key not in memo:
        memo[key] = find_rows(body.nodes, dict(zip(body.inputs, inputs, strict=True)), memo)
    return memo[key]


def _results(body: Subgraph, inputs: Sequence[bool], memo: Memo | None) -> list[bool]:
    known = _of_body(body, inputs, {} if memo is None else memo).known
    return [known[x] for x in body.results]


def branches_with_rows(node: CondNode, inputs: Sequence[bool], memo: Memo | None = None) -> list[bool]:
    """Return for each output of a branch if it has rows."""
    predicate, *captures = inputs
    sides = (_results(body, captures, memo) for body in node.subgraphs)
    return [predicate or one or other for one, other in zip(*sides, strict=True)]


def variables_with_rows(node: WhileNode, inputs: Sequence[bool], memo: Memo | None = None) -> list[bool]:
    """Return for each variable of a loop if it has rows, from some iteration on."""
    variables, captures = list(inputs[: node.n_vars]), list(inputs[node.n_vars :])
    while True:
        after = _results(node.body, variables + captures, memo)
        if all(before or not now for before, now in zip(variables, after, strict=True)):
            return variables
        variables = [before or now for before, now in zip(variables, after, strict=True)]


def decided_by_row(
    node: WhileNode, variables: Sequence[bool], inputs: Sequence[bool], memo: Memo | None = None
) -> bool:
    """Return True if each row of a loop may end in an iteration of its own."""
    return _results(node.predicate, [*variables, *inputs[node.n_vars :]], memo)[0]
