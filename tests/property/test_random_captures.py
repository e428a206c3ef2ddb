"""Training steps drawn at random: kernels launched one by one, captured, and captured in slices give the same bits.

Programs have loops in loops, branches, TensorArrays, RowStores, gradients and variables that a step changes. Sessions
have limits and all ways to keep saved values. Between steps variables are fetched, trip counts change, and runs are
cancelled while they capture. The stand-in loses its card where a graph has an address that is free.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.placement import assign_streams
from asyncflow.devices import captures
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from asyncflow.devices.sim.device import SimDevice
from asyncflow.testing import virtual_clock
from tests.cells import SEEDS
from tests.fake_cupy.stand_in import stand_in

ROWS, WIDTH, MOST = 3, 4, 5
STEPS = 6
"""Number of steps: three with inputs of each kind. The second is captured, and the third launches the graph."""

Values = list[Any]


class Program:
    """A step of training, drawn by `dice`."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        with af.Graph() as self.graph:
            self.x = af.placeholder("float32", (ROWS, WIDTH), name="x")
            self.xs = af.placeholder("float32", (MOST, ROWS, WIDTH), name="xs")
            self.n, self.k = (af.placeholder("int64", (), name=name) for name in "nk")
            self.rate = af.placeholder("float32", (), name="rate")
            self.w = af.Variable(_numbers(dice, WIDTH, WIDTH), name="w")
            self.b = af.Variable(_numbers(dice, WIDTH), name="b")
            result, others = self.loop(2)
            if dice.random() < 0.5:  # two loops that do not wait for each other
                beside, found = self.loop(1)
                result, others = result + beside, [*others, *found]
            loss = af.sum(af.square(result)) / 100
            self.fetches = [loss, result, *others]
            grads = af.gradients(loss, [self.w, self.b, self.x])
            self.fetches += [grad for grad in grads if grad is not None]
            pairs = [pair for pair in zip(grads[:2], (self.w, self.b), strict=True) if pair[0] is not None]
            if pairs and dice.random() < 0.7:
                descend = dice.choice((af.optim.adam, af.optim.sgd))
                self.fetches.append(descend(pairs, self.rate))

    def loop(self, depth: int) -> tuple[af.Tensor, Values]:
        """A loop from `x` on, and other values that it collects."""
        dice, bodies = self.dice, [self.body(depth) for _ in range(self.dice.randint(1, 3))]
        collects = dice.choice(("nothing", "array", "rows", "growing"))

        def step(i: af.Tensor, h: af.Tensor, *stores: Any) -> Any:
            for body in bodies:
                h = body(i, h)
            if collects == "array" or collects == "growing":
                stores = (stores[0].write(i, h * 2),)
            elif collects == "rows":
                stores = (stores[0].append(h[:1]),)
            return i + 1, h, *stores

        first: dict[str, Any] = {
            "array": lambda: (af.TensorArray("float32", self.n),),
            "growing": lambda: (af.TensorArray("float32", 0, dynamic_size=True),),
            "rows": lambda: (af.RowStore("float32", (WIDTH,)),),
        }
        start = first[collects]() if collects in first else ()
        # Loops that count to a constant have a known number of iterations.
        limit = self.n if collects == "array" or dice.random() < 0.5 else MOST - 2
        _, h, *stores = af.while_loop(lambda i, *_: i < limit, step, (0, self.x, *start))
        found = [store.stack() for store in stores]
        return (h + af.mean(found[0]) if found and dice.random() < 0.5 else h), found

    def body(self, depth: int) -> Any:
        choices: list[Any] = [
            lambda i, h: af.tanh(h @ self.w + self.b),
            lambda i, h: h * 0.5 + af.sin(h) * self.b,
            lambda i, h: h + af.astype(i, "float32") / 8,
            lambda i, h: af.cond((i + self.k) % 2 == 0, lambda: af.tanh(h) * self.x, lambda: h @ self.w),
            lambda i, h: af.concat([af.tanh(h[:, 1:]), h[:, :1]], axis=1),
            lambda i, h: h / (1 + af.sum(af.square(h), axis=-1, keepdims=True)),
            lambda i, h: h + self.rate,
            # Rows that are known ahead of the loop, whose products are made together.
            lambda i, h: af.tanh(self.xs[i % MOST] @ self.w + h),
            lambda i, h: h * af.sigmoid(af.concat([self.xs[i % MOST][:, :2], self.x[:, 2:]], axis=1) @ self.w),
        ]
        if depth > 1:
            inner = [self.body(1) for _ in range(self.dice.randint(1, 2))]

            def nested(i: af.Tensor, h: af.Tensor) -> af.Tensor:
                def step(j: af.Tensor, g: af.Tensor) -> Any:
                    for body in inner:
                        g = body(j, g)
                    return j + 1, g

                most = i % 3 if self.dice.random() < 0.5 else 2
                return af.while_loop(lambda j, _: j < most, step, (0, h))[1]

            choices += [nested, nested]
        return self.dice.choice(choices)

    def feeds(self, number: int) -> dict[af.Tensor, Any]:
        """Feeds of a step: trip counts and branches come again."""
        own = Random(number)
        return {
            self.x: _numbers(own, ROWS, WIDTH),
            self.xs: _numbers(own, MOST, ROWS, WIDTH),
            self.n: 1 + number // 3 % 2 * (MOST - 1),
            self.k: number // 3 % 2,
            self.rate: np.float32(own.choice((0.1, 0.2))),
        }


