"""Random programs with gradients give the same bits, whatever is saved for those and whatever is computed again."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.memory import choose_saved
from tests.property.differentiable import COLUMNS, FREE, ROWS, random_loss


async def check(seed: int, order: int, is_open: bool) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (None if is_open else ROWS, COLUMNS))
        w = af.placeholder("float32", (COLUMNS, COLUMNS))
        fetched = [random_loss(Random(seed), x, w, is_open=is_open)]
        for _ in range(order):
            fetched += af.gradients(af.sum(af.square(fetched[-1])), [x, w], unconnected="zero")
    random = np.random.default_rng(seed)
    fed = {x: random.standard_normal((ROWS, COLUMNS), np.float32)}
    fed[w] = random.standard_normal((COLUMNS, COLUMNS), np.float32)
    expected: list[Any] = []
    for options in ({"without": ["choose_saved"]}, {}, {"regions": False}):
        async with af.Session(graph, debug=True, **options) as session:
            found = [np.asarray(value) for value in await session.run(fetched, fed)]
        expected = expected or found
        assert [value.tobytes() for value in found] == [value.tobytes() for value in expected]


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), order=st.sampled_from((1, 1, 2)), is_open=st.booleans())
def test_gradients_do_not_depend_on_what_is_saved(seed: int, order: int, is_open: bool) -> None:
    """CONFORMANCE 68."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in FREE.items():
            patched.setattr(choose_saved, name, value)
        asyncio.run(check(seed, order, is_open))
