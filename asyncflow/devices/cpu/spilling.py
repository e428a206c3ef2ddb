"""Moving of saved values by a CPU device with a limit: to a spill file and back, on separate threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from asyncflow.devices.machine.heap import process_heap
from asyncflow.devices.memory import MemoryAccount, owner_of
from asyncflow.devices.saved.saved_handle import Movable, SavedHandle, Space
from asyncflow.devices.saved.spill import SpillBlock, SpillError, SpillFile
from asyncflow.devices.swapping import Swapping
from asyncflow.devices.values import DType
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.values import Array, Value

_NS_PER_BYTE = 1.0
"""Writing to a file, or reading, with a checksum, until it has been measured."""


class _Spilled(NamedTuple):
    """A record of an array: its bytes, and their meaning."""

    block: SpillBlock
    dtype: DType
    shape: tuple[int, ...]
    is_transposed: bool


class CpuSwapping(Swapping):
    """A mover of a CPU device's saved values to a file; a reader of a value that is away waits for it."""

    waits = True

    def __init__(
        self,
        account: MemoryAccount,
        spaces: Sequence[Space],
        directory: str,
        writing: ThreadStream,
        reading: ThreadStream,
    ) -> None:
        """Args: the device's account, where values go, the spill file's directory, and the threads for it."""
        super().__init__(account, spaces, ns_per_byte=_NS_PER_BYTE)
        self._account = account
        self._file = SpillFile(directory)
        process_heap.share()
        self._writing, self._reading = writing, reading
        self._failure = ""

    def movable(self, value: Value, writer: object = None) -> Movable | None:
        """Return how an array with memory of its own can be moved; None for other values."""
        if type(value) is not np.ndarray or value.dtype.hasobject:
            return None
        owner = owner_of(value)
        if owner.nbytes != value.nbytes or not (owner.flags.owndata and owner.flags.forc):
            return None
        if owner is value:
            return Movable(owner, owner, _whole)
        offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        return Movable(owner, owner, partial(_view, value.dtype, value.shape, value.strides, offset))

    def send(self, handle: SavedHandle) -> None:
        """Write the value to the file, on a thread."""
        self._writing.enqueue(self._write, handle)

    def bring(self, handle: SavedHandle) -> None:
        """Read it, on a thread, into memory that counts from now on."""
        there: _Spilled = handle.there
        array = np.empty(there.shape, there.dtype, order="F" if there.is_transposed else "C")
        self._account.count(array, handle.label)
        self._reading.enqueue(self._read, handle, array)

    def discard(self, there: object) -> None:
        """Free the block."""
        assert isinstance(there, _Spilled)
        self._file.free(there.block)

    def now_ns(self) -> int:
        """The time of the threads."""
        return perf_counter_ns()

    def close(self) -> None:
        """Release all waiting code, and the disk space."""
        super().close()
        self._file.close()

    def advice(self) -> str:
        """The failure of the file, if there was one."""
        return self._failure or super().advice()

    def _write(self, handle: SavedHandle) -> None:
        held = handle.held
        array: Array | None = held[0].here if held else None
        if array is None:  # no reader wants it any more
            self.not_sent(handle)
            return
        is_transposed = not array.flags.c_contiguous
        started_ns = perf_counter_ns()
        try:
            block = self._file.write(_bytes(array), handle.label)
        except SpillError as error:
            self._failure = str(error)
            self.not_sent(handle)
            return
        there = _Spilled(block, array.dtype, array.shape, is_transposed)
        del array, held  # the last reference may be the handle's
        self.sent(handle, there, perf_counter_ns() - started_ns)

    def _read(self, handle: SavedHandle, array: Array) -> None:
        there: _Spilled = handle.there
        started_ns = perf_counter_ns()
        try:
            self._file.read(there.block, _bytes(array), handle.label)
        except SpillError as error:
            self.not_brought(handle, error)
        else:
            self.brought(handle, perf_counter_ns() - started_ns, array)


def _bytes(array: Array) -> memoryview:
    return (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8).data


def _whole(owner: Array, start: int) -> Array:
    return owner


def _view(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, owner: Array, start: int
) -> Array:
    """A view of an array that has come back: values of a CPU move one by one, and begin at the first byte."""
    flat = owner if owner.flags.c_contiguous else owner.T
    return np.ndarray(shape, dtype, flat, offset, strides)
