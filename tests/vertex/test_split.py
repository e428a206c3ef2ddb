from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.vertex.evaluation import slotted

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])  # sessions on devices of their own

PARTS = (
    "before the sets matmul, sum; in each set 2 matmul, add, subtract, tanh; after the sets multiply, sum, add. "
    "Bytes kept a vertex: states 24, from before the sets 33, from the sets 0"
)
WHOLE = (
    "before the sets nothing; in each set 3 matmul, 2 add, subtract, tanh, multiply, 2 sum; after the sets nothing. "
)


@pytest.mark.parametrize("lift_parts", [True, False])
async def test_a_plan_explains_the_three_parts(lift_parts: bool) -> None:
    with af.Graph() as graph:
        x: Any = af.placeholder("float64", (None, 2))
        pushed = af.vertex_map(slotted, af.InputGraph.chain([2]), x, lift_parts=lift_parts).pushes
    async with af.Session(graph) as session:
        text = session.plan(pushed, [x]).explain()
        assert (await session.run(pushed["leaf"], {x: np.ones((2, 2))})).tolist() == [True, False]
    line = next(line for line in text.splitlines() if line.startswith("vertex_map/slotted: "))
    assert line.removeprefix("vertex_map/slotted: vertex_map computes ").startswith(PARTS if lift_parts else WHOLE)
