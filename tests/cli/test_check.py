"""``asyncflow check``: races of a graph, and of the runs of a program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from asyncflow.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = """
import sys
import asyncflow as af

w = af.Variable(0.5, name="w")
with af.Graph(effects="unordered") as graph:
    w_now = w.read()
    loss = w_now * w_now
    step = w.assign_sub(0.1)

with af.Graph() as ordered:
    x = af.placeholder("float64", (), name="x")
    moved = w.assign(w + x)

with af.Graph() as by_hand:
    af.raw.switch(af.constant(1), af.constant(True))


async def main():
    async with af.Session(graph) as session:
        for _ in range(2):
            print(sys.argv[1:], len(await session.run([loss, step])), await session.run(loss) > 0)


async def serve():
    async with af.Session(ordered) as session:
        await session.run(moved, {x: 1.0})


async def fails():
    await serve()
    raise LookupError("the program's own fault")


def exits():
    sys.exit(1)


def nothing():
    pass
"""
RACE = """\
race on variable w: read (train.py:7) and assign_sub (train.py:9) have no order
  outcomes: multiply 0.25 if the read is first, 0.16 if the assign_sub is
  order them with control_dependencies, or say af.allow_races(w)
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with ``train.py``, which is also the working directory."""
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("train", None)


def test_a_graph_is_checked_without_being_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "train.py:graph"]) == 1
    assert capsys.readouterr().out == RACE
    assert main(["check", "train.py:ordered"]) == 0
    assert capsys.readouterr().out == "no races\n"


def test_every_kind_of_run_of_a_program_is_checked_and_each_race_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "train.py:main", "--epochs", "3"]) == 1
    out, err = capsys.readouterr()
    assert out == "['--epochs', '3'] 2 True\n" * 2 + RACE
    assert err == ""


def test_races_between_runs_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "train.py:serve"]) == 0
    assert capsys.readouterr().out == "no races\n"
    assert main(["check", "train.py:serve", "--runs", "2"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("race on variable w: read (train.py:13) and assign (train.py:13) have no order in two runs\n")
    assert "w afterwards 1.5 after run 1: w/read, run 2: w/read, " in out
    assert main(["check", "train.py:ordered", "--runs=2"]) == 1
    assert "outcomes depend on the feeds, so none are listed" in capsys.readouterr().out


def test_programs_that_fail_or_run_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "train.py:fails"]) == 3
    out, err = capsys.readouterr()
    assert out == "no races\n" and err.rstrip().endswith("LookupError: the program's own fault")
    assert main(["check", "train.py:exits"]) == 3
    capsys.readouterr()
    assert main(["check", "train.py:nothing"]) == 0
    assert capsys.readouterr().out.startswith("no graph was run; name one, such as train.py:graph")
    assert main(["check", "train.py:by_hand"]) == 0
    assert "not checked: switch (switch) is a primitive of control flow written by hand" in capsys.readouterr().out


def test_targets_and_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "train.py:w"]) == 2
    assert "w of " in capsys.readouterr().err
    assert main(["check", "train.py:grahp"]) == 2
    assert "has no 'grahp'; it defines graph, ordered, by_hand, main, serve" in capsys.readouterr().err
    assert main(["profile", "train.py:grahp"]) == 2
    assert "has no 'grahp'; it defines main, serve" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", "train.py:graph", "--runs", "3"])
    assert "invalid choice: 3 (choose from 1, 2)" in capsys.readouterr().err
