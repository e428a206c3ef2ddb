"""Checksums of the bytes of arrays, made while a chunk is at hand: several times as fast as a CRC of them all.

Of each MiB, as rows of 512 words of 64 bits, the sums of the rows and of the columns go into a CRC-32, and what is left
beyond the last whole row goes there as it is. A word that changes, or moves, changes at least two of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

BLOCK: Final = 1 << 20
"""Chunks are multiples of so many bytes, but for the last one of an array."""

_ROW_BYTES: Final = 4096
_WORD: Final = np.dtype("<u8")

Checksum: TypeAlias = Callable[[memoryview, int], int]
"""The sum of what came before, whose sum is given, and a chunk."""


def sums_crc32(chunk: memoryview, before: int) -> int:
    """See the module."""
    for begin in range(0, len(chunk), BLOCK):
        block = chunk[begin : begin + BLOCK]
        whole = len(block) // _ROW_BYTES * _ROW_BYTES
        if whole:
            rows = np.frombuffer(block[:whole], _WORD).reshape(-1, _ROW_BYTES // _WORD.itemsize)
            for axis in (1, 0):
                before = zlib.crc32(np.add.reduce(rows, axis=axis).astype(_WORD, copy=False), before)
        before = zlib.crc32(block[whole:], before)
    return before


FORMAT: Final = "asyncflow checkpoint 2"

CHECKSUMS: Final[Mapping[str, Checksum]] = MappingProxyType({FORMAT: sums_crc32, "asyncflow checkpoint 1": zlib.crc32})
"""Those of all formats that are read, the one that is written first."""

__all__ = ["BLOCK", "CHECKSUMS", "FORMAT", "Checksum", "sums_crc32"]
