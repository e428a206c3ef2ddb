"""`cupy.cuda.memory`: memory objects, pointers, the pool with an arena a stream, and the current allocator.

As in `cupy/cuda/memory.pyx`: a chunk freed goes back to the arena of the stream it was allocated for at once, with no
event; only work of that stream is ordered after its earlier uses. The fake fills it with poison on that stream.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

from tests.fake_cupy.engine import Engine
from tests.fake_cupy.errors import CUDARuntimeError, OutOfMemoryError
from tests.fake_cupy.memory_map import POISON, MemoryMap
from tests.fake_cupy.runtime import Runtime
from tests.fake_cupy.streams import Device, Stream, ThreadStreams

UNIT = 512
"""Pools hand out multiples of this many bytes."""

Allocator: TypeAlias = "Callable[[int], MemoryPointer]"


class Platform:
    """The needs of memory objects of one fake: its runtime, memory, streams and allocators."""

    def __init__(
        self, engine: Engine, memory: MemoryMap, runtime: Runtime, device: type[Device], streams: ThreadStreams
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.runtime = runtime
        self.device = device
        self.streams = streams
        # Keeps what pools have from the driver out of reach of the cycle collector, which would call the destructors of
        # all of a dead cycle at once. CuPy's memory objects are invisible to the collector.
        self.memories: dict[tuple[int, int], BaseMemory] = {}
        self.allocator: Allocator
        self.pointer: type[MemoryPointer]
        self.thread = threading.local()
        self.pieces = Pieces()
        engine.keeper, engine.is_kept = self.pieces.keeper, self.pieces.is_kept

    def current_stream(self) -> Stream:
        return self.streams.current[self.runtime.getDevice()]

    def current_allocator(self) -> Allocator:
        return getattr(self.thread, "allocator", None) or self.allocator

    def poison(self, device: int, stream: int, ptr: int, nbytes: int) -> None:
        """Spoil freed memory on the stream that may reuse it."""
        memory = self.memory

        def spoil() -> None:
            if memory.is_live(ptr, nbytes):
                memory.fill(ptr, POISON, nbytes)

        capture = self.engine.capture_of(ptr)
        if capture is not None:
            capture.record("poison", spoil)
            return
        # A stream that is gone has no work left that could use the memory.
        with contextlib.suppress(CUDARuntimeError):
            self.engine.give(self.engine.queue(stream, device), "poison", spoil, internal=True)


class Pieces:
    """The pieces that pools have handed out to others than pools, and the memory that pools have."""

    def __init__(self) -> None:
        # Re-entrant, because a destructor may run inside.
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._found: dict[int, tuple[int, int, int]] = {}
        self._pooled: list[tuple[int, int, int]] = []
        self._serial = itertools.count(1)
        self._kept: set[int] = set()

    def add(self, ptr: int, nbytes: int, owner: int) -> None:
        with self._lock:
            bisect.insort(self._starts, ptr)
            serial = next(self._serial)
            self._found[ptr] = nbytes, owner, serial
            self._kept.add(serial)

    def remove(self, ptr: int, owner: int | None = None) -> None:
        """Forget the piece at an address, if it is this owner's; by default whoever has it."""
        with self._lock:
            found = self._found.get(ptr)
            if found is not None and owner in (None, found[1]):
                self._kept.discard(found[2])
                del self._starts[bisect.bisect_left(self._starts, ptr)], self._found[ptr]

    def add_block(self, ptr: int, nbytes: int) -> None:
        """A pool has the memory from now on, which may be a piece of another one's."""
        with self._lock:
            self.remove(ptr)
            serial = next(self._serial)
            self._pooled.append((ptr, nbytes, serial))
            self._kept.add(serial)

    def remove_block(self, ptr: int, nbytes: int) -> None:
        with self._lock:
            # The last one: a pool's block may be all of another one's.
            block = next(block for block in reversed(self._pooled) if block[:2] == (ptr, nbytes))
            self._pooled.remove(block)
            self._kept.discard(block[2])

    def keeper(self, ptr: int) -> int | None:
        """Return the number of what keeps an address in use: the pool that has taken it from another one, or the piece.

        None for memory that is in no pool, or that a pool has and nothing uses.
        """
        with self._lock:
            blocks = [serial for start, nbytes, serial in self._pooled if start <= ptr < start + nbytes]
            bounds = self.bounds(ptr)
            return blocks[-1] if len(blocks) > 1 else None if bounds is None else self._found[bounds[0]][2]

    def is_kept(self, keeper: int) -> bool:
        """Return True if it still does."""
        with self._lock:
            return keeper in self._kept

    def bounds(self, ptr: int) -> tuple[int, int] | None:
        """The piece in use in which an address is; None if it is in none."""
        with self._lock:
            index = bisect.bisect_right(self._starts, ptr) - 1
            if index < 0:
                return None
            start = self._starts[index]
            end = start + self._found[start][0]
            return (start, end) if ptr < end else None

    def is_pooled(self, ptr: int) -> bool:
        """Return True if an address is in memory that a pool has."""
        with self._lock:
            return any(start <= ptr < start + nbytes for start, nbytes, _ in self._pooled)


