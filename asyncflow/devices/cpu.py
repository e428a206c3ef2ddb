"""The CPU as a device: NumPy, and a thread per stream that is used."""

from __future__ import annotations

import asyncio
from types import ModuleType

import numpy as np

from asyncflow.devices.memory import MemoryAccount, format_bytes
from asyncflow.devices.names import DeviceName
from asyncflow.streams.thread import ThreadStream


class CpuDevice:
    """One logical CPU device.

    Any number of them share the machine's cores and memory; each has streams and an account of its own, so that a
    program for several devices runs, and is tested, on any machine. A stream that is never used has no thread.
    """

    __slots__ = ("_compute", "_d2h", "_h2d", "_memory", "_name")

    def __init__(self, index: int = 0, *, memory_limit: int | None = None) -> None:
        """Make the device ``cpu:<index>``, which may hold ``memory_limit`` bytes (None: no limit).

        Raises:
            ValueError: ``memory_limit`` is no positive number of bytes.
        """
        self._name = str(DeviceName("cpu", index))
        self._compute = ThreadStream(f"{self._name}/compute")
        self._h2d = ThreadStream(f"{self._name}/h2d")
        self._d2h = ThreadStream(f"{self._name}/d2h")
        self._memory = MemoryAccount(self._name, memory_limit)

    @property
    def name(self) -> str:
        """Such as ``cpu:0``."""
        return self._name

    @property
    def kind(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def xp(self) -> ModuleType:
        """The `numpy` module."""
        return np

    @property
    def compute(self) -> ThreadStream:
        """The stream of kernels that are too long for the event loop."""
        return self._compute

    @property
    def h2d(self) -> ThreadStream:
        """The stream of copies in; host memory and the device's are the same, but the order is kept apart."""
        return self._h2d

    @property
    def d2h(self) -> ThreadStream:
        """The stream of copies out."""
        return self._d2h

    @property
    def memory(self) -> MemoryAccount:
        """The bytes it holds, and their limit."""
        return self._memory

    async def aclose(self, grace_s: float) -> bool:
        """Take no more work and wait up to ``grace_s`` seconds for the threads to end; True if all did. Idempotent.

        Cancellation: the streams stay stopped, and their threads still end after the work they have.
        """
        streams = (self._compute, self._h2d, self._d2h)
        for stream in streams:
            stream.stop()  # before anything is awaited: from here on a cancel leaves no stream open
        return all(await asyncio.gather(*(stream.aclose(grace_s) for stream in streams)))

    def describe(self) -> str:
        """One line for people: name, memory in use, limit."""
        now = self._memory.statistics()
        limit = "no limit" if now.limit is None else f"limit {format_bytes(now.limit)}"
        return f"{self._name}  numpy {np.__version__}  {format_bytes(now.used)} in {now.buffers} buffers, {limit}"
