"""Memory for the rows of a RowStore while a graph runs, written in place when the store is used linearly.

A state of a store is a *block* and a number of rows, and never changes: rows only join behind the newest state. Rows
appended to an older state go to a copy of its rows, as do rows for which there is no room. A block's rows are never
written twice, so views of them stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, Self, cast, final

import numpy as np

from asyncflow.graph.text.parse import parse_value
from asyncflow.graph.text.text import Printer
from asyncflow.graph.values.dtypes import DType, dtype_name
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array, Namespace


@dataclass(frozen=True, slots=True, repr=False)
class RowKind:
    """The properties that all states of one store share; two stores can stand in for each other if these are equal.

    Attributes:
        dtype: of the rows.
        row_shape: of each.
    """

    dtype: DType
    row_shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"RowStore of {dtype_name(self.dtype)}{format_shape(self.row_shape)}"


@dataclass(frozen=True, slots=True)
class RowContent:
    """All that a state of a store holds, as plain values: for a record of a run.

    Attributes:
        kind: properties of the store.
        capacity: number of rows that the block has room for.
        rows: the rows, as one array.
    """

    kind: RowKind
    capacity: int
    rows: Array

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The rows."""
        return (self.rows,)

    def with_arrays(self, arrays: Iterable[Array]) -> RowContent:
        """Return the content with another array of rows, such as a copy on another device."""
        (rows,) = arrays
        return replace(self, rows=rows)

    def text(self) -> str:
        """Return the text of the content."""
        return Printer().value((Spec(self.kind.dtype, self.kind.row_shape), self.capacity, self.rows))

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the content that has the text.

        Raises:
            ValueError, TypeError, AttributeError, GraphError: it is the text of something else.
        """
        row, capacity, rows = cast("tuple[Spec, int, Array]", parse_value(text))
        shape = cast("tuple[int, ...]", row.shape)
        if rows.dtype != row.dtype or rows.shape != (len(rows), *shape) or capacity < len(rows):
            raise ValueError(f"no RowStore of {row} has room for {capacity} rows, and rows {rows!r:.50}")
        return cls(RowKind(row.dtype, shape), capacity, rows)

    def value(self, xp: Namespace = np) -> RowState:
        """Return a state with the content, in a new block; `xp` is the array namespace of the rows."""
        return RowState(RowBlock(xp, self.kind, self.capacity), 0).append(self.rows)


@final
class RowBlock:
    """Room for rows; see `asyncflow.devices.memory.Held`.

    Attributes:
        array: to write into.
        readable: the same to read from.
        filled: number of rows written; these do not change any more.
    """

    __slots__ = ("__weakref__", "array", "filled", "grown_from", "kind", "lock", "readable", "xp")
    entry_nbytes = 0
    gives_views = True

    def __init__(self, xp: Namespace, kind: RowKind, capacity: int) -> None:
        self.xp = xp
        self.kind = kind
        try:
            self.array: Array = xp.empty((capacity, *kind.row_shape), kind.dtype)
        except ValueError:  # more bytes than an address can count
            nbytes = math.prod((capacity, *kind.row_shape)) * kind.dtype.itemsize
            raise MemoryError(
                f"room for {capacity} rows of a {kind} takes {nbytes:,} bytes; give less capacity"
            ) from None
        self.readable = self.array
        if xp is np:  # only NumPy arrays reach code that could write to them
            self.readable = self.array.view()
            self.readable.flags.writeable = False
        self.filled = self.grown_from = 0
        self.lock = Lock()

    def since(self, count: int) -> Sequence[object]:
        """Return an empty sequence: rows are in the buffer."""
        return ()

    def buffers(self) -> Sequence[Array]:
        """The block's memory."""
        return (self.array,)

    def with_room(self, size: int, end: int) -> RowBlock:
        """The block for rows behind the first `size`, up to `end`: this one, or a copy of these."""
        if size == self.filled and end <= len(self.array):
            return self
        copy = RowBlock(self.xp, self.kind, max(end, 2 * size))
        copy.array[:size] = self.array[:size]
        copy.grown_from = self.array.nbytes
        return copy


class RowState:
    """One state of a store: what flows along the edges of a graph. Immutable; any thread may use it.

    Attributes:
        block: where its rows are.
        size: how many it has.
    """

    __slots__ = ("block", "size")

    def __init__(self, block: RowBlock, size: int) -> None:
        self.block = block
        self.size = size

    def __repr__(self) -> str:
        return f"<{self.block.kind}, {self.size} rows>"

    @property
    def held(self) -> RowBlock:
        """The block, for the account of a device that has a limit."""
        return self.block

    def content(self) -> RowContent:
        """Return the content, with a copy of the rows on the same device."""
        return RowContent(self.block.kind, len(self.block.array), self.block.readable[: self.size].copy())

    def append(self, rows: Array) -> RowState:
        """The state with more rows."""
        block, size, kind = self.block, self.size, self.block.kind
        if rows.dtype != kind.dtype or rows.shape[1:] != kind.row_shape or not rows.ndim:
            raise ValueError(f"rows for a {kind} were expected; got {dtype_name(rows.dtype)}{format_shape(rows.shape)}")
        end = size + len(rows)
        if end == size:
            return self
        with block.lock:
            target = block.with_room(size, end)
            target.array[size:end] = rows
            target.filled = end
        return RowState(target, end)

    def take(self, indices: Array) -> Array:
        """The rows at `indices`, which may be negative as an array's may; a view where they stand at even distances."""
        block = self.block
        if block.xp is np and (rows := even_rows(indices)) is not None and rows.stop <= self.size:
            found = block.readable[rows]
            return found if indices.ndim == 1 else found.reshape(*indices.shape, *block.kind.row_shape)
        try:
            return block.xp.take(block.readable[: self.size], indices, axis=0)
        except IndexError:
            wrong = indices[(indices >= self.size) | (indices < -self.size)]
            raise IndexError(f"row {wrong[0]} was asked for of a RowStore that has {self.size}") from None

    def slice(self, start: int, stop: int) -> Array:
        """A view of the rows from `start` up to `stop`."""
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"rows {start} to {stop} were asked for of a RowStore that has {self.size}")
        return self.block.readable[start:stop]


def even_rows(indices: Array) -> slice | None:
    """Return the slice equal to int64 `indices` that ascend in even steps; None for other indices.

    The children of a level in complete trees are such indices, and so are sequences of one length. The check takes half
    a microsecond, or less where the first, the second and the last do not fit. It saves a copy and, in gradients, an
    addition at positions.
    """
    count = indices.size if indices.ndim and indices.dtype == _NUMBER else 0
    if not count:
        return None
    first, last = indices.item(0), indices.item(-1)
    step = indices.item(1) - first if count > 1 else 1
    if first < 0 or step < 1 or last != first + step * (count - 1):
        return None
    # Bytes are compared, because that takes less than half the time.
    is_known = step == 1 and last < _KNOWN
    even = _NUMBERS[8 * first : 8 * last + 8] if is_known else np.arange(first, last + 1, step).tobytes()
    return slice(first, last + 1, step) if count < 3 or indices.tobytes() == even else None


_NUMBER: Final = np.dtype(np.int64)
_KNOWN: Final = 16384
_NUMBERS: Final = np.arange(_KNOWN, dtype=np.int64).tobytes()
"""A part of these takes a tenth of the time of `arange`."""
