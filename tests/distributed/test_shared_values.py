"""Variables in containers, shared by sessions on any devices: what one writes the others read, all of it or nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.state.containers import StateStore
from asyncflow.state.variables.held import HeldValue
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fake_cupy import FakeCupy

ONES = np.ones(3, np.float32)
CARD = ["cuda:0"]
SAME_CARD = ["cuda:2"]  # the third logical device of two cards
OTHER_CARD = ["cuda:1"]
CPU = ["cpu:0"]
PAIRS = [
    pytest.param(CARD, CARD, id="one-device"),
    pytest.param(CARD, SAME_CARD, id="one-card"),
    pytest.param(CARD, OTHER_CARD, id="two-cards"),
    pytest.param(CPU, CARD, id="cpu-and-card"),
    pytest.param(CARD, CPU, id="card-and-cpu"),
    pytest.param(["cpu:0", "cuda:0"], ["cuda:1", "cpu:0"], id="both-and-both"),
    pytest.param(CPU, CPU, id="cpus"),
]
pairs = pytest.mark.parametrize(("first", "second"), PAIRS)
seeds = pytest.mark.parametrize("seed", range(2))
modes = pytest.mark.parametrize(("seed", "options"), [(0, {}), (1, {"regions": False})], ids=["regions", "interpreted"])


@pytest.fixture(autouse=True)
def _empty_container() -> Iterator[None]:
    yield
    af.reset_container("test")


@pytest.fixture
def seed() -> int:
    return 0


@pytest.fixture
def cards(seed: int) -> Iterator[FakeCupy]:
    with stand_in(devices=2, nbytes=32 << 20, seed=seed) as fake:
        yield fake
        af.reset_container("test")
        gc.collect()


class Program:
    """A shared array and what sessions do with it."""

    def __init__(self) -> None:
        with af.Graph() as self.graph:
            self.x = x = af.placeholder("float32", (3,))
            self.v = v = af.Variable(np.zeros(3, np.float32), name="v", container="test")
            self.n = af.placeholder("int64", ())
            self.add = v.assign_add(x)
            self.assign = v.assign(x * 1)
            self.turned = v.assign(af.flip(x))  # on a card, a view with negative strides
            self.update = v.update(lambda old, x: old * 2 + x, x)
            self.loop = af.while_loop(lambda i: i < self.n, lambda i: (v.assign_add(x), i + 1)[1], 0)
            self.read = v.read()
            self.doubled = v.read() * 2 + 1

    async def value(self, session: af.Session) -> list[float]:
        """The value, which has to be the same by whatever way it comes, and on the host."""
        read, doubled = await session.run([self.read, self.doubled])
        assert type(read) is type(doubled) is np.ndarray
        np.testing.assert_array_equal(doubled, read * 2 + 1)
        fetched = await session.run(self.v)
        assert type(fetched) is np.ndarray
        return list(map(float, fetched))


@pairs
@modes
async def test_sessions_at_a_time(cards: FakeCupy, first: list[str], second: list[str], options: Any) -> None:
    p = Program()
    async with af.Session(p.graph, first, **options) as a, af.Session(p.graph, second, **options) as b:
        assert (await a.run(p.add, {p.x: ONES})).tolist() == [1, 1, 1]
        assert (await b.run(p.add, {p.x: ONES})).tolist() == [2, 2, 2]
        assert await p.value(a) == await p.value(b) == [2, 2, 2]
        assert (await b.run(p.turned, {p.x: [1, 2, 3]})).tolist() == [3, 2, 1]
        assert await p.value(a) == [3, 2, 1]
        assert (await a.run(p.update, {p.x: ONES})).tolist() == [7, 5, 3]
        assert await b.run(p.loop, {p.x: ONES, p.n: 4}) == 4
        assert await p.value(a) == [11, 9, 7]
        assert (await a.run(p.assign, {p.x: ONES})).tolist() == [1, 1, 1]
        assert await p.value(b) == await p.value(a) == [1, 1, 1]


@seeds
@pairs
async def test_one_session_after_the_other(cards: FakeCupy, first: list[str], second: list[str]) -> None:
    p = Program()
    for k, devices in enumerate([first, second, first, second]):
        async with af.Session(p.graph, devices) as session:
            if k:
                assert await p.value(session) == [k, k, k]
            assert (await session.run(p.add, {p.x: ONES})).tolist() == [k + 1] * 3


@seeds
@pairs
async def test_updates_at_the_same_time_all_count(cards: FakeCupy, first: list[str], second: list[str]) -> None:
    p = Program()
    async with af.Session(p.graph, first) as a, af.Session(p.graph, second) as b:
        seen = await asyncio.gather(*(s.run(p.add, {p.x: ONES}) for s in (a, b) * 20))
        assert sorted(array.tolist() for array in seen) == [[k, k, k] for k in range(1, 41)]
        assert await p.value(a) == await p.value(b) == [40, 40, 40]


@pytest.mark.parametrize("seed", range(2))
@pairs
def test_updates_of_two_threads_all_count(cards: FakeCupy, first: list[str], second: list[str]) -> None:
    """Each session on an event loop and thread of its own; reads in between see whole values."""
    p = Program()
    torn: list[list[float]] = []

    async def work(devices: list[str]) -> None:
        async with af.Session(p.graph, devices) as session:
            for _ in range(20):
                await session.run(p.add, {p.x: ONES})
                value = (await session.run(p.read)).tolist()
                if len(set(value)) > 1:
                    torn.append(value)

    threads = [threading.Thread(target=asyncio.run, args=(work(devices),)) for devices in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def last() -> list[float]:
        async with af.Session(p.graph, CPU) as session:
            return await p.value(session)

    assert asyncio.run(last()) == [40, 40, 40]
    assert torn == []


@seeds
async def test_a_reader_keeps_what_the_writer_replaces(cards: FakeCupy) -> None:
    """The copy is not made yet when the writer lets go of the array and takes its memory for others."""
    p = Program()
    async with af.Session(p.graph, CARD) as a, af.Session(p.graph, OTHER_CARD) as b:
        await a.run(p.add, {p.x: ONES})
        for k in range(1, 20):
            seen, _ = await asyncio.gather(b.run(p.doubled), a.run(p.loop, {p.x: ONES, p.n: 5}))
            before, after = 5 * k - 4, 5 * k + 1
            assert len(set(seen.tolist())) == 1 and before <= (seen[0] - 1) / 2 <= after


async def test_a_value_is_copied_once_a_write(cards: FakeCupy) -> None:
    """By each session that reads it, whoever else does: the initial value, which is the host's, and one of a card."""
    p = Program()

    async def copies(session: af.Session) -> int:
        before = len(cards.engine.launches)
        await session.run(af.on_device(p.doubled))
        return sum("memcpy" in name for _, name in cards.engine.launches[before:])

    async with AsyncExitStack() as stack:
        a, b, c = [await stack.enter_async_context(af.Session(p.graph, d)) for d in (CARD, OTHER_CARD, SAME_CARD)]
        assert [await copies(session) for session in (a, b, c) * 3] == [1, 1, 1] + [0] * 6
        for _ in range(2):
            await a.run(af.on_device(p.add), {p.x: ONES})
            assert [await copies(session) for session in (a, b, c) * 3] == [0, 1, 1] + [0] * 6


