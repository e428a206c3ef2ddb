"""Gradients of loops that run again in segments, in place of keeping what each iteration saves (Behaviour 68)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import asyncflow as af
from tests.cells import Arrangement
from tests.compiler.segmented import PROGRAMS, N, assert_same_bits, built, force
from tests.conftest import OpenSession


@pytest.fixture
def graph() -> Iterator[af.Graph]:
    """The current graph, whose random numbers are the same in all sessions."""
    with af.Graph(seed=5) as made:
        yield made


LARGE = ("inside_a_loop", "two_gradients")
"""Programs that take the longest to compile."""
SMALL = ("recurrent", "nested")

CASES = [
    *((name, length) for name in PROGRAMS for length in (None, 4)),
    *((name, length) for name in SMALL for length in (1, 100)),
]


def is_slow(name: str, length: int | None) -> bool:
    return name in LARGE or (name not in SMALL and length is not None)


@pytest.mark.parametrize(
    ("name", "length"), [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in CASES]
)
async def test_gradients_are_the_same_to_the_bit(
    graph: af.Graph,
    open_session: OpenSession,
    arrangement: Arrangement,
    name: str,
    length: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behaviour 68: also with no iteration, with one, and with fewer than a segment has."""
    force(monkeypatch, length)
    fetches, n = built(PROGRAMS[name])
    exact = {"loop_batching": False, "fusion": False}
    async with open_session(graph, **exact) as keeping, open_session(graph, saved_values="recompute", **exact) as again:
        assert "runs again for its gradient" in again.plan(fetches, [n]).explain()
        for count in (0, 1, N) if name != "of_arrays" else (N,):
            found, expected = await again.run(fetches, {n: count}), await keeping.run(fetches, {n: count})
            if arrangement.devices:  # the plans differ, so what one computes on a CPU the other may on a card
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(one, other, 1e-12)
            else:
                assert_same_bits(found, expected)
