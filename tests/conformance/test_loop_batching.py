"""Conformance of loop batching: work for many iterations at once gives the results of single iterations, in every
cell.
"""

from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from tests.compiler.batching import Recurrent
from tests.conftest import OpenSession


class Joined(Recurrent):
    """The same by one product, as cells are mostly written."""

    def step(self, x: af.Tensor, h: af.Tensor) -> af.Tensor:
        return af.tanh(af.concat([x, h], axis=-1) @ af.concat([self.w, self.u], axis=0))


@pytest.mark.parametrize("kind", [Recurrent, Joined])
async def test_batched_loops_equal_unbatched_ones(
    open_session: OpenSession, graph: af.Graph, kind: type[Recurrent]
) -> None:
    """Forward and backward, within rounding, in every arrangement; twice in one session, and at the same time."""
    cell = kind(9)
    y = cell.loop()
    fetches = [y, *af.gradients(af.mean(y * y), [cell.w, cell.u, cell.h])]
    async with open_session(graph) as session:
        found = [await session.run(fetches, dict(cell.feeds)) for _ in range(2)]
    async with open_session(graph, loop_batching=False) as session:
        expected = await session.run(fetches, dict(cell.feeds))
    for run in found:
        for batched, plain in zip(run, expected, strict=True):
            assert (batched.dtype, batched.shape) == (plain.dtype, plain.shape)
            np.testing.assert_allclose(batched, plain, rtol=2e-4, atol=2e-5)
