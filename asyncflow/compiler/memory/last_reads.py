"""Pass: finds the saved values that are read once, so that a store drops them as they are read.

A gradient loop reads the stores of its forward loop from last to first, each number once. Its read may be the only use
of a store, in a loop that runs once for that store. Then its values are not needed after their read: `READ_SAVED` gets
the attribute ``is_last``. Else a store holds its values until its last version goes, at the end of that loop.

A store that an outer loop saves is read in each iteration of the outer gradient loop. The same holds for it, if the
outer read is the last, too.

So it does for gradients of a TensorArray's elements that one loop has found, and another reads where it has written the
elements: an array has each but once. The same holds for gradients of a RowStore's rows: once they are added up in one
array, the additions are not kept for other versions, as none is read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container

from asyncflow.autodiff.stores.checkpoints import CHECKPOINT
from asyncflow.autodiff.stores.row_gradients import ADD_ROWS, READ_ROWS
from asyncflow.autodiff.stores.saved_values import NEW_STORE, READ_SAVED, SAVE
from asyncflow.autodiff.stores.store_gradients import ACCUMULATE, ELEMENT_GRADIENT, NO_GRADIENT
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT


def mark_last_reads(graph: Graph) -> None:
    """Gives each read of saved values that is the last its attribute."""
    uses = _StoreUses(graph)
    for loop in graph.walk():
        if isinstance(loop, WhileNode):
            for place, output in enumerate(loop.outputs):
                if uses.is_filled_by(loop, place):
                    uses.mark(output, loop.body.results[place].node)
                elif uses.is_added_to_by(loop, place):
                    uses.mark_read(output)


class _StoreUses:
    """Users of each tensor of a graph, in the bodies of branches and loops too."""

    def __init__(self, graph: Graph) -> None:
        self._users: dict[Tensor, list[Node]] = defaultdict(list)
        self._result_of: dict[Tensor, list[tuple[StructuredNode, int]]] = defaultdict(list)
        self._count: Counter[Tensor] = Counter()
        for node in graph.walk():
            for tensor in node.inputs:
                self._users[tensor].append(node)
            self._count.update(node.inputs)
            if isinstance(node, StructuredNode):
                for body in node.subgraphs:
                    self._count.update(body.results)
                    for place, result in enumerate(body.results):
                        self._result_of[result].append((node, place))

    def is_filled_by(self, loop: WhileNode, place: int) -> bool:
        """Return True if an output is a store into which the loop does nothing but save."""
        return self._is_filled(loop, place, (SAVE, CHECKPOINT))

    def is_added_to_by(self, loop: WhileNode, place: int) -> bool:
        """Return True if an output is a store of gradients, empty before, to which the loop does nothing but add."""
        initial = loop.inputs[place]
        is_new = initial.node.op is NO_GRADIENT and self._count[initial] == 1
        return is_new and self._is_filled(loop, place, (ACCUMULATE, ADD_ROWS))

    def _is_filled(self, loop: WhileNode, place: int, ops: Container[Op]) -> bool:
        filling = loop.body.results[place].node
        store = loop.body.inputs[place]
        alone = self._count[store] == self._count[loop.body.results[place]] == 1
        return filling.op in ops and filling.inputs[0] is store and alone

    def mark(self, store: Tensor, save: Node) -> None:
        """Mark the only read of a store into which `save` saves, and the reads of stores that are its values."""
        read = self.mark_read(store)
        value = save.inputs[2]
        if read is not None and value.dtype == VARIANT and (inner := self._filled_alone(value)) is not None:
            self.mark(read.outputs[0], inner)

    def mark_read(self, store: Tensor) -> Node | None:
        """Marks the only read of a store, and gives it; None if there is no such."""
        read = self._only_read(store)
        if read is not None:
            read.attrs = {**read.attrs, "is_last": True}
        return read

    def _only_read(self, store: Tensor) -> Node | None:
        """The read that alone uses a store, in a loop that runs once for it; None if there is no such."""
        read: Node | None = None
        open_ = [(store, 0)]
        while open_:
            tensor, depth = open_.pop()
            for node, place in self._result_of[tensor]:
                if not isinstance(node, CondNode):
                    return None
                open_.append((node.outputs[place], depth))
            for user in self._users[tensor]:
                if isinstance(user, StructuredNode):
                    entering = [index for index, outer in enumerate(user.entering) if outer is tensor]
                    if isinstance(user, WhileNode) and min(entering) < user.n_vars:
                        return None
                    deeper = depth + isinstance(user, WhileNode)
                    open_ += [(body.inputs[index], deeper) for body in user.subgraphs for index in entering]
                elif _may_be_last(user) and user.inputs[0] is tensor and read is None and depth == 1:
                    read = user
                else:
                    return None
        return read

    def _filled_alone(self, store: Tensor) -> Node | None:
        """Return the node that saves into a store that is itself saved, and has no other use; None if that is not
        known.
        """
        if self._count[store] != 1:
            return None
        node = store.node
        if isinstance(node, WhileNode):
            return node.body.results[store.index].node if self.is_filled_by(node, store.index) else None
        if isinstance(node, CondNode):
            sources = [body.results[store.index] for body in node.subgraphs]
            filled = [self._filled_alone(source) for source in sources if source.node.op is not NEW_STORE]
            return filled[0] if filled and None not in filled else None
        return None


def _may_be_last(node: Node) -> bool:
    """Return True if it reads each value once, or a sum of which only one version is read then."""
    is_once = node.op is ELEMENT_GRADIENT and bool(node.attrs.get("is_once"))
    return node.op in (READ_SAVED, READ_ROWS) or is_once
