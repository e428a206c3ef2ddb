"""Calls of functions with limits, on virtual time: their start, retries, and the rest after them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.executor import coroutines
from asyncflow.runtime.executor.kernels import limited_calls
from asyncflow.runtime.executor.kernels.limited_calls import LimitStatistics
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.testing import virtual_clock
from tests.conftest import OpenSession
from tests.faults.kernels import until
from tests.patience import PATIENCE_S
from tests.runtime.test_observer import Log

# Virtual time knows nothing of the threads of real CPUs, so no firing may move to them because a clock leaps.
pytestmark = pytest.mark.usefixtures("work")
SCALAR = af.spec("float64", ())


def on_virtual_time(main: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main(*args))


class Tool:
    """A coroutine function that takes `takes_s`, and fails as long as `failures` are left.

    Attributes:
        begun: for each attempt, the number it was called with, and when.
        most: attempts at once.
    """

    def __init__(self, takes_s: float = 0.0, failures: int = 0, error: Callable[[], Exception] = ConnectionError):
        self.takes_s, self.failures, self.error = takes_s, failures, error
        self.begun: list[tuple[float, float]] = []
        self.most = self.running = 0

    def op(self, **limits: Any) -> Callable[..., Any]:
        @af.op(outputs=SCALAR, **limits)
        async def tool(x: Any) -> float:
            self.begun.append((float(x), asyncio.get_running_loop().time()))
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await asyncio.sleep(self.takes_s)
                if self.failures > 0:
                    self.failures -= 1
                    raise self.error()
                return float(x) + 1
            finally:
                self.running -= 1

        return tool

    @property
    def times(self) -> list[float]:
        return [round(time, 6) for _, time in self.begun]


def raising_op(is_plain: bool) -> Callable[..., Any]:
    if is_plain:

        @af.op(outputs=SCALAR, timeout=1000, retries=1, backoff=0)
        def fails(x: Any) -> Any:
            raise ConnectionError("it has to be freed")

    else:

        @af.op(outputs=SCALAR, timeout=1000, retries=1, backoff=0)
        async def fails(x: Any) -> Any:
            raise ConnectionError("it has to be freed")

    return fails


def graph_of(call: Callable[..., Any]) -> tuple[af.Graph, af.Tensor, Any]:
    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y = call(x)
    return graph, x, y


async def after(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    await asyncio.sleep(seconds)
    return await work


async def many(tool: Tool, count: int, limits: dict[str, Any], **options: Any) -> LimitStatistics:
    graph, x, y = graph_of(tool.op(**limits))
    async with af.Session(graph, devices=["cpu:0"], **options) as session:
        found = await asyncio.gather(*(session.run(y, {x: float(k)}) for k in range(count)))
        assert found == [k + 1 for k in range(count)]
        return session.statistics().limits["tool"]


# -- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "times"),
    [((2, 1.0), [0, 0, 1, 1, 2]), (2.5, [0, 0.4, 0.8, 1.2, 1.6]), (4, [0, 0, 0, 0, 1])],
)
def test_no_more_calls_begin_than_the_rate_allows(rate: Any, times: list[float]) -> None:
    tool = Tool(takes_s=0.25)
    on_virtual_time(many, tool, 5, {"rate": rate})
    assert tool.times == times
    assert [number for number, _ in tool.begun] == [0, 1, 2, 3, 4], "in the order in which they came"


def test_no_more_calls_are_under_way_than_max_concurrency() -> None:
    tool = Tool(takes_s=1.0)
    counts = on_virtual_time(many, tool, 5, {"max_concurrency": 2})
    assert (tool.most, tool.times) == (2, [0, 0, 1, 1, 2])
    assert counts == LimitStatistics(calls=5, attempts=5)


def test_urgent_calls_go_first_and_others_get_their_share() -> None:
    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"]) as session:
            asked = [session.run(y, {x: 0.0})]
            asked += [session.run(y, {x: 10.0 + k}, priority=1) for k in range(3)]
            asked += [session.run(y, {x: 20.0 + k}) for k in range(12)]
            asked += [session.run(y, {x: 40.0}, timeout=100.0), session.run(y, {x: 50.0}, timeout=0.9)]
            await asyncio.gather(*asked)

    tool = Tool(takes_s=0.01)
    graph, x, y = graph_of(tool.op(max_concurrency=1))
    on_virtual_time(main)
    order = [int(number) for number, _ in tool.begun]
    assert order[:2] == [0, 50], "of one priority, by deadline"
    assert [number for number in order if 20 <= number < 50] == [*range(20, 32), 40]
    first = order.index(10)
    assert 5 <= first <= 10, "an eighth is for the other priority"
    assert [number for number in order if 10 <= number < 20] == [10, 11, 12]


def test_rows_of_a_loop_share_the_limits() -> None:
    async def main() -> Any:
        with af.Graph() as graph:
            y = af.map_fn(tool.op(rate=(2, 1.0), max_concurrency=2), np.arange(5.0), parallel_iterations=10)
        async with af.Session(graph, devices=["cpu:0"]) as session:
            return await session.run(y)

    tool = Tool(takes_s=0.6)
    np.testing.assert_array_equal(on_virtual_time(main), np.arange(5) + 1)
    assert (tool.most, tool.times) == (2, [0, 0, 1, 1, 2])


def test_rows_at_once_are_refused_with_the_reason() -> None:
    @af.op(outputs=SCALAR, rate=1)
    def plain(x: Any) -> Any:
        return x

    def calls(x: af.Tensor) -> Any:
        return plain(x)

    with af.Graph():
        x = af.placeholder("float64", ())
        with pytest.raises(af.GraphError, match=r"plain \(plain\) is async or has limits .* it awaits for each row"):
            af.vmap(plain)(np.arange(3.0))
        with pytest.raises(
            af.GraphError, match=r"calls cannot be batched: calls/plain \(plain\) is async or has limits"
        ):
            af.batched(calls)(x)


async def test_a_call_for_many_rows_counts_as_one() -> None:
    sizes: list[int] = []

    @af.op(outputs=SCALAR, rows=True, max_concurrency=1)
    def rows(x: Any) -> Any:
        sizes.append(len(x))
        return x + 1

    with af.Graph() as graph:
        x = af.placeholder("float64", (None,))
        fetches = [af.vmap(rows)(x), af.map_fn(rows, x), rows(x[0])]
    async with af.Session(graph) as session:
        at_once, one_by_one, single = await session.run(fetches, {x: np.arange(4.0)})
        np.testing.assert_array_equal(at_once, np.arange(4) + 1)
        np.testing.assert_array_equal(one_by_one, np.arange(4) + 1)
        assert single == 1
        assert sorted(sizes) == [1, 4, 4]
        assert session.statistics().limits["rows"] == LimitStatistics(calls=3, attempts=3)


async def test_a_step_of_a_pool_is_one_call() -> None:
    @af.op(outputs=SCALAR, rows=True, max_concurrency=1)
    def more(x: Any) -> Any:
        return x + 1

    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y = af.while_loop(lambda x: x < 5, more, x, pool=af.Pool(4))
    async with af.Session(graph) as session:
        assert tuple(await asyncio.gather(*(session.run(y, {x: float(k)}) for k in range(4)))) == (5, 5, 5, 5)
        assert session.statistics().limits["more"].calls < 14  # the steps of all of them


async def test_a_batch_is_tried_again_as_a_whole(tmp_path: Path) -> None:
    sizes: list[int] = []

    @af.op(outputs=SCALAR, batch=af.Batch(8, pad=0.0), retries=2, backoff=0, timeout=1000)
    def total(x: Any, lengths: Any) -> Any:
        sizes.append(len(x))
        if len(sizes) < 3 or np.any(x < 0):
            raise ConnectionError("busy")
        return np.sum(x, axis=1)

    with af.Graph() as graph:
        x = af.placeholder("float64", (None,))
        y = total(x)
    async with af.Session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: np.ones(k)}) for k in range(1, 5)))
        assert tuple(found) == (1, 2, 3, 4)
        assert sizes == [4, 4, 4]
        counts = session.statistics().limits["total"]
        assert (counts.calls, counts.attempts, counts.retries) == (1, 3, 2)
        with pytest.raises(af.KernelError, match=r"ConnectionError: busy \(attempt 3 of 3\)"):
            await session.run(y, {x: -np.ones(2)})
        await session.run(y, {x: np.ones(2)}, record=tmp_path / "run.json")
    before = len(sizes)
    assert list((await af.replay(tmp_path / "run.json", graph)).values()) == [2.0]
    assert len(sizes) == before


def test_a_run_that_waits_for_its_turn_gives_its_place_to_others() -> None:
    async def main() -> None:
        async with af.Session(graph, max_runs=1, max_queued=10, devices=["cpu:0"]) as session:
            limited = [asyncio.create_task(session.run(y, {x: float(k)})) for k in range(3)]
            await asyncio.sleep(1.5)
            assert session.statistics().aside == 2
            assert session.statistics().limits["tool"].waiting == 2
            assert await session.run(other, {x: 5.0}) == 10.0
            assert loop_time() == 1.5
            assert await asyncio.gather(*limited) == [1, 2, 3]
            assert session.statistics().aside == 0

    loop_time = lambda: asyncio.get_running_loop().time()  # noqa: E731
    tool = Tool(takes_s=0.5)
    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y, other = tool.op(rate=(1, 4.0))(x), af.while_loop(lambda i: i < x, lambda i: i + 1, 0.0) * 2
    on_virtual_time(main)
    assert tool.times == [0, 4, 8]


@pytest.mark.parametrize("waits", ["for its turn", "to be tried again"])
def test_max_runs_holds_for_attempts_of_runs_that_have_stepped_aside(waits: str) -> None:
    """A run has its place back before an attempt begins: here a coroutine of another run has it."""

    async def main() -> None:
        async with af.Session(graph, max_runs=1, max_queued=10, devices=["cpu:0"]) as session:
            if waits == "for its turn":
                await session.run(y, {x: 0.0})
            first = asyncio.create_task(session.run(y, {x: 1.0}))
            await asyncio.sleep(0.5)
            assert session.statistics().aside == 1
            assert tuple(await asyncio.gather(first, session.run(z, {x: 2.0}))) == (2.0, 2.0)

    @af.op(outputs=SCALAR)
    async def slow(x: Any) -> Any:
        await asyncio.sleep(3)
        return x

    tool = Tool(failures=waits == "to be tried again")
    limits: dict[str, Any] = {"retries": 1, "backoff": lambda failed, error: 1.0}
    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y, z = tool.op(**limits if tool.failures else {"rate": 1})(x), slow(x)
    on_virtual_time(main)
    assert tool.times == [0, 3.5]


def test_a_call_whose_run_has_no_place_lets_one_go_first_that_keeps_it() -> None:
    """A run has the place of the session, and waits for a run inside it, whose call is behind that of a run aside."""

    async def main() -> None:
        async with af.Session(graph, max_runs=1, max_queued=10, devices=["cpu:0"]) as session:
            sessions.append(session)
            await session.run(y, {x: 0.0})
            aside = asyncio.create_task(session.run(y, {x: 1.0}))
            await asyncio.sleep(1)
            async with asyncio.timeout(100):
                assert await session.run(z, {x: 2.0}) == 3
            assert await aside == 2

    @af.op(outputs=SCALAR)
    async def asks(value: Any) -> Any:
        return await sessions[0].run(y, {x: value})

    sessions: list[af.Session] = []
    tool = Tool()
    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y, z = tool.op(rate=(1, 5.0))(x), asks(x)
    on_virtual_time(main)
    assert tool.begun == [(0, 0), (2, 5), (1, 10)]


# -- retries ---------------------------------------------------------------------------------------------------------


def test_a_call_is_tried_again_and_then_gives_its_result() -> None:
    tool = Tool(failures=2)
    counts = on_virtual_time(many, tool, 1, {"retries": 3, "backoff": 1.0})
    assert counts == LimitStatistics(calls=1, attempts=3, retries=2)
    first, second = (b - a for a, b in zip(tool.times, tool.times[1:], strict=False))
    assert 0.5 <= first <= 1 <= second <= 2


def test_the_delays_follow_the_seed() -> None:
    def delays(seed: int) -> list[float]:
        tool = Tool(failures=2)
        on_virtual_time(lambda: many(tool, 1, {"retries": 3, "backoff": 1.0}, seed=seed))
        return tool.times

    assert delays(1) == delays(1)
    assert delays(1) != delays(2)


async def failing(tool: Tool, within: float | None = None, **limits: Any) -> tuple[Exception, LimitStatistics]:
    graph, x, y = graph_of(tool.op(**limits))
    async with af.Session(graph, devices=["cpu:0"]) as session:
        with pytest.raises(af.AsyncflowError) as caught:
            await session.run(y, {x: 1.0}, timeout=within)
        counts = session.statistics().limits["tool"]
        assert counts.running == counts.waiting == counts.backing_off == 0
        return caught.value, counts


def test_the_last_error_tells_the_attempts_and_leads_to_the_others() -> None:
    errors = iter([ConnectionError("first"), KeyError("second"), ConnectionError("third")])
    error, counts = on_virtual_time(lambda: failing(Tool(failures=9, error=errors.__next__), retries=2))
    assert str(error).startswith("ConnectionError: third (attempt 3 of 3)\n  node    tool (tool)\n")
    assert "test_limited_calls.py" in str(error)
    told = "".join(traceback.format_exception(error))
    assert told.index("first") < told.index("second") < told.index("third")
    assert counts == LimitStatistics(calls=1, attempts=3, retries=2, failed=1)


def test_a_call_that_fails_for_hours_keeps_the_last_errors_alone() -> None:
    class Failed(Exception):
        pass

    made: list[weakref.ref[Failed]] = []
    kept: list[int] = []

    def error() -> Failed:
        kept.append(sum(each() is not None for each in made))
        found = Failed(f"number {len(made)}.")
        made.append(weakref.ref(found))
        return found

    raised, _ = on_virtual_time(lambda: failing(Tool(failures=100, error=error), retries=49, backoff=1.0))
    assert kept == [*range(8), *[8] * 42]
    told = "".join(traceback.format_exception(raised))
    assert "attempt 50 of 50" in told
    assert [f"number {k}." in told for k in (41, 42, 49)] == [False, True, True]


def test_one_error_again_and_again_is_no_circle() -> None:
    same = ValueError("same")
    error, _ = on_virtual_time(lambda: failing(Tool(failures=9, error=lambda: same), retries=3))
    assert "attempt 4 of 4" in str(error)
    assert same.__context__ is None


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("way", ["raises", "takes long"])
@pytest.mark.usefixtures("no_collector")
async def test_what_a_failed_call_held_is_freed_without_the_collector(is_plain: bool, way: str) -> None:
    blocking = Blocking()
    if way == "raises":
        op = raising_op(is_plain)
    else:
        tool: Blocking | Tool = blocking if is_plain else Tool(takes_s=1000.0)
        op = tool.op(timeout=0.01, retries=1, backoff=0)
    graph, x, y = graph_of(op)
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError, match=r"attempt 2 of 2"):
            await session.run(y, {x: -1.0})
        blocking.release.set()
        await until(lambda: session.statistics().limits[y.node.op.name].running == 0)
        errors = [each for each in gc.get_objects() if isinstance(each, TimeoutError | ConnectionError)]
        assert [error for error in errors if "freed" in str(error) or "did not return" in str(error)] == []


def test_errors_without_retry_say_so() -> None:
    def error_of(**limits: Any) -> str:
        tool = Tool(failures=9, error=lambda: af.GraphError("your program"))
        error, counts = on_virtual_time(lambda: failing(tool, **limits))
        assert counts.attempts == 1
        return str(error).partition("\n")[0]

    assert error_of(retries=2) == "your program (attempt 1 of 3: such an error is not retried)"
    assert error_of(retries=2, retry_on=OSError) == "your program (attempt 1 of 3: retry_on= leaves it out)"
    assert error_of(timeout=1) == "your program"


@pytest.mark.parametrize("option", ["retry_on", "backoff"])
def test_errors_of_functions_given_as_options_name_the_option(option: str) -> None:
    def fail(*_: object) -> Any:
        raise KeyError("code")

    tool = Tool(failures=9)
    limits: dict[str, Any] = {"retries": 2, option: fail}
    error, counts = on_virtual_time(lambda: failing(tool, **limits))
    assert counts.attempts == 1
    assert str(error).partition("\n")[0] == f"KeyError: 'code' (attempt 1 of 3: {option}= failed)"


def test_a_run_without_time_for_another_attempt_fails_at_once() -> None:
    tool = Tool(failures=9)
    limits = {"retries": 5, "backoff": lambda failed, error: 2.0}
    error, _ = on_virtual_time(lambda: failing(tool, 5.0, **limits))
    assert tool.times == [0, 2, 4]
    assert "(attempt 3 of 6: the next would be after 2 s, and its run has 1 s left)" in str(error)


def test_an_error_of_the_users_backoff_or_predicate_is_the_runs() -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("broken")

    for limits in ({"backoff": broken}, {"retry_on": broken}):
        error, counts = on_virtual_time(lambda limits=limits: failing(Tool(failures=1), retries=2, **limits))
        assert "RuntimeError: broken" in str(error)
        assert counts.failed == 1


def test_a_deadline_names_the_awaited_turn() -> None:
    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"]) as session:
            first = asyncio.create_task(session.run(y, {x: 0.0}))
            await asyncio.sleep(0)
            with pytest.raises(af.DeadlineExceeded, match=r"tool: a call of tool \(1 run, 1 wait\)\n    built at"):
                await session.run(y, {x: 1.0}, timeout=1.0)
            assert await first == 1

    tool = Tool(takes_s=3.0)
    graph, x, y = graph_of(tool.op(max_concurrency=1))
    on_virtual_time(main)


# -- timeouts and cancellation ---------------------------------------------------------------------------------------


def test_a_coroutine_function_is_cancelled_when_its_time_is_up() -> None:
    tool = Tool(takes_s=3.0)
    error, counts = on_virtual_time(lambda: failing(tool, timeout=2, retries=1, backoff=0))
    assert "TimeoutError: tool did not return within timeout=2 s (attempt 2 of 2)" in str(error)
    assert counts == LimitStatistics(calls=1, attempts=2, retries=1, timeouts=2, failed=1)
    assert (tool.times, tool.running) == ([0, 2], 0)


def test_a_timeout_is_of_one_attempt_and_not_of_the_time_in_line() -> None:
    tool = Tool(takes_s=1.5)
    counts = on_virtual_time(lambda: many(tool, 4, {"timeout": 2.0, "max_concurrency": 1}))
    assert counts.timeouts == 0
    assert tool.times == [0, 1.5, 3, 4.5]


def test_a_timeout_error_of_the_functions_own_stays_itself() -> None:
    error, counts = on_virtual_time(lambda: failing(Tool(failures=1, error=lambda: TimeoutError("mine")), timeout=9))
    assert str(error).startswith("TimeoutError: mine\n")
    assert counts.timeouts == 0


class Blocking:
    """A plain function that blocks its thread until `release` is set, if it is called with a negative number."""

    def __init__(self) -> None:
        self.release, self.returned = threading.Event(), 0

    def op(self, **limits: Any) -> Callable[..., Any]:
        @af.op(outputs=SCALAR, **limits)
        def tool(x: Any) -> Any:
            if x < 0:
                assert self.release.wait(PATIENCE_S)
            self.returned += 1
            return x + 1.0

        return tool


async def test_a_plain_function_that_times_out_keeps_its_slot_until_it_returns() -> None:
    tool = Blocking()
    graph, x, y = graph_of(tool.op(timeout=0.02, max_concurrency=1))
    async with af.Session(graph) as session:
        with pytest.raises(
            af.KernelError, match=r"within timeout=0.02 s; its thread goes on .* max_concurrency=1 until"
        ):
            await session.run(y, {x: -1.0})
        counts = session.statistics().limits["tool"]
        assert (counts.running, counts.left_behind, counts.timeouts) == (1, 1, 1)
        second = asyncio.create_task(session.run(y, {x: 1.0}))
        await until(lambda: session.statistics().limits["tool"].waiting == 1)
        tool.release.set()
        assert await second == 2
        counts = session.statistics().limits["tool"]
        assert (counts.running, counts.left_behind, tool.returned) == (0, 0, 2)


@pytest.mark.parametrize("timeout", [None, 1000.0])
async def test_a_cancelled_run_waits_for_a_plain_function_unless_that_has_a_timeout(timeout: float | None) -> None:
    tool = Blocking()
    graph, x, y = graph_of(tool.op(timeout=timeout, max_concurrency=1))
    async with af.Session(graph) as session:
        run = asyncio.create_task(session.run(y, {x: -1.0}))
        await until(lambda: session.statistics().limits.get("tool", LimitStatistics()).running == 1)
        run.cancel()
        if timeout is None:
            await until(lambda: session.statistics().limits["tool"].left_behind == 1)
            assert session.statistics().runs == 1
            tool.release.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert session.statistics().limits["tool"].running == (timeout is not None)
        tool.release.set()
        await until(lambda: session.statistics().limits["tool"].running == 0)
        assert session.statistics().limits["tool"].left_behind == 0
        assert await session.run(y, {x: 1.0}) == 2


async def test_a_plain_function_that_never_returns_holds_up_its_run_for_the_grace_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coroutines, "GRACE_S", 0.02)
    tool = Blocking()
    graph, x, y = graph_of(tool.op(max_concurrency=1))
    async with af.Session(graph) as session:
        run = asyncio.create_task(session.run(y, {x: -1.0}))
        await until(lambda: session.statistics().limits.get("tool", LimitStatistics()).running == 1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert session.statistics().limits["tool"].left_behind == 1
        tool.release.set()
        assert await session.run(y, {x: 1.0}) == 2
    assert "tool cannot be stopped: 0.02 s after its run ended early, its function still works on a" in caplog.text


async def test_a_thread_that_cannot_start_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    graph, x, y = graph_of(Blocking().op(max_concurrency=1))
    async with af.Session(graph) as session:
        with monkeypatch.context() as patch:
            patch.setattr(limited_calls, "call_beside", full)
            with pytest.raises(af.KernelError, match="can't start new thread"):
                await session.run(y, {x: 1.0})
        assert session.statistics().limits["tool"].running == 0
        assert await session.run(y, {x: 1.0}) == 2


async def test_a_plain_function_that_raises_a_runtime_error_gives_its_slot_back_once() -> None:
    """An error of starting its thread gives the slot back, and the thread may have ended before the session waits
    for it.
    """

    @af.op(outputs=SCALAR, max_concurrency=1)
    def fails(x: Any) -> Any:
        raise RuntimeError("of the function's own")

    graph, x, y = graph_of(fails)
    async with af.Session(graph) as session:
        for _ in range(10):
            with pytest.raises(af.KernelError, match="of the function's own"):
                await session.run(y, {x: 1.0})
        await until(lambda: session.statistics().limits["fails"].running <= 0)
        assert session.statistics().limits["fails"].running == 0


async def test_a_plain_function_may_ask_for_a_run_of_its_session() -> None:
    """The function has a thread of its own, so the run finds the session's threads free."""

    @af.op(outputs=SCALAR, max_concurrency=1)
    def asks(x: Any) -> Any:
        return session.run_threadsafe(inner, {x_inner: x}).result(PATIENCE_S)

    with af.Graph() as graph:
        x_inner, x = af.placeholder("float64", ()), af.placeholder("float64", ())
        inner, y = x_inner * 2, asks(x)
    async with af.Session(graph) as session:
        assert await asyncio.gather(*(session.run(y, {x: float(k)}) for k in range(3))) == [0, 2, 4]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_function_that_waits_for_itself_is_told_so(is_async: bool) -> None:
    if is_async:

        @af.op(outputs=SCALAR, max_concurrency=2)
        async def asks(x: Any) -> Any:
            return x if x <= 0 else 1 + await session.run(y, {x_in: x - 1})

    else:

        @af.op(outputs=SCALAR, max_concurrency=2)
        def asks(x: Any) -> Any:
            return x if x <= 0 else 1 + session.run_threadsafe(y, {x_in: x - 1}).result(PATIENCE_S)

    with af.Graph() as graph:
        x_in = af.placeholder("float64", ())
        y = asks(x_in)
    async with af.Session(graph) as session:
        assert await session.run(y, {x_in: 1.0}) == 1
        with pytest.raises(af.KernelError, match=r"asks asked for a run that calls it again, .* max_concurrency=2"):
            await session.run(y, {x_in: 2.0})
        assert await session.run(y, {x_in: 1.0}) == 1


