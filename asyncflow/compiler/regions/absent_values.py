"""Values of one side of a branch that the gradient of a card's loop needs, with the shape that the loop has room for.

The side that is not taken gives an array without elements in place of each such value, and no gradient reads it
(`autodiff/bodies/cond_gradient.py`). A card has one buffer for the values of both sides. So the absent value becomes as
many zeros as the other side has elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.compiler.program.detached import detached_node
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import FULL


@dataclass(frozen=True, slots=True)
class Filled:
    """An absent value that was given a shape.

    Attributes:
        branch: the side that has it.
        place: among the results.
        output: of the branching node.
        absent: the result before.
        spec: of the output before.
    """

    branch: Subgraph
    place: int
    output: Tensor
    absent: Tensor
    spec: Spec

    def undo(self) -> None:
        """Make it absent again."""
        self.branch.nodes.remove(self.branch.results[self.place].node)
        self.branch.results[self.place], self.output.spec = self.absent, self.spec


def fill_absent(loop: WhileNode) -> list[Filled]:
    """Give all absent values in the body of a loop the shapes of the others, in place; return the changes."""
    # Inner branches first, so that outer branches know the shapes of their values.
    inner_first = [node for node in reversed(loop.body.walk()) if isinstance(node, CondNode)]
    outputs = [(node, output) for node in inner_first for output in node.outputs]
    return [filled for node, output in outputs if (filled := _filled(node, output)) is not None]


def _filled(node: CondNode, output: Tensor) -> Filled | None:
    if is_static(output.shape):
        return None
    place, spec = output.index, output.spec
    results = [branch.results[place] for branch in node.subgraphs]
    for branch, absent, other in zip(node.subgraphs, results, reversed(results), strict=True):
        if _is_absent(absent) and is_static(other.shape):
            made = detached_node(branch, FULL, absent.node.inputs, {"shape": other.shape}, absent.node, other.spec)
            branch.nodes.append(made)
            branch.results[place], output.spec = made.outputs[0], other.spec
            return Filled(branch, place, output, absent, spec)
    return None


def _is_absent(x: Tensor) -> bool:
    """Return True if a tensor has no elements, and was made to have none."""
    return x.node.op is FULL and bool(x.shape) and not any(x.shape or ())
