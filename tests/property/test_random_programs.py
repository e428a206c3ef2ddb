"""Random programs give, bit for bit, what plain NumPy gives: whatever overlaps, and in whatever order nodes fire."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

import asyncflow as af
from tests.property.graphs import build
from tests.property.programs import Program, interpret
from tests.property.strategies import programs

RUNS = 3
"""A session runs each program so often: variables keep their values, and each run shuffles differently."""

settings.register_profile(
    "random-programs",
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
IN_CI = settings.get_profile("random-programs")


def assert_same_bits(name: str, actual: Any, expected: Any) -> None:
    """Same dtype, shape and bits; one NaN is as good as another."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    # Adding 0.0 would lose the sign of -0.0; `where` keeps every bit that means something.
    canonical = [np.where(np.isnan(value), np.nan, value) for value in (actual, expected)]
    assert canonical[0].tobytes() == canonical[1].tobytes(), f"{name}: {actual!r} is not {expected!r}"


async def check(program: Program, *, parallel_iterations: int, seed: int | None, debug: bool) -> None:
    graph, fetches, feeds = build(program, parallel_iterations)
    state = dict(program.variables)
    async with af.Session(graph, seed=seed, debug=debug) as session:
        for _ in range(RUNS):
            expected = interpret(program, state)
            actual = await session.run(fetches, feeds)
            for name, value in expected.items():
                assert_same_bits(name, actual[name], value)


@pytest.mark.parametrize(
    ("parallel_iterations", "seed", "debug"),
    [(1, None, True), (2, 7, False), (32, None, False), (32, 1234, True)],
)
@given(program=programs())
@IN_CI
def test_random_programs(program: Program, parallel_iterations: int, seed: int | None, debug: bool) -> None:
    note(f"af.Session(seed={seed}), {RUNS} runs")
    asyncio.run(check(program, parallel_iterations=parallel_iterations, seed=seed, debug=debug))
