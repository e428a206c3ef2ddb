"""`__all__` of the public modules: exported names exist, once, in order, and are documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

import asyncflow as af
from asyncflow import foreign_names, serving
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
MODULES = [af, af.cuda, af.fft, af.linalg, af.nn, af.optim, af.profiler, af.random, af.raw, serving]


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
    for name in vars(af)["__all__"]:
        getattr(af, name)
    public = {
        name
        for name, value in vars(af).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    assert public | {"cuda", "fft", "linalg", "nn", "optim", "profiler", "random", "raw"} == set(vars(af)["__all__"])


@pytest.mark.parametrize("module", [af, af.linalg, af.nn, af.profiler, af.raw], ids=lambda module: module.__name__)
def test_type_checkers_export_each_name_too(module: ModuleType) -> None:
    # They see no `__all__` there: what is imported under its own name, and what is assigned, is public to them.
    seen: set[str] = set()
    body = ast.parse(inspect.getsource(module)).body
    for each in [statement for statement in body if isinstance(statement, ast.If)]:
        body += each.body if "TYPE_CHECKING" in ast.unparse(each.test) else []
    for statement in body:
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


LOADED = """
import sys
import asyncflow as af

{statement}
print(*{{name.split(".")[1] for name in sys.modules if name.startswith("asyncflow.")}})
print("numpy" in sys.modules, "asyncio" in sys.modules)
"""


def run_alone(program: str, *arguments: str) -> str:
    """Run a program in a process of its own, in which a warning is an error; return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> tuple[set[str], str]:
    """The rooms that a statement imports, in a process of its own; and if NumPy and asyncio are imported."""
    *_, rooms, others = run_alone(LOADED.format(statement=statement)).splitlines()
    return set(rooms.split()), others


def test_a_name_is_imported_when_it_is_asked_for() -> None:
    assert loaded_by("af.__version__") == ({"foreign_names"}, "False False")
    graph, _ = loaded_by("with af.Graph(): af.while_loop(lambda x: x < 3, lambda x: x + 1, 0)")
    assert graph & {"autodiff", "checkpoint", "cli", "compiler", "devices", "profiler", "runtime", "vertex"} == set()


@pytest.mark.slow
def test_any_name_may_be_the_first() -> None:
    """Each is asked for first in a child of a process that has imported nothing but the package."""
    program = """
import os
import sys
import asyncflow as af

failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        getattr(af, name)
        with af.Graph():
            y = af.while_loop(lambda x: x < 3, lambda x: x + 1, af.placeholder("int64", ()), pool=af.Pool(4))
        os._exit(0 if (y * 2).spec.dtype == "int64" else 1)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(" ".join(failed) or 0)
"""
    alone = {home: listed for home, listed in vars(af)["_HOMES"].items() if not home.startswith(vars(af)["_TOGETHER"])}
    names = ["Graph", *(listed.split()[0].partition("=")[0] for listed in alone.values())]
    run_alone(program, *names)


def test_threads_import_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, events = threading.Event(), list[str]()

    class Lock:
        def __init__(self) -> None:
            self._lock = threading.RLock()

        def __enter__(self) -> None:
            if threading.current_thread() is second:
                asked.set()
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def import_module(home: str) -> ModuleType:
        events.append(f"{home} begins")
        if home == "package.first":
            second.start()
            assert asked.wait(PATIENCE_S)
        events.append(f"{home} ends")
        return sys

    monkeypatch.setattr(foreign_names, "RLock", Lock)
    monkeypatch.setattr(foreign_names, "import_module", import_module)
    names: dict[str, object] = {}
    _, find, _ = foreign_names.facade("package", names, homes={"first": "path", "second": "modules"})
    second = threading.Thread(target=find, args=("modules",))
    assert find("path") is sys.path
    second.join(PATIENCE_S)
    assert names == {"path": sys.path, "modules": sys.modules}
    assert events == [f"package.{home} {event}" for home in ("first", "second") for event in ("begins", "ends")]
