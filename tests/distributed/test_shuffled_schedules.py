"""The ten kinds of program of `tests.property.test_shuffled_schedules`, cut over devices at random."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import AuditedRun
from tests.distributed.cancelling import cancelled_at_tick
from tests.distributed.clusters import COUNTS, Cluster, assert_nothing_left
from tests.property.test_shuffled_schedules import PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import OpenSession

PLACEMENTS = 2 * int(os.environ.get("ASYNCFLOW_SEEDS", "1"))
KINDS = ("sim", "cpu", "cuda")
RUNS = 3
"""Of each placement; each picks ready nodes in an order of its own."""

EACH = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_no_placement_changes_a_result(program: Callable[[], tuple[Any, Any]], kind: Any) -> None:
    """Bit for bit, and with nothing left of any run; each program on each kind, and on any number, of devices."""
    count = COUNTS[(PROGRAMS.index(program) + KINDS.index(kind)) % len(COUNTS)]
    with af.Graph() as graph:
        fetches, expected = program()

    async def main(open_session: OpenSession) -> None:
        options: dict[str, Any] = {"seed": seed, "placement_seed": seed, "regions": seed % 2 == 0}
        async with open_session(graph, **options) as session:
            for _ in range(RUNS):
                np.testing.assert_equal(await session.run(fetches), expected, err_msg=f"{cluster}, {options}")
                assert AuditedRun.leftovers == [], f"{cluster}, {options}"

    for seed in range(PLACEMENTS):
        cluster = Cluster(count, kind=kind, jitter=0.5, seed=seed)
        cluster.run(main)


@pytest.mark.slow
@EACH
def test_a_cancel_at_every_virtual_tick(program: Callable[[], tuple[Any, Any]]) -> None:
    """Fault F18: each of them on three devices, until it ends before its cancel; the session then gives the result."""
    with af.Graph() as graph:
        fetches, expected = program()

    async def main(open_session: OpenSession) -> None:
        async with open_session(graph, seed=seed, placement_seed=seed) as session:
            tick = 0
            while await cancelled_at_tick(session.run(fetches), tick, passes=tick % 3):
                assert_nothing_left(session)
                assert AuditedRun.leftovers == [], f"{cluster}, seed {seed}, tick {tick}"
                tick += 1
            np.testing.assert_equal(await session.run(fetches), expected)

    for seed in range(PLACEMENTS):
        cluster = Cluster(3, jitter=0.3, seed=seed)
        cluster.run(main)
