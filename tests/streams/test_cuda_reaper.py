from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from typing import Any, cast

import pytest

from asyncflow.errors import SessionClosedError
from asyncflow.streams.cuda.pooled_event import EventPool, PooledEvent
from asyncflow.streams.cuda.reaper import MAX_BATCH, MOST_ASLEEP, Reaper, Ticket
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.engine import Kind
from tests.fake_cupy.errors import CUDARuntimeError
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.every_loop


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2) as fake:
        yield fake


class Bench:
    """A reaper with its raw stream and what its device was told."""

    def __init__(self, cupy: FakeCupy, name: str = "cuda:0/test") -> None:
        self.cupy = cupy
        self.events = EventPool(cupy)
        self.raw = cupy.cuda.Stream(non_blocking=True)
        self.lost: list[BaseException] = []
        self.reaper = Reaper(name, cupy, 0, self.raw, self.events, self.lost.append)

    def launch(self, work: Callable[[], None]) -> None:
        engine = self.cupy.engine
        engine.give(engine.queue(self.raw.ptr, 0), "kernel", work)

    def ticket(self, *holds: object) -> asyncio.Future[None]:
        """Resolves when the ticket is delivered."""
        future = asyncio.get_running_loop().create_future()
        self.reaper.give(Ticket(lambda error: resolve(future, error), holds))
        return future

    def close(self) -> None:
        self.reaper.stop()
        assert self.reaper.ended.block(PATIENCE_S)


@pytest.fixture
def bench(cupy: FakeCupy) -> Iterator[Bench]:
    made = Bench(cupy)
    yield made
    cupy.resume()
    made.close()


def resolve(future: asyncio.Future[None], error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def note(order: list[int], k: int, error: BaseException | None, then: asyncio.Event | None = None) -> None:
    assert error is None
    order.append(k)
    if then is not None:
        then.set()


class Held:
    """Something that can be watched."""


class GatedEvent(PooledEvent):
    """An event that is done, and on which a thread sleeps until a test says otherwise."""

    __slots__ = ("entered", "gate", "taken")

    def __init__(self, pool: EventPool) -> None:
        self.taken = pool.take()
        super().__init__(pool, self.taken.raw, False)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __del__(self) -> None:
        """Does nothing: ``taken`` goes back."""

    def block(self) -> None:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)


