"""Writes one checkpoint, on a thread: all of it is on the disk before it has its name.

Large files bypass the kernel's page cache where the file system allows it (direct I/O, on Linux). Through the cache,
the kernel copies every page and flushes it later, on a processor that it does not share meanwhile. With two processors
the event loop then waited for up to 39 ms while 1 GB was saved, in place of 1.1 ms.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from asyncflow.checkpoint.checksum import BLOCK, column_sums_crc32
from asyncflow.checkpoint.directory import begin_step, drop, keep_latest, next_step, publish, sync_directory
from asyncflow.checkpoint.manifest import NAME, Manifest, RandomState, StateRecord, file_of, library_versions
from asyncflow.checkpoint.tensor_file import TensorRecord, as_bytes, header, laid_out
from asyncflow.errors import CheckpointError
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.streams.beside import giving_way
from asyncflow.values import Array

if sys.platform == "linux":
    from fcntl import F_GETFL, F_SETFL, fcntl

CHUNK: Final = 32 * BLOCK
"""Bytes that are written at a time.

After each call that sums, copies or writes them, the thread takes the GIL again. Beside a save, training steps of 1 ms
took 4 to 5 % longer with chunks of 1 MiB, 2 % with 16 MiB, and 1 to 2 % with 32 MiB.
"""
DIRECT: Final = 8 << 20
"""Files of at least this many bytes bypass the page cache. Small ones cost the event loop nothing either way."""
_ALIGNMENT: Final = mmap.PAGESIZE
"""Direct I/O takes addresses, positions and lengths that are multiples of the disk's sector size, at most a page."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a checkpoint: kinds and arrays of states, by their names."""

    states: dict[str, tuple[str, Mapping[str, Array]]]
    random: RandomState | None
    graph: Callable[[], str] | None


class SaveStopped(Exception):
    """The checkpoint is no longer awaited."""


def write_checkpoint(
    root: Path, step: int | None, content: Content, keep: int | None, check: Callable[[], None] = lambda: None
) -> Path:
    """Write a step under `root` and publish it; then delete all but the latest `keep`.

    Args:
        root: the directory of the steps, which is made if need be.
        step: number of the step; None for the next free number.
        content: of the step.
        keep: None for all.
        check: called before each chunk, and before the step gets its name; an exception ends the write.

    Raises:
        CheckpointError: the step cannot be written; existing ones are unchanged.
    """
    try:
        if step is None:
            step = next_step(root)
        temporary = begin_step(root, step)
        try:
            _write_files(temporary, step, content, check)
            check()
            path = publish(temporary, root, step)
        except BaseException:
            drop(temporary)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{root}: step {step} cannot be written: {error.strerror or error}; the steps that were there are as they "
            "were"
        ) from error
    if keep is not None:
        try:
            keep_latest(root, keep)
        except OSError as error:
            raise CheckpointError(
                f"{path}: is written, but an older step cannot be deleted: {error.strerror or error}"
            ) from error
    return path


def _write_files(folder: Path, step: int, content: Content, check: Callable[[], None]) -> None:
    raw: dict[str, dict[str, Array]] = {}  # by file and name
    states: dict[str, StateRecord] = {}
    for name, (kind, arrays) in giving_way(content.states.items()):
        tensors = {}
        for part, value in arrays.items():
            label = f"{name}::{part}" if part else name
            data = as_bytes(value)
            tensors[part] = TensorRecord(label, dtype_name(value.dtype), np.shape(value), data.nbytes, 0)
            raw.setdefault(file_of(kind), {})[label] = data
        states[name] = StateRecord(kind, tensors)
    graph = None if content.graph is None else content.graph()
    manifest = Manifest(step, graph, content.random, states, library_versions())
    sums: dict[tuple[str, str], int] = {}
    for file, records in manifest.files().items():
        order = laid_out(records)
        found = _write_arrays(folder / file, order, raw[file], check)
        sums.update({(file, label): crc32 for label, crc32 in found.items()})
    summed = {
        name: replace(
            state,
            tensors={part: replace(x, crc32=sums[state.file, x.name]) for part, x in state.tensors.items()},
        )
        for name, state in giving_way(states.items())
    }
    check()
    with _Durable(folder / NAME) as file_:
        file_.write(replace(manifest, states=summed).to_bytes())
    sync_directory(folder)


def _write_arrays(
    path: Path, records: list[TensorRecord], raw: Mapping[str, Array], check: Callable[[], None]
) -> dict[str, int]:
    """Writes a file of arrays; their checksums by name."""
    sums: dict[str, int] = {}
    head = header(records)
    with _Durable(path, len(head) + sum(record.nbytes for record in records)) as file:
        file.write(head)
        for record in records:
            data, crc32 = raw[record.name].data, 0
            for begin in range(0, len(data), CHUNK):
                check()
                chunk = data[begin : begin + CHUNK]
                crc32 = column_sums_crc32(chunk, crc32)
                file.write(chunk)
            sums[record.name] = crc32
    return sums


class _Durable:
    """A new file, which is on the disk when it is closed without an error.

    Direct I/O needs aligned memory, so a large file is gathered in an aligned buffer of at most `CHUNK` bytes. Whatever
    the file system refuses, and a last part that is no whole page, goes through the page cache instead.
    """

    __slots__ = ("_buffer", "_descriptor", "_filled")

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        self._filled = 0
        self._buffer: Array | None = None
        if nbytes >= DIRECT and _set_direct(self._descriptor, True):
            pages = -(-min(nbytes, CHUNK) // mmap.PAGESIZE)
            self._buffer = np.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), np.uint8)

    def write(self, data: bytes | memoryview) -> None:
        """Write `data`, or keep it in the buffer until that is full."""
        view = memoryview(data)
        while self._buffer is not None and view:
            part = view[: len(self._buffer) - self._filled]
            # NumPy copies without the GIL, and memoryviews with it.
            self._buffer[self._filled : self._filled + len(part)] = np.frombuffer(part, np.uint8)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == len(self._buffer):
                self._empty(self._buffer)
        self._put(view)

    def _empty(self, buffer: Array) -> None:
        view, self._filled = buffer.data[: self._filled], 0
        while view and self._buffer is not None:
            whole = len(view) // _ALIGNMENT * _ALIGNMENT
            try:
                written = os.write(self._descriptor, view[:whole]) if whole else 0
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                written = 0
            view = view[written:]
            if not written or written % _ALIGNMENT:
                _set_direct(self._descriptor, False)
                self._buffer = None
        self._put(view)

    def _put(self, view: memoryview) -> None:
        while view:
            view = view[os.write(self._descriptor, view) :]

    def __enter__(self) -> _Durable:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if kind is None:
                if self._buffer is not None:
                    self._empty(self._buffer)
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def _set_direct(descriptor: int, is_direct: bool) -> bool:
    """Turn direct I/O on or off for a file; return False where its file system has none."""
    if sys.platform != "linux":
        return False
    try:
        flags = fcntl(descriptor, F_GETFL)
        fcntl(descriptor, F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)
    except OSError:  # tmpfs, among others
        return False
    return True
