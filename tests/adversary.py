"""An adversarial machine: it pauses, stops and slows down the tests, at moments that a seed draws.

`pytest --adversary=SEED` runs the tests of concurrent code on it, `make test-adversary SEEDS=20` does so for 20 seeds.
For each test the seed draws the frequency of each disturbance, 30 % at most:

==================== =========================== ======================================================================
disturbance          when                        models
==================== =========================== ======================================================================
pause, 0.05 to 20 ms the library reads a clock   the collector, another process, a page that is swapped in
leap, 0.05 to 20 ms  the library reads a clock   the same, without the waiting; the clock goes on by so much
delay, 0.05 to 3 ms  a callback is scheduled     a loop that has other things to do
delay, 0.05 to 3 ms  a thread starts             a machine with fewer cores than threads
delay, 0.05 to 3 ms  a thread calls the loop     the same
stop, 5 to 200 ms    at any moment               a laptop that goes to sleep: another process sends SIGSTOP
==================== =========================== ======================================================================

It also draws the speed of the machine, 0.1 to 20 times (the clock runs 10 to 0.05 times as fast), and how often threads
hand over the GIL, every 0.01 to 20 ms.

The results of a test must not change. The calls that share a batch may, so a test that asserts them holds its clock
with the fixture `work`. That clock neither leaps nor runs faster, but all else happens. Tests marked `real_time`
read the machine's clock, with pauses. In all, a test is held up for `MOST_S` seconds at most; leaps go on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextvars import Context
from functools import partial
from inspect import iscoroutinefunction, unwrap
from math import exp, log
from random import Random
from typing import TYPE_CHECKING, TypeVarTuple, Unpack
from zlib import crc32

import pytest

from tests import loops
from tests.clocks import CLOCKS, REAL, Readings, WorkClock
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    _Loop = loops.SteadyLoop
else:
    _Loop = object

_Args = TypeVarTuple("_Args")

SHORT_S, LONG_S = (0.05e-3, 3e-3), (0.05e-3, 20e-3)
RATES = (0.0, 0.01, 0.1, 0.3)
SPEEDS = (0.1, 20.0)
SWITCHES_S = (0.01e-3, 20e-3)

MOST_S = 1.5
"""The longest time for which one test is held up, stops from outside apart."""

MOST_LEAPS_S = 20.0
"""The most that its clock leaps in all: less than any test is patient."""

GUARD_S = 30.0
"""Timers of at least this many seconds are for tests that hang, and go by the machine's clock."""

KINDS = ("pause", "leap", "callback", "start", "hand-over")


class Disturbances:
    """The disturbances of one test."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)
        self.rates = {kind: self._random.choice(RATES) for kind in KINDS}
        self.clock_rate = 1 / self._between(SPEEDS)
        self.switch_s = self._between(SWITCHES_S)
        self._left_s, self._leaps_s = MOST_S, MOST_LEAPS_S

    def hold_up(self, kind: str, least_and_most_s: tuple[float, float] = SHORT_S) -> None:
        """Perhaps let the calling thread sleep."""
        if self._left_s > 0 and self._random.random() < self.rates[kind]:
            seconds = self._between(least_and_most_s)
            self._left_s -= seconds
            time.sleep(seconds)

    def leap_s(self) -> float:
        """Return by how much a clock leaps that is read now; mostly 0."""
        if self._leaps_s <= 0 or self._random.random() >= self.rates["leap"]:
            return 0.0
        seconds = self._between(LONG_S)
        self._leaps_s -= seconds
        return seconds

    def _between(self, least_and_most: tuple[float, float]) -> float:
        least, most = least_and_most
        return exp(self._random.uniform(log(least), log(most)))


class HeldClock(WorkClock):
    """The clock of a test with the fixture `work`: whoever looks may be held up, and finds that no time has passed."""

    def __init__(self, disturbances: Disturbances, *, is_held: bool = True) -> None:
        super().__init__(is_held=is_held)
        self.disturbances = disturbances

    def now_ns(self) -> int:
        self.disturbances.hold_up("pause", LONG_S)
        return super().now_ns()

    def thread_ns(self) -> int:
        self.disturbances.hold_up("pause", LONG_S)
        return super().thread_ns()


class LeapingClock(HeldClock):
    """The clock of other tests: the machine's, faster or slower, and it leaps."""

    def __init__(self, disturbances: Disturbances) -> None:
        super().__init__(disturbances, is_held=False)
        self._began_s, self._ahead_s = time.perf_counter(), 0.0

    def machine_s(self) -> float:
        return (time.perf_counter() - self._began_s) * self.disturbances.clock_rate + self._ahead_s

    def now_ns(self) -> int:
        self.disturbances.hold_up("pause", LONG_S)
        return int(self._seen_s() * 1e9)

    def slice_ns(self) -> int:
        return self.now_ns()

    def thread_ns(self) -> int:
        self.disturbances.hold_up("pause", LONG_S)
        return getattr(self._worked, "ns", 0) + int(time.thread_time_ns() * self.disturbances.clock_rate)

    def work(self, ns: int) -> None:
        super().work(ns)
        with self._lock:
            self._ahead_s += ns / 1e9

    def loop_s(self) -> float:
        self._loop_s = max(self._loop_s, self._seen_s())
        return self._loop_s

    def reach(self, when_s: float) -> None:
        with self._lock:
            self._ahead_s += max(0.0, when_s - self.machine_s())
        self._loop_s = max(self._loop_s, when_s)

    def counted_s(self, passed_s: float, most_s: float) -> float:
        return passed_s

    def waits_s(self, delay_s: float) -> float:
        return delay_s if delay_s < GUARD_S else delay_s * self.disturbances.clock_rate + MOST_LEAPS_S

    def _seen_s(self) -> float:
        leap_s = self.disturbances.leap_s()
        with self._lock:
            self._ahead_s += leap_s
            return self.machine_s()


