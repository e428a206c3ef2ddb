"""Captures ahead of runs under attack: any order and kind of feeds, cancellations, deadlines, failures, a lost card.

Whatever happens, a call gives the right result or the error that it was due, and later calls go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from tests.cells import SEEDS
from tests.conftest import small_cards

WIDTH, STEPS = 4, 5
INVALID, LOST = 1, 700
"""CUDA's codes of a call that it refuses, and of an illegal address, after which the card is lost."""

FAILURES = "launchKernel", "graphLaunch", "memcpyAsync", "streamEndCapture"


def recurrent(h: Any, w: Any, tanh: Any) -> Any:
    for _ in range(STEPS):
        h = tanh(h @ w) + h * 0.5
    return h


class Calls:
    """Prepared calls of one session, and their results as NumPy computes them."""

    def __init__(self, session: af.Session, dice: Random) -> None:
        self.session, self.dice = session, dice
        self.w = np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
        self.x, self.y, loops, total = PROGRAM
        self.loops = session.prepare(loops, [self.x], capture=True)
        self.both = session.prepare(total, [self.x, self.y], capture=True)

    def rows(self, count: int) -> Any:
        return np.array([[self.dice.gauss(0, 1) for _ in range(WIDTH)] for _ in range(count)], np.float32)

    async def call(self, *, may_fail: bool = True) -> None:
        """Make a call of any kind, perhaps with values that do not fit, and check the answer."""
        kind, x = self.dice.randrange(4 if may_fail else 3), self.rows(self.dice.randint(1, 3))
        if kind < 2:
            found, wanted = await self.loops(x), recurrent(x, self.w, np.tanh)
        elif kind == 2:
            y = self.rows(len(x))
            found, wanted = await self.both(x, y), np.tanh(x + y) * x
            for _ in range(STEPS):
                wanted = np.tanh(wanted * 2) - wanted
        else:
            with pytest.raises(af.KernelError, match="broadcast"):
                await self.both(self.rows(2), self.rows(3))
            return
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)

    async def cancelled(self) -> None:
        call = asyncio.ensure_future(self.call())
        for _ in range(self.dice.randrange(30)):
            await asyncio.sleep(0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call


with af.Graph() as GRAPH:
    _x, _y = (af.placeholder("float32", (None, WIDTH), name=name) for name in "xy")
    _w = af.constant(np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH))
    _h = af.while_loop(lambda i, _: i < STEPS, lambda i, h: (i + 1, af.tanh(h @ _w) + h * 0.5), (0, _x))[1]
    _total = af.tanh(_x + _y) * _x
    for _ in range(STEPS):
        _total = af.tanh(_total * 2) - _total
PROGRAM = _x, _y, _h, _total


async def attack(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(seed)
    slice_launches = dice.choice((1, 4, 64))
    monkeypatch.setattr(cuda_graph, "slice_budget", lambda launches, _: max(1, slice_launches // max(launches, 1)))
    with small_cards(seed) as cupy:
        async with af.Session(GRAPH, ["cuda:0"], cuda_graphs=True) as session:
            (card,) = session.devices
            assert isinstance(card, CudaDevice)
            calls = Calls(session, dice)
            await asyncio.gather(calls.loops(calls.rows(2)), calls.both(calls.rows(2), calls.rows(2)))
            for _ in range(12):
                action = dice.randrange(4)
                if action == 0:
                    await asyncio.gather(*[calls.call() for _ in range(dice.randint(2, 4))])
                elif action == 1:
                    await calls.cancelled()
                elif action == 2:
                    # Where a graph cannot be captured or launched, kernels are launched, which may fail in their turn.
                    cupy.fail_next(INVALID, dice.choice(FAILURES))
                    with contextlib.suppress(af.KernelError):
                        await calls.call(may_fail=False)
                    cupy.engine.faults.clear()
                await calls.call()
                assert not cupy.engine.captures
            cupy.fail_next(LOST, dice.choice(FAILURES[:2]))
            with contextlib.suppress(af.DeviceLostError):
                for _ in range(8):
                    await calls.loops(calls.rows(2))
        assert not cupy.engine.captures


@pytest.mark.slow
def test_prepared_calls_that_capture_are_right_or_say_why(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = crc32(f"{pytestconfig.getoption('turn')} attack".encode()) % 10_000
    for seed in range(first, first + 4 * SEEDS):
        try:
            asyncio.run(attack(seed, monkeypatch))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
