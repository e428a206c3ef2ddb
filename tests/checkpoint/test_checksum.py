"""Checksums find damage of bytes on a disk, however the bytes are cut into chunks."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncflow.checkpoint.checksum import BLOCK, COLUMNS, column_sums_crc32

CONTENT = np.random.default_rng(0).integers(0, 256, 2 * BLOCK + 3 * 4096 + 5, dtype=np.uint8)
SUM = column_sums_crc32(CONTENT.data, 0)


def test_chunks_make_no_difference() -> None:
    first = column_sums_crc32(CONTENT.data[:BLOCK], 0)
    assert column_sums_crc32(CONTENT.data[BLOCK:], first) == SUM
    assert column_sums_crc32(CONTENT.data[: 2 * BLOCK], 0) == column_sums_crc32(CONTENT.data[BLOCK : 2 * BLOCK], first)
    assert column_sums_crc32(memoryview(b""), SUM) == SUM
    assert column_sums_crc32(memoryview(b"abc"), 0) == zlib.crc32(b"abc")


@given(at=st.integers(0, len(CONTENT) - 1), bit=st.integers(0, 7))
def test_a_bit_that_changes_is_found(at: int, bit: int) -> None:
    CONTENT[at] ^= 1 << bit
    try:
        assert column_sums_crc32(CONTENT.data, 0) != SUM
    finally:
        CONTENT[at] ^= 1 << bit


@pytest.mark.parametrize("nbytes", [512, 4096, BLOCK])
@given(data=st.data())
def test_bytes_that_change_places_are_found(nbytes: int, data: st.DataObject) -> None:
    """Swapped sectors, pages and blocks are found, and so are lost ones with zeros in their place."""
    places = st.integers(0, len(CONTENT) // nbytes - 1)
    one, other = data.draw(places) * nbytes, data.draw(places) * nbytes
    assume(one == other or (one - other) % (COLUMNS * 8))  # a distance of whole rows goes unnoticed
    changed = CONTENT.copy()
    if one == other:
        changed[one : one + nbytes] = 0
    else:
        changed[one : one + nbytes] = CONTENT[other : other + nbytes]
        changed[other : other + nbytes] = CONTENT[one : one + nbytes]
    assert column_sums_crc32(changed.data, 0) != SUM


def test_words_that_change_places_are_found_unless_whole_rows_lie_between() -> None:
    row = 8 * COLUMNS
    for distance, is_found in ((8, True), (4096, True), (row, False), (row + 8, True), (2 * row, False)):
        changed = CONTENT.copy()
        changed[:8], changed[distance : distance + 8] = CONTENT[distance : distance + 8], CONTENT[:8]
        assert (column_sums_crc32(changed.data, 0) != SUM) == is_found
