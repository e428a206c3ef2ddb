"""What a TensorArray is while a graph runs: a persistent array that is written in place when it is used linearly.

An `ArrayValue` is one state of an array and never changes. All states reached from one creation by one write after
another share a *store*; a state is the store and a version, and sees the elements written up to that version. A write
through the newest state goes into the store itself; a write through an older one first copies the store's table (not
the elements). So a loop writes in O(1), and yet each state holds exactly what was written on the way to it, in
whatever order independent writes run.

Where it can, a store of fixed size copies what is written into the rows of one *block*, so that a stack of the full
array is the block itself, and whoever wrote an element may change its buffer afterwards. An element that does not
fit in the block, and every element of an array that has none (`_Store.new_block` says which), is kept as it was given.

Elements are shared between such copies, so "read once" (`clear_after_read`) holds for an element and not for a
state: which of two reads comes too late depends on the schedule, that one of them does does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncflow.graph.dtypes import dtype_name
from asyncflow.graph.shapes import format_shape, is_compatible, is_static, merge, relax

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncflow.graph.dtypes import DType
    from asyncflow.graph.shapes import Shape

Array: TypeAlias = Any
"""A NumPy or CuPy array, or a NumPy scalar."""
Common: TypeAlias = "tuple[Shape] | None"
"""``(shape,)``: every element written so far has this partial shape. None: nothing is written yet."""


def widen(common: Common, shape: Shape) -> Common:
    """What all elements have in common after one more of shape `shape`."""
    if common is None:
        return (shape,)
    return common if common[0] == shape else (relax(common[0], shape),)


def element_shape(declared: Shape, common: Common) -> Shape:
    """What is known of an element, from what was declared and what was written."""
    return declared if common is None else merge(declared, common[0])


@dataclass(frozen=True, slots=True, repr=False)
class ArrayKind:
    """What all states of one array have in common; two arrays can stand in for each other if these are equal.

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


class _Block:
    """Room for all elements of an array of fixed size, that are numbers of one shape.

    Nobody changes a row that is written, so rows are shared without a copy; they are read-only, because readers must
    not change them either. The memory is freed with the last of the rows written.

    Attributes:
        fits: shape of the elements that can be written; None once one was taken, since no stack will come then.
        array: to write into; None once all is read for the last time.
        readable: the same to read from.
        left: number of rows written and not taken.
    """

    __slots__ = ("array", "fits", "left", "readable")

    def __init__(self, size: int, fits: tuple[int, ...], dtype: DType) -> None:
        self.fits: tuple[int, ...] | None = fits
        self.array: Array = np.empty((size, *fits), dtype)
        self.readable: Array | None = self.array.view()
        self.readable.flags.writeable = False
        self.left = 0

    def row(self, index: int) -> Array | None:
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
        """What `whole` gives, for the last time: nobody else has any of it, so the reader may have it to itself."""
        array = None if self.whole() is None else self.array
        if array is not None:
            self.free()
        return array

    def free(self) -> None:
        self.fits = self.array = self.readable = None


class _Element:
    """One element: its value, or the block that it is a row of; None once it has been read for the last time."""

    __slots__ = ("value", "version")

    def __init__(self, value: Array | _Block | None, version: int) -> None:
        self.value = value
        self.version = version


class _Rows:
    """Elements 0, 1, ... written at once: the rows of `array`, which is None once the last of them has been read."""

    __slots__ = ("array", "count", "left", "taken", "version")

    def __init__(self, array: Array, version: int) -> None:
        self.array = array
        self.count = len(array)
        self.left = self.count
        self.taken = bytearray(self.count)
        self.version = version

    def row(self, index: int) -> Array:
        return _item(self.array, index)

    def take(self, index: int) -> Array:
        """The row, for the last time."""
        row = self.row(index)
        self.taken[index] = 1
        self.left -= 1
        if not self.left:
            self.array = None
        return row


@dataclass(slots=True)
class _Family:
    """What a store shares with its copies."""

    lock: Lock = field(default_factory=Lock)
    is_closed: bool = False


