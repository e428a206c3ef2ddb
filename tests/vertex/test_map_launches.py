"""Kernels are launched for sets, not for vertices, and how often does not depend on the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import small_cards
from tests.vertex.evaluation import child_sum, slotted

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])  # sessions on devices of their own

TREE = af.InputGraph.from_nested((((0, 1), (2, 3)), ((4, 5), (6, 7))))[0]
DEEPER = af.InputGraph.from_nested(((((0, 1), (2, 3)), ((4, 5), (6, 7))), (((0, 1), (2, 3)), ((4, 5), (6, 7)))))[0]
NO_KERNELS = ("eventRecord", "streamWaitEvent", "memcpyAsync", "poison")


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@pytest.mark.parametrize("function", [slotted, child_sum], ids=["slotted", "child_sum"])
async def test_kernels_of_a_set_do_not_depend_on_the_batch(function: Any, regions: bool) -> None:
    with af.Graph() as graph:
        fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
        found = af.vertex_map(function, fed, x)
    with small_cards(0) as cupy:
        async with af.Session(graph, devices=["cuda:0"], regions=regions, cuda_graphs=False) as session:

            async def launches(data: af.InputGraph) -> int:
                feeds = {**fed.feeds(data), x: np.ones((data.n_vertices, 2))}
                await session.run((found.pushes, found.roots), feeds)  # which compiles, and takes memory
                cupy.engine.launches.clear()
                await session.run((found.pushes, found.roots), feeds)
                return sum(name not in NO_KERNELS for _, name in cupy.engine.launches)

            few = await launches(TREE)
            assert await launches(af.InputGraph.batch([TREE] * 8)) == few
            assert few < await launches(DEEPER) <= few + 60
