"""Fault F3, F18, F27, F28, F50 and F61 for queues: thousands of schedules, each element in one place at the end."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import asyncflow as af
from asyncflow.devices.machine.hardware import usable_cores
from asyncflow.runtime.gates import admission
from asyncflow.state.elements import queue as queue_module
from asyncflow.state.elements import queue_ops
from asyncflow.state.waiting import awaiting
from asyncflow.streams.virtual import VirtualClockLoop
from tests.conftest import assert_baseline
from tests.faults.kernels import DEADLINES_S, INT, CoroutineGate, raising, ticks, until
from tests.patience import PATIENCE_S
from tests.state.queue_kinds import KINDS, QueueKind

Run = Callable[..., Awaitable[Any]]

MIXED = QueueKind(lambda capacity, spec, name: af.ShuffleQueue(capacity, spec, capacity // 3, seed=1, name=name))
ALL_KINDS = {**KINDS, "mixed": MIXED}
END_S = 1000.0
"""Virtual time after which every run must have been served or must have failed."""


class Schedule:
    """Producers and consumers on one queue, with timeouts, cancels and a close, at moments that a seed draws.

    Attributes:
        put: elements whose put has returned, in that order.
        got: elements taken, in that order.
    """

    def __init__(self, seed: int, kind: str, faults: float) -> None:
        self.random = random.Random(seed)
        self.kind = ALL_KINDS[kind]
        self.queue = self.kind.make(self.random.randint(1, 5), INT, "q")
        self.faults = faults
        self.put: list[int] = []
        self.got: list[int] = []
        self.next = 0

    async def run(self) -> None:
        draw = self.random
        async with asyncio.timeout(END_S), asyncio.TaskGroup() as group:
            producers = [group.create_task(self._repeat(self._produce)) for _ in range(draw.randint(1, 4))]
            consumers = [group.create_task(self._repeat(self._consume)) for _ in range(draw.randint(1, 4))]
            await asyncio.sleep(draw.uniform(0, 4))
            for task in (*producers, *consumers):
                if draw.random() < self.faults:
                    task.cancel()
            await asyncio.sleep(draw.uniform(0, 1))
            self.queue.close_nowait(cancel_pending=draw.random() < 0.5)
            with suppress(af.QueueClosedError):  # those who wait for room go in as there is some
                while True:
                    self._take(await self.queue.get_up_to(draw.randint(1, 3)))

    async def _repeat(self, act: Callable[[], Awaitable[None]]) -> None:
        with suppress(af.QueueClosedError):
            while True:
                await asyncio.sleep(self.random.choice((0, 0.1, 1)))
                limit = self.random.uniform(0, 2) if self.random.random() < self.faults else None
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit):
                        await act()

    async def _produce(self) -> None:
        count = self.random.choice((1, 1, 1, 2, 3))
        elements = list(range(self.next, self.next + count))
        self.next += count
        await self.queue.put_many([self.kind.element(each, each) for each in elements])
        self.put.extend(elements)

    async def _consume(self) -> None:
        way, count = self.random.choice(("get", "many", "up_to")), self.random.randint(1, 4)
        if way == "get":
            self.got.append(int(self.kind.value(await self.queue.get())))
            return
        self._take(await (self.queue.get_many(count) if way == "many" else self.queue.get_up_to(count)))

    def _take(self, found: Any) -> None:
        self.got.extend(int(x) for x in self.kind.values(found))

    def check(self) -> None:
        assert self.queue.size_nowait() == 0
        assert sorted(self.got) == sorted(self.put)
        if isinstance(self.queue, af.FIFOQueue):
            assert self.got == self.put


async def schedules(seeds: range, kind: str, faults: float) -> int:
    count = 0
    async with af.Session(af.Graph(), devices=["cpu:0"]) as session:
        for seed in seeds:
            schedule = Schedule(seed, kind, faults)
            try:
                await schedule.run()
                schedule.check()
            except BaseException as error:
                error.add_note(f"schedule {seed} of {kind}")
                raise
            count += len(schedule.got)
        assert_baseline(session)
    return count


@pytest.fixture
def copies_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element is a large one, whose copy takes some virtual time, as if a thread made it."""
    draw = random.Random(0)
    monkeypatch.setattr(queue_ops, "LARGE_BYTES", 0)
    monkeypatch.setattr(queue_module, "LARGE_BYTES", 0)
    monkeypatch.setattr(awaiting, "_beside", [lambda loop, work: loop.call_later(draw.choice((0, 0.3, 2)), work)])


