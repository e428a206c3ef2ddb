"""Loops that ask for an iteration's memory, and runs that share a card's memory, on simulated cards and virtual
time.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.sim.device import SimDevice
from asyncflow.runtime.executor.executor import Executor
from asyncflow.testing import virtual_clock
from tests.devices.test_sim_swapping import VALUE, loop, nested, train

SEEDS = int(os.environ.get("ASYNCFLOW_SEEDS", "1"))

SIDE, STEPS = 32, 12
SMALL = SIDE * SIDE * 4
"""A value of the programs here: 4 KiB, the least that may move in these tests."""

Array = np.ndarray[Any, Any]
FEEDS: list[Array] = [np.random.default_rng(k).normal(size=(SIDE, SIDE)).astype(np.float32) / 5 for k in range(3)]


class Machine:
    """A session on a simulated card with a limit, and a training step of `STEPS` iterations to run on it."""

    def __init__(self, session: af.Session, grads: Any, inputs: Sequence[Any]) -> None:
        self.session, self._grads, self._inputs = session, grads, inputs
        (device,) = session.devices
        assert isinstance(device, SimDevice)
        assert device.swapping is not None
        device.swapping.moves.least_bytes = 0
        self.device, self.swapping = device, device.swapping

    async def train(self, number: int = 0, timeout: float | None = None) -> list[Array]:
        """The gradients for one of `FEEDS`."""
        grads: list[Array] = await self.session.run(
            self._grads, dict.fromkeys(self._inputs, FEEDS[number]), timeout=timeout
        )
        return grads

    def check_end(self) -> None:
        """Check that nothing is held, and no run waits."""
        now, gate = self.swapping.statistics(), self.swapping.gate
        assert now.moved_out == now.moved_in + now.discarded
        assert (now.kept, now.host, self.swapping.spaces[0].used, self.device.memory.used) == (0, 0, 0, 0)
        assert not (self.swapping.moves._groups or gate._ages or gate._promises or gate.paused)


def on_machine(
    main: Callable[[Machine], Awaitable[Any]], *, limit: int | None, regions: bool, seed: int | None = None
) -> Any:
    """Return the result of ``await main(machine)``, in a virtual world of its own; nothing is held afterwards."""
    with virtual_clock("k40", seed=seed or 0, jitter=0.1 if seed else 0.0) as clock, af.Graph():
        x = af.placeholder("float32", (SIDE, SIDE))
        w = af.placeholder("float32", (SIDE, SIDE))
        grads = af.gradients(af.sum(loop(x, w, swap_memory=False, steps=STEPS)), [x, w])

        async def whole() -> Any:
            # Without a plan of the memory, blocks of batches depend on the limit, and with them the last bits.
            batching = {"loop_batching": False}
            options: dict[str, Any] = {"memory_limit": limit, "regions": regions, "seed": seed, **batching}
            async with af.Session(devices=["sim:0"], without=["plan_memory"], **options) as session:
                machine = Machine(session, grads, [x, w])
                result = await main(machine)
                await asyncio.sleep(1)  # virtual: copies that nobody needs any more end
                machine.check_end()
                return result

        return clock.run(whole())


def least_limit(regions: bool) -> int:
    """In which one run ends: its working set."""
    for values in range(16, 0, -1):
        try:
            on_machine(lambda machine: machine.train(), limit=values * SMALL, regions=regions)
        except af.OutOfMemoryError:
            return (values + 1) * SMALL
    raise AssertionError("it needs nothing")


@pytest.fixture(scope="module", params=[True, False], ids=["regions", "interpreted"])
def regions(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def expected() -> list[list[Array]]:
    async def main(machine: Machine) -> list[list[Array]]:
        return [await machine.train(number) for number in range(3)]

    found: list[list[Array]] = on_machine(main, limit=None, regions=True)
    return found


@pytest.fixture(scope="module")
def working_set(regions: bool) -> int:
    return least_limit(regions)


@pytest.mark.parametrize(
    ("build", "values", "regions"), [(loop, 14, True), (nested, 13, True), (loop, 8, False), (nested, 9, False)]
)
def test_loops_end_within_limits_that_one_iteration_nearly_fills(build: Any, values: int, regions: bool) -> None:
    """Behaviour 68: of 36 and 25 values that are held otherwise; an iteration of the gradient takes 5 and more."""
    whole = train(build, regions=regions)
    tight = train(build, regions=regions, limit=values * VALUE)
    assert tight.memory.peak <= values * VALUE < 0.7 * whole.memory.peak
    np.testing.assert_array_equal(tight.values, whole.values)


@pytest.mark.parametrize("values", [3, 5])
def test_a_working_set_above_the_limit_is_an_error_within_one_iteration(values: int, regions: bool) -> None:
    """Fault F30: with the numbers; the session goes on."""

    async def main(machine: Machine) -> None:
        with pytest.raises(af.OutOfMemoryError) as caught:
            await machine.train()
        assert caught.value.limit == values * SMALL
        assert caught.value.used is not None
        assert caught.value.used > values * SMALL
        # The gradient's first iteration takes more than any before.
        assert " in iteration while/" not in str(caught.value) or " in iteration while/0" in str(caught.value)

    on_machine(main, limit=values * SMALL, regions=regions)


def test_a_feed_larger_than_the_limit_is_an_error_that_says_so(regions: bool, expected: list[list[Array]]) -> None:
    """Whatever may move: the feed is named by its place, and others go on."""

    async def main(machine: Machine) -> None:
        with af.Graph():
            large = af.placeholder("float32", (4 * SIDE, 4 * SIDE))
            async with af.Session(devices=["sim:0"], memory_limit=8 * SMALL) as session:
                with pytest.raises(af.OutOfMemoryError, match="that value alone is larger than the limit") as caught:
                    await session.run(af.sum(large), {large: np.zeros(large.shape, np.float32)})
                assert f"built at {__file__}" in str(caught.value)
        np.testing.assert_array_equal(await machine.train(), expected[0])

    on_machine(main, limit=None, regions=regions)


def test_the_error_says_what_an_iteration_takes() -> None:
    """Fault F30: of the forward loop, where one of the gradient does not fit."""

    async def main(machine: Machine) -> None:
        with pytest.raises(af.OutOfMemoryError, match=r"an iteration of a loop took up to \d+\.\d KiB of it"):
            await machine.train()

    on_machine(main, limit=6 * SMALL, regions=True)


def shuffled(seeds: Sequence[int], limit: int, regions: bool, expected: list[list[Array]]) -> None:
    """Three runs that begin at any time; kernels and copies take a tenth more or less, firings go in any order."""
    for seed in seeds:
        chance = random.Random(seed)

        async def one(machine: Machine, number: int, after_s: float) -> list[Array]:
            await asyncio.sleep(after_s)
            return await machine.train(number, timeout=1.0)

        async def main(machine: Machine, chance: random.Random = chance) -> list[list[Array]]:
            runs = (one(machine, number, chance.random() * 2e-3) for number in range(3))
            return list(await asyncio.gather(*runs))

        np.testing.assert_array_equal(on_machine(main, limit=limit, regions=regions, seed=seed), expected)


def test_three_runs_in_the_memory_of_one_all_end(working_set: int, regions: bool, expected: list[list[Array]]) -> None:
    """Fault F32: in a limit of 1.3 working sets all end, none starves, and every result is right."""
    shuffled(range(1, 3), int(1.3 * working_set), regions, expected)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5 * SEEDS))
def test_three_runs_in_the_memory_of_one_all_end_in_any_order(
    request: pytest.FixtureRequest, part: int, working_set: int, regions: bool, expected: list[list[Array]]
) -> None:
    """Fault F32: ten seeds, other ones with each turn."""
    first = crc32(request.config.getoption("turn").encode()) + 10 * part
    shuffled(range(first, first + 10), int(1.3 * working_set), regions, expected)


def test_the_oldest_run_is_never_done_twice_where_what_cannot_move_fits(
    regions: bool, expected: list[list[Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault F32: younger runs pause, and their values go."""
    failed: list[int] = []
    fail = Executor.fail

    def noted(self: Executor, error: BaseException, order: int = -1) -> None:
        failed.append(self.run.number)
        fail(self, error, order)

    monkeypatch.setattr(Executor, "fail", noted)

    async def main(machine: Machine) -> list[list[Array]]:
        first = await machine.train(0)  # which measures
        rest = await asyncio.gather(*(machine.train(number) for number in (1, 2)))
        assert machine.swapping.statistics().moved_out > 0
        return [first, *rest]

    np.testing.assert_array_equal(on_machine(main, limit=22 * SMALL, regions=regions), expected)
    assert failed == []


