"""CONFORMANCE 70 to 73: what a run leaves behind is an outcome that the rules of `asyncflow.semantics` allow."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random
from typing import TypeAlias

import pytest

import asyncflow as af
from tests.cells import SEEDS
from tests.conftest import OpenSession
from tests.semantics.programs import Effects, Program, outcome_key, outcome_keys, queued_program, stateful_program

Build: TypeAlias = Callable[[Random, Effects], Program]


async def seen(
    open_session: OpenSession, program: int, effects: Effects, seeds: range, build: Build = stateful_program
) -> tuple[int, int]:
    """How many outcomes a random program may have, and how many of them its runs had; none has another."""
    graph, fetches, variables = build(Random(program), effects)
    af.allow_races(*graph.resources)
    found = af.explore(graph, fetches, max_states=3000)
    if found.stopped:
        return 0, 0
    allowed, met = outcome_keys(found, variables), set[Hashable]()
    touched = [each for each in variables if each in found.outcomes[0].variables]
    for seed in seeds:
        async with open_session(graph, seed=seed) as session:
            fetched = await session.run(fetches)
            left = await session.run(touched)
        outcome = outcome_key(fetched, dict(zip(touched, left, strict=True)))
        assert outcome in allowed, (
            f"program {program} ({effects}), seed {seed}, gave {fetched} and left {left}, which no order of its reads "
            f"and writes does\n{af.print_graph(graph)}"
        )
        met.add(outcome)
    return len(allowed), len(met)


PROGRAMS = [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 4 + 8 * SEEDS))]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_70_random_programs_stay_within_the_rules(
    open_session: OpenSession, effects: Effects, program: int
) -> None:
    """CONFORMANCE 70, 71 and 73: with ordered effects there is one outcome."""
    allowed, met = await seen(open_session, program, effects, range(2))
    assert allowed == met == 1 if effects == "ordered" else met <= allowed


@pytest.mark.parametrize("program", [0, 2, 5, 6, *PROGRAMS[7:]])
@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_37_queues_stay_within_the_rules(open_session: OpenSession, effects: Effects, program: int) -> None:
    """CONFORMANCE 37 and 78: what random producers put in, in which order consumers take it out."""
    allowed, met = await seen(open_session, program, effects, range(2), queued_program)
    assert allowed == met == 1 if effects == "ordered" else met <= allowed
