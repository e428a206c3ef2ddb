"""Memory for the elements of a TensorArray while a graph runs, written in place when the array is used linearly.

A state of an array (`asyncflow.control.stores.array_value`) never changes. All states reached from one creation by one
write after another share a *store*; a state is the store and a version, and sees the elements written up to that
version. A write through the newest state goes into the store itself; a write through an older one first copies the
store's table (not the elements). So a loop writes in O(1). Yet each state holds exactly the elements written on the way
to it, in whatever order independent writes run.

Where it can, a store of fixed size copies elements into the rows of one *block*. A stack of the full array is then the
block itself. The writer of an element may then change its buffer afterwards. An element that does not fit in the block,
and every element of an array without one (`Store.new_block` says which), is kept as given.

Elements are shared between such copies, so "read once" (`clear_after_read`) holds for an element and not for a state.
One of two reads comes too late in every schedule; the schedule decides which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any, TypeAlias, final

import numpy as np

from asyncflow.graph.values.dtypes import DType, dtype_name
from asyncflow.graph.values.shapes import Shape, format_shape, merge, relax
from asyncflow.values import Array, Namespace

Common: TypeAlias = "tuple[Shape] | None"
"""``(shape,)``: every element written so far has this partial shape. None: nothing is written yet."""

SCALAR_KINDS = frozenset("biufc")
"""Kinds of dtype of which NumPy has scalars to compute with."""

_BLOCK_LIMIT = 64 << 20
"""Bytes of the largest block: a larger array may be made for a few elements out of many."""


def widen(common: Common, shape: Shape) -> Common:
    """The shape common to all elements after one more of shape `shape`."""
    if common is None:
        return (shape,)
    return common if common[0] == shape else (relax(common[0], shape),)


def element_shape(declared: Shape, common: Common) -> Shape:
    """The shape of an element, as declared and as written."""
    return declared if common is None else merge(declared, common[0])


@dataclass(frozen=True, slots=True, repr=False)
class ArrayKind:
    """The properties that all states of one array share; two arrays can stand in for each other if these are equal.

    Attributes:
        dtype: of the elements.
        element_shape: partial shape that every element has.
        dynamic_size: whether a write past the end makes the array longer.
        clear_after_read: whether an element can be read once only, and is freed by that.
    """

    dtype: DType
    element_shape: Shape
    dynamic_size: bool
    clear_after_read: bool

    def __repr__(self) -> str:
        length = "growing " if self.dynamic_size else ""
        reads = "" if self.clear_after_read else ", read any number of times"
        return f"{length}TensorArray of {dtype_name(self.dtype)}{format_shape(self.element_shape)}{reads}"


@final
class Block:
    """A block: memory for all elements of an array of fixed size, if these are numbers of one shape.

    Written rows are never changed, so rows are shared without a copy; they are read-only, because readers must not
    change them either. The memory is freed with the last of the rows written.

    Attributes:
        fits: shape of the elements that can be written; None once one was taken, since no stack will come then.
        shape: of its elements.
        array: to write into; None once all is read for the last time.
        readable: the same to read from.
        left: number of rows written and not taken.
    """

    __slots__ = ("array", "fits", "left", "readable", "shape")

    def __init__(self, size: int, fits: tuple[int, ...], dtype: DType) -> None:
        self.fits: tuple[int, ...] | None = fits
        self.shape = fits
        self.array: Any = np.empty((size, *fits), dtype)
        # A separate view: a read-only flag on `array` would forbid later writes.
        self.readable: Array | None = self.array.view()
        self.readable.flags.writeable = False
        self.left = 0

    def row(self, index: int) -> Array | None:
        """A row that is written; None if the block is freed."""
        # Looked up once: another thread may free the block.
        readable = self.readable
        return None if readable is None else readable[index]

    def take(self, index: int) -> Array | None:
        """The row, for the last time."""
        row = self.row(index)
        self.fits = None
        self.left -= 1
        if not self.left:
            self.free()
        return row

    def whole(self) -> Array | None:
        """All rows; None unless all are written and none is taken."""
        readable = self.readable
        return None if readable is None or self.left != len(readable) else readable

    def take_whole(self) -> Array | None:
        """Return all rows, as `whole` does, for the last time: the only reader may then own them."""
        array = None if self.whole() is None else self.array
        if array is not None:
            self.free()
        return array

    def free(self) -> None:
        """Let go of the memory."""
        self.fits = self.array = self.readable = None


class Element:
    """One element: its value, or the block that it is a row of; None once it has been read for the last time."""

    __slots__ = ("shape", "value", "version")

    def __init__(self, value: Array | Block | None, version: int) -> None:
        self.shape: tuple[int, ...] = ()  # set when the value is dropped
        self.value: Array | Block | None = value
        self.version = version


class Rows:
    """Elements 0, 1, ... written at once: the rows of `array`, which is None once the last of them has been read."""

    __slots__ = ("array", "count", "left", "shape", "taken", "version")

    def __init__(self, array: Array, version: int) -> None:
        self.array: Any = array
        self.shape: tuple[int, ...] = array.shape[1:]
        self.count = len(array)
        self.left = self.count
        self.taken = bytearray(self.count)
        self.version = version

    def row(self, index: int) -> Array:
        """Element `index`."""
        return item(self.array, index)

    def take(self, index: int) -> Array:
        """The row, for the last time."""
        row = self.row(index)
        self.taken[index] = 1
        self.left -= 1
        if not self.left:
            self.array = None
        return row


@dataclass(slots=True)
class Family:
    """The part of a store that its copies share; `in_block`: elements are copied into one block where they can."""

    in_block: bool
    lock: Lock = field(default_factory=Lock)
    is_closed: bool = False


class Store:
    """The table behind the states of one lineage. Invariant: no version in it is above `latest`."""

    __slots__ = ("__weakref__", "block", "elements", "family", "kind", "latest", "rows", "xp")
    gives_views = False
    grown_from = 0
    entry_nbytes = 150  # an entry of the table, its index and its `Element`

    def __init__(self, xp: Namespace, kind: ArrayKind, family: Family) -> None:
        self.xp = xp
        self.kind = kind
        self.family = family
        self.elements: dict[int, Element] = {}
        self.rows: Rows | None = None
        self.block: Block | None = None
        self.latest = 0

    def since(self, count: int) -> list[Array | None]:
        """The elements written behind the first `count`; None for those read for the last time, or in the block."""
        elements = self.elements
        fresh = list(islice(reversed(elements.values()), max(len(elements) - count, 0)))
        return [None if type(element.value) is Block else element.value for element in reversed(fresh)]

    def buffers(self) -> Sequence[Array]:
        """The block's memory."""
        array = None if self.block is None else self.block.array
        return () if array is None else (array,)

    def newest_at(self, version: int) -> Store:
        """The store to write through a state of that version into: this one, or a copy that ends with it."""
        if version == self.latest:
            return self
        copy = Store(self.xp, self.kind, self.family)
        # Without the block: its free rows belong to the newest state.
        copy.elements = {index: element for index, element in self.elements.items() if element.version <= version}
        copy.rows = self.rows_at(version)
        copy.latest = version
        return copy

    def rows_at(self, version: int) -> Rows | None:
        """The elements written at once, if a state of that version sees them."""
        rows = self.rows
        return rows if rows is not None and rows.version <= version else None

    def require_open(self) -> None:
        """Raises ValueError if the array is closed."""
        if self.family.is_closed:
            raise ValueError("the TensorArray is used after close(); run close() after its last use")

    def require_unwritten(self, index: int) -> None:
        """Raises ValueError if the element is written."""
        if index in self.elements or (self.rows is not None and index < self.rows.count):
            raise ValueError(
                f"element {index} of the TensorArray is written a second time; each element is written once: "
                f"use another index, or a new TensorArray"
            )

    def new_block(self, size: int, first: Array) -> Block | None:
        """A block for `size` elements like `first`; None if they are better kept one by one.

        They are if the array may grow; if it is so large that room for elements that may never come is too much;
        on a device, whose streams and memory know values and no parts of one; and if they hold text, which lies outside
        the array. A stack of a single element is one copy with a block, too.
        """
        kind = self.kind
        if kind.dynamic_size or size < 2 or not self.family.in_block or kind.dtype.hasobject:
            return None
        return Block(size, first.shape, kind.dtype) if size * max(first.nbytes, 1) <= _BLOCK_LIMIT else None

    def find(self, index: int, version: int, *, keeps: bool = False) -> Array | None:
        """Return an element as a state of that version sees it; None if it is not written there.

        With `keeps`, it stays there for later reads, whatever the kind of array.
        """
        self.require_open()
        clears = self.kind.clear_after_read and not keeps
        element = self.elements.get(index)
        if element is not None:
            if element.version > version:
                return None
            value = element.value
            if clears and value is not None:
                element.shape = value.shape  # gradients need it after the read
                element.value = None
            if type(value) is Block:
                value = value.take(index) if clears else value.row(index)
            return self.require_unread(value, index)
        rows = self.rows_at(version)
        if rows is None or index >= rows.count:
            return None
        if not self.kind.clear_after_read:
            return rows.row(index)
        return self.require_unread(None if rows.taken[index] else rows.row(index) if keeps else rows.take(index), index)

    def find_shape(self, index: int, version: int) -> tuple[int, ...] | None:
        """The shape of an element as a state of that version sees it, read or not; None if it is not written there."""
        self.require_open()
        element = self.elements.get(index)
        if element is not None:
            value = element.value  # looked up once: another thread may take it
            shape: tuple[int, ...] = element.shape if value is None else value.shape
            return shape if element.version <= version else None
        rows = self.rows_at(version)
        return None if rows is None or index >= rows.count else rows.shape

    def require_unread(self, value: Array | None, index: int) -> Array:
        """`value`, which was found to be element `index`; raises ValueError if it is None, having been read."""
        if value is None:
            self.require_open()
            raise ValueError(
                f"element {index} of the TensorArray is read a second time, but the first read freed it; make the "
                f"array with clear_after_read=False (stack, concat and gather are reads too)"
            )
        return value

    def whole(self, size: int, version: int) -> Array | None:
        """Return all elements as one array, if they lie in one array and none has been taken out."""
        self.require_open()
        block = self.block
        if block is not None:
            # The last write filled the block, so no older version sees all of it.
            if version != self.latest:
                return None
            return block.take_whole() if self.kind.clear_after_read else block.whole()
        rows = self.rows_at(version)
        if rows is None or rows.count != size or rows.left != size:
            return None
        array: Array | None = rows.array
        if self.kind.clear_after_read and size:  # stacking reads each element
            rows.taken[:] = b"\1" * size
            rows.left = 0
            rows.array = None
        return array


def item(array: Array, index: int) -> Array:
    """Row `index`; of a vector of numbers a scalar, which is cheaper to compute with than an array of rank 0."""
    # One string would otherwise become a Python str.
    return array[index] if array.dtype.kind in SCALAR_KINDS else array[index, ...]
