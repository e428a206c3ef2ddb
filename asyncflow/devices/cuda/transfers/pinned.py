"""Pinned host memory: what a card copies to and from while Python goes on.

A copy between a device and ordinary host memory blocks the caller, or is staged by the driver. So the copies of all
devices of the process go through page-locked memory that was allocated once, at start-up, and is lent out in pieces.

A piece may be lent again only when the copy that used it is done: whoever enqueues a copy keeps the `PinnedBuffer`
referenced until an event behind the copy has completed, and frees it then. When all is lent, a caller waits in turn
(`PinnedSlab.wait_for`); it must not fall back to ordinary memory.

``cupy`` is a parameter everywhere: only the CUDA backend imports it.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncflow.devices.machine.hardware import usable_memory
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.options import positive_count

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy
    from asyncflow.values import Array

ALIGNMENT = 512
"""Alignment and granularity of pieces: suits copies and every dtype."""

PINNED_BYTES = 256 * 2**20
"""Default number of bytes pinned by a process; never more than `PINNED_SHARE` of its memory."""

PINNED_SHARE = 0.25

_PORTABLE = 1  # cudaHostAllocPortable: page-locked for every card, not only the current one

Call: TypeAlias = "Callable[[PinnedBuffer], object]"


@dataclass(slots=True, eq=False, repr=False)
class PinnedBuffer:
    """A piece of pinned memory on loan.

    A buffer dropped without `free`, on whatever thread, goes back as well, but waiting code learns that only at the
    slab's next call.

    Attributes:
        slab: where it goes back to.
        nbytes: requested size; the piece may be larger.
        ptr: its address, for copies.
    """

    slab: PinnedSlab
    _offset: int
    _size: int
    nbytes: int
    ptr: int
    _is_lent: bool = True

    @property
    def __array_interface__(self) -> dict[str, object]:
        """NumPy's way to the memory; an array made from it keeps the buffer alive."""
        if not self._is_lent:
            raise ValueError(f"a pinned buffer of {self.nbytes} bytes was freed, and cannot be read any more")
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, False), "version": 3}

    def view(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        """The first bytes of the memory as an array, in C order, writable; it is not valid after `free`.

        Raises:
            ValueError: the array is larger than the buffer, or the buffer was freed.
        """
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes > self.nbytes:
            raise ValueError(
                f"{kind}{list(shape)} takes {nbytes} bytes, and the pinned buffer has {self.nbytes}; take a larger one"
            )
        return np.ndarray(shape, kind, np.asarray(self))

    def free(self, error: BaseException | None = None) -> None:
        """Give the memory back, and serve the next waiting call; on the thread of the event loop.

        Call it after an event behind the last copy has completed.

        Args:
            error: of the device, after which no work runs any more, so that nothing writes to the memory either.

        Raises:
            ValueError: it was freed before.
        """
        if not self._is_lent:
            raise ValueError(f"a pinned buffer of {self.nbytes} bytes is freed twice; it may be someone else's now")
        self._is_lent = False
        self.slab.returned.append((self._offset, self._size))
        self.slab.serve()

    def __del__(self) -> None:
        if self._is_lent:  # no lock: this may run inside the slab
            self.slab.returned.append((self._offset, self._size))


class PinnedSlab:
    """Page-locked memory, lent out by first fit.

    Invariant, under the lock and after `_settle`: the holes, (offset, bytes), are the bytes that are not on loan, by
    offset, none empty, and no two of them touch.

    All methods may be called on any thread; waiting callbacks are called on the thread that frees.

    Attributes:
        nbytes: all that there is, and the largest buffer that can ever be taken.
        returned: (offset, bytes) of buffers that came back and are not settled yet.
    """

    __slots__ = ("_address", "_cupy", "_holes", "_lock", "_waiting", "nbytes", "returned")

    def __init__(self, cupy: Cupy, nbytes: int) -> None:
        """Pin ``nbytes``, rounded down to a multiple of `ALIGNMENT`.

        May take a tenth of a second, and stall the card: construct it on a worker thread.

        Raises:
            ValueError: ``nbytes`` is no positive int, or less than `ALIGNMENT`.
        """
        self.nbytes = positive_count(nbytes, "the pinned memory in bytes") // ALIGNMENT * ALIGNMENT
        if not self.nbytes:
            raise ValueError(f"{nbytes} bytes of pinned memory leave none of {ALIGNMENT} bytes")
        self.returned: deque[tuple[int, int]] = deque()
        self._cupy = cupy
        self._lock = threading.RLock()  # reentrant: finalizers of other objects may run inside
        self._waiting: deque[tuple[int, Call]] = deque()
        self._holes = [(0, self.nbytes)]
        self._address: int | None = cupy.cuda.runtime.hostAlloc(self.nbytes, _PORTABLE)

    @property
    def free_bytes(self) -> int:
        """Bytes not on loan, in whatever pieces."""
        with self._lock:
            self._settle()
            return sum(size for _, size in self._holes)

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest buffer that could be taken now; 0 while others wait for room."""
        with self._lock:
            self._settle()
            return 0 if self._waiting else max((size for _, size in self._holes), default=0)

    def take(self, nbytes: int) -> PinnedBuffer | None:
        """A buffer of at least ``nbytes``, or None: there is no room, or others wait for some.

        Raises:
            RuntimeError: the slab is closed.
            ValueError: there never is that much room; nothing of 0 bytes is lent.
        """
        if not 0 < nbytes <= self.nbytes or self._address is None:
            self._check(nbytes)
        with self._lock:
            if self.returned:
                self._settle()
            return None if self._waiting else self._first_fit(nbytes)

    def wait_for(self, nbytes: int, call: Call) -> None:
        """Call ``call(buffer)`` once, with ``nbytes``, when there is room and all earlier requests are served.

        It is called from `PinnedBuffer.free`, or from here where there is room. ``call`` owns the buffer, and frees a
        buffer that is no longer wanted. An exception of ``call`` is raised from the place that called it.

        Raises:
            RuntimeError: the slab is closed.
            ValueError: there never is that much room; nothing of 0 bytes is lent.
        """
        self._check(nbytes)
        self._waiting.append((nbytes, call))
        self.serve()

    def serve(self) -> None:
        """Hand buffers to waiting calls, in the order of their requests, as far as there is room."""
        while self._waiting:  # a call added after this check runs `serve` itself
            with self._lock:
                self._settle()
                if not self._waiting:
                    return
                nbytes, call = self._waiting[0]
                buffer = self._first_fit(nbytes)
                if buffer is None:
                    return
                self._waiting.popleft()
            call(buffer)  # outside the lock: it may take, free and wait
            del buffer, call  # the call owns it

    def close(self) -> None:
        """Give the memory back to the system; on a worker thread. Idempotent.

        Raises:
            RuntimeError: buffers are on loan: a card may be writing into them.
        """
        self.serve()  # buffers dropped without `free` may have left room for waiting calls
        with self._lock:
            lent = self.nbytes - self.free_bytes
            if lent:
                raise RuntimeError(f"{lent} bytes of pinned memory are on loan; free the buffers before the slab")
            address, self._address = self._address, None
        if address is not None:
            self._cupy.cuda.runtime.freeHost(address)

    def _check(self, nbytes: int) -> None:
        if self._address is None:
            raise RuntimeError("the pinned memory is closed")
        if not 0 < nbytes <= self.nbytes:
            raise ValueError(
                f"a pinned buffer has 1 to {self.nbytes} bytes ({format_bytes(self.nbytes)}), not {nbytes}; copy in "
                "pieces, or pin more"
            )

    def _first_fit(self, nbytes: int) -> PinnedBuffer | None:
        if self._address is None:
            return None  # closed meanwhile, by another thread
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for index, (offset, room) in enumerate(self._holes):
            if room >= size:
                self._holes[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return PinnedBuffer(self, offset, size, nbytes, self._address + offset)
        return None

    def _settle(self) -> None:
        """Turn returned pieces into holes, joined with the holes they touch."""
        returned, holes = self.returned, self._holes
        while returned:
            offset, size = returned.popleft()
            index = bisect.bisect_left(holes, (offset, 0))
            if index < len(holes) and holes[index][0] == offset + size:
                size += holes.pop(index)[1]
            if index and sum(holes[index - 1]) == offset:
                index -= 1
                offset, before = holes.pop(index)
                size += before
            holes.insert(index, (offset, size))


_shared: dict[Cupy, PinnedSlab] = {}
_sharing = threading.Lock()


def shared_slab(cupy: Cupy, nbytes: int | None = None) -> PinnedSlab:
    """The slab of all devices of this process, made by the first call; on a worker thread.

    ``nbytes`` is the number of bytes that the first call pins, by default `default_pinned_bytes`; later calls return
    the same slab.

    Raises:
        ValueError: ``nbytes`` is no positive int.
    """
    with _sharing:
        slab = _shared.get(cupy)
        if slab is None:
            slab = _shared[cupy] = PinnedSlab(cupy, default_pinned_bytes() if nbytes is None else nbytes)
        return slab


def close_shared_slab(cupy: Cupy) -> None:
    """Give the memory of `shared_slab` back to the system, if there is some; on a worker thread.

    Raises:
        RuntimeError: buffers are on loan.
    """
    with _sharing:
        slab = _shared.get(cupy)
        if slab is not None:
            slab.close()
            del _shared[cupy]


def default_pinned_bytes() -> int:
    """`PINNED_BYTES`, or `PINNED_SHARE` of the memory that this process may use if that is less."""
    memory = usable_memory()
    return PINNED_BYTES if memory is None else min(PINNED_BYTES, int(memory * PINNED_SHARE))
