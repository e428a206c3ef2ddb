"""Folders hold few modules, modules few lines, and functions fewer: a reader takes each in at a glance."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from tests.packaging.prose import PACKAGE, rooms

MOST_MODULES = 12
"""Modules in one folder, ``__init__.py`` not counted: it stands for the folder itself."""

MOST_LINES: Final = 700
"""Lines of a module. This number only shrinks."""

LONGEST_FUNCTION: Final = 85
"""Lines of a function, without its docstring. This number only shrinks."""


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    modules = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert len(modules) > 40
    many = {str(folder.relative_to(PACKAGE)): count for folder, count in modules.items() if count > MOST_MODULES}
    assert many == {}, "put modules on one subject into a room of their own, whose name a reader would guess"


def test_folders_are_named_after_their_subject() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [path for path in PACKAGE.rglob("*") if path.stem in vague] == []


def test_modules_are_short() -> None:
    counts = {
        path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8").count("\n") for path in PACKAGE.rglob("*.py")
    }
    long = {name: count for name, count in counts.items() if count > MOST_LINES}
    assert long == {}, "give a part on one subject a module of its own"


@pytest.mark.parametrize("room", [room for room in rooms() if room == "modules" or (PACKAGE / room).is_dir()])
def test_functions_are_short(room: str) -> None:
    paths = PACKAGE.glob("*.py") if room == "modules" else (PACKAGE / room).rglob("*.py")
    found = [(path.name, *each) for path in paths for each in lengths(path.read_text("utf-8"))]
    assert found
    assert [each for each in found if each[-1] > LONGEST_FUNCTION] == [], "name its steps"


def lengths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield the line and name of each function, and its number of lines without decorators and docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            told = 0 if ast.get_docstring(node) is None else (first.end_lineno or 0) - first.lineno + 1
            yield node.lineno, node.name, (node.end_lineno or 0) - node.lineno + 1 - told


def test_lengths_of_functions() -> None:
    head = "class A:\n    @property\n    def b(\n        self\n    ):\n"
    docstring = '        """Docs.\n\n        More.\n        """\n'
    assert [*lengths(f"{head}{docstring}        return 1\n")] == [(3, "b", 4)]
