"""Stores of values that a loop saves for its gradient, and of the gradients of such stores (DESIGN §8).

One ordered store per value and loop: the forward loop saves its value in each iteration, and the gradient loop reads
them from the last to the first. A store is a value like any other, a VARIANT that the loop carries: saving gives a new
one, in the memory of the old. So an inner loop has a store of its own in each iteration of the outer one, which saves
that in turn.

The gradient of a store, or of a TensorArray, is a store of gradients, where several for one place add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.graph.build import apply
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.op import Op, register
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import free

if TYPE_CHECKING:
    from types import ModuleType

    from asyncflow.graph.ir import Tensor
    from asyncflow.graph.op import Kernel

STORE = Spec(VARIANT, ())


class SavedValues:
    """The first `length` items of a list that several versions of a store share.

    Only the newest version can be saved to in place; an older one is copied first, so that all keep their meaning.
    """

    __slots__ = ("items", "length")

    def __init__(self, items: list[Any], length: int) -> None:
        self.items = items
        self.length = length

    def saved(self, value: Any) -> SavedValues:
        """The store with one value more."""
        items = self.items
        if self.length < len(items):
            items = items[: self.length]
        items.append(value)
        return SavedValues(items, self.length + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(getattr(item, "nbytes", 0) for item in self.items[: self.length])


def _new_kernel(xp: ModuleType) -> Kernel:
    return lambda: SavedValues([], 0)


def _save_kernel(xp: ModuleType) -> Kernel:
    return lambda store, value: store.saved(value)


def _read_kernel(xp: ModuleType, *, value: Spec) -> Kernel:
    return lambda store, index: store.items[index]


# Each is a store of its own, never shared with an equal one.
NEW_STORE = register(Op(name="saved_values", infer=lambda: STORE, kernel=_new_kernel, is_random=True, flops=free))
SAVE = register(Op(name="save_value", infer=lambda store, value: STORE, kernel=_save_kernel, flops=free))
READ_SAVED = register(
    Op(name="saved_value", infer=lambda store, index, *, value: value, kernel=_read_kernel, flops=free)
)


def new_store() -> Tensor:
    """A store with nothing in it."""
    return apply(NEW_STORE)[0]


def save(store: Tensor, value: Tensor) -> Tensor:
    """The store with `value` behind the others."""
    return apply(SAVE, store, value)[0]


def saved_value(store: Tensor, index: Tensor, value: Spec) -> Tensor:
    """The value saved as number `index`."""
    return apply(READ_SAVED, store, index, value=value)[0]
