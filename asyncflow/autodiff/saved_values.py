"""Stores of values that a loop saves for its gradient (EuroSys '18 §5; docs/design/gradients.md).

One ordered store per value and loop: the forward loop saves its value in each iteration, and the gradient loop reads
them from the last to the first. A store is a value like any other, a VARIANT that the loop carries: saving gives a new
one, in the memory of the old. So an inner loop has a store of its own in each iteration of the outer one, which saves
that in turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.autodiff.store_gradients import STORE, element_gradient, element_gradients
from asyncflow.graph.build import apply
from asyncflow.graph.graph import STRUCTURED
from asyncflow.graph.op import Op, derivative, not_differentiable, register
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel
    from asyncflow.graph.spec import Spec


class Items(list[Any]):
    """The values that versions of a store share."""

    __slots__ = ("__weakref__",)
    entry_nbytes = 8

    def since(self, count: int) -> list[Any]:
        """The values behind the first `count`."""
        return self[count:]

    def buffers(self) -> tuple[()]:
        """None: values are kept as they come."""
        return ()


class SavedValues:
    """The first `length` items of a list that several versions of a store share.

    Only the newest version can be saved to in place; an older one is copied first, so that all keep their meaning. A
    loop saves to each version once, so that two threads never save to the same list.

    Attributes:
        nbytes: of the values, for the profiler; counted as they come, since it is asked for in each iteration.
    """

    __slots__ = ("items", "length", "nbytes")

    def __init__(self, items: Items, length: int, nbytes: int) -> None:
        self.items = items
        self.length = length
        self.nbytes = nbytes

    @property
    def held(self) -> Items:
        """The store, for the account of a device that has a limit."""
        return self.items

    def saved(self, index: Any, value: Any) -> SavedValues:
        """The store with one value more, number `index`."""
        if index != self.length:
            raise IndexError(f"value number {index} is saved into a store of {self.length}")
        items = self.items
        if self.length < len(items):
            items = Items(items[: self.length])
        items.append(value)
        return SavedValues(items, self.length + 1, self.nbytes + getattr(value, "nbytes", 0))

    def read(self, index: Any) -> Any:
        """The value saved as number `index`."""
        return self.items[index]


# -- ops -------------------------------------------------------------------------------------------------------------


def _new_kernel(xp: ModuleType) -> Kernel:
    return lambda: SavedValues(Items(), 0, 0)


def _save_kernel(xp: ModuleType) -> Kernel:
    return SavedValues.saved


def _read_kernel(xp: ModuleType, *, value: Spec) -> Kernel:
    return SavedValues.read


# Each new store is one of its own, never shared with an equal one.
NEW_STORE = register(Op(name="saved_values", infer=lambda: STORE, kernel=_new_kernel, is_random=True, flops=free))
SAVE = register(
    Op(
        name="save_value",
        infer=lambda store, index, value: STORE,
        kernel=_save_kernel,
        flops=free,
        host_inputs=(1,),
    )
)
READ_SAVED = register(
    Op(
        name="saved_value",
        infer=lambda store, index, *, value: value,
        kernel=_read_kernel,
        flops=free,
        host_inputs=(1,),
    )
)


def new_store() -> Tensor:
    """A store with nothing in it."""
    return apply(NEW_STORE)[0]


def store_node(tensor: Tensor) -> Node | None:
    """The node that makes the store from which `tensor`, a store that branches and loops give, has come; None if none.

    All that touches a store is placed with it.
    """
    while tensor.node.op.name in STRUCTURED:
        node = tensor.node
        tensor = node.inputs[tensor.index] if node.op.name == "while" else node.subgraphs[0].results[tensor.index]
    return tensor.node if tensor.node.op is NEW_STORE else None


def save(store: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """The store with `value` behind the others, as number `index`."""
    return apply(SAVE, store, index, value)[0]


def saved_value(store: Tensor, index: Tensor, value: Spec) -> Tensor:
    """The value saved as number `index`."""
    return apply(READ_SAVED, store, index, value=value)[0]


# -- their derivatives -----------------------------------------------------------------------------------------------


@derivative(SAVE)
def _save(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, index, value = node.inputs
    return grads, None, element_gradient(grads, index, value) if carries_gradient(value.spec) else None


@derivative(READ_SAVED)
def _read_saved(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return element_gradients(node.inputs[1], grad), None


not_differentiable(NEW_STORE, because="it has no inputs")
