"""A loop that looks at flags: the state machine by itself, and tickets of the stand-in beside busy and idle loops."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import Context
from functools import partial
from typing import cast

import pytest

from asyncflow.streams.cuda import lookout
from asyncflow.streams.cuda.lookout import LONG_S, PROBE_S, RECHECK_S, SPIN_S, Lookout, lookout_of
from asyncflow.streams.cuda.stream import CudaStream
from asyncflow.streams.virtual import VirtualClockLoop
from tests.clocks import WorkClock
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CUDARuntimeError
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

BUSY_NS = 100_000
"""A turn of a busy loop."""


class Tickets:
    """The open tickets of a stream that is not there."""

    def __init__(self) -> None:
        self.looks = self.rests = self.probes = 0
        self.is_done = False

    def look(self) -> bool:
        self.looks += 1
        return self.is_done

    def rest(self) -> None:
        self.rests += 1

    def probe(self) -> None:
        self.probes += 1


class Loop:
    """A loop by hand: callbacks of the next turn and timers, on the clocks of the module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.worked_s = 0.0
        self.soon: list[Callable[[], object]] = []
        self.timers: list[tuple[float, Callable[[], object]]] = []
        monkeypatch.setattr(lookout, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(lookout, "thread_time", lambda: self.worked_s)

    def call_soon(self, callback: Callable[..., object], *args: object, context: Context) -> None:
        assert len(context) == 0
        self.soon.append(partial(callback, *args))

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object, context: Context) -> None:
        assert len(context) == 0
        self.timers.append((self.now_s + delay_s, partial(callback, *args)))

    def turn(self, took_s: float, *, works: bool) -> None:
        """One turn, or a sleep of the loop, of so long."""
        self.now_s += took_s
        self.worked_s += took_s if works else 0.0
        due = [callback for at_s, callback in self.timers if at_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        ready, self.soon = [*self.soon, *due], []
        for callback in ready:
            callback()

    def idle(self, wait_s: float) -> None:
        """Short turns while there are callbacks, and else a sleep until the next timer, for so long."""
        until_s = self.now_s + wait_s
        while self.now_s < until_s:
            if self.soon:
                self.turn(5e-6, works=True)
            else:
                due_s = min((at_s for at_s, _ in self.timers), default=until_s)
                self.turn(max(0.0, min(due_s, until_s) - self.now_s) + 1e-9, works=False)

    def as_loop(self) -> asyncio.AbstractEventLoop:
        return cast(asyncio.AbstractEventLoop, self)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def test_an_idle_loop_spins_briefly_and_leaves_the_wait_to_threads(loop: Loop) -> None:
    looks, tickets = Lookout(), Tickets()
    looks.watch(tickets, loop.as_loop())
    loop.idle(2 * SPIN_S)
    assert tickets.rests == 1 and not loop.soon
    spun = tickets.looks
    assert spun <= SPIN_S / 5e-6 + 2
    loop.idle(20 * PROBE_S)
    assert tickets.probes == pytest.approx(20, abs=1)
    assert tickets.looks - spun == tickets.probes  # no more than one for each question to CUDA
    tickets.is_done = True
    loop.idle(2 * PROBE_S)
    assert not looks.watched and not loop.soon and not loop.timers


@pytest.mark.parametrize("turn_s", [2 * LONG_S, 1e-3, 10e-3])
def test_a_loop_with_long_turns_looks_at_each(loop: Loop, turn_s: float) -> None:
    looks, tickets = Lookout(), Tickets()
    looks.watch(tickets, loop.as_loop())
    turns = int(0.9 * RECHECK_S / turn_s)
    for turn in range(1, turns + 1):
        loop.turn(turn_s, works=True)
        assert tickets.looks - tickets.probes >= turn - 1 and tickets.rests == 0


def test_a_loop_that_is_busy_with_short_turns_is_found_out(loop: Loop) -> None:
    """It rests once, for one probe, in each `RECHECK_S`."""
    looks, tickets = Lookout(), Tickets()
    looks.watch(tickets, loop.as_loop())
    turns = 20_000
    for _ in range(turns):
        loop.turn(10e-6, works=True)
    assert tickets.rests == pytest.approx(turns * 10e-6 / (RECHECK_S + PROBE_S), abs=2)
    assert tickets.looks > 0.9 * turns


def test_an_idle_loop_on_a_slow_machine_is_found_out(loop: Loop) -> None:
    """The loop learns within one check that long turns are usual there."""
    looks, tickets = Lookout(), Tickets()
    looks.watch(tickets, loop.as_loop())
    while loop.soon:
        loop.turn(1.5 * LONG_S, works=True)
    assert loop.now_s == pytest.approx(RECHECK_S, rel=0.1)
    loop.idle(3 * PROBE_S)
    looks.watch(tickets, loop.as_loop())
    begun_s = loop.now_s
    while loop.soon:
        loop.turn(1.5 * LONG_S, works=True)
    assert loop.now_s - begun_s < 3 * SPIN_S


def test_a_resting_loop_that_becomes_busy_looks_again(loop: Loop) -> None:
    looks, tickets = Lookout(), Tickets()
    looks.watch(tickets, loop.as_loop())
    loop.idle(10 * PROBE_S)
    rested = tickets.looks
    for _ in range(int(3 * PROBE_S / 10e-6)):
        loop.turn(10e-6, works=True)
    assert tickets.looks - rested > PROBE_S / 10e-6


@pytest.mark.parametrize("seed", range(4))
def test_open_tickets_always_have_a_turn_or_a_thread_to_come(loop: Loop, seed: int) -> None:
    """A turn of the loop comes, or their thread and a probe do; without tickets nothing is left to come."""
    draw, looks = random.Random(f"looks {seed}"), Lookout()
    streams = [Tickets() for _ in range(3)]
    has_thread = dict.fromkeys(streams, False)
    for _ in range(2_000):
        for tickets in streams:
            if draw.random() < 0.02:
                tickets.is_done = False
                has_thread[tickets] = False
                looks.watch(tickets, loop.as_loop())
            elif draw.random() < 0.02:
                tickets.is_done = True
        before = {tickets: tickets.rests for tickets in streams}
        loop.turn(draw.choice([1e-6, 2e-5, 1e-4, 3e-3]), works=draw.random() < 0.5)
        for tickets in streams:
            has_thread[tickets] |= tickets.rests > before[tickets]
        for watched in looks.watched:
            assert loop.timers or loop.soon, seed
            assert loop.soon or has_thread[cast(Tickets, watched)], seed
        assert len(loop.soon) <= 1 and len(loop.timers) <= 1, seed
    for tickets in streams:
        tickets.is_done = True
    loop.idle(3 * PROBE_S)
    assert not looks.watched and not loop.soon and not loop.timers, seed


def test_a_loop_on_virtual_time_leaves_all_to_threads() -> None:
    virtual = VirtualClockLoop()
    try:
        assert lookout_of(virtual) is None
    finally:
        virtual.close()


# -- tickets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=1) as fake:
        yield fake


@pytest.fixture
async def stream(cupy: FakeCupy) -> AsyncIterator[CudaStream]:
    stream = CudaStream(cupy, 0, "cuda:0/compute")
    yield stream
    cupy.resume()
    assert await stream.aclose(PATIENCE_S)


def launch(cupy: FakeCupy, stream: CudaStream, work: Callable[[], None] = lambda: None) -> None:
    cupy.engine.give(cupy.engine.queue(stream.raw.ptr, 0), "kernel", work)


def ticket(stream: CudaStream, *holds: object) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(error: BaseException | None) -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    stream.notify(deliver, *holds)
    return future


@pytest.mark.every_loop
async def test_a_ticket_beside_a_busy_loop_takes_a_turn(cupy: FakeCupy, stream: CudaStream, work: WorkClock) -> None:
    """It waits for no thread, which does not get the GIL there."""
    for _ in range(5):
        cupy.pause()
        launch(cupy, stream)
        done = ticket(stream)
        for _ in range(20):
            await asyncio.sleep(0)
            work.work(BUSY_NS)
        assert not done.done()
        cupy.resume()
        cupy.wait_idle()
        turns = 0
        while not done.done():
            await asyncio.sleep(0)
            work.work(BUSY_NS)
            turns += 1
        assert turns == 1
    others = {name for thread, name in cupy.calls if thread != threading.get_ident()}
    assert others == set() and stream._reaper.queued == 0


async def test_an_idle_loop_sleeps_until_the_thread_wakes_it(cupy: FakeCupy, stream: CudaStream) -> None:
    cupy.pause()
    launch(cupy, stream)
    done = ticket(stream)
    await until(lambda: stream._reaper.queued > 0)

    def sleeps() -> bool:
        return "eventSynchronize" in {name for thread, name in cupy.calls if thread != threading.get_ident()}

    await until(sleeps)
    cupy.resume()
    await done


@pytest.mark.every_loop
async def test_a_lost_card_beside_a_busy_loop_ends_every_waiter(
    cupy: FakeCupy, stream: CudaStream, work: WorkClock
) -> None:
    """It writes no flag any more: a question to CUDA finds it lost."""
    cupy.pause()
    lost: list[BaseException] = []
    stream.on_lost = lost.append
    waiters = [ticket(stream) for _ in range(3)]
    await asyncio.sleep(0)
    cupy.fail_device(0)
    while not all(waiter.done() for waiter in waiters):
        await asyncio.sleep(0)
        work.work(BUSY_NS)
    assert stream._reaper.queued == 0  # no thread has found it
    (error,) = {waiter.exception() for waiter in waiters}
    assert isinstance(error, CUDARuntimeError) and lost == [error]


async def test_what_a_cancelled_waiter_held_stays_until_the_card_is_done(
    cupy: FakeCupy, stream: CudaStream, work: WorkClock
) -> None:
    class Held:
        pass

    cupy.pause()
    held = Held()
    watch = weakref.ref(held)
    launch(cupy, stream)
    waiter = ticket(stream, held)
    del held
    waiter.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
        work.work(BUSY_NS)
    assert watch() is not None
    cupy.resume()
    cupy.wait_idle()
    await ticket(stream)
    assert watch() is None


@pytest.mark.parametrize("seed", range(3))
async def test_tickets_come_once_in_order_and_after_their_work(seed: int, work: WorkClock) -> None:
    """The loop's look or the thread brings them, and a card may be lost at any moment."""
    draw = random.Random(f"tickets {seed}")
    with FakeCupy(devices=1, seed=seed) as cupy:
        stream, executed, order = CudaStream(cupy, 0, "cuda:0/compute"), list[int](), list[int]()
        failed: list[int] = []
        loses = draw.choice([None, draw.randrange(300)])

        def deliver(k: int, error: BaseException | None) -> None:
            order.append(k)
            if error is None:
                assert k in executed, seed
            else:
                failed.append(k)

        for k in range(300):
            if k == loses:
                cupy.fail_stream(stream.raw)
            launch(cupy, stream, partial(executed.append, k))
            stream.notify(partial(deliver, k))
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)
                work.work(draw.choice([1_000, BUSY_NS]))
            if draw.random() < 0.05:
                cupy.pause()
            elif draw.random() < 0.1:
                cupy.resume()
        cupy.resume()
        assert await stream.aclose(PATIENCE_S)
        assert order == [*range(300)], seed
        assert failed == [*range(failed[0], 300)] if failed else loses is None, seed
