"""Steps in a directory: their list, the latest one, and the rest of steps that were not finished."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncflow.checkpoint.directory import begin_step, clean, drop, find_step, steps
from asyncflow.checkpoint.manifest import NAME
from asyncflow.errors import CheckpointError
from tests.checkpoint.steps import read, write
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def test_the_latest_step_is_the_highest_complete_one(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        write(tmp_path, step, x=step)
    (tmp_path / "step-11").mkdir()  # nothing is in it
    (tmp_path / "step-12").write_text("a file")
    (tmp_path / "notes").mkdir()
    assert steps(tmp_path) == [2, 9, 10]
    assert find_step(tmp_path) == tmp_path / "step-10"
    assert find_step(tmp_path / "step-9") == tmp_path / "step-9"


def test_a_step_without_a_number_is_the_next_one(tmp_path: Path) -> None:
    assert write(tmp_path, None, x=1).name == "step-0"
    write(tmp_path, 41, x=1)
    assert write(tmp_path, None, x=1).name == "step-42"


def test_a_step_that_has_lost_its_manifest_is_in_nobodys_way(tmp_path: Path) -> None:
    (write(tmp_path, 7, x=1) / NAME).unlink()
    with pytest.raises(CheckpointError, match=rf"step-7: exists already, and is no complete step, as .* {NAME}"):
        write(tmp_path, 7, x=2)
    assert write(tmp_path, None, x=2).name == "step-8"
    assert steps(tmp_path) == [8]


@pytest.mark.parametrize("name", ["step-007", "step-٧"])
def test_a_number_that_is_written_otherwise_is_no_step(name: str, tmp_path: Path) -> None:
    write(tmp_path, 2, x=2)
    (tmp_path / "step-2").rename(tmp_path / name)
    assert steps(tmp_path) == []
    assert write(tmp_path, 1, 1, x=1) == find_step(tmp_path) == tmp_path / "step-1"


def test_of_a_step_that_is_a_link_the_link_is_deleted(tmp_path: Path) -> None:
    steps_, moved = tmp_path / "steps", tmp_path / "moved"
    write(steps_, 1, x=1).rename(moved)
    (steps_ / "step-1").symlink_to(moved)
    assert read(find_step(steps_)) == {"x": 1}
    write(steps_, 2, 1, x=2)
    assert os.listdir(steps_) == ["step-2"]
    assert read(moved) == {"x": 1}


def test_files_under_another_name_of_the_directory_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = begin_step(type(tmp_path)("steps"), 1)
    (tmp_path / "link").symlink_to(tmp_path / "steps")
    for root in (tmp_path / "steps", tmp_path / "link"):
        clean(root)
        assert mine.is_dir()
    drop(mine)
    assert os.listdir(tmp_path / "steps") == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "there is no such directory"),
        ("empty", "no complete step is in it"),
        ("file", "is no directory"),
        ("x" * 300, "too long"),
    ],
)
def test_where_no_checkpoint_is(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{name}: .*{message}"):
        find_step(tmp_path / name)


def test_a_complete_step_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path, 3, x=1)
    with pytest.raises(CheckpointError, match=r"step-3: exists already, and a complete step is never overwritten"):
        write(tmp_path, 3, x=2)
    assert read(path) == {"x": 1}
    assert os.listdir(tmp_path) == ["step-3"]


def test_only_the_latest_are_kept_and_only_after_a_publish(tmp_path: Path) -> None:
    for step in range(5):
        write(tmp_path, step, 2, x=step)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
    with pytest.raises(CheckpointError):
        write(tmp_path, 4, 1, x=0)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]


def test_what_dead_processes_have_left_is_deleted_and_what_others_write_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.getpid())"]
    ended = int(subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S).stdout)
    mine = begin_step(tmp_path, 1)
    alive = tmp_path / f".step-5.{os.getppid()}.tmp"
    for path in (tmp_path / f".step-7.{ended}.tmp", tmp_path / f".step-8.{os.getpid()}.tmp", alive):
        path.mkdir()
        (path / "variables.safetensors").write_bytes(b"half")
    clean(tmp_path)
    assert {mine.name, alive.name} == set(os.listdir(tmp_path))
    drop(mine)
    assert os.listdir(tmp_path) == [alive.name]
