"""How many threads BLAS may use, for the whole process, while sessions are open.

BLAS starts a thread a core and spins between calls. Beside an event loop and stream threads those fight for the same
cores: one model served with OpenBLAS's default was 12 times slower than with one thread. So the runtime takes the count
over while a session is open, and gives back what it found.

BLAS knows one count for the process. When open sessions ask for different ones, the smallest wins: it is the one that
cannot starve the others' event loops. (A BLAS built on OpenMP keeps a count per thread, and then only the thread that
acquired is limited; NumPy's own wheels carry OpenBLAS on plain threads.)

Where threadpoolctl is not installed, as on a machine with cards that runs asyncflow from its source tree with what it
has, BLAS keeps its threads, and a line in the log says so.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, Protocol

from asyncflow.devices.options import positive_count

try:
    from threadpoolctl import ThreadpoolController
except ModuleNotFoundError:
    ThreadpoolController = None

_log = logging.getLogger(__name__)


class BlasLease:
    """A session's claim on the number of BLAS threads, from `acquire_blas_threads`."""

    __slots__ = ("threads",)

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def release(self) -> None:
        """Give the claim up; the last one restores what the process had before. Idempotent."""
        _process.remove(self)


def acquire_blas_threads(threads: int) -> BlasLease:
    """Limit BLAS to ``threads`` threads, or fewer if another session asks for fewer, until the lease is released.

    Raises:
        ValueError: ``threads`` is no positive int.
    """
    lease = BlasLease(positive_count(threads, "the number of BLAS threads"))
    _process.add(lease)
    return lease


def blas_libraries() -> list[dict[str, Any]]:
    """Facts of threadpoolctl about each BLAS that is loaded; none without it."""
    known = [] if ThreadpoolController is None else ThreadpoolController().info()
    return [info for info in known if info["user_api"] == "blas"]


class _Limiter(Protocol):
    def restore_original_limits(self) -> None: ...


class _NoLimiter:
    def restore_original_limits(self) -> None:
        """There were none."""


class _Process:
    """The leases in force. Invariant: ``_found``, what to restore, is there exactly when there are leases."""

    __slots__ = ("_controller", "_found", "_leases", "_lock", "_modules")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[BlasLease] = []
        self._found: _Limiter | None = None
        self._controller: Any = None
        self._modules = 0

    def add(self, lease: BlasLease) -> None:
        """Put a lease in force."""
        with self._lock:
            before = self._smallest()
            self._leases.append(lease)
            if self._found is None:
                self._look_for_libraries()
                self._found = self._limit(lease.threads)
            elif before is not None and lease.threads < before:
                self._limit(lease.threads)

    def remove(self, lease: BlasLease) -> None:
        """Take a lease out of force."""
        with self._lock:
            if lease not in self._leases or self._found is None:
                return
            before = self._smallest()
            self._leases.remove(lease)
            now = self._smallest()
            if now is None:
                self._found.restore_original_limits()
                self._found = None
            elif now != before:
                self._limit(now)

    def _smallest(self) -> int | None:
        return min((lease.threads for lease in self._leases), default=None)

    def _limit(self, threads: int) -> _Limiter:
        if self._controller is None:
            return _NoLimiter()
        limiter: _Limiter = self._controller.limit(limits=threads, user_api="blas")
        return limiter

    def _look_for_libraries(self) -> None:
        if ThreadpoolController is None:
            _log.warning(
                "threadpoolctl is not installed: BLAS keeps its own threads, which fight with those of streams"
            )
            return
        # This walks every shared library of the process, so it is repeated only when an import may have loaded one.
        if self._controller is None or self._modules != len(sys.modules):
            self._controller = ThreadpoolController()
            self._modules = len(sys.modules)


_process = _Process()
