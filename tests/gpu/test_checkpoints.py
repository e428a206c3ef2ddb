"""T24: variables in the card's memory are saved and replaced while a program uses them, and restored, to the bit."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from tests.gpu.card import GRACE_S, Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import Heartbeat, on_loop

STEPS = 8
HELD = 5
"""Variables that a save holds while a step gives them new values."""


class Training:
    """Two layers that learn with noise, by momentum: their variables and its own stay on the card."""

    def __init__(self, card: Card) -> None:
        self.size = size = card.choose(2048, 64)
        rng = np.random.default_rng(0)
        x = rng.standard_normal((32, size), np.float32)
        with af.Graph(seed=5) as self.graph:
            self.layers = [
                af.Variable(rng.standard_normal((size, size), np.float32) / np.float32(size**0.5), name=name)
                for name in "wv"
            ]
            self.made = af.Variable(0, name="made")
            hidden = af.constant(x) + np.float32(0.1) * af.random.normal(x.shape, dtype="float32")
            for layer in self.layers:
                hidden = af.tanh(hidden @ layer)
            loss = af.mean(af.square(hidden - af.constant(x)))
            pairs = zip(af.gradients(loss, self.layers), self.layers, strict=True)
            self.step = [loss, af.optim.momentum(pairs, 0.1), self.made.assign_add(1)]

    @property
    def nbytes(self) -> int:
        """Of the layers, and of what momentum keeps."""
        return 4 * 4 * self.size * self.size

    async def learn(
        self, card: Card, session: af.Session, figures: Figures, name: str, saver: af.Saver | None = None
    ) -> list[bytes]:
        """The losses of all steps that are to be made yet."""
        losses: list[bytes] = []
        times: list[float] = []
        growth: list[str] = []
        heartbeat = Heartbeat()
        with heartbeat.beating():
            while (made := int(await session.run(self.made))) < STEPS:
                # The first step compiles, and is the first to be saved.
                # How many steps pass before what a save holds meets what a step assigns, the writer's thread decides.
                with card.never_blocks(growth if saver else None) if len(losses) > 1 else nullcontext():
                    started = perf_counter()
                    loss, *_ = await session.run(self.step)
                    times.append(1e3 * (perf_counter() - started))
                    losses.append(np.asarray(loss).tobytes())
                    if saver is not None:
                        assert await saver.maybe_save(made + 1)
        assert len(growth) <= HELD
        figures[f"{name}_ms"] = {"step": float(np.median(times)), "worst_gap": heartbeat.worst_ms}
        device = session.devices[0]
        assert isinstance(device, CudaDevice)
        assert device.memory.used >= self.nbytes
        return losses


@pytest.mark.slow
@on_loop
async def test_t24_saving_beside_training_changes_no_bit(card: Card, figures: Figures, tmp_path: Path) -> None:
    """Each step is saved; and a session that begins with one of these goes on as the first did."""
    training = Training(card)
    async with af.Session(training.graph, devices=["cuda:0"]) as session:
        expected = await training.learn(card, session, figures, "alone")
    assert len(set(expected)) == STEPS
    saver = af.Saver(tmp_path, every_steps=1)
    started = perf_counter()
    async with af.Session(training.graph, devices=["cuda:0"], restore=saver) as session:
        assert await training.learn(card, session, figures, "saving", saver) == expected
    figures["saving_all_s"] = perf_counter() - started
    figures["checkpoint_MiB"] = training.nbytes / 2**20
    assert saver.error is None
    for step in (1, STEPS - 2):
        async with af.Session(training.graph, devices=["cuda:0"], restore=tmp_path / f"step-{step}") as session:
            assert await training.learn(card, session, figures, f"from_{step}") == expected[step:]


@pytest.mark.slow
@on_loop
async def test_t24_a_loop_saves_whole_steps(card: Card, tmp_path: Path) -> None:
    """One run writes two variables in each iteration; a save has both of one iteration, as the card computed them."""
    side = card.choose(1024, 64)
    saver = af.Saver(tmp_path, every_steps=2)
    with af.Graph() as graph:
        pair = [af.Variable(np.full((side, side), k, np.float32), name=f"p{k}") for k in range(2)]

        def body(i: af.Tensor) -> af.Tensor:
            for variable in pair:
                variable.assign(variable * np.float32(1.5) + np.float32(1))
            saver.maybe_save(i + 1)
            return i + 1

        loop = af.while_loop(lambda i: i < 7, body, 0)
    expected = [np.float32(0), np.float32(1)]
    numbers: dict[int, list[np.float32]] = {}
    for step in range(1, 8):
        numbers[step] = expected = [number * np.float32(1.5) + np.float32(1) for number in expected]
    async with af.Session(graph, devices=["cuda:0"], restore=saver) as session:
        assert await session.run(loop) == 7
    for step in (2, 4, 6):
        async with af.Session(graph, devices=["cuda:0"], restore=tmp_path / f"step-{step}") as session:
            for value, number in zip(await session.run(pair), numbers[step], strict=True):
                np.testing.assert_array_equal(value, np.full((side, side), number))


@pytest.mark.slow
@on_loop
async def test_t24_runs_in_flight_keep_the_variables_they_began_with(
    card: Card, figures: Figures, tmp_path: Path
) -> None:
    """`swap_variables`, from values and from a checkpoint; the old version's memory is given back."""
    side, steps = card.choose(1024, 64), card.choose(400, 20)
    first, second = (np.eye(side, dtype=np.float32) * np.float32(share) for share in (0.5, 0.25))
    fed = np.random.default_rng(0).standard_normal((side, side), np.float32)
    with af.Graph() as graph:
        weight = af.Variable(first, name="weight")
        x = af.placeholder("float32", (side, side))

        def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, y @ weight + x

        last = af.while_loop(lambda i, _: i < steps, body, (0, x))[1]
        assign = weight.assign(weight * np.float32(1))  # so that the card has made it

    async def of(session: af.Session) -> Any:
        return await session.run(last, {x: fed})

    async with af.Session(graph, devices=["cuda:0"]) as session:
        device = session.devices[0]
        await session.run(assign)
        path = await session.save(tmp_path)
        before = await of(session)
        used = device.memory.exact
        running = asyncio.ensure_future(of(session))
        await asyncio.sleep(0)  # it has begun
        started = perf_counter()
        assert await session.swap_variables({weight: second}) == ("weight",)
        figures["swap_variables_ms"] = 1e3 * (perf_counter() - started)
        after = await of(session)
        np.testing.assert_array_equal(await running, before)
        assert not np.array_equal(after, before)
        assert await session.swap_variables(path) == ("weight",)
        np.testing.assert_array_equal(await of(session), before)
        del running
        async with asyncio.timeout(GRACE_S):
            while device.memory.exact > used:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        await session.swap_variables({"weight": second})
        np.testing.assert_array_equal(await of(session), after)
