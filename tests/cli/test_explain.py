"""``asyncflow explain``: what passes change in the plans of a program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from asyncflow.cli.main import main
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = """
import sys
import asyncflow as af

with af.Graph() as graph:
    x = af.placeholder("float32", (), name="x")
    y = x * (af.constant(2, "float32") * 3)
    z = -x


async def main():
    async with af.Session(graph) as session:
        print("result", await session.run(y, {x: 7}), await session.run(z, {x: 7}), sys.argv[1:])


async def on_a_card():
    with af.Graph():
        v = af.placeholder("float32", (8, 8), name="v")
        w = v
        for _ in range(3):
            w = af.tanh(w @ w)
        async with af.Session(devices=["cuda:0"], cuda_graphs=True) as session:
            for _ in range(4):
                await session.run(w, {v: [[1] * 8] * 8})


async def fails():
    await main()
    raise LookupError("the program's own fault")
"""


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with ``explained.py``, which is also the working directory."""
    (tmp_path / "explained.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("explained", None)


def test_the_plans_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is printed when it is compiled, before the run that it is for."""
    assert main(["explain", "explained.py:main", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert out.index("plan 1, of multiply_1:0:\npartition on cpu:0: ") < out.index("plan 2, of negative:0:\n")
    assert "before" not in out and out.endswith("result 42.0 -7.0 ['--epochs', '3']\n")


def test_counts_of_requests_to_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    """Behind the plans of a program with a card, a table has launches, graph launches, copies and allocations."""
    with stand_in(devices=1):
        assert main(["explain", "explained.py:on_a_card"]) == 0
    out = capsys.readouterr().out
    assert "becomes a CUDA graph for each kind of inputs that comes again" in out
    assert out.endswith(
        "requests to cards in 4 runs:\n"
        "card    in        launches  graph launches  copies  allocations\n"
        "------  --------  --------  --------------  ------  -----------\n"
        "cuda:0  4 runs          12               2      12           25\n"
        "cuda:0  the last         0               1       4            2\n"
    )


def test_the_plan_of_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    """Of all that nothing in the graph uses; no run is needed."""
    assert main(["explain", "explained.py:graph"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan 1, of multiply_1:0, negative:0:\npartition on cpu:0: ")
    assert main(["explain", "explained.py:graph", "--after", "fold"]) == 0
    assert "after fold" in capsys.readouterr().out


def test_what_a_pass_changes_in_each_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "explained.py:main", "--after", "fold", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert "--- multiply_1:0 before fold\n+++ multiply_1:0 after fold\n" in out
    assert "\n-%multiply = multiply(%constant, %constant_1) : float32[]\n" in out
    assert out.endswith("fold changes nothing\nresult 42.0 -7.0 ['--epochs', '3']\n")


def test_all_passes_of_a_program_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "explained.py:fails", "--passes"]) == 1
    out, err = capsys.readouterr()
    assert out.index("after extract") < out.index("after fold") < out.index("after place") < out.index("bind")
    assert err.rstrip().endswith("LookupError: the program's own fault")


def test_a_pass_that_has_nothing_to_do_on_these_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "explained.py:main", "--after=fuse", "--after", "bind"]) == 0
    out = capsys.readouterr().out
    assert out.count("bind changes nothing") == 2
    assert out.endswith("in no plan of the program was there anything for fuse to do\n")


def test_names_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "explained.py:main", "--after", "flod"])
    assert "invalid choice: 'flod' (choose from 'extract', " in capsys.readouterr().err