def _numbers(dice: Random, *shape: int) -> Any:
    return np.array([dice.gauss(0, 0.5) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)


@dataclass
class Way:
    """A way to run steps.

    Attributes:
        options: of the session.
        slice_launches: kernels that are captured at a time; None without graphs.
        cancels: how often a run is cancelled while it captures.
        peak: most bytes on the card.
    """

    options: dict[str, Any]
    slice_launches: int | None = None
    cancels: int = 0
    peak: int = field(default=0, init=False)


async def steps(
    program: Program, way: Way, count: int, dice: Random, path: Path, monkeypatch: pytest.MonkeyPatch
) -> Values:
    """The results of each step, and variables fetched now and then."""
    found: Values = []
    asked: list[int] = []
    stop_at, run = 0, None

    def budget(launches: int, _asked: int | None) -> int:
        asked.append(launches)
        if run is not None and len(asked) == stop_at:
            run.cancel()
        return max(1, (way.slice_launches or 1) // max(launches, 1))

    monkeypatch.setattr(cuda_graph, "slice_budget", budget)
    with stand_in(devices=1, nbytes=64 << 20, seed=dice.randrange(1000)) as cupy:
        async with af.Session(program.graph, ["cuda:0"], **way.options) as session:
            (card,) = session.devices
            assert isinstance(card, CudaDevice)
            card.make_capturable()  # so that products are the same without graphs
            for number in range(count):
                feeds = program.feeds(number)
                if dice.random() < 0.3:
                    found += await session.run([program.w, program.b])
                if way.cancels:
                    await session.save(path)
                    stop_at = len(asked) + 1 + number % 3
                    run = asyncio.create_task(session.run(program.fetches, feeds))
                    try:
                        await run
                    except asyncio.CancelledError:
                        way.cancels -= 1
                        assert cupy.engine.captures == []
                    run = None
                    await session.restore(path)
                found += [value for value in await session.run(program.fetches, feeds) if value is not None]
            way.peak = session.statistics().memory["cuda:0"].peak
        cupy.wait_idle()
        assert not cupy.engine.lost
    return found


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"saved_values": "recompute"},
    "swap": {"saved_values": "swap"},
    "limit": {"memory_limit": 1 << 20},
    "tight limit": {},
    "streams": {"compute_streams": 2},
}
QUICK = "plain", "streams"
"""The others are slow."""


SLICES = (None, 0), (1 << 20, 0), (1, 0), (2, 2)
WITHOUT_LIMIT = SLICES[::3]
"""Kernels that are captured at a time, and cancelled runs; the first are launched."""


async def simulated_steps(program: Program, options: dict[str, Any], dice: Random) -> tuple[Values, int]:
    """The results of each step on a simulated card, and the most bytes on it; nothing of a graph is left there."""
    found: Values = []
    async with af.Session(program.graph, ["sim:0"], **options) as session:
        for number in range(STEPS):
            if dice.random() < 0.3:
                found += await session.run([program.w, program.b])
            results = await session.run(program.fetches, program.feeds(number))
            found += [value for value in results if value is not None]
        card = session.devices[0]
        assert isinstance(card, SimDevice)
        labels = [buffer.label for buffer in card.memory.top(1000)]
        assert options["cuda_graphs"] or not any("CUDA graph" in label for label in labels)
        return found, session.statistics().memory["sim:0"].peak


def compare_simulated(seed: int, name: str) -> None:
    program, limits = Program(Random(seed)), dict[str, int]()
    expected = None
    for graphs in (False, True):
        with virtual_clock("v100") as clock:
            options = {**WAYS[name], **limits, "cuda_graphs": graphs}
            found, peak = clock.run(simulated_steps(program, options, Random(f"{seed}")))
        expected = found if expected is None else expected
        if name == "tight limit":
            limits["memory_limit"] = peak * 5 // 4
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), number


