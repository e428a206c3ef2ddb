"""A publish that is killed, or that the disk refuses, leaves the earlier steps as they were."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.checkpoint import writer
from asyncflow.checkpoint.writer import SaveStopped, write_checkpoint
from asyncflow.errors import CheckpointError
from tests.checkpoint.killed import CALLS
from tests.checkpoint.steps import content, read, write
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills children that it has forked")
def test_killed_at_any_system_call(tmp_path: Path) -> None:
    """Fault F53: F53: the next start finds the old step or the new one, complete, and the next publish tidies up."""
    command = [sys.executable, "-m", "tests.checkpoint.killed", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"(\d+) kills, (\d+) of them before the step was there\n", ended.stdout)
    assert found, ended.stdout
    kills, before = map(int, found.groups())
    assert 10 < before < kills


@pytest.mark.parametrize("name", CALLS[:6])
@pytest.mark.parametrize("last", [False, True])
def test_a_disk_that_is_full(name: str, last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F54: F54: whichever call fails, the first or last of its kind, it is an error, and the old step is as it
    was."""
    old = write(tmp_path, 1, x=1)
    call, calls, fails_at = getattr(os, name), 0, -1

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        write(tmp_path / "counted", 2, x=2)
        calls, fails_at = 0, calls if last or name == "mkdir" else 1  # a directory that is there is not made
        with pytest.raises(CheckpointError, match=r"step 2 cannot be written: No space left on device; the steps that"):
            write(tmp_path, 2, x=2)
    assert read(old) == {"x": 1}
    left = set(os.listdir(tmp_path)) - {"counted"}
    published = name in ("open", "fsync", "close") and last  # the directory's own entry may not be on the disk
    assert left == ({"step-1", "step-2"} if published else {"step-1"})
    assert read(write(tmp_path, 3, x=3)) == {"x": 3}


def test_a_directory_that_is_read_only_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F54: F54."""
    (tmp_path / "file").write_text("mine")
    for step in (None, 1):
        with pytest.raises(CheckpointError, match="file"):
            write(tmp_path / "file", step, x=1)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "step-3").write_text("mine, too")
    with pytest.raises(CheckpointError, match=r"step-3: exists already"):
        write(tmp_path, 3, x=1)

    def refuses(*args: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")  # a test may be root, who may write anywhere

    monkeypatch.setattr(os, "mkdir", refuses)
    with pytest.raises(CheckpointError, match="cannot be written: Read-only file system"):
        write(tmp_path, 4, x=1)


def test_a_write_that_takes_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr(os, "write", lambda file, data: written(file, bytes(data)[:3]))
    found = read(write(tmp_path, 0, x=np.arange(50)))
    np.testing.assert_array_equal(found["x"], np.arange(50))


def test_writing_that_is_stopped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 10)
    chunks = 0

    def check() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 5:
            raise SaveStopped

    with pytest.raises(SaveStopped):
        write_checkpoint(tmp_path, 0, content(x=np.arange(50)), None, check)
    assert os.listdir(tmp_path) == []


def test_an_older_step_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, x=1)

    def refuses(*args: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("asyncflow.checkpoint.directory.shutil.rmtree", refuses)
    with pytest.raises(CheckpointError, match=r"step-2: is written, but an older step cannot be deleted: Permission"):
        write(tmp_path, 2, 1, x=2)
    assert read(tmp_path / "step-2") == {"x": 2}


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks Linux which file a descriptor is of")
def test_a_step_has_its_files_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F53: F53: a power loss keeps what the disk was told to keep: each file, the names in the step, and then
    its own."""
    happened: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        happened.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        happened.append(("rename", Path(source).name))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "replace", renamed)
        published = write(tmp_path, 1, x=1)
    (step,) = [name for kind, name in happened if kind == "rename"]
    named = happened.index(("rename", step))
    in_step = happened.index(("fsync", step))
    files = [happened.index(("fsync", name)) for name in os.listdir(published)]
    assert max(files) < in_step < named < happened.index(("fsync", tmp_path.name))


class Disk:
    """A file system with direct I/O: it records the requested writes, and answers instead of writing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: dict[int, int] = {}
        self.direct: list[int] = []
        """Bytes of each write that bypassed the cache."""
        self.cached = 0
        self.answers: list[int] = []
        """Instead of what the next direct writes would do: a number of bytes that they take, or minus an errno."""
        self.has_direct = True
        self.write = os.write
        monkeypatch.setattr(writer, "DIRECT", 1)
        monkeypatch.setattr(writer, "CHUNK", 1 << 20)
        monkeypatch.setattr(writer, "fcntl", self.control, raising=False)
        monkeypatch.setattr(os, "write", self.written)

    def control(self, descriptor: int, command: int, flags: int | None = None) -> int:
        if flags is not None:
            if not self.has_direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            self.flags[descriptor] = flags
        return self.flags.get(descriptor, os.O_WRONLY)

    def written(self, descriptor: int, data: memoryview) -> int:
        if self.flags.get(descriptor, 0) & os.O_DIRECT:
            assert np.frombuffer(data, np.uint8).ctypes.data % mmap.PAGESIZE == 0
            assert len(data) % mmap.PAGESIZE == 0
            answer = self.answers.pop(0) if self.answers else len(data)
            if answer < 0:
                raise OSError(-answer, os.strerror(-answer))
            data = data[:answer]
            self.direct.append(len(data))
        else:
            self.cached += len(data)
        return self.write(descriptor, data)


@pytest.mark.skipif(sys.platform != "linux", reason="direct I/O is Linux's")
@pytest.mark.parametrize("answers", [[], [-errno.EINVAL], [1 << 20, -errno.EINVAL], [100], [mmap.PAGESIZE, 5000]])
def test_large_files_bypass_the_page_cache(answers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever direct I/O refuses or leaves, and the last part of a page, goes through the cache."""
    disk = Disk(monkeypatch)
    disk.answers += answers
    large = np.arange(300_001)
    found = read(write(tmp_path, 0, x=large, y=np.arange(3, dtype=np.int8)))
    np.testing.assert_array_equal(found["x"], large)
    assert disk.answers == []
    if not answers:
        assert disk.cached < 2 * mmap.PAGESIZE  # the manifest, too, would be small
        assert max(disk.direct) == writer.CHUNK


@pytest.mark.skipif(sys.platform != "linux", reason="direct I/O is Linux's")
def test_a_file_system_without_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.has_direct = False
    np.testing.assert_array_equal(read(write(tmp_path, 0, x=np.arange(9_999)))["x"], np.arange(9_999))
    assert disk.direct == []


@pytest.mark.skipif(sys.platform != "linux", reason="direct I/O is Linux's")
def test_a_disk_that_is_full_behind_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F54: F54."""
    disk = Disk(monkeypatch)
    disk.answers += [mmap.PAGESIZE, -errno.ENOSPC]
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        write(tmp_path, 0, x=np.arange(300_000))
    assert os.listdir(tmp_path) == []
