"""Regions while they run: their budget, where they run, and how they are stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.plan import NodeTimes, PlanNode
from asyncflow.graph.building.build import apply
from asyncflow.graph.op import OPAQUE, PURE, Op
from asyncflow.runtime.executor.kernels import sliced_region
from asyncflow.runtime.executor.kernels.sliced_region import SlicedRegion, Stopped
from asyncflow.state.waiting.lines import LinedState, PlaceInLine
from tests.clocks import LIGHT_NS, WorkClock
from tests.conftest import assert_baseline
from tests.faults.kernels import DEADLINES_S, until
from tests.patience import PATIENCE_S

LOOP_THREAD = threading.current_thread().name


class Probe:
    """An op of the library's kind, as regions have: notes its thread, waits for `gate`, may work or fail."""

    def __init__(
        self,
        clock: WorkClock,
        *,
        busy_ns: int = LIGHT_NS,
        at: int = -1,
        error: BaseException | None = None,
        flops: float | None = None,
    ) -> None:
        self.clock = clock
        self.busy_ns = busy_ns
        self.at = at
        self.error = error
        self.calls = 0
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        cost = None if flops is None else lambda *shapes: flops
        self.op = Op(name="probe", infer=lambda spec: spec, kernel=lambda xp: self._call, flops=cost, traits=OPAQUE)

    def _call(self, x: Any) -> Any:
        self.calls += 1
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(PATIENCE_S)
        self.clock.work(self.busy_ns)
        if self.error is not None and x == self.at:
            raise self.error
        return x + 0

    def __call__(self, x: Any) -> af.Tensor:
        (tensor,) = apply(self.op, x)
        return tensor


def counting(probe: Probe, trips: Any, *, name: str = "loop") -> af.Tensor:
    """A loop whose body goes through `probe`."""
    return af.while_loop(lambda i: i < trips, lambda i: probe(i) + 1, (0,), name=name)[0]


HEAVY_NS = 2_000_000
ENDLESS = 2**62


@pytest.fixture
async def session() -> AsyncIterator[af.Session]:
    """A session that compiles regions; afterwards nothing of its runs may be left."""
    async with af.Session() as opened:
        yield opened
        assert_baseline(opened)


# -- the budget ------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when a test says so; the processor's runs only while the region does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.busy = 0
        monkeypatch.setattr(sliced_region, "perf_counter_ns", lambda: self.now)
        monkeypatch.setattr(sliced_region, "thread_time_ns", lambda: self.busy)

    def pass_(self, ns: int, *, busy: bool = True) -> None:
        self.now += ns
        self.busy += ns if busy else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def firing_of(generator: Generator[bool | None, int | None, tuple[Any, ...]]) -> SlicedRegion:
    node = cast("PlanNode", SimpleNamespace(times=NodeTimes(), conduct=PURE))
    return SlicedRegion(node, None, (), generator)  # type: ignore[arg-type]


def iterations(clock: Clock, costs: Callable[[int], int]) -> Generator[bool | None, int | None, tuple[Any, ...]]:
    """Act like generated code at its back edges; `costs` gives the time of each iteration."""
    budget: int | None = 1
    count = 0
    while True:
        clock.pass_(costs(count))
        count += 1
        assert budget is not None
        budget -= 1
        if not budget:
            budget = yield None


def test_the_budget_grows_to_a_slice(clock: Clock) -> None:
    """By 16 at most a slice, to the number of iterations that take 0.2 ms."""
    firing = firing_of(iterations(clock, lambda _: 100))
    budgets: list[int | None] = []
    for _ in range(5):
        firing.run_slice()
        budgets.append(firing.budget)
        assert not firing.is_heavy
    assert budgets == [16, 256, 2000, 2000, 2000]


def test_the_budget_follows_the_cost(clock: Clock) -> None:
    firing = firing_of(iterations(clock, lambda count: 100 if count < 5000 else 10_000))
    budgets: list[int | None] = []
    for _ in range(10):
        firing.run_slice()
        budgets.append(firing.budget)
    assert budgets[2] == 2000
    assert budgets[-1] == 20


