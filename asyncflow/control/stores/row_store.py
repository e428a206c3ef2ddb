"""`RowStore`: rows of one shape, appended any number at a time and read by number, as loops over levels of a tree do.

The handle is Python's view of one VARIANT scalar, whose value is an `asyncflow.control.stores.row_block.RowState`.
Nothing here has an effect, so stores need no ordering of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NoReturn, Self

import numpy as np

from asyncflow.control.stores.handles import Handle
from asyncflow.control.stores.row_block import RowBlock, RowKind, RowState
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import KERNELS, METADATA, NEW, NEW_EACH, READS_STORE, define
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, DType, DTypeLike, as_dtype, dtype_name, int64, string, uint64
from asyncflow.graph.values.shapes import ShapeLike, as_shape, format_shape, is_compatible, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.known_values import KnownValues, assumed, conclusion, default_value
from asyncflow.ops.cost import free, moving
from asyncflow.values import Kernel, Namespace

_HANDLE = Spec(VARIANT, ())


def _check_store(store: Spec) -> None:
    if store.dtype != VARIANT:
        raise DTypeError(f"the first input is the handle of a RowStore; got {store}")


def _check_count(value: Spec, what: str) -> None:
    if value.dtype.kind not in "iu" or value.rank not in (0, None):
        raise DTypeError(f"the {what} of a RowStore is an integer scalar; got {value}")


def _new_spec(capacity: Spec, *, row: Spec) -> Spec:
    _check_count(capacity, "capacity")
    return _HANDLE


def _append_spec(store: Spec, rows: Spec, *, row: Spec) -> Spec:
    _check_store(store)
    expected = Spec(row.dtype, (None, *(row.shape or ())))
    if rows.dtype != row.dtype:
        raise DTypeError(f"rows of this RowStore are {dtype_name(row.dtype)}; got {rows}: convert with af.astype")
    if not is_compatible(rows.shape, expected.shape):
        raise ShapeError(f"append takes rows of shape {format_shape(expected.shape)}; got {format_shape(rows.shape)}")
    return _HANDLE


def _take_spec(store: Spec, indices: Spec, *, row: Spec) -> Spec:
    _check_store(store)
    if indices.dtype.kind not in "iu":
        raise DTypeError(f"take needs integer indices of rows; got {indices}")
    return Spec(row.dtype, None if indices.shape is None else (*indices.shape, *(row.shape or ())))


def _slice_spec(store: Spec, start: Spec, stop: Spec, *, row: Spec, count: int | None) -> Spec:
    _check_store(store)
    _check_count(start, "start")
    _check_count(stop, "stop")
    return Spec(row.dtype, (count, *(row.shape or ())))


def _size_spec(store: Spec) -> Spec:
    _check_store(store)
    return Spec(int64, ())


def kind_of(row: Spec) -> RowKind:
    """The kind of a store of rows of this spec, which is known in full."""
    return RowKind(row.dtype, tuple(extent or 0 for extent in row.shape or ()))


def _new_kernel(xp: Namespace, *, row: Spec) -> Kernel:
    kind = kind_of(row)

    def new(capacity: int) -> RowState:
        if capacity < 0:
            raise ValueError(f"the capacity of a RowStore is not negative; got {capacity}")
        return RowState(RowBlock(xp, kind, int(capacity)), 0)

    return new


# Two stores made alike are not interchangeable: their appended rows must not mix.
ROW_STORE = define("row_store", _new_spec, _new_kernel, conduct=NEW_EACH, flops=free, host_inputs=(0,), traits=KERNELS)
APPEND = define("row_store_append", _append_spec, lambda xp, **attrs: RowState.append, flops=free, traits=NEW)
TAKE = define("row_store_take", _take_spec, lambda xp, **attrs: RowState.take, flops=moving, traits=READS_STORE)
SLICE = define(
    "row_store_slice",
    _slice_spec,
    lambda xp, **attrs: lambda store, start, stop: store.slice(int(start), int(stop)),
    flops=free,
    host_inputs=(1, 2),
    traits=READS_STORE,
)
SIZE = define("row_store_size", _size_spec, lambda xp: lambda store: np.int64(store.size), flops=free, traits=METADATA)


class RowStore(Handle):
    """Rows of one shape, in the order in which they were appended; a value like any other.

    `append` returns the new store and leaves this one as it is; in a loop it costs what the new rows cost, as they are
    written behind the others. A store may be a loop variable, a branch result and part of any nest, and gradients go
    through it: they cost what the rows cost that are read and written, and not what the store does.

    Args:
        dtype: of the rows: numbers or booleans.
        row_shape: of each row, in full.
        capacity: number of rows to make room for; an int or an integer scalar. It is a hint: a store grows, by copying
            its rows to a place twice as large.
        name: of the node.

    Raises (in the run, as the cause of a KernelError):
        IndexError: rows that the store does not have.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     store = af.RowStore("float64", (2,))
    ...     store = store.append([[1.0, 2.0], [3.0, 4.0]])
    ...     store = store.append(store.take([1, 0, 1]))
    ...     store.stack()
    <Tensor row_store_slice:0 float64[?,2]>
    """

    __slots__ = ("_kind",)
    _dropped = (
        "the store that an append at {} gave was dropped, so it has no effect: a RowStore does not change; write "
        "store = store.append(rows)"
    )

    _kind: RowKind

    def __init__(
        self,
        dtype: DTypeLike,
        row_shape: ShapeLike = (),
        capacity: TensorLike | None = None,
        *,
        name: str | None = None,
    ) -> None:
        row = Spec(as_dtype(dtype), as_shape(row_shape))
        if row.dtype in (VARIANT, string):
            raise DTypeError(f"rows of a RowStore are numbers or booleans; got {dtype_name(row.dtype)}")
        if row.shape is None or not is_static(row.shape):
            raise ShapeError(f"the shape of a row is known in full; got {format_shape(row.shape)}")
        tensor = as_tensor(0 if capacity is None else capacity)
        fixed = default_value(tensor)
        if fixed is not None and fixed.shape == () and fixed.dtype.kind in "iu" and fixed < 0:
            raise ShapeError(f"the capacity of a RowStore is not negative; got {fixed}")
        self._kind = kind_of(row)
        self._carry(apply(ROW_STORE, tensor, name=name, row=row)[0])

    @classmethod
    def from_handle(cls, handle: Tensor, kind: RowKind) -> Self:
        """The store that the tensor `handle` carries."""
        store = cls.__new__(cls)
        store._kind = kind
        store._carry(handle)
        return store

    @property
    def kind(self) -> RowKind:
        """Properties that this store shares with the stores appended to it."""
        return self._kind

    @property
    def dtype(self) -> DType:
        """Of the rows."""
        return self._kind.dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of each row."""
        return self._kind.row_shape

    def __repr__(self) -> str:
        return f"<RowStore {self._handle.name} {self._row()}>"

    def __getitem__(self, index: object) -> NoReturn:
        raise GraphError(f"{self!r} has no indexing; use .take(indices) for a copy of rows, .slice(a, b) for a view")

    def __iter__(self) -> NoReturn:
        raise GraphError(f"{self!r} cannot be iterated over; use .take(indices), .slice(a, b) or .stack()")

    def append(self, rows: TensorLike, *, name: str | None = None) -> RowStore:
        """The store with more rows behind the others.

        Args:
            rows: of shape ``[k, *row_shape]``; `k` may be 0, and unknown.
            name: of the node.

        Raises:
            DTypeError, ShapeError: `rows` do not fit `dtype` or `row_shape`.
        """
        with graph_for(self.handle):
            tensor = as_tensor(rows, self.dtype if isinstance(rows, list | tuple) else None)
        handle = self._apply(APPEND, tensor, name=name, row=self._row())[0]
        store = RowStore.from_handle(handle, self._kind)
        self._note_write(store)
        return store

    def take(self, indices: TensorLike, *, name: str | None = None) -> Tensor:
        """The rows at `indices`: integers of any shape, to which that of a row is added.

        On the CPU, an index that is out of range fails; -1 is the last row.
        """
        tensor = self._vector(indices)
        if tensor.dtype == uint64:  # NumPy's `take` refuses it
            tensor = astype(tensor, int64)
        return self._apply(TAKE, tensor, name=name, row=self._row())[0]

    def slice(self, start: TensorLike, stop: TensorLike, *, name: str | None = None) -> Tensor:
        """The rows from `start` up to `stop`, which are counted from the front; a view, so nothing is copied.

        Args:
            start: an int or an integer scalar, at least 0.
            stop: the same, at least `start`, and no more than the store has rows.
            name: of the node.
        """
        with graph_for(self.handle):
            bounds = [as_tensor(start), as_tensor(stop)]
        fixed = [int(value) for value in map(default_value, bounds) if value is not None and not value.shape]
        if len(fixed) == 2 and not 0 <= fixed[0] <= fixed[1]:
            raise ShapeError(f"slice needs 0 <= start <= stop; got {fixed[0]} and {fixed[1]}")
        return self._apply(SLICE, *bounds, name=name, row=self._row(), count=assumed(_COUNT, *bounds))[0]

    def stack(self, *, name: str | None = None) -> Tensor:
        """All rows; a view."""
        return self.slice(0, self.size(), name=name)

    def size(self, *, name: str | None = None) -> Tensor:
        """The number of rows: an int64 scalar, which the host knows."""
        return self._apply(SIZE, name=name)[0]

    def _row(self) -> Spec:
        return Spec(self._kind.dtype, self._kind.row_shape)


_COUNT = "number of rows of a slice"


@conclusion(_COUNT)
def _count(known: KnownValues, *bounds: Tensor) -> int | None:
    values = [int(value) for value in map(known.value, bounds) if value is not None and not value.shape]
    return values[1] - values[0] if len(values) == 2 else None


def _unpack(store: RowStore) -> tuple[tuple[Hashable, ...], tuple[Tensor, ...], RowKind]:
    store._warn_of_dropped_writes()
    return ("handle",), (store.handle,), store.kind


def _pack(kind: Hashable, children: Sequence[Tensor]) -> RowStore:
    assert isinstance(kind, RowKind)
    return RowStore.from_handle(children[0], kind)


nest.register(RowStore, _unpack, _pack)
