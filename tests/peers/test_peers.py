"""Programs that open issues of other systems ask for: each computes the right results, and docs/why.md shows it."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.fake_cupy.stand_in import stand_in

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("test_"))
SECTION = re.compile(r"^### (.+?)\n(.*?)^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r'"""(.+?)\."""\n\nfrom __future__ import annotations\n\n(.*)', re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_program_computes_the_expected_values(program: str) -> None:
    with stand_in():
        await import_module(f"tests.peers.{program}").main()


def test_the_page_shows_every_program() -> None:
    """Each with the title that the program has, the issue, and the text of the program as it is run."""
    page = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    shown = {title: (text, program) for title, text, program in SECTION.findall(page)}
    programs = [SOURCE.fullmatch((FOLDER / f"{name}.py").read_text(encoding="utf-8")) for name in PROGRAMS]
    assert {found[1] for found in programs if found} == set(shown)
    for found in programs:
        assert found is not None
        text, program = shown[found[1]]
        assert program == found[2]
        for number in re.findall(r"\b\d{4,}\b", found[1]):
            assert f"{number}, *" in text.replace("\n", " "), f"the title of issue {number}"


@pytest.mark.parametrize("page", ["README.md", "docs/guide/README.md"])
def test_readers_are_led_to_the_page(page: str) -> None:
    assert re.search(r"\]\((docs/|\.\./)?why\.md\)", (ROOT / page).read_text(encoding="utf-8"))


def test_the_page_names_users_not_served_by_asyncflow() -> None:
    page = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    assert "## When to use something else" in page
    assert "](performance.md" in page
