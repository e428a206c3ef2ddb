"""Each name of a class is once in the tree, and docstrings of classes and functions open with a noun or a verb."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "asyncflow"
MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


def test_a_class_name_is_once_in_the_tree() -> None:
    """``_Node`` in one module and ``Node`` in another count as one name."""
    classes = [name for text in MODULES.values() for name in re.findall(r"^ *class _?(\w+)", text, re.MULTILINE)]
    names = Counter(classes)
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    opening = re.compile(r'^(.*):\n +"""(\w+)', re.MULTILINE)
    opened = [(module, *found) for module, text in MODULES.items() for found in opening.findall(text)]
    assert len(opened) > 2000
    assert [each for each in opened if each[-1] == "What"] == []