def on_virtual_time(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_element_once_in_any_schedule(kind: str) -> None:
    """Behaviour 78, Fault F18, F50: in the promised order, and no run waits for ever."""
    assert on_virtual_time(schedules(range(20), kind, 0.3)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_each_element_once_in_thousands_of_schedules(part: int) -> None:
    """Behaviour 78, Fault F18, F50, F61: 10^4 of them, of which some have hardly a fault, as in production."""
    for number, kind in enumerate(ALL_KINDS):
        seeds = range(1000 * part + number, 1000 * (part + 1), len(ALL_KINDS))
        assert on_virtual_time(schedules(seeds, kind, 0.01 + part / 10)) > 0


@pytest.mark.usefixtures("copies_take_time")
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_large_element_once_in_any_schedule(kind: str) -> None:
    """Behaviour 78, Fault F18, F50: the same where cancels, timeouts and a close come while elements are copied."""
    assert on_virtual_time(schedules(range(20), kind, 0.3)) > 50


@pytest.mark.slow
@pytest.mark.usefixtures("copies_take_time")
@pytest.mark.parametrize("part", range(10))
def test_each_large_element_once_in_thousands_of_schedules(part: int) -> None:
    """Behaviour 78, Fault F18, F50, F61: 10^4 of them."""
    for number, kind in enumerate(ALL_KINDS):
        seeds = range(20_000 + 1000 * part + number, 20_000 + 1000 * (part + 1), len(ALL_KINDS))
        assert on_virtual_time(schedules(seeds, kind, 0.01 + part / 10)) > 0


async def _runs(seed: int) -> None:
    """The same with runs of a session for producers and consumers, which time out and are cancelled."""
    draw = random.Random(seed)
    queue = af.FIFOQueue(draw.randint(1, 3), INT, name="q")
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        put, take, many = queue.enqueue(x), queue.dequeue(), queue.dequeue_many(2)
        close = queue.close(cancel_pending=True)
    put_in, got, unsure = list[int](), list[int](), set[int]()
    async with af.Session(graph, devices=["cpu:0"], seed=seed) as session:

        async def produce(k: int) -> None:
            await asyncio.sleep(draw.uniform(0, 3))
            try:
                await session.run(put, {x: k}, timeout=draw.choice((None, 0.5, 3.0)))
                put_in.append(k)
            except asyncio.CancelledError:
                unsure.add(k)  # it may have gone in as the cancel came

        async def consume(fetch: Any) -> None:
            await asyncio.sleep(draw.uniform(0, 3))
            found = await session.run(fetch, timeout=draw.choice((None, 0.5, 3.0)))
            got.extend([int(found)] if fetch is take else [int(each) for each in found])

        tasks = [asyncio.ensure_future(produce(k)) for k in range(30)]
        tasks += [asyncio.ensure_future(consume(draw.choice((take, take, many)))) for _ in range(20)]
        await asyncio.sleep(2)
        for task in draw.sample(tasks, 5):
            task.cancel()
        await asyncio.sleep(5)
        await session.run(close)
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), END_S)
        expected = (type(None), asyncio.CancelledError, af.DeadlineExceeded, af.QueueClosedError)
        assert all(isinstance(each, expected) for each in ended), ended
        while left := queue.size_nowait():
            got.extend(int(each) for each in await queue.get_up_to(left))
        assert len(set(got)) == len(got)
        lost = set(put_in) - set(got)
        # What a run had taken when it was cancelled is gone with it, and with nothing else.
        assert len(lost) <= 2 * sum(isinstance(each, asyncio.CancelledError) for each in ended[30:])
        assert set(got) <= set(put_in) | unsure
        assert_baseline(session)


