"""Handles: Python's views of tensors that carry a store, of which each write gives a new one."""

from __future__ import annotations

from typing import Any, Self
from weakref import ref

from asyncflow.errors import SourceLocation, user_location, warn_user
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values.dtypes import int64


class Handle:
    """The base of `TensorArray` and `RowStore`: knows whether the results of writes are used."""

    __slots__ = ("__weakref__", "_handle", "_is_used", "_writes")

    _dropped: str
    """Warning about a write whose result is dropped, with a placeholder for the location."""

    # `_is_used` is a list of one flag, which outlives the handle: True once the handle was taken. `_writes` has, for
    # each write to this store, the new handle, its flag and the line, for warnings of dropped writes.
    _handle: Tensor
    _is_used: list[bool]
    _writes: list[tuple[ref[Self], list[bool], SourceLocation]]

    def _carry(self, handle: Tensor) -> None:
        self._handle = handle
        self._is_used, self._writes = [False], []

    @property
    def handle(self) -> Tensor:
        """The tensor that carries the store."""
        self._is_used[0] = True
        return self._handle

    def _note_write(self, written: Self) -> None:
        self._writes.append((ref(written), written._is_used, user_location()))

    def _warn_of_dropped_writes(self) -> None:
        """Warn of each write to this handle, which is used now, whose result is gone unused."""
        for written, is_used, location in self._writes:
            if written() is None and not is_used[0]:
                warn_user(self._dropped.format(location))
        self._writes = [each for each in self._writes if each[0]() is not None]

    def _vector(self, values: TensorLike) -> Tensor:
        """Integers as a tensor; NumPy would make floats of an empty list."""
        with graph_for(self.handle):
            return as_tensor(values, int64 if isinstance(values, list | tuple) and not values else None)

    def _apply(self, op: Op, *inputs: TensorLike, name: str | None, **attrs: Any) -> tuple[Tensor, ...]:
        self._warn_of_dropped_writes()
        with graph_for(self.handle):
            return apply(op, self.handle, *inputs, name=name, **attrs)
