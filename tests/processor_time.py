"""How much processor time a test takes, its threads and the processes that it started included.

Time of the processor, not of the clock: a busy machine fails no test. A test that takes more than `LIMIT_S` is marked
``slow``, or made smaller; those that are neither are listed at the end, and under CI fail when they are far beyond it.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

LIMIT_S = 0.5
FAR_BEYOND = 10.0
"""Machines differ in speed, and busy ones in what a test takes of it; what is beyond by so much is slow anywhere."""
LISTED = 30

PROPERTY = "processor_s"
"""Under this name a test's report, which crosses processes, has the seconds."""


class ProcessorTime:
    """A plugin that measures all tests; environment variable ASYNCFLOW_PROCESSOR_TIMES names a file for the result."""

    def __init__(self) -> None:
        self.started_s = 0.0
        self.taken: dict[str, tuple[float, bool]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.started_s = _processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            seconds, is_slow = _processor_s() - self.started_s, item.get_closest_marker("slow") is not None
            report.user_properties.append((PROPERTY, (seconds, is_slow)))
            if "CI" in os.environ and report.passed and not is_slow and seconds > LIMIT_S * FAR_BEYOND:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {seconds:.1f} s of processor time. A test takes at most {LIMIT_S} s: "
                    "make it smaller, or mark it with @pytest.mark.slow."
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                seconds, is_slow = cast("tuple[float, bool]", value)
                self.taken[report.nodeid] = seconds, is_slow

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if path := os.environ.get("ASYNCFLOW_PROCESSOR_TIMES"):
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


def _processor_s() -> float:
    """Of this process and of those it started and has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime
