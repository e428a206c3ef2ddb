"""Dependencies of the values of a graph on its sources, through branches and loops.

A dependency is a path of data edges. `stop_gradient` cuts it. An op that has no derivative, such as `argmax`, does not:
a value connected only through such ops has a gradient of zeros, and an unconnected value has none.

Sets of sources are the bits of an int.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

from asyncflow.autodiff.stop_gradient import STOP_GRADIENT
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.resource import resources_of
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.state.variables.variable import VARIABLE_READ, Variable


def nodes_behind(graph: Graph, tensors: Iterable[Tensor]) -> list[Node]:
    """Return the nodes of `graph` that these values depend on, in the graph's order."""
    needed: set[Node] = set()
    open_ = [tensor.node for tensor in tensors]
    while open_:
        node = open_.pop()
        if node not in needed:
            needed.add(node)
            open_ += [tensor.node for tensor in node.inputs]
    return [node for node in graph.nodes if node in needed]


class Dependencies:
    """Sources that the values of graphs depend on, and for branches and loops the sources of their outputs.

    Args:
        variables: the bit of each variable that is a source wherever it is read, by its serial number.
    """

    def __init__(self, variables: Mapping[int, int]) -> None:
        self.variables = variables
        self._outputs: dict[Node, tuple[list[int], list[int]]] = {}

    def of(
        self, nodes: Iterable[Node], sources: Mapping[Tensor, int], cut: Collection[Tensor] = ()
    ) -> dict[Tensor, int]:
        """Return the sources of each value made by `nodes`; values without sources are left out, and so are the `cut`
        ones.

        Args:
            nodes: of one graph, in its order.
            sources: their bits.
            cut: values that depend on nothing.
        """
        found: dict[Tensor, int] = dict(sources)
        for node in nodes:
            if node.op is STOP_GRADIENT:
                continue
            given = [found.get(tensor, 0) for tensor in node.inputs]
            if isinstance(node, StructuredNode):
                outputs = self._of_structured(node, given)
            else:
                mask = self._read(node)
                for each in given:
                    mask |= each
                outputs = [mask] * len(node.outputs)
            for tensor, mask in zip(node.outputs, outputs, strict=True):
                if mask and tensor not in cut:
                    found[tensor] = found.get(tensor, 0) | mask
        return found

    def inputs_of(self, node: StructuredNode) -> list[int]:
        """For each output of a branch or loop, the set of the node's inputs it depends on."""
        return self._summary(node)[0]

    def variables_of(self, node: StructuredNode) -> list[int]:
        """For each output of a branch or loop, the variables it depends on by reads inside."""
        return self._summary(node)[1]

    def _read(self, node: Node) -> int:
        if node.op is not VARIABLE_READ and not node.op.conduct.waits_in_line:
            return 0
        # A call shared by several runs reads variables inside the shared work.
        read = (each for each in resources_of(node) if isinstance(each, Variable))
        return reduce(or_, (self.variables.get(each.serial, 0) for each in read), 0)

    def _of_structured(self, node: StructuredNode, given: Sequence[int]) -> list[int]:
        inputs, variables = self._summary(node)
        unions = {mask: _union(given, mask) for mask in set(inputs)}  # variables that feed one another share a mask
        return [unions[mask] | inside for mask, inside in zip(inputs, variables, strict=True)]

    def _summary(self, node: StructuredNode) -> tuple[list[int], list[int]]:
        found = self._outputs.get(node)
        # Gradients add outputs to branches and loops, and add inputs to loops in front of their captures.
        if found is None or len(found[0]) != len(node.outputs):
            of_node = self._of_while(node) if isinstance(node, WhileNode) else self._of_cond(node)
            found = self._outputs[node] = of_node
        return found

    def _of_results(self, node: StructuredNode, body: Subgraph) -> list[int]:
        """The node's inputs, and above them the variables, that each result of a body depends on."""
        sources = {tensor: 1 << place for place, tensor in enumerate(body.inputs, start=node.body_offset)}
        shift = len(node.inputs)
        inside = Dependencies({serial: mask << shift for serial, mask in self.variables.items()})
        found = inside.of(body.nodes, sources)
        return [found.get(result, 0) for result in body.results]

    def _of_cond(self, node: StructuredNode) -> tuple[list[int], list[int]]:
        sides = [self._of_results(node, body) for body in node.subgraphs]
        return _split([a | b for a, b in zip(*sides, strict=True)], len(node.inputs))

    def _of_while(self, node: WhileNode) -> tuple[list[int], list[int]]:
        step = self._of_results(node, node.body)[: node.n_vars]
        return _split(_closed(step), len(node.inputs))


def _closed(step: Sequence[int]) -> list[int]:
    """Return the inputs and variables that each loop variable depends on after any number of iterations.

    Args:
        step: the dependencies after one iteration; the lowest bits stand for the loop variables.
    """
    own = (1 << len(step)) - 1
    feeds = [list(_places(mask & own)) for mask in step]
    closed = [0] * len(step)
    for ring in _rings(feeds):
        # Variables that feed one another have equal dependencies, including the dependencies of earlier rings.
        union = 0
        for place in ring:
            union |= step[place] | 1 << place
            for other in feeds[place]:
                union |= closed[other]
        for place in ring:
            closed[place] = union
    return closed


def _rings(feeds: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the strongly connected components of a graph, each after the components it leads to (Tarjan, 1972)."""
    numbers, lowest, done = dict[int, int](), dict[int, int](), set[int]()
    open_, path = list[int](), list[tuple[int, Iterator[int]]]()

    def enter(place: int) -> None:
        numbers[place] = lowest[place] = len(numbers)
        open_.append(place)
        path.append((place, iter(feeds[place])))

    for start in range(len(feeds)):
        if start not in numbers:
            enter(start)
        while path:
            place, ahead = path[-1]
            for other in ahead:
                if other not in numbers:
                    enter(other)
                    break
                if other not in done:
                    lowest[place] = min(lowest[place], numbers[other])
            else:
                path.pop()
                if path:
                    before = path[-1][0]
                    lowest[before] = min(lowest[before], lowest[place])
                if lowest[place] == numbers[place]:
                    ring = [open_.pop()]
                    while ring[-1] != place:
                        ring.append(open_.pop())
                    done.update(ring)
                    yield ring


def _places(mask: int) -> Iterator[int]:
    """Yield the places of the bits of a set, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _union(masks: Sequence[int], chosen: int) -> int:
    return reduce(or_, (masks[place] for place in _places(chosen)), 0)


def _split(masks: Sequence[int], n_inputs: int) -> tuple[list[int], list[int]]:
    low = (1 << n_inputs) - 1
    return [mask & low for mask in masks], [mask >> n_inputs for mask in masks]
