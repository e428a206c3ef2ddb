"""The reader returns the written values, or raises an error that names file and tensor."""

from __future__ import annotations

import os
from io import FileIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.checkpoint import reader, writer
from asyncflow.checkpoint.manifest import read_manifest
from asyncflow.checkpoint.reader import read_arrays, verify
from asyncflow.errors import CheckpointError
from tests.checkpoint.steps import read, write

if TYPE_CHECKING:
    from pathlib import Path

VALUES = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(4, dtype=np.int16), "n": 7}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoints"), 0, **VALUES)


@settings(max_examples=60)
@given(data=st.data())
def test_damage_anywhere_is_an_error_that_names_the_file(step: Path, data: st.DataObject) -> None:
    """Fault F55: bytes that change, appear or disappear, in either file. Tensors that are not named as damaged equal
    the written ones.
    """
    file = step / data.draw(st.sampled_from(["variables.safetensors", "manifest.json"]))
    raw = file.read_bytes()
    begin = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(begin, min(len(raw), begin + 20)))
    content = raw[:begin] + data.draw(st.binary(max_size=20)) + raw[end:]
    try:
        file.write_bytes(content)
        if content != raw and file.name == "manifest.json":
            with pytest.raises(CheckpointError, match=f"{file}: is"):
                read_manifest(step)
            return
        manifest = read_manifest(step)
        arrays, faults = read_arrays(step, manifest, manifest.states)
        if content == raw:
            assert faults == []
        else:
            assert faults
            assert all(str(file) in fault for fault in faults)
        for name, parts in arrays.items():
            np.testing.assert_array_equal(parts[""], VALUES[name])
    finally:
        file.write_bytes(raw)


def test_a_damaged_array_is_named_and_the_others_are_there(step: Path) -> None:
    file = step / "variables.safetensors"
    raw = file.read_bytes()
    try:
        file.write_bytes(raw[:-3] + bytes([raw[-3] ^ 4]) + raw[-2:])  # of b, which is the last
        manifest = read_manifest(step)
        arrays, faults = read_arrays(step, manifest, manifest.states)
        assert faults == verify(step, manifest)
        (fault,) = faults
        assert f"{file}: tensor 'b' is damaged: its checksum is " in fault
        assert arrays.keys() == {"w", "n"}
    finally:
        file.write_bytes(raw)


def test_a_file_that_is_cut_off_while_it_is_read(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F56: F56: an error, and the process lives; a map of the file would have killed it."""
    file = step / "variables.safetensors"
    raw = file.read_bytes()

    class CutOff(FileIO):
        def readinto(self, buffer: Any) -> int:
            os.truncate(file, len(raw) - 5)
            return super().readinto(buffer) or 0

    monkeypatch.setattr(reader, "FileIO", CutOff)
    try:
        _, faults = read_arrays(step, read_manifest(step), ["b"])
        assert faults == [f"{file}: tensor 'b' ends after 3 of 8 bytes"]
    finally:
        file.write_bytes(raw)


def test_a_file_that_is_missing_or_a_directory(tmp_path: Path) -> None:
    path = write(tmp_path, 0, **VALUES)
    file = path / "variables.safetensors"
    manifest = read_manifest(path)
    file.unlink()
    assert verify(path, manifest) == [f"{file}: cannot be read: No such file or directory"]
    file.mkdir()
    assert verify(path, manifest) == [f"{file}: cannot be read: Is a directory"]


def test_large_arrays_go_by_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "CHUNK", 7)
    monkeypatch.setattr(reader, "CHUNK", 5)
    values = {"x": np.arange(100, dtype=np.int32), "y": np.zeros(0), "z": np.arange(3, dtype=np.uint8)}
    found = read(write(tmp_path, 0, **values))
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)


def test_only_wanted_states_are_read(step: Path) -> None:
    arrays, _ = read_arrays(step, read_manifest(step), ["n"])
    assert arrays.keys() == {"n"}
    assert arrays["n"][""] == 7
