"""Gradients of RowStores: sums of the gradients of rows, in one array that is written in place.

Addition at rows is to its gradient as `take` is to a store; and `append` reads from it the gradients of the appended
rows. Both rules hold for gradients of gradients, too, so one op adds and one reads, each for rows at indices or for a
range.

A version of such a sum is a `StoreVersion` of additions. They are carried out at the first read, in an array that is as
long as the store was. So a loop pays for the rows that it reads and adds, however many there are. Since the array has
all additions up to some version, an older version that is still read begins anew from the log. When as much has been
added as the array holds, its content begins a new log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeAlias, cast

import numpy as np

from asyncflow.autodiff.stores.store_gradients import ADDERS, no_gradient
from asyncflow.autodiff.stores.stores import STORE, Grad, StoreLog, StoreVersion
from asyncflow.control.stores.row_block import RowKind, even_rows
from asyncflow.control.stores.row_store import APPEND, ROW_STORE, SIZE, SLICE, TAKE, RowStore, kind_of
from asyncflow.graph.building.build import apply
from asyncflow.graph.building.scopes import device
from asyncflow.graph.graph import reopened
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, READS_STORE, define, derivative, not_differentiable
from asyncflow.graph.values.dtypes import summed_in
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free, moving
from asyncflow.ops.derivatives.shapes import carries_gradient, ensure_shape
from asyncflow.ops.indexing.scatter import add_at_rows
from asyncflow.values import Array, Kernel, Namespace

_Added: TypeAlias = "tuple[int, slice | Array, Array]"
"""An addition: the number of rows the store had, the rows concerned, and the values added. Rows behind are not
touched.
"""


class _RowLog(StoreLog[_Added]):
    """The additions that versions share.

    Attributes:
        total: the sum of the first `folded`, or None.
        longest: rows of the longest store that something was added for.
        added: rows added behind the first entry.
    """

    __slots__ = ("added", "folded", "longest", "total")
    entry_nbytes = 160  # a triple, and a range or indices

    def __init__(self, entries: Iterable[_Added]) -> None:
        self.total: Array | None = None
        self.folded = self.longest = self.added = 0
        super().__init__(entries)

    def since(self, count: int) -> Sequence[object]:
        """Return the values behind the first `count`; None for dropped ones."""
        entries: Sequence[_Added | None] = self[count:]
        return [None if entry is None else entry[2] for entry in entries]

    def buffers(self) -> Sequence[Array]:
        """The sum."""
        return () if self.total is None else (self.total,)

    def extend(self, entries: Iterable[_Added]) -> None:
        for entry in entries:
            self.put(entry)

    def put(self, entry: _Added) -> None:
        """Append one addition."""
        size, where, values = entry
        if self:
            self.added += len(values) if type(where) is slice else where.size
        if size > self.longest:
            self.longest = size
        self.append(entry)


class RowGradient(StoreVersion[_Added]):
    """The gradients that have reached rows of a store.

    Attributes:
        xp: array namespace of the rows.
        kind: of the store.
    """

    __slots__ = ("kind", "xp")
    log: _RowLog

    def __init__(self, xp: Namespace, kind: RowKind, log: _RowLog, length: int, nbytes: int) -> None:
        self.log, self.length, self.nbytes = log, length, nbytes  # without `super()`, as each iteration makes one
        self.xp = xp
        self.kind = kind

    @classmethod
    def of(cls, xp: Namespace, kind: RowKind, entries: Sequence[_Added]) -> RowGradient:
        """Make a gradient of these additions alone."""
        return cls(xp, kind, _RowLog(entries), len(entries), _nbytes(entries))

    def with_entries(self, entries: Sequence[_Added]) -> RowGradient:
        """Return the sum with more additions; it begins a new log when the old one is as large as its sum."""
        xp, kind, log, length = self.xp, self.kind, self.log, self.length
        if log.added >= log.longest and length == len(log):
            return RowGradient.of(xp, kind, [self._taken(), *entries])
        grown = cast("_RowLog", self.grown(entries))
        return RowGradient(xp, kind, grown, length + len(entries), self.nbytes + _nbytes(entries))

    def with_entry(self, entry: _Added) -> RowGradient:
        """Return the sum with one more addition."""
        log, length = self.log, self.length
        if log.added < log.longest:
            with log.lock:  # in place only for the newest version, as another thread may have grown it
                if length == len(log):
                    log.put(entry)
                    return RowGradient(self.xp, self.kind, log, length + 1, self.nbytes + entry[2].nbytes)
        return self.with_entries((entry,))

    def merged(self, other: RowGradient) -> RowGradient:
        """Return the sum with the additions of `other`; the cost depends on the shorter one."""
        return self.with_entries(other.entries()) if other.length <= self.length else other.merged(self)

    def range(self, start: int, stop: int, *, is_last: bool = False) -> Array:
        """Return the sums for the rows from `start` up to `stop`; `is_last` if no other version is read."""
        with self.log.lock:
            found = self._total(stop, start, is_last=is_last)[start:stop]
            # A copy takes half the time of `array`.
            return found.copy() if found.dtype is self.kind.dtype else found.astype(self.kind.dtype)

    def rows(self, size: int, indices: Array, *, is_last: bool = False) -> Array:
        """The sums for the rows at `indices` of the first `size`."""
        with self.log.lock:
            found = self.xp.take(self._total(size, 0, is_last=is_last)[:size], indices, axis=0)
            return found.astype(self.kind.dtype, copy=False)

    def _taken(self) -> _Added:
        """Take all additions out as one; the log has to begin anew for a further read."""
        log, rows = self.log, self.log.longest
        with log.lock:
            total = self._total(rows, 0)
            log.total, log.folded = None, 0  # the new log writes to it
        return rows, slice(0, rows, 1), total[:rows]

    def _total(self, rows: int, first: int, *, is_last: bool = False) -> Array:
        """Return the sum in at least `rows` rows, right from `first` on, in the dtype of `summed_in`; under the lock.

        If no other version is read, the log drops the additions it has summed.
        """
        log, length, total = self.log, self.length, self.log.total
        # The sum includes newer versions. It is valid if all newer additions are to rows that are not read.
        if log.folded > length and any(size > first for size, _, _ in log[length : log.folded]):
            total, log.folded = None, 0
        rows, known = max(rows, log.longest), () if total is None else total
        if total is None or len(total) < rows:
            # Double the size, so that a store that grows row by row is copied a few times, not at each read.
            total = self.xp.zeros((max(rows, 2 * len(known)), *self.kind.row_shape), summed_in(self.kind.dtype))
            if len(known):
                total[: len(known)] = known
        for place in range(log.folded, length):
            size, where, values = log.take(place) if is_last else log[place]
            if type(where) is slice:
                own = total[where]
                own += values
            else:
                add_at_rows(self.xp, total[:size], where, values)
        log.total, log.folded = total, max(log.folded, length)
        return total


def _nbytes(entries: Sequence[_Added]) -> int:
    return sum([values.nbytes for _, _, values in entries])


# -- ops -------------------------------------------------------------------------------------------------------------


def _add_kernel(xp: Namespace, *, row: Spec, is_range: bool) -> Kernel:
    kind = kind_of(row)
    row_shape = kind.row_shape

    def added(grads: Grad, values: Array, extents: tuple[int, ...], size: int, where: slice | Array) -> RowGradient:
        if values.shape != (shape := extents + row_shape):
            raise ValueError(
                f"a gradient of shape {format_shape(values.shape)} has reached rows of shape {format_shape(shape)}; "
                "they can only be added up if they are alike"
            )
        if len(extents) > 1 and type(where) is slice:
            values = values.reshape(prod(extents), *row_shape)
        entry = size, where, values
        total: RowGradient = grads.with_entry(entry) if grads.length else RowGradient.of(xp, kind, (entry,))
        return total

    def add_range(grads: Grad, values: Array, first: Array, second: Array) -> RowGradient:
        start, stop = int(first), int(second)
        return added(grads, values, (stop - start,), stop, slice(start, stop, 1))

    def add_at(grads: Grad, values: Array, first: Array, indices: Array) -> RowGradient:
        size, rows = int(first), even_rows(indices) if xp is np else None
        return added(grads, values, indices.shape, size, indices if rows is None or rows.stop > size else rows)

    return add_range if is_range else add_at


def _read_kernel(xp: Namespace, *, row: Spec, is_range: bool, is_last: bool = False) -> Kernel:
    kind = kind_of(row)

    def zeros(*extents: int) -> Array:  # nothing has come
        return xp.zeros((*extents, *kind.row_shape), kind.dtype)

    def read_range(grads: Grad, first: Array, second: Array) -> Array:
        start, stop = int(first), int(second)
        if not grads.length:
            return zeros(stop - start)
        total: RowGradient = grads
        return total.range(start, stop, is_last=is_last)

    def read_at(grads: Grad, first: Array, indices: Array) -> Array:
        if not grads.length:
            return zeros(*indices.shape)
        total: RowGradient = grads
        return total.rows(int(first), indices, is_last=is_last)

    return read_range if is_range else read_at


def _read_spec(grads: Spec, first: Spec, second: Spec, *, row: Spec, is_range: bool, is_last: bool = False) -> Spec:
    extents = (None,) if is_range else second.shape
    return Spec(row.dtype, None if extents is None else (*extents, *(row.shape or ())))


ADD_ROWS = define(
    "add_row_gradients",
    lambda grads, values, first, second, **attrs: STORE,
    _add_kernel,
    flops=free,
    host_inputs=lambda node: (2, 3) if node.attrs["is_range"] else (2,),
    traits=KERNELS,
)
"""Op that adds values for the rows from `first` up to `second`, or for the indices `second` of the first `first`
rows.
"""
READ_ROWS = define(
    "row_gradients",
    _read_spec,
    _read_kernel,
    flops=moving,
    host_inputs=lambda node: (1, 2) if node.attrs["is_range"] else (1,),
    traits=READS_STORE,
)
"""Op that returns the sums for such rows. The compiler says where no other version is read."""
ADDERS.add(ADD_ROWS)


def append_of_known_size(store: RowStore, rows: Tensor, sizes: tuple[Tensor, ...]) -> RowStore:
    """The store with more rows; gradients need not keep its `sizes` before and after, where these are given."""
    appended = store.append(rows)
    node = appended.handle.node
    node.graph.shapes.update(zip((node.inputs[0], appended.handle), sizes, strict=False))
    return appended


def _size_of(store: Tensor) -> Tensor:
    """The size of a forward store; it alone is kept for later."""
    known = store.graph.shapes
    if store not in known:
        with reopened(store.graph), device(store.node.device):
            known[store] = apply(SIZE, store)[0]
    return known[store]


# -- derivatives -----------------------------------------------------------------------------------------------------


@derivative(APPEND)
def _append(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    store, rows = node.inputs
    if not carries_gradient(rows.spec):
        return grads, None
    bounds = _size_of(store), _size_of(node.outputs[0])
    found = apply(READ_ROWS, grads, *bounds, row=node.attrs["row"], is_range=True)[0]
    return grads, ensure_shape(found, rows.shape)


@derivative(TAKE)
def _take(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    store, indices = node.inputs
    row = node.attrs["row"]
    return apply(ADD_ROWS, no_gradient(), grad, _size_of(store), indices, row=row, is_range=False)[0], None


@derivative(SLICE)
def _slice(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    row = node.attrs["row"]
    return apply(ADD_ROWS, no_gradient(), grad, *node.inputs[1:], row=row, is_range=True)[0], None, None


@derivative(ADD_ROWS)
def _add_rows(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, values, *where = node.inputs
    return grads, ensure_shape(apply(READ_ROWS, grads, *where, **node.attrs)[0], values.shape), None, None


@derivative(READ_ROWS)
def _read_rows(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return apply(ADD_ROWS, no_gradient(), grad, *node.inputs[1:], **node.attrs)[0], None, None


not_differentiable(ROW_STORE, because="a new store depends on its capacity alone")
not_differentiable(SIZE, because="its result is an integer")
