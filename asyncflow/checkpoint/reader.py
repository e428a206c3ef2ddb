"""Reads checkpoints, on a thread: with plain reads, as a map of a file that is cut off kills the process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from asyncflow.checkpoint.checksum import BLOCK, column_sums_crc32
from asyncflow.checkpoint.manifest import Manifest
from asyncflow.checkpoint.tensor_file import TensorRecord, from_strings, header, laid_out
from asyncflow.errors import CheckpointError
from asyncflow.streams.beside import giving_way
from asyncflow.values import Array

CHUNK: Final = BLOCK
"""Bytes that are read at a time, and checked while the processor has them at hand."""

Arrays: TypeAlias = dict[str, dict[str, Array]]
"""By state and part."""

Buffers: TypeAlias = Mapping[tuple[str, str], Array]
"""Arrays to fill, of bytes where there are strings, by file and name in it."""


def empty_buffers(manifest: Manifest, names: Collection[str]) -> Iterator[tuple[tuple[str, str], Array]]:
    """Memory for the arrays of the states `names`, one after the other: see `Buffers`.

    To be made on the event loop's thread, whose heap has what old values have freed. Each other thread has a heap of
    its own, to which the kernel gives pages that it has to clear first.
    """
    for name, state in manifest.states.items():
        if name in names:
            for record in state.tensors.values():
                yield (state.file, record.name), _empty(record)


def _empty(record: TensorRecord) -> Array:
    return np.empty(record.nbytes, np.uint8) if record.dtype == "string" else np.empty(record.shape, record.spec.dtype)


def read_arrays(
    path: Path, manifest: Manifest, names: Collection[str], buffers: Buffers | None = None
) -> tuple[Arrays, list[str]]:
    """Return the arrays of the states `names`, and the faults of the missing ones.

    Arrays are read-only and own their memory.

    Args:
        path: of the step.
        manifest: of the step.
        names: of states.
        buffers: to fill; None for new ones.
    """
    buffers = dict(empty_buffers(manifest, names)) if buffers is None else buffers
    owners = {
        (state.file, record.name): (name, part)
        for name, state in manifest.states.items()
        if name in names
        for part, record in state.tensors.items()
    }
    found: Arrays = {name: {} for name in names}
    faults: list[str] = []
    for file, records in manifest.files().items():
        wanted = {record.name: buffers[file, record.name] for record in records if (file, record.name) in owners}
        if not wanted:
            continue
        arrays, wrong = _read_file(path / file, laid_out(records), wanted)
        faults += wrong
        for label, array in arrays.items():
            name, part = owners[file, label]
            found[name][part] = array
    whole = {name: parts for name, parts in found.items() if len(parts) == len(manifest.states[name].tensors)}
    return whole, faults


def _read_file(
    path: Path, records: list[TensorRecord], wanted: Mapping[str, Array]
) -> tuple[dict[str, Array], list[str]]:
    """Return the arrays of a file, and its faults."""
    head = header(records)
    expected = len(head) + sum(record.nbytes for record in records)
    try:
        with FileIO(path) as file:
            size = file.seek(0, 2)
            if size != expected:
                return {}, [f"{path}: has {size} bytes in place of {expected}: it is damaged, or not all there"]
            file.seek(0)
            if file.read(len(head)) != head:
                return {}, [f"{path}: is damaged: its header is not that of the manifest"]
            return _read_each(file, path, len(head), records, wanted)
    except OSError as error:
        return {}, [f"{path}: cannot be read: {error.strerror or error}"]


def _read_each(
    file: FileIO, path: Path, begin: int, records: list[TensorRecord], wanted: Mapping[str, Array]
) -> tuple[dict[str, Array], list[str]]:
    arrays: dict[str, Array] = {}
    faults: list[str] = []
    for record in giving_way(records):
        if record.name in wanted:
            try:
                arrays[record.name] = _read_array(file, begin, record, wanted[record.name])
            except CheckpointError as error:
                faults.append(f"{path}: {error}")
            except OSError as error:
                faults.append(f"{path}: tensor {record.name!r} cannot be read: {error.strerror or error}")
        begin += record.nbytes
    return arrays, faults


def _read_array(file: FileIO, begin: int, record: TensorRecord, array: Array) -> Array:
    raw = array.reshape(-1).view(np.uint8)
    view = raw.data
    crc32, at = 0, 0
    file.seek(begin)
    while at < len(view):
        chunk = view[at : at + CHUNK]
        filled = 0
        while filled < len(chunk):
            count = file.readinto(chunk[filled:])
            if not count:
                raise CheckpointError(f"tensor {record.name!r} ends after {at + filled} of {record.nbytes} bytes")
            filled += count
        crc32 = column_sums_crc32(chunk, crc32)
        at += filled
    if crc32 != record.crc32:
        raise CheckpointError(
            f"tensor {record.name!r} is damaged: its checksum is {crc32:08x}, and was {record.crc32:08x}"
        )
    if record.dtype == "string":
        array = from_strings(raw, record)
    array.flags.writeable = False
    return array


def verify(path: Path, manifest: Manifest) -> list[str]:
    """The faults of the files of a step; none, if all is as it was written."""
    return read_arrays(path, manifest, manifest.states)[1]
