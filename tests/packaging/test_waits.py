"""Fault F66 and F70: no test, example or benchmark waits for another process without a limit, nor with a short one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from textwrap import dedent

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
WAITING = {"run", "call", "check_call", "check_output"}
STARTED_BY_HAND = {
    "tests/adversary.py": "a process for as long as the tests run, which waits for its end with a limit",
    "tests/faults/programs.py": "kills what it started",
    "benchmarks/http_serving.py": "a server, which it kills, and then waits with a limit",
    "examples/remote_device/device.py": "a process for as long as a session, which waits for its end with a limit",
}
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


WAITS = {"aclose", "block", "communicate", "join", "result", "wait"}
"""Methods that wait, of whatever it is."""
OF_MODULES = {"asyncio": {"timeout", "wait_for"}, "subprocess": WAITING}
SOME_WAIT = re.compile(r"threading|asyncio\.|subprocess|futures")
VIRTUAL = {
    "tests/devices/test_sim_device.py",
    "tests/devices/test_sim_machine_hazards.py",
    "tests/streams/test_beside.py",
    "tests/streams/test_sim_stream.py",
    "tests/streams/test_virtual.py",
}
"""On virtual time every limit is exact."""


def impatient_waits(source: str) -> list[int]:
    """The lines that wait for some seconds, which may be few on a machine that is slow and busy; 0 is no wait."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if node.func.attr in OF_MODULES.get(owner, WAITS) and owner != "self":
            limits = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "timeout")]
            seconds = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
            found += [node.lineno for s in seconds if isinstance(s, int | float) and 0 < s < PATIENCE_S]
    return sorted(found)


@pytest.mark.parametrize("folder", sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()))
def test_every_limit_of_a_wait_is_generous(folder: str) -> None:
    """Tests of `session.run` with a timeout do not count, as they are about its end, nor do tests for cards alone."""
    for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        lines = impatient_waits(source) if SOME_WAIT.search(source) else []
        assert not lines or name in VIRTUAL or folder == "gpu", (
            f"{name}, lines {lines}: PATIENCE_S, of tests/patience.py"
        )


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks"])
def test_every_wait_for_a_process_has_a_limit(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        lines = unlimited_waits(source) if "subprocess" in source else []
        assert not lines or name in STARTED_BY_HAND, f"{name}, lines {lines}: say timeout="


def test_short_waits_are_found() -> None:
    source = """
    thread.join(5)
    thread.join(PATIENCE_S)
    async with asyncio.timeout(10), session.run(x, timeout=0.01):
        await stream.aclose(0.0)
    subprocess.run(command, timeout=30)
    """
    assert impatient_waits(dedent(source)) == [2, 4, 6]


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
