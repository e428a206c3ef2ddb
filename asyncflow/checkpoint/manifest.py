"""`Manifest`: the contents of one checkpoint, by which all its files are checked.

Its file is JSON for people and other programs, a line for each state, and ends with a checksum of all before it. So a
changed byte in the manifest is found, too.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from asyncflow.checkpoint.tensor_file import TensorRecord
from asyncflow.errors import CheckpointError, brief
from asyncflow.streams.beside import giving_way

NAME: Final = "manifest.json"
_KIND = re.compile(r"[a-z]+")
_CHECKSUM: Final = b',\n "checksum": "%08x"\n}\n'
"""The end of the file."""
FORMAT: Final = "asyncflow checkpoint 3"
"""The format of the manifest and of the files of arrays."""


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One state of a checkpoint.

    Attributes:
        kind: such as ``variable``.
        tensors: its arrays, by the name of the part; none for a state that had no value.
    """

    kind: str
    tensors: Mapping[str, TensorRecord]

    @property
    def file(self) -> str:
        """The file that holds the state's arrays."""
        return file_of(self.kind)


@dataclass(frozen=True, slots=True)
class RandomState:
    """The counters from which random numbers are made.

    Attributes:
        seed: of the session; a graph may have one of its own.
        runs: how many there have been.
    """

    seed: int
    runs: int


def file_of(kind: str) -> str:
    """The name of the file with the arrays of all states of a kind."""
    return f"{kind}s.safetensors"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that write a checkpoint."""
    ours = sys.modules[__name__.partition(".")[0]]
    return {"asyncflow": ours.__version__, "numpy": np.__version__, "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of all that is in a checkpoint.

    Attributes:
        step: its number.
        graph: the digest of the session's graph; None for a session without one.
        random: None if it was not saved: of some variables alone.
        states: by name.
        versions: of the libraries that wrote it.
    """

    step: int
    graph: str | None
    random: RandomState | None
    states: Mapping[str, StateRecord]
    versions: Mapping[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, list[TensorRecord]]:
        """The arrays in each file."""
        found: dict[str, list[TensorRecord]] = {}
        for state in self.states.values():
            found.setdefault(state.file, []).extend(state.tensors.values())
        return {file: records for file, records in found.items() if records}

    def to_bytes(self) -> bytes:
        """The file; to be made on a thread."""
        named = giving_way(sorted(self.states.items()))
        states = (f"  {json.dumps(name)}: {json.dumps(asdict(state))}" for name, state in named)
        text = "\n".join(
            [
                "{",
                f' "format": {json.dumps(FORMAT)},',
                f' "step": {self.step},',
                f' "graph": {json.dumps(self.graph)},',
                f' "random": {json.dumps(self.random and asdict(self.random))},',
                f' "versions": {json.dumps(dict(self.versions))},',
                ' "states": {',
                ",\n".join(states),
                " }",
            ]
        ).encode()
        return _sealed(text)


def _sealed(text: bytes) -> bytes:
    """Return a file that begins with `text`, which lacks only the end of its outer object."""
    return text + _CHECKSUM % zlib.crc32(text + b"\n}")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the directory `path`.

    Raises:
        CheckpointError: there is none, it is damaged, or another version of asyncflow wrote it.
    """
    file = path / NAME
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    written = FORMAT
    try:
        written = json.loads(raw)["format"]
        if written == FORMAT and _sealed(raw[: -len(_CHECKSUM % 0)]) == raw:
            return _parsed(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # not JSON, or not a manifest
    if written != FORMAT:
        raise CheckpointError(f"{file}: is of the format {brief(written)}; this version of asyncflow reads {FORMAT!r}")
    raise CheckpointError(f"{file}: is damaged: its checksum is wrong; take another step, or a copy of this one")


def _parsed(raw: bytes) -> Manifest:
    """The manifest in a file; one of the errors that its reader expects, where there is none."""
    content = json.loads(raw)
    random = content["random"]
    states = {
        name: StateRecord(
            record["kind"],
            {part: TensorRecord(**{**x, "shape": tuple(x["shape"])}) for part, x in record["tensors"].items()},
        )
        for name, record in giving_way(content["states"].items())
    }
    manifest = Manifest(
        content["step"],
        content["graph"],
        None if random is None else RandomState(**random),
        states,
        content["versions"],
    )
    if not all(_KIND.fullmatch(x.kind) for x in states.values()):
        raise ValueError  # a kind is part of a file's name
    numbers = [manifest.step, *(() if manifest.random is None else (manifest.random.seed, manifest.random.runs))]
    for records in manifest.files().values():
        if len({record.name for record in records}) < len(records):
            raise ValueError
        numbers += [number for record in records for number in (*record.shape, record.nbytes, record.crc32)]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError
    if not all(record.has_sense() for records in manifest.files().values() for record in records):
        raise ValueError
    return manifest
