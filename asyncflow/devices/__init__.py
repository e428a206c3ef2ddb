"""Where do kernels run and values live? Devices, their names, their memory, and what kernels cost."""

from __future__ import annotations

from asyncflow.devices.blas import BlasLease, acquire_blas_threads
from asyncflow.devices.cost import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.devices.kinds import DeviceDescription, DeviceKind, DeviceOptions, register_kind
from asyncflow.devices.logical import LaunchingDevice, LogicalDevice
from asyncflow.devices.memory import (
    TRACKED_BYTES,
    ChargedAccount,
    LiveBuffer,
    MemoryAccount,
    MemoryLimitExceeded,
    MemoryStatistics,
)
from asyncflow.devices.names import DeviceName, DeviceSpec
from asyncflow.devices.protocol import (
    AsynchronousDevice,
    Capabilities,
    CoroutineKernel,
    Device,
    KernelInfo,
    KernelRecipe,
    Span,
)
from asyncflow.devices.registry import available_devices, open_devices
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.machine import SimMachine, current_machine, use_machine
from asyncflow.devices.values import DeviceArray, DeviceValue

__all__ = [
    "INLINE_LIMIT_NS",
    "TRACKED_BYTES",
    "AsynchronousDevice",
    "BlasLease",
    "Capabilities",
    "ChargedAccount",
    "CoroutineKernel",
    "CpuDevice",
    "Device",
    "DeviceArray",
    "DeviceDescription",
    "DeviceKind",
    "DeviceName",
    "DeviceOptions",
    "DeviceSpec",
    "DeviceValue",
    "KernelInfo",
    "KernelRecipe",
    "LaunchingDevice",
    "LiveBuffer",
    "LogicalDevice",
    "MeasuredCost",
    "MemoryAccount",
    "MemoryLimitExceeded",
    "MemoryStatistics",
    "SimDevice",
    "SimMachine",
    "Span",
    "acquire_blas_threads",
    "available_devices",
    "current_machine",
    "open_devices",
    "register_kind",
    "use_machine",
]
