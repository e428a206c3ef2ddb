"""Saves while devices take their time, or are lost meanwhile, or the program is interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.conftest import small_cards
from tests.faults import programs
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@pytest.mark.parametrize("device", ["sim:0", "cpu:0"])
def test_a_save_takes_the_time_of_its_copies(device: str, tmp_path: Path) -> None:
    """On simulated cards: 64 MiB over a link with a known bandwidth. On a CPU: no time."""

    async def main() -> None:
        with af.Graph() as graph:
            v = af.Variable(np.zeros(16 * MIB, np.float32), name="v")
            i = af.Variable(0, name="i")
            write, count = v.assign_add(np.float32(1)), i.assign_add(1)
        async with af.Session(graph, devices=[device]) as session:
            loop = asyncio.get_running_loop()
            await session.run(write.node)
            began_s = loop.time()
            saving = asyncio.create_task(session.save(tmp_path))
            await asyncio.sleep(0)
            assert await session.run(count) == 1
            await saving
            took_s = loop.time() - began_s
            if device == "cpu:0":
                assert took_s < 0.002
            else:
                assert 64 * MIB / 16e9 < took_s < 64 * MIB / 10e9

    with virtual_clock("1 x v100, pcie3") as clock:
        clock.run(main())


async def test_a_card_that_is_lost_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F54: the step is not published; earlier steps, and the values of other devices, stay."""
    with small_cards(0):
        with af.Graph() as graph:
            with af.device("cuda:0"):
                lost = af.Variable(np.zeros(64, np.float32), name="lost")
                first = lost.assign_add(np.ones(64, np.float32))
            with af.device("cuda:1"):
                kept = af.Variable(np.zeros(64, np.float32), name="kept")
                second = kept.assign_add(np.ones(64, np.float32))
        async with af.Session(graph, devices=["cuda:0", "cuda:1"]) as session:
            await session.run([first, second])
            await session.save(tmp_path)
            await session.run([first, second])
            card = session.devices[0]
            with monkeypatch.context() as patch:
                patch.setattr(card, "fetched", fails(af.DeviceLostError("cuda:0 is lost")))
                with pytest.raises(af.CheckpointError, match=r"nothing was saved: .* lost: cuda:0 is lost"):
                    await session.save(tmp_path)
            assert os.listdir(tmp_path) == ["step-0"]
            assert (await session.run(second)).tolist() == [3.0] * 64
            await session.restore(tmp_path)
            assert (await session.run(first)).tolist() == [2.0] * 64
            await session.save(tmp_path)


def fails(error: Exception) -> object:
    async def fetched(handle: object) -> None:
        raise error

    return fetched


@pytest.mark.slow
@both_loops
def test_interrupt_during_a_save(loop: str, tmp_path: Path) -> None:
    """Fault F28: at any wait for the disk: the program ends at once, and the steps that are there are complete."""
    source = f"""
        from asyncflow.checkpoint import directory
        from asyncflow.checkpoint.manifest import read_manifest
        from asyncflow.checkpoint.reader import verify

        root = directory.Path({str(tmp_path)!r})
        sync, left, syncs = os.fsync, threading.Event(), 0

        def fsync(descriptor):
            global syncs
            sync(descriptor)
            syncs += 1
            if syncs == at:
                print("saving", flush=True)
                left.wait()

        async def main():
            with af.Graph() as graph:
                n = af.Variable(0, name="n")
                n.read()
            async with af.Session(graph) as session:
                try:
                    await session.save(root)
                finally:
                    left.set()

        os.fsync = fsync
        for at in range(1, 5):  # the arrays, the manifest, the step, the directory of steps
            syncs = 0
            left.clear()
            try:
                with asyncio.Runner(loop_factory=FACTORY) as runner:
                    runner.run(main())
            except KeyboardInterrupt:
                for thread in threading.enumerate():
                    if thread is not threading.current_thread():
                        thread.join()
                found = directory.steps(root)
                paths = [directory.step_path(root, step) for step in found]
                assert not [fault for path in paths for fault in verify(path, read_manifest(path))]
                print("interrupted", len(found), os.listdir(root) == [path.name for path in paths], flush=True)
    """
    with programs.started(source, loop) as process:
        assert process.stdout is not None
        for published in (0, 0, 0, 1):
            assert process.stdout.readline() == "saving\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == f"interrupted {published} True\n"
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "", "")