async def test_copies_of_an_old_value_are_given_back(cards: FakeCupy) -> None:
    """Copies are also given back by a session that is closed; other sessions keep theirs."""
    p = Program()
    async with af.Session(p.graph, CARD) as a, af.Session(p.graph, OTHER_CARD) as b:
        async with af.Session(p.graph, SAME_CARD) as c:
            await a.run(p.add, {p.x: ONES})
            for session in (b, c, b, c):
                assert await p.value(session) == [1, 1, 1]
            used = b.statistics().used_bytes
            await a.run(p.add, {p.x: ONES})
            for session in (c, b):
                assert await p.value(session) == [2, 2, 2]
            assert b.statistics().used_bytes == used
        assert c.statistics().used_bytes == {"cuda:2": 0}
        assert b.statistics().used_bytes == used
        await a.aclose()
        assert a.statistics().used_bytes == {"cuda:0": 0}
        assert await p.value(b) == [2, 2, 2]


@pytest.mark.parametrize("kept", [True, False], ids=["value", "old-value"])
async def test_closing_gives_back_what_others_have_copied(cards: FakeCupy, kept: bool) -> None:
    p = Program()
    async with af.Session(p.graph, OTHER_CARD) as b:
        async with af.Session(p.graph, CARD) as a:
            await a.run(p.add, {p.x: ONES})
            assert await p.value(b) == [1, 1, 1]
            if not kept:
                await a.run(p.add, {p.x: ONES})
        assert a.statistics().used_bytes == {"cuda:0": 0}
        assert await p.value(b) == ([1, 1, 1] if kept else [2, 2, 2])


