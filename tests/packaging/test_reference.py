"""The page of everything public says what the code says."""

from __future__ import annotations

from docs import write_passes
from docs.write_reference import PAGE, page


def test_the_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: make reference"


def test_the_reference_lists_methods_and_losses() -> None:
    text = page()
    for line in (
        "  - `.split(values, lengths, *, name=None)`: ",
        "- `af.nn.orthogonal(",
        "- `af.einsum(",
        "  - `.aclose(",
        "- `asyncflow.serving.HEALTH`: Paths of ",
    ):
        assert line in text


def test_public_names_are_described_by_a_verb_or_a_noun() -> None:
    assert [line for line in page().splitlines() if "`: What " in line] == []


def test_the_table_of_passes_is_up_to_date() -> None:
    assert write_passes.PAGE.read_text(encoding="utf-8") == write_passes.page(), "write it anew: make reference"
