"""NVIDIA's `cuda.bindings`, if they are there: they make the conditional nodes of CUDA graphs, which CuPy does not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Raw


_log = logging.getLogger("asyncflow.devices")

LEAST_VERSION = 13
"""The oldest major version; earlier ones have other results for the calls used here."""


class Bindings(Protocol):
    """The modules `cuda.bindings.driver` and `cuda.bindings.runtime`."""

    @property
    def driver(self) -> Raw:
        """Its functions give ``(error, *results)``."""

    @property
    def runtime(self) -> Raw:
        """Likewise."""


_stand_ins: list[Bindings] = []


def cuda_bindings() -> Bindings | None:
    """The bindings; None without any, or with some that are too old. The first call imports them."""
    return _stand_ins[-1] if _stand_ins else _imported()


@contextmanager
def using_bindings(bindings: Bindings) -> Iterator[None]:
    """Loops captured inside are captured by `bindings`; for tests without a card."""
    _stand_ins.append(bindings)
    try:
        yield
    finally:
        _stand_ins.remove(bindings)


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
