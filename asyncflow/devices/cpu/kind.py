"""The kind ``cpu``: any number of logical devices."""

from __future__ import annotations

from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.devices.kinds import DeviceDescription, DeviceKind, DeviceOptions
from asyncflow.devices.machine import hardware
from asyncflow.devices.memory import format_bytes


class CpuKind(DeviceKind):
    """Logical CPU devices, which share the machine's cores and memory."""

    name = "cpu"

    def open(self, index: int, options: DeviceOptions) -> CpuDevice:
        """The device ``cpu:<index>``."""
        return CpuDevice(
            index,
            memory_limit=options.memory_limit,
            compute_streams=options.compute_streams,
            sharing=options.sharing,
            spill_directory=options.spill_directory,
        )

    def describe(self) -> tuple[DeviceDescription, ...]:
        """The processor, its cores, the memory, and which BLAS multiplies matrices."""
        memory = hardware.usable_memory()
        parts = (
            hardware.processor(),
            f"{hardware.usable_cores()} cores",
            "memory unknown" if memory is None else format_bytes(memory),
            hardware.blas_library(),
        )
        return (DeviceDescription(name="cpu:0", available=True, detail=", ".join(parts)),)
