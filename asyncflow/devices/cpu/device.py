"""The CPU as a device: NumPy, and a few threads for what is too long for the event loop."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.devices.cost import NS_PER_BYTE, NS_PER_CALL, NS_PER_FLOP
from asyncflow.devices.cpu.lanes import Lanes
from asyncflow.devices.memory import MemoryAccount, format_bytes
from asyncflow.devices.names import DeviceName
from asyncflow.streams.cpu.stream import ThreadStream

if TYPE_CHECKING:
    from asyncflow.devices.protocol import Device

NS_PER_HANDOVER = 30_000.0
"""From one CPU device of a process to another a value goes by reference: that takes two turns of an executor."""


class CpuDevice:
    """One logical CPU device.

    Any number of them share the machine's cores and memory; each has streams and an account of its own, so that a
    program for several devices runs, and is tested, on any machine. A stream that is never used has no thread.
    """

    __slots__ = ("_d2h", "_h2d", "_memory", "_name", "lanes")

    def __init__(
        self, index: int = 0, *, memory_limit: int | None = None, compute_streams: int = 1, sharing: int = 1
    ) -> None:
        """Make the device ``cpu:<index>``.

        Args:
            index: its number among the CPU devices.
            memory_limit: most bytes it may hold; None for no limit.
            compute_streams: over how many streams the compiler divides a plan; see `asyncflow.devices.cpu.lanes`.
            sharing: how many CPU devices of a session share the cores.

        Raises:
            ValueError: ``memory_limit`` is no positive number of bytes, or there is not one compute stream.
        """
        if compute_streams < 1:
            raise ValueError(
                f"compute_streams={compute_streams}: a device runs its kernels on at least one stream; "
                "leave it out for one"
            )
        self._name = str(DeviceName("cpu", index))
        self.lanes = Lanes(self._name, compute_streams, sharing)
        """The threads that firings go to."""
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
        """The first stream of kernels that are too long for the event loop."""
        return self.lanes.planned[0]

    @property
    def compute_streams(self) -> tuple[ThreadStream, ...]:
        """Those that the compiler divides a plan over: ``cpu:0/compute``, ``cpu:0/compute:1``, ..."""
        return self.lanes.planned

    @property
    def streams(self) -> tuple[ThreadStream, ...]:
        """All streams."""
        return (*self.lanes.streams, self._h2d, self._d2h)

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

    @property
    def is_asynchronous(self) -> bool:
        """False: what a kernel returns is its result."""
        return False

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """The expected time of a kernel: the call, then whichever takes longer of its arithmetic and its memory."""
        return NS_PER_CALL + max(NS_PER_FLOP * flops, NS_PER_BYTE * nbytes)

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """The expected time until a value of so many bytes made here is there on `target`.

        Nothing is copied between CPU devices. A device with memory of its own knows the link it is behind, and is
        asked what the same bytes would take the other way.
        """
        if target.name == self._name:
            return 0.0
        return target.transfer_ns(nbytes, self) if target.is_asynchronous else NS_PER_HANDOVER

    async def aclose(self, grace_s: float) -> bool:
        """Take no more work and wait up to ``grace_s`` seconds for the threads to end; True if all did. Idempotent.

        Cancellation: the streams stay stopped, and their threads still end after the work they have.
        """
        for stream in self.streams:
            stream.stop()  # before anything is awaited: from here on a cancel leaves no stream open
        return all(await asyncio.gather(*(stream.aclose(grace_s) for stream in self.streams)))

    def describe(self) -> str:
        """One line for people: name, memory in use, limit."""
        now = self._memory.statistics()
        limit = "no limit" if now.limit is None else f"limit {format_bytes(now.limit)}"
        return f"{self._name}  numpy {np.__version__}  {format_bytes(now.used)} in {now.buffers} buffers, {limit}"
