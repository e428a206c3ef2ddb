"""A file for saved values that no memory has room for: blocks of bytes, each with a checksum.

The file has no name once it is open, so that nothing is left of it whatever becomes of the process. It is written and
read, never mapped: a page that is not there would stop whoever touches it, and a disk that fails would end the process.
Each block is read back whole, and once; its room is used again for the next of its size.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from threading import Lock
from typing import NamedTuple
from zlib import crc32

from asyncflow.devices.memory import format_bytes


class SpillBlock(NamedTuple):
    """A piece of a spill file."""

    offset: int
    nbytes: int
    checksum: int


class SpillError(OSError):
    """A saved value cannot be written to the spill file, or read back."""


class SpillFile:
    """All threads may write and read; each call blocks until it is done.

    Attributes:
        directory: where the file is.
    """

    def __init__(self, directory: str) -> None:
        """Open a file there.

        Raises:
            OSError: that is not possible.
        """
        self.directory = directory
        self._fd, path = tempfile.mkstemp(prefix="asyncflow-", suffix=".spill", dir=directory)
        os.unlink(path)
        self._name = path
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = self._live = 0
        self._lock = Lock()

    def write(self, data: memoryview, label: str) -> SpillBlock:
        """Write the bytes of a value.

        Raises:
            SpillError: the disk is full, or fails; nothing of it stays.
        """
        nbytes = data.nbytes
        offset = self._take(nbytes)
        try:
            written = 0
            while written < nbytes:
                written += os.pwrite(self._fd, data[written:], offset + written)
        except OSError as error:
            self._give(offset, nbytes)
            what = f"{label!r} ({format_bytes(nbytes)}) cannot be written to the spill file {self._name}"
            raise SpillError(error.errno, f"{what}: {error.strerror}") from error
        return SpillBlock(offset, nbytes, crc32(data))

    def read(self, block: SpillBlock, data: memoryview, label: str) -> None:
        """Read a block into memory of its size.

        Raises:
            SpillError: the disk fails, or the bytes differ from the written ones.
        """
        where = f"{label!r} ({format_bytes(block.nbytes)}) cannot be read back from the spill file {self._name}"
        done = 0
        try:
            while done < block.nbytes:
                count = os.preadv(self._fd, [data[done:]], block.offset + done)
                if not count:
                    raise SpillError(0, f"{where}: it ends at byte {block.offset + done:,}")
                done += count
        except SpillError:
            raise
        except OSError as error:
            raise SpillError(error.errno, f"{where}: {error.strerror}") from error
        if crc32(data) != block.checksum:
            raise SpillError(0, f"{where}: its bytes at {block.offset:,} differ from the written ones")

    def free(self, block: SpillBlock) -> None:
        """Let the room of a block be used again."""
        self._give(block.offset, block.nbytes)

    def close(self) -> None:
        """Give back the disk. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self, nbytes: int) -> int:
        with self._lock:
            self._live += nbytes
            places = self._free[nbytes]
            if places:
                return places.pop()
            offset, self._end = self._end, self._end + nbytes
            return offset

    def _give(self, offset: int, nbytes: int) -> None:
        with self._lock:
            self._live -= nbytes
            self._free[nbytes].append(offset)
            if not self._live:
                self._free.clear()
                self._end = 0
                if self._fd >= 0:
                    os.ftruncate(self._fd, 0)
