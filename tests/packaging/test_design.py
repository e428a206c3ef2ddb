"""The pages of the design and of the rooms: their links and modules exist, and they say few words, each once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.pages import DOCS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
LEADING_HERE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
ROOMS = sorted((ROOT / "asyncflow").rglob("README.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A module or folder of the package, such as `graph/verify.py` or `control/primitives/`.
CODE = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.py)?)`")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as they stand in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links to files and headings that are not there."""
    found = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        leads_to = (page.parent / path).resolve() if path else page
        if not leads_to.exists() or (heading and heading not in anchors(leads_to)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", [*DOCS, *LEADING_HERE, *ROOMS], ids=lambda page: f"{page.parent.name}-{page.name}")
def test_links_resolve(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A head, and `code`\n[a](#a-head-and-code) [b](#gone) [c](gone.md) [d](a.md#gone) [e](https://x)")
    assert broken(page) == ["#gone", "gone.md", "a.md#gone"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    named = CODE.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not any((folder / path).exists() for folder in (ROOT / "asyncflow", ROOT))] == []
    assert named or page.name in {"behaviours.md", "words.md"}


@pytest.mark.parametrize("page", ROOMS, ids=lambda page: page.parent.name)
def test_what_a_room_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    near = (page.parent, ROOT / "asyncflow", ROOT)
    named = re.findall(r"`((?:[a-z_]+/)*(?:[a-z_0-9]+\.(?:py|md))|(?:[a-z_]+/)+)`", text)
    assert named
    assert [path for path in named if not any((folder / path).exists() for folder in near)] == []


def test_rooms_with_many_modules_have_a_page_that_names_the_first_to_read() -> None:
    large = [
        init.parent for init in (ROOT / "asyncflow").glob("*/__init__.py") if len(list(init.parent.rglob("*.py"))) > 10
    ]
    assert len(large) > 5
    assert [room.name for room in large if not (room / "README.md").exists()] == []


def test_the_first_page_and_readers_of_the_code_lead_to_every_page() -> None:
    first = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in first] == []
    for page in LEADING_HERE:
        assert "docs/design/README.md" in page.read_text(encoding="utf-8")


def test_the_glossary_is_short_and_tells_each_word_once() -> None:
    page = (ROOT / "docs" / "design" / "words.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([a-z ]+) \| .+ \|$", page, re.MULTILINE)
    words.remove("word")
    assert 20 < len(words) <= 60
    assert len(set(words)) == len(words)


def test_citations_of_the_design_name_its_pages() -> None:
    cited = []
    for module in sorted((ROOT / "asyncflow").rglob("*.py")):
        text = module.read_text(encoding="utf-8")
        assert "DESIGN" not in text, f"{module} cites a page by a name that it does not have"
        cited += re.findall(r"docs/design/\w+\.md", text)
    assert cited
    assert [page for page in cited if not (ROOT / page).exists()] == []
