"""Directories of checkpoints: one for each step, such as ``step-1200``, which is there as a whole or not at all.

A step is written under a temporary name, ``.step-1200.4711.tmp``, and renamed. So a step that has its name is complete,
and the latest one is that with the highest number; there is no pointer to it that could be wrong. Leftovers of a killed
process under a temporary name are deleted by the next process that writes there.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from asyncflow.checkpoint.manifest import NAME
from asyncflow.errors import CheckpointError

_STEP: Final = re.compile(r"step-(0|[1-9][0-9]*)")
"""Pattern of the names that `step_path` makes; ``step-007`` is a foreign name."""
_TEMPORARY: Final = re.compile(r"\.step-\d+\.(\d+)\.tmp")
_being_written: Final[set[Path]] = set()
"""Temporary directories of this process, by real path: two sessions may write one directory by different names."""


def step_path(root: Path, step: int) -> Path:
    """Return the directory of a step."""
    return root / f"step-{step}"


def step_of(path: Path) -> int:
    """The number of the step whose directory is `path`."""
    return int(path.name.removeprefix("step-"))


def steps(root: Path) -> list[int]:
    """Return the complete steps under `root`, in order; an empty list if there is no such directory.

    Raises:
        CheckpointError: it cannot be read, or is a file.
    """
    return sorted(int(match[1]) for match in _named(root) if (root / match[0] / NAME).is_file())


def next_step(root: Path) -> int:
    """Return the highest number under `root` plus one; incomplete steps count.

    Raises:
        CheckpointError: see `steps`.
    """
    return max((int(match[1]) for match in _named(root)), default=-1) + 1


def _named(root: Path) -> list[re.Match[str]]:
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: is no directory that can be read: {error.strerror}") from error
    return [match for name in names if (match := _STEP.fullmatch(name))]


def find_step(path: Path) -> Path:
    """The step that `path` is, or the latest one under it.

    Raises:
        CheckpointError: there is none.
    """
    if os.path.isfile(path / NAME):  # `isfile` does not raise for names that are too long
        return path
    found = steps(path)
    if not found:
        what = "there is no such directory" if not path.exists() else "no complete step is in it"
        raise CheckpointError(f"{path}: is no checkpoint: {what}; a checkpoint is a directory with steps, or one step")
    return step_path(path, found[-1])


def begin_step(root: Path, step: int) -> Path:
    """Makes the temporary directory of a step, after deleting what others have left.

    Raises:
        OSError: it cannot.
        CheckpointError: there is such a step.
    """
    os.makedirs(root, exist_ok=True)
    target = step_path(root, step)
    if target.exists():
        is_complete = (target / NAME).is_file()
        why = "a complete step is never overwritten" if is_complete else f"is no complete step, as it has no {NAME}"
        raise CheckpointError(f"{target}: exists already, and {why}; save under another step, or delete this one first")
    clean(root)
    temporary = _temporary(root, step)
    _being_written.add(temporary.resolve())  # before `mkdir`, as another thread may clean up
    os.mkdir(temporary)
    return temporary


def publish(temporary: Path, root: Path, step: int) -> Path:
    """Gives a step that is on the disk its name, and has the disk know that, too.

    Raises:
        OSError: it cannot.
    """
    target = step_path(root, step)
    os.replace(temporary, target)
    _being_written.discard(temporary.resolve())
    sync_directory(root)
    return target


def drop(temporary: Path) -> None:
    """Deletes a step that was not published, as far as the disk lets it."""
    shutil.rmtree(temporary, ignore_errors=True)
    _being_written.discard(temporary.resolve())


def keep_latest(root: Path, count: int) -> None:
    """Deletes all complete steps but the latest `count`; each is gone as a whole, before its files go.

    If a step is a link to another directory, only the link is deleted.

    Raises:
        OSError: it cannot.
    """
    for step in steps(root)[:-count]:
        path = step_path(root, step)
        if path.is_symlink():
            path.unlink()
        else:
            temporary = _temporary(root, step)
            os.replace(path, temporary)
            shutil.rmtree(temporary)


def clean(root: Path) -> None:
    """Deletes what processes that are no more have not finished."""
    for name in os.listdir(root):
        match, path = _TEMPORARY.fullmatch(name), root / name
        if match and path.resolve() not in _being_written and not _is_at_work(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Has the disk know which names are in a directory; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _temporary(root: Path, step: int) -> Path:
    return root / f".step-{step}.{os.getpid()}.tmp"


def _is_at_work(process: int) -> bool:
    """Return True if another process has that number; in a container, this process may have the number of an earlier
    one.
    """
    if process == os.getpid():
        return False
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
