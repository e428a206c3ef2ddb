"""The stores that loops save values in, and their paths to gradient loops.

A store is a loop variable; behind its loop, bodies capture it and read it. The outer loop saves the store of an inner
loop as a value of its own. The body of the outer gradient reads it before it can be captured further.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.autodiff.stores.saved_values import NEW_STORE, READ_SAVED, SAVE
from asyncflow.autodiff.stores.stores import STORE
from asyncflow.compiler.program.detached import detached_node
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode, WhileNode, levels
from asyncflow.graph.values.dtypes import VARIANT


@dataclass(frozen=True, slots=True)
class LoopStore:
    """A store that a loop saves a value in, in each iteration.

    Attributes:
        loop: which.
        save: the node that saves.
        output: the store behind the loop.
    """

    loop: WhileNode
    save: Node
    output: Tensor

    @property
    def value(self) -> Tensor:
        """The value that is saved."""
        return self.save.inputs[2]


@dataclass(frozen=True, slots=True)
class StoreReader:
    """A node that reads a store.

    Attributes:
        node: it.
        store: the store read.
        around: the reader of the outer loop's store that `store` was saved in; None if it has not been saved.
    """

    node: Node
    store: LoopStore
    around: StoreReader | None = None

    @property
    def depth(self) -> int:
        """From how many loops the store was taken out."""
        return 0 if self.around is None else self.around.depth + 1

    @property
    def index(self) -> Tensor:
        """The number of the iteration of the loop."""
        return self.node.inputs[1]


def stores_of(loop: WhileNode) -> list[LoopStore]:
    """The stores that a loop saves values in."""
    places = zip(loop.inputs, loop.body.inputs, loop.body.results, loop.outputs, strict=False)
    return [
        LoopStore(loop, result.node, output)
        for initial, x, result, output in places
        if result.node.op is SAVE and result.node.inputs[0] is x and initial.node.op is NEW_STORE
    ]


class StorePaths:
    """All ways of stores through a program, which may be changed.

    New nodes and all that is to be dropped are noted first: `settle` puts them into their graphs, and takes it out.

    Attributes:
        owners: the branch or loop of each body.
    """

    def __init__(self, graph: Graph) -> None:
        self.owners: dict[Graph, StructuredNode] = {}
        self._stores: dict[Node, LoopStore] = {}
        self._users: dict[Tensor, list[Node]] = {}
        self._given_back: set[Tensor] = set()
        self._seen: dict[tuple[Tensor, Graph], Tensor] = {}
        self._before: dict[Node, list[Node]] = {}
        self._behind: dict[Node, list[Node]] = {}
        self._dropped: dict[Node, None] = {}
        self._dropped_captures: dict[StructuredNode, set[Tensor]] = {}
        self._dropped_variables: dict[StructuredNode, set[int]] = {}
        for level in levels(graph):
            if isinstance(level, Subgraph):
                self._given_back.update(x for x in level.results if x.dtype == VARIANT)
            for node in level.nodes:
                for x in node.inputs:
                    self._note(x, node)
                if isinstance(node, StructuredNode):
                    self._enter(node)

    def _enter(self, node: StructuredNode) -> None:
        for body in node.subgraphs:
            self.owners[body] = node
            self._seen.update(((outer, body), inner) for inner, outer in node.captured(body).items())
        if isinstance(node, WhileNode):
            self._stores.update((store.save, store) for store in stores_of(node))

    # -- finding -----------------------------------------------------------------------------------------------------

    def readers(self, store: LoopStore) -> list[StoreReader] | None:
        """Return all users of a store if they only read it; else None."""
        found: list[StoreReader] = []
        return found if self._find(store.output, store, None, found) else None

    def _find(self, version: Tensor, store: LoopStore, around: StoreReader | None, found: list[StoreReader]) -> bool:
        if version in self._given_back:
            return False
        for user in dict.fromkeys(self._users.get(version, ())):
            if user.op is READ_SAVED and user.inputs[0] is version and not user.control_inputs:
                found.append(StoreReader(user, store, around))
            elif isinstance(user, StructuredNode):
                is_captured = all(each is not version for each in user.inputs[: user.first_capture])
                if not is_captured or not all(
                    self._find(self._seen[version, body], store, around, found) for body in user.subgraphs
                ):
                    return False
            elif user.op is not SAVE or not self._find_outside(user, version, store, around, found):
                return False
        return True

    def _find_outside(
        self, save: Node, version: Tensor, store: LoopStore, around: StoreReader | None, found: list[StoreReader]
    ) -> bool:
        if around is not None:
            return False  # a gradient that saves the values it reads, for its own gradient
        outer = self._stores.get(save)
        outside = None if outer is None or outer.value is not version else self.readers(outer)
        return outside is not None and all(self._find(each.node.outputs[0], store, each, found) for each in outside)

    # -- adding ------------------------------------------------------------------------------------------------------

    def captured(self, outer: Tensor, graph: Graph) -> Tensor:
        """A value of a graph around `graph`, as seen there."""
        if outer.node.graph is graph:
            return outer
        owner = self.owners[graph]
        assert isinstance(graph, Subgraph)
        there = self.captured(outer, owner.graph)
        if (there, graph) not in self._seen:
            owner.add_capture(there, graph)
            self._seen.update(((there, body), body.inputs[-1]) for body in owner.subgraphs)
            self._note(there, owner)
        return self._seen[there, graph]

    def add_store(self, like: LoopStore, value: Tensor, *, beside: Node) -> LoopStore:
        """Makes the loop of `like` save one more value; the store is placed where `beside` is."""
        loop = like.loop
        new = detached_node(loop.graph, NEW_STORE, (), {}, beside, STORE)
        self.insert(new, before=loop)
        inner, output = loop.add_variable(new.outputs[0])
        save = detached_node(loop.body, SAVE, [inner, like.save.inputs[1], value], {}, beside, STORE)
        loop.body.nodes.append(save)
        loop.body.results.append(save.outputs[0])
        self._given_back.add(save.outputs[0])
        self._note(value, save)
        self._stores[save] = LoopStore(loop, save, output)
        return self._stores[save]

    def read(self, store: LoopStore, reader: StoreReader) -> Tensor:
        """Reads `store` for the iteration for which `reader` reads another store of the same loop.

        The node stands behind `reader`.
        """
        version = store.output
        if reader.around is not None:
            outer = reader.around.store
            saved = (each for each in stores_of(outer.loop) if each.value is version)
            # Nodes that pass a store on must be on its device, too.
            holder = next(saved, None) or self.add_store(outer, version, beside=store.save)
            version = self.read(holder, reader.around)
        graph = reader.node.graph
        inputs = [self.captured(version, graph), reader.index]
        spec = store.value.spec
        node = detached_node(graph, READ_SAVED, inputs, {"value": spec}, store.save, spec)
        node.location = reader.node.location
        self.insert(node, behind=reader.node)
        self._note(inputs[0], node)
        return node.outputs[0]

    def insert(self, node: Node, *, before: Node | None = None, behind: Node | None = None) -> None:
        """Note the future place of a new node: behind nodes that were noted for that place before."""
        if before is not None:
            self._before.setdefault(before, []).append(node)
        if behind is not None:
            self._behind.setdefault(behind, []).append(node)

    # -- dropping ----------------------------------------------------------------------------------------------------

    def drop(self, store: LoopStore) -> None:
        """Takes away a store, all that reads it, and all ways to there."""
        self._drop_uses(store.output)
        self._dropped_variables.setdefault(store.loop, set()).add(store.output.index)
        self._dropped[store.save] = None
        self._dropped[store.loop.inputs[store.output.index].node] = None
        if store.value in self._users:
            self._users[store.value].remove(store.save)

    def _drop_uses(self, version: Tensor) -> None:
        for user in dict.fromkeys(self._users.pop(version, ())):
            if user.op is READ_SAVED:
                self._dropped[user] = None
                self._drop_uses(user.outputs[0])
            elif isinstance(user, StructuredNode):
                for body in user.subgraphs:
                    self._drop_uses(self._seen[version, body])
                self._dropped_captures.setdefault(user, set()).add(version)
            else:
                self.drop(self._stores[user])

    def drop_reader(self, reader: StoreReader) -> None:
        """Remove a node that reads a store, and whose value is not used."""
        self._dropped[reader.node] = None
        self._users[reader.node.inputs[0]].remove(reader.node)

    def settle(self) -> None:
        """Carry out the noted changes."""
        for node in {**self._dropped_captures, **self._dropped_variables}:
            gone, first = self._dropped_captures.get(node, ()), node.first_capture
            places = {place for place in range(first, len(node.inputs)) if node.inputs[place] in gone}
            variables = self._dropped_variables.get(node, set())
            node.drop_inputs(places | variables)
            if isinstance(node, WhileNode) and variables:
                node.keep_variables([place for place in range(node.n_vars) if place not in variables])
        anchors = [*self._before, *self._behind, *self._dropped]
        for graph in dict.fromkeys(node.graph for node in anchors):
            graph.nodes[:] = [
                each
                for node in graph.nodes
                for each in (*self._before.get(node, ()), node, *self._behind.get(node, ()))
                if each not in self._dropped
            ]
        for noted in (self._before, self._behind, self._dropped, self._dropped_captures, self._dropped_variables):
            noted.clear()

    def _note(self, tensor: Tensor, user: Node) -> None:
        if tensor.dtype == VARIANT:
            self._users.setdefault(tensor, []).append(user)