class BaseMemory:
    """Memory of a device. It cannot be weakly referenced, as CuPy's cannot."""

    __slots__ = ("device_id", "ptr", "size")

    _platform: Platform
    ptr: int
    size: int
    device_id: int

    def __int__(self) -> int:
        return self.ptr

    @property
    def device(self) -> Device:
        return self._platform.device(self.device_id)


class Memory(BaseMemory):
    """Memory from `cudaMalloc`."""

    __slots__ = ()

    def __init__(self, size: int) -> None:
        self.size = size
        self.device_id = self._platform.runtime.getDevice()
        self.ptr = 0
        if size > 0:
            self.ptr = self._platform.runtime.malloc(size)

    def __del__(self) -> None:
        if self.ptr:
            self._platform.runtime.free(self.ptr)


class UnownedMemory(BaseMemory):
    """Memory that something else, `owner`, keeps allocated."""

    __slots__ = ("_owner",)

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0:
            if ptr == 0:
                raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
            device_id = self._platform.runtime.pointerGetAttributes(ptr).device
        self.size = size
        self.device_id = device_id
        self.ptr = ptr
        self._owner = owner


class MemoryPointer:
    """A place in a memory object, which it keeps alive."""

    __slots__ = ("device_id", "mem", "ptr")

    _platform: Platform

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        if not isinstance(mem, BaseMemory):
            raise TypeError(f"Argument 'mem' has incorrect type (expected BaseMemory, got {type(mem).__name__})")
        assert mem.ptr != 0 or offset == 0
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    def __int__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<MemoryPointer 0x{self.ptr:x} device={self.device_id} mem={self.mem!r}>"

    def __add__(self, offset: int) -> MemoryPointer:
        return type(self)(self.mem, self.ptr - self.mem.ptr + offset)

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    @property
    def device(self) -> Device:
        return self._platform.device(self.device_id)

    def _async(self, dst: int, src: int, size: int, kind: int, stream: Stream | None) -> None:
        stream = self._platform.current_stream() if stream is None else stream
        if kind != 4 and stream.is_capturing():
            raise RuntimeError("copies between host and device memory are not supported during stream capture")
        if size > 0:
            self._platform.runtime.memcpyAsync(dst, src, size, kind, stream.ptr)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        self._async(self.ptr, src.ptr, size, 4, stream)

    def copy_from_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        self._async(self.ptr, _address(mem), size, 1, stream)

    def copy_to_host_async(self, mem: Any, size: int, stream: Stream | None = None) -> None:
        self._async(_address(mem), self.ptr, size, 2, stream)

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        self._platform.runtime.memcpy(self.ptr, src.ptr, size, 4)

    def copy_from_host(self, mem: Any, size: int) -> None:
        self._platform.runtime.memcpy(self.ptr, _address(mem), size, 1)

    def copy_to_host(self, mem: Any, size: int) -> None:
        self._platform.runtime.memcpy(_address(mem), self.ptr, size, 2)

    def memset_async(self, value: int, size: int, stream: Stream | None = None) -> None:
        stream = self._platform.current_stream() if stream is None else stream
        self._platform.runtime.memsetAsync(self.ptr, value, size, stream.ptr)


def _address(mem: Any) -> int:
    return mem if isinstance(mem, int) else int(mem.value)


class Chunk:
    """A part of a `Memory`; neighbours of the same memory are linked."""

    __slots__ = ("mem", "next", "offset", "prev", "size", "stream")

    def __init__(self, mem: BaseMemory, offset: int, size: int, stream: int) -> None:
        self.mem = mem
        self.offset = offset
        self.size = size
        self.stream = stream
        self.prev: Chunk | None = None
        self.next: Chunk | None = None

    @property
    def ptr(self) -> int:
        return self.mem.ptr + self.offset

    def split(self, size: int) -> Chunk:
        """Keep the first `size` bytes; return the rest."""
        rest = Chunk(self.mem, self.offset + size, self.size - size, self.stream)
        self.size = size
        rest.prev, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.prev = rest
        return rest

    def merge(self, after: Chunk) -> None:
        self.size += after.size
        self.next = after.next
        if self.next is not None:
            self.next.prev = self


