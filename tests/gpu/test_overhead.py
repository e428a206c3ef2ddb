"""T18: what launching, activating, events and tickets cost the host, and how fast a large graph runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter

import numpy as np
import pytest

import asyncflow as af
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop, ticket

BATCH = 100
"""Operations between two waits: the measurement must not be of the card."""


async def _us(work: Callable[[], object], settle: Callable[[], Awaitable[None]], rounds: int) -> float:
    """The median over rounds of the µs of one call."""
    times = []
    for _ in range(rounds):
        started = perf_counter()
        for _ in range(BATCH):
            work()
        times.append(1e6 * (perf_counter() - started) / BATCH)
        await settle()
    return float(np.median(times))


@pytest.mark.slow
@on_loop
async def test_t18_what_the_host_pays(card: Card, figures: Figures) -> None:
    rounds = card.choose(50, 2)
    cupy = card.cupy
    async with card.device() as device:
        stream = device.compute
        with device.activate():
            x, y = cupy.zeros(16, np.float32), cupy.zeros(16, np.float32)
        event = device.h2d.record()

        def add() -> None:
            with stream:
                cupy.add(x, 1.0, out=y)

        def add_new() -> None:
            with stream:
                cupy.add(x, y)

        def activate() -> None:
            with stream:
                pass

        async def settle() -> None:
            await ticket(stream)

        kernels = {
            "launch_us": add,
            "launch_and_allocate_us": add_new,
            "activate_us": activate,
            "record_us": stream.record,
            "wait_us": lambda: stream.wait(event),
            "ticket_us": lambda: stream.notify(lambda error: None),
            "hold_us": lambda: stream.hold(x),
        }
        for name, work in kernels.items():
            figures[name] = await _us(work, settle, rounds)
        with stream:
            figures["activate_nested_us"] = _nested(activate)
    assert all(value > 0 for value in figures.values())


def _nested(activate: Callable[[], None]) -> float:
    started = perf_counter()
    for _ in range(BATCH):
        activate()
    return 1e6 * (perf_counter() - started) / BATCH


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@on_loop
async def test_t18_a_large_graph(card: Card, figures: Figures, regions: bool) -> None:
    """Operations a second of a chain that no fusion shortens: products, with something between them."""
    nodes = card.choose(10_000, 200)
    with af.Graph() as graph:
        x = y = af.placeholder("float32", (8, 8))
        scale = af.constant(np.eye(8, dtype=np.float32))
        for _ in range(nodes):
            y = y @ scale
    fed = np.ones((8, 8), np.float32)
    async with af.Session(graph, devices=["cuda:0"], regions=regions, memory_limit=16 << 20) as session:
        first = await session.run(y, {x: fed})
        np.testing.assert_array_equal(first, fed)
        times = []
        for _ in range(card.choose(5, 1)):
            started = perf_counter()
            found = await session.run(y, {x: fed})
            times.append(perf_counter() - started)
            np.testing.assert_array_equal(found, fed)
    figures["ops_per_s"] = nodes / min(times)