def test_a_function_may_wait_for_itself_until_a_deadline() -> None:
    """The run that it asks for ends by itself, and the function goes on."""

    async def main() -> None:
        async with af.Session(graph) as session:
            sessions.append(session)
            assert await session.run(y, {x_in: 1.0}) == 7
            with pytest.raises(af.KernelError, match=r"its own call counts for max_concurrency=1"):
                await session.run(y, {x_in: 2.0})

    sessions: list[af.Session] = []

    @af.op(outputs=SCALAR, max_concurrency=1)
    async def asks(x: Any) -> Any:
        try:
            return await sessions[0].run(y, {x_in: x - 1}, timeout=1.0 if x == 1 else None)
        except af.DeadlineExceeded:
            return 7.0

    with af.Graph() as graph:
        x_in = af.placeholder("float64", ())
        y = asks(x_in)
    on_virtual_time(main)


def test_waiting_calls_leave_at_once_and_lose_nothing() -> None:
    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"]) as session:
            runs = [asyncio.create_task(session.run(y, {x: float(k)})) for k in range(6)]
            await asyncio.sleep(0.5)
            for k in (0, 1, 2, 4):  # under way, called next, and two that wait
                runs[k].cancel()
            await asyncio.wait(runs[:3])
            assert asyncio.get_running_loop().time() == 0.5
            assert tuple(await asyncio.gather(runs[3], runs[5])) == (4, 6)
            counts = session.statistics().limits["tool"]
            assert (counts.running, counts.waiting, counts.failed) == (0, 0, 0)

    tool = Tool(takes_s=1.0)
    graph, x, y = graph_of(tool.op(max_concurrency=1))
    on_virtual_time(main)
    assert [(number, time) for (number, _), time in zip(tool.begun, tool.times, strict=True)] == [
        (0, 0),
        (3, 0.5),
        (5, 1.5),
    ]


