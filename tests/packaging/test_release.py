"""Requirements of `RELEASING.md`: equal versions, a changelog to read, a true recipe, and a wheel that was tried."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import asyncflow as af
from tests.packaging import release
from tests.packaging.pages import ROOT
from tests.packaging.release import PROJECT, SUPPORTED, recipe_items

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
NEWEST = re.search(r"^## \[(\d[^]]*)\] - (\d{4}-\d\d-\d\d)\n(.*?)(?=^## |\Z)", CHANGELOG, re.MULTILINE | re.DOTALL)
CONDA = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "prometheus-client": "prometheus_client",
    "ml-dtypes": "ml_dtypes",
}
"""Names of packages that differ on conda."""


def said(file: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{file} has no {pattern}"
    return found[1]


def conda(requirement: str) -> str:
    """Return what the recipe writes for a requirement of ``pyproject.toml``."""
    name, bound = re.split(r"(?=>=)", requirement.partition(";")[0].strip())
    name = re.sub(r"-cuda\d+x$", "", name)
    return f"{CONDA.get(name, name)} {bound}"


def test_every_file_has_the_version_of_the_changelog() -> None:
    assert NEWEST is not None
    versions = {
        "pyproject.toml": PROJECT["version"],
        "asyncflow/__init__.py": af.__version__,
        "CITATION.cff": said("CITATION.cff", r"^version: (.+)$"),
        "recipe/meta.yaml": said("recipe/meta.yaml", r'^  version: "(.+)"$'),
    }
    assert versions == dict.fromkeys(versions, NEWEST[1])
    assert said("CITATION.cff", r"^date-released: (.+)$") == NEWEST[2]


def test_a_line_of_the_changelog_for_each_change() -> None:
    assert NEWEST is not None
    subjects = re.findall(r"^### (.+)$", NEWEST[3], re.MULTILINE)
    lines = [line for line in NEWEST[3].splitlines() if line and not line.startswith("### ")]
    changes = [line for line in lines if line.startswith("- ")]
    assert len(set(subjects)) == len(subjects) > 1
    assert not {"Added", "Changed", "Fixed"} & set(subjects), "a heading of a release names a subject"
    assert [line for line in lines if line.startswith(" ")] == [], "a change takes one line"
    assert [line for line in changes if len(line) > 120 or not line.endswith(".")] == []
    assert len(set(changes)) == len(changes)


def test_the_recipe_has_the_projects_requirements_and_command() -> None:
    python = f"python {PROJECT['requires-python']}"
    assert recipe_items("requirements", "run") == ["__unix", python, *map(conda, PROJECT["dependencies"])]
    assert recipe_items("requirements", "host") == [python, "pip", "setuptools >=77"]
    ours = ("bench", "dev", "docs")
    of_users = {name: of for name, of in PROJECT["optional-dependencies"].items() if name not in ours}
    optional = {conda(requirement) for requirements in of_users.values() for requirement in requirements}
    assert recipe_items("requirements", "run_constrained") == sorted(optional)
    assert recipe_items("build", "entry_points") == [f"{name} = {of}" for name, of in PROJECT["scripts"].items()]
    about = {key: said("recipe/meta.yaml", rf"^  {key}: (.+)$") for key in ("name", "summary", "license")}
    assert about == {"name": PROJECT["name"], "summary": PROJECT["description"], "license": PROJECT["license"]}


def test_every_target_of_the_list_is_there() -> None:
    targets = re.findall(r"`make ([a-z-]+)", (ROOT / "RELEASING.md").read_text(encoding="utf-8"))
    assert "package" in targets
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    assert "section 'sdist and wheel' package" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_interpreters_of_this_machine(tmp_path: Path) -> None:
    """A version manager has a `python3.x` on the path also for versions that are not chosen, which does not run."""
    here = "{}.{}".format(*sys.version_info)
    other = next(version for version in SUPPORTED if version != here)
    shim = tmp_path / f"python{other}"
    shim.write_text("#!/bin/sh\necho no such version >&2\nexit 127\n", encoding="utf-8")
    shim.chmod(0o755)
    variables = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    assert release.installed(variables) == {here: Path(sys.executable)}
    managed = tmp_path / ".pyenv" / "versions" / f"{other}.9" / "bin" / f"python{other}"
    managed.parent.mkdir(parents=True)
    managed.write_text(f"#!/bin/sh\necho {other}\n", encoding="utf-8")
    managed.chmod(0o755)
    assert release.installed(variables) == {here: Path(sys.executable), other: managed}


def test_the_description_of_each_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *missing = SUPPORTED
    good, bad = Path("/good/python"), Path("/bad/python")
    monkeypatch.setattr(release, "installed", lambda variables: {first: good, second: bad})
    monkeypatch.setattr(
        release, "problem_of", lambda version, python, wheel, folder: "it failed" if python == bad else ""
    )
    assert release.main(Path("a.whl"), os.environ) == 1
    told = [
        f"Python {first}: installed, the README's programs ran, and mypy accepts the guide's",
        f"Python {second}: failed",
        "it failed",
        *(f"Python {version}: not on this machine, and not tried" for version in missing),
    ]
    assert capsys.readouterr().out.splitlines() == told
    monkeypatch.setattr(release, "installed", lambda variables: {first: good})
    assert release.main(Path("a.whl"), os.environ) == 0
    monkeypatch.setattr(release, "installed", lambda variables: {})
    assert release.main(Path("a.whl"), os.environ) == 1
