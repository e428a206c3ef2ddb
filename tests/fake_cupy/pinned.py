"""`cupy.cuda.pinned_memory`: pinned host memory with a buffer interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fake_cupy.runtime import Runtime


class PinnedMemory:
    """Memory from `cudaHostAlloc`."""

    _runtime: Runtime

    def __init__(self, size: int, flags: int = 0) -> None:
        self.size = size
        self.ptr = 0
        if size > 0:
            self.ptr = self._runtime.hostAlloc(size, flags)

    def __del__(self) -> None:
        if self.ptr:
            self._runtime.freeHost(self.ptr)

    def __int__(self) -> int:
        return self.ptr


class PinnedMemoryPointer(np.ndarray):
    """Bytes of a `PinnedMemory`; an array, because Python 3.11 has no other way to offer a buffer."""

    mem: PinnedMemory
    ptr: int


class PinnedMemoryPool:
    """Blocks of powers of two; a freed block may be handed out again at once, with no event."""

    _memory: type[PinnedMemory]

    def __init__(self, host: Any) -> None:
        self._host = host
        self._free: dict[int, list[PinnedMemory]] = {}

    def malloc(self, size: int) -> PinnedMemoryPointer:
        rounded = 1 << max(size - 1, 511).bit_length()
        free = self._free.setdefault(rounded, [])
        block = free.pop() if free else self._memory(rounded, 1)
        pointer: PinnedMemoryPointer = self._host(block.ptr)[:size].view(PinnedMemoryPointer)
        pointer.mem, pointer.ptr = _Lent(block, free), block.ptr  # type: ignore[assignment]
        return pointer

    def free_all_blocks(self) -> None:
        self._free.clear()

    def n_free_blocks(self) -> int:
        return sum(map(len, self._free.values()))


class _Lent:
    """A block in use; back to its pool when it is dropped."""

    def __init__(self, block: PinnedMemory, free: list[PinnedMemory]) -> None:
        self._block, self._free = block, free
        self.ptr, self.size = block.ptr, block.size

    def __del__(self) -> None:
        self._free.append(self._block)


def pinned_module(runtime: Runtime, host: Any) -> SimpleNamespace:
    """`cupy.cuda.pinned_memory` of one fake; ``host(ptr)`` is the NumPy view of a pinned allocation."""
    memory = type("PinnedMemory", (PinnedMemory,), {"_runtime": runtime})
    pool_class = type("PinnedMemoryPool", (PinnedMemoryPool,), {"_memory": memory})
    pool = pool_class(host)
    return SimpleNamespace(
        PinnedMemory=memory,
        PinnedMemoryPointer=PinnedMemoryPointer,
        PinnedMemoryPool=pool_class,
        alloc_pinned_memory=pool.malloc,
        default_pool=pool,
    )
