"""The array namespace of stores on a simulated card that launch kernels of their own: NumPy, with a note of each call.

Most kernels are one launch each, whose time follows from the op. A store that multiplies many rows at once launches
several, in one firing out of many, and keeps the results (`asyncflow.compiler.batching`). Each function of this
namespace that makes or fills an array notes its cost, and the launcher gives the noted kernels to the stream.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncflow.devices.memory import owner_of
from asyncflow.devices.sim.values import SMALL_BYTES, StandIn, no_data
from asyncflow.devices.values import StoreNamespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.devices.values import DType
    from asyncflow.values import Array, Kernel


class NotedKernel(NamedTuple):
    """A kernel that a store has launched, or an array that it has allocated.

    Attributes:
        flops: operations; None if there is no kernel.
        nbytes: bytes read and written.
        made: the new array; None if the kernel fills an older one.
        filled: the array that it fills.
    """

    flops: float | None
    nbytes: int
    made: Array | None
    filled: Array


class SimNamespace(StoreNamespace):
    """NumPy for the stores of the cards of one simulated machine.

    In a simulation of shapes, arrays of more than 4 KiB have no data here either, and are not computed.

    Attributes:
        noted: the kernels since the launcher has taken them last.
    """

    noted: list[NotedKernel]

    def __init__(self, *, shapes_only: bool) -> None:
        super().__init__("asyncflow.sim", "NumPy as stores of a simulated card use it.", np)
        self.noted = []
        self._shapes_only = shapes_only
        self.add = self._add
        self.concatenate = self._concatenate
        self.copyto = self._copyto
        self.empty = self._empty
        self.matmul = self._matmul
        self.ndarray = np.ndarray
        self.stack = self._stack

    def taken(self) -> list[NotedKernel]:
        """Return the noted kernels, and forget them."""
        noted, self.noted = self.noted, []
        return noted

    def _noting(self, function: Kernel) -> Kernel:
        def call(*args: object, **options: object) -> object:
            result: object = function(*args, **options)
            if not isinstance(result, np.ndarray) or result.base is not None:
                return result  # a number, or a view
            return self._note(float(result.size), self._without_data(result, args), args)

        return call

    def _note(self, flops: float | None, made: Array, operands: Sequence[object] = ()) -> Array:
        read = sum([x.nbytes for x in operands if isinstance(x, np.ndarray)])
        self.noted.append(NotedKernel(flops, read + made.nbytes, made, made))
        return made

    def _has_none(self, shape: Sequence[int], dtype: DType, operands: Sequence[object]) -> bool:
        """Return True if the result of this shape has no data, as no kernel computes it."""
        if not self._shapes_only:
            return False
        return prod(shape) * dtype.itemsize > SMALL_BYTES or any(
            isinstance(x, np.ndarray) and lacks_memory(x) for x in operands
        )

    def _without_data(self, made: Array, operands: Sequence[object]) -> Array:
        if self._has_none(made.shape, made.dtype, operands):
            made = no_data(made.dtype, made.shape)
        return made

    def _empty(self, shape: Sequence[int], dtype: DType) -> Array:
        dtype = np.dtype(dtype)
        return self._note(
            None, no_data(dtype, tuple(shape)) if self._has_none(shape, dtype, ()) else np.empty(shape, dtype)
        )

    def _copyto(self, target: Array, source: Array) -> None:
        if not lacks_memory(target):
            np.copyto(target, source)
        self.noted.append(NotedKernel(0.0, 2 * target.nbytes, None, target))

    def _add(self, x1: Array, x2: Array, out: Array | None = None) -> Array:
        shape, operands = np.broadcast_shapes(x1.shape, x2.shape), (x1, x2)
        has_none = x1.dtype == x2.dtype and self._has_none(shape, x1.dtype, operands)
        if out is None:
            made = no_data(x1.dtype, shape) if has_none else np.add(x1, x2)
            return self._note(float(made.size), made, operands)
        if not has_none:
            np.add(x1, x2, out=out)
        self.noted.append(NotedKernel(float(out.size), x1.nbytes + x2.nbytes + out.nbytes, None, out))
        return out

    def _matmul(self, x1: Array, x2: Array) -> Array:
        flops, operands = 2.0 * x1.size * (x2.shape[-1] if x2.ndim > 1 else 1), (x1, x2)
        if x1.ndim == x2.ndim == 2 and x1.shape[1] == x2.shape[0] and x1.dtype == x2.dtype:
            shape = (x1.shape[0], x2.shape[1])
            if self._has_none(shape, x1.dtype, operands):
                return self._note(flops, no_data(x1.dtype, shape), operands)
        return self._note(flops, self._without_data(np.matmul(x1, x2), operands), operands)

    def _concatenate(self, arrays: Sequence[Array], axis: int | None = 0, out: Array | None = None) -> Array:
        if out is None:
            return self._joined(np.concatenate, arrays, axis)
        if not lacks_memory(out):
            np.concatenate(arrays, axis=axis, out=out)
        self.noted.append(NotedKernel(0.0, 2 * out.nbytes, None, out))
        return out

    def _stack(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        return self._joined(np.stack, arrays, axis)

    def _joined(self, join: Kernel, arrays: Sequence[Array], axis: int | None) -> Array:
        return self._note(0.0, self._without_data(join(arrays, axis=axis), arrays), arrays)


def lacks_memory(array: Array) -> bool:
    """Return True for an array of a simulation of shapes that has no data."""
    return type(owner_of(array)) is StandIn
