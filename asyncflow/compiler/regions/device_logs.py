"""Values that a loop of a card saves for its gradient, in logs on the card (`asyncflow.devices.cuda.graphs.logs`).

In a loop that the host drives, stores of saved values are lists of the host's. In a loop that a card runs by itself,
they are logs. The numbers of their entries are the card's, so they are computed in the loop:

- The loop itself saves an entry in each iteration, by its own number.
- A loop inside goes on in one log, in all iterations of the loop around it. So it has a *cursor*, a variable of it and
  of all loops around it. What the loop around it saves in place of a store is the cursor before the inner loop.
- A gradient loop reads an inner store's entries from that number on.
- A branch with a loop inside passes the cursor on, from either side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from asyncflow.autodiff.stores.saved_values import MOVING_STORE, NEW_STORE, READ_SAVED, SAVE
from asyncflow.autodiff.stores.stores import STORE
from asyncflow.compiler.program.detached import detached_node
from asyncflow.devices.decisions import LogSpec
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, Op
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD
from asyncflow.ops.cost import free

_NUMBER = Spec(int64, ())

Path: TypeAlias = "list[tuple[StructuredNode, Subgraph]]"
"""Loops and branches inside one another, each with the body that the next is in."""

SAVE_ENTRY = Op(
    "save_entry", lambda log, number, value: STORE, lambda xp: lambda log, *entry: log.save(*entry), traits=KERNELS
)
READ_ENTRY = Op(
    "read_entry",
    lambda log, number, *, value: value,
    lambda xp, *, value: lambda log, number: log.read(number),
    traits=KERNELS,
)
INNER_LOG = Op("inner_log", lambda log: STORE, lambda xp: lambda log: log.inner, flops=free, traits=KERNELS)
"""Op that gives the log of a loop inside, for the log that holds numbers of its entries."""


def saves_of(loop: WhileNode) -> dict[int, Node]:
    """Return the nodes that save values of a loop, by the places of the variables that are their stores."""
    return {
        place: result.node
        for place, (initial, (store, result)) in enumerate(zip(loop.inputs, loop.carried, strict=False))
        if is_new_store(initial.node) and result.node.op is SAVE and result.node.inputs[0] is store
    }


def is_new_store(node: Node) -> bool:
    """Return True if the node makes an empty store, and no plan has its values leave the card."""
    return node.op is NEW_STORE or (node.op is MOVING_STORE and node.attrs["moves"] == "short")


def origins(store: Tensor) -> list[Node]:
    """Return the nodes, beside or inside the branches and loops that give `store`, which make that store."""
    node = store.node
    if isinstance(node, WhileNode):
        return origins(node.inputs[store.index])
    if isinstance(node, CondNode):
        return [made for branch in node.subgraphs for made in origins(branch.results[store.index])]
    return [node]


def inner_stores(body: Subgraph) -> dict[Node, Node]:
    """Return the nodes that make stores which a body saves, also in its branches, with the node that saves each."""
    saves = (node for node in body.nodes if node.op is SAVE and node.inputs[2].dtype == VARIANT)
    return {made: save for save in saves for made in origins(save.inputs[2])}


def use_logs(loop: WhileNode) -> tuple[dict[int, LogSpec], list[Node]]:
    """Make a loop, which a card is to run, save into logs and read logs, in place.

    Returns:
        Specs of the logs by the places of their variables, and constants to stand in front of the loop.
    """
    return _Logs(loop).run()


class _Logs:
    """Rewrites a loop.

    Attributes:
        saves: for each loop, see `saves_of`.
        front: constants to stand in front of the loop.
        cursors: of loops inside that save values, as their bodies see them.
        bases: for a store, the number of its first entry.
        homes: for a node that makes a store, the log around it, as seen beside the node.
    """

    def __init__(self, loop: WhileNode) -> None:
        self.loop = loop
        self.saves = {each: saves_of(each) for each in (loop, *loop.body.walk()) if isinstance(each, WhileNode)}
        self.front: list[Node] = []
        self.cursors: dict[WhileNode, Tensor] = {}
        self.bases: dict[Tensor, Tensor] = {}
        self.homes: dict[Node, Tensor] = {}

    def run(self) -> tuple[dict[int, LogSpec], list[Node]]:
        specs = {place: self._spec(self.loop, place) for place in self.saves[self.loop]}
        for path in list(_paths([(self.loop, self.loop.body)])):
            self._add_cursor(path)
        self._rewrite(self.loop.body, self.loop)
        return specs, self.front

    def _spec(self, loop: WhileNode, place: int) -> LogSpec:
        value = self.saves[loop][place].inputs[2]
        if value.dtype == VARIANT:
            return LogSpec(int64, (), self._spec(*_filled_by(value)))
        shape = tuple(extent for extent in value.shape or () if extent is not None)  # all are known
        return LogSpec(value.dtype, shape)

    def _add_cursor(self, path: Path) -> None:
        """Give the last loop of a path the number of the next entry, which the loops and branches around it pass on."""
        (outermost, _), (loop, body) = path[0], path[-1]
        if not isinstance(loop, WhileNode) or not self.saves[loop]:
            return
        zero = detached_node(outermost.graph, CONSTANT, (), {"value": np.zeros((), np.int64)}, outermost, _NUMBER)
        self.front.append(zero)
        (cursor,) = zero.outputs
        passed: list[tuple[StructuredNode, Subgraph, Tensor, Tensor | None]] = []
        for node, part in path:
            before = cursor
            if isinstance(node, WhileNode):
                cursor, output = node.add_variable(before, "cursor")
                passed.append((node, part, before, output))
            else:
                cursor = node.add_capture(before, part)
                passed.append((node, part, before, None))
        self.cursors[loop] = cursor
        one = detached_node(body, CONSTANT, (), {"value": np.ones((), np.int64)}, loop, _NUMBER)
        body.nodes += [one, after := self._sum(body, cursor, one.outputs[0], loop)]
        (result,) = after.outputs
        made = {loop.inputs[place].node for place in self.saves[loop]}
        for node, part, before, left in reversed(passed):
            stores = (x for x in node.outputs if x.dtype == VARIANT and not made.isdisjoint(origins(x)))
            self.bases.update((store, before) for store in stores)
            if left is None:
                # The branch without the loop leaves the cursor unchanged; its capture is the latest one.
                for each in node.subgraphs:
                    each.results.append(result if each is part else each.inputs[-1])
                result = node.add_output(_NUMBER)
            else:
                part.results.append(result)
                result = left

    def _sum(self, body: Subgraph, a: Tensor, b: Tensor, like: Node) -> Node:
        return detached_node(body, ADD, (a, b), {}, like, _NUMBER)

    def _rewrite(self, body: Subgraph, owner: StructuredNode) -> None:
        """Rewrite the body of a loop or branch; `bases` knows its captures."""
        made: list[Node] = []
        self.homes.update((store, save.inputs[0]) for store, save in inner_stores(body).items())
        for node in body.nodes:
            if node in self.homes:
                _become(node, INNER_LOG, self.homes[node])
            elif node.op is SAVE:
                store, number, value = node.inputs
                assert isinstance(owner, WhileNode)
                _become(node, SAVE_ENTRY, store, self.cursors.get(owner, number), self.bases.get(value, value))
            elif node.op is READ_SAVED:
                made += self._read(body, node)
            elif isinstance(node, StructuredNode):
                self._enter(node)
            made.append(node)
        body.nodes[:] = made

    def _read(self, body: Subgraph, node: Node) -> Iterator[Node]:
        """Make a node read an entry; yield the nodes that it needs."""
        store, number = node.inputs
        (value,) = node.outputs
        if store in self.bases:
            yield (place := self._sum(body, self.bases[store], number, node))
            (number,) = place.outputs
        if value.dtype == VARIANT:
            yield (base := detached_node(body, READ_ENTRY, (store, number), {"value": _NUMBER}, node, _NUMBER))
            (self.bases[value],) = base.outputs
            _become(node, INNER_LOG, store)
        else:
            _become(node, READ_ENTRY, store, number, value=value.spec)

    def _enter(self, node: StructuredNode) -> None:
        """Rewrite the bodies of a branch or loop, which also capture the bases of the stores that they capture."""
        first = node.first_capture - node.body_offset
        for place, store in enumerate(node.captures, start=first):
            if store in self.bases:
                node.add_capture(self.bases[store], node.subgraphs[0])
                self.bases.update((part.inputs[place], part.inputs[-1]) for part in node.subgraphs)
        for part in node.subgraphs if isinstance(node, CondNode) else ():
            for made in self.homes.keys() & set(part.walk()):
                self.homes[made] = node.add_capture(self.homes[made], part)
        for part in node.subgraphs:
            self._rewrite(part, node)


def _become(node: Node, op: Op, *inputs: Tensor, **attrs: object) -> None:
    node.op, node.inputs, node.attrs = op, list(inputs), attrs


def _paths(path: Path) -> Iterator[Path]:
    """Yield the loops and branches inside the last body of a path, each with all around it."""
    for node in path[-1][1].nodes:
        if isinstance(node, WhileNode):
            yield (inner := [*path, (node, node.body)])
            yield from _paths(inner)
        elif isinstance(node, CondNode):
            for branch in node.subgraphs:
                yield from _paths([*path, (node, branch)])


def _filled_by(store: Tensor) -> tuple[WhileNode, int]:
    """Return the loop that fills a store, and the place of its variable."""
    node = store.node
    if isinstance(node, CondNode):
        # The other branch returns an empty store.
        (found,) = (x for branch in node.subgraphs if (x := branch.results[store.index]).node.subgraphs)
        return _filled_by(found)
    assert isinstance(node, WhileNode)
    return node, store.index