async def compare(seed: int, name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(Random(seed))
    expected, limits = None, dict[str, int]()
    for slices, cancels in WITHOUT_LIMIT if name in QUICK else SLICES:
        way = Way({**WAYS[name], **limits, "cuda_graphs": slices is not None}, slices, cancels)
        found = await steps(program, way, STEPS, Random(f"{seed}"), path / f"{seed}", monkeypatch)
        expected = found if expected is None else expected
        if name == "tight limit":  # graphs may have no room, beside what the runs take
            limits["memory_limit"] = way.peak * 5 // 4 // 512 * 512
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (slices, number)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_steps_give_the_same_bits_however_they_reach_the_card(
    name: str, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "WARM_UPS", 1)
    monkeypatch.setattr(cuda_graph, "CALM", 0)
    monkeypatch.setattr(assign_streams, "_LIGHT_NS", 0.0)  # small kernels go to any stream, too
    first = crc32(f"{pytestconfig.getoption('turn')} {name}".encode()) % 10_000
    for seed in range(first, first + SEEDS):
        try:
            compare_simulated(seed, name)
            asyncio.run(compare(seed, name, tmp_path, monkeypatch))
        except BaseException as error:
            error.add_note(f"seed {seed}, {name}")
            raise


# -- steps that are cancelled at any turn ------------------------------------------------------------------------------


class Training:
    """Steps of a session, to be cancelled at any turn.

    Attributes:
        reads: of each variable, the optimizer's included.
        turns: of the event loop that the last step took.
    """

    def __init__(self, program: Program, session: af.Session) -> None:
        self.program, self.session = program, session
        self.turns = 40
        with program.graph:
            self.reads = [each.read() for each in program.graph.resources if isinstance(each, af.Variable)]

    async def left(self) -> list[bytes]:
        return [np.asarray(value).tobytes() for value in await self.session.run(self.reads)]

    async def step(self, number: int) -> list[bytes]:
        """Run a step to its end, and return the results."""
        running = asyncio.ensure_future(self.session.run(self.program.fetches, self.program.feeds(number)))
        self.turns = 0
        while not running.done():
            self.turns += 1
            await asyncio.sleep(0)
        return [np.asarray(value).tobytes() for value in running.result() if value is not None]

    async def cancelled(self, number: int, dice: Random, cupy: Any, states: tuple[list[bytes], list[bytes]]) -> None:
        """Cancel a step after some turns: each variable is as before or after it, and stays so."""
        if dice.random() < 0.3:
            cupy.pause()
        running = asyncio.ensure_future(self.session.run(self.program.fetches, self.program.feeds(number)))
        for _ in range(dice.randrange(self.turns + 1)):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(0)
        cupy.resume()
        await asyncio.gather(running, return_exceptions=True)
        found = await self.left()
        assert all(value in either for value, *either in zip(found, *states, strict=True))
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
        assert await self.left() == found


async def cancel_steps(seed: int, name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel steps at any turn, restore the variables, and compare the next steps with a session that never cancels."""
    dice, program = Random(seed), Program(Random(seed))
    slice_launches = dice.choice((1, 2, 8))
    monkeypatch.setattr(cuda_graph, "slice_budget", lambda launches, _: max(1, slice_launches // max(launches, 1)))
    expected: list[tuple[list[bytes], list[bytes], list[bytes]]] = []
    for graphs in (False, True):
        with stand_in(devices=1, nbytes=64 << 20, seed=dice.randrange(1000)) as cupy:
            async with af.Session(program.graph, ["cuda:0"], **{**WAYS[name], "cuda_graphs": graphs}) as session:
                (card,) = session.devices
                assert isinstance(card, CudaDevice)
                card.make_capturable()
                training = Training(program, session)
                for number in range(STEPS):
                    if graphs:
                        await session.save(path)
                        for _ in range(dice.randrange(3)):
                            before, _, after = expected[number]
                            await training.cancelled(number, dice, cupy, (before, after))
                            await session.restore(path)
                    found = await training.left(), await training.step(number), await training.left()
                    if graphs:
                        assert found == expected[number], number
                    expected.append(found)
            cupy.wait_idle()
            assert not cupy.engine.lost


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "streams"])
def test_steps_that_are_cancelled_leave_nothing_behind(
    name: str, pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "WARM_UPS", 1)
    monkeypatch.setattr(cuda_graph, "CALM", 0)
    monkeypatch.setattr(assign_streams, "_LIGHT_NS", 0.0)
    first = crc32(f"{pytestconfig.getoption('turn')} cancelled {name}".encode()) % 10_000
    for seed in range(first, first + SEEDS):
        try:
            asyncio.run(cancel_steps(seed, name, tmp_path / f"{seed}", monkeypatch))
        except BaseException as error:
            error.add_note(f"seed {seed}, {name}")
            raise
