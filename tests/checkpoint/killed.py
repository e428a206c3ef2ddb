"""Publishes a step again and again, and is killed at another system call each time: ``killed.py directory``.

Of a call that writes, half is done; any other is killed before it, and then after it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.checkpoint.directory import steps
from tests.checkpoint.steps import read, write

CALLS = ("open", "write", "fsync", "close", "mkdir", "replace", "rmdir", "unlink")
"""All by which a publish changes the disk."""


class Killer:
    """Kills the process at the call of that number."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    def wrapped(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            if self.calls == self.at:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            result = call(*args, **options)
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.calls += 1
            return result

        return counted


def publish(root: Path, at: int) -> bool:
    """A child publishes step 2, and keeps one, which deletes step 1: whether it was killed."""
    child = os.fork()
    if child == 0:
        killer = Killer(at)
        for name in CALLS:
            setattr(os, name, killer.wrapped(getattr(os, name), name))
        try:
            write(root, 2, 1, x=np.full(1000, 2.0), y=2)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def main(folder: str) -> None:
    root = Path(folder) / "run"
    seen = []
    at = 0
    while True:
        shutil.rmtree(root, ignore_errors=True)
        write(root, 1, x=np.full(1000, 1.0), y=1)
        was_killed = publish(root, at)
        latest = steps(root)[-1]
        seen.append(latest)
        found = read(root / f"step-{latest}")  # which is complete
        assert found["y"] == latest, (at, found["y"])
        assert (found["x"] == latest).all(), at
        write(root, 3, 1, x=np.full(1000, 3.0), y=3)
        assert os.listdir(root) == ["step-3"], (at, os.listdir(root))
        if not was_killed:
            break
        at += 1
    assert seen == sorted(seen), seen
    print(at, "kills,", seen.count(1), "of them before the step was there")


if __name__ == "__main__":
    main(sys.argv[1])
