"""What machine is this? The processor, its memory, and whether an NVIDIA driver is there."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np

from asyncflow.devices.blas import blas_libraries


def processor() -> str:
    """The model name of the processor."""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def usable_cores() -> int:
    """How many cores this process may run on, which a container may have cut down."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> int | None:
    """Bytes of memory this process may use: the machine's, or its control group's if that is less; None if unknown."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
    group = next(iter(_lines("/sys/fs/cgroup/memory.max")), "max").strip()
    return min(machine, int(group)) if group.isdecimal() else machine


def blas_library() -> str:
    """The BLAS that NumPy calls, with its version."""
    libraries = blas_libraries()
    if not libraries:
        return f"{np.show_config(mode='dicts')['Build Dependencies']['blas']['name']} (not controllable)"
    return ", ".join(sorted({f"{info['internal_api']} {info['version'] or ''}".strip() for info in libraries}))


def has_nvidia_driver() -> bool:
    """Whether the driver's device files are there."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(errors="replace").splitlines() if file.is_file() else []