async def test_closing_a_session_ends_all_waiting() -> None:
    tool = Tool(takes_s=1000.0)
    graph, x, y = graph_of(tool.op(max_concurrency=1))
    async with af.Session(graph) as session:
        runs = [asyncio.create_task(session.run(y, {x: float(k)})) for k in range(3)]
        await until(lambda: session.statistics().limits.get("tool", LimitStatistics()).waiting == 2)
        await session.aclose(grace_s=0)
        found = await asyncio.gather(*runs, return_exceptions=True)
    assert [type(each) for each in found] == [af.SessionClosedError] * 3
    assert tool.running == 0


# -- seen from outside -----------------------------------------------------------------------------------------------


def test_each_attempt_is_in_the_trace() -> None:
    async def main() -> None:
        async with af.Session(graph, devices=["cpu:0"]) as session:
            session.observe(log)
            with trace:
                await asyncio.gather(session.run(y, {x: 1.0}), session.run(y, {x: 2.0}))

    log, trace = Log(), af.Trace()
    tool = Tool(takes_s=1.0, failures=1)
    graph, x, y = graph_of(tool.op(retries=1, backoff=lambda failed, error: 1.0, max_concurrency=1))
    on_virtual_time(main)
    firings = sorted((f for f in trace.firings if f.op == "tool"), key=lambda f: f.started_ns)
    told = [(f.label, f.attempt, f.part, f.status, f.queued_ns, f.started_ns, f.ended_ns) for f in firings]
    second = 1_000_000_000
    assert told == [
        ("tool", 1, 0, "error", 0, 0, second),
        ("tool", 1, 0, "ok", 0, second, 2 * second),
        ("tool (attempt 2)", 2, 1, "ok", 2 * second, 2 * second, 3 * second),
    ]
    assert sorted(run.retries for run in log.ended) == [0, 1]


