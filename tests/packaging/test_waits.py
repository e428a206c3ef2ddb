"""FAULTS F66 and F70: no test, example or benchmark waits for another process without a limit."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITING = {"run", "call", "check_call", "check_output"}
STARTED_BY_HAND = {"tests/faults/programs.py": "kills what it started"}
"""Files that may start a process and go on, and why."""


def unlimited_waits(source: str) -> list[int]:
    """The lines that start a process, or wait for one, with no `timeout`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "subprocess.Popen":
            found.append(node.lineno)
        if isinstance(node, ast.Call) and not any(keyword.arg == "timeout" for keyword in node.keywords):
            used = [node.func, *node.args]  # also where it is handed to a thread
            names = [ast.unparse(part) for part in used if isinstance(part, ast.Attribute)]
            if any(
                name in {f"subprocess.{each}" for each in WAITING} or name.endswith(".communicate") for name in names
            ):
                found.append(node.lineno)
    return sorted(found)


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_every_wait_for_a_process_has_a_limit(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        lines = unlimited_waits(source) if "subprocess" in source else []
        assert not lines or name in STARTED_BY_HAND, f"{name}, lines {lines}: say timeout="


def test_waits_are_found() -> None:
    source = """
    subprocess.run(command, check=True)
    subprocess.run(command, timeout=3)
    asyncio.to_thread(subprocess.run, command)
    process = subprocess.Popen(command)
    process.communicate()
    process.communicate(timeout=3)
    """
    assert unlimited_waits(dedent(source)) == [2, 4, 5, 6]
