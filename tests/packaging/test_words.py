"""Each name of a class is once in the tree, and docstrings of classes and functions open with a noun or a verb."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "asyncflow"
MODULES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def test_a_class_name_is_once_in_the_tree() -> None:
    """``_Node`` in one module and ``Node`` in another count as one name."""
    classes = [node for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(node.name.lstrip("_") for node in classes)
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1] == []


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [(name, node) for name, tree in MODULES.items() for node in ast.walk(tree) if isinstance(node, named)]
    opened = [
        f"{name}: {node.name}" for name, node in documented if (ast.get_docstring(node) or "").startswith("What ")
    ]
    assert opened == []