async def test_attempts_of_a_run_inside_are_not_its_callers() -> None:
    @af.op(outputs=SCALAR, max_concurrency=2)
    async def outer(x: Any) -> Any:
        return await session.run(inner, {x_in: x})

    tool = Tool()
    with af.Graph() as graph:
        x_in, x = af.placeholder("float64", ()), af.placeholder("float64", ())
        inner, y = tool.op(max_concurrency=1)(x_in), outer(x)
    trace = af.Trace()
    async with af.Session(graph) as session:
        assert await session.run(y, {x: 1.0}, trace=trace) == 2
    assert [(firing.op, firing.attempt) for firing in trace.firings if firing.attempt] == [("outer", 1)]


def test_a_record_has_the_last_result_and_a_replay_does_not_wait(tmp_path: Path) -> None:
    async def main(path: Path) -> Any:
        async with af.Session(graph, devices=["cpu:0"]) as session:
            await session.run(y, {x: 1.0}, record=path)
            tool.failures = 99
            with pytest.raises(af.KernelError, match=r"attempt 3 of 3"):
                await session.run(y, {x: 1.0}, record=path.with_suffix(".failed.json"))
        before = len(tool.begun), asyncio.get_running_loop().time()
        again = await af.replay(path, graph)
        with pytest.raises(af.KernelError, match=r"ConnectionError: .*\(attempt 3 of 3\)"):
            await af.replay(path.with_suffix(".failed.json"), graph)
        assert (len(tool.begun), asyncio.get_running_loop().time()) == before
        return again

    tool = Tool(takes_s=1.0, failures=1)
    graph, x, y = graph_of(tool.op(retries=2, rate=(1, 5.0)))
    assert list(on_virtual_time(main, tmp_path / "run.json").values()) == [2.0]
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))


