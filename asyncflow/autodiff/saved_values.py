"""Stores of values that a loop saves for its gradient, and of the gradients of such stores (DESIGN §8).

One ordered store per value and loop: the forward loop saves its value in each iteration, and the gradient loop reads
them from the last to the first. A store is a value like any other, a VARIANT that the loop carries: saving gives a new
one, in the memory of the old. So an inner loop has a store of its own in each iteration of the outer one, which saves
that in turn.

The gradient of a store, or of a TensorArray, is a store of gradients, where several for one place add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from asyncflow.graph.build import apply
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.op import Op, derivative, register
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient, shape_of
from asyncflow.ops.extents import shape_reader, split_extents, template_shape

if TYPE_CHECKING:
    from types import ModuleType

    from asyncflow.graph.dtypes import DType
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel
    from asyncflow.graph.shapes import Shape

STORE = Spec(VARIANT, ())


class SavedValues:
    """The first `length` items of a list that several versions of a store share.

    Only the newest version can be saved to in place; an older one is copied first, so that all keep their meaning.
    """

    __slots__ = ("items", "length")

    def __init__(self, items: list[Any], length: int) -> None:
        self.items = items
        self.length = length

    def saved(self, index: Any, value: Any) -> SavedValues:
        """The store with one value more, number `index`."""
        if index != self.length:
            raise IndexError(f"value number {index} is saved into a store of {self.length}")
        items = self.items
        if self.length < len(items):
            items = items[: self.length]
        items.append(value)
        return SavedValues(items, self.length + 1)

    def read(self, index: Any) -> Any:
        """The value saved as number `index`."""
        return self.items[index]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(getattr(item, "nbytes", 0) for item in self.items[: self.length])


class StoreGradient:
    """What has reached the elements of a store or array: the first `length` entries of a log that versions share.

    An entry is the index of an element and a gradient of it; several of one element add up when they are read.
    """

    __slots__ = ("length", "log")

    def __init__(self, log: _Log, length: int) -> None:
        self.log = log
        self.length = length

    def with_entries(self, entries: Sequence[tuple[int, Any]]) -> StoreGradient:
        """With more entries."""
        log = self.log
        if self.length < len(log.entries):
            log = _Log(log.entries[: self.length])
        log.extend(entries)
        return StoreGradient(log, len(log.entries))

    def entries(self) -> Sequence[tuple[int, Any]]:
        """All entries."""
        return self.log.entries[: self.length]

    def read(self, index: int) -> list[Any]:
        """The gradients of one element."""
        positions = self.log.positions.get(index, ())
        return [self.log.entries[place][1] for place in positions if place < self.length]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(getattr(value, "nbytes", 0) for _, value in self.entries())


class _Log:
    __slots__ = ("entries", "positions")

    def __init__(self, entries: Sequence[tuple[int, Any]] = ()) -> None:
        self.entries: list[tuple[int, Any]] = []
        self.positions: dict[int, list[int]] = {}
        self.extend(entries)

    def extend(self, entries: Sequence[tuple[int, Any]]) -> None:
        for entry in entries:
            self.positions.setdefault(entry[0], []).append(len(self.entries))
            self.entries.append(entry)


# -- ops -------------------------------------------------------------------------------------------------------------


def _new_kernel(xp: ModuleType) -> Kernel:
    return lambda: SavedValues([], 0)


def _save_kernel(xp: ModuleType) -> Kernel:
    return SavedValues.saved


def _read_kernel(xp: ModuleType, *, value: Spec) -> Kernel:
    return SavedValues.read


def _no_gradient_kernel(xp: ModuleType) -> Kernel:
    return lambda: StoreGradient(_Log(), 0)


def _accumulate_kernel(xp: ModuleType) -> Kernel:
    return lambda grads, index, grad: grads.with_entries([(int(index), grad)])


def _merge_kernel(xp: ModuleType) -> Kernel:
    return lambda grads, others: grads.with_entries(others.entries())


def _element_kernel(xp: ModuleType, *, dtype: DType, shape: Shape) -> Kernel:
    if dtype == VARIANT:
        return lambda grads, index: _merged(grads.read(int(index)))
    extents = shape_reader(shape)

    def read(grads: StoreGradient, index: Any, *sizes: Any) -> Any:
        found = grads.read(int(index))
        if not found:
            return xp.zeros(extents(sizes), dtype)
        return reduce(xp.add, found)

    return read


def _merged(stores: Sequence[StoreGradient]) -> StoreGradient:
    merged = StoreGradient(_Log(), 0)
    for store in stores:
        merged = merged.with_entries(store.entries())
    return merged


def _element_spec(grads: Spec, index: Spec, *sizes: Spec, dtype: DType, shape: Shape) -> Spec:
    return STORE if dtype == VARIANT else Spec(dtype, template_shape(shape, sizes))


# Each new store is one of its own, never shared with an equal one.
NEW_STORE = register(Op(name="saved_values", infer=lambda: STORE, kernel=_new_kernel, is_random=True, flops=free))
SAVE = register(Op(name="save_value", infer=lambda store, index, value: STORE, kernel=_save_kernel, flops=free))
READ_SAVED = register(
    Op(name="saved_value", infer=lambda store, index, *, value: value, kernel=_read_kernel, flops=free)
)
NO_GRADIENT = register(
    Op(name="store_gradient", infer=lambda: STORE, kernel=_no_gradient_kernel, is_random=True, flops=free)
)
ACCUMULATE = register(
    Op(name="accumulate_gradient", infer=lambda grads, index, grad: STORE, kernel=_accumulate_kernel, flops=free)
)
MERGE_GRADIENTS = register(
    Op(name="merge_gradients", infer=lambda grads, others: STORE, kernel=_merge_kernel, flops=free)
)
ELEMENT_GRADIENT = register(Op(name="element_gradient", infer=_element_spec, kernel=_element_kernel, flops=free))


def new_store() -> Tensor:
    """A store with nothing in it."""
    return apply(NEW_STORE)[0]


def save(store: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """The store with `value` behind the others, as number `index`."""
    return apply(SAVE, store, index, value)[0]


def saved_value(store: Tensor, index: Tensor, value: Spec) -> Tensor:
    """The value saved as number `index`."""
    return apply(READ_SAVED, store, index, value=value)[0]


def no_gradient() -> Tensor:
    """The gradient of a store or array of which nothing is used."""
    return apply(NO_GRADIENT)[0]


def element_gradients(index: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a store or array of which one element is used."""
    return apply(ACCUMULATE, no_gradient(), index, grad)[0]


