"""The virtual clock: exact, deterministic, still while threads work, and never silently stuck."""

from __future__ import annotations

import asyncio
import contextvars
import math
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import until
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")


@pytest.fixture
def loop() -> Iterator[VirtualClockLoop]:
    made = VirtualClockLoop()
    yield made
    made.close()


def run(main: Coroutine[Any, Any, T], *, on_tick: Callable[[int], None] | None = None, debug: bool = False) -> T:
    """Run `main` on a virtual loop of its own, and clean up as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=VirtualClockLoop, debug=debug) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualClockLoop)
        loop.on_tick = on_tick
        return runner.run(main)


def clock() -> VirtualClockLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    return loop


# -- time --------------------------------------------------------------------------------------------------------


def test_time_begins_at_zero_and_jumps(loop: VirtualClockLoop) -> None:
    assert (loop.time(), loop.time_ns(), loop.ticks) == (0.0, 0, 0)
    loop.run_until_complete(asyncio.sleep(86_400))
    assert (loop.time(), loop.time_ns(), loop.ticks) == (86_400.0, 86_400_000_000_000, 1)


def test_time_may_begin_later() -> None:
    loop = VirtualClockLoop(start_ns=5_000_000_001)
    loop.run_until_complete(asyncio.sleep(1))
    assert loop.time_ns() == 6_000_000_001
    loop.close()


def test_ready_callbacks_take_no_time(loop: VirtualClockLoop) -> None:
    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert (loop.time_ns(), loop.ticks) == (0, 0)


def test_timers_run_in_order_of_time_then_of_scheduling(loop: VirtualClockLoop) -> None:
    ran: list[tuple[str, int]] = []

    def note(name: str) -> None:
        ran.append((name, loop.time_ns()))

    loop.call_at_ns(30, note, "last")
    loop.call_at_ns(20, note, "b")
    loop.call_at_ns(10, note, "a")
    loop.call_at(20e-9, note, "c")
    loop.call_later(20e-9, note, "d")
    loop.call_at_ns(30, loop.stop)
    loop.run_forever()
    assert ran == [("a", 10), ("b", 20), ("c", 20), ("d", 20), ("last", 30)]
    assert loop.ticks == 3


def test_past_timers_run_now_without_a_tick(loop: VirtualClockLoop) -> None:
    ran: list[int] = []

    async def main() -> None:
        await asyncio.sleep(1)
        for when_ns in (5, 0, -3, loop.time_ns()):
            loop.call_at_ns(when_ns, ran.append, when_ns)
        loop.call_later(-0.5, ran.append, -1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run_until_complete(main())
    assert ran == [-3, 0, 5, -1, 1_000_000_000]
    assert loop.ticks == 1


@given(st.lists(st.integers(0, 2**52), min_size=1, max_size=20))
def test_nanoseconds_are_exact(moments: list[int]) -> None:
    loop = VirtualClockLoop()
    ran: list[tuple[int, int]] = []

    def note(moment: int) -> None:
        ran.append((moment, loop.time_ns()))

    for moment in moments:
        loop.call_at_ns(moment, note, moment)
    loop.call_at_ns(max(moments), loop.stop)
    loop.run_forever()
    assert ran == [(moment, moment) for moment in sorted(moments)]
    assert loop.ticks == len(set(moments) - {0})
    loop.close()


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_float_timers_are_never_early_nor_a_nanosecond_late(moments: list[float]) -> None:
    loop = VirtualClockLoop()
    ran: list[tuple[float, float]] = []

    def note(moment: float) -> None:
        ran.append((moment, loop.time()))

    for moment in moments:
        loop.call_at(moment, note, moment)
    loop.call_at(max(moments) + 1, loop.stop)
    loop.run_forever()
    assert len(ran) == len(moments)
    assert all(moment <= now < moment + 1.001e-9 for moment, now in ran)
    assert [now for _, now in ran] == sorted(now for _, now in ran)
    loop.close()


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=50))
def test_delays_add_up_without_drift(delays: list[int]) -> None:
    async def main() -> int:
        for delay in delays:
            await asyncio.sleep(delay / 1e9)
        return clock().time_ns()

    assert run(main()) == sum(delays)


def test_rounding_errors_of_floats_are_no_extra_nanosecond() -> None:
    async def main() -> tuple[int, float]:
        await asyncio.sleep(0.2)
        loop = clock()
        reached = loop.create_future()
        loop.call_at(loop.time() + 0.1, reached.set_result, None)  # 0.30000000000000004
        await reached
        return loop.time_ns(), loop.time()

    assert run(main()) == (300_000_000, 0.30000000000000004)


def test_ever_smaller_steps_reach_their_deadline() -> None:
    async def main() -> int:
        loop, steps = clock(), 0
        deadline = 1 / 3
        while (left := deadline - loop.time()) > 0:
            await asyncio.sleep(left / 2)
            steps += 1
        return steps

    assert run(main()) < 100


# -- timers as asyncio has them ----------------------------------------------------------------------------------


def test_cancelled_timers_never_run_and_cost_no_tick(loop: VirtualClockLoop) -> None:
    ran: list[str] = []
    loop.call_later(1, ran.append, "cancelled").cancel()
    loop.call_later(2, ran.append, "kept")
    late = loop.call_later(3, ran.append, "cancelled when due")
    loop.call_at(3, loop.stop)

    def cancel_at_three(now_ns: int) -> None:
        if now_ns == 3_000_000_000:
            late.cancel()

    loop.on_tick = cancel_at_three
    loop.run_forever()
    assert ran == ["kept"]
    assert loop.ticks == 2


def test_cancelled_timers_do_not_pile_up(loop: VirtualClockLoop) -> None:
    async def main() -> None:
        # Those that are kept are due first, so that no cancelled one comes to the top.
        kept = [loop.call_later(1 + i, int) for i in range(10)]
        for _ in range(10_000):
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
        assert len(loop._timers) < 300
        for timer in kept:
            timer.cancel()
            timer.cancel()
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert loop.time() == 1.0


def test_cancelled_timers_are_counted_once_while_they_wait(loop: VirtualClockLoop) -> None:
    def check() -> None:
        assert loop._cancelled == sum(timer.cancelled() for _, _, timer in loop._timers)

    async def main() -> None:
        old = [loop.call_later(1, int) for _ in range(50)]
        await asyncio.sleep(1)
        for timer in old:
            timer.cancel()
        check()
        waiting = [loop.call_later(1, int) for _ in range(50)]
        for timer in waiting[:20]:
            timer.cancel()
            timer.cancel()
        check()
        await asyncio.sleep(0.5)
        check()
        await asyncio.sleep(1)
        check()
        assert loop._cancelled == 0

    loop.run_until_complete(main())


def test_handles_tell_when(loop: VirtualClockLoop) -> None:
    assert loop.call_at_ns(1_500_000_000, int).when() == 1.5
    assert loop.call_later(2, int).when() == 2.0


def test_timers_keep_their_context(loop: VirtualClockLoop) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    context = contextvars.copy_context()
    context.run(variable.set, "given")
    seen: list[str] = []

    def look() -> None:
        seen.append(variable.get())

    loop.call_at_ns(1, look, context=context)
    loop.call_later(2e-9, look, context=context)
    loop.call_at(3e-9, look, context=context)
    loop.call_at_ns(4, look)
    loop.call_at_ns(5, loop.stop)
    loop.run_forever()
    assert seen == ["given", "given", "given", "unset"]


def test_closed_loop_takes_no_timer() -> None:
    loop = VirtualClockLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, int)


def test_debug_mode_refuses_timers_from_other_threads() -> None:
    async def main() -> None:
        loop = clock()
        await asyncio.to_thread(lambda: loop.call_later(1, int))

    with pytest.raises(RuntimeError, match="Non-thread-safe operation"):
        run(main(), debug=True)


@pytest.mark.parametrize("seconds", [math.nan, "1"])
def test_a_delay_that_is_no_number_is_refused(loop: VirtualClockLoop, seconds: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        loop.call_later(seconds, int)


# -- coroutines --------------------------------------------------------------------------------------------------


def test_gather_and_task_groups_overlap() -> None:
    async def main() -> tuple[float, float]:
        await asyncio.gather(asyncio.sleep(3), asyncio.sleep(5), asyncio.sleep(1))
        gathered = clock().time()
        async with asyncio.TaskGroup() as group:
            for delay in (2, 4):
                group.create_task(asyncio.sleep(delay))
        return gathered, clock().time()

    assert run(main()) == (5.0, 9.0)


def test_timeouts_pass_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.sleep(10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.5)
        async with asyncio.timeout(3):
            await asyncio.sleep(1)
        return clock().time()

    assert run(main()) == 3.5


def test_two_runs_are_the_same() -> None:
    async def worker(name: int, log: list[tuple[int, int]], queue: asyncio.Queue[int]) -> None:
        for i in range(20):
            await asyncio.sleep((name * 7 + i * 3) % 5 / 1e6)
            queue.put_nowait(name)
            log.append((await queue.get(), clock().time_ns()))

    async def main() -> list[tuple[int, int]]:
        log: list[tuple[int, int]] = []
        queue: asyncio.Queue[int] = asyncio.Queue()
        await asyncio.gather(*(worker(name, log, queue) for name in range(5)))
        return log

    first = run(main())
    assert len(first) == 100
    assert all(run(main()) == first for _ in range(3))


def test_on_tick_sees_every_tick_before_its_timers(loop: VirtualClockLoop) -> None:
    events: list[tuple[str, int]] = []

    def note(name: str) -> None:
        events.append((name, loop.time_ns()))

    def on_tick(now_ns: int) -> None:
        assert now_ns == loop.time_ns()
        note("tick")
        loop.call_soon(note, "from the tick")

    loop.on_tick = on_tick
    for when_ns in (10, 20, 20):
        loop.call_at_ns(when_ns, note, "due")
    loop.call_at_ns(20, loop.stop)
    loop.run_forever()
    assert events == [
        ("tick", 10),
        ("from the tick", 10),
        ("due", 10),
        ("tick", 20),
        ("from the tick", 20),
        ("due", 20),
        ("due", 20),
    ]


def test_on_tick_may_cancel(loop: VirtualClockLoop) -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        await asyncio.sleep(1)
        await asyncio.sleep(1)

    task = loop.create_task(main())

    def cancel_at_second_tick(_now_ns: int) -> None:
        if loop.ticks == 2:
            task.cancel()

    loop.on_tick = cancel_at_second_tick
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    assert loop.time() == 2.0


# -- threads -----------------------------------------------------------------------------------------------------


def test_time_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[str, float]:
        gate = threading.Event()

        def work() -> str:
            assert gate.wait(PATIENCE_S)
            return "done"

        loop = clock()
        async with asyncio.timeout(1):  # virtual: however slow the thread, it has not passed
            future = asyncio.ensure_future(asyncio.to_thread(work))
            # Were time to jump, this timer would run first.
            loop.call_later(0.5, future.cancel)
            for _ in range(10):
                await asyncio.sleep(0)
            opener = threading.Thread(target=gate.set)
            opener.start()
            result = await future
            opener.join()
        return result, loop.time()

    assert run(main()) == ("done", 0.0)


def test_time_goes_on_when_the_thread_is_done() -> None:
    async def main() -> float:
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        await asyncio.sleep(5)
        return clock().time()

    assert run(main()) == 5.0


def test_time_goes_on_when_a_thread_is_no_longer_awaited() -> None:
    async def main() -> float:
        gate = threading.Event()
        task = asyncio.create_task(asyncio.to_thread(gate.wait, PATIENCE_S))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await asyncio.sleep(5)
        finally:
            gate.set()
        return clock().time()

    assert run(main()) == 5.0


def test_time_moves_while_a_thread_waits_for_the_loop() -> None:
    """A thread of an executor asks the loop for something that takes a while, and waits for it."""

    async def main() -> tuple[float, float]:
        loop = clock()

        async def takes_5_s() -> float:
            with loop.outside_waits():
                await asyncio.sleep(5)
            return loop.time()

        def ask() -> float:
            return asyncio.run_coroutine_threadsafe(takes_5_s(), loop).result(PATIENCE_S)

        return await asyncio.to_thread(ask), loop.time()

    assert run(main()) == (5.0, 5.0)


def test_time_stands_still_while_another_thread_works() -> None:
    """One thread waits for the loop, and another does not."""

    async def main() -> list[float]:
        loop, gate, ended = clock(), threading.Event(), []

        async def takes_5_s() -> None:
            with loop.outside_waits():
                await asyncio.sleep(5)
            ended.append(loop.time())

        working = asyncio.ensure_future(asyncio.to_thread(gate.wait, PATIENCE_S))
        asking = asyncio.ensure_future(
            asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(takes_5_s(), loop).result(PATIENCE_S))
        )
        for _ in range(100):
            await asyncio.sleep(0)
        assert loop.time() == 0.0
        gate.set()
        await asyncio.gather(working, asking)
        return ended

    assert run(main()) == [5.0]


def test_silence_is_no_deadlock_while_a_thread_waits_for_the_loop() -> None:
    """Another thread of the program may bring the result that the thread waits for."""

    async def main() -> str:
        loop = clock()
        found: asyncio.Future[str] = loop.create_future()
        gate = threading.Event()

        async def wait() -> str:
            with loop.outside_waits():
                loop.call_soon(gate.set)
                return await found

        def bring() -> None:
            assert gate.wait(PATIENCE_S)
            loop.call_soon_threadsafe(found.set_result, "found")

        thread = threading.Thread(target=bring)
        thread.start()
        result = await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(wait(), loop).result(PATIENCE_S))
        thread.join()
        return result

    assert run(main()) == "found"


def test_threads_of_the_program_are_announced() -> None:
    async def main() -> tuple[str, float]:
        loop = clock()
        found: asyncio.Future[str] = loop.create_future()
        gate = threading.Event()

        def work() -> None:
            assert gate.wait(PATIENCE_S)
            loop.call_soon_threadsafe(found.set_result, "found")

        thread = threading.Thread(target=work)
        thread.start()
        loop.call_later(1, found.cancel)
        loop.call_soon(gate.set)
        with loop.outside_work():
            result = await found
        thread.join()
        return result, loop.time()

    assert run(main()) == ("found", 0.0)


def test_leaving_waits_for_threads_of_the_default_executor() -> None:
    ended: list[bool] = []
    entered, gate = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert gate.wait(PATIENCE_S)
        ended.append(True)

    async def main() -> None:
        task = asyncio.create_task(asyncio.to_thread(work))
        await until(entered.is_set)  # what has not begun would be cancelled
        task.cancel()
        clock().call_later(1, gate.set)
        await asyncio.sleep(2)

    run(main())
    assert ended == [True]


# -- sockets and signals -----------------------------------------------------------------------------------------


def start_when_waiting(loop: VirtualClockLoop, thread: threading.Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start `thread` once the loop has found nothing left to do but to wait for the world outside."""
    decide = loop._move_on

    def decide_and_start(files: int) -> bool:
        monkeypatch.setattr(loop, "_move_on", decide)
        moved = decide(files)
        assert not moved
        thread.start()
        return moved

    monkeypatch.setattr(loop, "_move_on", decide_and_start)