@pytest.mark.slow
async def test_a_container_per_request_leaves_nothing(cards: FakeCupy) -> None:
    """Once it is reset, and the graph has lost the plans that used it."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))
    used = []
    async with af.Session(graph, CARD) as session:
        for k in range(5):
            with graph:
                write = af.Variable(ONES, name="v", container=f"request {k}").assign(x * 2)
            await session.run({"write": write}, {x: ONES})  # as a dict, which the session does not remember
            af.reset_container(f"request {k}")
            gc.collect()
            used.append(session.statistics().used_bytes["cuda:0"])
    assert used[1:] == used[:1] * 4


async def test_closing_brings_the_value_to_the_host(cards: FakeCupy) -> None:
    p = Program()
    async with af.Session(p.graph, CARD) as session:
        await session.run(p.add, {p.x: ONES})
        state = session.state.lookup(p.v)
        assert isinstance(state.value, HeldValue)
    value: Any = state.value
    assert value.tolist() == [1, 1, 1] and not value.flags.writeable
    assert session.statistics().used_bytes == {"cuda:0": 0}


async def test_closing_leaves_what_another_session_has_written(cards: FakeCupy) -> None:
    p = Program()
    async with af.Session(p.graph, OTHER_CARD) as b:
        async with af.Session(p.graph, CARD) as a:
            await a.run(p.add, {p.x: ONES})
            assert await p.value(b) == [1, 1, 1]
            await b.run(p.add, {p.x: ONES})
            assert await p.value(a) == [2, 2, 2]
        assert type(b.state.lookup(p.v).value) is HeldValue
        assert a.statistics().used_bytes == {"cuda:0": 0}
        assert await p.value(b) == [2, 2, 2]


async def test_the_value_of_a_session_that_was_dropped(cards: FakeCupy) -> None:
    """The session was never closed: its array stays on the card, where other sessions find it."""
    p = Program()
    session = af.Session(p.graph, CARD)
    await session.run(p.add, {p.x: ONES})
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del session
    async with af.Session(p.graph, CARD) as b, af.Session(p.graph, CPU) as c:
        assert await p.value(b) == await p.value(c) == [1, 1, 1]
        await b.run(p.add, {p.x: ONES})
        assert await p.value(c) == [2, 2, 2]


async def test_a_lost_device_takes_its_values_along(cards: FakeCupy) -> None:
    p = Program()
    async with af.Session(p.graph, OTHER_CARD) as b, af.Session(p.graph, CPU) as c:
        async with af.Session(p.graph, CARD) as a:
            await a.run(p.add, {p.x: ONES})
            cards.fail_next(700, "launchKernel")
            with pytest.raises(af.DeviceLostError):
                await a.run(p.add, {p.x: ONES})
        for session in (b, c):
            for fetch in (p.read, p.doubled, p.v):
                with pytest.raises(
                    af.DeviceLostError, match=r"variable 'v' was in the memory of cuda:0, which is lost"
                ):
                    await session.run(fetch)
            with pytest.raises(af.DeviceLostError, match="assign another one before anything reads it"):
                await session.run(p.add, {p.x: ONES})
        await b.run(p.assign, {p.x: ONES})
        assert await p.value(c) == await p.value(b) == [1, 1, 1]


async def test_a_value_that_came_to_the_host_survives_the_loss(cards: FakeCupy) -> None:
    p = Program()
    async with af.Session(p.graph, CPU) as c, af.Session(p.graph, CARD) as a:
        await a.run(p.add, {p.x: ONES})
        assert await p.value(c) == [1, 1, 1]
        cards.fail_next(700, "launchKernel")
        with pytest.raises(af.DeviceLostError):
            await a.run(p.doubled)
        assert await p.value(c) == [1, 1, 1]


async def test_a_cpu_does_not_hold_up_the_loop_for_a_card(cards: FakeCupy) -> None:
    """A thread waits for the card's writes, before the run starts."""
    p = Program()
    async with af.Session(p.graph, CARD) as a, af.Session(p.graph, CPU) as c:
        await c.run(p.read)
        await a.run(p.add, {p.x: ONES})
        cards.pause()
        try:
            adding = asyncio.ensure_future(a.run(af.on_device(p.add), {p.x: ONES}))
            await asyncio.sleep(0)
            reading = asyncio.ensure_future(c.run(p.read))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reading.done()
        finally:
            cards.resume()
        await adding
        assert (await reading).tolist() in ([1, 1, 1], [2, 2, 2])