def test_the_budget_starts_again_where_a_loop_begins(clock: Clock) -> None:
    """The iterations of another loop may take a thousand times as long."""

    def two_loops() -> Generator[bool | None, int | None, tuple[Any, ...]]:
        budget = yield None
        assert budget is not None
        for _ in range(budget):
            clock.pass_(100)
        yield True
        return ()

    firing = firing_of(two_loops())
    firing.run_slice()
    firing.budget = 2000
    firing.run_slice()
    assert firing.budget == 1
    assert not firing.is_heavy


def test_waiting_says_nothing_about_the_budget(clock: Clock) -> None:
    """The number of iterations of a slice that ended early, for a wait, is unknown."""

    def waiting() -> Generator[Any, int | None, tuple[Any, ...]]:
        while True:
            clock.pass_(100)
            yield PlaceInLine(LinedState(), "a turn", str)

    firing = firing_of(waiting())
    firing.run_slice()
    firing.budget = 50
    for _ in range(5):
        firing.run_slice()
        assert firing.place is not None
        assert firing.budget == 50


def test_a_heavy_iteration_is_noticed_at_once(clock: Clock) -> None:
    firing = firing_of(iterations(clock, lambda _: 200_001))
    firing.run_slice()
    assert firing.is_heavy
    assert firing.budget == 1


def test_the_limit_itself_is_not_heavy(clock: Clock) -> None:
    firing = firing_of(iterations(clock, lambda _: 200_000))
    for _ in range(10):
        firing.run_slice()
        assert not firing.is_heavy


def test_heavy_work_among_light_is_noticed(clock: Clock) -> None:
    """The mean of an iteration stays small, but the event loop waits: twice is enough."""
    firing = firing_of(iterations(clock, lambda count: 5_000_000 if count % 500 == 499 else 1_000))
    overran = 0
    while not firing.is_heavy:
        before = clock.now
        firing.run_slice()
        overran += clock.now - before > 1_000_000
    assert overran == 2


def test_moments_when_others_ran_do_not_count(clock: Clock) -> None:
    """A machine that is busy with something else makes no region heavy, not even in its first iteration."""

    def interrupted() -> Generator[bool | None, int | None, tuple[Any, ...]]:
        budget: int | None = 1
        while True:
            assert budget is not None
            for _ in range(budget):
                clock.pass_(1_000)
            if budget == 1 or budget > 100:
                clock.pass_(10_000_000, busy=False)
            budget = yield None

    firing = firing_of(interrupted())
    for _ in range(100):
        firing.run_slice()
        assert not firing.is_heavy


def test_run_to_end(clock: Clock) -> None:
    def short() -> Generator[bool | None, int | None, tuple[Any, ...]]:
        for _ in range(3):
            yield None
        return (1, 2)

    assert firing_of(short()).run_to_end(lambda: False) == (1, 2)


def test_run_to_end_stops_at_a_back_edge(clock: Clock) -> None:
    """And closes the generator, so that its values are freed."""
    freed = []

    def endless() -> Generator[bool | None, int | None, tuple[Any, ...]]:
        try:
            while True:
                yield None
        finally:
            freed.append(True)

    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        firing_of(endless()).run_to_end(lambda: next(asked))
    assert freed == [True]


# -- where it runs ---------------------------------------------------------------------------------------------------


async def test_a_light_loop_stays_on_the_event_loop(work: WorkClock, session: af.Session, graph: af.Graph) -> None:
    probe = Probe(work)
    trace = af.Trace(detail="region")
    assert await session.run(counting(probe, 500), trace=trace) == 500
    assert set(probe.threads) == {LOOP_THREAD}
    assert {firing.stream for firing in trace.firings if firing.op == "loop"} == {"inline"}


