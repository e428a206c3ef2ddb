"""Branches and loops whose rows take ways of their own, kept as written, to be lifted over rows of rows.

Their lifted form takes rows apart, in numbers known only in the run, which cannot be done for each row of another axis.
So lifting a lifted branch or loop goes back to the original, over the rows of both axes as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncflow.graph.building.build import graph_for
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
        inputs: given values for the rows: tensors of the body.
        rows: the axis.
        count: how many rows there are.
        numbers: the numbers of the rows.
        outputs: the lifted outputs.
        made: all nodes of the body made for it, behind the nodes that it depends on.
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
        """Return True if its outputs get rows of another axis, given which needed values have them."""
        return any(has_rows) or any(
            each.op.conduct.is_random and each.op.conduct.needs_context  # other such ops make stores, or delay
            for body in self.node.subgraphs
            for level in levels(body)
            for each in level.nodes
        )


def parting(
    node: StructuredNode, inputs: Sequence[LiftedValue], rows: RowAxis
) -> Callable[[Sequence[LiftedValue]], None]:
    """Return a function to call with the outputs after a branch or loop was lifted: in a body, it notes inputs and
    outputs.
    """
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
