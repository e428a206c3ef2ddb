"""`VertexPool`: members that join and leave between sets, the memory of their rows, and the report at the end."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.faults.kernels import late, until
from tests.others import others_end
from tests.patience import PATIENCE_S
from tests.vertex.evaluation import H, slotted, slotted_alone

WIDTH = 2
LABEL = "vertex_map/slotted"


class Trees:
    """A graph with a shared vertex map, and its expected results for chains."""

    def __init__(self, function: af.VertexFunction = slotted) -> None:
        with af.Graph() as self.graph:
            self.structure, self.x = af.InputGraph.placeholder(), af.placeholder("float64", (None, WIDTH))
            found = af.vertex_map(function, self.structure, self.x, initial=0.0, share=True)
            self.roots = found.roots[0] if isinstance(found.roots, tuple) else found.roots

    def feeds(self, length: int, value: float = 1.0) -> Any:
        return {**self.structure.feeds(af.InputGraph.chain([length])), self.x: np.full((length, WIDTH), value)}

    async def check(self, session: af.Session, length: int, value: float = 1.0) -> None:
        found = await session.run(self.roots, self.feeds(length, value))
        _, expected = slotted_alone(af.InputGraph.chain([length]), np.full((length, WIDTH), value))
        np.testing.assert_allclose(found, expected)


def pools_of(session: af.Session) -> Any:
    return session._runs.batches.vertex_pools._works  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_rows_are_in_the_memory_account() -> None:
    """While sets are computed, and no longer."""
    seen: list[tuple[float, list[int]]] = []

    @af.op(outputs=af.spec("float64", (H,)), pure=True)
    def look(h: Any) -> Any:
        account = session.devices[0].memory
        rows = [buffer.nbytes for buffer in account.top(100) if buffer.label == "vertex_map/looking"]
        seen.append((session.statistics().memory["cpu:0"].held, sorted(rows)))
        return h

    @af.vertex_function(state=af.spec("float64", (H,)), children=1)
    def looking(v: af.Vertex) -> None:
        v.scatter(look(af.sum(v.pull()) + v.gather(0)))

    trees = Trees(looking)
    length = 300
    async with af.Session(trees.graph, debug=True) as session:
        await session.run(trees.roots, trees.feeds(length))
        rows = [length * WIDTH * 8, length * 2 * 8, (length + 1) * H * 8]  # pulled, numbers, states
        assert {tuple(found) for _, found in seen} == {tuple(rows)}
        assert all(held >= sum(rows) for held, _ in seen)
        await others_end()
        assert session.statistics().memory["cpu:0"].held == 0


@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_a_kept_error_keeps_no_rows_of_others() -> None:
    """None of others, and of its own those alone that the user's function was given some of."""

    @af.op(outputs=af.spec("float64", (H,)), pure=True)
    def positive(h: Any) -> Any:
        if h[0] < 0:
            raise ValueError("not positive")
        return h

    @af.vertex_function(state=af.spec("float64", (H,)), children=1)
    def checked(v: af.Vertex) -> None:
        v.scatter(positive(af.sum(v.pull()) + v.gather(0)))

    trees = Trees(checked)
    async with af.Session(trees.graph) as session:
        runs = [session.run(trees.roots, trees.feeds(500, value)) for value in (1.0, 1.0, -1.0, 1.0)]
        found = await asyncio.gather(*runs, return_exceptions=True)
        kept = [each for each in found if isinstance(each, BaseException)]
        assert [type(each) for each in kept] == [af.KernelError]
        del found
        await others_end()
        assert session.statistics().used_bytes["cpu:0"] <= 500 * (WIDTH + H) * 8


