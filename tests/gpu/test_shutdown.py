"""T19, T20: devices close with work in flight, and programs pass the tools that look for wrong memory accesses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.programs_run import ROOT, run_program


@pytest.mark.slow
def test_t19_a_device_closes_with_work_in_flight(card: Card, figures: Figures) -> None:
    """All is delivered, threads end, the interpreter says nothing at its exit; and it opens a second time."""
    said: list[str] = []
    outcome = run_program("shutdown", stderr=said)
    assert said == []
    assert outcome["values"] == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert outcome["used"] == 0
    assert outcome["threads"] == []
    figures.below("close_s", max(outcome["close_s"]), 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peers", "graphs"])
def test_t20_programs_for_the_sanitizer_run(card: Card, name: str) -> None:
    assert run_program(name)["sum"] != 0


@pytest.mark.needs("card", "compute-sanitizer")
@pytest.mark.parametrize("name", ["peers", "graphs"])
def test_t20_no_wrong_memory_access(card: Card, name: str) -> None:
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.gpu.programs", name],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