class PooledMemory(BaseMemory):
    """A chunk in use; back to its pool when it is dropped."""

    __slots__ = ("_chunk", "_pool")

    def __init__(self, chunk: Chunk, pool: weakref.ref[DevicePool]) -> None:
        self.ptr = chunk.ptr
        self.size = chunk.size
        self.device_id = chunk.mem.device_id
        self._chunk = chunk
        self._pool = pool
        self._platform.pieces.add(self.ptr, self.size, id(chunk))

    def __del__(self) -> None:
        self._platform.pieces.remove(self.ptr, id(self._chunk))
        pool = self._pool()
        if pool is not None:
            pool.free(self._chunk)


class DevicePool:
    """The pool of one device: free chunks in arenas, by the stream they were allocated for."""

    def __init__(self, platform: Platform, device: int, allocator: Allocator) -> None:
        self._platform = platform
        self._device = device
        self._allocator = allocator
        self._pooled: type[PooledMemory] = type(
            "PooledMemory", (PooledMemory,), {"_platform": platform, "__slots__": ()}
        )
        self._lock = threading.Lock()
        self._arenas: dict[int, list[Chunk]] = {}
        # A destructor may run while this thread holds the lock; what it frees waits here.
        self._dropped: deque[Chunk] = deque()
        # How many chunks of each memory are in use.
        self._in_use: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        # One for all, held here: the cycle collector clears a weak reference that dies with a cycle.
        self._self = weakref.ref(self)
        self.total_bytes = 0
        self.limit = 0

    def malloc(self, size: int) -> MemoryPointer:
        size = -(-size // UNIT) * UNIT
        stream = self._platform.current_stream().ptr
        chunk = self._reuse(size, stream)
        if chunk is None:
            chunk = Chunk(self._grow(size), 0, size, stream)
        memory = self._pooled(chunk, self._self)
        active = {stream.ptr for stream in self._platform.streams.stacks[self._device]}
        self._platform.engine.note_allocation(chunk.ptr, active)
        return self._platform.pointer(memory, 0)

    def _reuse(self, size: int, stream: int) -> Chunk | None:
        """The smallest free chunk of the arena that is large enough, cut to size."""
        with self._locked():  # which takes back what was dropped, and finalizes nothing meanwhile
            self._platform.engine.do_spoiling(self._platform.engine.queue(stream, self._device))
            arena = self._arenas.get(stream, [])
            best = min((chunk for chunk in arena if chunk.size >= size), key=lambda chunk: chunk.size, default=None)
            if best is not None:
                arena.remove(best)
                self._in_use[best.mem.ptr] += 1
                if best.size > size:
                    arena.append(best.split(size))
            return best

    def _grow(self, size: int) -> BaseMemory:
        """Return new memory; if there is no room, free blocks of any arena are given back first."""
        for attempt in range(3):
            with contextlib.suppress(CUDARuntimeError, OutOfMemoryError):
                if not self.limit or self.total_bytes + size <= self.limit:
                    memory = self._allocator(size).mem
                    self._platform.pieces.add_block(memory.ptr, size)
                    with self._locked():
                        self._platform.memories[id(self), memory.ptr] = memory
                        self._in_use[memory.ptr] = 1
                        self._sizes[memory.ptr] = size
                        self.total_bytes += size
                    return memory
            if attempt == 1:
                gc.collect()
            self.free_all_blocks()
        # A lost device says so rather than that its memory is full.
        self._platform.engine.check(self._device)
        raise OutOfMemoryError(size, self.total_bytes, self.limit)

    def free(self, chunk: Chunk) -> None:
        self._dropped.append(chunk)
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._dropped:
            chunk = self._dropped.popleft()
            self._in_use[chunk.mem.ptr] -= 1
            self._platform.poison(self._device, chunk.stream, chunk.ptr, chunk.size)
            arena = self._arenas.setdefault(chunk.stream, [])
            if chunk.next is not None and chunk.next in arena:
                arena.remove(chunk.next)
                chunk.merge(chunk.next)
            if chunk.prev is not None and chunk.prev in arena:
                arena.remove(chunk.prev)
                chunk.prev.merge(chunk)
                chunk = chunk.prev
            arena.append(chunk)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # CuPy, which is compiled, makes nothing there that could have the collector finalize what allocates again.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            with self._lock:
                self._take_back()
                yield
        finally:
            if is_collecting:
                gc.enable()
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def free_all_blocks(self, stream: int | None = None) -> None:
        """Give whole blocks back to the device; split blocks stay."""
        freed: list[BaseMemory] = []
        with self._locked():
            for ident, arena in self._arenas.items():
                if stream is None or ident == stream:
                    whole = [chunk for chunk in arena if chunk.prev is None and chunk.next is None]
                    freed += [self._release(chunk.mem.ptr) for chunk in whole]
                    self.total_bytes -= sum(chunk.size for chunk in whole)
                    arena[:] = [chunk for chunk in arena if chunk.prev is not None or chunk.next is not None]
        del freed

    def _release(self, ptr: int) -> BaseMemory:
        del self._in_use[ptr]
        memory = self._platform.memories.pop((id(self), ptr))
        self._platform.pieces.remove_block(ptr, self._sizes.pop(ptr))
        return memory

    def __del__(self) -> None:
        # As in CuPy, what is in use goes, too: whoever holds an array must hold its pool.
        self._take_back()
        for ptr in list(self._in_use):
            self._release(ptr)
        self._arenas.clear()  # finalizers of a cycle may come behind this one

    @property
    def free_bytes(self) -> int:
        with self._locked():
            return sum(chunk.size for arena in self._arenas.values() for chunk in arena)

    @property
    def n_free_blocks(self) -> int:
        with self._locked():
            return sum(map(len, self._arenas.values()))


class MemoryPool:
    """`cupy.cuda.MemoryPool`: one `DevicePool` a device; sizes and limits belong to the current device."""

    _platform: Platform
    _malloc: Allocator

    def __init__(self, allocator: Allocator | None = None) -> None:
        base = type(self)._malloc if allocator is None else allocator
        self._pools = [DevicePool(self._platform, device, base) for device in range(self._platform.engine.devices)]

    def _pool(self) -> DevicePool:
        return self._pools[self._platform.runtime.getDevice()]

    def malloc(self, size: int) -> MemoryPointer:
        return self._pool().malloc(size) if size else type(self)._malloc(0)

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        self._pool().free_all_blocks(None if stream is None else stream.ptr)

    def n_free_blocks(self) -> int:
        return self._pool().n_free_blocks

    def used_bytes(self) -> int:
        pool = self._pool()
        return pool.total_bytes - pool.free_bytes

    def free_bytes(self) -> int:
        return self._pool().free_bytes

    def total_bytes(self) -> int:
        return self._pool().total_bytes

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """The limit of reserved bytes, free ones included; 0 for none."""
        if (size is None) == (fraction is None):
            if size is None:
                size = 0
            else:
                raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}")
            size = int(fraction * self._platform.runtime.memGetInfo()[1])
        assert size is not None
        if size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._pool().limit = size

    def get_limit(self) -> int:
        return self._pool().limit