async def test_gradients_recomputation_and_branches_call_as_the_limits_say() -> None:
    @af.op(outputs=SCALAR, pure=True, max_concurrency=1, gradient=lambda inputs, output, grad: grad * 2.0 * inputs[0])
    def square(x: Any) -> Any:
        return x * x

    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y = af.cond(x > 0, lambda: af.recompute(lambda x: square(x) * x)(x), lambda: x)
        (dx,) = af.gradients(y, [x])
    async with af.Session(graph) as session:
        assert await session.run((y, dx), {x: 3.0}) == (27.0, 27.0)
        assert session.statistics().limits["square"].attempts >= 2
        assert await session.run((y, dx), {x: -3.0}) == (-3.0, 1.0)


async def test_loops_and_branches_call_functions_with_limits_on_any_device(open_session: OpenSession) -> None:
    tool = Tool(failures=1)
    awaited = tool.op(retries=1, backoff=0, max_concurrency=1)

    @af.op(outputs=SCALAR, max_concurrency=1)
    def plain(x: Any) -> Any:
        return x * 2

    with af.Graph() as graph:
        count = af.placeholder("int64", ())

        def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            step = af.cond(i % 2 == 0, lambda: plain(total), lambda: awaited(total))
            return i + 1, step + af.sum(af.map_fn(plain, af.ones((2,), dtype="float64")))

        _, total = af.while_loop(lambda i, _: i < count, body, (0, af.constant(1.0)))
    async with open_session(graph) as session:
        assert await session.run(total, {count: 3}) == 26
        counts = session.statistics().limits
    assert (counts["tool"].calls, counts["tool"].attempts) == (1, 2)
    assert counts["plain"].calls >= 4  # rows of what does not change may be called once


def test_limits_hold_on_simulated_devices() -> None:
    async def main() -> None:
        async with af.Session(graph, devices=["sim:0"], max_runs=1, max_queued=9) as session:
            assert await asyncio.gather(*(session.run(y, {x: float(k)}) for k in range(3))) == [1, 2, 3]

    tool = Tool(takes_s=0.25)
    graph, x, y = graph_of(tool.op(rate=(1, 1.0)))
    with virtual_clock() as clock:
        clock.run(main())
    first = tool.times[0]
    assert [round(time - first, 3) for time in tool.times] == [0, 1, 2]


def test_outside_a_graph_there_are_no_limits() -> None:
    @af.op(outputs=SCALAR, rate=(1, 1000.0), retries=3)
    def plain(x: Any) -> Any:
        return x + 1

    assert [plain(k) for k in range(3)] == [1, 2, 3]
