"""Pass: orders nodes so that values are freed early, where that lowers the most bytes held at a time.

White paper, section 4.1: as soon as possible is too soon for a value that waits for its user. A program that makes
eight branches and then adds them up holds eight values; one branch behind the other, it holds two.

Two orders of each straight line, the program or a body, are tried. In the first, the node that frees the most, less
its own results, is next. In the second, each value is made just before its first use. An order is taken where it holds
less, by more than a few per cent. Nodes keep their edges, and with them the order of effects. Programs of several
devices stay as they are, since other devices wait for some of the values.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncflow.compiler.memory.live_bytes import Sizes, memory_of_values
from asyncflow.compiler.program.extract import FEED, FETCH
from asyncflow.compiler.program.kernels.work import ASSUMED_EXTENT
from asyncflow.compiler.program.loops.frames import has_primitives
from asyncflow.compiler.program.ordered import ordered
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.state.variables.variable import ASSIGN, ASSIGN_ADD, ASSIGN_SUB, UPDATE, USER_UPDATE, VARIABLE_READ

_ELSEWHERE = (CONSTANT, FEED, VARIABLE_READ, ASSIGN, ASSIGN_ADD, ASSIGN_SUB, UPDATE, USER_UPDATE)
"""Ops whose values are held by the plan, the caller or a variable, however long the program needs them."""
_SMALL = 1 << 20
"""Bytes of a program or body whose order hardly matters: all of its values together take no more."""
_GAIN = 0.05
"""The least share of the bytes that another order has to save; figures of an order that stays were measured before."""


def free_early(graph: Graph) -> list[str]:
    """Order the nodes of a program and of its bodies, in place; control flow written by hand stays in its order.

    Returns:
        A line for people, unless all values are small: the most bytes held at a time, before and after.
    """
    if _is_small(graph):
        return []
    written, planned = _put_in_order(graph, Sizes(()))
    if written <= _SMALL:
        return []
    line = f"a run holds at most {planned:,.0f} bytes of values at a time, besides saved values"
    return [line if planned == written else f"{line}; in the order as written, {written:,.0f}"]


def _is_small(graph: Graph) -> bool:
    """Return True if no order of a program holds much. Most plans are of small programs: this calls no functions."""
    total = 0
    for node in graph.nodes:
        if node.subgraphs:
            return False
        for x in node.outputs:
            nbytes = x.spec.dtype.itemsize
            for extent in x.spec.shape or ():
                nbytes *= ASSUMED_EXTENT if extent is None else extent
            total += nbytes
    return total <= _SMALL


def _put_in_order(graph: Graph, sizes: Sizes) -> tuple[float, float]:
    """Return the most bytes held at a time in the order as written, and in the order that the nodes are now in."""
    inside = {}
    for node in graph.nodes:
        if node.subgraphs:
            held = [_put_in_order(body, sizes) for body in node.subgraphs]
            inside[node] = (max(before for before, _ in held), max(after for _, after in held))
    memory = _HeldMemory(graph.nodes, graph.results if isinstance(graph, Subgraph) else (), sizes)
    total = sum(memory.nbytes)
    if not inside and total <= _SMALL:
        return total, total
    before = memory.most(graph.nodes, {node: held[0] for node, held in inside.items()})
    within = {node: held[1] for node, held in inside.items()}
    kept = after = memory.most(graph.nodes, within)
    if total > _SMALL and not has_primitives(graph.nodes):
        for order in (memory.greedy(), memory.late()):
            held_in_order = memory.most(order, within)
            if held_in_order < after and held_in_order <= (1 - _GAIN) * kept:
                after, graph.nodes[:] = held_in_order, order
    return before, after


@dataclass(slots=True, eq=False)
class _HeldMemory:
    """The memory that the nodes of a program or body make and use; the memory of a value is known by its number.

    Attributes:
        nodes: as written.
        results: values that are still there at the end.
        sizes: of values.
        nbytes: of each memory.
        made: memories that each node makes.
        used: memories that each node uses, with its own, which may have no other user.
        users: number of nodes that use each memory; one more where it stays to the end.
    """

    nodes: Collection[Node]
    results: Iterable[Tensor]
    sizes: Sizes
    nbytes: list[float] = field(default_factory=list)
    made: dict[Node, Sequence[int]] = field(default_factory=dict)
    used: dict[Node, Sequence[int]] = field(default_factory=dict)
    users: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = tuple(self.nodes)
        memories = memory_of_values(self.nodes, self.sizes.arrays)
        numbers: dict[Tensor, int] = {}
        for node in self.nodes:
            known = dict.fromkeys([numbers[y] for x in node.inputs for y in memories.get(x, ()) if y in numbers])
            new = () if node.op in _ELSEWHERE else [x for x in node.outputs if x in memories.get(x, ())]
            self.made[node] = range(len(numbers), len(numbers) + len(new))
            self.used[node] = (*known, *self.made[node])
            self.nbytes += [self.sizes.of(x) for x in new]
            self.users += [0] * len(new)
            numbers.update(zip(new, self.made[node], strict=True))
            for memory in self.used[node]:
                self.users[memory] += 1
        staying = [*self.results, *(x for node in self.nodes if node.op is FETCH for x in node.inputs)]
        for memory in {numbers[y] for x in staying for y in memories.get(x, ()) if y in numbers}:
            self.users[memory] += 1

    def most(self, order: Iterable[Node], inside: Mapping[Node, float]) -> float:
        """Return the most bytes held at a time in an order, with the bytes that bodies hold inside their nodes."""
        left, live, most = list(self.users), 0.0, 0.0
        for node in order:
            for memory in self.made[node]:
                live += self.nbytes[memory]
            held = live + inside.get(node, 0.0)
            if node.op.rows == "elementwise" and len(self.made[node]) == 1:
                result = self.made[node][0]
                ends = [each for each in self.used[node] if left[each] == 1 and each != result]
                if self.nbytes[result] in [self.nbytes[each] for each in ends]:
                    held -= self.nbytes[result]  # the result is written over an input
            most = max(most, held)
            for memory in self.used[node]:
                left[memory] -= 1
                if not left[memory]:
                    live -= self.nbytes[memory]
        return most

    def late(self) -> list[Node]:
        """Return an order in which each value is made just before its first user, behind the longest way to that."""
        heights: dict[Node, int] = {}
        used: set[Node] = set()
        for node in self.nodes:
            heights[node] = 1 + max([heights.get(each, 0) for each in node.sources], default=0)
            used.update(node.sources)
        ends_first = sorted(self.nodes, key=used.__contains__)
        # `ordered` goes to the last of them first.
        return ordered(ends_first, lambda node: sorted(node.sources, key=lambda each: heights.get(each, 0)))

    def greedy(self) -> list[Node]:
        """Return an order in which the node that frees the most, less its own results, is next.

        Of nodes that free equally much, the node goes first whose sources were complete last: a branch goes on before
        another one begins.
        """
        missing = {node: {each for each in node.sources if each in self.made} for node in self.nodes}
        behind: dict[Node, list[Node]] = {}
        waiting: list[set[Node]] = [set() for _ in self.nbytes]
        for node, sources in missing.items():
            for source in sources:
                behind.setdefault(source, []).append(node)
            for memory in self.used[node]:
                waiting[memory].add(node)
        left = list(self.users)
        ready: list[tuple[float, int, int, Node]] = []
        done: dict[Node, None] = {}

        def offer(node: Node) -> None:
            grows = sum([self.nbytes[each] for each in self.made[node]])
            grows -= sum([self.nbytes[each] for each in self.used[node] if left[each] == 1])
            heapq.heappush(ready, (grows, -len(done), len(ready), node))

        for node in self.nodes:
            if not missing[node]:
                offer(node)
        while ready:
            node = heapq.heappop(ready)[-1]
            if node in done:
                continue  # it was offered again when it had become the last user of a memory
            done[node] = None
            for memory in self.used[node]:
                left[memory] -= 1
                waiting[memory].discard(node)
                if left[memory] == 1 and waiting[memory]:
                    (last,) = waiting[memory]
                    if not missing[last]:
                        offer(last)
            for user in behind.get(node, ()):
                missing[user].discard(node)
                if not missing[user]:
                    offer(user)
        return list(done)