class _Store:
    """The table behind the states of one lineage. Invariant: no version in it is above `latest`."""

    __slots__ = ("block", "elements", "family", "kind", "latest", "rows", "xp")

    def __init__(self, xp: Any, kind: ArrayKind, family: _Family) -> None:
        self.xp = xp
        self.kind = kind
        self.family = family
        self.elements: dict[int, _Element] = {}
        self.rows: _Rows | None = None
        self.block: _Block | None = None
        self.latest = 0

    def newest_at(self, version: int) -> _Store:
        """The store to write through a state of that version into: this one, or a copy that ends with it."""
        if version == self.latest:
            return self
        copy = _Store(self.xp, self.kind, self.family)
        copy.elements = {index: element for index, element in self.elements.items() if element.version <= version}
        copy.rows = self.rows_at(version)
        copy.latest = version
        return copy

    def rows_at(self, version: int) -> _Rows | None:
        rows = self.rows
        return rows if rows is not None and rows.version <= version else None

    def require_open(self) -> None:
        if self.family.is_closed:
            raise ValueError("the TensorArray is used after close(); run close() after its last use")

    def require_unwritten(self, index: int) -> None:
        if index in self.elements or (self.rows is not None and index < self.rows.count):
            raise ValueError(
                f"element {index} of the TensorArray is written a second time; each element is written once: "
                f"use another index, or a new TensorArray"
            )

    def new_block(self, size: int, first: Array) -> _Block | None:
        """A block for `size` elements like `first`; None if they are better kept one by one.

        They are if the array may grow; if it is so large that room for elements that may never come is too much;
        on a device, whose streams order work by value and not by part of one; and if they hold text, which lies
        outside the array. A stack of a single element is one copy with a block, too.
        """
        kind = self.kind
        if kind.dynamic_size or size < 2 or self.xp is not np or kind.dtype.hasobject:
            return None
        return _Block(size, first.shape, kind.dtype) if size * max(first.nbytes, 1) <= _BLOCK_LIMIT else None

    def find(self, index: int, version: int) -> Array | None:
        """An element as a state of that version sees it; None if it is not written there."""
        self.require_open()
        element = self.elements.get(index)
        if element is not None:
            if element.version > version:
                return None
            value = element.value
            if self.kind.clear_after_read:
                element.value = None
            if type(value) is _Block:
                value = value.take(index) if self.kind.clear_after_read else value.row(index)
            return self.require_unread(value, index)
        rows = self.rows_at(version)
        if rows is None or index >= rows.count:
            return None
        if not self.kind.clear_after_read:
            return rows.row(index)
        return self.require_unread(None if rows.taken[index] else rows.take(index), index)

    def require_unread(self, value: Array | None, index: int) -> Array:
        if value is None:
            self.require_open()
            raise ValueError(
                f"element {index} of the TensorArray is read a second time, but the first read freed it; make the "
                f"array with clear_after_read=False (stack, concat and gather are reads too)"
            )
        return value

    def whole(self, size: int, version: int) -> Array | None:
        """All elements in one array, if they are in one and none has been taken out."""
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
        array = rows.array
        if self.kind.clear_after_read and size:
            rows.taken[:] = b"\1" * size
            rows.left = 0
            rows.array = None
        return array


