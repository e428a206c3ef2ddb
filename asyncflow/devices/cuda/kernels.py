"""Kernels of our own, launched by the driver itself: one call of `cuda.bindings`, with one record of parameters.

CuPy takes 9 to 21 µs of the host to launch a kernel, as it looks at each argument and packs it anew. Here a launch
writes the addresses of its arrays into an existing record, and calls ``cuLaunchKernel``. CuPy still compiles the source
and keeps the compiled kernels. Without `cuda.bindings` there is no `KernelLaunches`, and CuPy launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw


class KernelLaunchError(RuntimeError):
    """The driver refused a kernel, or an earlier one has broken the device; see `Progress.cause_of`."""


class LaunchRecord:
    """The parameters of one launch, each in 8 bytes, behind a table of their addresses, which the driver reads.

    Attributes:
        address: of the table.
        values: of the parameters, to be written before a launch. The driver copies them while it launches.
    """

    __slots__ = ("_memory", "address", "values")

    def __init__(self, values: Sequence[int]) -> None:
        count = len(values)
        memory = np.empty(2 * count, np.uint64)
        self._memory = memory  # kept here, as views of views do not keep it
        self.address = int(memory.ctypes.data)
        memory[:count] = np.arange(count, dtype=np.uint64) * np.uint64(8) + np.uint64(self.address + 8 * count)
        memory[count:] = np.array(values, np.uint64)
        self.values = memory.data[count:]


class KernelLaunches:
    """Launches of kernels of our own on one card.

    Attributes:
        ndarray: CuPy's type of arrays.
    """

    __slots__ = ("_cupy", "_driver", "_kernels", "ndarray")

    def __init__(self, cupy: Cupy, bindings: Raw) -> None:
        self.ndarray: Raw = cupy.ndarray
        self._cupy = cupy
        self._driver = bindings.driver
        self._kernels: dict[tuple[str, str], PackedKernel] = {}

    def kernel(self, source: str, name: str, options: tuple[str, ...]) -> PackedKernel:
        """The kernel of that name in the source; nothing is compiled before its first launch."""
        found = self._kernels.get((source, name))
        if found is None:
            raw = self._cupy.RawKernel(source, name, options)
            found = self._kernels[source, name] = PackedKernel(self._cupy, self._driver, raw, name)
        return found


class PackedKernel:
    """One kernel, on the card that is the current one when it is launched for the first time."""

    __slots__ = ("_call", "_current", "_driver", "_function", "_loaded", "_raw", "name")

    def __init__(self, cupy: Cupy, driver: Raw, raw: Raw, name: str) -> None:
        self.name = name
        self._raw = raw
        self._driver = driver
        self._call = driver.cuLaunchKernel
        self._current = cupy.cuda.get_current_stream
        self._function: Raw = None
        self._loaded: Raw = None

    def record(self, values: Sequence[int]) -> LaunchRecord:
        """A new record of these parameters."""
        return LaunchRecord(values)

    def launch(self, blocks: int, threads: int, record: LaunchRecord) -> None:
        """Launch a grid of these extents on CuPy's current stream.

        Raises:
            KernelLaunchError: the driver does not take it.
        """
        if self._function is None:
            self._load()
        stream = self._current().ptr
        (error,) = self._call(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, record.address, 0)
        if error:
            raise KernelLaunchError(f"{error.name}: cuLaunchKernel of {self.name}")

    def _load(self) -> None:
        self._loaded = self._raw.kernel  # compiles, and keeps the module loaded
        self._function = self._driver.CUfunction(self._loaded.ptr)
