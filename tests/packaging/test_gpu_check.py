"""The command that runs `tests/gpu` on a card, tried where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.check import PARTS, number_of
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def _check(part: str, folder: Path, *arguments: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status of the check, and its lines; on a machine with a card it does not see the card."""
    command = [sys.executable, "-m", "tests.gpu.check", part, "--out", str(folder), *arguments]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT, env=hidden
    )
    text = (folder / f"results-{part}.jsonl").read_text(encoding="utf-8")
    assert all(line in done.stdout for line in text.splitlines())
    return done.returncode, [json.loads(line) for line in text.splitlines()]


def test_every_number_of_the_list_has_a_test() -> None:
    names = re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in (ROOT / "tests/gpu").glob("*.py")))
    assert {number_of(name) for name in names} == set(range(25)) == {n for part in PARTS.values() for n in part}


@pytest.mark.slow
def test_a_line_for_each_test(tmp_path: Path) -> None:
    status, lines = _check("A", tmp_path, "-k", "t00 or t03_memory_dropped")
    assert status == 0
    first, *tests, last = lines
    assert "stand-in for CuPy" in first["card"]
    by_name = {line["name"]: line for line in tests}
    assert by_name["test_t00_a_kernel_computes"]["status"] == "passed"
    assert by_name["test_t00_a_kernel_computes"]["figures"]["kernel_ms"] > 0
    assert by_name["test_t03_memory_dropped_while_another_stream_reads_it"]["status"] == "passed"
    assert by_name["test_t00_what_cupy_was_built_with"] == {
        "name": "test_t00_what_cupy_was_built_with",
        "status": "not run",
        "needs": ["card"],
    }
    assert (last["code"], last["passed"]) == (0, 2)


@pytest.mark.slow
def test_nothing_is_left_out_where_a_card_is_required(tmp_path: Path) -> None:
    status, lines = _check("B", tmp_path, "-k", "t20", "--without", "compute-sanitizer", ASYNCFLOW_REQUIRE_GPU="1")
    assert status == 1
    assert [line["status"] for line in lines] == ["begin", "not run", "not run", "failed", "failed", "exit"]
    assert "there is no usable card" in lines[3]["error"]