class ArrayValue:
    """One state of an array: what flows along the edges of a graph. Immutable; any thread may use it.

    Indices and sizes are Python ints. Every method checks what it is given and raises IndexError (an index outside
    the array), TypeError (dtype) or ValueError (anything else).

    Attributes:
        size: number of elements, written or not.
    """

    __slots__ = ("_common", "_store", "_version", "size")

    def __init__(self, store: _Store, version: int, size: int, common: Common) -> None:
        self._store = store
        self._version = version
        self._common = common
        self.size = size

    @classmethod
    def create(cls, xp: Any, kind: ArrayKind, size: int) -> ArrayValue:
        """An array of `size` elements, none of them written; `xp` is the array namespace of its elements."""
        if size < 0:
            raise ValueError(f"the size of a TensorArray is not negative; got {size}")
        return cls(_Store(xp, kind, _Family()), 0, size, None)

    def __repr__(self) -> str:
        return f"<{self.kind}, size {self.size}>"

    @property
    def kind(self) -> ArrayKind:
        """What all states of the array have in common."""
        return self._store.kind

    def current_size(self) -> int:
        """`size`, checked: an array that was closed has none."""
        self._store.require_open()
        return self.size

    def close(self) -> None:
        """Frees the elements; every later use of any state of the array fails."""
        store = self._store
        with store.family.lock:
            store.family.is_closed = True
            for element in store.elements.values():
                element.value = None
            if store.block is not None:
                store.block.free()
            store.elements = {}
            store.rows = None

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, index: int, value: Array) -> ArrayValue:
        """The state in which element `index` is `value`; a copy of it where the array has a block."""
        size = self._size_with(index)
        self._check_dtype(value)
        self._check_shape(value.shape, index)
        return self._put(((index, value),), size)

    def scatter(self, indices: Sequence[int], values: Array) -> ArrayValue:
        """The state in which element ``indices[i]`` is ``values[i]``."""
        self._check_rows(values, "scatter")
        if len(indices) != len(values):
            raise ValueError(f"scatter needs one row for each index; got {len(values)} rows for {len(indices)} indices")
        size = max((self._size_with(index) for index in indices), default=self.size)
        return self._put([(index, _item(values, row)) for row, index in enumerate(indices)], size)

    def unstack(self, values: Array) -> ArrayValue:
        """The state in which element i is ``values[i]``, for all elements. Keeps `values` as it is, without a copy."""
        self._check_rows(values, "unstack")
        size = self._size_of_all(len(values), "unstack", "rows")
        store = self._store
        with store.family.lock:
            store.require_open()
            target = store.newest_at(self._version)
            target.require_unwritten(next(iter(target.elements), 0))
            target.latest += 1
            target.rows = _Rows(values, target.latest)
            version = target.latest
        return ArrayValue(target, version, size, widen(self._common, values.shape[1:]))

    def split(self, values: Array, lengths: Array) -> ArrayValue:
        """The state in which the elements are pieces of `values` along its first axis, of these lengths."""
        self._check_dtype(values)
        if values.ndim == 0:
            raise ValueError("split cuts an array along its first axis; got a scalar")
        if lengths.ndim != 1:
            raise ValueError(f"split needs a vector of lengths; got shape {format_shape(lengths.shape)}")
        counts = [int(length) for length in lengths.tolist()]
        if any(count < 0 for count in counts):
            raise ValueError(f"split needs lengths that are not negative; got {counts}")
        if sum(counts) != len(values):
            raise ValueError(f"the lengths of split must add up to {len(values)}, the rows given; got {sum(counts)}")
        size = self._size_of_all(len(counts), "split", "lengths")
        pieces, start = [], 0
        for index, count in enumerate(counts):
            self._check_shape((count, *values.shape[1:]), index)
            pieces.append((index, values[start : start + count]))
            start += count
        return self._put(pieces, size, keep=True)

    def _put(self, items: Iterable[tuple[int, Array]], size: int, *, keep: bool = False) -> ArrayValue:
        """The state with these elements; `keep` them as they are, without a copy."""
        store, common = self._store, self._common
        with store.family.lock:
            store.require_open()
            target = store.newest_at(self._version)
            target.latest += 1
            version, elements = target.latest, target.elements
            for index, value in items:
                target.require_unwritten(index)
                if not elements and not keep:
                    target.block = target.new_block(size, value)
                block = target.block
                if block is not None and value.shape == block.fits and not keep:
                    block.array[index] = value
                    block.left += 1
                    elements[index] = _Element(block, version)
                else:
                    elements[index] = _Element(value, version)
                common = widen(common, value.shape)
        return ArrayValue(target, version, size, common)

    def _size_with(self, index: int) -> int:
        """The size once element `index` is written."""
        if 0 <= index < self.size:
            return self.size
        if index < 0:
            raise IndexError(f"cannot write element {index}: indices of a TensorArray are not negative")
        if not self.kind.dynamic_size:
            raise IndexError(
                f"cannot write element {index}: the TensorArray has size {self.size} and does not grow; make it "
                f"larger, or with dynamic_size=True"
            )
        return index + 1

    def _size_of_all(self, count: int, what: str, of: str) -> int:
        if count == self.size or (self.kind.dynamic_size and count > self.size):
            return count
        raise ValueError(
            f"{what} fills the whole TensorArray, which has size {self.size}; got {count} {of}: make the array with "
            f"that size{'' if self.kind.dynamic_size else ', or with dynamic_size=True'}"
        )

    def _check_dtype(self, value: Array) -> None:
        dtype = self._store.kind.dtype
        if value.dtype is not dtype and value.dtype != dtype:
            raise TypeError(
                f"elements of the TensorArray are {dtype_name(dtype)}; got {dtype_name(value.dtype)}: "
                f"convert with af.astype"
            )

    def _check_shape(self, shape: tuple[int, ...], index: int) -> None:
        declared = self._store.kind.element_shape
        if shape != declared and not is_compatible(shape, declared):
            raise ValueError(
                f"element {index} has shape {format_shape(shape)}, but the elements of the TensorArray have shape "
                f"{format_shape(declared)}"
            )

    def _check_rows(self, values: Array, what: str) -> None:
        self._check_dtype(values)
        if values.ndim == 0:
            raise ValueError(f"{what} takes an array apart along its first axis; got a scalar")
        self._check_shape(values.shape[1:], 0)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, index: int) -> Array:
        """Element `index`; zeros if it is not written and its shape is known."""
        if not 0 <= index < self.size:
            raise IndexError(f"cannot read element {index} of a TensorArray of size {self.size}")
        store = self._store
        if store.kind.clear_after_read:
            with store.family.lock:
                value = store.find(index, self._version)
        else:
            value = store.find(index, self._version)
        return self._zeros(index) if value is None else value

    def stack(self) -> Array:
        """All elements, joined along a new first axis. Not a copy if they were written as one array or into a block."""
        store = self._store
        with store.family.lock:
            array = store.whole(self.size, self._version)
        return self._stacked(range(self.size)) if array is None else array

    def gather(self, indices: Sequence[int]) -> Array:
        """The elements at `indices`, joined along a new first axis."""
        return self._stacked(indices)

    def concat(self) -> tuple[Array, Array]:
        """All elements, joined along their first axis; and how long each is along it, as int64."""
        xp, dtype = self._store.xp, self.kind.dtype
        pieces = [self.read(index) for index in range(self.size)]
        if not pieces:
            shape = self._known_shape()
            if not shape or not is_static(shape[1:]):
                raise self._shape_unknown("concat of no elements", shape)
            return xp.empty((0, *shape[1:]), dtype), xp.empty((0,), "int64")
        for index, piece in enumerate(pieces):
            if piece.ndim == 0:
                raise ValueError(
                    f"concat joins elements along their first axis, but element {index} is a scalar; use stack"
                )
            if piece.shape[1:] != pieces[0].shape[1:]:
                raise ValueError(
                    f"concat needs elements that are alike but for their first axis; element 0 has shape "
                    f"{format_shape(pieces[0].shape)}, element {index} has shape {format_shape(piece.shape)}"
                )
        return xp.concatenate(pieces), xp.array([len(piece) for piece in pieces], "int64")

    def _stacked(self, indices: Sequence[int]) -> Array:
        xp, dtype = self._store.xp, self.kind.dtype
        elements = [self.read(index) for index in indices]
        if not elements:
            self._store.require_open()
            shape = self._known_shape()
            if shape is None or not is_static(shape):
                raise self._shape_unknown("a stack of no elements", shape)
            return xp.empty((0, *shape), dtype)
        first = elements[0].shape
        for index, element in zip(indices, elements, strict=True):
            if element.shape != first:
                raise ValueError(
                    f"elements of one shape can be stacked; element {indices[0]} has shape {format_shape(first)}, "
                    f"element {index} has shape {format_shape(element.shape)}"
                )
        # Several times faster than stacking rank-0 arrays; only NumPy has scalars.
        if not first and dtype.kind in _SCALAR_KINDS and hasattr(xp, "generic"):
            return xp.array(elements, dtype)
        return xp.stack(elements)

    def _zeros(self, index: int) -> Array:
        shape = self._known_shape()
        if shape is None or not is_static(shape):
            raise self._shape_unknown(f"element {index}, which is not written,", shape)
        return self._store.xp.zeros(shape, self.kind.dtype)

    def _known_shape(self) -> Shape:
        return element_shape(self.kind.element_shape, self._common)

    def _shape_unknown(self, what: str, shape: Shape) -> ValueError:
        return ValueError(
            f"{what} needs the shape of an element, of which only {format_shape(shape)} is known; make the TensorArray "
            f"with element_shape=..."
        )


_SCALAR_KINDS = frozenset("biufc")
_BLOCK_LIMIT = 64 << 20
"""Bytes of the largest block: a larger array may be made for a few elements out of many."""


def _item(array: Array, index: int) -> Array:
    """Row `index`; of a vector of numbers a scalar, which is cheaper to compute with than an array of rank 0."""
    # One string would otherwise become a Python str.
    return array[index] if array.dtype.kind in _SCALAR_KINDS else array[index, ...]


__all__ = ["ArrayKind", "ArrayValue", "Common", "element_shape", "widen"]