def test_a_younger_run_that_waits_goes_at_once_when_it_is_cancelled(regions: bool, expected: list[list[Array]]) -> None:
    """Fault F18, F32: before the older one does, which goes on; nothing of it is held by then."""

    async def main(machine: Machine) -> list[list[Array]]:
        await machine.train()  # which measures
        gate = machine.swapping.gate
        older = asyncio.ensure_future(machine.train(0))
        younger = asyncio.ensure_future(machine.train(1))
        for _ in range(5000):
            await asyncio.sleep(1e-5)
            if gate.paused and not machine.swapping.moves._leaving:
                break  # it waits for the older run alone
        assert gate.paused
        assert len(gate._ages) == 2
        younger.cancel()
        for _ in range(3):  # turns of the event loop, which take no time
            await asyncio.sleep(0)
        assert not gate.paused
        await asyncio.wait({younger})
        assert younger.cancelled()
        assert len(gate._ages) == 1
        return [await older, await machine.train(1)]

    limit = (15 if regions else 13) * SMALL  # where a second run lacks memory that no copy will make free
    np.testing.assert_array_equal(on_machine(main, limit=limit, regions=regions), expected[:2])


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.8, 1.0, 1.5])
def test_a_run_beside_an_older_one_is_cancelled_at_any_time(
    share: float, regions: bool, expected: list[list[Array]]
) -> None:
    """Fault F18: values in flight are included; the older run goes on, and so does the next."""

    async def whole_s(machine: Machine) -> float:
        began_s = asyncio.get_running_loop().time()
        await machine.train()
        return asyncio.get_running_loop().time() - began_s

    taken_s: float = on_machine(whole_s, limit=18 * SMALL, regions=regions)

    async def main(machine: Machine) -> list[list[Array]]:
        older = asyncio.ensure_future(machine.train(0))
        younger = asyncio.ensure_future(machine.train(1))
        await asyncio.sleep(share * taken_s)
        younger.cancel()
        return [await older, await machine.train(1)]

    np.testing.assert_array_equal(on_machine(main, limit=18 * SMALL, regions=regions), expected[:2])
