"""Learning rates by step, against NumPy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.usefixtures("graph")
async def test_a_line_and_a_cosine(run: Run, warmup: int) -> None:
    step = af.placeholder("int64", ())
    rate = af.optim.cosine_schedule(step, 20, 0.5, warmup=warmup, least=0.1)
    found = [float(await run(rate, {step: number})) for number in range(25)]
    rising = [0.5 * (number + 1) / 4 for number in range(warmup)]
    shares = np.minimum((np.arange(warmup, 25) - warmup) / (20 - warmup), 1)
    np.testing.assert_allclose(found, [*rising, *(0.1 + 0.4 * (1 + np.cos(np.pi * shares)) / 2)], rtol=1e-12)
    assert max(found) == 0.5
    np.testing.assert_allclose(found[20:], 0.1)


async def test_steps_of_a_variable(graph: af.Graph) -> None:
    count, w = af.Variable(0, name="count"), af.Variable(1.0, name="w")
    rate = af.optim.cosine_schedule(count.assign_add(1) - 1, 3, 1.0)
    train = af.optim.sgd([(af.constant(1.0), w)], rate)
    async with af.Session(graph) as session:
        found = []
        for _ in range(4):
            await session.run(train)
            found.append(float(await session.run(w)))
    np.testing.assert_allclose(found, 1 - np.cumsum([1, 0.75, 0.25, 0]), atol=1e-12)


@pytest.mark.usefixtures("graph")
def test_mistakes() -> None:
    with pytest.raises(af.GraphError, match="warmup is at least 0 and below steps; got 5 of 5"):
        af.optim.cosine_schedule(0, 5, 0.1, warmup=5)
    with pytest.raises(af.GraphError, match="peak is a number; got 'high'"):
        af.optim.cosine_schedule(0, 5, "high")  # type: ignore[arg-type]
    with pytest.raises(af.ShapeError, match="cosine_schedule: step is a number or a scalar tensor"):
        af.optim.cosine_schedule(np.arange(3), 5, 0.1)
