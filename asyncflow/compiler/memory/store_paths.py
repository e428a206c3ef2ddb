"""The stores that loops save values in, and the ways on which gradient loops come to them.

A store is a loop variable; behind its loop, bodies capture it and read it. The store of an inner loop is saved by the
loop around it as a value of its own, and read in the body of that loop's gradient before it can be captured further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncflow.autodiff.saved_values import NEW_STORE, READ_SAVED, SAVE
from asyncflow.autodiff.stores import STORE
from asyncflow.compiler.program.detached import detached_node
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.structured import StructuredNode, WhileNode, levels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncflow.graph.ir import Node, Tensor


@dataclass(frozen=True, slots=True)
class LoopStore:
    """A store of a loop, by the node that saves a value in it in each iteration."""

    loop: WhileNode
    save: Node

    @property
    def value(self) -> Tensor:
        """The value that is saved."""
        return self.save.inputs[2]

    @property
    def place(self) -> int:
        """Which loop variable it is."""
        (version,) = self.save.outputs
        return next(place for place, result in enumerate(self.loop.body.results) if result is version)

    @property
    def output(self) -> Tensor:
        """The store behind the loop."""
        return self.loop.outputs[self.place]


@dataclass(frozen=True, slots=True)
class StoreReader:
    """A node that reads a store.

    Attributes:
        node: it.
        store: what it reads.
        around: what reads the store of the loop around that `store` was saved in; None if it has not been saved.
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
    pairs = zip(loop.body.inputs, loop.body.results, strict=False)
    return [
        LoopStore(loop, result.node) for x, result in pairs if result.node.op is SAVE and result.node.inputs[0] is x
    ]


