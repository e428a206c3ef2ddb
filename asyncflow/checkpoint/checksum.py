"""Checksums of the bytes of arrays, made while a chunk is at hand: they take a quarter of the time of reading it.

Each MiB is seen as rows of 513 words of 64 bits. The sums of the columns go into a CRC-32, and what is left beyond the
last whole row goes there as it is. A word that changes changes the sum of its column. Sectors and pages that change
places come to other columns, as 513 has no divisor of theirs. Only words that change places by whole rows, or several
changes that cancel out in a sum, go unnoticed: to find those, too, the bytes would have to be gone through twice.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

BLOCK: Final = 1 << 20
"""Chunks are multiples of so many bytes, but for the last one of an array."""
COLUMNS: Final = 513

_WORD: Final = np.dtype("<u8")


def column_sums_crc32(chunk: memoryview, before: int) -> int:
    """The sum of what came before, whose sum is given, and a chunk."""
    row_bytes = COLUMNS * _WORD.itemsize
    for begin in range(0, len(chunk), BLOCK):
        block = chunk[begin : begin + BLOCK]
        whole = len(block) // row_bytes * row_bytes
        if whole:
            rows = np.frombuffer(block[:whole], _WORD).reshape(-1, COLUMNS)
            before = zlib.crc32(np.add.reduce(rows).astype(_WORD, copy=False), before)
        before = zlib.crc32(block[whole:], before)
    return before
