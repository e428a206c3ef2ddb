"""Behaviour 79: saving while a program trains, and going on from a checkpoint, change no bit of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import OpenSession

STEPS = 6
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)


class Training:
    """Two layers that learn with noise: a loss for each step."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        with af.Graph(seed=5) as self.graph:
            w, v = (
                af.Variable(rng.standard_normal(shape).astype(np.float32), name=name)
                for name, shape in (("w", (3, 4)), ("v", (4, 1)))
            )
            self.made = af.Variable(0, name="made")
            noise = af.random.normal((8, 3), dtype="float32")
            hidden = af.tanh(af.matmul(af.constant(X) + np.float32(0.1) * noise, w))
            loss = af.mean(af.square(af.matmul(hidden, v) - X[:, :1]))
            self.step = [
                loss,
                af.optim.momentum(zip(af.gradients(loss, [w, v]), [w, v], strict=True), 0.1),
                self.made.assign_add(1),
            ]

    async def learn(self, session: af.Session, saver: af.Saver | None = None, until: int = STEPS) -> list[bytes]:
        losses: list[bytes] = []
        while (made := int(await session.run(self.made))) < until:
            loss, *_ = await session.run(self.step)
            losses.append(np.asarray(loss).tobytes())
            if saver is not None:
                assert await saver.maybe_save(made + 1)
        return losses


async def test_the_losses_are_the_same_with_and_without_saving(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 79."""
    training = Training()
    async with open_session(training.graph) as session:
        expected = await training.learn(session)
    assert len(set(expected)) == STEPS
    saver = af.Saver(tmp_path, every_steps=1)
    async with open_session(training.graph, restore=saver) as session:
        assert await training.learn(session, saver) == expected
        await saver.stop(session._checkpoints)
    other = Training()
    async with open_session(other.graph, restore=tmp_path / "step-3") as session:
        assert await other.learn(session) == expected[3:]


async def test_a_checkpoint_of_one_device_is_restored_on_another(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 79."""
    training = Training()
    async with open_session(training.graph) as session:
        await training.learn(session, until=2)
        path = await session.save(tmp_path)
        values = await session.run([training.made, *variables(training.graph)])
    if not type(session.devices[0]).__module__.startswith("asyncflow.devices.sim"):
        async with af.Session(training.graph, restore=path) as session:
            again = await session.run([training.made, *variables(training.graph)])
            for one, other in zip(values, again, strict=True):
                np.testing.assert_array_equal(one, other)


def variables(graph: af.Graph) -> list[Any]:
    return list({x: None for node in graph.walk() for x in node.attrs.values() if isinstance(x, af.Variable)})


@pytest.mark.parametrize("parallel", [1, 8])
async def test_a_node_in_a_loop_saves_whole_steps(parallel: int, open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 79."""
    saver = af.Saver(tmp_path, every_steps=2)
    with af.Graph() as graph:
        pair = [af.Variable(np.zeros(3, np.float32), name=name) for name in "ab"]

        def body(i: af.Tensor) -> af.Tensor:
            for variable in pair:
                variable.assign_add(np.ones(3, np.float32))
            saver.maybe_save(i + 1)
            return i + 1

        loop = af.while_loop(lambda i: i < 7, body, 0, parallel_iterations=parallel)
    async with open_session(graph, restore=saver) as session:
        assert await session.run(loop) == 7
        await saver.stop(session._checkpoints)
        for step in (2, 4, 6):
            await session.restore(tmp_path / f"step-{step}")
            for value in await session.run(pair):
                assert value.tolist() == [step] * 3
