"""The machine: processor, memory, and presence of an NVIDIA driver."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np

from asyncflow.devices.machine.blas import blas_libraries

KERNEL_VARIABLES: Final = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "BLIS_ARCH_TYPE",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables that make a BLAS take other kernels, or other blocks, than it would choose by itself."""

ASK_S: Final = 30.0
"""Seconds that another process may take to name its BLAS."""


def processor() -> str:
    """The model name of the processor."""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def usable_cores() -> int:
    """Return the number of cores this process may run on, which a container may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory() -> int | None:
    """Return the bytes of memory this process may use: the machine's, or its control group's if less; None if
    unknown.
    """
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
    group = next(iter(_lines("/sys/fs/cgroup/memory.max")), "max").strip()
    return min(machine, int(group)) if group.isdecimal() else machine


def blas_library() -> str:
    """Return the BLAS that NumPy calls, with its version and the processor whose kernels it uses."""
    libraries = blas_libraries()
    if not libraries:
        return f"{np.show_config(mode='dicts')['Build Dependencies']['blas']['name']} (not controllable)"
    named = {
        f"{info['internal_api']} {info['version'] or ''}".strip()
        + (f" with its {kernels} kernels" if (kernels := info.get("architecture")) else "")
        for info in libraries
    }
    return ", ".join(sorted(named))


def blas_hindrance() -> str | None:
    """Describe the setting that keeps NumPy's BLAS from its own choice of kernels; None without one.

    Another process, without the variables, finds that choice: a setting that asks for the very same kernels does no
    harm.
    """
    given = {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ}
    if not given:
        return None
    free = {name: value for name, value in os.environ.items() if name not in given}
    ask = "from asyncflow.devices.machine.hardware import blas_library; print(blas_library())"
    command = [sys.executable, "-c", ask]
    done = subprocess.run(command, env=free, capture_output=True, text=True, check=True, timeout=ASK_S)
    chosen = done.stdout.strip()
    here = blas_library()
    settings = " ".join(f"{name}={value}" for name, value in given.items())
    if chosen != here:
        effect = f"it uses {here}, and by itself {chosen}"
    elif "OPENBLAS_L2_SIZE" in given:
        effect = "it cuts its blocks for another cache"
    else:
        return None
    return (
        f"{settings} in the environment holds NumPy's BLAS back: {effect}; unset it before Python starts, unless this "
        "machine needs it"
    )


def has_nvidia_driver() -> bool:
    """Return True if the driver's device files exist."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"))


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(errors="replace").splitlines() if file.is_file() else []
