"""Random programs give, bit for bit, what plain NumPy gives: whatever overlaps, and in whatever order nodes fire."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings

import asyncflow as af
from tests.property.graphs import build
from tests.property.programs import Block, If, Let, Loop, Program, Write, interpret
from tests.property.strategies import programs, write_program

RUNS = 3
"""A session runs each program so often: variables keep their values, and each run shuffles differently."""

settings.register_profile(
    "random-programs",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
IN_CI = settings.get_profile("random-programs")


def assert_same_bits(name: str, actual: Any, expected: Any) -> None:
    """Same dtype, shape and bits; one NaN is as good as another."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
    # Adding 0.0 would lose the sign of -0.0; `where` keeps every bit that means something.
    canonical = [np.where(np.isnan(value), np.nan, value) for value in (actual, expected)]
    assert canonical[0].tobytes() == canonical[1].tobytes(), f"{name}: {actual!r} is not {expected!r}"


async def check(
    program: Program,
    *,
    parallel_iterations: int,
    seed: int | None,
    debug: bool,
    regions: bool = False,
    optimize: bool = False,
) -> None:
    graph, fetches, feeds = build(program, parallel_iterations)
    state = dict(program.variables)
    async with af.Session(graph, seed=seed, debug=debug, regions=regions, optimize=optimize) as session:
        for _ in range(RUNS):
            expected = interpret(program, state)
            actual = await session.run(fetches, feeds)
            for name, value in expected.items():
                assert_same_bits(name, actual[name], value)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failure takes hypothesis up to five minutes to simplify
@pytest.mark.parametrize(
    ("parallel_iterations", "seed", "debug", "regions", "optimize"),
    [
        (1, None, True, False, True),
        (2, 7, False, False, False),
        (32, 1234, True, False, True),
        (32, None, True, True, True),
        (2, 99, False, True, False),
    ],
)
@given(program=programs())
@IN_CI
def test_random_programs(
    program: Program, parallel_iterations: int, seed: int | None, debug: bool, regions: bool, optimize: bool
) -> None:
    note(f"af.Session(seed={seed}, regions={regions}, optimize={optimize}), {RUNS} runs")
    asyncio.run(
        check(
            program,
            parallel_iterations=parallel_iterations,
            seed=seed,
            debug=debug,
            regions=regions,
            optimize=optimize,
        )
    )


def parts(block: Block, place: str = "") -> set[str]:
    """Return the statements in a block, with their nesting: ``Loop/If/Write``."""
    found: set[str] = set()
    for statement in block.statements:
        path = f"{place}{type(statement).__name__}"
        found.add(path)
        match statement:
            case If(_, _, then, otherwise):
                found |= parts(then, f"{path}/") | parts(otherwise, f"{path}/")
            case Loop(form=form, collect=collect, scan=scan, limit=limit, body=body):
                found |= parts(body, f"{path}/")
                found |= {form} | {f"{collect is not None=}", f"{scan is not None=}", f"{limit is not None=}"}
            case Let() | Write():
                pass
    return found


def test_the_programs_hold_everything() -> None:
    """Otherwise the test above would look at less than it seems to."""
    found = set().union(*(parts(write_program(Random(seed).randrange).body) for seed in range(300)))
    kinds = ("Loop", "If")
    nested = {"/".join((a, b, c, last)) for a in kinds for b in kinds for c in kinds for last in ("Let", "Write")}
    options = {f"{name} is not None={wanted}" for name in ("collect", "scan", "limit") for wanted in (True, False)}
    assert found >= nested | options | {"tuple", "dict", "nested"}
