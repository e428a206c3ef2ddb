"""NVIDIA's `cuda.bindings`, if installed: they have calls of the driver that CuPy lacks.

They make the conditional nodes of CUDA graphs, and let a stream write a number when its work is done.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw


_log = logging.getLogger("asyncflow.devices")

LEAST_VERSION = 13
"""The oldest major version; earlier ones have other results for the calls used here."""


Bindings: TypeAlias = "Raw"
"""Has the modules `cuda.bindings.driver` and `cuda.bindings.runtime`, whose functions give ``(error, *results)``."""

stand_ins: list[Bindings] = []
"""As in `asyncflow.devices.cuda.backend`."""


def cuda_bindings() -> Bindings | None:
    """The bindings; None without any, or with some that are too old. The first call imports them."""
    return stand_ins[-1] if stand_ins else _imported()


def bindings_beside(cupy: Cupy) -> Bindings | None:
    """The bindings that work on the same cards as `cupy`: a stand-in for the module brings its own."""
    return cuda_bindings() if isinstance(cupy, ModuleType) else cupy.bindings


@functools.cache
def _imported() -> Bindings | None:
    try:
        if importlib.util.find_spec("cuda.bindings") is None:
            return None
        bindings: Raw = importlib.import_module("cuda.bindings")
        importlib.import_module("cuda.bindings.driver")
        importlib.import_module("cuda.bindings.runtime")
        major = int(bindings.__version__.partition(".")[0])
    except Exception:  # with a broken installation, loops run without them
        _log.info("cuda.bindings cannot be used", exc_info=True)
        return None
    return None if major < LEAST_VERSION else bindings
