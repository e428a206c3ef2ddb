"""``asyncflow checkpoint list|show|verify|diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncflow.cli.main import main
from tests.checkpoint.steps import write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two steps."""
    write(tmp_path, 9, w=np.zeros((2, 3), np.float32), name=np.array("a", np.dtypes.StringDType()), gone=1, same=5)
    changed = np.zeros((2, 3), np.float32)
    changed[1, 2] = -0.25
    write(tmp_path, 10, w=changed, name=np.array("b", np.dtypes.StringDType()), new=np.zeros(2), same=5)
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "list", root) == (
        0,
        f"{root}/step-9  4 states, 45 B\n{root}/step-10  4 states, 53 B\n",
    )
    write(root, 11, w=np.zeros(2))
    assert output(capsys, "list", root / "step-11") == (0, f"{root}/step-11  1 state, 16 B\n")


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = output(capsys, "show", root)
    assert code == 0
    lines = text.splitlines()
    assert lines[0] == f"{root}/step-10: step 10, 53 B"
    assert lines[1].startswith("written by asyncflow ")
    assert lines[2:4] == ["graph none", "random numbers after 7 runs"]
    assert lines[4:] == [
        "name  variable  string[]",
        "new   variable  float64[2]",
        "same  variable  int64[]",
        "w     variable  float32[2,3]",
    ]


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "verify", root / "step-9") == (0, f"{root}/step-9: 45 B, all as they were written\n")
    file = root / "step-9" / "variables.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    code, text = output(capsys, "verify", root / "step-9")
    assert code == 1
    assert text.startswith(f"{file}: tensor 'name' is damaged: its checksum is ")


def test_diff(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = "- gone  int64[]\n+ new  float64[2]\n  name  1 of 1 changed\n  w  1 of 6 changed, by 0.25 at most\n"
    assert output(capsys, "diff", root) == (1, expected)
    assert output(capsys, "diff", root / "step-9", root) == (1, expected)
    assert output(capsys, "diff", root, root / "step-10") == (
        0,
        "no difference in the written data; verify checks the files\n",
    )
    write(root, 11, w=np.zeros(2))
    assert "  w  float32[2,3] became float64[2]\n" in output(capsys, "diff", root)[1]


@pytest.mark.parametrize("action", ["list", "show", "verify", "diff"])
def test_where_there_is_none(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", action, str(tmp_path / "nowhere")]) == 2
    assert f"asyncflow checkpoint: error: {tmp_path}/nowhere: " in capsys.readouterr().err


def test_mistakes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", "show", str(root), str(root)])
    assert f"show takes one path; {root} is another" in capsys.readouterr().err
    (root / "step-10" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "show", str(root)]) == 2
    assert "manifest.json: is damaged" in capsys.readouterr().err