class _Delays(_Loop):
    """The part of an event loop that is held up."""

    _clock: HeldClock

    def call_soon(
        self, callback: Callable[[Unpack[_Args]], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.Handle:
        self._clock.disturbances.hold_up("callback")
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[_Args]], object], *args: *_Args, context: Context | None = None
    ) -> asyncio.Handle:
        self._clock.disturbances.hold_up("hand-over")
        return super().call_soon_threadsafe(callback, *args, context=context)


class _DelayedLoop(_Delays, loops.SteadyLoop):
    pass


class _DelayedUvLoop(_Delays, loops.SteadyUvLoop):  # type: ignore[misc]
    pass


class Adversary:
    """The plugin.

    Args:
        seed: any word; it draws all disturbances.
        share: one of `share` test functions has its turn, another with another seed.
    """

    def __init__(self, seed: str, share: int) -> None:
        self.seed, self.share = seed, share
        self._current: Disturbances | None = None
        self._switch_s = sys.getswitchinterval()
        self._stopper: subprocess.Popen[bytes] | None = None
        loops.KINDS.update(asyncio=_DelayedLoop, uvloop=_DelayedUvLoop)
        start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        def start_late(thread: threading.Thread) -> None:
            if self._current is not None:
                self._current.hold_up("start")
            start(thread)

        threading.Thread._bootstrap_inner = start_late  # type: ignore[attr-defined]

    def begin(self, test: pytest.Item, *, is_held: bool, is_real: bool) -> None:
        """Set the clock of a test that begins."""
        disturbances = self._current = Disturbances(f"{self.seed} {test.nodeid}")
        sys.setswitchinterval(disturbances.switch_s)
        if is_real:
            CLOCKS.set(None, _with_pauses(disturbances))
            return
        clock = HeldClock(disturbances) if is_held else LeapingClock(disturbances)
        CLOCKS.set(clock, clock.readings())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """Let the machine be as it was once a test has ended."""
        yield
        self._current = None
        sys.setswitchinterval(self._switch_s)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out tests without concurrency, and tests whose turn has not come."""
        chosen = [item for item in items if _is_concurrent(item) and self._has_turn(item)]
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen

    def _has_turn(self, test: pytest.Item) -> bool:
        return crc32(f"{self.seed} {test.nodeid.partition('[')[0]}".encode()) % self.share == 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start the process that stops this one, if tests run here."""
        if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
            argv = [sys.executable, "-c", _STOPPER, str(os.getpid()), self.seed]
            self._stopper = subprocess.Popen(argv, stdin=subprocess.PIPE)

    def pytest_sessionfinish(self) -> None:
        """End it."""
        if self._stopper is not None:
            assert self._stopper.stdin is not None
            self._stopper.stdin.close()
            self._stopper.wait(PATIENCE_S)

    def pytest_report_header(self) -> str:
        """Say what repeats the run."""
        return f"adversary: --adversary={self.seed}"


def _is_concurrent(test: pytest.Item) -> bool:
    """Return True if the test is a coroutine, or its module uses threads or event loops."""
    assert isinstance(test, pytest.Function)
    return iscoroutinefunction(unwrap(test.function)) or not {"asyncio", "threading"}.isdisjoint(vars(test.module))


def _with_pauses(disturbances: Disturbances) -> Readings:
    """Return the functions of the machine's clock; whoever calls them may be held up."""

    def read(real: Callable[[], float]) -> float:
        disturbances.hold_up("pause", LONG_S)
        return real()

    return {name: partial(read, real) for name, real in REAL.items()}


_STOPPER = """
import os, random, select, signal, sys, time
pid, random = int(sys.argv[1]), random.Random(sys.argv[2])
signal.signal(signal.SIGINT, signal.SIG_IGN)
while not select.select([sys.stdin], [], [], random.uniform(0.1, 1.5))[0]:
    try:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.005 * 40 ** random.random())
    finally:
        os.kill(pid, signal.SIGCONT)
"""
"""The program of a process that stops another one now and then, until its own input ends."""
