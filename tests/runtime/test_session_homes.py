"""A variable stays on the card whose memory it is in, whatever other plans put elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import small_cards

DEVICES = ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize("seed", range(8))
async def test_plans_made_later_find_the_variable_where_it_is(seed: int) -> None:
    with small_cards(seed):
        with af.Graph() as graph:
            x = af.placeholder("float32", (64,))
            variable = af.Variable(np.zeros(64, np.float32), name="v")
            add = variable.assign_add(af.exp(x) * 0 + x)
            others = [variable.read() * k + af.sin(x) for k in range(1, 5)]
        async with af.Session(graph, devices=DEVICES, placement_seed=seed) as session:
            fed = np.arange(64, dtype=np.float32)
            await session.run(add, {x: fed})
            for k, other in enumerate(others, start=1):
                np.testing.assert_allclose(await session.run(other, {x: fed}), fed * k + np.sin(fed), rtol=1e-6)
            found = {session.plan(fetch, [x]).placement.devices[name] for fetch, name in reads(graph, add, others)}
            assert len(found) == 1


def reads(graph: af.Graph, add: af.Tensor, others: list[af.Tensor]) -> list[tuple[af.Tensor, str]]:
    """Fetches, and the node that touches the variable for each."""
    inner = [next(t for t in other.node.inputs if t.node.op.name == "multiply") for other in others]
    return [(add, add.node.name), *zip(others, (t.node.inputs[0].node.name for t in inner), strict=True)]


async def test_a_request_for_another_card_is_an_error_that_says_why() -> None:
    with small_cards(0):
        with af.Graph() as graph:
            variable = af.Variable(np.zeros(4, np.float32), name="v")
            with af.device("cuda:0"):
                first = variable.assign_add(np.ones(4, np.float32))
            with af.device("cuda:1"):
                second = variable.assign_add(np.ones(4, np.float32))
        async with af.Session(graph, devices=DEVICES) as session:
            await session.run(first)
            with pytest.raises(af.PlacementError, match="its resource is in the memory of cuda:0"):
                await session.run(second)
