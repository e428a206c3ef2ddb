"""Inputs of CUDA graphs: values of the host are copied to the buffer of the graph, and not to new memory first."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs.graph import CALM, LONGER
from asyncflow.devices.memory import Requests
from tests.conftest import small_cards

Array = np.ndarray[Any, np.dtype[np.float32]]

CALM_AFTER = WARM_UPS + CALM + 2
"""Number of steps before a graph offers its buffers."""


def fed(number: int) -> Array:
    return np.random.default_rng(number).normal(size=(4, 4)).astype(np.float32)


def expected(*values: Array) -> Array:
    x, y = values
    return np.tanh(np.tanh(x) * y + x) * x


class Steps:
    """Steps of a session on a card, which captures them."""

    def __init__(self, session: af.Session, x: af.Tensor, y: af.Tensor, fetches: Any) -> None:
        self.session, self.x, self.y, self.fetches = session, x, y, fetches
        (device,) = session.devices
        assert isinstance(device, CudaDevice)
        self.device = device

    async def step(self, number: int) -> Requests:
        """Check a step, and return its requests to the card."""
        requests = self.device.memory.requests
        before = requests.kernels, requests.graphs, requests.copies
        values = fed(number), fed(number + 1)
        result = await self.session.run(self.fetches, dict(zip((self.x, self.y), values, strict=True)))
        result, *others = result if isinstance(result, list) else [result]
        np.testing.assert_allclose(result, expected(*values), rtol=1e-5, atol=1e-6)
        for other in others:
            assert other.tobytes() == values[0].tobytes()
        found = requests.kernels, requests.graphs, requests.copies
        return Requests(*(after - first for after, first in zip(found, before, strict=True)))


def stepping(*, fetches_input: bool = False) -> Any:
    """Return the graph of steps, and the arguments of `Steps` but for the session."""
    with af.Graph() as graph:
        x, y = (af.placeholder("float32", (4, 4), name=name) for name in "xy")
        result = af.tanh(af.tanh(x) * y + x) * x
        for _ in range(4):  # or a graph would gain nothing
            result = af.flip(af.flip(result))
    return graph, (x, y, [result, x] if fetches_input else result)


@pytest.mark.parametrize("fetches_input", [False, True])
async def test_copies_from_the_host_go_to_the_buffers_of_a_graph(fetches_input: bool) -> None:
    graph, arguments = stepping(fetches_input=fetches_input)
    with small_cards(0) as cupy:
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            steps = Steps(session, *arguments)
            asked = [await steps.step(number) for number in range(CALM_AFTER + 4)]
            # Each of both inputs is copied once, and each fetch.
            assert (asked[-1].graphs, asked[-1].copies) == (1, 3 + fetches_input)
            assert asked[WARM_UPS].copies > asked[-1].copies
        assert not cupy.engine.errors


@pytest.mark.parametrize("seed", range(4))
async def test_runs_at_once_do_not_write_over_each_others_inputs(seed: int) -> None:
    graph, arguments = stepping()
    with small_cards(seed) as cupy:
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            steps = Steps(session, *arguments)
            for number in range(CALM_AFTER):
                await steps.step(number)
            cupy.pause()
            runs = [asyncio.ensure_future(steps.step(number)) for number in range(4)]
            for _ in range(40):
                await asyncio.sleep(0)
            cupy.resume()
            await asyncio.gather(*runs)
            asked = [await steps.step(number) for number in range(2 * LONGER)]
            # Inputs go to buffers again. The output, which was held several times in a row, is copied from now on.
            assert (asked[-1].graphs, asked[-1].copies) == (1, 4)
        assert not cupy.engine.errors


async def test_a_step_that_is_cancelled_before_its_launch_gives_its_buffers_back() -> None:
    graph, arguments = stepping()
    with small_cards(0) as cupy:
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            steps = Steps(session, *arguments)
            for number in range(CALM_AFTER):
                await steps.step(number)
            for turns in range(12):
                run = asyncio.ensure_future(steps.step(turns))
                for _ in range(turns):
                    await asyncio.sleep(0)
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
                await steps.step(turns + 20)
            assert (await steps.step(0)).copies == 3
        assert not cupy.engine.errors