def memory_module(platform: Platform) -> SimpleNamespace:
    """`cupy.cuda.memory` of one fake."""
    bound: dict[str, Any] = {"_platform": platform, "__slots__": ()}
    memory = type("Memory", (Memory,), bound)
    pointer = type("MemoryPointer", (MemoryPointer,), bound)
    platform.pointer = pointer

    def malloc(size: int) -> MemoryPointer:
        return pointer(memory(size), 0)

    pool = type("MemoryPool", (MemoryPool,), {"_platform": platform, "_malloc": staticmethod(malloc)})

    def alloc(size: int) -> MemoryPointer:
        return platform.current_allocator()(size)

    def set_allocator(allocator: Allocator | None = None) -> None:
        if getattr(platform.thread, "allocator", None) is not None:
            raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
        platform.allocator = malloc if allocator is None else allocator

    @contextlib.contextmanager
    def using_allocator(allocator: Allocator | None = None) -> Iterator[None]:
        previous = getattr(platform.thread, "allocator", None)
        platform.thread.allocator = malloc if allocator is None else allocator
        try:
            yield
        finally:
            platform.thread.allocator = previous

    default = pool()
    platform.allocator = default.malloc
    return SimpleNamespace(
        BaseMemory=BaseMemory,
        Memory=memory,
        UnownedMemory=type("UnownedMemory", (UnownedMemory,), bound),
        MemoryPointer=pointer,
        MemoryPool=pool,
        OutOfMemoryError=OutOfMemoryError,
        CUDARuntimeError=CUDARuntimeError,
        alloc=alloc,
        set_allocator=set_allocator,
        get_allocator=platform.current_allocator,
        using_allocator=using_allocator,
        default_pool=default,
    )
