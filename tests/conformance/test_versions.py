"""`Session.swap_variables`: every run sees one version of the variables, whatever is swapped while it is in flight."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.others import others_end
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.conftest import OpenSession

LENGTH = 4


@af.op(outputs=af.spec("int64", ()), pure=True)
async def elsewhere(passes: int) -> np.int64:
    """Let other coroutines run for a number of passes of the event loop."""
    for _ in range(int(passes)):
        await asyncio.sleep(0)
    return np.int64(0)


class Program:
    """Four ways to read two variables, which always change together, several times in a run that waits in between."""

    def __init__(self) -> None:
        with af.Graph() as self.graph:
            self.a = af.Variable(np.ones(3, np.float32), name="a")
            self.b = af.Variable(np.full(3, 10, np.float32), name="b")
            self.passes = af.placeholder("int64", (), name="passes")
            self.x = af.placeholder("float32", (3,), name="x")

            def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
                total = total + self.a.read()
                with af.control_dependencies([total]):
                    waited = af.astype(elsewhere(self.passes), "float32")
                with af.control_dependencies([waited]):
                    return i + 1, total + waited + self.b.read()

            start = (0, af.zeros((3,)))
            plain = af.while_loop(lambda i, _: i < LENGTH, body, start)[1]

            def rows(x: af.Tensor) -> af.Tensor:
                return x * 0 + self.a.read() + self.b.read()

            shared = af.batched(rows, max_size=8)

            def steps(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
                return i + 1, total + self.a.read() + self.b.read()

            with af.control_dependencies([plain]):
                later = af.identity(self.x)
            batch = shared(later)
            pooled = af.while_loop(lambda i, _: i < LENGTH, steps, (0, later * 0), pool=af.Pool(4))[1]

            @af.vertex_function(state=af.spec("float32", (3,)), children=1)
            def vertex(v: Any) -> None:
                v.scatter(v.gather(0) + v.pull() + self.a.read() + self.b.read())

            self.structure = af.InputGraph.placeholder()
            zeros = af.zeros((LENGTH, 3), dtype="float32") * later
            chained = af.vertex_map(vertex, self.structure, zeros, share=True).roots[0]
            self.fetches = (plain, batch, pooled, chained)

    def values(self, version: int) -> dict[Any, Any]:
        return {self.a: np.full(3, version, np.float32), "b": np.full(3, 10 * version, np.float32)}

    async def run(self, session: af.Session, passes: int) -> int:
        """The version that a run has seen: one, and no other."""
        feeds = {self.passes: passes, self.x: np.ones(3, np.float32)}
        chain = self.structure.feeds(af.InputGraph.chain([LENGTH]))
        plain, batch, *others = await session.run(self.fetches, {**feeds, **chain})
        found = {*(batch / 11).tolist(), *(np.array([plain, *others]) / (11 * LENGTH)).ravel().tolist()}
        assert len(found) == 1, (plain, batch, *others)
        return int(found.pop())


@pytest.mark.parametrize("seed", range(3))
async def test_each_run_sees_one_version(open_session: OpenSession, seed: int) -> None:
    """Fault F49: F49, over runs of any length, batches, pools and sets of vertices, that begin and end anywhere
    around swaps."""
    random = Random(seed)
    program = Program()
    latest = 1
    async with open_session(program.graph) as session:

        async def request() -> None:
            for _ in range(random.randrange(90)):
                await asyncio.sleep(0)
            before = latest
            assert before <= await program.run(session, random.randrange(5)) <= latest

        async def swaps() -> None:
            nonlocal latest
            for version in range(2, 5):
                for _ in range(random.randrange(50)):
                    await asyncio.sleep(0)
                await session.swap_variables(program.values(version))
                latest = version

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(swaps())
            for _ in range(9):
                group.create_task(request())
        assert await program.run(session, 0) == 4
        assert (await session.run(program.a)).tolist() == [4.0, 4.0, 4.0]
        await others_end()
