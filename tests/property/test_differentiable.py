"""Random programs with gradients give the same bits, whichever values are saved and whichever are computed again."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.memory.saving import choose_saved
from asyncflow.testing import virtual_clock
from tests.property.differentiable import COLUMNS, FREE, ROWS, random_loss

Program: TypeAlias = tuple[af.Graph, list[Any], dict[Any, Any]]
"""A graph, its fetches, and its feeds."""


def random_program(seed: int, order: int, is_open: bool) -> Program:
    """Return a loss and `order` gradients, each of the one before."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None if is_open else ROWS, COLUMNS))
        w = af.placeholder("float32", (COLUMNS, COLUMNS))
        fetched = [random_loss(Random(seed), x, w, is_open=is_open)]
        for _ in range(order):
            fetched += af.gradients(af.sum(af.square(fetched[-1])), [x, w], unconnected="zero")
    random = np.random.default_rng(seed)
    fed = {x: random.standard_normal((ROWS, COLUMNS), np.float32)}
    fed[w] = random.standard_normal((COLUMNS, COLUMNS), np.float32)
    return graph, fetched, fed


async def check(seed: int, order: int, is_open: bool) -> None:
    graph, fetched, fed = random_program(seed, order, is_open)
    expected: list[Any] = []
    for options in ({"without": ["choose_saved"]}, {}, {"regions": False}):
        async with af.Session(graph, debug=True, **options) as session:
            found = [np.asarray(value) for value in await session.run(fetched, fed)]
        expected = expected or found
        assert [value.tobytes() for value in found] == [value.tobytes() for value in expected]


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), order=st.sampled_from((1, 1, 2)), is_open=st.booleans())
def test_gradients_do_not_depend_on_the_saved_values(seed: int, order: int, is_open: bool) -> None:
    """Behaviour 68."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in FREE.items():
            patched.setattr(choose_saved, name, value)
        asyncio.run(check(seed, order, is_open))


async def moved(program: Program, device: str, **options: Any) -> tuple[list[bytes], int]:
    """The bits of the results, and how many bytes went away meanwhile, if values of any size may."""
    graph, fetched, fed = program
    async with af.Session(graph, devices=[device], **options) as session:
        if (swapping := session.devices[0].swapping) is not None:
            swapping.moves.least_bytes = 0
            swapping.moves.together = min(swapping.together, 64)  # values of a CPU move one by one
        found = [np.asarray(value).tobytes() for value in await session.run(fetched, fed)]
        return found, session.statistics().memory[device].moved_out


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False])
def test_gradients_do_not_depend_on_what_moves(regions: bool, tmp_path: Path) -> None:
    """Behaviour 68: on a simulated card to the host's memory and its disk, and from a CPU to a file."""
    on_disk = {"spill_directory": str(tmp_path)}
    places: list[tuple[str, dict[str, Any]]] = [
        ("sim:0", {}),
        ("sim:0", {"host_memory_limit": 1, **on_disk}),
        ("cpu:0", on_disk),
    ]
    went = [0, 0, 0]

    def bits(program: Program, device: str, **options: Any) -> tuple[list[bytes], int]:
        with virtual_clock("v100") if device == "sim:0" else nullcontext(asyncio) as clock:
            return clock.run(moved(program, device, memory_limit=1 << 30, regions=regions, **options))

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 2**32), order=st.sampled_from((1, 1, 2)), is_open=st.booleans())
    def check_moves(seed: int, order: int, is_open: bool) -> None:
        program = random_program(seed, order, is_open)
        kept = {device: bits(program, device, saved_values="keep") for device in ("sim:0", "cpu:0")}
        for number, (device, place) in enumerate(places):
            found, count = bits(program, device, saved_values="swap", **place)
            assert found == kept[device][0]
            went[number] += count

    check_moves()
    assert all(went)
