"""The table of ``python -m benchmarks.gpu_launches``: calls of a card in ten ordinary programs, on the stand-in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

import pytest

from asyncflow.devices.cuda.memory import CudaPool
from benchmarks.gpu_launches import ALLOCATION, DECIDED, PROGRAMS, Counts, found_for
from benchmarks.walks import walked
from tests.fake_cupy.stand_in import stand_in

LAUNCHED: Final = {
    "MLP, adam": Counts(29, 0, 2, 35),
    "LSTM, training": Counts(44, 0, 2, 72),
    "dynamic_rnn, training": Counts(45, 0, 2, 73),
    "ragged, training": Counts(64, 0, 4, 95),
    "scan": Counts(14, 0, 2, 10),
    "counted loop": Counts(12, 0, 2, 4),
    "map_fn": Counts(1, 0, 2, 2),
    "Newton": Counts(14, 0, 7, 15),
    "attention": Counts(4, 0, 2, 5),
    "Tree-LSTM, training": Counts(113, 0, 7, 119),
}
"""Without CUDA graphs. A figure that falls is news for the changelog; a rise needs a reason."""

CAPTURED: Final = {
    **LAUNCHED,
    "MLP, adam": Counts(0, 1, 2, 0),
    "LSTM, training": Counts(0, 1, 2, 0),
    "dynamic_rnn, training": Counts(0, 1, 2, 0),
    "ragged, training": Counts(0, 1, 4, 0),
    "scan": Counts(0, 1, 2, 0),
    "counted loop": Counts(0, 1, 2, 0),
    "attention": Counts(0, 1, 2, 0),
    "Tree-LSTM, training": Counts(0, 1, 7, 0),
}
"""With ``cuda_graphs=True``."""

OBSTACLES: Final = {
    "map_fn": "without gain",
    "Newton": "without gain",
}
"""Words of the plan about the first region of each program that is not captured."""


DECIDED_BY: Final = {
    "Newton": (Counts(14, 0, 7, 15), Counts(0, 1, 8, 3)),
    "Newton, training": (Counts(20, 0, 5, 28), Counts(9, 2, 21, 19)),
}
"""Counts with the host deciding, and with ``device_while=True``."""

TRACED: Final = {"ragged, training": 51, "Tree-LSTM, training": 90}
"""Kernels by a trace, where that counts fewer: some ops make several launches for a node."""


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("expected", [LAUNCHED, CAPTURED], ids=["launched", "captured"])
def test_a_run_asks_as_much_of_a_card_as_the_table_says(name: str, expected: dict[str, Counts]) -> None:
    with stand_in(devices=1, nbytes=64 << 20) as cupy:
        found = asyncio.run(found_for(PROGRAMS[name], cupy, cuda_graphs=expected is CAPTURED))
    assert found.counts == expected[name]
    kernels = TRACED.get(name, expected[name].kernels) if expected[name].kernels else 0
    assert found.traced == replace(expected[name], kernels=kernels)
    if expected is CAPTURED:
        said = OBSTACLES.get(name, "becomes a CUDA graph for each kind of inputs that comes again: 1 made")
        assert said in found.reasons[0]
        assert (found.counts.graphs > 0) is (name not in OBSTACLES)


@pytest.mark.parametrize("name", DECIDED)
@pytest.mark.parametrize("on_card", [False, True], ids=["host", "card"])
def test_a_loop_that_decides_on_the_card_asks_as_much_of_it_as_the_table_says(name: str, on_card: bool) -> None:
    with stand_in(devices=1, nbytes=64 << 20) as cupy:
        found = asyncio.run(found_for(DECIDED[name], cupy, device_while=on_card))
    assert found.counts == DECIDED_BY[name][on_card]
    assert found.plan.count("the card runs it") == on_card * found.counts.graphs


async def test_allocations_are_counted_while_they_are_asked_for() -> None:
    with stand_in(devices=1) as cupy:
        pool = CudaPool(cupy, 0, "cuda:0")
        held = [pool.malloc(8)]

        async def allocate() -> None:
            held.extend([pool.malloc(8), pool.malloc(0)])

        walk = await walked(allocate)
        held.append(pool.malloc(8))
        assert walk[ALLOCATION] == 2
        held.clear()
