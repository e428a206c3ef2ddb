"""Behaviour 92: programs over arrays of any size and dtype give what plain NumPy gives, wherever they run.

Buffers are used again, work goes to a stream's thread and arrays have views only where arrays are large.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.property.large import DTYPES, Program, build, interpret, write_program

RUNS = 2
"""Variables keep their values between them."""
SEEDS = int(os.environ.get("ASYNCFLOW_SEEDS", "1"))

EXTENTS = {"0": (0, 5), "3": (1, 3), "1,000": (20, 50), "60,000": (240, 250)}

ANYWHERE = range(100, 100 + 60 * SEEDS)


def assert_same(name: str, actual: Any, expected: Any) -> None:
    """Same dtype, shape and values; one NaN is as good as another."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    np.testing.assert_array_equal(actual, expected, err_msg=name, strict=True)


async def check(program: Program, *, is_open: bool = False, parallel_iterations: int = 32, **options: Any) -> None:
    graph, fetches, feeds = build(program, parallel_iterations, is_open=is_open)
    state = dict(program.variables)
    async with af.Session(graph, **options) as session:
        for _ in range(RUNS):
            expected = interpret(program, state)
            actual = await session.run(fetches, feeds)
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                assert_same(name, actual[name], value)


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@pytest.mark.parametrize("size", EXTENTS)
@pytest.mark.parametrize("seed", [13, 24, 40])
def test_large_programs(seed: int, size: str, regions: bool) -> None:
    """Behaviour 92: the same results for arrays of every size, contiguous or not, with regions and without."""
    asyncio.run(check(write_program(seed, EXTENTS[size]), regions=regions))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_large_programs_in_many_ways(part: int) -> None:
    """Of known extents and not, shuffled, optimized and not, with iterations at once and without."""
    for seed in ANYWHERE[part::4]:
        random = Random(seed)
        options: dict[str, Any] = {
            "is_open": random.random() < 0.3,
            "parallel_iterations": random.choice((1, 2, 32)),
            "optimize": random.random() < 0.8,
            "regions": random.random() < 0.6,
        }
        if not options["regions"]:
            options["seed"] = seed
        print(f"seed {seed}: {options}")
        asyncio.run(check(write_program(seed, random.choice(list(EXTENTS.values()))), **options))


def test_the_programs_use_buffers_again() -> None:
    """Otherwise the tests above would look at less than it seems to."""
    sources = ""
    for seed in range(24):
        graph, fetches, feeds = build(write_program(seed, (64, 100)), 32)
        for partition in af.Session(graph).plan(fetches, list(feeds)).partitions:
            regions = [node.region for node in partition.nodes if node.region is not None]
            sources += "".join(region.source for region in regions)
    assert sources.count("out=") > 100
    assert sources.count("_iteration else None") > 2, "no loop has two buffers that take turns"


def test_the_programs_hold_everything() -> None:
    """Every dtype, arrays and effects in branches and loops, and these in one another."""
    ops: Counter[str] = Counter()
    dtypes: set[str] = set()
    for seed in range(25):
        graph = build(write_program(seed, (2, 3)), 32).graph
        for node in graph.walk():
            inside = "" if node.graph is graph else "inside "
            ops[f"{inside}{node.op.name}"] += 1
            dtypes |= {tensor.dtype.name for tensor in node.outputs}
    assert dtypes >= set(DTYPES)
    for op in ("tensor_array_write", "tensor_array_read", "variable_assign", "variable_assign_add", "cond", "while"):
        assert f"inside {op}" in ops, op
    assert ops["inside cond"] > 20
