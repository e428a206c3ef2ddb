"""`python -m tests.fake_cupy program.py`: a program on the stand-in, with its own arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fake_cupy.__main__ import main

PROGRAM = """
import sys
import asyncflow as af

with af.Graph() as graph:
    y = af.constant([1.0, 2.0]) * 2

async def run():
    async with af.Session(graph, ["cuda:1"], device_while=True) as session:
        print((await session.run(y)).tolist(), sys.argv)

af.run(run())
"""


def test_a_program_sees_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(sys, "argv", ["fake_cupy", str(program), "train", "--help"])
    main()
    assert capsys.readouterr().out == f"[2.0, 4.0] {[str(program), 'train', '--help']}\n"


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0)])
def test_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["fake_cupy", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    told = capsys.readouterr()
    assert "usage: python -m tests.fake_cupy" in told.out + told.err
