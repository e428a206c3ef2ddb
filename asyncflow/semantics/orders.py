"""The order of reads and writes, whatever the run does: the order given by paths and loops, found without a search.

Each value has a set of accesses that are over once the value exists, as the bits of an int. *Slot* 0 has the accesses
of the same iteration of all common loops. Slot d + 1 has accesses whose firings all come in earlier iterations of the
loop at depth d. The iterations of the loops outside it are the same. A value waits for all its inputs, so sets are
united; of a cond or a loop it is one of several values, so they are intersected. A loop is gone through until nothing
changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.semantics.program import NeededGraph

_MOST_PASSES = 8
"""Maximum number of passes through one loop; its variables then follow no access inside the loop."""


class AccessOrder:
    """The orders of one program. Of soft ones only those within one graph or body are known.

    Attributes:
        nodes: the nodes that touch a resource, in the order in which they were written; their places are the bits.
        before: for each node the accesses that are over when it fires, in all slots.
        loops: for each the nodes inside the loops around it, outermost first.
        excluded: for each node the nodes in other branches of the conds around it, which never fire in the same
            iteration.
    """

    def __init__(self, program: NeededGraph) -> None:
        self.program = program
        self.nodes: list[Node] = []
        self.loops: list[tuple[int, ...]] = []
        self.excluded: list[int] = []
        self._inside: dict[Graph, int] = {}
        self._find(program.graph)
        self._bits = {node: 1 << place for place, node in enumerate(self.nodes)}
        self.before = [0] * len(self.nodes)
        self._values: dict[Tensor, int] = dict.fromkeys(program.feeds, 0)
        self._done: dict[Node, int] = {}
        self._level(program.graph, 0, 0)

    def _find(self, graph: Graph) -> int:
        """Lists the accesses of a graph and all bodies in it; which bits they are."""
        first = len(self.nodes)
        for node in self.program.nodes(graph):
            start = len(self.nodes)
            if not node.subgraphs:
                if self.program.touches(node):
                    self.nodes.append(node)
                    self.loops.append(())
                    self.excluded.append(0)
                continue
            bodies = [self._find(body) for body in node.subgraphs]
            for place in range(start, len(self.nodes)):
                if isinstance(node, WhileNode):
                    self.loops[place] = (sum(bodies), *self.loops[place])
                else:
                    self.excluded[place] |= sum(bits for bits in bodies if not bits >> place & 1)
        self._inside[graph] = (1 << len(self.nodes)) - (1 << first)
        return self._inside[graph]

    def _level(self, graph: Graph, start: int, depth: int) -> None:
        """Goes through a graph or body, all of which comes after `start`."""
        turns: dict[tuple[Hashable, Access], int] = defaultdict(int)
        for node in self.program.nodes(graph):
            ready = start | self._after(node.control_inputs)
            soft = self.program.touches(node).items() if self.program.graph.effects == "ordered" else ()
            for key, access in soft:
                ready |= turns[key, Access.WRITE] | (turns[key, Access.READ] if access is Access.WRITE else 0)
            if isinstance(node, CondNode):
                self._cond(node, ready, depth)
            elif isinstance(node, WhileNode):
                self._while(node, ready, depth)
            else:
                for tensor in node.inputs:
                    ready |= self._value(tensor)
                if node in self._bits:
                    self.before[self._bits[node].bit_length() - 1] = ready
                    ready |= self._bits[node]
                self._done[node] = ready
                for tensor in node.outputs:
                    self._values[tensor] = ready if tensor not in self.program.feeds else 0
            for turn in soft:
                turns[turn] |= self._done[node]

    def _value(self, tensor: Tensor) -> int:
        """The accesses that are over when a value is there; a parameter may stand for a value outside."""
        if tensor not in self._values and tensor.node in self.program.homes:
            owner, place = self.program.homes[tensor.node]
            return self._value(owner.inputs[place])
        return self._values[tensor]

    def _after(self, nodes: Iterable[Node]) -> int:
        found = 0
        for node in nodes:
            found |= self._done[node] if node in self._done else self._value(node.outputs[0])
        return found

    def _cond(self, node: CondNode, start: int, depth: int) -> None:
        start |= self._value(node.predicate)
        for branch in node.subgraphs:
            self._level(branch, start, depth)
        inside = [self._inside[branch] for branch in node.subgraphs]
        for tensor in filter(self.program.is_used, node.outputs):
            left, right = (self._value(branch.results[tensor.index]) for branch in node.subgraphs)
            # A firing inside a branch proves that this branch was taken, so the value then depends on its result.
            self._values[tensor] = start | (left & right) | (left & inside[0]) | (right & inside[1])
        self._done[node] = start | sum(inside)

    def _while(self, node: WhileNode, start: int, depth: int) -> None:
        inside = self._inside[node.predicate] | self._inside[node.body]
        slot = len(self.nodes) * (depth + 1)
        outer, earlier = (1 << slot) - 1, inside << slot
        kept = sorted(self.program.kept[node])
        begin = {place: self._value(node.inputs[place]) for place in kept}
        carried, turn = {place: value | earlier for place, value in begin.items()}, start | earlier
        decision = turn
        for count in range(_MOST_PASSES + 2):
            for place in kept:
                for body in node.subgraphs:
                    self._values[body.inputs[place]] = carried[place]
            self._level(node.predicate, turn, depth + 1)
            decision = self._value(node.decision) | turn
            self._level(node.body, turn | decision, depth + 1)

            def from_last(result: int) -> int:
                """The accesses that are over when an iteration takes this from the one before."""
                if node.parallel_iterations == 1:
                    return result & outer | earlier
                return result & outer | (result & (result & inside) << slot)

            following = {k: carried[k] & from_last(self._value(node.body.results[k]) | decision) for k in kept}
            next_turn = turn & from_last(decision)
            if following == carried and next_turn == turn:
                break
            carried, turn = (following, next_turn) if count < _MOST_PASSES else (dict.fromkeys(kept, 0), start)
        for place in kept:
            self._values[node.outputs[place]] = self._leaving(node, carried[place] | decision, inside, slot)
        self._done[node] = self._leaving(node, decision, inside, slot) | inside

    def _leaving(self, node: StructuredNode, last: int, inside: int, slot: int) -> int:
        """The accesses that are over when a value leaves a loop; the last iteration has a predicate and no body."""
        predicate, body = (self._inside[each] for each in node.subgraphs)
        before = last >> slot & inside
        return last & ((1 << slot) - 1) & ~inside | before & (body | last & predicate)