async def test_a_run_without_room_for_its_rows() -> None:
    """Behaviour 88: only that run fails; runs that came with it have their results."""
    trees = Trees()
    async with af.Session(trees.graph, memory_limit=400_000, debug=True) as session:
        runs = (session.run(trees.roots, trees.feeds(length)) for length in (3, 20_000, 5))
        found = await asyncio.gather(*runs, return_exceptions=True)
        assert isinstance(found[1], af.OutOfMemoryError)
        for length, each in ((3, found[0]), (5, found[2])):
            assert not isinstance(each, BaseException)
            np.testing.assert_allclose(each, slotted_alone(af.InputGraph.chain([length]), np.ones((length, WIDTH)))[1])
        del found, each
        await others_end()
        assert session.statistics().memory["cpu:0"].held == 0
        assert not pools_of(session)


@pytest.mark.usefixtures("work")
async def test_rows_stand_there_once_while_a_set_is_computed_in_halves() -> None:
    """Each half finds room if memory is short for a set of all: at every halving there was one copy of all more."""

    @af.vertex_function(state=af.spec("float64", (64,)), children=1)
    def wide(v: af.Vertex) -> None:
        v.scatter(af.tanh(af.sum(v.pull()) + v.gather(0)))

    trees, lengths = Trees(wide), [4] * 16
    feeds = {**trees.structure.feeds(af.InputGraph.chain(lengths)), trees.x: np.ones((sum(lengths), WIDTH))}
    limit, calls = 1 << 30, []
    for _ in range(2):
        async with af.Session(trees.graph, memory_limit=limit) as session, asyncio.timeout(PATIENCE_S):
            await session.run(trees.roots, feeds)
            found = await asyncio.gather(*(session.run(trees.roots, feeds) for _ in range(16)))
            assert all(np.array_equal(each, found[0]) for each in found)
            limit = session.statistics().memory["cpu:0"].peak * 9 // 10
            calls.append(session.statistics().batches["vertex_map/wide"])
    assert calls[0].failed == 0
    assert calls[1].failed
    assert calls[1].members == calls[0].members + calls[1].failed * 16


async def test_no_run_waits_for_the_order_of_a_large_graph() -> None:
    """Small ones go on, and it joins when it is in order; a pool that has it alone waits for it."""
    trees = Trees()
    async with af.Session(trees.graph, debug=True) as session, asyncio.timeout(PATIENCE_S):
        await trees.check(session, 2)
        large = asyncio.ensure_future(session.run(trees.roots, trees.feeds(30_000)))
        await asyncio.sleep(0)
        (pool,) = pools_of(session).values()
        await until(lambda: pool._joining)
        assert pool.places()
        await trees.check(session, 3)
        large.cancel()
        await asyncio.wait([large])
        del large
        await others_end()
        assert not pools_of(session)


async def test_a_message_says_with_how_many() -> None:
    trees = Trees()
    async with af.Session(trees.graph, debug=True) as session:

        def all_joined() -> bool:
            return sum(len(pool.members()) for pool in pools_of(session).values()) == 2

        runs = (late(session, trees.roots, trees.feeds(20_000, value), once=all_joined) for value in (1.0, 2.0))
        for told in await asyncio.gather(*runs):
            assert f"the sets of {LABEL} (sets of" in told
        await others_end()


async def test_a_session_that_closes() -> None:
    """The pool ends with the session, whichever runs are there."""
    trees = Trees()
    async with af.Session(trees.graph, debug=True) as session:
        asked = [asyncio.ensure_future(session.run(trees.roots, trees.feeds(20_000))) for _ in range(3)]
        await until(lambda: pools_of(session))
        (pool,) = pools_of(session).values()
        await until(lambda: pool.rows.members)
        await session.aclose(grace_s=0)
    for each in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(each, af.SessionClosedError | asyncio.CancelledError)
    del each, asked
    assert not pools_of(session)


async def test_a_pool_ends_with_its_last_run() -> None:
    trees = Trees()
    async with af.Session(trees.graph, debug=True) as session:
        await asyncio.gather(*(trees.check(session, length, value) for length in (0, 1, 4) for value in (1.0, 2.0)))
        await others_end()
        assert not pools_of(session)
        assert session.statistics().runs == 0
