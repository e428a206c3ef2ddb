"""New checkpoints while a session serves: a run sees one version (Fault F49), and a damaged step changes nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import asyncflow as af
from asyncflow import serving
from asyncflow.checkpoint.directory import step_path
from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import CoroutineGate, in_flight


class Model:
    """Reads one variable twice, and may be held in between."""

    def __init__(self) -> None:
        self.gate = CoroutineGate()
        with af.Graph() as self.graph:
            self.x = af.placeholder("int64", ())
            weight = af.Variable(np.int64(1), name="weight")
            first = weight.read()
            with af.control_dependencies([first]):
                waited = self.gate.op(self.x)
            with af.control_dependencies([waited]):
                self.both = af.stack([first, weight.read()])
            self.assign = weight.assign(self.x)


def held(model: Model) -> Any:
    return lambda: model.gate.started


async def publish(path: Path, *values: int) -> None:
    """Writes steps 1, 2, … whose variable has these values, as a trainer does."""
    trainer = Model()
    async with af.Session(trainer.graph) as session:
        for value in values:
            await session.run(trainer.assign, {trainer.x: np.int64(value)})
            await session.save(path, step=value)


async def test_each_run_sees_one_version_and_later_ones_the_newer(tmp_path: Path) -> None:
    """Fault F49."""
    await publish(tmp_path, 10)
    model = Model()
    one = {model.x: np.int64(0)}
    async with af.Session(model.graph) as session, serving.Reload(session, tmp_path, every_s=1e9) as reload:
        assert reload.step == 10 and not await reload.look()
        async with in_flight(session.run(model.both, one), held(model)) as old:
            await publish(tmp_path, 11)
            assert await reload.look() and reload.step == 11
            model.gate.opened.set()
            assert list(await old) == [10, 10]
        assert list(await session.run(model.both, one)) == [11, 11]


async def test_a_damaged_step_is_told_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await publish(tmp_path, 10, 11)
    damaged = next(step_path(tmp_path, 11).glob("*.safetensors"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    model = Model()
    model.gate.opened.set()
    with caplog.at_level(logging.WARNING):
        async with af.Session(model.graph) as session, serving.Reload(session, tmp_path, every_s=1e9) as reload:
            assert reload.step is None and not await reload.look()
            assert list(await session.run(model.both, {model.x: np.int64(0)})) == [1, 1]
            assert len(caplog.records) == 1 and damaged.name in caplog.text
            damaged.write_bytes(whole)
            assert await reload.look()
            assert list(await session.run(model.both, {model.x: np.int64(0)})) == [11, 11]


async def test_a_step_that_there_is_no_memory_for_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(tmp_path, 10)
    model = Model()
    model.gate.opened.set()

    def refuse(*_: object) -> NoReturn:
        raise MemoryError("no room for the arrays")

    async with af.Session(model.graph) as session:
        with monkeypatch.context() as patched:
            patched.setattr("asyncflow.checkpoint.checkpoints.empty_buffers", refuse)
            reload = await serving.Reload(session, tmp_path, every_s=1e9).__aenter__()
        assert reload.step is None and "no room for the arrays" in caplog.text
        assert await reload.look() and reload.step == 10
        await reload.__aexit__()
        assert list(await session.run(model.both, {model.x: np.int64(0)})) == [10, 10]


async def test_a_directory_without_steps_is_watched(tmp_path: Path) -> None:
    async with af.Session(Model().graph) as session:
        with pytest.raises(NotADirectoryError, match="Reload watches a directory of checkpoints, and there is none at"):
            serving.Reload(session, tmp_path / "later")
    (tmp_path / "later").mkdir()
    async with af.Session(Model().graph) as session, serving.Reload(session, tmp_path / "later") as reload:
        assert reload.step is None
        await publish(tmp_path / "later", 3)
        assert await reload.look() and reload.step == 3


def test_it_looks_by_itself_until_the_session_closes(tmp_path: Path) -> None:
    async def main() -> None:
        model = Model()
        async with af.Session(model.graph) as session:
            async with serving.Reload(session, tmp_path, every_s=5.0) as reload:
                await publish(tmp_path, 1)
                await asyncio.sleep(5.1)
                assert reload.step == 1
                await publish(tmp_path, 2)
                await asyncio.sleep(5.1)
                assert reload.step == 2
                await session.aclose()
                await publish(tmp_path, 3)
                await asyncio.sleep(11)
                assert reload.step == 2
            assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())
