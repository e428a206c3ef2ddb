"""The checkout's links, what the wheel holds, and what importing the package costs its host."""

from __future__ import annotations

import email
import email.message
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from asyncflow.devices.cuda import backend as cuda_backend
from asyncflow.foreign_names import DISTRIBUTION
from asyncflow.streams.cuda import bindings as cuda_bindings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "asyncflow"
OPTIONAL = {"cupy", "cupyx", "matplotlib", "ml_dtypes", "pytest", "rich", "tensorflow"}

pytestmark = pytest.mark.slow


def run(arguments: list[str], cwd: Path, **environment: str) -> str:
    """Run Python with ``arguments`` in ``cwd`` and return its output; fail with all it said if it does."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, f"python {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def shipped_sources() -> set[str]:
    """Every file of the package that a user needs, relative to the checkout."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in {".py", ".html", ".css", ".js"} or path.name == "py.typed"
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build in, so that no build folder is left in it."""
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "demo-out")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel."""
    folder = checkout.parent
    run(["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(checkout)], cwd=folder)
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, names: set[str]) -> email.message.Message:
    (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(path))


def test_type_checkers_find_an_editable_install(checkout: Path, tmp_path: Path) -> None:
    """Type checkers read paths in ``.pth`` files, and run no import hooks."""
    run(["-c", f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"], cwd=checkout)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".pth"))
        assert archive.read(path).decode().split() == [str(checkout)]


@pytest.mark.parametrize("room", ["devices", "streams"])
def test_top_level_room_is_a_relative_link_into_the_package(room: str) -> None:
    link = ROOT / room
    assert link.is_symlink(), f"{link} must be a link: ln -s asyncflow/{room} {room}"
    assert link.readlink() == Path("asyncflow", room)
    assert (link / "__init__.py").samefile(PACKAGE / room / "__init__.py")


def test_wheel_holds_one_package_and_its_metadata(names: set[str]) -> None:
    tops = {name.split("/", 1)[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"asyncflow"}
    assert len(tops) == 2


def test_wheel_is_pure_and_named_after_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{project['version']}-py3-none-any.whl"
    assert project["name"] == DISTRIBUTION


def test_wheel_holds_every_source_and_data_file(names: set[str]) -> None:
    shipped = {name for name in names if name.startswith("asyncflow/")}
    assert "asyncflow/py.typed" in shipped
    assert shipped == shipped_sources()


def test_every_folder_of_the_package_is_a_regular_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_wheel_carries_the_licence_and_the_command(wheel: Path, names: set[str]) -> None:
    (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    (commands,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "asyncflow = asyncflow.cli:command" in archive.read(commands).decode()


def test_core_install_needs_three_packages(metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist", [])
    core = {requirement.split(">=", 1)[0] for requirement in requirements if "extra ==" not in requirement}
    assert core == {"numpy", "uvloop", "threadpoolctl"}


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_extras_of_cards_bring_what_the_options_need(metadata: email.message.Message, extra: str) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    brought = {requirement.partition(";")[0].strip() for requirement in requirements if f'"{extra}"' in requirement}
    assert brought == {
        f"cupy-{extra}x>={cuda_backend.LEAST_VERSION}",
        f"cuda-bindings>={cuda_bindings.LEAST_VERSION}",
    }


def test_import_from_the_wheel_is_silent_and_loads_nothing_optional(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import json, sys; before = set(sys.modules); import asyncflow; "
        "print(json.dumps([asyncflow.__file__, sorted({name.split('.')[0] for name in set(sys.modules) - before})]))"
    )
    output = run(["-W", "error", "-c", program], cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    origin, loaded = json.loads(output)
    assert Path(origin).is_relative_to(tmp_path / "site")
    assert OPTIONAL & set(loaded) == set()


def test_the_other_project_beside_this_one_is_told_of(wheel: Path, tmp_path: Path) -> None:
    """The other project is a module, which Python looks for behind packages, so that this one is imported."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "asyncflow.py").write_text("raise AssertionError('the other project')", encoding="utf-8")
    program = """
import warnings
with warnings.catch_warnings(record=True) as told:
    import asyncflow
print(asyncflow.Graph, *(each.message for each in told))
"""
    told = run(["-c", program], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "asyncflow.py beside this package is another project's" in told
    assert "pip uninstall asyncflow" in told
