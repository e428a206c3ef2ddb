"""Restoring the latest step while a saver elsewhere publishes another one and deletes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncflow as af
from asyncflow.checkpoint import checkpoints


def deleting(monkeypatch: pytest.MonkeyPatch, reads: str, root: Path, steps: list[int]) -> None:
    """Have the next of `steps` deleted whenever the latest has been found, and is about to be read."""
    read: Callable[..., Any] = getattr(checkpoints, reads)

    def read_late(*args: Any) -> Any:
        if steps:
            shutil.rmtree(root / f"step-{steps.pop(0)}")
        return read(*args)

    monkeypatch.setattr(checkpoints, reads, read_late)


@pytest.mark.parametrize("reads", ["read_manifest", "read_arrays"])
@pytest.mark.parametrize("how", ["restore", "swap"])
async def test_a_step_deleted_while_it_is_read_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str, how: str
) -> None:
    with af.Graph() as graph:
        v = af.Variable(0.0, name="v")
        count = v.assign_add(1.0)
    async with af.Session(graph) as session:
        for step in (1, 2, 3):
            await session.run(count)
            await session.save(tmp_path, step=step)
        deleting(monkeypatch, reads, tmp_path, [3, 2])
        if how == "restore":
            assert (await session.restore(tmp_path)).step == 1
        else:
            await session.swap_variables(tmp_path)
        assert await session.run(v) == 1.0
        deleting(monkeypatch, reads, tmp_path, [1])
        with pytest.raises(af.CheckpointError, match=r"step-1|no complete step is in it"):
            await session.restore(tmp_path)
        assert await session.run(v) == 1.0
