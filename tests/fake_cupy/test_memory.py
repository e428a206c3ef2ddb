"""Device memory of the fake: the pool, its hazards, allocators, pinned memory and copies."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CUDARuntimeError, OutOfMemoryError, WouldBlockForEverError

MIB = 1 << 20


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2, nbytes=8 * MIB) as fake:
        yield fake


def pinned(cupy: FakeCupy, nbytes: int) -> np.ndarray:
    """A view of pinned memory, as asyncflow makes one."""
    ptr = cupy.cuda.runtime.hostAlloc(nbytes, cupy.cuda.runtime.hostAllocPortable)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))


def test_a_pool_splits_merges_and_reuses_without_asking_the_driver(cupy: FakeCupy) -> None:
    pool = cupy.cuda.MemoryPool()
    slab = pool.malloc(4096)
    start = slab.ptr
    del slab
    assert (pool.used_bytes(), pool.free_bytes(), pool.total_bytes(), pool.n_free_blocks()) == (0, 4096, 4096, 1)
    first, second = pool.malloc(1), pool.malloc(1025)
    assert (first.ptr, first.mem.size, second.ptr, second.mem.size) == (start, 512, start + 512, 1536)
    assert (pool.used_bytes(), pool.n_free_blocks()) == (2048, 1)
    del first, second
    assert (pool.used_bytes(), pool.n_free_blocks()) == (0, 1)
    assert cupy.blocking() == ["malloc"]


def test_an_arena_belongs_to_the_stream_that_was_current(cupy: FakeCupy) -> None:
    pool = cupy.cuda.MemoryPool()
    one, two = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with one:
        memory = pool.malloc(512)
        ptr = memory.ptr
        del memory
    with two:
        other = pool.malloc(512)
    with one:
        again = pool.malloc(512)
    assert other.ptr != ptr
    assert again.ptr == ptr


def test_the_limit_counts_reserved_bytes_and_frees_whole_blocks_first(cupy: FakeCupy) -> None:
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=2048)
    first = pool.malloc(1024)
    with pytest.raises(
        OutOfMemoryError, match=r"allocating 1,536 bytes \(allocated so far: 1,024 bytes, limit .* 2,048"
    ):
        pool.malloc(1536)
    del first
    assert pool.malloc(1536).mem.size == 1536
    assert pool.total_bytes() == 1536
    assert (pool.get_limit(), "free" in cupy.blocking()) == (2048, True)
    with cupy.cuda.Device(1):
        assert (pool.get_limit(), pool.total_bytes()) == (0, 0)


def test_a_device_has_no_more_than_its_memory(cupy: FakeCupy) -> None:
    with pytest.raises(OutOfMemoryError, match="Out of memory allocating 16,777,216 bytes"):
        cupy.empty(16 * MIB, np.uint8)
    assert cupy.cuda.Device(0).mem_info == (8 * MIB, 8 * MIB)


def test_work_of_the_same_stream_is_done_before_freed_memory_is_poisoned(cupy: FakeCupy) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.full(4, 7, np.uint8)
        ptr = x.data.ptr
        cupy.pause()
        y = x + cupy.uint8(1)
        del x
        reused = cupy.empty(4, np.uint8)
        cupy.resume()
        assert y.get().tolist() == [8, 8, 8, 8]
        assert (reused.data.ptr, reused.get().tolist()) == (ptr, [0xDD] * 4)


def test_some_seed_shows_an_early_free() -> None:
    """The order of streams is random, so a test that runs a few seeds finds the missing reference."""

    def read(seed: int, *, held: bool) -> list[int]:
        with FakeCupy(nbytes=MIB, seed=seed) as cupy:
            compute, d2h = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
            host = pinned(cupy, 2)
            with compute:
                x = cupy.full(2, 7, np.uint8)
            cupy.wait_idle()
            cupy.pause()
            x.get(stream=d2h, out=host, blocking=False)
            ledger = [x] if held else []
            del x
            cupy.resume()
            cupy.wait_idle()
            ledger.clear()
            return host.tolist()

    assert {tuple(read(seed, held=False)) for seed in range(8)} == {(7, 7), (0xDD, 0xDD)}
    assert {tuple(read(seed, held=True)) for seed in range(8)} == {(7, 7)}


def test_a_missing_event_shows_too() -> None:
    def read(seed: int, *, ordered: bool) -> int:
        with FakeCupy(nbytes=MIB, seed=seed) as cupy:
            producer, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
            x = cupy.zeros(1, np.int32)
            cupy.wait_idle()
            cupy.pause()
            with producer:
                x += 1
            if ordered:
                consumer.wait_event(producer.record())
            with consumer:
                y = x * 10
            cupy.resume()
            return int(y.get(stream=consumer)[0])

    assert {read(seed, ordered=False) for seed in range(8)} == {0, 10}
    assert {read(seed, ordered=True) for seed in range(8)} == {10}


def test_pinned_copies_are_asynchronous_and_pageable_ones_block(cupy: FakeCupy) -> None:
    runtime, stream = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    x = cupy.asarray(np.arange(8, dtype=np.uint8))
    host, plain = pinned(cupy, 8), np.zeros(8, np.uint8)
    stream.wait_event(cupy.cuda.Stream.null.record())
    cupy.pause()
    start = len(cupy.calls)
    runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 8, runtime.memcpyDeviceToHost, stream.ptr)
    assert host.tolist() == [0xDD] * 8
    assert len(cupy.calls) == start
    with pytest.raises(WouldBlockForEverError, match="to pageable memory"):
        runtime.memcpyAsync(plain.ctypes.data, x.data.ptr, 8, runtime.memcpyDeviceToHost, stream.ptr)
    plain[:] = 9
    runtime.memcpyAsync(x.data.ptr, plain.ctypes.data, 8, runtime.memcpyHostToDevice, stream.ptr)
    assert cupy.blocking()[start:] == ["memcpyAsync to pageable memory", "memcpyAsync from pageable memory"]
    # A staged copy is of the values at the call.
    plain[:] = 1
    cupy.resume()
    stream.synchronize()
    assert host.tolist() == list(range(8))
    assert x.get().tolist() == [9] * 8


def test_pinned_memory_is_read_when_the_copy_is_executed(cupy: FakeCupy) -> None:
    host = pinned(cupy, 4)
    host[:] = 1
    x = cupy.empty(4, np.uint8)
    cupy.pause()
    x.set(host)
    host[:] = 2
    assert "host copy" not in " ".join(cupy.blocking())
    cupy.resume()
    assert x.get().tolist() == [2, 2, 2, 2]


def test_addresses_are_checked(cupy: FakeCupy) -> None:
    runtime = cupy.cuda.runtime
    x = cupy.zeros(4, np.uint8)
    host = pinned(cupy, 4)
    with pytest.raises(CUDARuntimeError, match="invalid argument"):
        runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 4, runtime.memcpyDeviceToHost, 0)
    with pytest.raises(CUDARuntimeError, match="invalid argument"):
        runtime.memcpyAsync(x.data.ptr + 8 * MIB - 1, host.ctypes.data, 4, runtime.memcpyHostToDevice, 0)
    with pytest.raises(CUDARuntimeError, match="invalid argument"):
        runtime.freeHost(host.ctypes.data + 1)


def test_a_copy_into_freed_pinned_memory_loses_the_device(cupy: FakeCupy) -> None:
    runtime = cupy.cuda.runtime
    x, host = cupy.zeros(4, np.uint8), pinned(cupy, 4)
    cupy.pause()
    runtime.memcpyAsync(host.ctypes.data, x.data.ptr, 4, runtime.memcpyDeviceToHost, 0)
    runtime.freeHost(host.ctypes.data)
    cupy.resume()
    with pytest.raises(CUDARuntimeError, match="illegal memory access"):
        runtime.streamSynchronize(0)


def test_peer_copies_and_peer_access(cupy: FakeCupy) -> None:
    runtime = cupy.cuda.runtime
    x = cupy.arange(4, dtype=np.int32)
    with cupy.cuda.Device(1):
        y, stream = cupy.empty(4, np.int32), cupy.cuda.Stream(non_blocking=True)
        runtime.deviceEnablePeerAccess(0)
        with pytest.raises(CUDARuntimeError, match="already enabled") as raised:
            runtime.deviceEnablePeerAccess(0)
        assert raised.value.status == 704
    assert (runtime.deviceCanAccessPeer(0, 1), runtime.deviceCanAccessPeer(0, 0)) == (1, 0)
    cupy.wait_idle()
    runtime.memcpyPeerAsync(y.data.ptr, 1, x.data.ptr, 0, 16, stream.ptr)
    stream.synchronize()
    with cupy.cuda.Device(1):
        assert y.get().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="array device = 1 while current = 0"):
        x + y


def test_allocators(cupy: FakeCupy) -> None:
    sizes: list[int] = []
    pool = cupy.cuda.MemoryPool()

    def allocate(nbytes: int) -> Any:
        sizes.append(nbytes)
        return pool.malloc(nbytes)

    default = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(allocate)
    x = cupy.zeros((2, 3), np.float32)
    with cupy.cuda.using_allocator(default):
        y = x + 1
        with pytest.raises(ValueError, match="inside `using_allocator`"):
            cupy.cuda.set_allocator(allocate)
    assert (sizes, pool.used_bytes(), y.shape) == ([24], 512, (2, 3))


def test_memory_of_an_owner_is_freed_when_the_last_array_goes(cupy: FakeCupy) -> None:
    gone: list[int] = []

    class Charged(cupy.cuda.memory.UnownedMemory):  # type: ignore[misc,name-defined]
        def __del__(self) -> None:
            gone.append(self.size)

    pointer = cupy.cuda.MemoryPool().malloc(1024)
    memory = Charged(pointer.ptr, 1000, pointer, 0)
    x = cupy.ndarray((10,), np.float32, cupy.cuda.memory.MemoryPointer(memory, 0))
    view = x[2:]
    del memory, x
    assert gone == []
    del view
    assert gone == [1000]
    with pytest.raises(TypeError, match="expected BaseMemory"):
        cupy.cuda.memory.MemoryPointer(pointer, 0)


def test_the_pinned_pool_hands_out_freed_blocks_at_once(cupy: FakeCupy) -> None:
    block = cupy.cuda.alloc_pinned_memory(1000)
    array = np.frombuffer(block, np.float32, 250)
    ptr = block.ptr
    assert (array.ctypes.data, array.nbytes) == (ptr, 1000)
    del block, array
    assert cupy.cuda.alloc_pinned_memory(600).ptr == ptr
    assert cupy.blocking().count("hostAlloc") == 1


def test_cudafree_waits_for_the_device_and_malloc_for_it(cupy: FakeCupy) -> None:
    memory = cupy.cuda.Memory(8 * MIB)
    cupy.pause()
    cupy.cuda.Stream.null.record()
    del memory
    with pytest.raises(WouldBlockForEverError, match="malloc behind free"):
        cupy.cuda.Memory(MIB)
    cupy.resume()
    assert cupy.cuda.Memory(MIB).ptr != 0


def test_an_array_in_a_cycle_gives_its_memory_back_to_the_pool(cupy: FakeCupy) -> None:
    pool = cupy.get_default_memory_pool()
    cycle: list[Any] = [cupy.empty(512, np.uint8)]
    ptr = cycle[0].data.ptr
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert (pool.used_bytes(), pool.total_bytes()) == (0, 512)
    assert cupy.empty(512, np.uint8).data.ptr == ptr
    assert "free" not in cupy.blocking()


def test_a_dropped_pool_frees_unused_memory(cupy: FakeCupy) -> None:
    pool = cupy.cuda.MemoryPool()
    slab = pool.malloc(MIB)
    del slab
    assert cupy.cuda.runtime.memGetInfo() == (7 * MIB, 8 * MIB)
    del pool
    cupy.wait_idle()
    assert cupy.cuda.runtime.memGetInfo() == (8 * MIB, 8 * MIB)


def test_threads_share_a_fake(cupy: FakeCupy) -> None:
    """Each thread on its own stream, with garbage cycles of arrays among them."""

    def work(results: list[float]) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(8, np.float64)
            for step in range(100):
                cycle: list[Any] = [x * 3]
                cycle.append(cycle)
                x = x * 0.5 + step
            results.append(float(x[0]))

    expected = 0.0
    for step in range(100):
        expected = expected * 0.5 + step
    results: list[float] = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 3
