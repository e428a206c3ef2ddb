"""Behaviour 70 to 73: what a run leaves behind is an outcome that the rules of `asyncflow.semantics` allow."""

from __future__ import annotations

import pytest

from tests.cells import SEEDS
from tests.conftest import OpenSession
from tests.semantics.oracle import Build, check
from tests.semantics.programs import Effects, queued_program, stateful_program


async def holds(open_session: OpenSession, effects: Effects, program: int, build: Build) -> None:
    await check(build, effects, [program], lambda graph, seed: open_session(graph, seed=seed), runs=2, max_states=3000)


PROGRAMS = [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 4 + 8 * SEEDS))]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_random_programs_stay_within_the_rules(open_session: OpenSession, effects: Effects, program: int) -> None:
    """Behaviour 70, 71 and 73: with ordered effects there is one outcome."""
    await holds(open_session, effects, program, stateful_program)


@pytest.mark.parametrize("program", [0, 2, 5, 6, *PROGRAMS[7:]])
@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_queues_stay_within_the_rules(open_session: OpenSession, effects: Effects, program: int) -> None:
    """Behaviour 37 and 78: what random producers put in, in which order consumers take it out."""
    await holds(open_session, effects, program, queued_program)
