"""Fault F72, Behaviour 106: thousands of runs that are cancelled, or out of time, at any turn of the event loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import assert_baseline
from tests.faults.kernels import INT, until
from tests.patience import PATIENCE_S
from tests.state.queue_kinds import KINDS


class Crowd:
    """Runs that put elements in a queue, move them to another, and take them out, most of which are stopped.

    Attributes:
        put: elements whose run has returned, so that they are in.
        got: elements that a run has returned.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        self.kind = KINDS[kind]
        self.first = self.kind.make(self.random.randint(1, 4), INT, "first")
        self.second = self.kind.make(self.random.randint(1, 4), INT, "second")
        self.put: list[int] = []
        self.got: list[int] = []
        self.is_over = False
        with af.Graph() as self.graph:
            self.x = af.placeholder("int64", ())
            self.enqueue = (self.first.enqueue(self.kind.element(self.x, self.x)), self.x + 0)
            moved = self.kind.value(self.first.dequeue()) + 0
            self.move = self.second.enqueue(self.kind.element(moved, moved))
            self.take = self.kind.value(self.second.dequeue())
            self.take_two = self.kind.values(self.second.dequeue_many(2))
            self.take_both = (self.kind.value(self.second.dequeue()), self.kind.value(self.first.dequeue()))

    async def run(self, count: int) -> None:
        async with af.Session(self.graph, devices=["cpu:0"]) as self.session:
            self.session.plan(self.enqueue, [self.x])
            for fetch in (self.move, self.take, self.take_two, self.take_both):
                self.session.plan(fetch)
            async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(self._put(number))
                for act in (self._move, self._move, self._take, self._take, self._take):
                    group.create_task(self._repeat(act))
                await until(lambda: len(self.put) >= count)
                self.is_over = True
            assert_baseline(self.session)
            left = [await self._left(queue) for queue in (self.first, self.second)]
        assert sorted([*self.got, *left[0], *left[1]]) == sorted(self.put)

    async def _left(self, queue: af.Queue) -> list[int]:
        return [int(self.kind.value(await queue.get())) for _ in range(queue.size_nowait())]

    async def _repeat(self, act: Callable[[], Awaitable[None]]) -> None:
        while not self.is_over:
            await act()

    async def _put(self, number: int) -> None:
        while not self.is_over:
            element, number = number, number + 3
            if await self._stopped(self.session.run(self.enqueue, {self.x: element})):
                self.put.append(element)

    async def _move(self) -> None:
        await self._stopped(self.session.run(self.move))

    async def _take(self) -> None:
        found = await self._stopped(self.session.run(self.random.choice((self.take, self.take_two, self.take_both))))
        for value in found:
            self.got.extend(np.ravel(value).tolist())

    async def _stopped(self, run: Awaitable[Any]) -> tuple[Any, ...]:
        """Return the result of a run, in a tuple; nothing if it is stopped, in one of three ways."""
        way, turns = self.random.choice(("cancel", "cancel", "timeout", "wait_for")), self.random.randint(0, 9)
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        if way == "cancel":
            inner = asyncio.ensure_future(run)
            for _ in range(turns):
                await asyncio.sleep(0)
            inner.cancel()
            await asyncio.wait([inner])
            return () if inner.cancelled() else _flat(inner.result())
        with suppress(TimeoutError):
            if way == "timeout":
                async with asyncio.timeout(None) as limit:
                    self._at(turns, lambda: limit.reschedule(loop.time() - 1))
                    found = await run
                    limit.reschedule(None)
                    return _flat(found)
            return _flat(await asyncio.wait_for(run, turns * 1e-5))
        return ()

    def _at(self, turns: int, act: Callable[[], None]) -> None:
        if not turns:
            with suppress(RuntimeError):  # it is over
                act()
        else:
            asyncio.get_running_loop().call_soon(self._at, turns - 1, act)


def _flat(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_element_has_one_outcome(kind: str) -> None:
    """Fault F72: nothing is lost, nothing comes twice."""
    await Crowd(0, kind).run(30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_each_element_has_one_outcome_in_thousands_of_runs(kind: str) -> None:
    """Fault F72: thousands of runs that are stopped."""
    for seed in range(1, 6):
        await Crowd(seed, kind).run(400)