def merge_gradients(grads: Tensor, others: Tensor) -> Tensor:
    """The sum of two gradients of a store or array; adding few entries to many costs little."""
    return apply(MERGE_GRADIENTS, grads, others)[0]


def element_gradient(grads: Tensor, index: Tensor, element: Tensor) -> Tensor:
    """What has reached one element, of the shape of the forward value `element`; zeros if nothing has."""
    if element.dtype == VARIANT:
        return apply(ELEMENT_GRADIENT, grads, index, dtype=VARIANT, shape=())[0]
    template, sizes = split_extents(shape_of(element))
    return apply(ELEMENT_GRADIENT, grads, index, *sizes, dtype=element.dtype, shape=template)[0]


# -- their derivatives -----------------------------------------------------------------------------------------------


@derivative(SAVE)
def _save(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, index, value = node.inputs
    return grads, None, element_gradient(grads, index, value) if carries_gradient(value.spec) else None


@derivative(READ_SAVED)
def _read_saved(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return element_gradients(node.inputs[1], grad), None


@derivative(ACCUMULATE)
def _accumulate(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, index, grad = node.inputs
    return grads, None, element_gradient(grads, index, grad)


@derivative(MERGE_GRADIENTS)
def _merge(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    return grads, grads


@derivative(ELEMENT_GRADIENT)
def _element(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [element_gradients(node.inputs[1], grad), *[None] * (len(node.inputs) - 1)]