class StorePaths:
    """All ways of stores through a program, which may be changed.

    New nodes and those to drop are noted first: `settle` puts them into their graphs, and takes them out.
    """

    def __init__(self, graph: Graph) -> None:
        self.owners: dict[Graph, StructuredNode] = {}
        self._users: dict[Tensor, list[Node]] = {}
        self._given_back: set[Tensor] = set()
        self._before: dict[Node, list[Node]] = {}
        self._behind: dict[Node, list[Node]] = {}
        self._dropped: dict[Node, None] = {}
        for level in levels(graph):
            if isinstance(level, Subgraph):
                self._given_back.update(x for x in level.results if x.dtype == VARIANT)
            for node in level.nodes:
                for x in node.inputs:
                    if x.dtype == VARIANT:
                        self._users.setdefault(x, []).append(node)
                for body in node.subgraphs:
                    assert isinstance(node, StructuredNode)
                    self.owners[body] = node

    # -- finding -----------------------------------------------------------------------------------------------------

    def readers(self, store: LoopStore) -> list[StoreReader] | None:
        """All that use a store, if all they do is read it; else None."""
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
                    self._find(inner, store, around, found) for inner in _inside(user, version)
                ):
                    return False
            elif user.op is not SAVE or not self._find_outside(user, version, store, around, found):
                return False
        return True

    def _find_outside(
        self, save: Node, version: Tensor, store: LoopStore, around: StoreReader | None, found: list[StoreReader]
    ) -> bool:
        if around is not None:
            return False  # a gradient that saves what it has read, for a gradient of its own
        loop = self.owners.get(save.graph)
        if not isinstance(loop, WhileNode) or all(result is not save.outputs[0] for result in loop.body.results):
            return False
        outside = self.readers(LoopStore(loop, save)) if save.inputs[2] is version else None
        return outside is not None and all(self._find(each.node.outputs[0], store, each, found) for each in outside)

    # -- adding ------------------------------------------------------------------------------------------------------

    def captured(self, outer: Tensor, graph: Graph) -> Tensor:
        """A value of a graph around `graph`, as seen there."""
        if outer.node.graph is graph:
            return outer
        owner = self.owners[graph]
        assert isinstance(graph, Subgraph)
        there = self.captured(outer, owner.graph)
        inner = next((inner for inner, each in owner.captured(graph).items() if each is there), None)
        if inner is None:
            inner = owner.add_capture(there, graph)
            self._note(there, owner)
        return inner

    def add_store(self, loop: WhileNode, value: Tensor, like: LoopStore) -> LoopStore:
        """Makes a loop save one more value; `like` is one of its stores, beside which it is placed."""
        old = loop.inputs[like.place].node
        new = detached_node(loop.graph, NEW_STORE, (), {}, old, STORE)
        self.insert(new, before=loop)
        inner, _ = loop.add_variable(new.outputs[0])
        save = detached_node(loop.body, SAVE, [inner, like.save.inputs[1], value], {}, like.save, STORE)
        loop.body.nodes.append(save)
        loop.body.results.append(save.outputs[0])
        self._given_back.add(save.outputs[0])
        if value.dtype == VARIANT:
            self._note(value, save)
        return LoopStore(loop, save)

    def read(self, store: LoopStore, reader: StoreReader) -> Tensor:
        """Reads `store` for the iteration for which `reader` reads another store of the same loop.

        The node stands behind `reader`.
        """
        version = store.output
        if reader.around is not None:
            outer = reader.around.store
            saved = (each for each in stores_of(outer.loop) if each.value is version)
            holder = next(saved, None) or self.add_store(outer.loop, version, outer)
            version = self.read(holder, reader.around)
        graph = reader.node.graph
        inputs = [self.captured(version, graph), reader.index]
        node = detached_node(graph, READ_SAVED, inputs, {"value": store.value.spec}, reader.node, store.value.spec)
        self.insert(node, behind=reader.node)
        self._note(inputs[0], node)
        return node.outputs[0]

    def insert(self, node: Node, *, before: Node | None = None, behind: Node | None = None) -> None:
        """Notes where a new node is to stand: behind those that were noted for that place before."""
        if before is not None:
            self._before.setdefault(before, []).append(node)
        if behind is not None:
            self._behind.setdefault(behind, []).append(node)

    # -- dropping ----------------------------------------------------------------------------------------------------

    def drop(self, store: LoopStore) -> None:
        """Takes away a store, all that reads it, and all ways to there."""
        self._drop_uses(store.output)
        loop, place = store.loop, store.place
        initial = loop.inputs[place].node
        loop.drop_inputs({place})
        loop.keep_variables([each for each in range(loop.n_vars) if each != place])
        self._dropped[store.save] = None
        if store.value in self._users:
            self._users[store.value].remove(store.save)
        if initial.op is NEW_STORE:
            self._dropped[initial] = None

    def _drop_uses(self, version: Tensor) -> None:
        for user in dict.fromkeys(self._users.pop(version, ())):
            if user.op is READ_SAVED:
                self._dropped[user] = None
                self._drop_uses(user.outputs[0])
            elif isinstance(user, StructuredNode):
                for inner in _inside(user, version):
                    self._drop_uses(inner)
                user.drop_inputs({place for place, outer in enumerate(user.inputs) if outer is version})
            else:
                loop = self.owners[user.graph]
                assert isinstance(loop, WhileNode)
                self.drop(LoopStore(loop, user))

    def drop_reader(self, reader: StoreReader) -> None:
        """Takes away a node that reads a store, and whose value nobody uses."""
        self._dropped[reader.node] = None
        self._users[reader.node.inputs[0]].remove(reader.node)

    def settle(self) -> None:
        """Carries out what has been noted."""
        anchors = [*self._before, *self._behind, *self._dropped]
        for graph in dict.fromkeys(node.graph for node in anchors):
            graph.nodes[:] = [
                each
                for node in graph.nodes
                for each in (*self._before.get(node, ()), node, *self._behind.get(node, ()))
                if each not in self._dropped
            ]
        self._before, self._behind, self._dropped = {}, {}, {}

    def _note(self, tensor: Tensor, user: Node) -> None:
        if tensor.dtype == VARIANT:
            self._users.setdefault(tensor, []).append(user)


def _inside(node: StructuredNode, outer: Tensor) -> Iterator[Tensor]:
    """A captured value as the bodies see it."""
    for body in node.subgraphs:
        for inner, each in node.captured(body).items():
            if each is outer:
                yield inner
