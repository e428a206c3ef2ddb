"""The runtime's clocks in the hands of a test: what a session does, and where, does not depend on the machine."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_WITH_CLOCKS = ("asyncflow.", "tests.fake_cupy.")

LIGHT_NS = 1_000
"""What a short step of a test's programs takes."""


class WorkClock:
    """Time passes where a test says that work is done, and by a nanosecond when somebody looks.

    On a real clock a pause counts as work, be it of the garbage collector or of the whole machine, and what it happens
    to fall into goes to a thread. Sessions have to be opened after the clock was made.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._now_ns = 0
        self._worked = threading.local()
        clocks = {"perf_counter_ns": self._perf_counter_ns, "thread_time_ns": self._thread_time_ns}
        for module in [module for name, module in sys.modules.items() if name.startswith(_WITH_CLOCKS)]:
            for name, clock in clocks.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, clock)

    def work(self, ns: int) -> None:
        """The calling thread works for so long."""
        with self._lock:
            self._now_ns += ns
        self._worked.ns = self._thread_time_ns() + ns

    def wait(self, ns: int) -> None:
        """The calling thread waits for so long, which takes no time of the processor."""
        with self._lock:
            self._now_ns += ns

    def _perf_counter_ns(self) -> int:
        with self._lock:
            self._now_ns += 1
            return self._now_ns

    def _thread_time_ns(self) -> int:
        return int(getattr(self._worked, "ns", 0))
