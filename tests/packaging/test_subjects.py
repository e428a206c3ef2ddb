"""Subjects of commits are judged by the hook and by CI: new ones alone, in whole, shallow and empty clones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.packaging.subjects import MOST, RULE, fault, main, new_subjects, subject_of
from tests.patience import PATIENCE_S


@pytest.mark.parametrize(
    "subject",
    [
        "Hold each room's lines of code to a cap",
        "Pass the limit on",
        "Need no BLAS",
        "Feed rows by name",
        "Access a card once",
        "`Session.run` is no subject"[1:],
        'Revert "' + "x" * MOST + '"',
        "Merge branch 'main' of a place with a long name into a branch with a name that is as long",
        "A" * MOST,
    ],
)
def test_good_subjects(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "told"),
    [
        ("A" * (MOST + 1), "has 73 characters, and may have 72"),
        ("Fixes a race", "is not imperative: 'Fixes'"),
        ("Fixed a race", "is not imperative: 'Fixed'"),
        ("Fixing a race", "is not imperative: 'Fixing'"),
        ("Rows of one call", "is not imperative: 'Rows'"),
        ("fix a race", "begins with no capital letter"),
        ("", "begins with no capital letter"),
        ("Fix a race.", "ends with a full stop"),
    ],
)
def test_faulty_subjects(subject: str, told: str) -> None:
    assert fault(subject) == told


def test_the_hook_judges_the_message_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("# a comment\n\nFix a race\n\nFixes it.\n", encoding="utf-8")
    assert main([str(message)]) == 0
    message.write_text("Fixed a race\n", encoding="utf-8")
    assert main([str(message)]) == 1
    assert capsys.readouterr().out == f"{message}: the subject is not imperative: 'Fixed': Fixed a race\n"
    assert subject_of("fixup! squash! Fix a race\n") == "Fix a race"


def git(folder: Path, *words: str) -> None:
    settings = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "init.defaultBranch=main")
    options = [word for setting in settings for word in ("-c", setting)]
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)


def commit(folder: Path, subject: str, path: str = "a") -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(subject, encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", subject)


@pytest.fixture(autouse=True)
def no_git_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a hook git's variables name the checkout that it runs for, and these tests must not write there.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    commit(folder, "Rows of old")
    commit(folder, "Began to judge", RULE)
    return folder


def subjects(folder: Path) -> list[str]:
    return [subject for _, subject in new_subjects(folder)]


def test_commits_from_before_the_rule_are_not_judged(clone: Path) -> None:
    assert subjects(clone) == []
    commit(clone, "Rows of new")
    assert subjects(clone) == ["Rows of new"]
    assert main([], clone) == 1


def test_a_branch_is_judged_from_where_it_left_main(clone: Path) -> None:
    commit(clone, "Rows on main")
    git(clone, "checkout", "-qb", "work")
    assert subjects(clone) == ["Rows on main"]  # nothing new on the branch, so as on main
    commit(clone, "Add rows")
    assert subjects(clone) == ["Add rows"]
    assert main([], clone) == 0


def test_main_is_judged_from_the_last_release(clone: Path) -> None:
    commit(clone, "Rows of the release")
    git(clone, "tag", "v1")
    assert subjects(clone) == []
    commit(clone, "Add rows")
    assert subjects(clone) == ["Add rows"]


def test_a_shallow_clone_judges_the_commits_it_has(clone: Path, tmp_path: Path) -> None:
    for subject in ("Rows of new", "Add rows", "Add columns"):
        commit(clone, subject)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth=2", f"file://{clone}", str(shallow))
    assert subjects(shallow) == ["Add columns"]


def test_without_git_or_commits_nothing_is_judged(tmp_path: Path) -> None:
    assert main([], tmp_path) == 0
    git(tmp_path, "init", "-q")
    assert main([], tmp_path) == 0
