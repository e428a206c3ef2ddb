"""Checksums find what may happen to bytes on a disk, however these are cut into chunks."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.checkpoint.checksum import BLOCK, sums_crc32
from asyncflow.checkpoint.manifest import read_manifest
from asyncflow.checkpoint.reader import verify
from tests.checkpoint.steps import read, write
from tests.checkpoint.test_manifest import sealed

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = np.random.default_rng(0).integers(0, 256, 2 * BLOCK + 3 * 4096 + 5, dtype=np.uint8)
SUM = sums_crc32(CONTENT.data, 0)


def test_chunks_make_no_difference() -> None:
    first = sums_crc32(CONTENT.data[:BLOCK], 0)
    assert sums_crc32(CONTENT.data[BLOCK:], first) == SUM
    assert sums_crc32(memoryview(b""), SUM) == SUM
    assert sums_crc32(memoryview(b"abc"), 0) == zlib.crc32(b"abc")


@given(at=st.integers(0, len(CONTENT) - 1), bit=st.integers(0, 7))
def test_a_bit_that_changes_is_found(at: int, bit: int) -> None:
    CONTENT[at] ^= 1 << bit
    try:
        assert sums_crc32(CONTENT.data, 0) != SUM
    finally:
        CONTENT[at] ^= 1 << bit


@pytest.mark.parametrize("nbytes", [8, 512, 4096, BLOCK])
@given(data=st.data())
def test_bytes_that_change_places_are_found(nbytes: int, data: st.DataObject) -> None:
    """Words, sectors, pages, and whole blocks; and those that were lost, with zeros in their place."""
    places = st.integers(0, len(CONTENT) // nbytes - 1)
    one, other = data.draw(places) * nbytes, data.draw(places) * nbytes
    changed = CONTENT.copy()
    if one == other:
        changed[one : one + nbytes] = 0
    else:
        changed[one : one + nbytes] = CONTENT[other : other + nbytes]
        changed[other : other + nbytes] = CONTENT[one : one + nbytes]
    assert sums_crc32(changed.data, 0) != SUM


def test_a_step_of_the_format_before_is_read(tmp_path: Path) -> None:
    """Its checksums are CRCs of all bytes; a byte that has changed is found there, too."""
    value = np.arange(5000.0)
    path = write(tmp_path, 0, w=value)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format"] = "asyncflow checkpoint 1"
    manifest["states"]["w"]["tensors"][""]["crc32"] = zlib.crc32(value.tobytes())
    (path / "manifest.json").write_bytes(sealed(manifest))
    np.testing.assert_array_equal(read(path)["w"], value)
    file = path / "variables.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    (fault,) = verify(path, read_manifest(path))
    assert "tensor 'w' is damaged" in fault