async def test_a_heavy_body_goes_to_the_stream_thread(work: WorkClock, session: af.Session, graph: af.Graph) -> None:
    """After its first iteration; no value is lost on the way."""
    probe = Probe(work, busy_ns=HEAVY_NS)
    trace = af.Trace(detail="region")
    assert await session.run(counting(probe, 6), trace=trace) == 6
    assert probe.threads[0] == LOOP_THREAD
    assert LOOP_THREAD not in probe.threads[1:]
    assert probe.calls == 6
    parts = [firing for firing in trace.firings if firing.op == "loop"]
    assert [(part.stream, part.status, part.part) for part in parts] == [("inline", "ok", 0), ("compute", "ok", 1)]


async def test_a_cold_first_run_does_not_keep_a_region_off_the_event_loop(
    work: WorkClock, session: af.Session, graph: af.Graph
) -> None:
    """The second runs where the first one went, and shows that it is light; from then on it is on the loop again."""
    probe = Probe(work, busy_ns=HEAVY_NS)
    fetch = counting(probe, 3)
    assert await session.run(fetch) == 3
    assert LOOP_THREAD not in probe.threads[1:]
    probe.busy_ns = LIGHT_NS
    assert await session.run(fetch) == 3
    assert LOOP_THREAD not in probe.threads[3:]
    assert await session.run(fetch) == 3
    assert set(probe.threads[6:]) == {LOOP_THREAD}


async def test_a_static_guess_yields_to_measurement(work: WorkClock, session: af.Session, graph: af.Graph) -> None:
    probe = Probe(work, flops=1e9)
    x = af.placeholder("int64", ())
    fetch = probe(probe(x + 1)) + 1
    for _ in range(3):
        assert await session.run(fetch, {x: 1}) == 3
    assert LOOP_THREAD not in probe.threads[:2]
    assert set(probe.threads[2:]) == {LOOP_THREAD}


async def test_a_long_kernel_behind_short_ones_is_noticed(
    work: WorkClock, session: af.Session, graph: af.Graph
) -> None:
    """Though the region ends without giving way again, so that no slice of it was seen to be too long."""
    short, long = Probe(work, flops=1e9), Probe(work, flops=1e9)
    x = af.placeholder("int64", ())
    fetch = long(short(short(short(x))))
    for _ in range(3):
        await session.run(fetch, {x: 1})
    assert LOOP_THREAD in long.threads
    long.busy_ns = HEAVY_NS
    for _ in range(6):
        await session.run(fetch, {x: 1})
    assert LOOP_THREAD not in long.threads[-1:]


async def test_a_heavy_region_that_is_always_stopped_is_known(
    work: WorkClock, session: af.Session, graph: af.Graph
) -> None:
    """The region holds up the event loop once, not in every run."""
    probe = Probe(work, busy_ns=HEAVY_NS)
    fetch = counting(probe, ENDLESS)
    for _ in range(2):
        begun = probe.calls
        task = asyncio.ensure_future(session.run(fetch))
        await until(lambda: probe.calls > begun + 2 or task.done())  # noqa: B023 - called before the next round
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert probe.threads.count(LOOP_THREAD) == 1


async def test_a_heavy_loop_behind_a_light_one(work: WorkClock, session: af.Session, graph: af.Graph) -> None:
    """The budget of the light loop is not the heavy one's."""
    probe = Probe(work, busy_ns=HEAVY_NS)
    limit = af.placeholder("int64", ())
    rows = af.placeholder("float64", (64, 64))
    (light,) = af.while_loop(lambda i: i < limit, lambda i: i + 1, (0,))

    def heavy(i: Any, x: Any) -> Any:
        return probe(i) + 1, x + 1

    count, _ = af.while_loop(lambda i, _: i < light - limit + 6, heavy, (0, rows))
    assert await session.run(count, {limit: 20_000, rows: np.zeros((64, 64))}) == 6
    assert probe.threads.count(LOOP_THREAD) == 1


