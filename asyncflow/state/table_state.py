"""`TableState`: the rows of a table, in one session or in a container, and captures of them.

Rows are written in place, under a lock that readers take as well while they copy rows out. So they see all or nothing
of a write, and their copies never change. So a write costs its rows, however many the table has.

A *capture* is the table of one moment. Taking it copies nothing: a write first copies a page of rows, once, if a
capture still needs them (copy on write). The reader of the capture, on a thread of its own, holds the lock for a page
at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import ClassVar, cast
from weakref import ref

import numpy as np

from asyncflow.errors import AsyncflowError, CheckpointError, ShapeError
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array

PAGE_BYTES = 1 << 16
"""Bytes that a write copies out for a capture at a time: some microseconds' worth."""


class TableState:
    """The rows of a table; thread-safe.

    Invariants: all columns have `rows` rows; each of the first `size` rows was written, or lies before a written one;
    `end` is where the next row is appended. All three change together, under the lock.

    Attributes:
        last_write: an object that only the last write has made.
    """

    __slots__ = (
        *("__weakref__", "_captures", "_columns", "_lock", "_page_rows"),
        *("end", "last_write", "name", "names", "rows", "size"),
    )

    def __init__(self, name: str, rows: int, names: Sequence[str], specs: Sequence[Spec]) -> None:
        self.name = name
        self.rows = rows
        self.names = tuple(names)
        # The operating system backs pages of zeros only once they are written.
        self._columns: Sequence[Array] = [np.zeros((rows, *map(int, s.shape or ())), s.dtype) for s in specs]  # type: ignore[arg-type]
        self.size = self.end = 0
        self.last_write = object()
        self._page_rows = max(1, PAGE_BYTES * rows // max(1, sum(column.nbytes for column in self._columns)))
        self._lock = Lock()
        self._captures: list[ref[TableCapture]] = []

    def __repr__(self) -> str:
        return f"<TableState {self.name}, {self.size} of {self.rows} rows>"

    # -- in runs -------------------------------------------------------------------------------------------------

    def write(self, index: Array, *values: Array) -> Array:
        """Write a row at `index`, or a row at each of several; of rows with the same index, the last counts.

        Raises:
            IndexError: the table has no such row.
            ShapeError: values are not rows of the table.
        """
        positions = self._positions(index)
        with self._lock:
            last = int(positions) if not index.ndim else int(positions.max(initial=-1))
            self._put(positions, values)
            self.size = max(self.size, last + 1)
        return index

    def append(self, *values: Array) -> Array:
        """Writes rows behind the last that was appended, and from the front again once the table is full.

        Raises:
            ShapeError: values are not rows of the table.
        """
        count = len(values[0]) if values[0].ndim == self._columns[0].ndim else None
        with self._lock:
            start = self.end
            end = start + (1 if count is None else count)
            at = cast("Array", np.int64(start)) if count is None else np.arange(start, end) % self.rows
            self._put(at, values)
            self.size, self.end = max(self.size, min(end, self.rows)), end % self.rows
        return at

    def gather(self, indices: Array) -> tuple[Array, ...]:
        """Copy the rows at `indices`; rows never written are zeros.

        Raises:
            IndexError: the table has no such row.
        """
        positions = self._positions(indices)
        with self._lock:
            return tuple([column.take(positions, axis=0) for column in self._columns])

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, ...]:
        """Copies of rows drawn with replacement, all that are there being equally likely.

        Raises:
            AsyncflowError: there is none yet.
        """
        with self._lock:
            if not self.size:
                raise AsyncflowError(
                    f"table {self.name!r} is sampled before it has a row; write one earlier in the program or in an "
                    "earlier run, or sample under af.cond(table.size() > 0, ...)"
                )
            positions = rng.integers(0, self.size, shape)
            return tuple([column.take(positions, axis=0) for column in self._columns])

    def _positions(self, index: Array) -> Array:
        rows = self.rows
        if index.ndim == 0:
            if not 0 <= index < rows:
                raise IndexError(f"table {self.name!r} has rows 0 to {rows - 1}; got {index}")
        elif index.size and not (index.min() >= 0 and index.max() < rows):
            wrong = index[(index < 0) | (index >= rows)]
            raise IndexError(f"table {self.name!r} has rows 0 to {rows - 1}; got {wrong.flat[0]}")
        return index.astype(np.int64, copy=False)

    def _put(self, positions: Array, values: Sequence[Array]) -> None:
        """Writes rows that have been checked in full before the first one is; the lock is held."""
        leading = positions.shape
        for name, column, value in zip(self.names, self._columns, values, strict=True):
            if value.shape != leading + column.shape[1:]:
                expected = format_shape(leading + column.shape[1:])
                raise ShapeError(
                    f"{name} of table {self.name!r} takes {expected} here; got {format_shape(value.shape)}"
                )
        self.last_write = object()
        if self._captures:
            self._keep(positions)
        for column, value in zip(self._columns, values, strict=True):
            column[positions] = value

    kind: ClassVar[str] = "table"

    # -- between runs --------------------------------------------------------------------------------------------

    def capture(self) -> TableCapture:
        """Capture the table of this moment, in constant time; see `TableCapture`."""
        with self._lock:
            made = TableCapture(
                self._lock, self._columns, self.names, (self.rows, self.size, self.end), self._page_rows
            )
            self._captures.append(ref(made))
        return made

    def _keep(self, positions: Array) -> None:
        captures = [made for each in self._captures if (made := each()) is not None and not made.is_done]
        self._captures = [ref(made) for made in captures]
        pages = np.unique(positions // self._page_rows).tolist()
        for made in captures:
            made.keep(pages)

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Check that a capture's arrays fit this table.

        Raises:
            CheckpointError: a column is missing, is one too many, or has another dtype or shape, or another number of
                rows in all.
        """
        if set(arrays) != {"position", *self.names}:
            seen = ", ".join(sorted(arrays)) or "nothing"
            raise CheckpointError(f"table {self.name!r} has position, {', '.join(self.names)}; found {seen}")
        position = arrays["position"]
        if position.dtype != np.int64 or position.shape != (3,) or position[0] != self.rows:
            raise CheckpointError(f"table {self.name!r} has {self.rows} rows; found position {position}")
        _, size, end = position.tolist()
        if not (0 <= size <= self.rows and 0 <= end < self.rows):
            raise CheckpointError(f"table {self.name!r}: {size} rows, the next at {end}, are not of one of {self.rows}")
        for name, column in zip(self.names, self._columns, strict=True):
            found, expected = arrays[name], (size, *column.shape[1:])
            if found.dtype != column.dtype or found.shape != expected:
                raise CheckpointError(
                    f"{name} of table {self.name!r} is {dtype_name(column.dtype)}{format_shape(expected)}; found "
                    f"{dtype_name(found.dtype)}{format_shape(found.shape)}"
                )

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Replace the rows by a capture's arrays, all at once; other captures keep theirs.

        Raises:
            CheckpointError: they do not fit; nothing has changed.
        """
        self.check_arrays(arrays)
        _, size, end = arrays["position"].tolist()
        columns = [np.zeros_like(column) for column in self._columns]
        for name, column in zip(self.names, columns, strict=True):
            column[:size] = arrays[name]
        with self._lock:
            self._columns, self.size, self.end = columns, size, end
            self.last_write = object()
            self._captures = []  # their columns are not written any more

    @property
    def value(self) -> Array:
        """A copy of all of it as one value, a field for each column: for `explore`, which tries every order."""
        columns = zip(self.names, self._columns, strict=True)
        fields = [("size", np.int64), ("end", np.int64), *((name, x.dtype, x.shape) for name, x in columns)]
        with self._lock:
            found = np.zeros((), np.dtype(fields))
            found[()] = (self.size, self.end, *self._columns)
        return found

    @value.setter
    def value(self, given: Array) -> None:
        with self._lock:
            self.last_write = object()
            self.size, self.end = int(given["size"]), int(given["end"])
            for name, column in zip(self.names, self._columns, strict=True):
                column[...] = given[name]


class TableCapture:
    """A table at the moment of the capture, whatever is written afterwards.

    It holds what writes have copied out for it, and is let go of by dropping it.
    """

    __slots__ = ("__weakref__", "_arrays", "_columns", "_lock", "_names", "_next", "_page_rows", "_pages", "_position")

    def __init__(
        self, lock: Lock, columns: Sequence[Array], names: Sequence[str], position: tuple[int, int, int], page_rows: int
    ) -> None:
        self._lock = lock
        self._columns = columns
        self._names = names
        self._position = position
        self._page_rows = page_rows
        self._pages: dict[int, list[Array]] = {}
        self._next = 0  # the first page not yet in the arrays
        self._arrays = [np.empty((position[1], *c.shape[1:]), c.dtype) for c in columns]

    @property
    def is_done(self) -> bool:
        """True if all rows have been copied, so that writes need copy none."""
        return self._next * self._page_rows >= self._position[1]

    def keep(self, pages: Sequence[int]) -> None:
        """Copies pages that are about to be written, unless that was done before; the lock is held."""
        for page in pages:
            rows = self._rows(page)
            if page >= self._next and page not in self._pages and rows.start < self._position[1]:
                self._pages[page] = [column[rows].copy() for column in self._columns]

    def arrays(self) -> dict[str, Array]:
        """The rows that were there, by column, and ``"position"``: rows in all, rows there, and where the next goes.

        Copies them, on the calling thread, a page at a time: runs go on beside it.
        """
        while not self.is_done:
            with self._lock:
                rows = self._rows(self._next)
                sources = self._pages.pop(self._next, None) or [column[rows] for column in self._columns]
                for target, source in zip(self._arrays, sources, strict=True):
                    target[rows] = source[: len(target) - rows.start]
                self._next += 1
        return {"position": np.array(self._position), **dict(zip(self._names, self._arrays, strict=True))}

    def _rows(self, page: int) -> slice:
        return slice(page * self._page_rows, (page + 1) * self._page_rows)
