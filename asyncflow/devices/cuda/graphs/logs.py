"""Logs of saved values on a card, filled and read by kernels in loops that the card runs by itself.

Such a loop saves a value in each iteration, and only the card knows the number of the iteration. So a kernel looks up
the number of the entry in the card's memory, and copies the value there. The gradient's loop counts down, also on the
card, and copies entries back.

Entries are in *blocks*, each as large as all blocks before it, so that a log grows without copies of entries. A kernel
finds a block by a table in the card's memory. So one graph serves logs of any length, and of any run::

    block      0          1          2
    entries    0 1 2 3    4 5 6 7    8 9 10 11 12 13 14 15

An inner loop appends to one log in all iterations of the loop around it. The outer loop saves the number of the first
entry that each iteration adds. So loops inside one another have one log each, to any depth.

A launch that comes to the end of a log's blocks stops there, or gives an iteration up (`FULL`). The host then adds a
block, and launches again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncflow.devices.cuda.graphs.conditional import FULL_LOG
from asyncflow.devices.cuda.memory import active_requests

if TYPE_CHECKING:
    from asyncflow.devices.cuda.kernels import KernelLaunches
    from asyncflow.devices.decisions import LogSpec
    from asyncflow.devices.protocol import Placed
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray
    from asyncflow.values import Value

SOURCE: Final = """
template <typename Table> __device__ char* entry_of(Table table, long long number, long long nbytes)
{
    long long start = 0, size = table[1];
    int block = 0;
    while (number >= start + size) {
        start += size;
        size = start;
        ++block;
    }
    return (char*)table[2 + block] + (number - start) * nbytes;
}

__device__ void copy_entry(char* to, const char* from, long long nbytes)
{
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long threads = (long long)gridDim.x * blockDim.x;
    if (((size_t)to | (size_t)from | (size_t)nbytes) % 8 == 0) {
        for (long long i = thread; i < nbytes / 8; i += threads) ((long long*)to)[i] = ((const long long*)from)[i];
    } else {
        for (long long i = thread; i < nbytes; i += threads) to[i] = from[i];
    }
}

// The table of a log: its entries, the entries of its first block, and the addresses of the blocks.

extern "C" __global__ void add_block(
    long long* table, long long entries, long long first, long long block, long long address)
{
    table[0] = entries;
    table[1] = first;
    table[2 + block] = address;
}

extern "C" __global__ void save_entry(
    const long long* number, const long long* table, const char* value, long long nbytes, long long log,
    long long* state)
{
    const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    if (number[0] < table[0]) {
        copy_entry(entry_of(table, number[0], nbytes), &value[0], nbytes);
        if (is_first) state[8 + log] = number[0] + 1;
    } else if (is_first && state[1] < 2) {
        state[1] = 4;  // FULL: what the launch computes is void
        state[7] = log;
    }
}

extern "C" __global__ void read_entry(
    const long long* number, const long long* table, char* value, long long nbytes)
{
    // A body that is only captured runs on any values.
    if (number[0] >= 0 && number[0] < table[0]) copy_entry(&value[0], entry_of(table, number[0], nbytes), nbytes);
}
"""

_OPTIONS: Final = ("--fmad=false",)
_THREADS: Final = 256
_MOST_GRID: Final = 1024
_WORD: Final = 8

_TABLE: Final = 64
"""Numbers of a table: two, and the addresses of more blocks than any memory has."""

FIRST_BYTES: Final = 1 << 20
"""Bytes of a log's first block, if it is not known how many iterations there will be."""

LEAST_ENTRIES, MOST_ENTRIES = 4, 1 << 10
"""Entries of such a block."""


