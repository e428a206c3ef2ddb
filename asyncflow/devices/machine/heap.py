"""Memory that arrays have freed: kept for the arrays of the next run while sessions are open, then given back.

glibc gives memory to the kernel as soon as 128 KiB to a few MiB are free at the end of its heap. The next run then gets
pages that the kernel has to clear, one fault each. Where arrays are large and arithmetic is little, that took half of
the time of a training step. A serving process runs the same plan again and again: it keeps the memory of one run.

Where users have told glibc themselves, by its variables, or another library allocates, nothing is changed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from functools import cache
from typing import Final, Protocol, TypeVar, cast
from weakref import getweakrefcount

import numpy as np

from asyncflow.streams.beside import giving_way

_Value = TypeVar("_Value")

KEPT: Final = 256 << 20
"""Free bytes that each of glibc's heaps may keep."""
LARGEST: Final = 32 << 20
"""Size above which arrays have pages of their own, which they give back; glibc allows no more."""
PADDING: Final = 64 << 20
"""Bytes that are asked for at once, not touched and hence not taken. A thread's heap consists of parts of this size.
glibc gives back any free part, whatever it may keep, unless padding would ask for it again."""
PART: Final = 8 << 20
"""Bytes that are given back at once while old values are dropped: where pages are small, that takes a millisecond."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MOST_HEAPS = -1, -2, -3, -8
_TRIMS_AT: Final = 128 << 10
"""Free bytes at which glibc gives memory back, and bytes it requests at once, by default."""
_USERS: Final = (
    "MALLOC_ARENA_MAX",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


class Allocator(Protocol):
    """The functions of glibc that are called here."""

    def mallopt(self, parameter: int, value: int, /) -> int:
        """Sets a parameter of the heaps."""

    def malloc_trim(self, pad: int, /) -> int:
        """Gives free memory back."""

    def madvise(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t, advice: int, /) -> int:
        """Advise the kernel on the use of pages."""


@cache
def _glibc() -> Allocator | None:
    """Return the C library, if it is glibc and the user has left its heaps alone."""
    library = None if any(name in os.environ for name in _USERS) or os.name != "posix" else ctypes.CDLL(None)
    return cast("Allocator", library) if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


class Heap:
    """The heaps of the process, while sessions use them; `trimming` is the thread that gave back memory last."""

    trimming: threading.Thread | None = None

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator = allocator
        self._lock = threading.Lock()
        self._users = 0

    def enter(self) -> None:
        """Count one more user; the first makes the heaps keep freed memory."""
        with self._lock:
            self._users += 1
            if self._users == 1 and self._allocator is not None:
                self._allocator.mallopt(_TRIM_THRESHOLD, KEPT)
                self._allocator.mallopt(_TOP_PAD, PADDING)
                self._allocator.mallopt(_MMAP_THRESHOLD, LARGEST)

    def leave(self) -> None:
        """Count one user less; after the last, the heaps give back free memory, and later freed memory, too.

        That happens on a thread in the background: it takes a millisecond for some MiB. The size from which arrays have
        pages of their own stays as it is: glibc does not tell the old one. An interpreter that ends gives everything
        back, and a thread that it is to start would never begin.
        """
        with self._lock:
            self._users -= 1
            if not self._users and self._allocator is not None and not sys.is_finalizing():
                self._allocator.mallopt(_TRIM_THRESHOLD, _TRIMS_AT)
                self._allocator.mallopt(_TOP_PAD, _TRIMS_AT)
                self.trimming = threading.Thread(target=self._allocator.malloc_trim, args=(0,), daemon=True)
                self.trimming.start()

    def share(self) -> None:
        """Has threads that begin from now on, as long as the process lives, use one heap together.

        Else each has its own, in which it keeps what others free: values that one thread makes, and another brings back
        from a file, took twice their room.
        """
        with self._lock:
            if self._allocator is not None:
                self._allocator.mallopt(_MOST_HEAPS, 1)

    def drop(self, values: list[_Value]) -> None:
        """Empties a list of old values, the last one first, on a thread that is not the event loop's.

        Freeing an array keeps the GIL, and may give back all that is free at the end of the heap, which takes 30 ms for
        `KEPT`. So less is given back at once, and others have the GIL in between. Pages of an array above `LARGEST` are
        given back before it is freed, without the GIL: 1 GB took 28 ms, or 260 ms of small pages.
        """
        self._give_back_beyond(KEPT - PART)
        for _ in giving_way(range(len(values))):
            self._give_pages_back(values)
            del values[-1]
        self._give_back_beyond(PADDING)

    def _give_pages_back(self, values: list[_Value]) -> None:
        """Give back the pages of the last value if it is a large array without other references."""
        if self._allocator is None or _references(values) > _SOLE:
            return
        value: object = values[-1]
        if type(value) is not np.ndarray or value.nbytes <= LARGEST or not value.flags.owndata:
            return
        if getweakrefcount(value):  # another thread may turn it into a reference
            return
        begin = -(-value.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (value.ctypes.data + value.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        self._allocator.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)

    def _give_back_beyond(self, free: int) -> None:
        """Make the heaps keep `free` bytes of the memory they are about to give back, as long as they keep any."""
        with self._lock:
            if self._users and self._allocator is not None:
                self._allocator.mallopt(_TOP_PAD, free)


def _references(values: list[_Value]) -> int:
    """Return how often the last value is referred to; the count includes the list, and differs between Pythons."""
    return sys.getrefcount(values[-1])


_SOLE: Final = _references([object()])
"""The count of a value to which only its list refers."""

process_heap = Heap(_glibc())
"""The process's own."""
