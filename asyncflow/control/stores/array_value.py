"""`ArrayValue`: one state of a TensorArray, the value that flows through a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, cast

import numpy as np

from asyncflow.control.stores.array_store import (
    SCALAR_KINDS,
    ArrayKind,
    Block,
    Common,
    Element,
    Family,
    Rows,
    Store,
    element_shape,
    item,
    widen,
)
from asyncflow.graph.text.parse import parse_value
from asyncflow.graph.text.text import Printer
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array, Namespace

_Element: TypeAlias = "Array | tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class ArrayContent:
    """All that a state of an array holds, as plain values: for a record of a run.

    Attributes:
        kind: properties of the array.
        size: number of elements, written or not.
        common: the shape common to all elements that were written.
        elements: written elements by index; of an element that was read for the last time, its shape.
    """

    kind: ArrayKind
    size: int
    common: Common
    elements: Mapping[int, _Element]

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The elements that can still be read."""
        return tuple(each for each in self.elements.values() if not isinstance(each, tuple))

    def with_arrays(self, arrays: Iterable[Array]) -> ArrayContent:
        """Return the content with other arrays as its elements, such as copies on another device."""
        left = iter(arrays)
        found = {index: each if isinstance(each, tuple) else next(left) for index, each in self.elements.items()}
        return replace(self, elements=found)

    def text(self) -> str:
        """Return the text of the content: properties, then a column of indices and a column of values."""
        kind, common = self.kind, self.common
        found = (
            *(Spec(kind.dtype, kind.element_shape), kind.dynamic_size, kind.clear_after_read, self.size),
            None if common is None else Spec(kind.dtype, common[0]),
            *(tuple(self.elements), tuple(self.elements.values())),
        )
        return Printer().value(found)

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the content that has the text.

        Raises:
            ValueError, TypeError, AttributeError, GraphError: it is the text of something else.
        """
        found = cast("tuple[Spec, bool, bool, int, Spec | None, Sequence[int], Sequence[_Element]]", parse_value(text))
        spec, dynamic_size, clear_after_read, size, common, numbers, values = found
        # An element that was read for the last time has only a shape.
        if not all(isinstance(each, tuple) or getattr(each, "dtype", None) == spec.dtype for each in values):
            raise ValueError(f"no TensorArray of {spec} has elements {values!r:.50}")
        kind = ArrayKind(spec.dtype, spec.shape, dynamic_size, clear_after_read)
        elements = dict(zip(numbers, values, strict=True))
        return cls(kind, size, None if common is None else (common.shape,), elements)

    def value(self, xp: Namespace = np) -> ArrayValue:
        """Return a state with the content, in a new store; `xp` is the array namespace of the elements."""
        # Without a block: elements kept one by one have exactly the recorded bits.
        store = Store(xp, self.kind, Family(in_block=False))
        for index, found in self.elements.items():
            element = store.elements[index] = Element(None if isinstance(found, tuple) else found, 0)
            if isinstance(found, tuple):
                element.shape = found
        return ArrayValue(store, 0, self.size, self.common)


class ArrayValue:
    """One state of an array: the value on the edges of a graph. Immutable; any thread may use it.

    Indices and sizes are Python ints. Every method checks its arguments and raises IndexError (an index outside the
    array), TypeError (dtype) or ValueError (anything else).

    Attributes:
        size: number of elements, written or not.
    """

    __slots__ = ("_common", "_store", "_version", "size")

    def __init__(self, store: Store, version: int, size: int, common: Common) -> None:
        self._store = store
        self._version = version
        self._common = common
        self.size = size

    @classmethod
    def create(cls, xp: Namespace, kind: ArrayKind, size: int) -> ArrayValue:
        """An array of `size` elements, none of them written; `xp` is the array namespace of its elements."""
        if size < 0:
            raise ValueError(f"the size of a TensorArray is not negative; got {size}")
        return cls(Store(xp, kind, Family(in_block=xp is np)), 0, size, None)

    def __repr__(self) -> str:
        return f"<{self.kind}, size {self.size}>"

    @property
    def held(self) -> Store:
        """The store, for the account of a device that has a limit."""
        return self._store

    @property
    def kind(self) -> ArrayKind:
        """The properties that all states of the array share."""
        return self._store.kind

    def one_by_one(self) -> ArrayValue:
        """Return this array, still empty, set to keep each element by itself, as given."""
        self._store.family.in_block = False
        return self

    def content(self) -> ArrayContent | None:
        """Return copies of all elements, on their device; None if the array is closed."""
        store, found = self._store, dict[int, Array | tuple[int, ...]]()
        # Copy: the last reader of an element may own its memory and write to it.
        with store.family.lock:
            if store.family.is_closed:
                return None
            rows = store.rows_at(self._version)
            for index in range(0 if rows is None else rows.count):
                assert rows is not None
                found[index] = rows.shape if rows.taken[index] else rows.row(index).copy()
            # Higher versions belong to later writes, perhaps from another thread.
            for index, element in store.elements.items():
                value = element.value
                value = value.row(index) if isinstance(value, Block) else value
                if element.version <= self._version:
                    found[index] = element.shape if value is None else value.copy()
        return ArrayContent(self.kind, self.size, self._common, found)

    def current_size(self) -> int:
        """`size`, checked: an array that was closed has none."""
        self._store.require_open()
        return self.size

    def close(self) -> None:
        """Frees the elements; every later use of any state of the array fails."""
        store = self._store
        with store.family.lock:
            store.family.is_closed = True
            # Copies of the store share its elements, so each element lets go of its value.
            for element in store.elements.values():
                element.value = None
            if store.block is not None:
                store.block.free()
            store.elements = {}
            store.rows = None

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, index: int, value: Any) -> ArrayValue:
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
        return self._put([(index, item(values, row)) for row, index in enumerate(indices)], size)

    def unstack(self, values: Array) -> ArrayValue:
        """The state in which element i is ``values[i]``, for all elements. Keeps `values` as it is, without a copy."""
        self._check_rows(values, "unstack")
        size = self._size_of_all(len(values), "unstack", "rows")
        store = self._store
        with store.family.lock:
            store.require_open()
            target = store.newest_at(self._version)
            # Rows fill the whole array, so no element may be written before.
            target.require_unwritten(next(iter(target.elements), 0))
            target.latest += 1
            target.rows = Rows(values, target.latest)
            version = target.latest
        return ArrayValue(target, version, size, widen(self._common, values.shape[1:]))

    def split(self, values: Array, lengths: Array) -> ArrayValue:
        """Return the state whose elements are pieces of `values` along its first axis, of these lengths."""
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
            # Check before keeping any piece, so that a state never has only some of them.
            self._check_shape((count, *values.shape[1:]), index)
            pieces.append((index, values[start : start + count]))
            start += count
        return self._put(pieces, size, keep=True)

    def _put(self, items: Iterable[tuple[int, Array]], size: int, *, keep: bool = False) -> ArrayValue:
        """Return the state with these elements; `keep` stores them without a copy."""
        store, common = self._store, self._common
        with store.family.lock:
            store.require_open()
            target = store.newest_at(self._version)
            target.latest += 1
            version, elements = target.latest, target.elements
            for index, value in items:
                target.require_unwritten(index)
                # The first element predicts the shape of the others.
                if not elements and not keep:
                    target.block = target.new_block(size, value)
                block = target.block
                if block is not None and value.shape == block.fits and not keep:
                    block.array[index] = value
                    block.left += 1
                    elements[index] = Element(block, version)
                else:
                    elements[index] = Element(value, version)
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
            f"{'; map_fn, vmap and scan go over values of one number of rows' if what == 'unstack' else ''}"
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

    def read(self, index: int, *, keeps: bool = False) -> Array:
        """Element `index`; zeros if it is not written and its shape is known. With `keeps`, it can be read again."""
        if not 0 <= index < self.size:
            raise IndexError(f"cannot read element {index} of a TensorArray of size {self.size}")
        store = self._store
        # Only a read that frees the element needs the lock, as other threads may read it at the same time.
        if store.kind.clear_after_read:
            with store.family.lock:
                value = store.find(index, self._version, keeps=keeps)
        else:
            value = store.find(index, self._version)
        return self._zeros(index) if value is None else value

    def element_shape(self, index: int) -> Array:
        """The shape of what `read` gives, as a vector; it reads nothing, and may come after the last read."""
        if not 0 <= index < self.size:
            raise IndexError(f"cannot read element {index} of a TensorArray of size {self.size}")
        shape = self._store.find_shape(index, self._version)
        return np.array(self._zeros(index).shape if shape is None else shape, np.int64)

    def stack(self) -> Array:
        """All elements, joined along a new first axis. Not a copy if they were written as one array or into a block."""
        store = self._store
        with store.family.lock:
            array = store.whole(self.size, self._version)
        return self._stacked(range(self.size)) if array is None else array

    def gather(self, indices: Sequence[int]) -> Array:
        """The elements at `indices`, joined along a new first axis."""
        return self._stacked(indices)

    def peek(self, indices: Sequence[int]) -> Array:
        """The elements at `indices`, joined along a new first axis; they can be read again."""
        return self._stacked(indices, keeps=True)

    def concat(self) -> tuple[Array, Array]:
        """Return all elements joined along their first axis, and their lengths along it, as an int64 NumPy array."""
        xp, dtype = self._store.xp, self.kind.dtype
        pieces = [self.read(index) for index in range(self.size)]
        if not pieces:
            shape = self._known_shape()
            if not shape or not is_static(shape[1:]):
                raise self._shape_unknown("concat of no elements", shape)
            return xp.empty((0, *shape[1:]), dtype), np.empty((0,), "int64")
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
        return xp.concatenate(pieces), np.array([len(piece) for piece in pieces], "int64")

    def _stacked(self, indices: Sequence[int], *, keeps: bool = False) -> Array:
        xp, dtype = self._store.xp, self.kind.dtype
        elements = [self.read(index, keeps=keeps) for index in indices]
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
        # Several times faster than stacking 0-d arrays; on other devices only counters are NumPy scalars.
        if not first and dtype.kind in SCALAR_KINDS and all(isinstance(element, np.generic) for element in elements):
            return xp.asarray(np.array(elements, dtype))
        return xp.stack(elements)

    def _zeros(self, index: int) -> Array:
        shape = self._known_shape()
        if shape is None or not is_static(shape):
            raise self._shape_unknown(f"element {index}, which was never written,", shape)
        return self._store.xp.zeros(shape, self.kind.dtype)

    def _known_shape(self) -> Shape:
        return element_shape(self.kind.element_shape, self._common)

    def _shape_unknown(self, what: str, shape: Shape) -> ValueError:
        return ValueError(
            f"{what} needs the shape of an element, but only {format_shape(shape)} is known; pass element_shape= to "
            f"TensorArray, or let fn of map_fn or scan return values whose shape is known in full"
        )
