"""Products of matrices that a CUDA graph can hold: of cuBLAS, by a handle of our own.

CuPy refuses to call cuBLAS while a stream captures, although cuBLAS allows it where its workspace is given. A device
that captures makes all products here, so that launched products and products of a graph are equal to the bit. Products
that cuBLAS lacks, such as products of integers, are left to CuPy.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from asyncflow.streams.cuda.stream import active

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw

_log = logging.getLogger("asyncflow.devices")

WORKSPACE_NBYTES: Final = 8 << 20
"""For each compute stream, as work on one stream is never computed at once; most products need none."""

_MOST_EXTENT = (1 << 31) - 1
_DEFAULT_ALGORITHM = -1
_NORMAL, _TRANSPOSED = 0, 1


class _Type(NamedTuple):
    """A ``cudaDataType_t``, the ``cublasComputeType_t`` of its sums, and 1 and 0 in the type of the factors."""

    data: int
    sums: int
    one: Raw
    zero: Raw


_SINGLE, _DOUBLE = (ctypes.c_float(1), ctypes.c_float(0)), (ctypes.c_double(1), ctypes.c_double(0))
_TYPES: Final = {
    "float16": _Type(2, 68, *_SINGLE),
    "bfloat16": _Type(14, 68, *_SINGLE),
    "float32": _Type(0, 68, *_SINGLE),
    "float64": _Type(1, 70, *_DOUBLE),
    "complex64": _Type(4, 68, (ctypes.c_float * 2)(1, 0), (ctypes.c_float * 2)(0, 0)),
    "complex128": _Type(5, 70, (ctypes.c_double * 2)(1, 0), (ctypes.c_double * 2)(0, 0)),
}

stand_ins: list[Raw] = []
"""Libraries; as in `asyncflow.devices.cuda.backend`."""


def cublas(cupy: Cupy) -> Raw | None:
    """The library that CuPy uses; None if it is not found."""
    if stand_ins:
        return stand_ins[-1]
    try:
        cupy.cuda.device.get_cublas_handle()  # which loads it
        return ctypes.CDLL(f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}")
    except Exception:  # CuPy then computes products, which are not captured
        _log.info("cuBLAS cannot be called for CUDA graphs", exc_info=True)
        return None


class Products:
    """cuBLAS for one device, which is the current one when this is made; nothing may be captured meanwhile.

    Args:
        cupy: the module.
        library: see `cublas`.
        streams: the CuPy streams that products are made on. Work captured on another stream, such as the body of a
            loop, is launched by the stream that is active meanwhile.
    """

    def __init__(self, cupy: Cupy, library: Raw, streams: Sequence[Raw]) -> None:
        self._cupy = cupy
        self._library = library
        self._lock = Lock()
        self._workspaces: dict[int, int] = {}
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        try:
            for stream in streams:
                self._workspaces[stream.ptr] = cupy.cuda.runtime.malloc(WORKSPACE_NBYTES)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back its memory on the card; no graph with a product may be launched afterwards."""
        self._call("cublasDestroy_v2", self._handle)
        for pointer in self._workspaces.values():
            self._cupy.cuda.runtime.free(pointer)
        self._workspaces.clear()

    def matmul(self, x1: CupyArray, x2: CupyArray, out: CupyArray | None = None) -> CupyArray | None:
        """``cupy.matmul(x1, x2, out=out)``; None if cuBLAS has no such product, or CuPy has an error for it."""
        if x1.dtype != x2.dtype and {x1.dtype.name, x2.dtype.name} <= _TYPES.keys():  # as CuPy does
            wide = np.promote_types(x1.dtype, x2.dtype)
            x1, x2 = x1.astype(wide, copy=False), x2.astype(wide, copy=False)
        kind = _TYPES.get(x1.dtype.name)
        if kind is None or x1.dtype != x2.dtype or not (x1.ndim and x2.ndim):
            return None
        rows, columns = x1.reshape(1, -1) if x1.ndim == 1 else x1, x2.reshape(-1, 1) if x2.ndim == 1 else x2
        if rows.shape[-1] != columns.shape[-2] or max(*rows.shape, *columns.shape) > _MOST_EXTENT:
            return None
        batch = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
        shape = (*batch, *x1.shape[-2:-1], *(x2.shape[-1:] if x2.ndim > 1 else ()))
        made: CupyArray = out
        if out is None or out.dtype != x1.dtype or out.shape != shape or not out.flags.c_contiguous:
            made = self._cupy.empty(shape, x1.dtype)
        if made.size and rows.shape[-1]:
            self._multiply(rows, columns, made.reshape(*batch, rows.shape[-2], columns.shape[-1]), kind)
        else:
            made.fill(0)
        if out is None or made is out:
            return made
        self._cupy.copyto(out, made)
        return out

    def _multiply(self, rows: CupyArray, columns: CupyArray, out: CupyArray, kind: _Type) -> None:
        """``out[...] = rows @ columns``; `out` has no gaps, and nothing is empty."""
        is_one = columns.ndim == 2 and out.size // out.shape[-1] <= _MOST_EXTENT
        if is_one and rows.flags.c_contiguous:  # join rows into one matrix
            rows, out = rows.reshape(-1, rows.shape[-1]), out.reshape(-1, out.shape[-1])
        count, (m, n) = math.prod(out.shape[:-2]), out.shape[-2:]
        left, right = self._operand(rows, out.shape[:-2]), self._operand(columns, out.shape[:-2])
        # In cuBLAS's order of axes each array is its own transpose.
        sizes = right.operation, left.operation, n, m, rows.shape[-1]
        one, zero = (ctypes.byref(factor) for factor in (kind.one, kind.zero))
        with self._lock:
            raw, stream = self._cupy.cuda.get_current_stream().ptr, active.stream
            workspace = ctypes.c_void_p(self._workspaces[raw if stream is None else stream.raw.ptr])
            self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(raw))
            self._call("cublasSetWorkspace_v2", self._handle, workspace, ctypes.c_size_t(WORKSPACE_NBYTES))
            a, b, c = right.matrix(kind), left.matrix(kind), (ctypes.c_void_p(out.data.ptr), kind.data, n)
            how = kind.sums, _DEFAULT_ALGORITHM
            if count == 1:
                self._call("cublasGemmEx", self._handle, *sizes, one, *a, *b, zero, *c, *how)
            else:
                by = [ctypes.c_longlong(step) for step in (right.step, left.step, m * n)]
                matrices = *a, by[0], *b, by[1], zero, *c, by[2], count
                self._call("cublasGemmStridedBatchedEx", self._handle, *sizes, one, *matrices, *how)

    def _operand(self, x: CupyArray, batch: tuple[int, ...]) -> _Operand:
        """Return the matrices of `x` as cuBLAS takes them; a matrix common to the whole batch has step 0."""
        if x.ndim > 2:
            x = self._cupy.broadcast_to(x, (*batch, *x.shape[-2:]))
            if len(batch) > 1:
                x = x.reshape(-1, *x.shape[-2:])
        found = _layout(x)
        if found is None:
            x = self._cupy.ascontiguousarray(x)
            found = _NORMAL, x.shape[-1]
        return _Operand(*found, x, x.strides[0] // x.itemsize if x.ndim > 2 else 0)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} of cuBLAS failed with status {status}")


class _Operand(NamedTuple):
    """An operand of cuBLAS: the matrices of an array, whose rows are its columns.

    Attributes:
        operation: turns them into the matrices to be multiplied.
        leading: elements from column to column.
        array: whose memory it is.
        step: elements from matrix to matrix.
    """

    operation: int
    leading: int
    array: CupyArray
    step: int

    def matrix(self, kind: _Type) -> tuple[object, ...]:
        """As arguments."""
        return ctypes.c_void_p(self.array.data.ptr), kind.data, self.leading


def _layout(x: CupyArray) -> tuple[int, int] | None:
    """The operation and the leading extent of matrices of which one axis has no gaps; None for others."""
    (n_rows, n_columns), (row_step, column_step), nbytes = x.shape[-2:], x.strides[-2:], x.itemsize
    if n_columns == 1:
        column_step = nbytes
    if n_rows == 1:
        row_step = n_columns * nbytes if column_step == nbytes else nbytes
    for operation, inner, outer, least in (
        (_NORMAL, column_step, row_step, n_columns),
        (_TRANSPOSED, row_step, column_step, n_rows),
    ):
        if inner == nbytes and outer % nbytes == 0 and least <= outer // nbytes <= _MOST_EXTENT:
            is_right = x.ndim == 2 or (x.strides[0] >= 0 and x.strides[0] % nbytes == 0)
            return (operation, outer // nbytes) if is_right else None
    return None
