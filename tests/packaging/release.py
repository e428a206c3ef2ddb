"""`python -m tests.packaging.release WHEEL`: try a wheel on each supported Python that this machine has.

Each Python gets an empty environment with the wheel and its dependencies alone. The README's programs and the
commands of the conda recipe's test run there. mypy accepts the guide's programs, with the stubs of the NumPy that the
Python gets. This command names the versions that the machine lacks. It fails if a version fails, or if there is none to
try.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten

from tests.packaging.pages import GUIDE, ROOT, RUNNER, programs_on
from tests.patience import PATIENCE_S

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_VERSION = re.compile(r"Programming Language :: Python :: (3\.\d+)")
SUPPORTED = tuple(found[1] for each in PROJECT["classifiers"] if (found := _VERSION.fullmatch(each)))
"""The minor versions of Python that the package says it supports."""
_STEP_S = 900.0
"""A step may load packages over a slow line."""
PRINTED = re.compile(r"[Ii]t prints `(.+?)`")
"""A statement of the README about the output of its programs."""


def recipe_items(*keys: str) -> list[str]:
    """Return the list at ``keys`` of the conda recipe, such as ``("requirements", "run")``."""
    text = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8")
    for depth, key in enumerate(keys):
        indent = "  " * depth
        found = re.search(rf"^{indent}{key}:\n((?:{indent}  .*\n|\n)+)", text, re.MULTILINE)
        assert found is not None, f"recipe/meta.yaml has no {'.'.join(keys)}"
        text = found[1]
    return re.findall(r"^ *- (.+)$", text, re.MULTILINE)


def _command(words: str, binaries: Path) -> list[str | Path]:
    """Return a command of the recipe's test for the environment with ``binaries``, which has no pip of its own."""
    name, *arguments = words.split()
    if name == "pip":
        return [sys.executable, "-m", "pip", "--python", binaries / "python", *arguments]
    return [binaries / name, *arguments]


def _clean(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``variables`` without variables that lead Python to packages elsewhere, such as a checkout."""
    return {name: value for name, value in variables.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def _candidates(version: str, variables: Mapping[str, str]) -> Iterator[Path]:
    yield Path(sys.executable)
    if on_path := shutil.which(f"python{version}", path=variables.get("PATH", "")):
        yield Path(on_path)
    home = Path(variables.get("HOME", "/"))
    managers = Path(variables.get("PYENV_ROOT", home / ".pyenv"), "versions"), home / ".local/share/uv/python"
    for folder in managers:
        yield from sorted(folder.glob(f"*{version}.*/bin/python{version}"))


def installed(variables: Mapping[str, str]) -> dict[str, Path]:
    """Return the interpreters of supported versions on this machine; a version manager's empty shim is none."""
    found = dict[str, Path]()
    ask = ["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    for version in SUPPORTED:
        for python in _candidates(version, variables):
            asked = subprocess.run([python, *ask], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
            if asked.stdout.strip() == version:
                found[version] = python
                break
    return found


def _written(page: str, folder: Path) -> list[Path]:
    """Write the programs of a page into ``folder``."""
    paths = list[Path]()
    for number, program in enumerate(programs_on(page)):
        paths.append(folder / f"{Path(page).stem.lower()}_{number}.py")
        paths[-1].write_text(program, encoding="utf-8")
    return paths


def problem_of(version: str, python: Path, wheel: Path, folder: Path) -> str:
    """Install ``wheel`` into an empty environment in ``folder``, run the README there, and return what went wrong."""
    new = folder / "environment" / "bin" / "python"
    runner = folder / "runner.py"
    runner.write_text(RUNNER, encoding="utf-8")
    programs, guide = _written("README.md", folder), [path for page in GUIDE for path in _written(page, folder)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    # The pip of this environment installs into the new one, which saves it a pip of its own.
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        new,
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    mypy: list[str | Path] = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml"]
    imports = "; ".join(f"import {name}" for name in recipe_items("test", "imports"))
    steps: list[tuple[list[str | Path], list[str]]] = [
        ([python, "-m", "venv", "--without-pip", new.parents[1]], []),
        ([*pip, "--no-compile", wheel], []),
        ([new, "-W", "error", runner, *programs], PRINTED.findall(readme)),
        ([new, "-W", "error", "-c", f"{imports}; print(asyncflow.__version__)"], [PROJECT["version"]]),
        ([*mypy, "--python-executable", new, "--python-version", version, "--cache-dir", folder / "types", *guide], []),
        *((_command(words, new.parent), []) for words in recipe_items("test", "commands")),
    ]
    for command, expected in steps:
        done = subprocess.run(
            command,
            cwd=folder,
            env=_clean(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_STEP_S,
        )
        said = done.stdout + done.stderr
        if done.returncode:
            return f"{shorten(' '.join(map(str, command)), 300)}\n{said}"
        missing = [text for text in expected if text not in done.stdout]
        if missing:
            return f"{shorten(' '.join(map(str, command)), 300)}\ndid not print {missing}, but\n{said}"
    return ""


def main(wheel: Path, variables: Mapping[str, str] = os.environ) -> int:
    """Try ``wheel`` on each Python, at the same time; return the exit code."""
    pythons = installed(variables)
    with TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        tries = {}
        for version, python in pythons.items():
            own = Path(folder, version)
            own.mkdir()
            tries[version] = threads.submit(problem_of, version, python, wheel.resolve(), own)
        problems = {version: each.result() for version, each in tries.items()}
    for version in SUPPORTED:
        if version not in problems:
            print(f"Python {version}: not on this machine, and not tried")
        elif problems[version]:
            print(f"Python {version}: failed\n{problems[version]}")
        else:
            print(f"Python {version}: installed, the README's programs ran, and mypy accepts the guide's")
    return int(not problems or any(problems.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
