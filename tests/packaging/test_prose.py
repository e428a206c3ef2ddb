"""Docstrings name their subjects, at least as well as before; public classes are named by words of the glossary."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import asyncflow as af
import asyncflow.serving
import asyncflow.testing
from tests.packaging import prose
from tests.packaging.prose import FIGURES, GOAL, PACKAGE, ROOT, Passage, comments_in, comments_of, docstrings_of

GLOSSARY = dict(
    re.findall(r"^\| ([a-z ]+) \| (.*) \|$", (ROOT / "docs/design/words.md").read_text("utf-8"), re.MULTILINE)[1:]
)
_ELSEWHERE = """
    error warning array clock weights client response endpoint lifespan metric metrics sample collector worker spans
"""
ELSEWHERE = frozenset(_ELSEWHERE.split())
"""Head nouns of classes that Python, ASGI, Prometheus or OpenTelemetry define: the glossary does not repeat them."""
PARTICIPLES = {"Prepared": "run", "Restored": "checkpoint", "WaitUntil": "policy"}
"""The nouns that names of classes leave out."""


ROOMS = pytest.mark.parametrize("room", prose.rooms())
HINT = "python -m tests.packaging.prose ROOM lists what to mend, and without ROOM it prints the table"


@ROOMS
def test_docstrings_of_a_room_name_their_subjects(room: str) -> None:
    found, most = prose.figures_of_room(room), FIGURES.get(room, GOAL)
    assert found.unnamed <= most.unnamed, HINT
    assert found.pronouns <= most.pronouns, HINT
    assert found.long <= most.long, HINT
    assert found.questions <= most.questions, HINT


@ROOMS
def test_comments_of_a_room_name_their_subjects(room: str) -> None:
    assert prose.figures_of_room(room).comments <= FIGURES[room].comments, HINT
    long = [each for each in comments_of(room) if each.long()]
    assert [f"{each.path.relative_to(ROOT)}:{each.line}: {each.text}" for each in long] == []


@ROOMS
def test_the_figures_of_a_room_are_lowered_once_it_is_mended(room: str) -> None:
    """A quarter of slack, so that a commit which mends few docstrings need not touch the table."""
    found, most = prose.figures_of_room(room), FIGURES[room]
    assert most.unnamed <= max(1.25 * found.unnamed, GOAL.unnamed) + 0.2, HINT
    assert most.pronouns <= max(1.25 * found.pronouns, GOAL.pronouns), HINT
    assert most.long <= 1.25 * found.long + 2, HINT
    assert most.questions <= 1.25 * found.questions + 2, HINT
    assert most.comments <= max(1.25 * found.comments, GOAL.unnamed) + 0.2, HINT


@ROOMS
def test_attributes_in_docstrings_stand_on_lines_of_their_own(room: str) -> None:
    """A reflow of paragraphs once joined lists of attributes to their headings."""
    joined = re.compile(r"^ *Attributes\b[^:\n]*: +\S", re.MULTILINE)
    assert [f"{each.path}:{each.line}" for each in docstrings_of(room) if joined.search(each.text)] == []


def test_the_table_has_the_rooms() -> None:
    assert set(FIGURES) == set(prose.rooms())


def test_the_measure_finds_words_without_a_referent() -> None:
    def found(text: str) -> list[str]:
        return Passage(PACKAGE, 1, text).unnamed()

    told = "Nobody waits; those who wait are told what is done, so many at a time."
    assert found(told) == ["Nobody", "those", "who", "what", "so many"]
    assert found("A user who calls `nobody` with those arrays gets what the kernel returns.") == []
    assert Passage(PACKAGE, 1, "Whether it runs.").is_question()
    assert not Passage(PACKAGE, 1, "True if the loop runs.").is_question()
    assert Passage(PACKAGE, 1, "Return one. " + "word " * 26).long() != []
    assert Passage(PACKAGE, 1, "Return one.\n\n===  ===\n" + "word " * 26 + "\n===  ===\n").long() == []


@ROOMS
def test_rulers_between_sections_are_noun_phrases(room: str) -> None:
    asking = re.compile(r"-- (?:what|which|whether|when|where|how|why|who|asked|told)\b")
    found = [each for each in comments_of(room) if asking.match(each.text)]
    assert [f"{each.path.relative_to(ROOT)}:{each.line}: {each.text}" for each in found] == []


def test_comments_on_consecutive_lines_count_as_one(tmp_path: Path) -> None:
    path = tmp_path / "commented.py"
    path.write_text(
        "# A caller\n# who waits.\nx = [  # noqa: E501\n    1,  # what is here\n    # who is here\n    2,\n]\n"
        "y = 1  # type: ignore\n# fmt: off\nif x:\n    # inside\n    y = '# who'\n# behind\n",
        "utf-8",
    )
    comments = list(comments_in(path))
    found = [(1, "A caller who waits."), (4, "what is here"), (5, "who is here"), (11, "inside"), (13, "behind")]
    assert [(each.line, each.text) for each in comments] == found
    assert [each.unnamed() for each in comments] == [[], ["what"], ["who"], [], []]


@ROOMS
def test_messages_of_a_room_name_their_subjects(room: str) -> None:
    found = [each for each in prose.messages_of(room) if each.unnamed()]
    assert [f"{each.path.relative_to(ROOT)}:{each.line}: {each.text}" for each in found] == []


def test_messages_are_strings_that_are_no_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "messages.py"
    path.write_text(
        '"""Not what is meant."""\nraise ValueError(f"{x} is one that waits" "; see those of y", "who")\n', "utf-8"
    )
    assert [each.unnamed() for each in prose.messages_in(path)] == [["one that", "those"]]


def test_long_files_say_why() -> None:
    bare = {
        path.relative_to(PACKAGE).as_posix()
        for path in prose.long_files()
        if prose.comment_share(path) < prose.LEAST_COMMENTS
    }
    assert bare <= prose.UNCOMMENTED, "say why at the lines where a reader stops: 3 lines in a hundred"


def test_names_of_tests_name_their_subject() -> None:
    assert prose.unnamed_tests() == []


def _public_classes(module: ModuleType) -> set[str]:
    members = (getattr(module, name) for name in dir(module) if not name.startswith("_"))
    return {each.__name__ for each in members if inspect.isclass(each) and each.__module__.startswith("asyncflow")}


def test_the_head_noun_of_every_public_class_is_in_the_glossary() -> None:
    modules = (af, af.nn, af.optim, af.profiler, asyncflow.serving, asyncflow.testing)
    heads = {}
    for name in set().union(*map(_public_classes, modules)):
        words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", name)]
        *_, heads[name] = [PARTICIPLES[name]] if name in PARTICIPLES else [w for w in words if not w.endswith("ed")]
    assert len(heads) > 60
    assert {name: head for name, head in heads.items() if head not in GLOSSARY and head not in ELSEWHERE} == {}
