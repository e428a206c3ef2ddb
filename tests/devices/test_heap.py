"""Memory freed by arrays is kept while sessions are open, and given back after the last one."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.machine.heap import KEPT, LARGEST, PADDING, PART, Heap, process_heap
from tests.patience import PATIENCE_S


class Glibc:
    """Notes the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.given_back: list[tuple[int, int]] = []
        """Addresses and bytes of pages."""

    def mallopt(self, parameter: int, value: int, /) -> int:
        self.calls.append((parameter, value))
        return 1

    def malloc_trim(self, pad: int, /) -> int:
        self.calls.append((pad,))
        return 1

    def madvise(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, advice: int, /) -> int:
        assert advice == mmap.MADV_DONTNEED
        self.given_back.append((address.value or 0, nbytes.value))
        return 0


def test_the_first_user_keeps_and_the_last_gives_back() -> None:
    glibc = Glibc()
    heap = Heap(glibc)
    heap.enter()
    heap.enter()
    assert glibc.calls == [(-1, KEPT), (-2, PADDING), (-3, LARGEST)]
    heap.leave()
    assert len(glibc.calls) == 3
    heap.leave()
    assert heap.trimming is not None
    heap.trimming.join(PATIENCE_S)
    assert glibc.calls[3:] == [(-1, 128 << 10), (-2, 128 << 10), (0,)]


def test_old_values_are_given_back_bit_by_bit_the_last_first() -> None:
    glibc = Glibc()
    heap = Heap(glibc)
    heap.enter()
    dropped: list[tuple[int, int]] = []

    class Old:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            dropped.append((self.number, glibc.calls[-1][1]))

    heap.drop([Old(number) for number in range(3)])
    assert dropped == [(number, KEPT - PART) for number in (2, 1, 0)]
    assert glibc.calls[-1] == (-2, PADDING)
    told = len(glibc.calls)
    heap.leave()
    assert heap.trimming is not None
    heap.trimming.join(PATIENCE_S)
    values = [1, 2]
    heap.drop(values)
    assert values == [] and len(glibc.calls) == told + 3  # nothing is kept any more


def test_pages_of_a_large_array_are_given_back_before_it_is_freed() -> None:
    """Freeing it keeps the GIL for as long as the kernel takes for its pages."""
    glibc = Glibc()
    heap = Heap(glibc)
    size = LARGEST + 10 * mmap.PAGESIZE
    dropped: list[Any] = [np.empty(size, np.uint8)]
    address = dropped[0].ctypes.data
    heap.drop(dropped)
    ((begin, nbytes),) = glibc.given_back
    assert dropped == []
    assert begin % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
    assert address <= begin and begin + nbytes <= address + size
    assert nbytes >= size - 2 * mmap.PAGESIZE


def test_pages_of_small_or_used_arrays_stay() -> None:
    glibc = Glibc()
    heap = Heap(glibc)
    read, watched, around = (np.empty(LARGEST + 1, np.uint8) for _ in range(3))
    reference = weakref.ref(watched)
    values: list[Any] = [np.empty(LARGEST, np.uint8), read, watched, around[:], "text"]
    del watched
    heap.drop(values)
    assert glibc.given_back == []
    assert reference() is None


def test_another_allocator_is_left_alone() -> None:
    heap = Heap(None)
    heap.enter()
    heap.leave()
    values = [1, 2]
    heap.drop(values)
    assert heap.trimming is None and values == []


PROGRAM = """
import resource
import numpy as np
import asyncflow as af

async def main():
    with af.Graph():
        x = af.placeholder("float64", (100_000,))
        ys = [af.sin(x + number) for number in range({arrays})]
    async with af.Session(x.graph) as session:
        feeds = {{x: np.ones(100_000)}}
        for _ in range(3):
            await session.run(ys, feeds)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            await session.run(ys, feeds)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)

af.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("arrays", [40, 200])
def test_a_run_that_is_done_again_takes_no_new_pages(arrays: int) -> None:
    """An array has 195 pages, and so has its sum; 200 arrays are in several parts of a thread's heap."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arrays=arrays)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert float(done.stdout) < 195


MADE_ON_TWO_THREADS = """
import threading
import numpy as np
import asyncflow as af

def make():
    return [np.ones(20_000) for _ in range(800)]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

async def main():
    async with af.Session(memory_limit=1 << 30, spill_directory={directory!r}):
        made = make()
        between = np.ones(20_000)  # behind which nothing is given back
        del made
        before = resident()
        thread = threading.Thread(target=lambda: made_there.extend(make()))
        made_there = []
        thread.start()
        thread.join()
        print(resident() - before)

af.run(main())
"""


def test_a_thread_takes_what_another_has_freed_where_values_go_to_a_file(tmp_path: Path) -> None:
    """A returning value is made on another thread than the value that left: 122 MiB were taken twice."""
    program = MADE_ON_TWO_THREADS.format(directory=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert float(done.stdout) < 30


def test_sessions_count_as_users() -> None:
    async def main() -> list[int]:
        with af.Graph() as graph:
            y = af.constant(1.0) + 1.0
        seen = [process_heap._users]
        async with af.Session(graph) as session:
            await session.run(y)
            seen.append(process_heap._users)
        return [*seen, process_heap._users]

    before, inside, after = af.run(main())
    assert (inside, after) == (before + 1, before)
