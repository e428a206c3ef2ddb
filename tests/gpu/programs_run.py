"""Runs a program of `tests.gpu.programs` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_program(name: str, *, stderr: list[str] | None = None) -> dict[str, Any]:
    """Run a program and return its own results; its standard error goes to `stderr`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.programs", name],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    if stderr is not None:
        stderr.extend(done.stderr.splitlines())
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
