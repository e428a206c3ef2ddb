"""Completion flags: a stream writes a number into the host's memory, and the host reads it there.

``cuStreamWriteValue32`` is work of a stream like any other. It writes after all earlier work, behind a barrier, so a
host that reads the number also finds what that work wrote. Reading takes a tenth of a microsecond and no call of CUDA,
no lock and no thread. Asking for an event takes a microsecond, with the GIL and a lock of the driver.

Each stream has a word of its own and writes ascending numbers into it: number 7 says that 5 and 6 are reached, too. A
card that is lost writes nothing more, so the host also has to ask CUDA for errors now and then.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncflow.streams.cuda.bindings import bindings_beside

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.streams.cuda.cupy_types import Cupy

WORDS: Final = 16
"""Words from one flag to the next: a cache line, as a card that writes would take it from readers of its neighbours."""

PAGE: Final = 64
"""Flags of one allocation of pinned memory."""

PORTABLE: Final = 1 | 2
"""``cudaHostAllocPortable | cudaHostAllocMapped``: every card can write there, at the host's address."""

WRAP: Final = 1 << 32
"""Numbers that a word can have."""


@dataclass(slots=True, eq=False, repr=False)
class Flag:
    """The word of one stream.

    Attributes:
        words: the allocation that the word is in.
        index: of the word.
        write: ``write(stream, address, number, 0)`` makes the stream write, after its work so far.
        stream: its handle.
        address: of the word.
        failed: makes an error of a code.
        given: the last number that the stream was to write.
    """

    words: ctypes.Array[ctypes.c_uint32]
    index: int
    write: Callable[[int, int, int, int], tuple[int]]
    stream: int
    address: int
    failed: Callable[[int], Exception]
    given: int = 0

    def mark(self) -> int:
        """Make the stream write the next number, and return that.

        Raises:
            CUDARuntimeError: the device failed.
        """
        number = (self.given + 1) % WRAP
        (code,) = self.write(self.stream, self.address, number, 0)
        if code:
            raise self.failed(int(code))
        self.given = number
        return number

    def has_reached(self, number: int) -> bool:
        """Return True if the stream has written `number` or a later one: fewer than 2**31 are on their way."""
        return (self.words[self.index] - number) % WRAP < WRAP // 2


class Flags:
    """The flags of one physical card's streams; none is ever given back, as CUDA streams are not."""

    __slots__ = ("_cupy", "_driver", "_lock", "_page", "_streams", "_used")

    def __init__(self, cupy: Cupy) -> None:
        """Begin without flags."""
        self._cupy = cupy
        bindings = bindings_beside(cupy)
        self._driver = None if bindings is None else getattr(bindings.driver, "cuStreamWriteValue32", None)
        self._streams: dict[int, Flag | None] = {}
        self._page: ctypes.Array[ctypes.c_uint32] | None = None
        self._used = 0  # number of used flags of that page
        self._lock = threading.Lock()  # several event loops may use one card

    def of(self, stream: int) -> Flag | None:
        """The flag of the stream with this handle, whose device is current; None if it cannot write one."""
        with self._lock:
            if stream not in self._streams:
                self._streams[stream] = None if self._driver is None else self._made(stream, self._driver)
            return self._streams[stream]

    def _made(self, stream: int, write: Callable[[int, int, int, int], tuple[int]]) -> Flag | None:
        runtime, page = self._cupy.cuda.runtime, self._page
        if page is None or self._used == PAGE:
            try:
                address = runtime.hostAlloc(4 * WORDS * PAGE, PORTABLE)
            except runtime.CUDARuntimeError:
                return None  # fall back to a waiting thread
            self._page = page = (ctypes.c_uint32 * (WORDS * PAGE)).from_address(address)
            self._used = 0
        index = WORDS * self._used
        self._used += 1
        page[index] = 0
        address = ctypes.addressof(page) + 4 * index
        # A driver may refuse. A lost card refuses, too, and a later call raises its error.
        if write(stream, address, 0, 0)[0]:
            return None
        return Flag(page, index, write, stream, address, runtime.CUDARuntimeError)
