"""The list of passes: names, rules and order."""

from __future__ import annotations

import sys
from pathlib import Path

import asyncflow.compiler
from asyncflow.compiler.pipeline import PASSES

COMPILER = Path(asyncflow.compiler.__file__).parent


def test_a_pass_has_the_name_of_its_module() -> None:
    assert [each.name for each in PASSES] == [each.run.__module__.rpartition(".")[2] for each in PASSES]
    assert len({each.name for each in PASSES}) == len(PASSES)


def test_modules_of_passes_say_so_and_are_listed() -> None:
    """The first line says what the pass does: the page of the design repeats it."""
    heads = {path: path.read_text(encoding="utf-8").partition("\n")[0] for path in COMPILER.rglob("*.py")}
    say_so = {path: head for path, head in heads.items() if head.startswith('"""Pass: ')}
    assert set(say_so) == {Path(sys.modules[each.run.__module__].__file__ or "") for each in PASSES}
    assert [head for head in say_so.values() if not head.rstrip('"').endswith(".")] == []
