"""Names of classes are once in the tree, docstrings open with a noun or a verb, and pages install this project."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

from asyncflow.foreign_names import DISTRIBUTION, install
from tests.packaging.pages import DOCS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "asyncflow"
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in ROOT.glob("*.md")}
PAGES |= {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in DOCS}
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


def test_messages_and_pages_install_this_project() -> None:
    """`asyncflow` on the Python Package Index is another project's; a checkout installs itself by ``-e``."""
    told = re.compile(r"pip install (?!-e )[^`\n]*?(asyncflow[\w-]*)")
    found = [(name, *told.findall(text)) for name, text in (MODULES | PAGES).items()]
    assert {each for _, *names in found for each in names} == {DISTRIBUTION}
    assert install("plot") == "pip install 'asyncflow-runtime[plot]'"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    asked = {extra for text in MODULES.values() for extra in re.findall(r"\binstall\(['\"](\w+)['\"]\)", text)}
    assert asked >= {"plot", "torch"} and asked <= set(extras)
