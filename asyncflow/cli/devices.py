"""``asyncflow devices``: what graphs can run on here."""

from __future__ import annotations

from asyncflow.devices.registry import available_devices


def list_devices() -> str:
    """One line a device; for a kind that is not there, why."""
    devices = available_devices()
    width = max(len(device.name) for device in devices)
    return "\n".join(f"{device.name:<{width}}  {device.detail}" for device in devices)
