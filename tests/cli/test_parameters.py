"""``asyncflow parameters``: the variables of a graph, and of a program's graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncflow.cli.main import main
from tests.cli.conftest import Output

PROGRAM = """
import sys
import asyncflow as af

with af.Graph() as graph:
    w = af.Variable([1.0, 2.0], name="layer/w")
    x = af.placeholder("float64", (None, 2), name="x")
    y = af.gradients(af.sum(af.tanh(x * w)), w)

def nothing():
    print("arguments", sys.argv[1:])

async def main():
    async with af.Session(graph) as session:
        for _ in range(2):
            await session.run(y, {x: [[1, 2]]})
    with af.Graph():
        async with af.Session() as session:
            print(await session.run(af.Variable(7, name="other").assign_add(1)))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_a_graph(program: Path, output: Output) -> None:
    assert main(["parameters", f"{program}:graph", "--extent", "8"]) == 0
    out, err = output()
    assert not err
    assert out.startswith("graph 1 of 1:\nvariable  value")
    assert "layer/" in out
    assert "activations: 128 B in 1 value (open extents taken as 8)" in out


def test_each_graph_that_a_program_runs(program: Path, output: Output) -> None:
    assert main(["parameters", f"{program}:main"]) == 0
    out, _ = output()
    assert out.count("graph ") == 2
    assert out.index("layer/") < out.index("graph 2 of 2:") < out.index("other")


def test_a_program_without_graphs(program: Path, output: Output) -> None:
    assert main(["parameters", f"{program}:nothing", "--epochs", "3"]) == 0
    out, _ = output()
    assert "arguments ['--epochs', '3']" in out
    assert "no graph was run" in out


def test_mistakes(program: Path, output: Output) -> None:
    with pytest.raises(SystemExit):
        main(["parameters", f"{program}:graph", "--extent", "few"])
    assert "'few' is not an extent" in output()[1]
    assert main(["parameters", f"{program}:absent"]) == 2
    assert "has no 'absent'" in output()[1]
