"""Processor time of a test, with its threads and the processes that it started.

Time of the processor, not of the clock. A test that takes more than `LIMIT_S` is marked ``slow``, or made smaller;
other such tests are listed at the end. Under CI a test that took far more runs again, twice at most. It fails if it
did so all three times, in seconds of a quiet machine. The time of a piece of work says how much slower this machine is.
So no test fails for being the first to import something, nor because the machine is busy.

``ASYNCFLOW_PROCESSOR_TIMES=times.json make test`` writes the time of every test, and from that
``python -m tests.processor_time times.json`` makes the list ``costly.txt`` anew, by which `tests.cells` chooses.
Compare the lines that the parts of a new function reach (coverage with a context for each test) before it is divided.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import defaultdict
from math import ceil
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, cast

import pytest
from _pytest.runner import runtestprotocol

from tests.cells import COSTLY, COSTLY_LIST

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

LIMIT_S = 0.5
FAR_BEYOND = 3.0
"""Multiple of the limit beyond which a test fails: beside many other processes the same work has taken twice the
time.
"""
ATTEMPTS = 3
LISTED = 30

SHARE_S = 0.05
"""The tests of one function take about so much together in a run, or only a part of them runs."""

MOST_PARTS = 12

WORK_S = 0.007
"""Time of `_work` on a quiet machine like CI's."""

RESULT = "ASYNCFLOW_PROCESSOR_TIMES"
PROPERTY = "processor_s"
"""Under this name a test's report, which crosses processes, has the seconds."""


class ProcessorTime:
    """A plugin that measures all tests; the environment variable `RESULT` names a file for what each one took."""

    def __init__(self) -> None:
        self.taken: dict[str, tuple[float, bool]] = {}

    # The innermost wrapper, for the limit on tests that hang to hold for all attempts together.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        failed, started_s = item.session.testsfailed, _processor_s()
        result = yield
        seconds, is_slow = _processor_s() - started_s, item.get_closest_marker("slow") is not None
        if seconds <= LIMIT_S and RESULT not in os.environ:
            return result
        report = pytest.TestReport(item.nodeid, item.location, {}, "passed", None, "teardown")
        if seconds > LIMIT_S and not is_slow and "CI" in os.environ and item.session.testsfailed == failed:
            seconds, attempts = seconds / _slowness(), 1
            while seconds > LIMIT_S * FAR_BEYOND and attempts < ATTEMPTS:
                seconds, attempts = min(seconds, _again_s(item, nextitem)), attempts + 1
            if seconds > LIMIT_S * FAR_BEYOND:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {seconds:.1f} s of processor time or more, {ATTEMPTS} times. A test takes at "
                    f"most {LIMIT_S} s: make it smaller, or mark it with @pytest.mark.slow."
                )
        report.user_properties.append((PROPERTY, (seconds, is_slow)))
        item.ihook.pytest_runtest_logreport(report=report)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.taken[report.nodeid] = cast("tuple[float, bool]", value)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if path := os.environ.get(RESULT):
            Path(path).write_text(json.dumps(self.taken), encoding="utf-8")
        long = sorted(
            ((s, test) for test, (s, is_slow) in self.taken.items() if s > LIMIT_S and not is_slow), reverse=True
        )
        if long:
            terminalreporter.section(
                f"{len(long)} tests took over {LIMIT_S} s of processor time without the mark `slow`"
            )
            for seconds, test in long[:LISTED]:
                terminalreporter.line(f"{seconds:6.2f} s  {test}")


def _again_s(item: pytest.Item, nextitem: pytest.Item | None) -> float:
    """Run a test once more and return its time; its outcome does not count."""
    cast("pytest.Function", item)._initrequest()  # as at first, without values of fixtures
    slowness = _slowness()
    started_s = _processor_s()
    runtestprotocol(item, log=False, nextitem=nextitem)
    return (_processor_s() - started_s) / max(slowness, _slowness())


def _slowness() -> float:
    """Return how many times as long as on a quiet machine work takes now: by the clock, so that waiting counts as
    well.
    """
    started_s = perf_counter()
    _work()
    return (perf_counter() - started_s) / WORK_S


def _work() -> None:
    table: dict[int, int] = {}
    for number in range(60_000):
        table[number & 1023] = table.get((number * 7) & 1023, 0) + number


def _processor_s() -> float:
    """Return the processor time of this process and of the processes that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def costly(taken: Mapping[str, Iterable[float]], listed: Mapping[str, int] = COSTLY) -> dict[str, int]:
    """Return into how many parts to divide each function that takes more than its share; one has run of those `listed`.

    Functions of one test cannot be divided. Functions that are listed with one part stay so: lines of the package are
    reached by single sets of theirs, and by no other test.
    """
    tests: defaultdict[str, list[float]] = defaultdict(list)
    for test, (seconds, is_slow) in taken.items():
        if not is_slow:
            tests[test.partition("[")[0]].append(seconds)
    parts = {}
    for function, each in sorted(tests.items()):
        of = listed.get(function, 1)
        count = min(ceil(sum(each) * of / SHARE_S), len(each) * of, MOST_PARTS)
        if count > 1:
            parts[function] = 1 if listed.get(function) == 1 else count
    return parts


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    COSTLY_LIST.write_text("".join(f"{each} {n}\n" for each, n in costly(measured).items()), encoding="utf-8")
