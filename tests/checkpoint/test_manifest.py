"""The manifest: its contents; a changed byte in it is found."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.checkpoint.manifest import read_manifest
from asyncflow.errors import CheckpointError
from tests.checkpoint.steps import write


def test_its_contents(tmp_path: Path) -> None:
    path = write(tmp_path, 12, w=np.ones((2, 3), np.float32))
    content = json.loads((path / "manifest.json").read_text())
    assert content["format"] == "asyncflow checkpoint 3"
    assert content["step"] == 12
    assert content["random"] == {"seed": 3, "runs": 7}
    tensor = {"name": "w", "dtype": "float32", "shape": [2, 3], "nbytes": 24}
    crc32 = zlib.crc32(np.ones((2, 3), np.float32).tobytes())
    assert content["states"]["w"] == {"kind": "variable", "tensors": {"": {**tensor, "crc32": crc32}}}
    assert content["versions"]["asyncflow"] == af.__version__
    assert content["versions"]["numpy"] == np.__version__


def test_any_byte_that_changes_is_found(tmp_path: Path) -> None:
    """Fault F55: F55: no byte of it can change, be added or go without an error that names the file."""
    path = write(tmp_path, 0, w=1.5)
    file = path / "manifest.json"
    raw = file.read_bytes()
    damaged = [raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :] for at in range(len(raw))]
    for content in (*damaged, raw[:-1], raw + b" ", b"", b"[" * 100_000, b"null", b"[]", b"\x80\x04."):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"manifest\.json: is (damaged|of the format)"):
            read_manifest(path)
    file.write_bytes(raw)
    assert read_manifest(path).step == 0


def sealed(content: dict[str, Any]) -> bytes:
    """A manifest whose own checksum is right."""
    content = {name: value for name, value in content.items() if name != "checksum"}
    text = json.dumps(content, indent=1, sort_keys=True)
    return f'{text[:-2]},\n "checksum": "{zlib.crc32(text.encode()):08x}"\n}}\n'.encode()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("step",), -1),
        (("step",), "1"),
        (("step",), True),
        (("random",), {"seed": 1}),
        (("random", "runs"), None),
        (("states", "w", "kind"), "../../etc/passwd"),
        (("states", "w", "tensors", "", "shape"), [2**62, 2**62]),
        (("states", "w", "tensors", "", "shape"), [-1]),
        (("states", "w", "tensors", "", "nbytes"), 3),
        (("states", "w", "tensors", "", "dtype"), "object"),
        (("states", "w", "tensors", "", "dtype"), None),
        (("states", "w", "tensors", "", "other"), 1),
        (("states",), []),
    ],
)
def test_what_makes_no_sense_is_refused_whatever_its_checksum(
    place: tuple[str, ...], value: object, tmp_path: Path
) -> None:
    path = write(tmp_path, 0, w=1.5)
    file = path / "manifest.json"
    content = json.loads(file.read_bytes())
    file.write_bytes(sealed(content))
    assert read_manifest(path).step == 0
    *outer, last = place
    inner = content
    for name in outer:
        inner = inner[name]
    inner[last] = value
    file.write_bytes(sealed(content))
    with pytest.raises(CheckpointError, match=r"manifest\.json: is damaged"):
        read_manifest(path)


@pytest.mark.parametrize("number", [2, 4])
def test_another_format_is_named(number: int, tmp_path: Path) -> None:
    path = write(tmp_path, 0, w=1.5)
    file = path / "manifest.json"
    file.write_bytes(sealed({**json.loads(file.read_bytes()), "format": f"asyncflow checkpoint {number}"}))
    message = rf"is of the format 'asyncflow checkpoint {number}'; this version .* reads 'asyncflow checkpoint 3'$"
    with pytest.raises(CheckpointError, match=message):
        read_manifest(path)


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 0, w=1.5, v=1.5)
    file = path / "manifest.json"
    content = json.loads(file.read_bytes())
    content["states"]["w"]["tensors"][""]["name"] = "v"
    file.write_bytes(sealed(content))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(path)
