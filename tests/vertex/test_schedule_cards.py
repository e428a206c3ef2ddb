from __future__ import annotations

import numpy as np
import pytest

import asyncflow as af
from asyncflow.vertex.schedule import schedule
from tests.gpu.card import opened_card


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
async def test_a_loop_over_sets_never_waits_for_the_card(regions: bool) -> None:
    """The order is made on the host, and so are the numbers by which the loop goes on and rows are sliced."""
    data = af.InputGraph.batch([af.InputGraph.from_nested((("a", "b"), "c"))[0]] * 3)
    with af.Graph():
        graph, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, 2))
        found = schedule(graph, arity=2)

        def body(k: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            members = found.order[found.set_starts[k] : found.set_starts[k + 1]]
            return k + 1, total + af.sum(af.take(x, members, axis=0))

        n_sets = af.size(found.set_starts) - 1
        _, total = af.while_loop(lambda k, _: k < n_sets, body, (0, np.float32(0)))
    feeds = {**graph.feeds(data), x: np.ones((data.n_vertices, 2), np.float32)}
    with opened_card() as card:
        async with af.Session(devices=["cuda:0"], regions=regions) as session:
            await session.run(total, feeds)
            with card.never_blocks():
                assert await session.run(total, feeds) == 2 * data.n_vertices
