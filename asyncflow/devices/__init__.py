"""Devices: where kernels run and values live; their names, memory and costs."""

from __future__ import annotations

from asyncflow.devices.cpu.device import CpuDevice as CpuDevice
from asyncflow.devices.kinds import DeviceDescription as DeviceDescription
from asyncflow.devices.kinds import DeviceKind as DeviceKind
from asyncflow.devices.kinds import DeviceOptions as DeviceOptions
from asyncflow.devices.kinds import register_kind as register_kind
from asyncflow.devices.machine.blas import BlasLease as BlasLease
from asyncflow.devices.machine.blas import acquire_blas_threads as acquire_blas_threads
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS as INLINE_LIMIT_NS
from asyncflow.devices.machine.cost import MeasuredCost as MeasuredCost
from asyncflow.devices.memory import TRACKED_BYTES as TRACKED_BYTES
from asyncflow.devices.memory import ChargedAccount as ChargedAccount
from asyncflow.devices.memory import LiveBuffer as LiveBuffer
from asyncflow.devices.memory import MemoryAccount as MemoryAccount
from asyncflow.devices.memory import MemoryLimitExceeded as MemoryLimitExceeded
from asyncflow.devices.memory import MemoryStatistics as MemoryStatistics
from asyncflow.devices.names import DeviceName as DeviceName
from asyncflow.devices.names import DeviceSpec as DeviceSpec
from asyncflow.devices.protocol import AsynchronousDevice as AsynchronousDevice
from asyncflow.devices.protocol import Capabilities as Capabilities
from asyncflow.devices.protocol import CoroutineKernel as CoroutineKernel
from asyncflow.devices.protocol import Device as Device
from asyncflow.devices.protocol import KernelInfo as KernelInfo
from asyncflow.devices.protocol import KernelRecipe as KernelRecipe
from asyncflow.devices.protocol import LaunchingDevice as LaunchingDevice
from asyncflow.devices.protocol import LogicalDevice as LogicalDevice
from asyncflow.devices.protocol import Span as Span
from asyncflow.devices.registry import available_devices as available_devices
from asyncflow.devices.registry import open_devices as open_devices
from asyncflow.devices.sim.device import SimDevice as SimDevice
from asyncflow.devices.sim.machine import SimMachine as SimMachine
from asyncflow.devices.sim.machine import current_machine as current_machine
from asyncflow.devices.sim.machine import use_machine as use_machine
from asyncflow.devices.values import DeviceArray as DeviceArray
from asyncflow.devices.values import DeviceValue as DeviceValue
