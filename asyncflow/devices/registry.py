"""Which devices are there, and how does a session get the ones it names?"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow.devices import hardware
from asyncflow.devices.cpu import CpuDevice
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.names import DeviceName, DeviceSpec
from asyncflow.devices.protocol import Device
from asyncflow.errors import PlacementError

_DEFAULT = ("cpu:0",)
_AVAILABLE = "available are logical CPU devices, as many as you like: cpu:0, cpu:1, ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    """One line of ``asyncflow devices``."""

    name: str
    """Such as ``cpu:0``; a kind alone where there is none of it."""
    available: bool
    detail: str
    """What it is; where it is not available, why."""


def open_devices(specs: Sequence[str] | None = None, memory_limit: int | None = None) -> tuple[Device, ...]:
    """The devices of a session, in the order named; each may hold ``memory_limit`` bytes (None: no limit).

    None means ``["cpu:0"]``. A kind alone is its device 0. The caller closes them.

    Raises:
        PlacementError: a name that is none, is there twice, or is of a kind that is not available; or no name at all.
        ValueError: ``memory_limit`` is no positive number of bytes.
    """
    if isinstance(specs, str):
        raise PlacementError(f"devices= is a list of names, not one str; say devices=[{specs!r}]")
    names = [_full_name(spec) for spec in (_DEFAULT if specs is None else specs)]
    if not names:
        raise PlacementError(f"devices= is empty and a session needs one; leave it out for {_DEFAULT[0]}; {_AVAILABLE}")
    for name in names:
        _check_available(name)
        if names.count(name) > 1:
            raise PlacementError(f"device {name} is named {names.count(name)} times in devices=; name each once")
    return tuple(CpuDevice(name.index, memory_limit=memory_limit) for name in names)


def available_devices() -> tuple[DeviceDescription, ...]:
    """What this machine has, and for what it has not, why."""
    memory = hardware.usable_memory()
    parts = (
        hardware.processor(),
        f"{hardware.usable_cores()} cores",
        "memory unknown" if memory is None else format_bytes(memory),
        hardware.blas_library(),
    )
    cpu = DeviceDescription(name="cpu:0", available=True, detail=", ".join(parts))
    return (cpu, DeviceDescription(name="cuda", available=False, detail=_why_no_cuda()))


def _full_name(spec: str) -> DeviceName:
    parsed = DeviceSpec.parse(spec)
    return DeviceName(parsed.kind or "cpu", parsed.index or 0)


def _check_available(name: DeviceName) -> None:
    if name.kind == "cuda":
        raise PlacementError(
            f"device {name}: CUDA devices are not built into this version; run `asyncflow devices` to see what this "
            f"machine has and why CUDA is off; {_AVAILABLE}"
        )
    if name.kind != "cpu":
        raise PlacementError(f"device {name}: {name.kind} devices are not built into this version; {_AVAILABLE}")


def _why_no_cuda() -> str:
    reasons = ["CUDA devices are not built into this version"]
    if not hardware.has_nvidia_driver():
        reasons.append("no NVIDIA driver found")
    if importlib.util.find_spec("cupy") is None:
        reasons.append("cupy is not installed")
    return "off: " + "; ".join(reasons)
