"""Checkpoints to write and read in tests, without a session."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.checkpoint.manifest import RandomState, read_manifest
from asyncflow.checkpoint.reader import read_arrays
from asyncflow.checkpoint.writer import Content, write_checkpoint
from asyncflow.values import Array


def content(**values: object) -> Content:
    """Variables with these values."""
    states: dict[str, tuple[str, Mapping[str, Array]]] = {
        name: ("variable", {"": np.asarray(value)}) for name, value in values.items()
    }
    return Content(states, RandomState(3, 7), None)


def write(root: Path, step: int | None, keep: int | None = None, /, **values: object) -> Path:
    """Publishes a step of variables with these values."""
    return write_checkpoint(root, step, content(**values), keep)


def read(path: Path) -> dict[str, Any]:
    """The values in a step, none of which is damaged."""
    manifest = read_manifest(path)
    arrays, faults = read_arrays(path, manifest, manifest.states)
    assert faults == []
    return {name: parts[""] for name, parts in arrays.items()}
