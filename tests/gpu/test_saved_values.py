"""T23: saved values under a limit: to the host, to a file and back, as plans choose, in nested loops, by two runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from tests.gpu.card import GRACE_S, Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop

Values = list[np.ndarray[Any, Any]]
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "short": {"without": ["plan_memory"]},
    "short, interpreted": {"without": ["plan_memory"], "regions": False},
    "always": {"saved_values": "swap"},
    "always, two streams": {"saved_values": "swap", "compute_streams": 2},
    "always, CUDA graphs": {"saved_values": "swap", "cuda_graphs": True},
    "auto": {},
    "recompute": {"saved_values": "recompute"},
}


class Training:
    """The gradients of a program of two matrices, and its feeds."""

    def __init__(self, card: Card, build: Callable[[af.Tensor, af.Tensor], af.Tensor]) -> None:
        side = card.choose(512, 128)
        self.value = 4 * side * side
        with af.Graph() as self.graph:
            x, w = (af.placeholder("float32", (side, side)) for _ in "xw")
            self.grads = af.gradients(af.sum(build(x, w)), [x, w])
        numbers = np.random.default_rng(0).standard_normal((2, side, side), np.float32) / np.float32(side**0.5)
        self._feeds = dict(zip((x, w), numbers, strict=True))

    async def step(self, session: af.Session) -> Values:
        values: Values = await session.run(self.grads, self._feeds)
        return values

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[af.Session]:
        """Nothing is held at its end, on the card, on the host, or on the disk."""
        async with af.Session(self.graph, devices=["cuda:0"], **options) as session:
            yield session
            ends = perf_counter() + GRACE_S
            for turn in count():
                if not any(held := _held(session)):
                    break
                if turn == 1000:
                    gc.collect()
                assert perf_counter() < ends, held
                await asyncio.sleep(0)

    async def twice(self, figures: Figures, name: str, **options: Any) -> tuple[Values, af.DeviceMemory]:
        """The results, and the memory; the time of the second run goes to the figures."""
        async with self.session(**options) as session:
            first = await self.step(session)
            started = perf_counter()
            second = await self.step(session)
            figures[f"{name}_ms"] = 1e3 * (perf_counter() - started)
            memory = session.statistics().memory["cuda:0"]
            figures[f"{name}_MiB"] = {"peak": memory.peak / 2**20, "moved_out": memory.moved_out / 2**20}
        _assert_equal(second, first)
        return second, memory


def _held(session: af.Session) -> list[int]:
    """Bytes that should be none once copies have ended, and copies that have not."""
    device = session.devices[0]
    assert isinstance(device, CudaDevice)
    now = device.swapping.statistics()
    away = [now.kept, now.host, now.disk, now.moved_out - now.moved_in - now.discarded, len(device.swapping._flights)]
    return [*away, device.memory.used, *(space.used for space in device.swapping.spaces)]


def _assert_equal(found: Values, expected: Values) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def _loop(x: af.Tensor, w: af.Tensor, steps: int, window: int = 32) -> af.Tensor:
    last: af.Tensor = af.while_loop(
        lambda i, _: i < steps, lambda i, y: (i + 1, af.tanh(y @ w) + x), (0, x), parallel_iterations=window
    )[1]
    return last


def _random_program(seed: int) -> Callable[[af.Tensor, af.Tensor], af.Tensor]:
    """Loops in loops, with branches, of which each saves other values."""

    def build(x: af.Tensor, w: af.Tensor) -> af.Tensor:
        random = Random(seed)
        return nested(random, x, x, w, depth=0)

    def branch(i: af.Tensor, y: af.Tensor, x: af.Tensor, w: af.Tensor) -> af.Tensor:
        chosen: af.Tensor = af.cond(i % 3 == 1, lambda: af.tanh(y @ w) * x, lambda: y * x)
        return chosen

    def nested(random: Random, y: af.Tensor, x: af.Tensor, w: af.Tensor, depth: int) -> af.Tensor:
        steps = random.randint(2, 3) if depth else 5
        kinds = random.sample(["product", "branch", "wave", "loop"], 3)
        if depth == 0 and "loop" not in kinds:
            kinds[-1] = "loop"

        def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            for kind in kinds:
                if kind == "product" or (kind == "loop" and depth == 1):
                    y = af.tanh(y @ w)
                elif kind == "branch":
                    y = branch(i, y, x, w)
                elif kind == "wave":
                    y = y + np.float32(0.5) * af.sin(y * x)
                else:
                    y = nested(random, y, x, w, depth + 1)
            return i + 1, y

        window = random.choice([1, 8])
        last: af.Tensor = af.while_loop(lambda i, _: i < steps, body, (0, y), parallel_iterations=window)[1]
        return last

    return build


@pytest.mark.slow
@on_loop
async def test_t23_however_values_move_the_bits_are_equal(card: Card, figures: Figures, tmp_path: Path) -> None:
    """In three quarters of what keeping takes, and less where all moves or runs again."""
    training = Training(card, lambda x, w: _loop(x, w, card.choose(100, 24)))
    kept = {regions: await training.twice(figures, f"kept, {regions=}", regions=regions) for regions in (True, False)}
    limit = 3 * kept[True][1].peak // 4
    spills = {"host_memory_limit": 2 * training.value, "spill_directory": str(tmp_path)}
    for name, options in {**ARRANGEMENTS, "always, to a file": {"saved_values": "swap", **spills}}.items():
        values, memory = await training.twice(figures, name, memory_limit=limit, **options)
        never, _ = kept[options.get("regions", True)]
        assert memory.peak <= limit
        if name in ("auto", "recompute"):  # other kernels may compute a value the second time
            for one, other in zip(values, never, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            figures[f"{name}_has_the_same_bits"] = all(map(np.array_equal, values, never))
        else:
            assert memory.moved_in > training.value
            _assert_equal(values, never)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_t23_nested_loops(card: Card, figures: Figures, seed: int) -> None:
    training = Training(card, _random_program(seed))
    never, kept = await training.twice(figures, "kept")
    for name in ("short", "always"):
        limit = kept.peak if name == "always" else 7 * kept.peak // 8
        values, memory = await training.twice(figures, name, memory_limit=limit, **ARRANGEMENTS[name])
        assert memory.peak <= limit
        assert memory.moved_out > 0
        _assert_equal(values, never)


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@on_loop
async def test_t23_two_runs_in_the_memory_of_one(card: Card, figures: Figures, regions: bool) -> None:
    """In 1.3 times what one takes whose values all move, both end, and a third after them."""
    training = Training(card, lambda x, w: _loop(x, w, card.choose(100, 24), window=1))
    options: dict[str, Any] = {"regions": regions, "saved_values": "swap"}
    never, _ = await training.twice(figures, "kept", regions=regions)
    _, alone = await training.twice(figures, "alone", memory_limit=64 * training.value, **options)
    limit = 13 * alone.peak // 10
    async with training.session(memory_limit=limit, **options) as session:
        started = perf_counter()
        for values in await asyncio.gather(*(training.step(session) for _ in range(2))):
            _assert_equal(values, never)
        figures["two_beside_each_other_ms"] = 1e3 * (perf_counter() - started)
        _assert_equal(await training.step(session), never)
        memory = session.statistics().memory["cuda:0"]
        assert memory.peak <= limit
        assert memory.moved_in > 0
