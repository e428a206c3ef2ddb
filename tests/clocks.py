"""Clocks of the library in the hands of a test: actions of a session, and their places, do not depend on the machine.

Every test has a clock of its own, on which computing takes no time. `pytest_runtest_setup` in `tests.conftest` sets it.

======================== ===============================================================================================
the test                 its clock
======================== ===============================================================================================
most tests               a `WorkClock`: each look at it takes 10 µs
has the fixture `work`   a `WorkClock` that the test moves with `work`: each look takes a nanosecond. Only such a test
                         may assert which calls share a batch, where a firing runs, or the order of unordered work
is marked `real_time`    the machine's clock
======================== ===============================================================================================

The clock gives `perf_counter`, `monotonic`, `process_time` and `thread_time` to all modules of the library, and the
time of event loops (`tests.loops`). The adversary (`tests.adversary`) disturbs the clocks of tests without `work`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TypeAlias

_READERS = ("asyncflow.", "tests.fake_cupy.")
"""Packages whose modules read the clock of the test."""

ABOUT_THREADS = ("asyncflow.streams.beside", "asyncflow.streams.handover")
"""Modules that hand the GIL over to other threads, which really run."""

_IN_NS = {
    "perf_counter_ns": True,
    "monotonic_ns": True,
    "thread_time_ns": True,
    "process_time_ns": True,
    "perf_counter": False,
    "monotonic": False,
    "thread_time": False,
    "process_time": False,
}
_OF_THREADS = ("thread_time_ns", "thread_time", "process_time_ns", "process_time")

LIGHT_NS = 1_000
"""The time of a short step in a test's programs."""

LOOK_NS = 10_000
"""The time that a look takes in tests without the fixture `work`: a loop that ends by the clock does end."""

SLICE_NS = 100_000
"""The time that a look between two slices of a region takes there: a burst has a few slices, however long they are."""

_SLICES = "asyncflow.runtime.executor.kernels.sliced_region"

Readings: TypeAlias = Mapping[str, Callable[[], float]]
"""The functions of a clock by their names in `time`."""

REAL: Readings = {**{name: getattr(time, name) for name in _IN_NS}, "slice_ns": time.perf_counter_ns}


class WorkClock:
    """A clock that moves when a test declares work, when a timer of an event loop fires, and a bit per look.

    On a real clock a pause of the garbage collector or of the whole machine counts as work. The work that it
    interrupts then goes to a thread.

    Args:
        is_held: the test moves it, and a look takes a nanosecond, or none of a thread's own time.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        self.is_held = is_held
        self.look_ns = 1 if is_held else LOOK_NS
        self._lock = threading.Lock()
        self._now_ns = 0
        self._loop_s = 0.0
        self._worked = threading.local()

    def work(self, ns: int) -> None:
        """Let the calling thread work for so long."""
        with self._lock:
            self._now_ns += ns
        self._worked.ns = getattr(self._worked, "ns", 0) + ns

    def wait(self, ns: int) -> None:
        """Let the calling thread wait for so long, which takes no time of the processor."""
        with self._lock:
            self._now_ns += ns

    def now_ns(self) -> int:
        """Return the time of the clock, in nanoseconds."""
        with self._lock:
            self._now_ns += self.look_ns
            return self._now_ns

    def slice_ns(self) -> int:
        """Return the time of the clock to a region that has computed a slice, or begins one."""
        if not self.is_held:
            self.wait(SLICE_NS - self.look_ns)
        return self.now_ns()

    def thread_ns(self) -> int:
        """Return the time for which the calling thread has worked, in nanoseconds."""
        worked_ns = int(getattr(self._worked, "ns", 0))
        if not self.is_held:
            self._worked.ns = worked_ns = worked_ns + self.look_ns
        return worked_ns

    def loop_s(self) -> float:
        """Return the time of event loops, in seconds: the same clock; looking takes no time."""
        self._loop_s = max(self._loop_s, self._now_ns / 1e9)
        return self._loop_s

    def reach(self, when_s: float) -> None:
        """Move on to `when_s`, the time of a timer that fires now."""
        with self._lock:
            self._now_ns = max(self._now_ns, -int(-when_s * 1e9 // 1))
        self._loop_s = max(self._loop_s, when_s)

    def machine_s(self) -> float:
        """Return the time by which timers fire, in seconds."""
        return perf_counter()

    def counted_s(self, passed_s: float, most_s: float) -> float:
        """Return how much of the time that has passed brings timers nearer: of a pause, `most_s`."""
        return min(passed_s, most_s)

    def waits_s(self, delay_s: float) -> float:
        """Return the time after which a timer of this delay fires."""
        return delay_s

    def readings(self) -> Readings:
        """Return the functions that read this clock."""
        read: dict[str, Callable[[], float]] = {"slice_ns": self.slice_ns}
        for name, in_ns in _IN_NS.items():
            whole = self.thread_ns if name in _OF_THREADS else self.now_ns
            read[name] = whole if in_ns else lambda whole=whole: whole() / 1e9  # type: ignore[misc]
        return read


class _Clocks:
    """The clock of the test that runs, and the places in the library that read it."""

    def __init__(self) -> None:
        self.current: WorkClock | None = None
        self._known = 0
        self._sites: list[tuple[dict[str, object], str, str]] = []

    def set(self, clock: WorkClock | None, readings: Readings) -> None:
        """Have the library, as far as it is imported, read this clock; None for the machine's."""
        if len(sys.modules) != self._known:
            self._find_sites()
        self.current = clock
        for namespace, name, reading in self._sites:
            namespace[name] = readings[reading]

    def _find_sites(self) -> None:
        self._known = len(sys.modules)
        modules = [module for name, module in sys.modules.items() if _reads(name)]
        ours = {id(namespace) for namespace, *_ in self._sites}
        for module in modules:
            namespace = vars(module)
            if id(namespace) not in ours:
                names = [name for name, real in REAL.items() if namespace.get(name) is real]
                self._sites += [(namespace, name, _reading(module.__name__, name)) for name in names]


def _reading(module: str, name: str) -> str:
    return "slice_ns" if (module, name) == (_SLICES, "perf_counter_ns") else name


def _reads(module: str) -> bool:
    return module.startswith(_READERS) and module not in ABOUT_THREADS


CLOCKS = _Clocks()
