"""`Saver`: when it publishes, the checkpoint that a session begins with, and its behaviour when it cannot publish."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.checkpoint.test_checkpoints import Gate, Model
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def names(root: Path) -> list[str]:
    """The steps there, and nothing else."""
    return sorted(os.listdir(root), key=lambda name: (len(name), name)) if root.exists() else []


async def publish(saver: af.Saver, step: int) -> None:
    """Publishes a step that is due, and waits for it."""
    assert await saver.maybe_save(step)
    await saver._written()


async def test_a_session_goes_on_from_the_latest_step(tmp_path: Path) -> None:
    for begin in (0, 5, 10):
        model = Model()
        saver = af.Saver(tmp_path / "run", every_steps=2, keep=2)
        async with af.Session(model.graph, restore=saver) as session:
            # What was made after the last publish is made again.
            assert await session.run(model.n) == begin // 2 * 2
            for step in range(begin // 2 * 2 + 1, begin + 6):
                await session.run(model.step)
                assert await saver.maybe_save(step) == (step % 2 == 0)
    assert names(tmp_path / "run") == ["step-12", "step-14"]


async def test_a_loop_publishes_where_a_step_ends(tmp_path: Path) -> None:
    def build(saver: af.Saver, count: int) -> tuple[af.Graph, list[af.Variable], Any]:
        with af.Graph() as graph:
            a, b = (af.Variable(np.zeros(3, np.float32), name=name) for name in "ab")
            done = af.Variable(0, name="done")

            def body(i: af.Tensor) -> af.Tensor:
                a.assign_add(np.ones(3, np.float32))
                b.assign_sub(np.ones(3, np.float32))
                saver.maybe_save(done.assign_add(1))
                return i + 1

            return graph, [a, b, done], af.while_loop(lambda i: i < count, body, 0)

    first = af.Saver(tmp_path, every_steps=3)
    graph, variables, loop = build(first, 7)
    async with af.Session(graph, restore=first) as session:
        await session.run(loop)
    assert names(tmp_path) == ["step-3", "step-6"]
    second = af.Saver(tmp_path, every_steps=3)
    graph, variables, loop = build(second, 7)
    async with af.Session(graph, restore=second) as session:
        a, b, done = await session.run(variables)
        assert (a.tolist(), b.tolist(), done) == ([6.0] * 3, [-6.0] * 3, 6)
        await session.run(loop)
        await second._written()
        for step in (9, 12):
            await session.restore(tmp_path / f"step-{step}")
            a, b, done = await session.run(variables)
            assert (a.tolist(), b.tolist(), done) == ([step] * 3, [-step] * 3, step)


async def test_two_loops_that_publish_wait_for_each_other(tmp_path: Path) -> None:
    """Both are at the end of a step when one is due: neither waits for the other's end."""
    saver = af.Saver(tmp_path, every_steps=4)
    with af.Graph() as graph:
        pairs = [[af.Variable(0, name=f"{name}{k}") for name in "ab"] for k in range(2)]

        def loop(pair: list[af.Variable]) -> Any:
            def body(i: af.Tensor) -> af.Tensor:
                for variable in pair:
                    variable.assign_add(1)
                saver.maybe_save(i + 1)
                return i + 1

            return af.while_loop(lambda i: i < 40, body, 0)

        loops = [loop(pair) for pair in pairs]
    async with asyncio.timeout(PATIENCE_S), af.Session(graph, restore=saver) as session:
        await asyncio.gather(*(session.run(each) for each in loops))
        await saver._written()
        for name in names(tmp_path):
            await session.restore(tmp_path / name)
            for a, b in pairs:
                assert await session.run(a) == await session.run(b)
    assert saver.error is None
    assert "step-40" in names(tmp_path)


def test_by_the_clock(tmp_path: Path) -> None:
    async def main() -> None:
        model = Model()
        saver = af.Saver(tmp_path, every_s=10.0, keep=3)
        async with af.Session(model.graph, restore=saver) as session:
            await session.run(model.step)
            await asyncio.sleep(45)
            assert [*names(tmp_path), saver.step] == ["step-1", "step-2", "step-3", 3]
            assert [await saver.maybe_save(step) for step in (50, 51)] == [False, False]
            await asyncio.sleep(10)  # from now on the program says when
            assert [await saver.maybe_save(step) for step in (52, 53)] == [True, False]
        assert names(tmp_path) == ["step-2", "step-3", "step-52"]

    with virtual_clock() as clock:
        clock.run(main())


def test_a_run_that_is_half_way_for_long_is_said(tmp_path: Path) -> None:
    """A saver that finds no moment says so, tries again, and takes the first there is."""

    async def main() -> None:
        gate, model = Gate(), Model()
        with model.graph:
            waits = [*model.step, gate.op(np.float32(1))]
        saver = af.Saver(tmp_path, every_s=5.0)
        async with af.Session(model.graph, restore=saver) as session:
            run = asyncio.create_task(session.run(waits))
            await gate.entered.wait()
            with pytest.warns(UserWarning, match=r"for 10 s a run that writes several .* put saver.maybe_save\(step\)"):
                await asyncio.sleep(16)
            assert isinstance(saver.error, af.CheckpointError)
            gate.opened.set()
            await run
            await asyncio.sleep(6)
            assert saver.error is None
            assert names(tmp_path) == ["step-0"]

    with virtual_clock() as clock:
        clock.run(main())