class Log:
    """A log as kernels see it, by a table on the card; saved values must find room.

    Attributes:
        spec: description of its entries.
        number: its place among the logs of its loop.
        table: addresses of its blocks; see `SOURCE`.
        inner: log of a loop inside, if the entries of this log are numbers of entries there; else None.
    """

    __slots__ = ("_cupy", "_launches", "_state", "inner", "number", "spec", "table")

    def __init__(
        self, cupy: Cupy, launches: KernelLaunches, spec: LogSpec, table: CupyArray, state: CupyArray, number: int = 0
    ) -> None:
        self._cupy = cupy
        self._launches = launches
        self._state = state
        self.spec = spec
        self.number = number
        self.table = table
        self.inner: Log | None = None

    def seen_by(self, table: CupyArray, state: CupyArray, number: int) -> Log:
        """Return the log for a graph, by a table and with a state of its own."""
        return Log(self._cupy, self._launches, self.spec, table, state, number)

    def line(self) -> Iterator[Log]:
        """Yield the log, and then the logs of the loops inside."""
        log: Log | None = self
        while log is not None:
            yield log
            log = log.inner

    def save(self, number: Placed, value: Placed) -> Log:
        """Make `value` an entry, and return the log."""
        value = self._cupy.ascontiguousarray(self._on_card(value))
        self._launch("save_entry", value, number, self.number, self._state.data.ptr)
        return self

    def read(self, number: Placed) -> CupyArray:
        """A copy of an entry."""
        array = self._cupy.empty(self.spec.shape, self.spec.dtype)
        self._launch("read_entry", array, number)
        return array

    def _on_card(self, value: Placed) -> CupyArray:
        """Return an array for a number of the host."""
        return value if isinstance(value, self._cupy.ndarray) else self._cupy.full((), value, value.dtype)

    def _launch(self, name: str, entry: CupyArray, number: Placed, *more: int) -> None:
        nbytes, number = entry.nbytes, self._on_card(number)
        if nbytes:
            blocks = min(-(-nbytes // (_WORD * _THREADS)), _MOST_GRID)
            addresses = number.data.ptr, self.table.data.ptr, entry.data.ptr
            self._run(name, blocks, _THREADS, *addresses, nbytes, *more)

    def _run(self, name: str, blocks: int, threads: int, *values: int) -> None:
        kernel = self._launches.kernel(SOURCE, name, _OPTIONS)
        kernel.launch(blocks, threads, kernel.record(values))


class GrowingLog(Log):
    """A log of a run, with the memory of its entries.

    Attributes:
        count: number of entries, while the host launches all kernels.
        entries: number of entries that there is room for.
    """

    __slots__ = ("_blocks", "_first", "count", "entries")
    inner: GrowingLog | None

    def __init__(self, cupy: Cupy, launches: KernelLaunches, spec: LogSpec, usual: Iterator[int]) -> None:
        """Make an empty log, and those inside.

        Args:
            cupy: the module.
            launches: of the card.
            spec: of its entries.
            usual: gives the number of entries that each log had in the last run, if there was one.
        """
        table = cupy.empty(_TABLE + FULL_LOG + 2, np.int64)
        super().__init__(cupy, launches, spec, table[:_TABLE], table[_TABLE:])
        unknown = min(max(FIRST_BYTES // max(spec.nbytes, 1), LEAST_ENTRIES), MOST_ENTRIES)
        self._first = next(usual, unknown)
        self._blocks: list[CupyArray] = []
        self.count = self.entries = 0
        if spec.inner is not None:
            self.inner = GrowingLog(cupy, launches, spec.inner, usual)

    def reserve(self, entries: int) -> None:
        """Make room for `entries`, by kernels: a copy from the host might block."""
        while self.entries < entries:
            size = self.entries or self._first
            block = self._cupy.empty(size * self.spec.nbytes, np.uint8)
            self._blocks.append(block)
            self.entries += size
            number = len(self._blocks) - 1
            self._run("add_block", 1, 1, self.table.data.ptr, self.entries, self._first, number, block.data.ptr)
            active_requests().kernels += 1

    def save(self, number: Placed, value: Placed) -> Log:
        """Make `value` an entry; there may be no room yet."""
        self.count += 1
        self.reserve(self.count)
        return super().save(number, value)


def new_table(cupy: Cupy) -> CupyArray:
    """The table of a log without entries."""
    return cupy.zeros(_TABLE, np.int64)


def logs_in(values: Iterable[Value]) -> list[Log]:
    """Return the logs among `values`, each in front of those inside."""
    return [each for value in values if isinstance(value, Log) for each in value.line()]


def growing_logs(values: Iterable[Value]) -> list[GrowingLog]:
    """Return the logs of a run among `values`, each in front of those inside."""
    return [log for log in logs_in(values) if isinstance(log, GrowingLog)]
