"""The array namespace of kernels on CUDA devices: CuPy, and the little that it lacks or does otherwise than NumPy.

Kernels get CuPy's arrays, but counters and predicates, which the host keeps, as NumPy scalars. CuPy's ufuncs take both;
its other functions take arrays alone, so scalars become arrays of rank 0 first, filled by a kernel instead of a copy.

Known to differ from NumPy all the same: positions out of range wrap around instead of raising; of several values
assigned to one element any may stay; sums are added up in another order; the variance of no more elements than are
corrected for is NaN, never infinite.
"""

from __future__ import annotations

import math
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.devices.values import StoreNamespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.devices.cuda.graphs.products import Products
    from asyncflow.devices.cuda.kernels import KernelLaunches
    from asyncflow.devices.memory import Requests
    from asyncflow.devices.protocol import Placed
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray
    from asyncflow.values import Array, Kernel, Value

_ARRAY_FUNCTIONS = (
    "argmax argmin broadcast_arrays broadcast_to einsum expand_dims flip imag real repeat roll searchsorted "
    "tensordot tile"
)
"""Functions that take arrays alone in CuPy, and scalars too in NumPy."""

_MOST_JOINED = 8
"""For more arrays CuPy copies a table of their addresses from the host: it would wait, and cannot be captured."""

_MOST_STACKED = 64
"""Maximum number of arrays that one kernel of this module stacks, which takes their addresses as numbers."""

_STACKING = (
    ", ".join(("int64 row_size", *(f"uint64 row_{k}" for k in range(_MOST_STACKED)))),
    "T y",
    "unsigned long long row = 0;\nswitch (i / row_size) {\n"
    + "\n".join(f"case {k}: row = row_{k}; break;" for k in range(_MOST_STACKED))
    + "\n}\ny = reinterpret_cast<const T*>(row)[i % row_size];",
    "asyncflow_stack",
)
"""The `ElementwiseKernel` that does."""

_OF_SHAPES = ("empty", "full", "ones", "zeros")
"""Functions for which CuPy counts bytes modulo 2**64, so that kernels write where there is no memory."""

_MOST_ELEMENTS = 1 << 56

_OF_TRUTHS = ("logical_and", "logical_not", "logical_or", "logical_xor")
"""Functions that CuPy does not define for complex numbers."""

_OF_CHOICES = ("tril", "triu", "where")
"""Functions that give float32 for bfloat16 in CuPy."""


