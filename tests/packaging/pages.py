"""The Python programs on the pages for users, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts)
"""Every page of the site that stands in ``docs``; a build writes others to ``docs/generated``."""

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

GUIDE = [
    path.relative_to(ROOT).as_posix()
    for folder in ("guide", "howto")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if "```python\n" in path.read_text(encoding="utf-8")
]
"""Chapters of the guide and pages on single tasks that show programs."""

RUNNER = """
import runpy
import sys

for path in sys.argv[1:]:
    sys.argv = [path]
    print(path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""
"""Runs the programs that it is given one after another: most of the time would be that of the imports."""


def programs_on(page: str) -> list[str]:
    """Return the programs of a page; `make doctest` runs programs with prompts, and compares their output."""
    programs = [block for block in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if ">>>" not in block]
    assert programs, f"{page} shows no ```python program"
    return programs
