"""Memory that captured graphs share, since they never run at the same time.

A graph is bound to addresses, so its memory stays as long as the graph does. All graphs of a device are launched on one
compute stream, one after the other. What one of them only needs while it runs, another one may use as well: the graphs
of a region for several shapes, or for several addresses of variables, take about as much memory as the largest of them.

Memory comes in *blocks* of the device's pool. Each graph keeps the blocks that it has arrays in, and a block goes with
the last of these graphs. An array that outlasts a launch is in a block that no earlier graph had
(`GraphMemory.has_alone`).
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from asyncflow.devices.cuda.memory import ALLOCATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncflow.devices.cuda.memory import CudaPool
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw
    from asyncflow.streams.cuda.stream import CudaStream

SMALL_BYTES = 4096
"""Bytes of the largest array for which no larger block is split: most results of a graph are that small."""


class GraphBlock:
    """A piece of the device's memory, parts of which are given out to arrays of graphs.

    Attributes:
        pointer: CuPy's, to all of it.
        size: in bytes.
        free: offsets and sizes of the free parts, in order; neighbours are merged.
        freed: parts whose arrays have gone, on whichever thread, since `free` was brought up to date.
        users: number of graphs that have had parts of it.
    """

    __slots__ = ("__weakref__", "free", "freed", "pointer", "size", "users")

    def __init__(self, pointer: Raw, size: int) -> None:
        self.pointer = pointer
        self.size = size
        self.users = 0
        self.free: list[tuple[int, int]] = [(0, size)]
        self.freed: deque[tuple[int, int]] = deque()

    def settle(self) -> None:
        """Bring `free` up to date."""
        if not self.freed:
            return
        while self.freed:
            self.free.append(self.freed.popleft())
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(self.free):
            if merged and sum(merged[-1]) == offset:
                offset, size = merged[-1][0], merged.pop()[1] + size
            merged.append((offset, size))
        self.free = merged

    def take(self, part: tuple[int, int], size: int) -> int:
        """Take the first `size` bytes of a free part, and return their offset."""
        offset, room = part
        index = self.free.index(part)
        self.free[index : index + 1] = [(offset + size, room - size)] if room > size else []
        return offset


class Part:
    """The part of a block that an array has, free again when the array goes."""

    __slots__ = ("_offset", "_size", "block")

    def __init__(self, block: GraphBlock, offset: int, size: int) -> None:
        self.block = block
        self._offset, self._size = offset, size

    def __del__(self) -> None:
        self.block.freed.append((self._offset, self._size))


class SharedBlocks:
    """The blocks that graphs of one compute stream share; callers hold `capturing`."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: list[ref[GraphBlock]] = []

    def take(self, size: int) -> tuple[GraphBlock, int] | None:
        """Take the smallest free part that is large enough; return its block and its offset, None if there is none."""
        most = SMALL_BYTES if size <= SMALL_BYTES else None
        found: tuple[int, GraphBlock, tuple[int, int]] | None = None
        for block in self.alive():
            if most is not None and block.size > most:
                continue
            block.settle()
            for part in block.free:
                if part[1] >= size and (found is None or part[1] < found[0]):
                    found = part[1], block, part
        return None if found is None else (found[1], found[1].take(found[2], size))

    def alive(self) -> list[GraphBlock]:
        """Return the blocks that some graph has, and forget the others."""
        blocks = [block for each in self._blocks if (block := each()) is not None]
        self._blocks = [ref(block) for block in blocks]
        return blocks

    def add(self, block: GraphBlock) -> None:
        """Share a block."""
        self._blocks.append(ref(block))


def blocks_of(stream: CudaStream) -> SharedBlocks:
    """Return the blocks that graphs of a compute stream share."""
    return _found.setdefault(stream, SharedBlocks())


_found: WeakKeyDictionary[CudaStream, SharedBlocks] = WeakKeyDictionary()


class GraphMemory:
    """The memory of one graph: parts of shared blocks, and blocks of its own.

    Allocations belong to the stream that is active, which is that of `shared`.
    """

    __slots__ = ("_cupy", "_is_alone", "_label", "_pool", "_shared", "_used")

    def __init__(self, cupy: Cupy, pool: CudaPool, shared: SharedBlocks, label: str) -> None:
        self._cupy = cupy
        self._pool = pool
        self._shared = shared
        self._label = label
        self._used: set[GraphBlock] = set()  # blocks with addresses of its temporaries
        self._is_alone = False

    def malloc(self, nbytes: int) -> Raw:
        """A CuPy ``MemoryPointer`` to ``nbytes`` of device memory.

        Raises:
            MemoryLimitExceeded: as of `CudaPool.malloc`.
        """
        if not nbytes:
            return self._pool.malloc(0)
        size = -(-nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        found = None if self._is_alone else self._shared.take(size)
        if found is None:
            block = GraphBlock(self._pool.malloc(size, self._label), size)
            found = block, block.take((0, size), size)
            if not self._is_alone:
                self._shared.add(block)
        block, offset = found
        if block not in self._used:
            self._used.add(block)
            block.users += 1
        memory, pointer = self._cupy.cuda.memory, block.pointer
        owned = memory.UnownedMemory(pointer.ptr + offset, size, Part(block, offset, size), self._pool.physical)
        return memory.MemoryPointer(owned, 0)

    @property
    def held(self) -> dict[object, int]:
        """Bytes of each block that the graph uses."""
        return {block: block.size for block in self._used}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block of code whose allocations get blocks that no other graph uses."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def has_alone(self, array: CupyArray) -> bool:
        """Return True if no other graph writes where an array of this one is, and if its block is not much larger.

        Other graphs get no part of an array that exists. But a graph that was captured before may have had that part.
        """
        owner = getattr(array.data.mem, "_owner", None)
        if type(owner) is not Part or owner.block.users > 1:
            return False
        return 2 * array.nbytes >= owner.block.size or owner.block.size == ALLOCATION_BYTES
