"""Availability of CUDA on this machine, with the reason if it is off. The only module that imports CuPy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncflow.devices.machine import hardware
from asyncflow.devices.memory import format_bytes
from asyncflow.foreign_names import install

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy

_log = logging.getLogger("asyncflow.devices")

LEAST_VERSION = 14
"""The oldest major version of CuPy whose behaviour this package was written for."""


@dataclass(frozen=True, slots=True)
class CudaBackend:
    """CuPy and its cards.

    Attributes:
        cupy: the module; None if CUDA is not usable.
        cards: one line about each card.
        reason: why CUDA is not usable; empty if it is.
    """

    cupy: Cupy
    cards: tuple[str, ...] = ()
    reason: str = ""


stand_ins: list[CudaBackend] = []
"""Replacements for the real backend in tests without a card; the last one counts."""


def cuda_backend() -> CudaBackend:
    """Return CUDA on this machine. The first call imports CuPy where there is a driver, and runs one kernel on each
    card.
    """
    return stand_ins[-1] if stand_ins else _probe()


@functools.cache
def _probe() -> CudaBackend:
    missing = _what_is_missing()
    if missing:
        return CudaBackend(None, reason="; ".join(missing))
    try:
        cupy = importlib.import_module("cupy")
        if not cupy.cuda.is_available():
            return CudaBackend(None, reason="CuPy finds no CUDA device (is CUDA_VISIBLE_DEVICES empty?)")
        major = int(cupy.__version__.partition(".")[0])
        if major < LEAST_VERSION:
            return CudaBackend(None, reason=f"CuPy {cupy.__version__} is too old; version {LEAST_VERSION} is needed")
        return describe_cards(cupy, try_kernel=True)
    except Exception as error:  # a broken installation must not break the CPU
        _log.info("CUDA is off", exc_info=True)
        return CudaBackend(None, reason=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _what_is_missing() -> list[str]:
    missing = []
    if not hardware.has_nvidia_driver():
        missing.append("no NVIDIA driver found")
    if importlib.util.find_spec("cupy") is None:
        missing.append(f"cupy is not installed ({install('cuda13')}, or cuda12, whichever fits the driver)")
    return missing


def describe_cards(cupy: Cupy, *, try_kernel: bool = False) -> CudaBackend:
    """Return the backend of this CuPy module; with `try_kernel`, each card has to run a kernel."""
    lines = []
    runtime = cupy.cuda.runtime
    for card in range(runtime.getDeviceCount()):
        with cupy.cuda.Device(card):
            if try_kernel and int((cupy.arange(4) + 1).sum()) != 10:
                return CudaBackend(None, reason=f"card {card} computes 1 + 2 + 3 + 4 wrongly")
            _, total = runtime.memGetInfo()
        name = runtime.getDeviceProperties(card)["name"]
        lines.append(f"{name.decode() if isinstance(name, bytes) else name}, {format_bytes(total)}")
    return CudaBackend(cupy, tuple(lines))
