"""Sessions on cards drawn at random: with CUDA graphs they give the same bits as without.

Programs map over rows, loop, and train variables. Between runs there are warm-ups, checkpoints, new variables, held
values, results on their way, cancelled runs, and large arrays for which graphs give way. Sessions have one card or two,
share a card or a container, have little memory, or are asked from another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices import captures
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from tests.cells import SEEDS
from tests.fake_cupy.stand_in import stand_in

WIDTH = 4
STEPS = 20
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "two sessions": {"count": 2},
    "container": {"count": 2, "container": "shared"},
    "two cards": {"cards": 2},
    "limit": {"options": {"memory_limit": 400 << 10}},
    "thread": {"by_thread": True},
}


@dataclass
class Way:
    """A way to open sessions and to run programs in them.

    Attributes:
        count: of sessions, each with a graph of its own.
        container: of the variables; None for the session's.
        cards: of each session.
        options: of each session.
        by_thread: True if another thread asks for the runs.
    """

    count: int = 1
    container: str | None = None
    cards: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    by_thread: bool = False


class Program:
    """Fetches that read variables, write them, or do neither."""

    def __init__(self, dice: Random, container: str | None) -> None:
        with af.Graph() as self.graph:
            self.x = af.placeholder("float32", (3, WIDTH), name="x")
            self.large = af.placeholder("float32", (None,), name="large")
            self.variables = [
                af.Variable(np.linspace(-1, n, WIDTH, dtype=np.float32), name=f"v{n}", container=container)
                for n in range(2)
            ]
            layers = [self.layer(dice) for _ in range(dice.randint(2, 4))]

            def row(r: af.Tensor) -> af.Tensor:
                for layer in layers:
                    r = layer(r)
                return r

            mapped = af.map_fn(row, self.x, lift=True) if dice.random() < 0.7 else row(self.x)
            count = dice.randint(2, 5)
            h = af.while_loop(
                lambda i, _: i < count,
                lambda i, h: (i + 1, af.tanh(h * 0.9 + mapped) - af.mean(h)),
                (0, mapped),
            )[1]
            loss = af.sum(h)
            grads = zip(af.gradients(loss, self.variables), self.variables, strict=True)
            pairs = [pair for pair in grads if pair[0] is not None]
            self.reads = [loss, h]
            descend = dice.choice((af.optim.adam, af.optim.sgd))
            write = descend(pairs, 0.1) if pairs else self.variables[0].assign(af.tanh(h[0]))
            self.step = [loss, h, mapped, write]
            y = self.x
            for _ in range(6):
                y = af.tanh(y * 2 + 1) - af.max(y)
            self.pure = y
            self.sum = af.sum(self.large * 2)

    def layer(self, dice: Random) -> Callable[[Any], Any]:
        v = dice.choice(self.variables)
        return dice.choice(
            [
                lambda r: af.tanh(r + v.read()),
                lambda r: r * 0.5 - af.max(r),
                lambda r: af.sin(r) * v.read(),
            ]
        )


class Life:
    """The runs and other actions of sessions; `seen` has all values."""

    def __init__(self, way: Way, dice: Random, folder: Path) -> None:
        self.way, self.dice, self.folder = way, dice, folder
        self.seen: list[Any] = []
        self.held: list[list[Any]] = []

    async def run(self, session: af.Session, fetches: Any, feeds: Any = None) -> Any:
        if not self.way.by_thread:
            return await session.run(fetches, feeds)
        return await asyncio.to_thread(lambda: session.run_threadsafe(fetches, feeds).result())

    async def act(self, session: af.Session, program: Program, number: int) -> None:
        dice, seen, action = self.dice, self.seen, self.dice.randrange(15)
        fed = np.random.default_rng(dice.randrange(6)).normal(size=(3, WIDTH)).astype(np.float32)
        feeds = {program.x: fed}
        if action < 6:
            seen.append(await self.run(session, program.step, feeds))
        elif action < 8:
            runs = [self.run(session, program.pure, {program.x: fed * n}) for n in range(dice.randint(1, 3))]
            seen += await asyncio.gather(*runs)
        elif action == 8:
            large = np.ones(dice.choice((100, 20_000, 40_000)), np.float32)
            seen.append(await self.run(session, program.sum, {program.large: large}))
        elif action == 9:
            await session.warm_up(program.step, feeds)
        elif action == 10:
            folder = self.folder / f"{number}"
            await session.save(folder)
            seen.append(await self.run(session, program.reads, feeds))
            await session.restore(folder)
        elif action == 11:
            states = [session.state.lookup(v) for v in dice.sample(program.variables, dice.randint(1, 2))]
            self.held.append([state.capture()[""] for state in states])
        elif action == 12 and self.held:
            self.release(self.held.pop(dice.randrange(len(self.held))))
        elif action == 13 and self.way.container is None:
            value = np.full(WIDTH, dice.random(), np.float32)
            await session.swap_variables({dice.choice(program.variables): value})
        elif action == 14:
            run = asyncio.ensure_future(session.run(program.pure, feeds))
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    def release(self, values: list[Any]) -> None:
        self.seen.append([getattr(value, "on_host", lambda value=value: value)() for value in values])


async def lived(way: Way, seed: int, folder: Path, *, graphs: bool) -> list[Any]:
    life = Life(way, Random(seed), folder)
    programs = [Program(Random(seed), way.container) for _ in range(way.count)]
    devices = [f"cuda:{n}" for n in range(way.cards)]
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(af.Session(p.graph, devices, cuda_graphs=graphs, **way.options))
            for p in programs
        ]
        for session in sessions:
            for card in session.devices:
                assert isinstance(card, CudaDevice)
                card.make_capturable()  # so that products are the same without graphs
        for number in range(STEPS):
            which = life.dice.randrange(way.count)
            await life.act(sessions[which], programs[which], number)
        for values in life.held:
            life.release(values)
        for session, program in zip(sessions, programs, strict=True):
            life.seen.append(await session.run(program.variables))
    return life.seen


def bits(values: Any) -> Iterator[bytes]:
    if isinstance(values, list | tuple):
        for value in values:
            yield from bits(value)
    elif values is not None:
        yield np.asarray(values).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_sessions_give_the_same_bits_with_graphs(
    name: str, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = Way(**WAYS[name])
    first = crc32(f"{pytestconfig.getoption('turn')} {name}".encode()) % 10_000
    for seed in range(first, first + 2 * SEEDS):
        monkeypatch.setattr(captures, "WARM_UPS", 1 + seed % 2)
        monkeypatch.setattr(cuda_graph, "CALM", seed % 3)
        found = []
        for graphs in (False, True):
            with stand_in(devices=way.cards, seed=seed) as cupy:
                if way.container is not None:
                    af.reset_container(way.container)
                found.append([*bits(asyncio.run(lived(way, seed, tmp_path / f"{seed}-{graphs}", graphs=graphs)))])
                cupy.wait_idle()
                assert not cupy.engine.errors
        assert found[0] == found[1], f"seed {seed}"
