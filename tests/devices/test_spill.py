"""`SpillFile`: written values come back, and missing ones are reported."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from asyncflow.devices.saved.spill import SpillError, SpillFile


def data(number: int, nbytes: int = 4096) -> memoryview:
    return np.full(nbytes, number, np.uint8).data


def test_blocks_come_back_and_their_room_is_used_again(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    assert not list(tmp_path.iterdir()), "it has no name"
    blocks = [file.write(data(number), str(number)) for number in range(3)]
    back = np.empty(4096, np.uint8)
    file.read(blocks[1], back.data, "1")
    assert (back == 1).all()
    file.free(blocks[1])
    again = file.write(data(7), "7")
    assert again.offset == blocks[1].offset
    file.read(again, back.data, "7")
    assert (back == 7).all()
    for block in (blocks[0], blocks[2], again):
        file.free(block)
    assert os.fstat(file._fd).st_size == 0, "an empty file takes no disk"
    file.close()
    file.close()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """The error names the value and the file."""
    file = SpillFile(str(tmp_path))
    block = file.write(data(1), "body/tanh")
    os.pwrite(file._fd, b"\x00", block.offset + 100)
    with pytest.raises(SpillError, match=rf"'body/tanh' \(4.0 KiB\) cannot be read back .*{tmp_path}.* differ from"):
        file.read(block, np.empty(4096, np.uint8).data, "body/tanh")
    file.close()


def test_a_file_that_was_cut_off_is_found(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    block = file.write(data(1), "v")
    os.ftruncate(file._fd, 100)
    with pytest.raises(SpillError, match="it ends at byte 100"):
        file.read(block, np.empty(4096, np.uint8).data, "v")
    file.close()


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F31: the room is free again, and the next write takes it."""
    file = SpillFile(str(tmp_path))
    write, calls = os.pwrite, []

    def full(fd: int, piece: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, piece[:1000], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(
            SpillError, match=r"'v' \(4.0 KiB\) cannot be written .*: No space left on device"
        ) as caught:
            file.write(data(1), "v")
    assert caught.value.errno == errno.ENOSPC
    assert calls == [0, 1000], "a short write goes on"
    assert file.write(data(2), "w").offset == 0
    file.close()


def test_it_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        SpillFile(str(tmp_path / "none"))