async def test_numbers_are_the_same_on_the_thread(work: WorkClock, graph: af.Graph) -> None:
    """Overflow, division by zero and NaN are values there too, without warnings."""
    probe = Probe(work, busy_ns=HEAVY_NS)

    def body(i: Any, x: Any, y: Any) -> Any:
        return probe(i) + 1, x * 3.0e20, y / (y - y)

    results = []
    fetches = af.while_loop(lambda i, *_: i < 5, body, (0, np.float32(2.0), np.float64(1.0)))
    for regions in (True, False):
        async with af.Session(graph, regions=regions) as session:
            results.append(await session.run(list(fetches)))
    assert str(results[0]) == str(results[1])
    assert LOOP_THREAD not in probe.threads[1:5]


@pytest.mark.real_time
async def test_other_coroutines_go_on(session: af.Session, graph: af.Graph) -> None:
    """Passes of the event loop beside a long light loop and a heavy one."""
    limit = af.placeholder("int64", ())
    light = af.while_loop(lambda i: i < limit, lambda i: i + 1, (0,))[0]
    square = af.placeholder("float64", (200, 200))
    heavy = af.while_loop(lambda i, _: i < limit, lambda i, x: (i + 1, af.tanh(x @ square)), (0, square))[1]
    for fetch, feeds in (
        (light, {limit: 300_000}),
        (heavy, {limit: 100, square: np.full((200, 200), 0.01)}),
    ):
        session.plan(fetch, list(feeds))
        async with heartbeat() as beats:
            await session.run(fetch, feeds)
        assert len(beats) > 10


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[None]]:
    """Grows by one in every pass of the event loop."""
    beats: list[None] = []

    async def beat() -> None:
        while True:
            beats.append(None)
            await asyncio.sleep(0)

    task = asyncio.ensure_future(beat())
    yield beats
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- several at once -------------------------------------------------------------------------------------------------


async def test_concurrent_runs_share_nothing(session: af.Session, graph: af.Graph) -> None:
    """Long enough to take turns, with buffers that each run reuses for itself."""
    n, start = af.placeholder("int64", ()), af.placeholder("float64", (40, 40))
    result = af.while_loop(lambda i, _: i < n, lambda i, x: (i + 1, af.tanh(x * 1.5 + 0.25)), (0, start))
    feeds: list[dict[af.Tensor, Any]] = [{n: 300 + 100 * k, start: np.full((40, 40), k / 10)} for k in range(10)]
    got = await asyncio.gather(*(session.run(list(result), feed) for feed in feeds))
    for feed, (count, value) in zip(feeds, got, strict=True):
        want = feed[start]
        for _ in range(int(count)):
            want = np.tanh(want * 1.5 + 0.25)
        assert count == feed[n]
        assert value.tobytes() == want.tobytes()


async def test_concurrent_runs_of_a_heavy_region(work: WorkClock, session: af.Session, graph: af.Graph) -> None:
    probe, n = Probe(work, busy_ns=HEAVY_NS), af.placeholder("int64", ())
    count = counting(probe, n)
    assert await asyncio.gather(*(session.run(count, {n: k}) for k in (2, 5, 3))) == [2, 5, 3]
    assert probe.calls == 10


async def test_all_results_of_a_loop(session: af.Session, graph: af.Graph) -> None:
    """Results in any order, twice, and beside their operands."""
    n = af.placeholder("int64", ())
    i, a, b = af.while_loop(lambda i, *_: i < n, lambda i, a, b: (i + 1, b, a + b), (0, n, 1))
    assert await session.run({"b": b, "pair": (a, a), "i": i, "n": n}, {n: 5}) == {
        "b": 33,
        "pair": (20, 20),
        "i": 5,
        "n": 5,
    }


# -- traces ----------------------------------------------------------------------------------------------------------


