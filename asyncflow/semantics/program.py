"""The nodes that a run needs, and the waits between them (MAPL '17 §2.2 and §3.1).

A run is made of the fetches and all that they depend on. In a graph with ordered effects, a branch or loop that runs
also runs all its effects. Nodes that touch one resource are ordered as they were written, by *soft* edges, which bring
in no node. All this is computed here anew, and not taken from the compiler, which tests compare with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache
from itertools import chain
from typing import TypeAlias

from asyncflow.errors import FetchError, GraphError
from asyncflow.graph.builtin import PARAMETER, PLACEHOLDER
from asyncflow.graph.graph import Graph, has_side_effect
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode, levels
from asyncflow.graph.values import nest
from asyncflow.semantics.arguments import targets_in
from asyncflow.state.mutex import LOCK
from asyncflow.values import Nest

Touches: TypeAlias = dict[Hashable, Access]
"""Accesses by resource key; a write outranks a read."""


class NeededGraph:
    """The part of a graph that a run needs.

    Args:
        graph: a root graph; not changed.
        fetches: any nest of tensors, nodes to run, variables to read, and names of the first two; None for every effect
            of the graph.
        feeds: tensors of the root graph, or their names, that get their values from the run.

    Attributes:
        graph: the graph.
        values: the fetched tensors; a variable's is a read of its own.
        feeds: the fed tensors.
        homes: the branch or loop that each parameter of a body belongs to, and its place among the inputs there.
        loops: the loop that each predicate and body belongs to.
        kept: of each loop the places of the variables that it needs.
    """

    def __init__(self, graph: Graph, fetches: Nest, feeds: Iterable[object] = ()) -> None:
        self.graph = graph
        self.feeds = frozenset(targets_in(graph, feeds))
        self.homes: dict[Node, tuple[StructuredNode, int]] = {}
        self.loops: dict[Graph, WhileNode] = {}
        for level in levels(graph):
            for node in level.nodes:
                self._check(node)
                if isinstance(node, StructuredNode):
                    self.loops |= dict.fromkeys(node.subgraphs, node) if isinstance(node, WhileNode) else {}
                    for body in node.subgraphs:
                        for place, inner in enumerate(body.inputs, start=node.body_offset):
                            self.homes[inner.node] = node, place
        self.kept: dict[StructuredNode, set[int]] = {}
        self._needed: set[Node] = set()
        self._tensors: set[Tensor] = set()
        self._pending: list[Tensor | Node] = []
        self._reads: list[Node] = []
        asked = filter(has_side_effect, graph.nodes) if fetches is None else nest.flatten(fetches)[0]
        roots = [self._root(fetch) for fetch in asked]
        self.values = tuple(root for root in roots if isinstance(root, Tensor))
        self._find_needed(roots)
        self.touches = cache(self._touches)
        self.shares = cache(self._shares)
        self.nodes = cache(self._nodes)
        self.before = cache(self._before)

    @staticmethod
    def _check(node: Node) -> None:
        is_known = node.op.kernel is not None or node.op in (PLACEHOLDER, PARAMETER) or node.subgraphs
        if not is_known:
            raise GraphError(
                f"{node.name} ({node.op.name}) is a primitive of control flow written by hand, of which the rules "
                f"say nothing; write cond or while_loop instead\n  built at {node.location}"
            )

    def _root(self, fetch: Nest) -> Tensor | Node:
        if isinstance(fetch, str):
            return self.graph.named(fetch)
        if isinstance(fetch, Tensor | Node) and fetch.graph.root is self.graph:
            return fetch
        if not isinstance(fetch, Resource) or not hasattr(fetch, "__asyncflow_tensor__"):
            raise FetchError(f"a fetch is a tensor, node or variable of the graph, or a name; got {fetch!r}")
        with Graph():  # do not add nodes to the user's graph
            read: Tensor = fetch.__asyncflow_tensor__()
        self._reads.append(read.node)
        return read

    # -- needed nodes --------------------------------------------------------------------------------------------

    def _find_needed(self, roots: Iterable[Tensor | Node]) -> None:
        self._pending += roots
        while self._pending:
            while self._pending:
                asked = self._pending.pop()
                if isinstance(asked, Tensor):
                    self._need_tensor(asked)
                else:
                    self._need_node(asked)
            # A loop needs a variable to iterate on, even if only its effects are wanted.
            for loop in self._needed:
                if isinstance(loop, WhileNode) and self._tensors.isdisjoint(loop.outputs):
                    self._keep(loop, 0)

    def _need_tensor(self, tensor: Tensor) -> None:
        if tensor in self._tensors or tensor in self.feeds:
            return
        self._tensors.add(tensor)
        self._pending.append(tensor.node)
        if isinstance(tensor.node, CondNode):
            self._pending += [body.results[tensor.index] for body in tensor.node.subgraphs]
        elif isinstance(tensor.node, WhileNode):
            self._keep(tensor.node, tensor.index)

    def _keep(self, loop: StructuredNode, place: int) -> None:
        kept = self.kept.setdefault(loop, set())
        if place not in kept:
            kept.add(place)
            self._pending += [loop.inputs[place], loop.subgraphs[1].results[place]]

    def _need_node(self, node: Node) -> None:
        if node in self._needed or (node.op is PLACEHOLDER and node.outputs[0] in self.feeds):
            return
        self._needed.add(node)
        self._pending += node.control_inputs
        if node.op is LOCK and "until" in node.attrs:  # a lock needs its unlock
            self._pending.append(self.graph.node(node.attrs["until"]))
        if node.op is PARAMETER:
            owner, place = self.homes[node]
            if isinstance(owner, WhileNode) and place < owner.n_vars:
                self._keep(owner, place)
            else:
                self._pending.append(owner.inputs[place])
        elif isinstance(node, StructuredNode):
            self._pending.append(node.decision)
            if self.graph.effects == "ordered":
                self._pending += [inner for body in node.subgraphs for inner in body.nodes if has_side_effect(inner)]
        else:
            self._pending += node.inputs

    # -- queries of nodes ----------------------------------------------------------------------------------------

    def _nodes(self, graph: Graph) -> list[Node]:
        """Return the needed nodes of a graph or body, in the order in which they were written."""
        found = [node for node in graph.nodes if node in self._needed and node.op is not PARAMETER]
        return found + self._reads if graph is self.graph else found

    def _touches(self, node: Node) -> Touches:
        """The resources that a node touches, or a branch or loop with all that runs in it."""
        return self._united(node, self.touches, list(node.op.effects(node)) if node.op.effects is not None else [])

    def _shares(self, node: Node) -> Touches:
        """Return `touches` of whole resources: producers and consumers of a queue may wait for one another."""
        wholes = [each.effect_key for each in resources_of(node)]
        effects = [] if node.subgraphs else self.touches(node).items()
        pairs = [(key[0] if isinstance(key, tuple) and key[0] in wholes else key, access) for key, access in effects]
        return self._united(node, self.shares, pairs)

    def _united(self, node: Node, of: Callable[[Node], Touches], own: list[tuple[Hashable, Access]]) -> Touches:
        inside = [of(inner).items() for body in node.subgraphs for inner in self.nodes(body)]
        return dict(sorted(chain(own, *inside), key=lambda pair: pair[1] is Access.WRITE))

    def _before(self, node: Node) -> list[tuple[Node, int]]:
        """Return the nodes of the same graph or body that the node waits for without using their values.

        These are the ends of control and soft edges. The number with each is 1 if the previous iteration's firing is
        meant: accesses to the resources that the loop writes, and the node too.
        """
        found = [(each, 0) for each in node.control_inputs]
        if self.graph.effects == "ordered" and (mine := self.touches(node)):
            here = self.nodes(self.graph if node in self._reads else node.graph)
            found += [(each, 0) for each in here[: here.index(node)] if conflict(self.touches(each), mine)]
            if (loop := self.loops.get(node.graph)) is not None:
                turns = {key: access for key, access in self.touches(loop).items() if key in mine}
                found += [(each, 1) for each in self.nodes(loop.body) if conflict(self.touches(each), turns)]
        return found

    def is_used(self, tensor: Tensor) -> bool:
        """Return True if the run needs the value of a tensor."""
        return tensor in self._tensors


def conflict(a: Touches, b: Touches) -> bool:
    """Return True if both touch a resource, and one of them writes it: their order may show."""
    return any(Access.WRITE in (access, b[key]) for key, access in a.items() if key in b)