def test_sockets_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> bytes:
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        with mine, theirs:
            sender = threading.Thread(target=theirs.sendall, args=(b"hello",))
            start_when_waiting(clock(), sender, monkeypatch)
            received = await clock().sock_recv(mine, 5)
            sender.join()
            return received

    assert run(main()) == b"hello"


def test_signal_handlers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> float:
        loop, received = clock(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, received.set)
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))
        start_when_waiting(loop, sender, monkeypatch)
        await received.wait()
        sender.join()
        assert loop.remove_signal_handler(signal.SIGUSR1)
        assert not loop.remove_signal_handler(signal.SIGUSR1)
        return loop.time()

    assert run(main()) == 0.0


def test_silence_is_a_deadlock_again_without_signal_handlers() -> None:
    async def main() -> None:
        clock().add_signal_handler(signal.SIGUSR1, int)
        clock().remove_signal_handler(signal.SIGUSR1)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="every task waits"):
        run(main())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """The process takes interrupts, also where it was started to ignore them, as jobs in the background are."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_while_time_jumps() -> None:
    cleaned: list[float] = []

    async def main() -> None:
        clock().call_later(1, os.kill, os.getpid(), signal.SIGINT)
        try:
            for _ in range(1_000_000):
                await asyncio.sleep(0.25)
        finally:
            cleaned.append(clock().time())

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert len(cleaned) == 1
    assert 1.0 <= cleaned[0] <= 1.5


@pytest.mark.usefixtures("interruptible")
def test_interrupt_while_a_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def main() -> None:
        killer = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
        start_when_waiting(clock(), killer, monkeypatch)
        try:
            await asyncio.to_thread(gate.wait, PATIENCE_S)
        finally:
            gate.set()
            killer.join()

    with pytest.raises(KeyboardInterrupt):
        run(main())


# -- deadlocks ---------------------------------------------------------------------------------------------------


def test_deadlock_is_an_error_that_names_the_waiting_tasks() -> None:
    async def consume(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main() -> None:
        await asyncio.sleep(2)
        queue: asyncio.Queue[int] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(consume(queue), name="consumer-2")
            group.create_task(consume(queue), name="consumer-10")

    with pytest.raises(RuntimeError) as caught:
        run(main())
    text = str(caught.value)
    assert text.startswith("every task waits and no timer is pending: at 2.0 s of virtual time nothing can ever")
    assert "main (test_virtual.py:" in text
    consumers = [text.index(f"consumer-{i} in ") for i in (2, 10)]
    assert consumers == sorted(consumers)
    assert "consume (test_virtual.py:" in text
    assert " > Queue.get (queues.py:" in text


def test_deadlock_of_many_tasks_names_a_few() -> None:
    async def main() -> None:
        await asyncio.gather(*(asyncio.Event().wait() for _ in range(20)))

    with pytest.raises(RuntimeError, match="and 16 more"):
        run(main())


def test_deadlock_lets_tasks_clean_up() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append("main")

    with pytest.raises(RuntimeError, match="every task waits"):
        run(main())
    assert cleaned == ["main"]


def test_sleeping_for_ever_is_a_deadlock() -> None:
    with pytest.raises(RuntimeError, match="every task waits and no timer is pending"):
        run(asyncio.sleep(math.inf))


def test_a_timer_that_is_cancelled_does_not_hide_a_deadlock() -> None:
    async def main() -> None:
        clock().call_later(1, int).cancel()
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"at 0\.0 s"):
        run(main())


def test_run_forever_with_nothing_to_do_is_a_deadlock(loop: VirtualClockLoop) -> None:
    with pytest.raises(RuntimeError, match="no task at all"):
        loop.run_forever()