async def test_counters_and_scalars(cards: FakeCupy) -> None:
    """A number of rank 0 is a NumPy scalar to the host, whoever made it."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))
        total = af.Variable(np.float32(0), name="total", container="test")
        count = af.Variable(0, name="count", container="test")
        flag = af.Variable(False, name="flag", container="test")
        step = [total.assign_add(af.sum(x)), count.assign_add(1), flag.assign(af.all(x > 0))]
        branch = af.cond(flag.read(), lambda: total * 1, lambda: total * -1)
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(af.Session(graph, d)) for d in (CARD, CPU, OTHER_CARD, SAME_CARD)]
        for k, session in enumerate(sessions, 1):
            assert await session.run(step, {x: ONES}) == [3 * k, k, True]
            for other in sessions:
                seen = await other.run([total, count, flag, branch])
                assert seen == [3 * k, k, True, 3 * k]
                assert all(isinstance(value, np.generic) for value in seen)


async def test_the_users_function_gets_numpys_arrays(cards: FakeCupy) -> None:
    """Also of a variable that the card has written, in the same session."""

    @af.op(outputs=af.spec("float32", (3,)))
    def plus_one(a: Any) -> Any:
        assert type(a) is np.ndarray
        return a + np.float32(1)

    with af.Graph() as graph:
        x = af.placeholder("float32", (3,))
        v, w = af.Variable(ONES), af.Variable(ONES, name="w", container="test")
        writes = [v.assign(x * 2), w.assign(x * 2)]
        updates = [v.update(plus_one), w.update(plus_one)]
    async with af.Session(graph, CARD) as a, af.Session(graph, CPU) as c:
        await a.run(writes, {x: ONES})
        assert [y.tolist() for y in await a.run(updates)] == [[3, 3, 3]] * 2
        assert (await c.run(updates[1])).tolist() == [4, 4, 4]
        await a.run(writes, {x: ONES})
        assert (await c.run(updates[1])).tolist() == [3, 3, 3]


@seeds
async def test_streams_of_one_device(cards: FakeCupy) -> None:
    """Kernels of both compute streams, of several plans, find a variable as it was written last."""
    p = Program()
    async with af.Session(p.graph, CARD, compute_streams=2) as a, af.Session(p.graph, CARD, compute_streams=2) as b:
        for k in range(1, 6):
            await asyncio.gather(a.run(p.add, {p.x: ONES}), b.run(p.add, {p.x: ONES}))
            assert await p.value(a) == await p.value(b) == [2 * k] * 3


async def test_empty_values(cards: FakeCupy) -> None:
    with af.Graph() as graph:
        v = af.Variable(np.zeros((0, 2), np.float32), name="v", container="test", shape=(None, 2))
        x = af.placeholder("float32", (None, 2))
        write, read = v.assign(x * 1), v.read() * 2
    async with af.Session(graph, CARD) as a, af.Session(graph, OTHER_CARD) as b, af.Session(graph, CPU) as c:
        await a.run(write, {x: np.zeros((0, 2), np.float32)})
        for session in (a, b, c):
            assert (await session.run(read)).shape == (0, 2)


async def test_reset_while_sessions_use_it(cards: FakeCupy) -> None:
    """Sessions keep the values that they hold, and closing them does not restore the values."""
    p = Program()
    async with af.Session(p.graph, CARD) as a:
        await a.run(p.add, {p.x: ONES})
        af.reset_container("test")
        async with af.Session(p.graph, CPU) as c:
            assert await p.value(c) == [0, 0, 0]
        assert (await a.run(p.add, {p.x: ONES})).tolist() == [2, 2, 2]
    assert StateStore().lookup(p.v).value.tolist() == [0, 0, 0]


@pytest.mark.parametrize("devices", [("sim:0", "sim:0"), ("sim:0", "sim:1"), ("cpu:0", "sim:0")], ids="-".join)
@pytest.mark.parametrize("seed", range(3))
def test_simulated_devices(devices: tuple[str, str], seed: int) -> None:
    """Neither hazards nor lost updates."""
    p = Program()

    async def main() -> None:
        async with af.Session(p.graph, [devices[0]]) as a, af.Session(p.graph, [devices[1]]) as b:
            await asyncio.gather(*(s.run(p.add, {p.x: ONES}) for s in (a, b) * 10))
            assert await p.value(a) == await p.value(b) == [20, 20, 20]
            await asyncio.gather(*(s.run(p.loop, {p.x: ONES, p.n: 3}) for s in (a, b)), b.run(p.doubled))
        async with af.Session(p.graph, [devices[0]]) as a:
            assert await p.value(a) == [26, 26, 26]

    with virtual_clock("2 x v100", seed=seed) as clock:
        clock.run(main())

    async def later() -> None:
        async with af.Session(p.graph) as session:
            assert await p.value(session) == [26, 26, 26]

    asyncio.run(later())
