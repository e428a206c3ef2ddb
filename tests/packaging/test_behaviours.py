"""Each behaviour and fault of the page has a test that cites it, and each number that a test cites is on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "design" / "behaviours.md"
CITED: Final = re.compile(r"\b(Behaviour|Fault) ((?:F?\d+)(?:(?:-|, (?:and )?| and )F?\d+)*)")
RANGE: Final = re.compile(r"(\d+)-F?(\d+)")
NUMBER_IN_NAME: Final = re.compile(r"def test_f?\d+[a-z]?_")


def listed() -> set[str]:
    """The numbers on the page, faults with an F."""
    return set(re.findall(r"^(?:- \*\*)?(F\d+|\d+(?=\. ))", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def cited(text: str) -> Iterator[str]:
    """The numbers that docstrings of tests cite, those within a range such as F43-F46 included."""
    for kind, numbers in CITED.findall(text):
        within = [str(n) for first, last in RANGE.findall(numbers) for n in range(int(first), int(last) + 1)]
        for number in within + re.findall(r"\d+", numbers):
            yield f"F{number}" if kind == "Fault" else number


def test_the_page_and_the_tests_have_the_same_numbers() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    found = {number for path in files for number in cited(path.read_text(encoding="utf-8"))}
    assert found == listed()


def test_names_of_tests_are_not_numbers() -> None:
    numbered = [path.name for path in (ROOT / "tests").rglob("test_*.py") if NUMBER_IN_NAME.search(path.read_text())]
    assert not numbered


def test_ranges_and_lists_are_read() -> None:
    text = "Fault F43-F45, and Behaviour 3, 5 and 7: results of Fault 12."
    assert set(cited(text)) == {"F43", "F44", "F45", "3", "5", "7", "F12"}
