"""CONFORMANCE 70 to 73: what a run leaves behind is an outcome that the rules of `asyncflow.semantics` allow."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

import pytest

import asyncflow as af
from tests.cells import SEEDS
from tests.conftest import OpenSession
from tests.semantics.programs import Effects, outcome_key, outcome_keys, stateful_program


async def seen(open_session: OpenSession, program: int, effects: Effects, seeds: range) -> tuple[int, int]:
    """How many outcomes a random program may have, and how many of them its runs had; none has another."""
    graph, fetches, variables = stateful_program(Random(program), effects)
    af.allow_races(*variables)
    found = af.explore(graph, fetches, max_states=3000)
    if found.stopped:
        return 0, 0
    allowed, met = outcome_keys(found), set[Hashable]()
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
