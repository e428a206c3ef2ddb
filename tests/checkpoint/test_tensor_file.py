"""Files of arrays are in the safetensors format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from asyncflow.checkpoint.tensor_file import TensorRecord, as_bytes, from_strings
from asyncflow.errors import CheckpointError
from asyncflow.graph.values.dtypes import string
from tests.checkpoint.steps import read, write

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = (
    b'\xe0\x00\x00\x00\x00\x00\x00\x00{"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":'
    b'[2,3],"data_offsets":[8,32]},"bf":{"dtype":"BF16","shape":[3],"data_offsets":[32,38]},"b":{"dtype":"BOOL",'
    b'"shape":[2],"data_offsets":[38,40]}}  \x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@'
    b"\x00\x00@@\x00\x00\x80@\x00\x00\xa0@\x00\x00\x80?\x00@\x01\x00"
)
"""Bytes that the library of the format, version 0.8.0, writes for `SAME`."""

SAME = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([True, False]),
    "n": np.array(7),
    "bf": np.arange(3).astype(ml_dtypes.bfloat16),
}

EVERY = {
    **{str(np.dtype(dtype)): np.arange(5).astype(dtype) for dtype in "?bBhHiIlLefdFD"},
    "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "string": np.array([["a", "é\x00\n"], ["", "𝄞"]], string),
    "rank 0": np.array(3, np.int8),
    "empty": np.zeros((0, 3), np.float64),
    "infinite": np.array([np.inf, -np.inf, -0.0]),
}


def test_a_file_is_that_of_the_library_but_for_spaces_that_align_its_data(tmp_path: Path) -> None:
    path = write(tmp_path, 0, **SAME)
    raw = (path / "variables.safetensors").read_bytes()
    size, of_library = int.from_bytes(raw[:8], "little"), int.from_bytes(LIBRARY[:8], "little")
    assert raw[8 : 8 + size] == LIBRARY[8 : 8 + of_library].ljust(size)
    assert raw[8 + size :] == LIBRARY[8 + of_library :]


@pytest.mark.parametrize("name", EVERY)
def test_every_dtype_comes_back(name: str, tmp_path: Path) -> None:
    found = read(write(tmp_path, 0, x=EVERY[name]))["x"]
    assert found.dtype == EVERY[name].dtype
    assert found.shape == EVERY[name].shape
    assert found.tolist() == EVERY[name].tolist()
    assert not found.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12.0).reshape(3, 4).T,
        np.arange(24.0)[::2],
        np.arange(24.0)[::-1],
        np.broadcast_to(np.arange(4.0), (3, 4)),
        np.asfortranarray(np.ones((2, 3)) * 1j),
    ],
    ids=["fortran", "transposed", "strided", "reversed", "broadcast", "complex"],
)
def test_arrays_that_are_not_contiguous(array: np.ndarray, tmp_path: Path) -> None:
    """Fault F58: F58."""
    np.testing.assert_array_equal(read(write(tmp_path, 0, x=array))["x"], array)


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(as_bytes(array), array)


def test_the_data_of_each_array_is_aligned(tmp_path: Path) -> None:
    path = write(tmp_path, 0, a=np.int8(1), b=np.arange(3, dtype=np.int16), c=1.5, d=np.float32(2))
    raw = (path / "variables.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    offsets = {name: x["data_offsets"][0] for name, x in json.loads(raw[8 : 8 + size]).items()}
    assert {name: (8 + size + offsets[name]) % width for name, width in {"a": 1, "b": 2, "c": 8, "d": 4}.items()} == {
        "a": 0,
        "b": 0,
        "c": 0,
        "d": 0,
    }
    assert (8 + size) % 64 == 0


def test_strings_of_another_shape_are_refused() -> None:
    raw = np.frombuffer(b'["a", "b"]', np.uint8)
    with pytest.raises(CheckpointError, match=r"tensor 's' has other strings than its shape \[3\] says"):
        from_strings(raw, TensorRecord("s", "string", (3,), raw.nbytes, 0))
