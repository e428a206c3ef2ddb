"""Sessions that replay regions as CUDA graphs, and loops that the card drives itself."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda_bindings import using_bindings
from tests.conftest import stand_in


async def test_a_region_is_captured_and_gives_the_same() -> None:
    with stand_in(0):
        with af.Graph() as graph:
            x = y = af.placeholder("float32", (64,))
            for _ in range(5):  # a few kernels more than the copies around a graph
                y = af.tanh(y * 2 + 1) - af.max(y)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            for n in range(6):
                fed = np.linspace(-1, n, 64, dtype=np.float32)
                found = await session.run(y, {x: fed})
                want = fed
                for _ in range(5):
                    want = np.tanh(want * 2 + 1) - want.max()
                np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
            assert any("CUDA graph" in buffer.label for buffer in session.devices[0].memory.top(100))


@pytest.mark.parametrize("limit", [0.5, 3.0, 1e6])
async def test_a_loop_that_decides_by_arrays_runs_on_the_card(limit: float) -> None:
    with stand_in(0) as cupy, using_bindings(cupy.bindings):
        with af.Graph() as graph:
            x = af.placeholder("float64", (8,))
            (y,) = af.while_loop(lambda y: af.sum(y) < limit, lambda y: (y * 1.5 + 0.01,), (x,))
        want = np.full(8, 0.1)
        while want.sum() < limit:
            want = want * 1.5 + 0.01
        async with af.Session(graph, ["cuda:0"], device_while=True) as session:
            for _ in range(3):
                np.testing.assert_allclose(await session.run(y, {x: np.full(8, 0.1)}), want)
            assert "device" in session.plan(y, [x]).explain()
