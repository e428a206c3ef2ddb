"""Folders of the package hold few modules, so that a reader takes in a room at a glance."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "asyncflow"
MOST_MODULES = 12
"""Modules in one folder, ``__init__.py`` not counted: it stands for the folder itself."""


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    modules = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert len(modules) > 40
    many = {str(folder.relative_to(PACKAGE)): count for folder, count in modules.items() if count > MOST_MODULES}
    assert many == {}, "put modules on one subject into a room of their own, whose name a reader would guess"


def test_folders_are_named_after_their_subject() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [path for path in PACKAGE.rglob("*") if path.stem in vague] == []
