"""Pass: drops nodes, captures, loop variables and results of branches that no value of the program needs any more.

Other passes leave these behind, at any depth. `choose_saved` removes the use of a saved value in an inner gradient;
with it goes the capture, then the read in the body around, and so on out to the loop that saves. A node that may fail
stays although its value is unused, for it was part of the program; so does every branch and loop.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncflow.compiler.program.purity import may_be_left_out
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode, levels


def prune(graph: Graph, keep: Collection[Node] = ()) -> None:
    """Prune `graph` and its bodies, in place.

    Args:
        graph: a graph or body.
        keep: nodes that stay, such as fetched nodes.
    """
    needed = _Needed(graph, keep)
    for level in needed.levels:
        for node in level.nodes:
            if isinstance(node, StructuredNode):
                _drop_unneeded(node, needed.tensors)
        kept = [node for node in level.nodes if node.op is PARAMETER or node in needed.nodes]
        if len(kept) < len(level.nodes):
            level.nodes[:] = kept


class _Needed:
    """The needed part of a graph and its bodies, found backwards from the nodes that have to run.

    Attributes:
        levels: the graph and all bodies in it.
        nodes: the nodes that are needed, parameters left out.
        tensors: the needed ones among parameters and results of branches and loops. A loop variable is needed as a
            whole: as input, as parameter, as result of the body and as output.
    """

    def __init__(self, graph: Graph, keep: Collection[Node]) -> None:
        self.levels = list(levels(graph))
        self.nodes: set[Node] = set()
        self.tensors: set[Tensor] = set()
        self._places: dict[Tensor, tuple[StructuredNode, int]] = {}
        self._open: list[Tensor | Node] = [*keep, *(graph.results if isinstance(graph, Subgraph) else ())]
        loops: list[WhileNode] = []
        for level in self.levels:
            for node in level.nodes:
                if isinstance(node, StructuredNode):
                    for body in node.subgraphs:
                        self._places.update((x, (node, place)) for place, x in enumerate(body.inputs, node.body_offset))
                if isinstance(node, WhileNode):
                    loops.append(node)
                if isinstance(node, StructuredNode) or not node.outputs:
                    self._open.append(node)
        self._spread()
        for level in self.levels:
            for node in reversed(level.nodes):
                if node not in self.nodes and node.op is not PARAMETER and not may_be_left_out(node):
                    self._open.append(node)
                    self._spread()
        for loop in loops:
            if self.tensors.isdisjoint(loop.outputs):  # a loop iterates on something
                self._need_variable(loop, 0)
                self._spread()

    def _spread(self) -> None:
        """Spread the need from open nodes and tensors to their sources."""
        while self._open:
            latest = self._open.pop()
            node = latest.node if isinstance(latest, Tensor) else latest
            if node.op is PARAMETER:
                self._need_parameter(node.outputs[0])
                continue
            if node not in self.nodes:
                self.nodes.add(node)
                self._open += [node.decision] if isinstance(node, StructuredNode) else node.inputs
                self._open += node.control_inputs
            if isinstance(latest, Tensor) and isinstance(node, WhileNode):
                self._need_variable(node, latest.index)
            elif isinstance(latest, Tensor) and isinstance(node, CondNode) and latest not in self.tensors:
                self.tensors.add(latest)
                self._open += [branch.results[latest.index] for branch in node.subgraphs]

    def _need_parameter(self, inner: Tensor) -> None:
        """Note the need of a parameter's source."""
        if inner not in self._places:
            return  # of the body that is pruned
        node, place = self._places[inner]
        if isinstance(node, WhileNode) and place < node.n_vars:
            self._need_variable(node, place)
        elif inner not in self.tensors:
            self.tensors.add(inner)
            self._open.append(node.inputs[place])

    def _need_variable(self, loop: WhileNode, place: int) -> None:
        if loop.outputs[place] not in self.tensors:
            self.tensors.add(loop.outputs[place])
            self._open += (loop.inputs[place], loop.body.results[place])


def _drop_unneeded(node: StructuredNode, needed: Collection[Tensor]) -> None:
    """Drop the captures of a branch or loop that no body needs, and its unneeded results."""
    first, offset = node.first_capture, node.body_offset
    captures = range(first, len(node.inputs))
    gone = {place for place in captures if all(body.inputs[place - offset] not in needed for body in node.subgraphs)}
    kept = [output.index for output in node.outputs if output in needed]
    if isinstance(node, WhileNode):
        gone.update(place for place in range(first) if node.outputs[place] not in needed)
    node.drop_inputs(gone)
    if len(kept) == len(node.outputs):
        return
    if isinstance(node, WhileNode):
        node.keep_variables(kept)
    elif isinstance(node, CondNode):
        node.keep_results(kept)
