"""Pools and batches of one session that wait for each other: the steps of each, and that none is left over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.watch.observer import ObservedBatch, ObservedRun
from asyncflow.testing import virtual_clock
from tests.others import others_end
from tests.vertex.evaluation import slotted, slotted_alone

FEW, SOME, MANY = 40, 240, 4_000
"""Numbers of iterations: of requests, and of the requests that they are compared with."""


class Steps:
    """An observer that writes down whose steps, and calls of batches, there were."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def run_began(self, run: ObservedRun) -> None: ...

    def run_ended(self, run: ObservedRun) -> None: ...

    def batch_ended(self, batch: ObservedBatch) -> None:
        self.labels.append("batch")

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        self.labels.append(function)


def steps_of(session: af.Session) -> Counter[str]:
    """Return how many steps each loop has made."""
    return Counter({name: each.calls for name, each in session.statistics().batches.items()})


class Program:
    """Pooled loops and a batched function, of a row each."""

    def __init__(self, pools: int, max_delay_s: float = 0.0) -> None:
        with af.Graph() as self.graph:
            self.x, self.n = af.placeholder("float32", (8,), name="x"), af.placeholder("int64", (), name="n")
            self.loops = [self.loop(f"loop_{number}") for number in range(pools)]
            self.batched = af.batched(lambda row: af.tanh(row) * 2, max_delay_s=max_delay_s)(self.x)
            self.structure, rows = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2), name="rows")
            found = af.vertex_map(slotted, self.structure, rows, initial=0.0, share=True).roots
            self.rows, self.roots = rows, found[0] if isinstance(found, tuple) else found

    def loop(self, name: str) -> af.Tensor:
        def body(k: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return k + 1, af.tanh(s) + self.x

        found = af.while_loop(lambda k, s: k < self.n, body, (np.int64(0), self.x), pool=af.Pool(8), name=name)
        return found[0]

    def feeds(self, iterations: int) -> dict[af.Tensor, Any]:
        return {self.x: np.ones(8, np.float32), self.n: np.int64(iterations)}

    def flood(self, session: af.Session, loop: int, priority: int, count: int = 12) -> list[asyncio.Task[Any]]:
        """Long activations of one loop: more than a pool has rows, if nothing else is said."""
        runs = (session.run(self.loops[loop], self.feeds(MANY), priority=priority) for _ in range(count))
        return [asyncio.ensure_future(run) for run in runs]


async def stopped(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def on_a_card(main: Coroutine[Any, Any, None]) -> None:
    with virtual_clock("v100") as clock:
        clock.run(main)


async def timed(run: Coroutine[Any, Any, Any]) -> tuple[float, Any]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    found = await run
    return loop.time() - began_s, found


@pytest.mark.parametrize("floods", [1, 3])
def test_a_flood_of_other_pools_hardly_delays_important_runs(floods: int) -> None:
    """Fault F46: and makes a step now and then all the same."""
    program = Program(1 + floods)

    async def main() -> None:
        async with af.Session(program.graph, devices=["sim:0"]) as session:
            for loop in program.loops:
                await session.run(loop, program.feeds(3))
            alone_s, _ = await timed(session.run(program.loops[0], program.feeds(SOME)))
            tasks = [task for number in range(floods) for task in program.flood(session, 1 + number, 5)]
            await asyncio.sleep(0.01)
            before = steps_of(session)
            beside_s, found = await timed(session.run(program.loops[0], program.feeds(SOME)))
            steps = steps_of(session) - before
            await stopped(tasks)
        assert found == SOME
        assert 1.05 * alone_s < beside_s < 1.5 * alone_s
        assert min(steps[f"loop_{1 + number}"] for number in range(floods)) >= 1

    on_a_card(main())


def test_a_flood_of_important_runs_starves_no_pool() -> None:
    """Fault F46: of the time, a less important activation in another pool has its eighth: its steps take about 8
    times as long."""
    program = Program(2)

    async def main() -> None:
        async with af.Session(program.graph, devices=["sim:0"]) as session:
            for loop in program.loops:
                await session.run(loop, program.feeds(3))
            alone_s, _ = await timed(session.run(program.loops[1], program.feeds(SOME), priority=9))
            tasks = program.flood(session, 0, 0)
            await asyncio.sleep(0.01)
            beside_s, found = await timed(session.run(program.loops[1], program.feeds(SOME), priority=9))
            await stopped(tasks)
        assert found == SOME
        assert 4 * alone_s < beside_s < 10 * alone_s

    on_a_card(main())


def test_pools_of_one_priority_make_steps_by_turns() -> None:
    """However many wait in one of them: between two steps of another there is one of its steps."""
    program, steps = Program(2), Steps()

    async def main() -> None:
        async with af.Session(program.graph, devices=["sim:0"]) as session:
            for loop in program.loops:
                await session.run(loop, program.feeds(3))
            tasks = program.flood(session, 0, 0)
            await asyncio.sleep(0.01)
            session.observe(steps)
            await session.run(program.loops[1], program.feeds(FEW))
            await stopped(tasks)
        places = [place for place, label in enumerate(steps.labels) if label == "loop_1"]
        assert len(places) >= 5
        assert max(after - before for before, after in pairwise(places)) <= 2

    on_a_card(main())


@pytest.mark.parametrize("priority", [0, 9])
def test_a_batch_with_a_delay_beside_a_pool(priority: int) -> None:
    """The batch waits for its delay, and then for a few steps of the pool, whichever of them is more important."""
    program, steps = Program(1, max_delay_s=0.05), Steps()

    async def main() -> None:
        async with af.Session(program.graph, devices=["sim:0"]) as session:
            await session.run(program.loops[0], program.feeds(3))
            await session.run(program.batched, program.feeds(0))
            tasks = program.flood(session, 0, 5)
            await asyncio.sleep(0.01)
            session.observe(steps)
            for _ in range(3):
                taken_s, found = await timed(session.run(program.batched, program.feeds(0), priority=priority))
                np.testing.assert_allclose(found, 2 * np.tanh(np.ones(8)), rtol=1e-5)
                assert 0.05 <= taken_s < 0.065
            await stopped(tasks)
        assert len(steps.labels) - steps.labels.count("loop_0") == 3

    on_a_card(main())


def test_a_waiting_stepper_may_leave_and_may_become_more_important() -> None:
    """A held pool goes on at once when an important member joins it; a member that leaves it leaves nothing over."""
    program = Program(2)

    async def main() -> None:
        async with af.Session(program.graph, devices=["sim:0"]) as session:
            for loop in program.loops:
                await session.run(loop, program.feeds(3))
            tasks = [*program.flood(session, 0, 0), *program.flood(session, 1, 5, count=2)]
            await asyncio.sleep(0.01)
            alone_s, _ = await timed(session.run(program.loops[1], program.feeds(FEW), priority=5))
            joined_s, _ = await timed(session.run(program.loops[1], program.feeds(FEW), priority=0))
            assert joined_s < alone_s / 2
            turns = session._runs.batches.steps.turns  # type: ignore[union-attr]
            await stopped(tasks)
            await others_end()
            assert not turns._waiting
            assert not session._runs.batches.pools._works  # type: ignore[union-attr]

    on_a_card(main())


def test_sets_of_one_run_ask_one_by_one() -> None:
    """Sets are made one after another in a turn, beside calls that go first, and a pool of the same rank."""

    with af.Graph() as graph:
        n, x = af.placeholder("int64", (), name="n"), af.placeholder("float64", (2,), name="x")
        structure, rows = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2), name="rows")
        weights = af.Variable(np.eye(2))

        @af.vertex_function(state=af.spec("float64", (2,)), children=None)
        def summed(v: af.Vertex) -> None:
            state = af.tanh(v.pull() @ weights + v.gather_all())
            v.scatter(state)
            v.push(af.sum(state))

        mapped = af.vertex_map(summed, structure, rows, share=True)

        def grown(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, af.concat([s, af.tanh(s[-1:] @ weights + af.sum(s, axis=0))], axis=0)

        invariants = ((), (None, 2))
        pooled = af.while_loop(lambda i, s: i < n, grown, (0, rows), shape_invariants=invariants, pool=af.Pool(8))[1]
        called = af.batched(lambda v: af.tanh(v @ weights))
        calls = af.while_loop(lambda i, h: i < n, lambda i, h: (i + 1, called(h) + x), (0, x))[1]

    async def main() -> None:
        tree = af.InputGraph.from_parents([-1, 0, 0])
        ones = np.ones((3, 2))
        async with af.Session(graph, devices=["sim:0"]) as session:
            _, grew, _ = await asyncio.gather(
                session.run([mapped.pushes, mapped.roots], {**structure.feeds(tree), rows: ones}, priority=1),
                session.run(pooled, {n: 20, rows: ones}, priority=1),
                session.run(calls, {n: 29, x: np.ones(2)}, priority=0),
            )
            assert grew.shape == (23, 2)
            await others_end()
            assert not session._runs.batches.steps.turns._waiting  # type: ignore[union-attr]

    on_a_card(main())


@pytest.mark.parametrize("seed", range(3))
async def test_whoever_goes_first(seed: int) -> None:
    """Fault F42: loops, batches and vertices of random priorities, cancelled at random: each result is that of a single
    run.
    """
    program, random = Program(3), Random(seed)
    async with af.Session(program.graph, debug=True, seed=seed) as session:

        async def request() -> None:
            for _ in range(random.randrange(20)):
                await asyncio.sleep(0)
            kind, length, priority = random.randrange(5), random.randrange(1, 30), random.choice([0, 3, 5])
            chain, rows = af.InputGraph.chain([length]), np.full((length, 2), 0.5)
            fetch = [*program.loops, program.batched, program.roots][kind]
            feeds = {**program.feeds(length), **program.structure.feeds(chain), program.rows: rows}
            feeds = {x: value for x, value in feeds.items() if (x in program.feeds(0)) == (kind < 4)}
            found: Any
            run = asyncio.ensure_future(session.run(fetch, feeds, priority=priority))
            if random.random() < 0.2:
                await asyncio.sleep(0)
                run.cancel()
            (found,) = await asyncio.gather(run, return_exceptions=True)
            if isinstance(found, asyncio.CancelledError):
                return
            if kind == 4:
                np.testing.assert_allclose(found, slotted_alone(chain, rows)[1])
            elif kind == 3:
                np.testing.assert_allclose(found, 2 * np.tanh(np.ones(8)), rtol=1e-5)
            else:
                assert found == length

        await asyncio.gather(*(request() for _ in range(60)))
        await others_end()
        turns = session._runs.batches.steps.turns  # type: ignore[union-attr]
        assert not turns._waiting
        assert list(turns._present) == [session._runs.batches]
        assert session._runs.batches.rank == float("inf")  # type: ignore[union-attr]
