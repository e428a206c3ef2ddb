"""Whatever was given to a waiter that is cancelled, or whose time is up, goes to the next one: nothing is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from random import Random
from typing import Any

import pytest

import asyncflow as af
from asyncflow.runtime.gates.memory_turns import MemoryTurns
from asyncflow.runtime.lines.gate import Gate, Waiter
from asyncflow.runtime.run.ask import Ask
from asyncflow.testing import virtual_clock
from tests.cells import SEEDS

WAITERS = 2_000


class Lamps:
    """Some things of which each is for one at a time; now and then a user is cancelled in the pass of its turn."""

    def __init__(self, count: int, random: Random) -> None:
        self.random, self.tasks = random, dict[int, asyncio.Task[None]]()
        self.free = self.count = count
        self.handed_on = 0
        self.gate = Gate[int](lost=self._lost)

    def _lost(self, _: int) -> None:
        self.handed_on += 1
        self.give_back()

    def give_back(self) -> None:
        self.free += 1
        assert self.free <= self.count, "given back twice"
        self.look()

    def look(self) -> None:
        number = self.gate.admit_first() if self.free else None
        if number is not None:
            self.free -= 1
            if self.random.random() < 0.2:
                self.tasks[number].cancel()

    async def use(self, number: int, until_s: float, used_s: float) -> None:
        with self.gate.stand(number) as waiter:
            self.look()
            await waiter.wait(until_s)
        try:
            await asyncio.sleep(used_s)
        finally:
            self.give_back()


async def cancel(task: asyncio.Task[Any], random: Random) -> None:
    """In any pass, such as the one in which its turn comes."""
    await asyncio.sleep(random.choice((0.0, 1.0, 2.0, 3.0)))
    for _ in range(random.randrange(8)):
        await asyncio.sleep(0)
    task.cancel()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_and_nothing_is_given_twice(seed: int) -> None:
    """Waiters are cancelled and pass their deadlines in all passes, also in the passes of their turns."""
    random, used, late = Random(seed), 0, 0
    lamps = Lamps(3, random)

    async def one(number: int) -> None:
        nonlocal used, late
        now_s = asyncio.get_running_loop().time()
        # Few different times, so that turns, deadlines and cancellations come in the same pass.
        until_s = now_s + random.choice((0.0, 1.0, 2.0, 40.0, inf, inf))
        try:
            await lamps.use(number, until_s, random.choice((0.0, 0.0, 1.0)))
            used += 1
        except TimeoutError:
            late += 1

    async def all_of_them() -> list[Any]:
        tasks, cancelling = lamps.tasks, []
        for number in range(WAITERS):
            tasks[number] = asyncio.ensure_future(one(number))
            if random.random() < 0.4:
                cancelling.append(asyncio.ensure_future(cancel(tasks[number], random)))
            if random.random() < 0.02:
                await asyncio.sleep(random.choice((0.0, 1.0)))
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.gather(*cancelling)
        return found

    with virtual_clock() as clock:
        found = clock.run(all_of_them())
    cancelled = sum(isinstance(each, asyncio.CancelledError) for each in found)
    assert used + late + cancelled == WAITERS, f"seed {seed}"
    assert (lamps.free, len(lamps.gate)) == (lamps.count, 0), f"seed {seed}"
    assert min(used, late, cancelled, lamps.handed_on) > 0, f"seed {seed}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_turns_of_runs_that_lack_memory_are_not_lost(seed: int) -> None:
    """Each goes on alone, whoever is cancelled or late before."""
    random, turns, alone = Random(seed), MemoryTurns(), 0
    tasks, cancelling = list[asyncio.Task[None]](), list[asyncio.Task[None]]()

    async def one() -> None:
        attempts = 0

        async def attempt() -> list[Any]:
            nonlocal alone, attempts
            attempts += 1
            alone += attempts == 2
            await asyncio.sleep(random.choice((0.0, 0.0, 1.0)))
            assert attempts == 1 or alone == 1, "it is not alone"
            alone -= attempts == 2
            if attempts == 1:
                raise af.OutOfMemoryError("beside another", requested=2, used=1, limit=2, node="x", op="add")
            return []

        ask = Ask(asked_s=asyncio.get_running_loop().time(), timeout=random.choice((None, 5.0)))
        with suppress(af.OutOfMemoryError, af.DeadlineExceeded):
            await turns.values(attempt, lambda: ask.in_time("it did not end"))
        others = [task for task in tasks if not task.done() and task is not asyncio.current_task()]
        if others and random.random() < 0.3:  # in the pass in which it was admitted
            others[0].cancel()

    async def all_of_them() -> None:
        for _ in range(WAITERS // 10):
            tasks.append(asyncio.ensure_future(one()))
            if random.random() < 0.4:
                cancelling.append(asyncio.ensure_future(cancel(tasks[-1], random)))
        await asyncio.gather(*tasks, *cancelling, return_exceptions=True)

    with virtual_clock() as clock:
        clock.run(all_of_them())
    assert (turns._active, len(turns._waiting), turns.is_alone) == (0, 0, False), f"seed {seed}"


async def test_an_admission_before_the_wait_counts() -> None:
    waiter = Waiter()
    waiter.admit()
    await waiter.wait()
    assert not waiter.is_admitted
    waiter.admit()
    waiter.forget()
    waiter.refuse(ValueError("closed"))
    waiter.admit()
    with pytest.raises(ValueError, match="closed"):
        await waiter.wait()


async def test_a_waiter_whose_task_is_cancelled_is_passed_over_though_it_still_stands_there() -> None:
    gate = Gate[str]()
    done = []

    async def stand(name: str) -> None:
        with gate.stand(name) as waiter:
            await waiter.wait()
            done.append(name)

    first, second = asyncio.ensure_future(stand("first")), asyncio.ensure_future(stand("second"))
    await asyncio.sleep(0)
    first.cancel()
    assert ("first" in gate, gate.admit_first(), gate.admit_first()) == (True, "second", None)
    await asyncio.gather(first, second, return_exceptions=True)
    assert (done, list(gate)) == (["second"], [])


async def test_a_waiter_whose_deadline_has_passed_may_be_admitted_later() -> None:
    """The admission counts, although it comes before the waiter waits again."""
    waiter = Waiter()
    with pytest.raises(TimeoutError):
        await waiter.wait(asyncio.get_running_loop().time())
    waiter.admit()
    assert waiter.is_admitted
    await waiter.wait()