class CountingLoop:
    """A loop that counts how often it is woken."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.wakes = 0

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        self.wakes += 1
        self.loop.call_soon_threadsafe(callback)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: object, context: Context) -> object:
        return self.loop.call_later(delay_s, callback, *args, context=context)

    def as_loop(self) -> asyncio.AbstractEventLoop:
        return cast(asyncio.AbstractEventLoop, self)


async def test_tickets_are_delivered_in_order_on_the_loop(bench: Bench) -> None:
    order: list[int] = []
    here = threading.get_ident()

    def note(k: int, error: BaseException | None) -> None:
        assert threading.get_ident() == here and error is None
        order.append(k)

    for k in range(100):
        bench.launch(lambda: None)
        bench.reaper.give(Ticket(partial(note, k)))
    await bench.ticket()
    assert order == list(range(100))
    assert bench.reaper.pending == 0


async def test_a_ticket_waits_for_the_work_before_it_and_for_no_other(bench: Bench) -> None:
    bench.cupy.pause()
    bench.launch(lambda: None)
    first = bench.ticket()
    bench.launch(lambda: None)
    second = bench.ticket()
    assert bench.cupy.step(2) == 2  # a kernel and its event
    await first
    assert not second.done() and bench.reaper.pending == 1
    bench.cupy.resume()
    await second


async def test_the_loops_thread_never_blocks(bench: Bench) -> None:
    bench.cupy.pause()  # a blocking call of this thread would also fail now
    tickets = [bench.ticket() for _ in range(20)]
    bench.reaper.hold((object(),))
    bench.cupy.resume()
    await asyncio.gather(*tickets)
    bench.reaper.stop()
    assert bench.cupy.blocking() == []
    assert {name for _, name in bench.cupy.calls} == {"eventSynchronize"}


async def test_many_tickets_cost_few_sleeps_and_one_wake_up(bench: Bench) -> None:
    count, order = 2 * MAX_BATCH + 10, list[int]()
    loop, all_done = CountingLoop(), asyncio.Event()
    first = GatedEvent(bench.events)
    bench.reaper.give(Ticket(None, event=first), loop.as_loop())
    assert first.entered.wait(PATIENCE_S)
    for k in range(count):
        bench.reaper.give(Ticket(partial(note, order, k)), loop.as_loop())
    bench.cupy.wait_idle()
    first.gate.set()
    bench.reaper.stop()
    assert bench.reaper.ended.block(PATIENCE_S)  # this thread did not answer meanwhile
    assert loop.wakes == 1
    assert bench.cupy.calls == []  # nothing but the first was slept on: the rest is asked for, and was done
    loop.loop.call_soon(all_done.set)
    await all_done.wait()
    assert order == list(range(count))


async def test_more_tickets_than_there_are_events_to_sleep_on(bench: Bench) -> None:
    """On a card the 57th blocks the thread that records it, and here this test has paused the stand-in."""
    order: list[int] = []
    for _ in range(2):
        bench.cupy.pause()
        for k in range(4 * MOST_ASLEEP):
            bench.launch(lambda: None)
            bench.reaper.give(Ticket(partial(note, order, k)))
        last = bench.ticket()
        assert bench.cupy.engine.queue(bench.raw.ptr, 0).pending(Kind.SLEEPER) == MOST_ASLEEP
        bench.cupy.resume()
        await last
    assert order == [*range(4 * MOST_ASLEEP)] * 2
    bench.reaper.stop()
    assert bench.reaper.ended.block(PATIENCE_S)
    assert {name for _, name in bench.cupy.calls} == {"eventSynchronize"}


async def test_a_loop_that_answers_is_woken_for_later_tickets(bench: Bench) -> None:
    loop = CountingLoop()
    for wakes in range(1, 5):
        done = asyncio.Event()
        bench.reaper.give(Ticket(partial(note, [], 0, then=done)), loop.as_loop())
        await done.wait()
        assert loop.wakes == wakes


async def test_held_objects_are_dropped_right_before_the_call(bench: Bench) -> None:
    bench.cupy.pause()
    held, seen = Held(), list[object]()
    watch = weakref.ref(held)
    bench.reaper.give(Ticket(lambda _: seen.append(watch()), (held,)))
    del held
    last = bench.ticket()
    assert watch() is not None
    bench.cupy.resume()
    await last
    assert seen == [None]


async def test_a_cancelled_waiter_lets_nothing_go(bench: Bench) -> None:
    bench.cupy.pause()

    async def wait() -> None:
        held = Held()
        watches.append(weakref.ref(held))
        await bench.ticket(held)

    watches: list[weakref.ref[Held]] = []
    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    (watch,) = watches
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    last = bench.ticket()
    assert watch() is not None and bench.reaper.pending == 2
    bench.cupy.resume()
    await last
    assert watch() is None


async def test_objects_held_in_one_turn_of_the_loop_share_an_event(bench: Bench) -> None:
    bench.cupy.pause()
    held = [Held() for _ in range(5)]
    watches = [weakref.ref(one) for one in held]
    for one in held[:3]:
        bench.reaper.hold((one,))
    assert bench.reaper.pending == 1 and bench.cupy.pending(bench.raw) == 0
    await asyncio.sleep(0)
    assert bench.reaper.pending == 1 and bench.cupy.pending(bench.raw) == 1
    bench.reaper.hold(tuple(held[3:]))
    last = bench.ticket()  # shares its event with them
    assert bench.reaper.pending == 2 and bench.cupy.pending(bench.raw) == 2
    held.clear()
    del one
    await asyncio.sleep(0)
    assert bench.reaper.pending == 2 and all(watch() is not None for watch in watches)
    assert bench.cupy.step(1) == 1
    bench.cupy.resume()
    await last
    assert all(watch() is None for watch in watches)


async def test_an_older_event_does_not_drop_held_objects(bench: Bench) -> None:
    bench.cupy.pause()
    event = bench.reaper.record()
    bench.launch(lambda: None)
    held = Held()
    watch = weakref.ref(held)
    bench.reaper.hold((held,))
    del held
    reached = asyncio.Event()
    bench.reaper.give(Ticket(lambda _: reached.set(), event=event))
    assert bench.cupy.step(1) == 1
    await reached.wait()
    assert watch() is not None
    bench.cupy.resume()
    await bench.ticket()
    assert watch() is None


@pytest.mark.parametrize("seed", range(8))
async def test_an_error_reaches_its_ticket_and_all_later_ones(bench: Bench, seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(2, 200)
    fatal = draw.randrange(count)
    if draw.random() < 0.5:
        bench.cupy.pause()
    tickets = []
    # Earlier tickets are seen done first: what completed and what a device lost before anyone looked cannot be told.
    for _ in range(fatal):
        bench.launch(lambda: None)
        tickets.append(bench.ticket())
    bench.cupy.resume()
    if tickets:
        await tickets[-1]
    for k in range(fatal, count):
        if k == fatal:
            bench.cupy.fail_stream(bench.raw, 700)
        tickets.append(bench.ticket())
    outcomes = await asyncio.gather(*tickets, return_exceptions=True)
    assert outcomes[:fatal] == [None] * fatal
    (error,) = set(outcomes[fatal:])
    assert isinstance(error, CUDARuntimeError) and error.status == 700
    assert bench.lost == [error] and bench.reaper.lost is error
    with pytest.raises(CUDARuntimeError):
        await bench.ticket()
    with pytest.raises(CUDARuntimeError):
        bench.reaper.record()
    assert bench.lost == [error]


@pytest.mark.parametrize("call", ["eventSynchronize", "eventQuery"])
async def test_an_error_of_the_reaper_itself_counts(bench: Bench, call: str) -> None:
    first = GatedEvent(bench.events)
    bench.reaper.give(Ticket(None, event=first))
    assert first.entered.wait(PATIENCE_S)
    before = bench.ticket() if call == "eventSynchronize" else None
    bench.cupy.wait_idle()
    bench.cupy.fail_next(999, call)
    failing = bench.ticket()
    first.gate.set()
    if before is not None:
        await before  # asked for, not slept on
        bench.cupy.pause()
        failing = bench.ticket()
        bench.cupy.resume()
    with pytest.raises(CUDARuntimeError, match="unknown error"):
        await failing
    assert len(bench.lost) == 1


async def test_an_error_found_by_the_loop_reaches_pending_tickets_in_order(bench: Bench) -> None:
    bench.cupy.pause()
    order: list[tuple[int, object]] = []
    done = asyncio.Event()

    def tell(k: int, error: BaseException | None) -> None:
        order.append((k, error))
        if k == 3:
            done.set()

    for k in range(3):
        bench.reaper.give(Ticket(partial(tell, k)))
    bench.cupy.fail_next(700, "eventRecord")
    bench.reaper.give(Ticket(partial(tell, 3)))
    error = bench.reaper.lost
    assert error is not None and bench.lost == [error]
    assert order == []  # never called from inside `give`
    await done.wait()
    assert order == [(k, error) for k in range(4)]


async def test_the_device_is_told_before_the_tickets(bench: Bench) -> None:
    order: list[str] = []
    bench.reaper.on_lost = lambda error: order.append(f"lost, {error.__traceback__} refers to frames")
    bench.cupy.fail_stream(bench.raw)
    bench.reaper.give(Ticket(lambda error: order.append("ticket")))
    with pytest.raises(CUDARuntimeError):
        await bench.ticket()
    assert order == ["lost, None refers to frames", "ticket"]


async def test_an_error_keeps_nothing_alive(bench: Bench) -> None:
    bench.cupy.pause()
    held = [Held() for _ in range(3)]
    watches = [weakref.ref(one) for one in held]
    bench.cupy.fail_stream(bench.raw)
    tickets = [bench.ticket(held.pop()) for _ in range(2)]
    bench.cupy.resume()
    assert [type(error) for error in await asyncio.gather(*tickets, return_exceptions=True)] == [CUDARuntimeError] * 2
    await asyncio.wait([bench.ticket(held.pop())])
    assert [watch() for watch in watches] == [None] * 3


async def test_a_notice_that_raises_does_not_lose_the_others(bench: Bench) -> None:
    loop, seen = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    error, first = ValueError("notice"), GatedEvent(bench.events)

    def fail(_: BaseException | None) -> None:
        raise error

    order: list[int] = []
    bench.reaper.give(Ticket(fail, event=first))
    for k in range(3):
        bench.reaper.give(Ticket(partial(note, order, k)))
    last = bench.ticket()
    bench.cupy.wait_idle()
    first.gate.set()
    await last
    assert seen == [error] and order == [0, 1, 2]


async def test_events_are_used_again_after_delivery_and_not_before(bench: Bench) -> None:
    bench.cupy.pause()
    tickets = [bench.ticket() for _ in range(10)]
    bench.cupy.resume()
    bench.cupy.wait_idle()
    assert len(bench.events) == 0  # all are done, and none is delivered
    await asyncio.gather(*tickets)
    bench.close()
    bench.reaper.settle()
    assert len(bench.events) == 10  # the end took one of them


async def test_a_steady_stream_of_tickets_needs_few_events(bench: Bench) -> None:
    for _ in range(50):
        await bench.ticket()
    # The thread may hold the last one's event a moment longer.
    assert len(bench.cupy.cuda.runtime._events) <= 3


async def test_a_stopped_reaper_takes_nothing_and_completes_its_tickets(bench: Bench) -> None:
    bench.cupy.pause()
    done = list[int]()
    tickets = [bench.ticket() for _ in range(5)]
    bench.launch(lambda: done.append(1))  # nobody asked for its end
    bench.reaper.stop()
    bench.reaper.stop()
    for use in (bench.ticket, lambda: bench.reaper.hold((1,))):
        with pytest.raises(SessionClosedError, match="stream cuda:0/test is closed"):
            use()
    assert not bench.reaper.ended.done()
    bench.cupy.resume()
    await bench.reaper.ended.wait()
    bench.reaper.settle()
    assert all(ticket.done() for ticket in tickets) and done == [1]


async def test_tickets_on_their_way_when_the_thread_ends_are_delivered(bench: Bench) -> None:
    tickets = [bench.ticket() for _ in range(5)]
    bench.close()  # this thread answers no wake-up meanwhile
    assert not any(ticket.done() for ticket in tickets)
    bench.reaper.settle()
    assert all(ticket.done() for ticket in tickets)


async def test_stopping_gives_a_ticket_to_held_objects(bench: Bench) -> None:
    held = Held()
    watch = weakref.ref(held)
    bench.reaper.hold((held,))
    del held
    bench.reaper.stop()
    await bench.reaper.ended.wait()
    bench.reaper.settle()
    assert watch() is None and bench.reaper.pending == 0


def test_an_idle_reaper_ends_without_a_thread(bench: Bench) -> None:
    bench.reaper.stop()
    assert bench.reaper.ended.done() and not bench.reaper.is_used
    assert "asyncflow:cuda:0/test" not in {thread.name for thread in threading.enumerate()}


def test_a_reaper_outlives_the_loop_that_had_tickets(bench: Bench) -> None:
    bench.cupy.pause()
    called, held = list[int](), [Held(), Held()]
    watches = [weakref.ref(one) for one in held]

    async def leave() -> None:
        bench.reaper.give(Ticket(lambda _: called.append(1), (held.pop(),)))
        bench.reaper.hold((held.pop(),))

    asyncio.run(leave())
    assert all(watch() is not None for watch in watches)

    async def again() -> None:
        ticket = bench.ticket()
        bench.cupy.resume()
        await ticket

    asyncio.run(again())
    assert called == [] and [watch() for watch in watches] == [None, None]
    assert bench.reaper.pending == 0


def test_tickets_that_were_posted_to_a_loop_which_then_closed_are_dropped(bench: Bench) -> None:
    held = Held()
    watch = weakref.ref(held)
    first = GatedEvent(bench.events)
    called = list[int]()
    loop = asyncio.new_event_loop()

    class Posted:
        """A loop that is closed as soon as it was woken, without an answer."""

        closed = threading.Event()

        def is_closed(self) -> bool:
            return self.closed.is_set()

        def call_later(self, *_timer: object, **_options: object) -> None:
            """Ignore timers: this loop never runs."""

        def call_soon_threadsafe(self, callback: object) -> None:
            woken.set()

    woken, posted = threading.Event(), Posted()
    bench.reaper.give(Ticket(lambda _: called.append(1), (held,), first), cast(Any, posted))
    del held
    first.gate.set()
    assert woken.wait(PATIENCE_S) and watch() is not None
    posted.closed.set()

    async def again() -> None:
        await bench.ticket()

    loop.run_until_complete(again())
    loop.close()
    assert called == [] and watch() is None and bench.reaper.pending == 0


async def test_a_different_loop_is_refused_while_tickets_are_pending(bench: Bench) -> None:
    bench.cupy.pause()
    ticket = bench.ticket()
    other = asyncio.new_event_loop()
    with pytest.raises(RuntimeError, match=r"cuda:0/test is used on a different loop while 1 of its tickets"):
        bench.reaper.give(Ticket(None), other)
    bench.cupy.resume()
    await ticket
    bench.reaper.give(Ticket(None), other)
    other.close()


@pytest.mark.parametrize("seed", range(3))
async def test_stress(cupy: FakeCupy, seed: int) -> None:
    """2,000 tickets of three streams, some without a waiter any more: each is delivered once and in order."""
    draw = random.Random(seed)
    benches = [Bench(cupy, f"cuda:0/{k}") for k in range(3)]
    executed: list[list[int]] = [[], [], []]
    delivered: list[list[int]] = [[], [], []]
    held: list[weakref.ref[Held]] = []
    waiting: list[asyncio.Future[None]] = []

    def finish(which: int, number: int, future: asyncio.Future[None], error: BaseException | None) -> None:
        assert error is None and number in executed[which]
        delivered[which].append(number)
        resolve(future, error)

    for number in range(2000):
        which = draw.randrange(3)
        bench = benches[which]
        bench.launch(partial(executed[which].append, number))
        one, future = Held(), asyncio.get_running_loop().create_future()
        held.append(weakref.ref(one))
        if draw.random() < 0.2:
            bench.reaper.hold((one,))
            one = Held()
        bench.reaper.give(Ticket(partial(finish, which, number, future), (one,)))
        del one
        if draw.random() < 0.1:
            future.cancel()
        else:
            waiting.append(future)
        if draw.random() < 0.05:
            await asyncio.sleep(0)
        if draw.random() < 0.01 and waiting:
            await draw.choice(waiting)
    await asyncio.gather(*waiting)
    for bench in benches:
        bench.close()
        bench.reaper.settle()
        assert bench.reaper.pending == 0
    assert sum(map(len, delivered)) == 2000
    assert delivered == executed == [sorted(numbers) for numbers in delivered]
    assert not [watch for watch in held if watch() is not None]
    assert cupy.blocking() == []