async def test_a_step_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F54: F54: training goes on, and so does publishing once the disk takes it again."""
    model = Model()
    saver = af.Saver(tmp_path / "run", every_steps=1)
    (tmp_path / "run").write_text("no directory")
    with pytest.raises(af.CheckpointError, match="is no directory that can be read"):
        async with af.Session(model.graph, restore=saver):
            pytest.fail("the session was entered")
    (tmp_path / "run").unlink()
    async with af.Session(model.graph, restore=saver) as session:
        await session.run(model.step)
        (tmp_path / "run").write_text("no directory")
        with pytest.warns(UserWarning, match="a checkpoint was not published: .*run: step 1 cannot be written") as said:
            await publish(saver, 1)
        assert said[0].filename == __file__
        assert saver.error is not None
        (tmp_path / "run").unlink()
        await session.run(model.step)
        await publish(saver, 2)
        assert saver.error is None
    assert names(tmp_path / "run") == ["step-2"]


async def test_saving_at_once(tmp_path: Path) -> None:
    model = Model()
    saver = af.Saver(tmp_path, every_steps=10, keep=1)
    async with af.Session(model.graph, restore=saver) as session:
        assert await saver.save() == tmp_path / "step-0"
        assert [(await saver.save()).name, saver.step] == ["step-1", 1]
        await session.run(model.step)
        assert await saver.save(10) == tmp_path / "step-10"
        assert not await saver.maybe_save(10)
        assert not await saver.maybe_save(19)
        with pytest.raises(af.CheckpointError, match="exists already"):
            await saver.save(10)
    assert names(tmp_path) == ["step-10"]


async def test_the_step_to_go_on_from_and_the_next_one(tmp_path: Path) -> None:
    model = Model()
    saver = af.Saver(tmp_path, every_steps=5)
    async with af.Session(model.graph, restore=saver):
        assert saver.step == 0
        assert await saver.maybe_save(5)
        assert (await saver.save()).name == "step-6"  # though the one before was still to be written
    async with af.Session(model.graph, restore=saver):
        assert saver.step == 6


async def test_one_session_at_a_time(tmp_path: Path) -> None:
    model = Model()
    saver = af.Saver(tmp_path, every_steps=1)
    for call in (saver.save, lambda: saver.maybe_save(1)):
        with pytest.raises(RuntimeError, match=r"belongs to no open session: af.Session\(graph, restore=saver\)"):
            await call()
    async with af.Session(model.graph, restore=saver):
        with pytest.raises(RuntimeError, match="belongs to another session"):
            async with af.Session(model.graph, restore=saver):
                pytest.fail("the session was entered")
        await saver.save()
    async with af.Session(model.graph, restore=saver):
        assert await saver.maybe_save(7)
    assert names(tmp_path) == ["step-0", "step-7"]


async def test_a_node_in_a_session_without_the_saver(tmp_path: Path) -> None:
    saver = af.Saver(tmp_path, every_steps=1)
    with af.Graph() as graph:
        node = saver.maybe_save(af.constant(3))
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError, match="belongs to no open session"):
            await session.run(node)


async def test_closing_waits_for_the_write_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    saver = af.Saver(tmp_path, every_steps=1)
    async with af.Session(model.graph, restore=saver):
        assert await saver.maybe_save(1)
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_steps": 0}, "every_steps is at least 1; got 0"),
        ({"every_steps": 1.5}, "every_steps is a whole number; got 1.5"),
        ({"every_s": 0}, "every_s is more than 0 seconds; got 0"),
        ({"every_s": float("nan")}, "every_s is more than 0 seconds; got nan"),
        ({"every_s": "1"}, "every_s is a number of seconds, or None; got '1'"),
        ({"keep": 0}, "keep is at least 1; got 0"),
        ({"keep": True}, "keep is a whole number; got True"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        af.Saver(tmp_path, **options)
    assert str(raised.value) == message


async def test_steps_that_make_no_sense(tmp_path: Path) -> None:
    saver = af.Saver(tmp_path, every_steps=1)
    with pytest.raises(TypeError, match=r"step is a whole number; got 1\.5"):
        await saver.maybe_save(1.5)  # type: ignore[call-overload]
    with af.Graph():
        for wrong in (af.constant(1.5), af.constant([1, 2])):
            with pytest.raises(af.GraphError, match="maybe_save takes the number of steps made, a whole number; got"):
                saver.maybe_save(wrong)
        with pytest.raises(af.GraphError, match="in a graph, maybe_save takes a tensor that counts the steps; got 3"):
            saver.maybe_save(3)  # type: ignore[unused-coroutine]
    with pytest.raises(af.GraphError, match="maybe_save is never due: give the saver every_steps= or every_s="):
        await af.Saver(tmp_path).maybe_save(1)
