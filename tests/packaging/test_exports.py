"""`__all__` of the public modules: what is exported is there, once, in order, and documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import asyncflow as af
from asyncflow import serving
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
MODULES = [af, af.fft, af.linalg, af.nn, af.optim, af.profiler, af.random, af.raw, serving]


def place(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Classes before functions, and numbers by value: the order that the linter keeps."""
    parts = re.findall(r"\d+|\D+", name)
    return name[0].islower(), [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_is_sorted_without_duplicates(module: ModuleType) -> None:
    assert module.__all__ == sorted(set(module.__all__), key=place)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_name_can_be_imported(module: ModuleType) -> None:
    imported: dict[str, object] = {}
    exec(f"from {module.__name__} import *", imported)
    assert set(module.__all__) <= imported.keys()


def test_package_exports_all_it_holds_but_its_rooms() -> None:
    public = {
        name
        for name, value in vars(af).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    assert public | {"fft", "linalg", "nn", "optim", "profiler", "random", "raw"} == set(vars(af)["__all__"])


@pytest.mark.parametrize("module", [af, af.linalg, af.nn, af.profiler, af.raw], ids=lambda module: module.__name__)
def test_type_checkers_export_each_name_too(module: ModuleType) -> None:
    # They see no `__all__` there: what is imported under its own name, and what is assigned, is public to them.
    seen: set[str] = set()
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, ast.ImportFrom):
            seen.update(alias.name for alias in statement.names if alias.asname == alias.name)
        elif isinstance(statement, ast.Assign):
            seen.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    assert {name for name in seen if not name.startswith("_")} == set(module.__all__)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_functions_and_classes_have_docstrings(module: ModuleType) -> None:
    called = [name for name in module.__all__ if callable(getattr(module, name))]
    assert [name for name in called if not getattr(module, name).__doc__] == []


@pytest.mark.slow
def test_mypy_finds_each_name_and_no_other(tmp_path: Path) -> None:
    lines = [f"af.{name}" for name in vars(af)["__all__"]] + [
        f"af.linalg.{name}" for name in vars(af.linalg)["__all__"]
    ]
    program = tmp_path / "program.py"
    listed = ", ".join(["acosh", *lines])
    program.write_text(
        f"import asyncflow as af\nfrom asyncflow import *\nx = [{listed}]\naf.acosch\naf.linalg.sdv\n", encoding="utf-8"
    )
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    found = re.findall(r"program.py:(\d+): error", done.stdout)
    assert found == ["4", "5"], done.stdout + done.stderr
