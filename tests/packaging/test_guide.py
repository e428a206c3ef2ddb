"""The guide is short chapters, its first page leads to all of them, and no program is shown twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.pages import GUIDE, ROOT, programs_on

CHAPTERS = sorted(path for path in (ROOT / "docs" / "guide").glob("*.md") if path.name != "README.md")
TASKS = sorted((ROOT / "docs" / "howto").glob("*.md"))
MOST_WORDS = 2000


@pytest.mark.parametrize("page", [*CHAPTERS, *TASKS], ids=lambda page: page.stem)
def test_a_page_is_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) < MOST_WORDS


def test_the_first_page_leads_to_every_chapter_and_task() -> None:
    first = (ROOT / "docs" / "guide" / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(((?:\.\./howto/)?\w+\.md)\)", first)
    assert sorted(linked) == sorted([*(page.name for page in CHAPTERS), *(f"../howto/{page.name}" for page in TASKS)])
    assert len(CHAPTERS) == 8


def test_no_program_is_shown_twice() -> None:
    shown = [program for page in GUIDE for program in programs_on(page)]
    assert len(shown) == len(set(shown)) > 40