class CudaNamespace(ModuleType):
    """The namespace that kernels of CUDA devices get as `xp`: CuPy's names, except the ones in its own dictionary.

    Args:
        cupy: the module.
        upload: copies a NumPy array into the device's memory, in the order of the stream that is the current one;
            None takes CuPy's own way, which may block while it makes its first buffers.
        holder: a `CudaHolder`, which keeps values of variables in the device's memory; None for a namespace without
            variables.
    """

    def __init__(self, cupy: Cupy, upload: Callable[[Array], CupyArray] | None = None, holder: object = None) -> None:
        super().__init__("asyncflow.cuda", "CuPy as kernels use it.")
        self._cupy = cupy
        self.holder = holder
        self.products: Products | None = None
        """Makes products of matrices in place of CuPy."""
        self.launches: KernelLaunches | None = None
        """Launches kernels of our own; None without `cuda.bindings`, and then CuPy launches them."""
        self._upload = cupy.asarray if upload is None else upload
        self.array = self._array
        self.asarray = self._as_array
        self.concatenate = self._concatenate
        self.matmul = self._matmul
        self.meshgrid = self._meshgrid
        self.stack = self._stack
        for name in _ARRAY_FUNCTIONS.split():
            setattr(self, name, self._of_arrays(getattr(cupy, name)))
        for name in _OF_SHAPES:
            setattr(self, name, self._of_shapes(getattr(cupy, name)))
        for name in _OF_TRUTHS:
            setattr(self, name, self._of_truths(getattr(cupy, name)))
        for name in _OF_CHOICES:
            setattr(self, name, self._of_choices(getattr(cupy, name)))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cupy, name)
        # Cached, so that later look-ups do not come here.
        setattr(self, name, found)
        return found

    def _as_array(self, value: Value) -> CupyArray:
        """Return `value` itself if it is CuPy's; a copy in the device's memory if it is a NumPy array or scalar."""
        if isinstance(value, np.generic):
            return self._cupy.full((), value, dtype=value.dtype)
        return self._upload(value) if isinstance(value, np.ndarray) else value

    def _array(self, value: Value) -> CupyArray:
        """A copy of `value`."""
        return value.copy() if isinstance(value, self._cupy.ndarray) else self._as_array(value)

    def _concatenate(self, arrays: Sequence[CupyArray], axis: int | None = 0, out: CupyArray = None) -> CupyArray:
        arrays = [self._as_array(array) for array in arrays]
        while len(arrays) > _MOST_JOINED:
            pieces = [arrays[first : first + _MOST_JOINED] for first in range(0, len(arrays), _MOST_JOINED)]
            arrays = [self._cupy.concatenate(piece, axis=axis) for piece in pieces]
        return self._cupy.concatenate(arrays, axis=axis, out=out)

    def _stack(self, arrays: Sequence[CupyArray], axis: int = 0) -> CupyArray:
        arrays = [self._as_array(array) for array in arrays]
        if axis == 0 and len(arrays) > _MOST_JOINED and _are_alike(arrays):
            return self._stacked(arrays)
        return self._concatenate([self._cupy.expand_dims(array, axis) for array in arrays], axis)

    @cached_property
    def _stacking(self) -> Kernel:
        kernel: Kernel = self._cupy.ElementwiseKernel(*_STACKING)
        return kernel

    def _stacked(self, arrays: Sequence[CupyArray]) -> CupyArray:
        """Many arrays of one dtype and shape, in C order, along a new first axis; a launch for each 64 of them."""
        first = arrays[0]
        stacked = self._cupy.empty((len(arrays), *first.shape), first.dtype)
        addresses = np.array([array.data.ptr for array in arrays], np.uint64)
        for begin in range(0, len(arrays), _MOST_STACKED):
            piece = np.resize(addresses[begin : begin + _MOST_STACKED], _MOST_STACKED)
            self._stacking(np.int64(first.size), *piece, stacked[begin : begin + _MOST_STACKED])
        return stacked

    def _matmul(self, x1: CupyArray, x2: CupyArray, **options: Any) -> CupyArray:
        found = None if self.products is None else self.products.matmul(x1, x2, **options)
        if found is not None:
            return found
        # cuBLAS multiplies bfloat16 matrices, but CuPy has no kernel for stacks of them.
        if max(x1.ndim, x2.ndim) > 2 and x1.dtype.name == x2.dtype.name == "bfloat16":
            product = self._cupy.matmul(x1.astype(np.float32), x2.astype(np.float32), **options)
            return product.astype(x1.dtype)
        return self._cupy.matmul(x1, x2, **options)

    _matmul.takes_out = True  # type: ignore[attr-defined]

    def _meshgrid(self, *vectors: Any, indexing: str) -> CupyArray:
        return self._cupy.meshgrid(*[self._as_array(vector).reshape(-1) for vector in vectors], indexing=indexing)

    def _of_arrays(self, function: Kernel) -> Kernel:
        def call(*args: Value, **options: Any) -> CupyArray:
            return function(*[self._given(value) for value in args], **options)

        return call

    def _given(self, value: Value) -> CupyArray:
        if isinstance(value, tuple | list):
            return type(value)([self._as_array(item) for item in value])
        return self._as_array(value)

    def _of_shapes(self, function: Kernel) -> Kernel:
        def call(shape: int | Sequence[int], *args: Value, **options: Value) -> CupyArray:
            if math.prod(map(float, shape if isinstance(shape, tuple | list) else (shape,))) > _MOST_ELEMENTS:
                raise ValueError(f"an array of shape {shape} is larger than any memory")
            return function(shape, *args, **options)

        return call

    def _of_truths(self, function: Kernel) -> Kernel:
        def call(*args: Placed) -> CupyArray:
            return function(*[value != 0 if value.dtype.kind == "c" else value for value in args])

        return call

    def _of_choices(self, function: Kernel) -> Kernel:
        def call(*args: Placed, **options: Any) -> CupyArray:
            dtype = args[-1].dtype
            return function(*args, **options).astype(dtype, copy=False)

        return call


class CountedNamespace(StoreNamespace):
    """The same for stores that launch kernels of their own: the device counts these.

    Args:
        xp: the namespace.
        requests: the counts of the device.
    """

    def __init__(self, xp: ModuleType, requests: Requests) -> None:
        super().__init__("asyncflow.cuda.stores", "CuPy as stores use it.", xp)
        self._requests = requests

    def _noting(self, function: Kernel) -> Kernel:
        def call(*args: Value, **options: Value) -> object:
            result: object = function(*args, **options)
            if getattr(result, "base", self) is None:  # not a view: a kernel has run
                self._requests.kernels += 1
            return result

        return call


def _are_alike(arrays: Sequence[CupyArray]) -> bool:
    first = arrays[0]
    kind = first.dtype, first.shape
    return all(array.flags.c_contiguous and (array.dtype, array.shape) == kind for array in arrays)
