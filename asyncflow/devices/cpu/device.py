"""The CPU as a device: NumPy, and a few threads for kernels too long for the event loop."""

from __future__ import annotations

import numpy as np

from asyncflow.devices.cpu.lanes import Lanes
from asyncflow.devices.cpu.spilling import CpuSwapping
from asyncflow.devices.machine.cost import NS_PER_BYTE, NS_PER_CALL, NS_PER_FLOP
from asyncflow.devices.memory import MemoryAccount, spill_advice
from asyncflow.devices.protocol import Capabilities, Device, LogicalDevice
from asyncflow.devices.saved.memory_gate import MemoryGate
from asyncflow.devices.saved.saved_handle import Space
from asyncflow.devices.told import ToldAccount
from asyncflow.streams.cpu.stream import ThreadStream

NS_PER_HANDOVER = 30_000.0
"""From one CPU device of a process to another a value goes by reference: that takes two turns of an executor."""


class CpuDevice(LogicalDevice[ThreadStream]):
    """One logical CPU device.

    Any number of them share the machine's cores and memory; each has streams and an account of its own, so that a
    program for several devices runs, and is tested, on any machine. A stream that is never used has no thread.

    Attributes (more in `LogicalDevice`):
        lanes: the threads that firings go to.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        memory_limit: int | None = None,
        compute_streams: int = 1,
        sharing: int = 1,
        spill_directory: str | None = None,
    ) -> None:
        """Make the device ``cpu:<index>``.

        Args:
            index: its number among the CPU devices.
            memory_limit: most bytes it may hold; None for no limit.
            compute_streams: over how many streams the compiler divides a plan; see `asyncflow.devices.cpu.lanes`.
            sharing: how many CPU devices of a session share the cores.
            spill_directory: with a limit, where values that loops save go once memory is short; None for nowhere.

        Raises:
            OSError: there can be no file in that directory.
            ValueError: ``memory_limit`` is no positive number of bytes, or there is not one compute stream.
        """
        super().__init__("cpu", index, Capabilities(), compute_streams)
        self.memory = ToldAccount(self.name) if memory_limit is None else MemoryAccount(self.name, memory_limit)
        self.lanes = Lanes(self.name, compute_streams, sharing)
        self.threads = self.lanes.threads
        self.compute_streams = self.lanes.planned
        self.compute = self.compute_streams[0]
        # Host and device share memory, but copies in and out still have separate orders.
        self.h2d, self.d2h = ThreadStream(f"{self.name}/h2d"), ThreadStream(f"{self.name}/d2h")
        if memory_limit is not None:
            self.memory.advise = spill_advice
            if spill_directory is not None:
                spaces = [Space("disk")]
                self.swapping = CpuSwapping(self.memory, spaces, spill_directory, self.d2h, self.h2d)
                self.memory.advise = self.swapping.advice
            else:
                self.pacing = MemoryGate(self.memory)

    async def aclose(self, grace_s: float) -> bool:
        """Refuse further work and wait up to ``grace_s`` seconds for present work; return True if all of it ended.
        Idempotent.
        """
        have_ended = await super().aclose(grace_s)
        if self.swapping is not None:
            self.swapping.close()
        return have_ended

    @property
    def streams(self) -> tuple[ThreadStream, ...]:
        """All streams."""
        return (*self.lanes.streams, self.h2d, self.d2h)

    @property
    def what(self) -> str:
        """NumPy and its version."""
        return f"numpy {np.__version__}"

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """The expected time of a kernel: the call, then whichever takes longer of its arithmetic and its memory."""
        return NS_PER_CALL + max(NS_PER_FLOP * flops, NS_PER_BYTE * nbytes)

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """Return the expected time until a value of `nbytes` bytes made here is present on `target`.

        Nothing is copied between CPU devices. A device with memory of its own knows its link, and is asked for the time
        of the same bytes in the other direction.
        """
        if target.name == self.name:
            return 0.0
        return NS_PER_HANDOVER if target.asynchronous is None else target.transfer_ns(nbytes, self)
