"""cuBLAS's products, as ctypes calls them, on memory of the fake and in the order of its streams."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.fake_cupy.memory_map import Operand

if TYPE_CHECKING:
    from tests.fake_cupy.module import FakeCupy

DTYPES = {2: "float16", 14: ml_dtypes.bfloat16, 0: "float32", 1: "float64", 4: "complex64", 5: "complex128"}
SUMS = {68: {"float16", "bfloat16", "float32", "complex64"}, 70: {"float64", "complex128"}}
INVALID_VALUE, NOT_SUPPORTED = 7, 15


class FakeCublas:
    """The library; its functions give a status."""

    def __init__(self, fake: FakeCupy) -> None:
        self._fake = fake
        self._stream = 0
        self.workspace = 0
        self.handles = 0
        self.calls = 0

    def cublasCreate_v2(self, handle: Any) -> int:
        self.handles += 1
        handle._obj.value = self.handles
        return 0

    def cublasDestroy_v2(self, handle: ctypes.c_void_p) -> int:
        self.handles -= 1
        return 0

    def cublasSetStream_v2(self, handle: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        self._stream = stream.value or 0
        self.workspace = 0
        return 0

    def cublasSetWorkspace_v2(self, handle: ctypes.c_void_p, pointer: ctypes.c_void_p, nbytes: ctypes.c_size_t) -> int:
        assert self._fake.cuda.platform.memory.is_live(pointer.value or 0, nbytes.value), (
            "the workspace is nobody's memory"
        )
        self.workspace = pointer.value or 0
        return 0 if self.workspace % 256 == 0 else INVALID_VALUE

    def cublasGemmEx(self, *arguments: Any) -> int:
        _, *sizes, one, a, a_type, lda, b, b_type, ldb, zero, c, c_type, ldc, sums, _ = arguments
        return self._multiply(
            sizes, (one, zero), [(a, a_type, lda, 0), (b, b_type, ldb, 0), (c, c_type, ldc, 0)], 1, sums
        )

    def cublasGemmStridedBatchedEx(self, *arguments: Any) -> int:
        _, *sizes, one, a, a_type, lda, a_step, b, b_type, ldb, b_step, zero, c, c_type, ldc, c_step, n, sums, _ = (
            arguments
        )
        steps = [step.value for step in (a_step, b_step, c_step)]
        matrices = [(a, a_type, lda, steps[0]), (b, b_type, ldb, steps[1]), (c, c_type, ldc, steps[2])]
        return self._multiply(sizes, (one, zero), matrices, n, sums)

    def _multiply(self, sizes: Any, factors: Any, matrices: Any, count: int, sums: int) -> int:
        is_first, is_second, m, n, k = sizes
        (code,) = {matrix[1] for matrix in matrices}
        dtype = np.dtype(DTYPES[code])
        if dtype.name not in SUMS[sums]:
            return NOT_SUPPORTED
        assert self.workspace, "cuBLAS would take memory for itself, which a graph cannot hold"
        assert [_numbers(factor, dtype) for factor in factors] == [1, 0]
        shapes = (k, m) if is_first else (m, k), (n, k) if is_second else (k, n), (m, n)
        found = [self._operand(x, dtype, shape, count) for x, shape in zip(matrices, shapes, strict=True)]
        operands = [operand for operand in found if operand is not None]
        if len(operands) < len(found):
            return INVALID_VALUE
        platform = self._fake.cuda.platform

        def run() -> None:
            x, y, result = map(platform.memory.view, operands)
            x, y = x.swapaxes(-1, -2) if is_first else x, y.swapaxes(-1, -2) if is_second else y
            if dtype.itemsize == 2:
                x, y = x.astype("float32"), y.astype("float32")
            with np.errstate(all="ignore"):
                # Row after row, as launches multiply: on processors without AVX-512, the transposed product rounds
                # differently.
                product = np.matmul(y.swapaxes(-1, -2), x.swapaxes(-1, -2)).swapaxes(-1, -2)
                np.copyto(result, product, casting="unsafe")

        device = platform.runtime.getDevice()
        platform.engine.enter("launchKernel", device)
        platform.engine.give(
            platform.engine.queue(self._stream, device), "gemm", run, addresses=[x.ptr for x in operands]
        )
        self.calls += 1
        return 0

    def _operand(self, matrix: Any, dtype: np.dtype[Any], shape: tuple[int, int], count: int) -> Operand | None:
        """Matrices, column after column."""
        pointer, _, leading, step = matrix
        if leading < shape[0]:
            return None
        device, nbytes = self._fake.cuda.platform.runtime.getDevice(), dtype.itemsize
        return Operand(device, pointer.value, dtype, (count, *shape), (step * nbytes, nbytes, leading * nbytes))


def _numbers(factor: Any, dtype: np.dtype[Any]) -> complex:
    """Return a factor in the type of the sums."""
    single = np.dtype("complex64" if dtype.kind == "c" else "float32")
    is_double = dtype.name in ("float64", "complex128")
    return complex(np.frombuffer(factor._obj, np.result_type(single, np.float64) if is_double else single)[0])
