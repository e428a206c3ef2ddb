"""Which values of a body have rows, found before anything is built: loops need to know it of their variables."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.lift.parted import parted_at
from asyncflow.ops.rows.rule import gives_rows


def results_with_rows(body: Subgraph, inputs: Sequence[bool]) -> list[bool]:
    """Whether each result of a body has rows, given which inputs have."""
    known: dict[Tensor, bool] = dict(zip(body.inputs, inputs, strict=True))
    for node in body.nodes:
        if node.outputs and node.outputs[0] not in known:
            if (parted := parted_at(node)) is not None:
                flags: Sequence[bool] = [parted.gives_rows([known[x] for x in parted.needs])] * len(node.outputs)
            else:
                flags = _outputs(node, [known[x] for x in node.inputs])
            known.update(zip(node.outputs, flags, strict=True))
    return [known[x] for x in body.results]


def _outputs(node: Node, inputs: list[bool]) -> Sequence[bool]:
    if isinstance(node, WhileNode):
        variables = variables_with_rows(node, inputs)
        return [True] * node.n_vars if decided_by_row(node, variables, inputs) else variables
    if isinstance(node, CondNode):
        return branches_with_rows(node, inputs)
    return [gives_rows(node.op, any(inputs))] * len(node.outputs)


def branches_with_rows(node: CondNode, inputs: Sequence[bool]) -> list[bool]:
    """Whether each output of a branch has rows."""
    predicate, *captures = inputs
    sides = (results_with_rows(body, captures) for body in node.subgraphs)
    return [predicate or one or other for one, other in zip(*sides, strict=True)]


def variables_with_rows(node: WhileNode, inputs: Sequence[bool]) -> list[bool]:
    """Whether each variable of a loop has rows, from some iteration on."""
    variables, captures = list(inputs[: node.n_vars]), list(inputs[node.n_vars :])
    while True:
        after = results_with_rows(node.body, variables + captures)
        if all(before or not now for before, now in zip(variables, after, strict=True)):
            return variables
        variables = [before or now for before, now in zip(variables, after, strict=True)]


def decided_by_row(node: WhileNode, variables: Sequence[bool], inputs: Sequence[bool]) -> bool:
    """Whether each row of a loop may end in an iteration of its own."""
    return results_with_rows(node.predicate, [*variables, *inputs[node.n_vars :]])[0]