async def test_a_region_is_one_span(session: af.Session, graph: af.Graph) -> None:
    n = af.placeholder("int64", ())
    count, total = af.while_loop(lambda i, _: i < n, lambda i, t: (i + 1, t + i), (0, 0), name="sum")
    trace = af.Trace(detail="region")
    assert await session.run([count, total], {n: 1000}, trace=trace) == [1000, 499_500]
    *_, span = [firing for firing in trace.firings if firing.op == "loop"]  # in parts, if it gave way to others
    assert (span.node, span.label) == ("sum", "sum (loop, 1,000 iterations)")
    assert span.outputs == "int64[], int64[]"
    assert span.tag == ""
    assert span.scheduled_ns <= span.started_ns < span.ended_ns
    assert "test_sliced_region.py" in span.location
    assert {firing.op for firing in trace.firings} <= {"loop", "fetch", "feed"}


async def test_a_region_is_shown_as_its_loops_and_the_parts_between(session: af.Session, graph: af.Graph) -> None:
    """In the user's names, so that forward, backward and update are told apart; loops with their iterations."""
    n = af.placeholder("int64", (), name="n")
    x = af.placeholder("float64", (32, 32), name="x")
    with af.name_scope("model"):
        w = af.Variable(np.eye(32), name="w").read()
        start = x @ w
        _, y = af.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, af.tanh(y @ w)), (0, start), name="encoder")
    slope = af.gradients(af.sum(y), x)
    trace = af.Trace(detail="region")
    for length in (5, 7):
        await session.run(slope, {n: length, x: np.full((32, 32), 0.01)}, trace=trace)
    loops = [(firing.node, firing.iterations) for firing in trace.firings if firing.op == "loop" and firing.iterations]
    assert loops == [
        ("model/encoder", 5),
        ("gradients/model/encoder", 5),
        ("model/encoder", 7),
        ("gradients/model/encoder", 7),
    ]
    labels = {firing.label for firing in trace.firings}
    assert {"model/encoder (loop, 5 iterations)", "gradients/model/encoder (loop, 7 iterations)"} <= labels
    between = [firing.node for firing in trace.firings if firing.op == "region"]
    assert between[0].split(", ")[0] == "model"
    spans = sorted((firing.started_ns, firing.ended_ns) for firing in trace.firings if firing.run == trace.runs[0].run)
    assert all(ended <= started for (_, ended), (started, _) in pairwise(spans)), "they follow one another"


@pytest.mark.parametrize("trips", [0, 1, 3000])
async def test_a_trace_counts_the_iterations_of_a_loop_that_ends_its_region(trips: int) -> None:
    """Of one over scalars, too, whose function returns at once; whoever runs it says how often it goes around."""
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")
        total = af.while_loop(lambda i, _: i < n, lambda i, x: (i + 1, x + 0.5), (0, 0.0), name="counted")[1]
    trace = af.Trace(detail="region")
    async with af.Session(graph) as session:
        assert await session.run(total, {n: trips}, trace=trace) == trips / 2
    *_, loop = [firing for firing in trace.firings if firing.op == "loop"]  # in parts, if it gave way to others
    assert (loop.node, loop.iterations) == ("counted", trips)


async def test_a_trace_may_look_inside(session: af.Session, graph: af.Graph) -> None:
    """Then every node is a span of its own, with its iteration."""
    (count,) = af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,), name="loop")
    trace = af.Trace(detail="node")
    assert await session.run(count, trace=trace) == 3
    assert [firing.tag for firing in trace.firings if firing.op == "add"] == ["loop/0", "loop/1", "loop/2"]
    assert "region" not in {firing.op for firing in trace.firings}


async def test_a_region_inside_a_loop_is_one_span_an_iteration(session: af.Session, graph: af.Graph) -> None:
    @af.op(outputs=af.spec("int64", ()))
    async def later(x: Any) -> Any:
        return x

    (result,) = af.while_loop(lambda i: i < 3, lambda i: later(i * 2 - i) + 1, (0,), name="loop")
    trace = af.Trace(detail="region")
    assert await session.run(result, trace=trace) == 3
    tags = [firing.tag for firing in trace.firings if firing.op == "region"]
    assert tags == ["loop/0", "loop/1", "loop/2"]


