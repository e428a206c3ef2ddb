"""The guide is short chapters in plain sentences. Its first page leads to all, and no program is shown twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.pages import GUIDE, ROOT, programs_on
from tests.packaging.prose import MOST_WORDS, UNNAMED

CHAPTERS = sorted(path for path in (ROOT / "docs" / "guide").glob("*.md") if path.name != "README.md")
TASKS = sorted((ROOT / "docs" / "howto").glob("*.md"))
MOST_ON_A_PAGE = 2000
PLAIN = [*CHAPTERS, *TASKS, *(ROOT / "docs" / f"{name}.md" for name in ("index", "performance", "why"))]


@pytest.mark.parametrize("page", [*CHAPTERS, *TASKS], ids=lambda page: page.stem)
def test_a_page_is_read_in_one_sitting(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) < MOST_ON_A_PAGE


def test_the_first_page_leads_to_every_chapter_and_task() -> None:
    first = (ROOT / "docs" / "guide" / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(((?:\.\./howto/)?\w+\.md)\)", first)
    assert sorted(linked) == sorted([*(page.name for page in CHAPTERS), *(f"../howto/{page.name}" for page in TASKS)])
    assert len(CHAPTERS) == 8


def test_no_program_is_shown_twice() -> None:
    shown = [program for page in GUIDE for program in programs_on(page)]
    assert len(shown) == len(set(shown)) > 40


def sentences(text: str) -> list[str]:
    """Split the prose of a page, without programs, tables and headings; a piece of code counts as a word."""
    text = re.sub(r"^```.*?^```|^\|.*?$|^#.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|\*\*", "", re.sub(r"`[^`]*`", "code", text))
    paragraphs = re.split(r"\n\s*\n|\n(?=- )", text)
    return [" ".join(each.split()) for paragraph in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", paragraph)]


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.stem)
def test_sentences_are_short_and_name_their_subjects(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert found
    assert [each for each in found if UNNAMED.search(each)] == []
    assert [each for each in found if len(each.split()) > MOST_WORDS] == []


def test_long_sentences_are_found() -> None:
    text = "# A head\n\n- **One.** Two\n  `three` four.\n\n| a | b |\n\n```python\nx\n```\n[Five](a.md): six."
    assert sentences(text) == ["", "- One.", "Two code four.", "[Five:", "six."]
