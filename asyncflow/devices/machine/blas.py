"""Number of BLAS threads, for the whole process, while sessions are open.

BLAS starts a thread a core and spins between calls. Beside an event loop and stream threads those fight for the same
cores: one model served with OpenBLAS's default was 12 times slower than with one thread. So the runtime takes the count
over while a session is open, and restores the old one at the end.

BLAS knows one count for the process. When open sessions ask for different counts, the smallest wins: it cannot starve
the others' event loops. (A BLAS built on OpenMP keeps a count per thread, and then only the thread that acquired is
limited; NumPy's own wheels carry OpenBLAS on plain threads.)

Threadpoolctl may be missing, as on a machine with cards that runs asyncflow from its source tree. Then BLAS keeps its
threads, and a line in the log says so.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

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


class _Process:
    """The leases in force. Invariant: ``_found`` is what to restore, if BLAS can be told and there are leases."""

    __slots__ = ("_controller", "_found", "_leases", "_lock", "_modules", "_threads")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: list[BlasLease] = []
        self._threads: int | None = None
        self._found: Any = None
        self._controller: Any = None
        self._modules = 0

    def add(self, lease: BlasLease) -> None:
        """Put a lease in force."""
        with self._lock:
            self._leases.append(lease)
            self._settle()

    def remove(self, lease: BlasLease) -> None:
        """Take a lease out of force, if it is."""
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)
                self._settle()

    def _settle(self) -> None:
        """Have BLAS use as many threads as the smallest lease says, or as many as it found if there is none."""
        before, self._threads = self._threads, min((lease.threads for lease in self._leases), default=None)
        if before is None:
            self._look_for_libraries()
        if self._controller is None or self._threads == before:
            return
        if self._threads is None:
            self._found.restore_original_limits()
            return
        limiter = self._controller.limit(limits=self._threads, user_api="blas")
        if before is None:
            self._found = limiter

    def _look_for_libraries(self) -> None:
        if ThreadpoolController is None:
            _log.warning(
                "threadpoolctl is not installed: BLAS keeps its own threads, which compete with the streams' threads"
            )
        # This walks every shared library of the process, so it is repeated only when an import may have loaded one.
        elif self._controller is None or self._modules != len(sys.modules):
            self._controller = ThreadpoolController()
            self._modules = len(sys.modules)


_process = _Process()