def test_runs_in_any_schedule() -> None:
    for seed in range(4):
        on_virtual_time(_runs(seed))


@pytest.mark.usefixtures("copies_take_time")
def test_runs_of_large_elements_in_any_schedule() -> None:
    for seed in range(100, 104):
        on_virtual_time(_runs(seed))


@pytest.mark.slow
def test_runs_in_hundreds_of_schedules() -> None:
    for seed in range(8, 100):
        on_virtual_time(_runs(seed))


async def _limited(seed: int, max_runs: Any = None) -> None:
    """Runs that take, put and pass on, in a session for few at a time: whoever is not cancelled ends, in any order."""
    draw = random.Random(seed)
    first, second = (af.FIFOQueue(draw.randint(1, 3), INT, name=name) for name in ("first", "second"))
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        put = first.enqueue(x)
        passed = second.enqueue(first.dequeue() + 0)
        two = af.while_loop(lambda i: i < 2, lambda i: (second.enqueue(first.dequeue()), i + 1)[1], 0)
        taken = second.dequeue() + 0
    got: list[int] = []
    options: dict[str, Any] = {"regions": draw.random() < 0.5, "max_runs": max_runs or draw.randint(1, 3)}
    async with af.Session(graph, devices=["cpu:0"], seed=seed, **options) as session:

        async def ask(fetch: Any, feeds: Any = None) -> None:
            await asyncio.sleep(draw.uniform(0, 3))
            found = await session.run(fetch, feeds, priority=draw.randint(0, 2))
            if fetch is taken:
                got.append(int(found))

        tasks = [asyncio.ensure_future(ask(put, {x: k})) for k in range(30)]
        tasks += [asyncio.ensure_future(ask(fetch)) for fetch in (*[passed] * 10, *[two] * 10, *[taken] * 30)]
        extra = [asyncio.ensure_future(ask(draw.choice((passed, taken)))) for _ in range(10)]
        await asyncio.sleep(draw.uniform(0.5, 3))
        for task in extra:
            task.cancel()
        ended = await asyncio.gather(*extra, return_exceptions=True)
        lost = sum(not isinstance(each, asyncio.CancelledError) for each in ended)  # these took, or passed on
        for _ in range(2 * lost):
            tasks += [asyncio.ensure_future(ask(put, {x: 100 + len(tasks)})), asyncio.ensure_future(ask(passed))]
        done, left = await asyncio.wait(tasks, timeout=END_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        # At most the runs in excess of what the others gave them wait for ever.
        assert len(left) <= 4 * lost, (seed, len(left), lost)
        assert all(task.exception() is None for task in done)
        assert len(set(got)) == len(got) >= 30 - lost
        assert session._runs.admission is not None
        assert not any(queue.aside or queue.overdue for queue in session._runs.admission.queues.values())
        assert_baseline(session)


@pytest.mark.parametrize("max_runs", [None, "auto"])
def test_runs_that_wait_in_a_session_for_few_at_a_time(max_runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_SPARE_PLACES", 1 - usable_cores())  # one place with "auto"
    for seed in range(10):
        on_virtual_time(_limited(seed, max_runs))


@pytest.mark.slow
def test_runs_that_wait_in_hundreds_of_sessions_for_few_at_a_time() -> None:
    for seed in range(10, 200):
        on_virtual_time(_limited(seed))


# -- single faults ---------------------------------------------------------------------------------------------------


async def test_an_interpreter_exit_ends_waiting_callers(session: af.Session, graph: af.Graph) -> None:
    """Fault F3: the dequeue of the same run gives up its place, and the next in line is served."""
    queue = af.FIFOQueue(3, INT, name="q")
    with pytest.raises(SystemExit):
        await session.run((queue.dequeue(), raising(SystemExit, on_thread=True)(1)))
    waiting = asyncio.ensure_future(session.run(queue.dequeue()))
    await session.run(queue.enqueue(1))
    assert await waiting == 1


@pytest.mark.every_loop
async def test_cancelled_in_each_pass_of_the_loop() -> None:
    """Fault F18: whenever the cancel comes, an element is taken by the run that ends with it, or is still there."""
    queue = af.FIFOQueue(3, INT, name="q")
    with af.Graph() as graph:
        take = queue.dequeue()
    async with af.Session(graph, devices=["cpu:0"]) as session:
        outcomes = set()
        for passes in range(8):
            await asyncio.sleep(0)
            task = asyncio.ensure_future(session.run(take))
            await ticks(passes)
            await queue.put(passes)
            await ticks(passes % 3)
            task.cancel()
            try:
                assert await task == passes
                outcomes.add("taken")
            except asyncio.CancelledError:
                outcomes.add("cancelled")
                # It was taken if the run had gone on with it; nobody else has it then.
                if queue.size_nowait():
                    assert await queue.get() == passes
            assert queue.size_nowait() == 0
            assert_baseline(session)
        assert "taken" in outcomes


def test_a_child_process_does_not_wait() -> None:
    """Fault F27: places in line of the parent's are none of the child's; the parent goes on."""
    queue = af.FIFOQueue(1, INT, name="q", container="forked")

    async def child() -> bool:
        async with asyncio.timeout(PATIENCE_S):
            await queue.put(5)
            return bool(await queue.get() == 5)

    async def main() -> None:
        waiting = asyncio.ensure_future(queue.get())
        await ticks(3)
        pid = os.fork()
        if pid == 0:
            asyncio.events._set_running_loop(None)
            with suppress(BaseException):
                os._exit(0 if asyncio.new_event_loop().run_until_complete(child()) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0  # noqa: ASYNC222 - the child waits for nobody
        await queue.put(1)
        assert await waiting == 1

    try:
        asyncio.run(main())
    finally:
        af.reset_container("forked")


def test_an_interrupt_ends_waiting_callers() -> None:
    """Fault F28: SIGINT while a run waits; the queue of the container can be used by the next event loop."""
    queue = af.FIFOQueue(1, INT, name="q", container="interrupted")
    with af.Graph() as graph:
        take = queue.dequeue()

    async def main() -> None:
        async with af.Session(graph) as session:
            waiting = asyncio.ensure_future(session.run(take))
            await ticks(3)
            signal.raise_signal(signal.SIGINT)
            await waiting

    async def after() -> Any:
        await queue.put(3)
        return await queue.get()

    # In the background of a shell it is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
        assert asyncio.run(after()) == 3
    finally:
        signal.signal(signal.SIGINT, before)
        af.reset_container("interrupted")


async def test_nothing_is_left_of_callers_that_gave_up(session: af.Session, graph: af.Graph) -> None:
    """Fault F61: places, runs and elements of a thousand runs that were cancelled or late are gone."""
    queue = af.FIFOQueue(3, INT, name="q")
    take = queue.dequeue()
    for _ in range(100):
        tasks = [asyncio.ensure_future(session.run(take)) for _ in range(10)]
        await ticks(2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    state = session.state.lookup(queue)
    assert state.places() == []
    assert not state.to_wake
    assert_baseline(session)
    gc.collect()
    await queue.put(1)
    assert await session.run(take) == 1


async def test_a_trace_shows_the_waiting_runs(session: af.Session, graph: af.Graph) -> None:
    """A firing that waited is as long as its wait, and any other is short; a firing that gave up says so."""
    queue = af.FIFOQueue(3, INT, name="q")
    take, trace = queue.dequeue(), af.Trace()
    task = asyncio.ensure_future(session.run(take, trace=trace))
    await ticks(50)
    await queue.put(1)
    await task
    await queue.put(2)
    await session.run(take, trace=trace)
    for timeout in DEADLINES_S:
        with pytest.raises(af.DeadlineExceeded):
            await session.run(take, trace=trace, timeout=timeout)
        if trace.firings[-1].status == "cancelled":
            break
    firings = [firing for firing in trace.firings if firing.op == "dequeue" and firing.stream in ("async", "inline")]
    assert [firing.status for firing in firings] == ["ok", "ok", "cancelled"]
    assert firings[0].stream == "async"
    assert firings[0].awaiting_ns >= firings[0].computing_ns == 0


# -- loops that wait as a whole ----------------------------------------------------------------------------------------


def _filling(queue: af.Queue, n: Any) -> af.Tensor:
    def body(i: Any) -> Any:
        queue.enqueue(i)
        return i + 1

    return af.while_loop(lambda i: i < n, body, (0,), name="fill")[0]


def _draining(queue: af.Queue, n: Any) -> af.Tensor:
    return af.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s * 3 + queue.dequeue()), (0, 0), name="drain")[1]


@pytest.mark.parametrize("end", ["timeout", "cancel", "failure", "close"])
async def test_a_loop_that_waits_is_stopped(session: af.Session, graph: af.Graph, end: str) -> None:
    """Fault F18: its elements are in the queue, it has put in no more, and the next producer is served."""
    queue = af.FIFOQueue(3, INT, name="q")
    fill = _filling(queue, 10)
    if end == "timeout":
        told = ""
        for timeout in DEADLINES_S:
            while queue.size_nowait():
                await queue.get()
            with pytest.raises(af.DeadlineExceeded) as caught:
                await session.run(fill, timeout=timeout)
            told = str(caught.value)
            if "3 of 3 elements" in told:
                break
        assert "fill/body/q/enqueue: enqueue of queue 'q' (3 of 3 elements" in told
    elif end == "failure":
        gate = CoroutineGate()

        async def open_once_full() -> None:
            await until(lambda: queue.size_nowait() == 3)
            gate.opened.set()

        opening = asyncio.ensure_future(open_once_full())
        with pytest.raises(SystemExit):
            await session.run((fill, raising(SystemExit, on_thread=True)(gate.op(1))))
        await opening
    else:
        task = asyncio.ensure_future(session.run(fill))
        await until(lambda: queue.size_nowait() == 3)
        await ticks(3)
        if end == "cancel":
            task.cancel()
        else:
            queue.close_nowait(cancel_pending=True)
        with pytest.raises(asyncio.CancelledError if end == "cancel" else af.QueueClosedError):
            await task
    assert_baseline(session)
    puts = [] if end == "close" else [asyncio.ensure_future(queue.put(7))]
    assert [int(x) for x in await queue.get_many(3)] == [0, 1, 2]
    await asyncio.gather(*puts)
    assert [int(await queue.get()) for _ in puts] == [7] * len(puts)
    assert queue.size_nowait() == 0


async def test_loops_cancelled_in_each_pass_of_the_loop(session: af.Session, graph: af.Graph) -> None:
    """Fault F18: whenever the cancel comes, a draining loop has taken from the front, and the next one goes on
    there.
    """
    queue = af.FIFOQueue(2, INT, name="q")
    fill, drain = _filling(queue, 40), _draining(queue, 10**6)
    for passes in range(6):
        draining = asyncio.ensure_future(session.run(drain))
        filling = asyncio.ensure_future(session.run(fill))
        await ticks(passes)
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        left = []
        while not filling.done() or queue.size_nowait():
            left += [int(x) for x in await queue.get_up_to(queue.size_nowait())] if queue.size_nowait() else []
            await asyncio.sleep(0)
        assert left == list(range(40 - len(left), 40))
        assert_baseline(session)


@pytest.mark.parametrize("capacity", [1, 3, 100])
async def test_loops_of_two_runs_hand_over(session: af.Session, graph: af.Graph, capacity: int) -> None:
    """Each element in its place, however often the two wait for one another, and whoever begins."""
    queue = af.FIFOQueue(capacity, INT, name="q")
    fill, drain = _filling(queue, 30), _draining(queue, 30)
    expected = 0
    for k in range(30):
        expected = expected * 3 + k
    expected = (expected + 2**63) % 2**64 - 2**63
    for fetches in ([fill, drain], [drain, fill]):
        found = await asyncio.gather(*[session.run(fetch) for fetch in fetches])
        assert sorted(found) == sorted([30, expected])
    assert await session.run((drain, fill)) == (expected, 30)
    assert_baseline(session)
