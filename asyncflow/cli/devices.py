"""``asyncflow devices``: what graphs can run on here."""

from __future__ import annotations

from asyncflow.devices.figures.presets import CARDS, LINKS
from asyncflow.devices.machine.hardware import blas_hindrance
from asyncflow.devices.registry import available_devices


def list_devices() -> str:
    """Return one line a device, the reason why a kind is missing, hints on slow kernels, and the devices that can be
    simulated.
    """
    cpu, *others = [(device.name, device.detail) for device in available_devices()]
    hindrance = blas_hindrance()
    lines = [
        cpu,
        *([("", hindrance)] if hindrance is not None else []),
        *others,
        ("sim", "off outside asyncflow.testing.virtual_clock() and asyncflow simulate"),
        ("", f"cards {', '.join(CARDS)}"),
        ("", f"links {', '.join(LINKS)}"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {detail}" for name, detail in lines)
