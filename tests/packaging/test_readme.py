"""The Python programs in the README and the guide run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_programs_on_the_page_run(page: str, tmp_path: Path) -> None:
    # Blocks with prompts are left to `make doctest`, which also compares their output.
    programs = [block for block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if ">>>" not in block]
    assert programs, f"{page} shows no ```python program"
    for number, program in enumerate(programs):
        if "import torch" in program and find_spec("torch") is None:
            continue  # too large for `make test` to install it
        path = tmp_path / f"program_{number}.py"
        path.write_text(program, encoding="utf-8")
        # Cards are those of the stand-in for CuPy.
        on_cards = ["-m", "tests.fake_cupy"] if '"cuda:' in program else []
        done = subprocess.run(
            [sys.executable, "-W", "error", *on_cards, str(path)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, f"{program}\n{done.stdout}\n{done.stderr}"
