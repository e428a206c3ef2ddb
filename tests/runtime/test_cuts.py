"""Moments between runs, where runs overlap so that there is none by itself."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", range(3))
def test_writers_that_always_overlap(seed: int, tmp_path: Path) -> None:
    """Fault F50: F50, Behaviour 79: one of eight writers is always half way, and each save is whole all the same."""
    chance = random.Random(seed)
    with af.Graph(effects="unordered") as graph:
        a, b, c = (af.Variable(0, name=name) for name in "abc")

        @af.op(outputs=af.spec("int64", ()))
        async def pause(x: np.ndarray) -> np.ndarray:
            await asyncio.sleep(chance.random())
            return x

        first = a.assign_add(1)
        with af.control_dependencies([first]):
            second = b.assign_add(pause(af.constant(1)))
        with af.control_dependencies([second]):
            step = c.assign_add(pause(af.constant(1)))

    async def writer(session: af.Session, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await session.run(step)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session, asyncio.TaskGroup() as group:
            stop = asyncio.Event()
            for _ in range(8):
                group.create_task(writer(session, stop))
            for _ in range(6):
                await asyncio.sleep(chance.random() * 3)
                begun = await session.run(a)
                path = await session.save(tmp_path)
                saved = await values(graph, path, [a, b, c])
                assert saved[0] == saved[1] == saved[2] >= begun - 8  # of runs that have not ended, nothing
            stop.set()

    with virtual_clock() as clock:
        clock.run(main())


def clock_s() -> float:
    return asyncio.get_running_loop().time()


async def values(graph: af.Graph, path: Path, variables: list[af.Variable]) -> list[int]:
    async with af.Session(graph, restore=path) as other:
        return list(map(int, await other.run(variables)))


def test_a_run_that_waits_for_a_run_that_is_held_up(tmp_path: Path) -> None:
    """No run is held up for ever: the save waits, and both runs end."""
    with af.Graph() as graph:
        a, b = (af.Variable(0, name=name) for name in "ab")
        arrived = [asyncio.Event() for _ in range(3)]

        @af.op(outputs=af.spec("int64", ()))
        async def meet(me: np.ndarray) -> np.ndarray:
            arrived[int(me)].set()
            await arrived[int(me) + 1].wait()
            return me

        runs = []
        for k in range(2):
            first = a.assign_add(1)
            with af.control_dependencies([first]):
                runs.append([first, b.assign_add(meet(af.constant(k)) * 0 + 1)])
        last = [a.assign_add(1), b.assign_add(1)]

    async def main() -> None:
        async with af.Session(graph) as session:
            pair = asyncio.create_task(session.run(runs[0]))
            await arrived[0].wait()
            saving = asyncio.create_task(session.save(tmp_path))
            await asyncio.sleep(0.1)
            second = asyncio.create_task(session.run(runs[1]))  # without which the first never ends
            await arrived[1].wait()
            await pair
            third = asyncio.create_task(session.run(last))  # is held up for the second, for a millisecond
            asked_s = clock_s()
            assert await third == [3, 2]
            took_s = clock_s() - asked_s
            assert not saving.done()
            arrived[2].set()
            await asyncio.gather(second, saving)
            asked_s = clock_s()
            await session.run(last)
            assert took_s - (clock_s() - asked_s) == pytest.approx(0.001, abs=0.0005)
            assert await values(graph, tmp_path, [a, b]) == [3, 3]

    with virtual_clock() as clock:
        clock.run(main())


async def test_a_cut_that_is_taken_at_once(tmp_path: Path) -> None:
    async with af.Session() as session:
        taken: list[int] = []
        await session._runs.in_flight.cuts.take(lambda: taken.append(1))
        assert taken == [1]
        assert not session._runs.in_flight.cuts.waiting