# -- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy_ns", [LIGHT_NS, HEAVY_NS], ids=["inline", "on the thread"])
async def test_cancelled_at_a_back_edge(work: WorkClock, session: af.Session, graph: af.Graph, busy_ns: int) -> None:
    probe = Probe(work, busy_ns=busy_ns)
    task = asyncio.ensure_future(session.run(counting(probe, ENDLESS)))
    await until(lambda: probe.calls > 3 or task.done())
    assert (probe.threads[-1] == LOOP_THREAD) == (busy_ns == LIGHT_NS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_baseline(session)
    calls = probe.calls
    assert await session.run(counting(Probe(work), 3)) == 3
    assert probe.calls == calls


@pytest.mark.real_time
@pytest.mark.parametrize("kind", ["scalars", "matmul"])
async def test_a_deadline_on_an_endless_loop(session: af.Session, graph: af.Graph, kind: str) -> None:
    if kind == "scalars":
        (fetch,) = af.while_loop(lambda i: i >= 0, lambda i: (i + 1) % 7, (0,))
    else:
        square = af.constant(np.full((300, 300), 0.01)) * 1
        fetch = af.while_loop(lambda i, _: i >= 0, lambda i, x: ((i + 1) % 7, af.tanh(x @ square)), (0, square))[1]
    session.plan(fetch)
    async with heartbeat() as beats:
        for timeout in DEADLINES_S:
            with pytest.raises(af.DeadlineExceeded, match=rf"timeout={timeout} "):
                await session.run(fetch, timeout=timeout)
            if len(beats) > 5:
                break
    assert len(beats) > 5
    assert_baseline(session)
    assert await session.run(af.constant(1) + 1) == 2


async def test_closing_the_session_stops_a_region(work: WorkClock, graph: af.Graph) -> None:
    probe = Probe(work)
    async with af.Session(graph) as session:
        task = asyncio.ensure_future(session.run(counting(probe, ENDLESS)))
        await until(lambda: probe.calls > 3 or task.done())
        await session.aclose(grace_s=0)
        with pytest.raises(af.SessionClosedError):
            await task


# -- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy_ns", [LIGHT_NS, HEAVY_NS], ids=["inline", "on the thread"])
async def test_an_error_keeps_its_provenance(
    work: WorkClock, session: af.Session, graph: af.Graph, busy_ns: int
) -> None:
    """Wherever the region ran; afterwards the session runs on."""
    probe = Probe(work, busy_ns=busy_ns, at=4, error=ValueError("no fours"))
    trace = af.Trace(detail="region")
    fetch = counting(probe, 9)
    with pytest.raises(af.KernelError, match="ValueError: no fours") as caught:
        await session.run(fetch, trace=trace)
    error = caught.value
    assert (error.op, error.node, error.tag) == ("probe", "loop/body/probe", "loop/4")
    assert error.inputs == ("int64[]",)
    assert "test_sliced_region.py" in str(error.location)
    assert error.__cause__ is probe.error
    assert (probe.threads[-1] == LOOP_THREAD) == (busy_ns == LIGHT_NS)
    *_, span = [firing for firing in trace.firings if firing.op == "loop"]
    assert (span.status, span.stream) == ("error", "inline" if busy_ns == LIGHT_NS else "compute")
    assert_baseline(session)
    probe.error = None
    assert await session.run(fetch) == 9


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("busy_ns", [LIGHT_NS, HEAVY_NS], ids=["inline", "on the thread"])
async def test_interpreted_nodes_stay_themselves(
    work: WorkClock, session: af.Session, graph: af.Graph, kind: type[BaseException], busy_ns: int
) -> None:
    """SystemExit and KeyboardInterrupt end the run unwrapped, and leave nothing behind."""
    probe = Probe(work, busy_ns=busy_ns, at=4, error=kind())
    fetch = counting(probe, 9)
    with pytest.raises(kind):
        await session.run(fetch)
    assert_baseline(session)
    probe.error = None
    assert await session.run(fetch) == 9
