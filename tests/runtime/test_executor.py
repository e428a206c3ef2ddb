"""`Executor`: what one partition does in one run."""

from __future__ import annotations

import asyncflow as af
from tests.conftest import assert_baseline


async def test_a_dead_iteration_is_acknowledged_where_no_value_has_crossed(graph: af.Graph) -> None:
    """A loop in a branch not taken ends on a device where nothing was sent or received before."""
    taken = af.placeholder("bool", ())
    x = af.placeholder("float32", ())

    def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:1"):
            return i + 1, total * 2.0

    with af.device("cpu:0"):
        result = af.cond(taken, lambda: af.while_loop(lambda i, _: i < 3, body, (0, x))[1], lambda: x)
    async with af.Session(graph, devices=["cpu:0", "cpu:1"], regions=False) as session:
        assert await session.run(result, {taken: False, x: 1.0}) == 1.0
        assert await session.run(result, {taken: True, x: 1.0}) == 8.0
        assert_baseline(session)
