"""``asyncflow replay``: a recorded run again, and errors of a record or a target."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

import asyncflow as af
from asyncflow.cli.main import USAGE_ERROR, main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = """
import asyncflow as af

@af.op(outputs=af.spec("int64", ()))
def doubled(x):
    return x * 2

with af.Graph() as graph:
    count = af.Variable(3, name="count")
    y = doubled(count.assign_add(1))
    plain = count * 7

def made():
    return graph

def no_graph():
    return 3

async def record():
    async with af.Session(graph) as session:
        await session.run([y, count], record="own.json")

def main():
    af.run(record())
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with ``recorded.py``, and the records of two runs; it is also the working directory."""
    (tmp_path / "recorded.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with af.Graph() as graph:
        total = af.Variable(2.5, name="total")
        doubled = total.assign_add(total)

    async def record() -> None:
        async with af.Session(graph) as session:
            await session.run({"total": doubled}, record="run.json")

    af.run(record())
    yield
    sys.modules.pop("recorded", None)


def test_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "run.json"]) == 0
    assert capsys.readouterr().out == "as recorded, bit by bit:\n  total/assign_add:0 = 5.\n"


def test_with_ops_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "recorded.py:main"]) == 0
    capsys.readouterr()
    assert main(["replay", "own.json"]) == 1
    assert "doubled, an op of your own, at " in capsys.readouterr().err
    for target in ("recorded.py:graph", "recorded.py:made"):
        assert main(["replay", "own.json", target]) == 0
        assert "@count = 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere.json"],
            "there is no file nowhere.json; replay takes the record that session.run(..., record=path) ",
        ),
        (["."], "there is no file ."),
        (["run.json", "recorded.py:no_graph"], "is an int; name a Graph"),
        (["run.json", "recorded.py:nothing"], "has no 'nothing'"),
    ],
)
def test_what_cannot_be_replayed(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["replay", *arguments]) == USAGE_ERROR
    assert message in capsys.readouterr().err


def test_a_program_is_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "recorded.py"]) == USAGE_ERROR
    expected = (
        "recorded.py is no record of a run, or a part of one: it is no JSON; session.run(..., record=path) writes one"
    )
    assert capsys.readouterr().err == f"asyncflow replay: error: {expected}\n"


def test_another_outcome(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    found = json.loads(path.read_text())
    found["variables"]["total"] = "array(float64[], 1.0)"
    path.write_text(json.dumps(found))
    assert main(["replay", "run.json"]) == 1
    assert "firing 1 of " in capsys.readouterr().err
