"""Branches and loops that rows go through in ways of their own, kept as they were, to be lifted over rows of rows.

What they are lifted to takes rows apart, as many as the run says: that cannot be done for each row of another axis. So
lifting what was lifted goes back to the branch or loop itself, over the rows of both axes as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncflow.graph.build import graph_for
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode, levels
from asyncflow.ops.rows.rule import LiftedValue, RowAxis


@dataclass(frozen=True, slots=True, eq=False)
class PartedRows:
    """A branch or loop over rows, in a body.

    Attributes:
        node: the branch or loop over one row.
        around: the graph that it stands in, which notes what its gradient needs; lifting drops that graph.
        inputs: what it was given for the rows: tensors of the body.
        rows: the axis.
        count: how many rows there are.
        numbers: those of the rows.
        outputs: what was made of its outputs.
        made: all nodes of the body that were made of it, behind those of what it depends on.
    """

    node: StructuredNode
    around: Graph
    inputs: tuple[LiftedValue, ...]
    rows: RowAxis
    count: Tensor
    numbers: Tensor
    outputs: tuple[Tensor, ...]
    made: tuple[Node, ...]

    @property
    def needs(self) -> list[Tensor]:
        """The tensors of the body that it depends on."""
        return [*(value.tensor for value in self.inputs), self.count, self.numbers]

    def gives_rows(self, has_rows: Sequence[bool]) -> bool:
        """Whether its outputs have rows of another axis, given which of what it needs have."""
        return any(has_rows) or any(
            each.op.is_random and each.op.needs_context  # others make stores, or hold back
            for body in self.node.subgraphs
            for level in levels(body)
            for each in level.nodes
        )


def parting(
    node: StructuredNode, inputs: Sequence[LiftedValue], rows: RowAxis
) -> Callable[[Sequence[LiftedValue]], None]:
    """Call it before a branch or loop is lifted, and what it gives with the outputs: in a body, that notes both."""
    graph = graph_for()
    if not graph.is_subgraph:
        return lambda outputs: None
    given = tuple(value._replace(tensor=graph.import_tensor(value.tensor)) for value in inputs)
    count, numbers = (graph.import_tensor(x) for x in (rows.count, rows.numbers()))
    first = len(graph.nodes)

    def note(outputs: Sequence[LiftedValue]) -> None:
        made = tuple(graph.nodes[first:])
        parted = PartedRows(node, node.graph, given, rows, count, numbers, tuple(y.tensor for y in outputs), made)
        graph.parted.update(dict.fromkeys(made, parted))

    return note


def parted_at(node: Node) -> PartedRows | None:
    """The branch or loop one of whose outputs a node gives; None if it gives none."""
    parted: PartedRows | None = node.graph.parted.get(node)
    return parted if parted is not None and any(y.node is node for y in parted.outputs) else None
