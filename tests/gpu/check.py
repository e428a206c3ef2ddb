"""``python -m tests.gpu.check A --out FOLDER``, then ``B``: all tests of this folder, one JSON line each.

A tests correctness (T0 to T11, T23, T24), B features and timing (T12 to T22). The lines go to standard
output and to ``FOLDER/results-A.jsonl`` as the tests end, so a run that is cut short leaves its results. Timelines
go to the same folder. On a card each part takes less than nine minutes, after which it ends itself with the stacks of
all threads. Without a card the stand-in for CuPy is used, and the first line says so.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import pytest

from asyncflow.devices.cuda.backend import cuda_backend

HERE = Path(__file__).parent
PARTS: Mapping[str, Collection[int]] = {"A": {*range(12), 23, 24}, "B": range(12, 23)}
LIMIT_S = 530.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0 if all tests passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check", description=__doc__)
    parser.add_argument("part", choices=[*PARTS], help="A: what has to be right; B: features and timing")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results and timelines")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="WHAT",
        help="leave out what needs it: compute-sanitizer, ...",
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="end after so many seconds")
    parser.add_argument("-k", dest="keyword", default="", help="only tests whose names match, as for pytest")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["ASYNCFLOW_GPU_OUT"] = str(options.out.resolve())
    os.environ["ASYNCFLOW_WITHOUT"] = ",".join(options.without)
    # What a run on a card compiles is there for the next one.
    os.environ.setdefault("CUPY_CACHE_DIR", str(HERE.parents[1] / ".cupy_cache"))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    with (options.out / f"results-{options.part}.jsonl").open("w", encoding="utf-8") as file:
        report = Report(PARTS[options.part], file)
        report.begin()
        chosen = ["-k", options.keyword] if options.keyword else []
        plain = ["-c", str(HERE / "plain.ini"), "-q", "-p", "no:faulthandler", *chosen, str(HERE)]
        try:
            status = int(pytest.main(plain, plugins=[report]))
        finally:
            faulthandler.cancel_dump_traceback_later()
        report.end(status)
    return status


class Report:
    """Selects a part's tests, and writes a line for each when it has ended."""

    def __init__(self, part: Collection[int], file: IO[str]) -> None:
        self._part = part
        self._file = file
        self._started_s = perf_counter()
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._counts: dict[str, int] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave the other part out."""
        others = [item for item in items if number_of(item.name) not in self._part]
        config.hook.pytest_deselected(items=others)
        items[:] = sorted((item for item in items if item not in others), key=lambda item: number_of(item.name))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Write a line for each test of this part that needs a missing tool, too."""
        for item in items:
            missing = dict(item.user_properties).get("missing")
            if missing and number_of(item.name) in self._part:
                self._line(name=item.name, status="not run", needs=missing)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The line comes after the fixtures are closed, which may fail as well."""
        parts = self._reports.setdefault(report.nodeid, [])
        parts.append(report)
        if report.when == "teardown":
            self._line(**_summary(parts))
            del self._reports[report.nodeid]

    def begin(self) -> None:
        """The first line: what the tests run on. CuPy is imported here, before pytest makes errors of warnings."""
        backend = cuda_backend()
        card = backend.cards[0] if backend.cards else f"none, a stand-in for CuPy: {backend.reason}"
        self._line(name="machine", status="begin", card=card, python=platform.python_version())

    def end(self, status: int) -> None:
        """The last line: how many of what."""
        counts = {name: count for name, count in self._counts.items() if name != "begin"}
        self._line(name="all", status="exit", code=status, seconds=round(perf_counter() - self._started_s, 3), **counts)

    def _line(self, **values: Any) -> None:
        self._counts[values["status"]] = self._counts.get(values["status"], 0) + 1
        line = json.dumps(values, default=str)
        self._file.write(line + "\n")
        self._file.flush()
        # Past pytest's capture.
        print(line, file=sys.__stdout__, flush=True)


def number_of(test: str) -> int:
    """Of the list in docs/gpu: 4 for ``test_t04_...``."""
    match = re.match(r"test_t(\d\d)_", test)
    assert match is not None, f"{test} has no number: name it test_tNN_..."
    return int(match[1])


def _summary(parts: Sequence[pytest.TestReport]) -> dict[str, Any]:
    failed = [part for part in parts if part.failed]
    skipped = any(part.skipped for part in parts)
    figures: dict[str, Any] = {}
    for name, value in parts[-1].user_properties:
        if name == "figures":
            assert isinstance(value, dict)
            figures |= value
    found: dict[str, Any] = {
        "name": parts[0].nodeid.rpartition("::")[2],
        "status": "failed" if failed else "skipped" if skipped else "passed",
        "seconds": round(sum(part.duration for part in parts), 3),
        "figures": figures,
    }
    if failed:
        found["error"] = failed[0].longreprtext[-4000:]
    return found


if __name__ == "__main__":
    sys.exit(main())
