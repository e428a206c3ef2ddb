"""``asyncflow compare``: the first node whose values differ in two programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncflow.cli.main import main
from tests.cli.conftest import Output
from tests.fake_cupy.stand_in import stand_in

PROGRAM = """
import sys
import numpy as np
import asyncflow as af

async def main():
    with af.Graph() as graph:
        x = af.placeholder("float32", (2,), name="x")
        w = af.Variable(np.ones(2, np.float32))
        y = af.exp(x * w)
        z = SCALE * y
        step = w.assign_add(af.gradients(af.sum(af.tanh(z)), w))
    async with af.Session(graph) as session:
        for number in range(3):
            await session.run(step, {x: [number, 1]})
        print([device.name for device in session.devices], sys.argv[1:])

def failing():
    raise ValueError("this program fails")
"""


@pytest.fixture
def programs(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "before.py", tmp_path / "after.py"
    for path, scale in zip(paths, ("2", "(2 + 1e-2)"), strict=True):
        path.write_text(PROGRAM.replace("SCALE", scale), encoding="utf-8")
    return f"{paths[0]}:main", f"{paths[1]}:main"


def test_the_first_difference(programs: tuple[str, str], output: Output) -> None:
    assert main(["compare", *programs]) == 1
    out, _ = output()
    assert "first difference: " in out
    assert "before.py:11" in out
    assert "after.py:11" in out


def test_a_program_with_itself(programs: tuple[str, str], output: Output) -> None:
    """Variables without names have other names in each run."""
    assert main(["compare", programs[0]]) == 0
    out, _ = output()
    assert out.count("['cpu:0'] []") == 2
    first, second = out.splitlines()[-1].split(", of ")
    number = first.removeprefix("no difference in ").removesuffix(" firings")
    assert int(number) > 10
    assert second == f"{number} in the first program and {number} in the second"


def test_a_larger_tolerance(programs: tuple[str, str], output: Output) -> None:
    assert main(["compare", *programs, "--tolerance", "0.5"]) == 0
    assert "no difference" in output()[0]


def test_devices_and_arguments(programs: tuple[str, str], output: Output) -> None:
    with stand_in(nbytes=16 << 20):
        assert main(["compare", f"{programs[0]} --fast", "--devices", "cpu:0,cpu:1", "--devices", "cuda:0"]) == 0
    out, _ = output()
    assert "['cpu:0', 'cpu:1'] ['--fast']" in out
    assert "['cuda:0'] ['--fast']" in out


def test_a_program_that_fails(programs: tuple[str, str], output: Output) -> None:
    failing = programs[0].replace(":main", ":failing")
    assert main(["compare", failing, failing]) == 3
    out, err = output()
    assert "nothing to compare: the programs share 0 firings" in out
    assert "; a program failed" in out
    assert "this program fails" in err


def test_programs_that_share_no_name(programs: tuple[str, str], tmp_path: Path, output: Output) -> None:
    """Nothing was compared, so that the exit code is none of success."""
    other = tmp_path / "other.py"
    other.write_text("def main():\n    pass\n", encoding="utf-8")
    assert main(["compare", programs[0], f"{other}:main"]) == 1
    out, _ = output()
    assert "the programs share 0 firings" in out
    assert "firings are known by the names of their nodes" in out


def test_mistakes(programs: tuple[str, str], output: Output) -> None:
    assert main(["compare", programs[0], "absent.py"]) == 2
    assert "there is no file 'absent.py'" in output()[1]
    with pytest.raises(SystemExit):
        main(["compare", programs[0], "--tolerance", "-1"])
    assert "'-1' is not a tolerance" in output()[1]
    with pytest.raises(SystemExit):
        main(["compare", programs[0], *["--devices", "cpu:0"] * 3])
    assert "--devices is given once for each of two programs" in output()[1]
