"""The memory of the fake's devices and its pinned host memory, by address.

Addresses are real ones, of NumPy buffers: a copy is a `memmove`, and a kernel is NumPy on views of these buffers.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.fake_cupy.errors import CUDARuntimeError, DeviceFault

ALIGNMENT = 512
POISON = 0xDD
"""Byte that fills freed memory, on the stream that may reuse it."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The place of an array. It holds no reference to the memory, like an argument of a kernel."""

    device: int
    ptr: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def bounds(self) -> tuple[int, int]:
        """The first address, and the one after the last."""
        low = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True) if step < 0)
        high = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True) if step > 0)
        return self.ptr + low, self.ptr + high + self.dtype.itemsize


def pages(nbytes: int) -> tuple[mmap.mmap, np.ndarray]:
    """Zeroed memory of its own, and its bytes."""
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return made, np.frombuffer(made, np.uint8)


class Region:
    """The memory of one device: a buffer, and what `cudaMalloc` has handed out of it."""

    def __init__(self, nbytes: int) -> None:
        self._pages, self._buffer = pages(nbytes + ALIGNMENT)
        self.base = -(-self._buffer.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.offset = self.base - self._buffer.ctypes.data
        self.nbytes = nbytes
        self.starts: list[int] = []
        self.ends: list[int] = []

    @property
    def bytes(self) -> np.ndarray:
        return self._buffer

    @property
    def free_bytes(self) -> int:
        return self.nbytes - sum(self.ends) + sum(self.starts)

    def holds(self, ptr: int) -> bool:
        return self.base <= ptr < self.base + self.nbytes

    def allocate(self, nbytes: int) -> int | None:
        """First fit."""
        nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        gaps = zip([self.base, *self.ends], [*self.starts, self.base + self.nbytes], strict=True)
        for index, (start, end) in enumerate(gaps):
            if end - start >= nbytes:
                self.starts.insert(index, start)
                self.ends.insert(index, start + nbytes)
                self.fill(start, nbytes)
                return start
        return None

    def fill(self, ptr: int, nbytes: int, value: int = POISON) -> None:
        start = ptr - self.base + self.offset
        self._buffer[start : start + nbytes] = value

    def free(self, ptr: int) -> None:
        index = bisect.bisect_left(self.starts, ptr)
        if index == len(self.starts) or self.starts[index] != ptr:
            raise CUDARuntimeError(1)
        self.fill(ptr, self.ends[index] - ptr)
        del self.starts[index], self.ends[index]

    def give_back(self) -> None:
        """Give the memory back to the machine; later reads see zeros."""
        self._pages.madvise(mmap.MADV_DONTNEED)

    def live(self, low: int, high: int) -> bool:
        """Return True if one allocation holds all of ``[low, high)``."""
        index = bisect.bisect_right(self.starts, low) - 1
        return index >= 0 and high <= self.ends[index]


class MemoryMap:
    """Device and pinned memory of one fake."""

    def __init__(self, devices: int, nbytes: int) -> None:
        self.regions = [Region(nbytes) for _ in range(devices)]
        self.pinned: dict[int, int] = {}
        # Re-entrant, because a destructor that frees may run inside.
        self._lock = threading.RLock()
        # Freed buffers are kept, so that a view of one reads poison instead of ending the process.
        self._host: dict[int, tuple[mmap.mmap, np.ndarray]] = {}

    def malloc(self, device: int, nbytes: int) -> int:
        with self._lock:
            ptr = self.regions[device].allocate(nbytes)
        if ptr is None:
            raise CUDARuntimeError(2)
        return ptr

    def free(self, ptr: int) -> None:
        device = self.device_of(ptr)
        if device is None:
            raise CUDARuntimeError(1)
        with self._lock:
            self.regions[device].free(ptr)

    def device_of(self, ptr: int) -> int | None:
        """The device whose memory `ptr` is in; None for host memory."""
        return next((index for index, region in enumerate(self.regions) if region.holds(ptr)), None)

    def host_alloc(self, nbytes: int) -> int:
        made, buffer = pages(max(nbytes, 1))
        buffer[:] = POISON
        ptr = int(buffer.ctypes.data)
        with self._lock:
            self._host[ptr] = made, buffer
            self.pinned[ptr] = nbytes
        return ptr

    def host(self, ptr: int) -> np.ndarray:
        """The bytes of a pinned allocation."""
        return self._host[ptr][1]

    def host_free(self, ptr: int) -> None:
        with self._lock:
            if self.pinned.pop(ptr, None) is None:
                raise CUDARuntimeError(1)
            self._host[ptr][1][:] = POISON

    def give_back(self) -> None:
        """Give all memory back to the machine: memory kept for each stand-in of the process must not add up."""
        with self._lock:
            for region in self.regions:
                region.give_back()
            for made, _ in self._host.values():
                made.madvise(mmap.MADV_DONTNEED)

    def is_pinned(self, ptr: int, nbytes: int) -> bool:
        with self._lock:
            return any(start <= ptr and ptr + nbytes <= start + size for start, size in self.pinned.items())

    def allocation(self, device: int, ptr: int) -> tuple[int, int] | None:
        """Return the bounds of the allocation of `cudaMalloc` around an address; None without any."""
        region = self.regions[device]
        with self._lock:
            index = bisect.bisect_right(region.starts, ptr) - 1
            is_inside = index >= 0 and ptr < region.ends[index]
            return (region.starts[index], region.ends[index]) if is_inside else None

    def is_live(self, ptr: int, nbytes: int) -> bool:
        """Return True if the device may touch these bytes."""
        device = self.device_of(ptr)
        if device is None:
            return self.is_pinned(ptr, nbytes)
        with self._lock:
            return self.regions[device].live(ptr, ptr + nbytes)

    # What follows runs on the GPU thread.

    def view(self, operand: Operand) -> np.ndarray:
        """The array's memory as NumPy sees it.

        Raises:
            DeviceFault: some of it is not allocated.
        """
        if operand.size == 0:
            return np.empty(operand.shape, operand.dtype)
        region = self.regions[operand.device]
        low, high = operand.bounds()
        with self._lock:
            live = region.live(low, high)
        if not live:
            raise DeviceFault(700)
        start = operand.ptr - region.base + region.offset
        return np.ndarray(operand.shape, operand.dtype, region.bytes, start, operand.strides)

    def copy(self, target: int, source: int, nbytes: int, *, pageable: bool = False) -> None:
        """Copy bytes; `pageable` says that the target is plain host memory, which the caller holds."""
        if not ((pageable or self.is_live(target, nbytes)) and self.is_live(source, nbytes)):
            raise DeviceFault(700)
        ctypes.memmove(target, source, nbytes)

    def fill(self, target: int, value: int, nbytes: int) -> None:
        if not self.is_live(target, nbytes):
            raise DeviceFault(700)
        ctypes.memset(target, value, nbytes)
