"""Random loops in loops, trained on the card that runs them: the bits of the host, cancelled runs and lost cards."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.graphs import logs
from asyncflow.devices.cuda.graphs.loop import DeviceLoop
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy

LOST = 700
SIZE = 3
STATE = 2
"""Number of matrices that loops carry."""

Values = tuple[af.Tensor, ...]


class Program:
    """A random program: loops to some depth, of elementwise ops, products, branches, reductions and variables."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.graph = af.Graph()
        with self.graph:
            self.x = af.placeholder("float64", (SIZE, SIZE), name="x")
            self.w = af.Variable(np.random.default_rng(seed).normal(size=(SIZE, SIZE)) * 0.5, name="w")
            values = self.loop(self.random.randint(2, 3), (self.x, self.x * 0.5))
            loss = af.sum(af.add(*(af.sum(value * value) for value in values)))
            self.fetches = [*values, *af.gradients(loss, [self.x, self.w])]
        self.feeds = {self.x: np.random.default_rng(seed + 1).normal(size=(SIZE, SIZE))}

    def choose(self, *choices: Callable[[], Any]) -> Any:
        return self.random.choice(choices)()

    def value(self, values: Values) -> af.Tensor:
        """A matrix, bounded so that no loop ends with infinities."""
        a, b = self.random.choice(values), self.random.choice(values)
        return self.choose(
            lambda: af.tanh(a) + b * 0.5,
            lambda: af.sin(a @ self.w.read()),
            lambda: af.tanh(a @ b) - a * 0.25,
            lambda: af.where(a > b, af.cos(a), b * 0.5),
            lambda: af.permute_dims(a, (1, 0)) * 0.75 + af.mean(b),
            lambda: af.tanh(a[::-1] + self.w.read()),
            lambda: a * 0.5 + af.max(b, axis=0) * 0.25,
            lambda: af.tanh(a * self.x) + 0.125,
            lambda: af.cond(af.sum(a) > af.max(b), lambda: af.sin(af.exp(-a * a)), lambda: af.tanh(a @ b)),
            lambda: a,
        )

    def body(self, depth: int, values: Values) -> Values:
        for _ in range(self.random.randint(1, 3)):
            if depth > 1 and self.random.random() < 0.7:
                values = self.inner(depth, values)
            else:
                place = self.random.randrange(STATE)
                values = (*values[:place], self.value(values), *values[place + 1 :])
        return values

    def inner(self, depth: int, values: Values) -> Values:
        """A loop, or a branch with a loop on one side."""
        if self.random.random() < 0.7:
            return self.loop(depth - 1, values)
        sides = [lambda: self.loop(depth - 1, values), lambda: (self.value(values), *values[1:])]
        self.random.shuffle(sides)
        return tuple(af.cond(af.sum(values[0]) > self.random.uniform(-1, 2), *sides))

    def loop(self, depth: int, values: Values) -> Values:
        """A loop that decides by values of the card, and ends after some iterations."""
        most, bound = self.random.randint(1, 4), self.random.uniform(1, 9)
        name = f"level_{depth}"

        def goes_on(count: af.Tensor, *values: af.Tensor) -> af.Tensor:
            return af.logical_and(count < most, af.sum(values[0]) < bound)

        def step(count: af.Tensor, *values: af.Tensor) -> Values:
            return count + 1, *self.body(depth, values)

        _, *values = af.while_loop(goes_on, step, (0, *values), name=name)
        return tuple(values)

    def session(self, *, device_while: bool) -> af.Session:
        return af.Session(self.graph, ["cuda:0"], device_while=device_while, loop_batching=False)

    async def run(self, session: af.Session) -> list[bytes]:
        return [np.asarray(value).tobytes() for value in await session.run(self.fetches, self.feeds)]


@pytest.fixture(params=[3, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (*range(3), *range(5, 30)))])
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program; every other one begins with logs of one entry."""
    seed: int = request.param
    if seed % 2:
        monkeypatch.setattr(logs, "MOST_ENTRIES", 1)
    return Program(seed)


@pytest.fixture
def cupy(program: Program) -> Iterator[FakeCupy]:
    with small_cards(len(program.graph.nodes)) as fake:
        yield fake


async def by_host(program: Program) -> list[bytes]:
    async with program.session(device_while=False) as session:
        return await program.run(session)


class Launches:
    """A number of launches of loops, at one of which something happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.at = -1
        self.happens: Callable[[], object] = lambda: None
        launch = DeviceLoop.launch

        def launch_or_not(loop: DeviceLoop, *arguments: Any) -> Any:
            self.count += 1
            if self.count == self.at and self.happens() is False:
                return None
            return launch(loop, *arguments)

        monkeypatch.setattr(DeviceLoop, "launch", launch_or_not)

    def next(self, at: int, happens: Callable[[], object]) -> None:
        """Do something at launch number `at` from now."""
        self.at, self.happens = self.count + at, happens


async def test_random_loops_give_the_bits_of_the_host(
    program: Program, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await by_host(program)
    launches = Launches(monkeypatch)
    async with program.session(device_while=True) as session:
        explained = session.plan(program.fetches, list(program.feeds)).explain()
        assert "the card runs it" in explained
        assert "the host drives" not in explained
        assert await program.run(session) == wanted
        usual, launches.count = launches.count, 0
        assert await program.run(session) == wanted
        assert launches.count <= min(usual, 4)
        # The host goes on from any launch.
        for at in range(1, launches.count + 1):
            launches.next(at, lambda: False)
            assert await program.run(session) == wanted


async def test_cancelled_runs_leave_nothing_of_their_logs(
    program: Program, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await by_host(program)
    launches = Launches(monkeypatch)
    async with program.session(device_while=True) as session:
        memory = session.devices[0].memory
        assert await program.run(session) == wanted
        launches.count = 0
        assert await program.run(session) == wanted
        gc.collect()
        used = memory.used
        for at in range(1, min(launches.count, 2) + 1):
            running = asyncio.ensure_future(program.run(session))
            launches.next(at, running.cancel)
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await program.run(session) == wanted
            gc.collect()
            assert memory.used == used


@pytest.mark.parametrize("at", [1, 2])
async def test_a_card_lost_with_a_loop_ends_the_run(
    program: Program, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    launches = Launches(monkeypatch)
    async with program.session(device_while=True) as session:
        await program.run(session)
        launches.count = 0
        await program.run(session)
        launches.next(min(at, launches.count), lambda: cupy.fail_next(LOST, "graphLaunch"))
        with pytest.raises(af.DeviceLostError, match=r"cuda:0 is lost"):
            await program.run(session)
        with pytest.raises(af.DeviceLostError):
            await program.run(session)
