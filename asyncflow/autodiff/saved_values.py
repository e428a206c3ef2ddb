"""Values that a loop saves for its gradient (EuroSys '18 §5; docs/design/gradients.md).

One ordered store (`stores`) per value and loop: the forward loop saves its value in each iteration, and the gradient
loop reads them from the last to the first. An inner loop has a store of its own in each iteration of the outer one,
which saves that in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.autodiff.store_gradients import gradient_of_read, gradient_of_write
from asyncflow.autodiff.stores import STORE, SavedValues, StoreLog, store_op
from asyncflow.graph.build import apply
from asyncflow.graph.op import READS_STORE, derivative, not_differentiable
from asyncflow.graph.structured import StructuredNode, WhileNode

if TYPE_CHECKING:
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.spec import Spec


NEW_STORE = store_op("saved_values", lambda: STORE, lambda: SavedValues(StoreLog(), 0, 0), is_random=True)
SAVE = store_op("save_value", lambda store, index, value: STORE, SavedValues.saved, host_inputs=(1,))
READ_SAVED = store_op(
    "saved_value", lambda store, index, *, value: value, SavedValues.read, host_inputs=(1,), traits=READS_STORE
)


def new_store() -> Tensor:
    """A store with nothing in it."""
    return apply(NEW_STORE)[0]


def store_node(tensor: Tensor) -> Node | None:
    """The node that makes the store from which `tensor`, a store that branches and loops give, has come; None if none.

    All that touches a store is placed with it.
    """
    while isinstance(tensor.node, StructuredNode):
        node = tensor.node
        sources = node.inputs if isinstance(node, WhileNode) else node.subgraphs[0].results
        tensor = sources[tensor.index]
    return tensor.node if tensor.node.op is NEW_STORE else None


def save(store: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """The store with `value` behind the others, as number `index`."""
    return apply(SAVE, store, index, value)[0]


def saved_value(store: Tensor, index: Tensor, value: Spec) -> Tensor:
    """The value saved as number `index`."""
    return apply(READ_SAVED, store, index, value=value)[0]


derivative(SAVE)(gradient_of_write)
derivative(READ_SAVED)(gradient_of_read)
not_differentiable(NEW_STORE, because="it has no inputs")
