"""NVIDIA's `cuda.bindings`, if installed: they make the conditional nodes of CUDA graphs, which CuPy does not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Raw


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


@functools.cache
def _imported() -> Bindings | None:
    try:
        if importlib.util.find_spec("cuda.bindings") is None:
            return None
        bindings: Any = importlib.import_module("cuda.bindings")
        importlib.import_module("cuda.bindings.driver")
        importlib.import_module("cuda.bindings.runtime")
        major = int(bindings.__version__.partition(".")[0])
    except Exception:  # whatever is wrong with the installation, loops run without them
        _log.info("cuda.bindings cannot be used", exc_info=True)
        return None
    return None if major < LEAST_VERSION else bindings
