"""Firings of different runs computed together: each gets its own result, and a failed or cancelled one harms no
other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow import serving
from asyncflow.compiler.plan import Plan
from asyncflow.devices.cpu import lanes
from asyncflow.graph.text.text import print_graph
from asyncflow.runtime.run.run import Run
from asyncflow.runtime.shared.batcher import BatchCall, Batcher
from asyncflow.runtime.shared.batches import Batches
from asyncflow.runtime.shared.bodies import Bodies
from asyncflow.runtime.shared.call_costs import CallCosts, Returns
from tests.clocks import WorkClock
from tests.conformance.gates import settle
from tests.conftest import OpenSession
from tests.faults.kernels import DEADLINES_S
from tests.others import others_end
from tests.patience import PATIENCE_S

WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Return the numbers of ended calls by their numbers of members."""
    found: Counter[int] = Counter()
    ended = Batcher.ended

    def noted(self: Batcher[Any], call: BatchCall[Any], taken_ns: float, now_ns: int) -> None:
        found[len(call.members)] += 1
        ended(self, call, taken_ns, now_ns)

    monkeypatch.setattr(Batcher, "ended", noted)
    return found


@pytest.fixture
def in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two calls at once in place of one."""
    monkeypatch.setattr(CallCosts, "parts", lambda self, size, random: min(2, size))


class Held(NamedTuple):
    asked: asyncio.Event
    goes_on: asyncio.Event


@pytest.fixture
def held(work: WorkClock, monkeypatch: pytest.MonkeyPatch) -> Held:
    """The request for the plan of a call sets the first event, and waits for the second; no pause divides a call."""
    found = Held(asyncio.Event(), asyncio.Event())
    plan_of = Bodies.plan_of

    async def waits(self: Bodies, program: Any) -> Any:
        found.asked.set()
        await found.goes_on.wait()
        return await plan_of(self, program)

    monkeypatch.setattr(Bodies, "plan_of", waits)
    return found


def layer(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    y = af.tanh(x @ WEIGHTS)
    return y, af.cond(af.sum(y) > 0, lambda: af.max(y), lambda: af.min(y))


def layer_of(x: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    y = np.tanh(x @ WEIGHTS)
    return y, y.max() if y.sum() > 0 else y.min()


@pytest.mark.usefixtures("work")
async def test_runs_share_calls_and_each_gets_its_own(open_session: OpenSession, sizes: Counter[int]) -> None:
    """Fault F42: whoever shares a call, result i is that of request i by itself."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        fetches = af.batched(layer, cost="none")(x)
    values = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    async with open_session(graph) as session:
        for _ in range(2):
            found = await asyncio.gather(*(session.run(fetches, {x: value}) for value in values))
            for value, (y, chosen) in zip(values, found, strict=True):
                np.testing.assert_allclose(y, layer_of(value)[0], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(chosen, layer_of(value)[1], rtol=1e-5, atol=1e-6)
    assert sum(size * count for size, count in sizes.items()) == 40
    assert max(sizes) >= 10


@pytest.mark.usefixtures("work")
async def test_calls_made_at_once_give_each_member_its_own(
    open_session: OpenSession, sizes: Counter[int], in_halves: None
) -> None:
    """Fault F38, F42: as above, where a device of several threads computes the halves; a failing member is alone."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        fetches = af.batched(lambda x: (af.check_numerics(x), *layer(x)))(x)
    values = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
    values[3] = np.nan
    async with open_session(graph) as session:
        for _ in range(2):
            runs = (session.run(fetches, {x: value}) for value in values)
            found: list[Any] = await asyncio.gather(*runs, return_exceptions=True)
            assert isinstance(found.pop(3), af.KernelError)
            for value, (_, y, chosen) in zip(np.delete(values, 3, axis=0), found, strict=True):
                np.testing.assert_allclose(y, layer_of(value)[0], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(chosen, layer_of(value)[1], rtol=1e-5, atol=1e-6)
    assert 5 <= max(sizes) <= 10


@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_only_plans_without_functions_of_the_users_are_computed_on_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    threads_of = Bodies.threads_of
    monkeypatch.setattr(lanes, "usable_cores", lambda: 4)

    def noted(self: Bodies, plan: Plan) -> int:
        told.append(threads_of(self, plan))
        return told[-1]

    monkeypatch.setattr(Bodies, "threads_of", noted)

    @af.op(outputs=af.spec("float32", (4,)), pure=True)
    def doubled(x: Any) -> Any:
        return 2 * x

    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        fetches = [af.batched(layer)(x), af.batched(doubled)(x)]
    async with af.Session(graph) as session:
        for each in fetches:
            await session.run(each, {x: np.ones(4, np.float32)})
    assert told == [4, 1]


async def test_iterations_and_branches_share_calls(open_session: OpenSession, sizes: Counter[int]) -> None:
    """Different iterations of different runs are members of one call; shapes that differ are not."""
    square = af.batched(lambda x: x * x - 1, cost="none")
    with af.Graph() as graph:
        n, x = af.placeholder("int64", (), name="n"), af.placeholder("float64", (None,), name="x")
        _, y = af.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, square(y) / 2), (0, x))
    feeds = [(k % 5, np.linspace(-1, 1, 2 + k % 2)) for k in range(12)]
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {n: count, x: start}) for count, start in feeds))
    for (count, start), given_ in zip(feeds, found, strict=True):
        for _ in range(count):
            start = (start * start - 1) / 2
        np.testing.assert_array_equal(given_, start)
    assert max(sizes) > 1


@pytest.mark.usefixtures("work")
async def test_a_loop_that_waits_for_its_own_calls_is_one_function() -> None:
    """The loop is a region if an iteration needs the result of the one before; else iterations share calls."""
    fn = af.batched(lambda x: x * 3 % 1000, cost="none")
    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        _, chained = af.while_loop(lambda i, s: i < 6, lambda i, s: (i + 1, fn(s)), (0, x))
        _, summed = af.while_loop(lambda i, s: i < 6, lambda i, s: (i + 1, s + fn(x + i)), (0, 0))
    async with af.Session(graph) as session:
        assert len(session.plan(chained, [x]).partitions[0].root.nodes) == 3  # feed, region, fetch
        found = await asyncio.gather(*(session.run(chained, {x: k}) for k in range(9)))
        assert found == [k * 3**6 % 1000 for k in range(9)]
        assert await session.run(summed, {x: 4}) == sum((4 + i) * 3 % 1000 for i in range(6))
        chained_counts, summed_counts = session.statistics().batches.values()
    assert chained_counts.members == 54
    assert chained_counts.largest >= 8
    assert summed_counts.largest > 1


@pytest.mark.parametrize("is_one", [True, False])
async def test_traces_have_the_calls_that_runs_share(open_session: OpenSession, is_one: bool) -> None:
    """Each run has its own firing, and the call as a run of its own, which names its members."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y = af.batched(layer, cost="none", max_delay_s=60, max_size=2)(x)[0]
    first = af.Trace()
    second = first if is_one else af.Trace()
    async with open_session(graph) as session:
        value = np.ones(4, np.float32)
        await asyncio.gather(*(session.run(y, {x: value}, trace=trace) for trace in (first, second)))
    for trace in (first, second):
        (call,) = [run for run in trace.runs if run.label.startswith("layer for 2, of run ")]
        assert call.status == "ok"
        members = {firing.run for firing in trace.firings if firing.node == "layer"} - {call.run}
        assert len(members) == (2 if is_one else 1)
        assert all(str(run) in call.label for run in members)
    (call,) = [run for run in first.runs if run.label.startswith("layer")]
    assert any(firing.run == call.run for firing in first.firings)


async def test_captures_and_variables(open_session: OpenSession) -> None:
    """Values that depend on a run belong to each member; a variable is read when the call is made, after the run's
    writes.
    """
    scale = af.Variable(np.float32(2), name="scale")
    with af.Graph() as graph:
        x, own = af.placeholder("float32", (3,), name="x"), af.placeholder("float32", (), name="own")
        same = af.constant(np.arange(3, dtype=np.float32)) + 1
        by = scale.assign_add(1)
        y = af.batched(lambda x: x * scale + own * same)(x)
    async with open_session(graph) as session:

        async def request(k: int) -> None:
            found = await session.run(y, {x: np.full(3, k, np.float32), own: np.float32(k)})
            np.testing.assert_array_equal(found, np.full(3, k * 2) + k * np.arange(1, 4))

        await asyncio.gather(*map(request, range(6)))
        assert await session.run([by, y], {x: np.ones(3, np.float32), own: np.float32(0)}) is not None
        np.testing.assert_array_equal(await session.run(y, {x: np.ones(3, np.float32), own: np.float32(0)}), [3, 3, 3])


async def test_a_check_fails_its_own_member(open_session: OpenSession) -> None:
    """Behaviour 88: an assertion whose result is unused, in a batched function, alone or in a branch."""

    def checked(x: af.Tensor) -> af.Tensor:
        af.assert_that(x < 5, "too large", [x])
        return af.cond(x > 2, lambda: af.batched(lambda y: limited(y) + 1)(x), lambda: x)

    def limited(x: af.Tensor) -> af.Tensor:
        with af.control_dependencies([af.assert_that(x != 4, "four")]):
            return x * 10

    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        y = af.batched(checked, cost="none")(x)
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: k}) for k in range(8)), return_exceptions=True)
        found.append((await asyncio.gather(session.run(y, {x: 6}), return_exceptions=True))[0])  # which is alone
        await settle()  # an inner call may still compute for members that have failed
    assert found[:4] == [0, 1, 2, 31]
    for k, error in zip((4, 5, 6, 7, 6), found[4:], strict=True):
        assert isinstance(error, af.KernelError), error
        assert str(error.__cause__).splitlines() == (["four"] if k == 4 else ["too large", f"  {k}"])
        assert error.location.function == ("limited" if k == 4 else "checked")


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("at_fault", [0, 7, 31])
async def test_one_bad_member_fails_alone(open_session: OpenSession, sizes: Counter[int], at_fault: int) -> None:
    """Behaviour 88, Fault F38: of 32, one fails with its own node and cause; the others get their results."""

    @af.op(outputs=af.spec("int64", ()), rows=True, pure=True)
    def checked(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if (x == 99).any():
            raise ValueError("99")
        return x

    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        y = af.batched(lambda x: checked(x) + 1, cost="none")(x)
    async with open_session(graph) as session:
        runs = [session.run(y, {x: 99 if k == at_fault else k % 10}) for k in range(32)]
        found = await asyncio.gather(*runs, return_exceptions=True)
        for k, result in enumerate(found):
            if k == at_fault:
                assert isinstance(result, af.KernelError), result
                assert (result.op, result.location.function) == ("checked", "<lambda>"), str(result)
                assert result.__notes__ == [f"in {y.node.name} (batched), built at {y.node.location}"]
                assert isinstance(result.__cause__, ValueError)
            else:
                assert result == k % 10 + 1
        del found, result
        assert await session.run(y, {x: 3}) == 4
    assert sum(sizes.values()) <= 1 + 2 * 6


async def test_cancelled_members_leave(open_session: OpenSession, sizes: Counter[int]) -> None:
    """Behaviour 88, Fault F20, F40: members cancelled before the call are not in it, and no other member is harmed."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer, max_delay_s=3600.0, max_size=8, cost="none")(x)  # a call is made when it is full
    value = np.ones(4, np.float32)
    async with open_session(graph) as session:

        async def asked(count: int) -> list[asyncio.Task[Any]]:
            runs = [asyncio.ensure_future(session.run(y, {x: value * k})) for k in range(count)]
            for _ in range(3):
                await asyncio.sleep(0)
            return runs

        def computed() -> int:
            return sum(size * count for size, count in sizes.items())

        runs = await asked(6)
        for run in runs[::2]:
            run.cancel()
        await asyncio.wait(runs[::2])
        runs += await asked(5)
        found: list[Any] = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in found[:6:2])
        for k, result in [(1, found[1]), (3, found[3]), (5, found[5]), *enumerate(found[6:])]:
            np.testing.assert_allclose(result, layer_of(value * k)[0], rtol=1e-5, atol=1e-6)
        assert computed() == 8
        everyone = await asked(3)
        for run in everyone:
            run.cancel()
        assert len(await asyncio.gather(*everyone, return_exceptions=True)) == 3
        assert computed() == 8
        await asyncio.gather(*await asked(8))
        assert computed() == 16


@pytest.mark.parametrize("left", [0, 1, 3])
async def test_a_member_that_leaves_during_compilation_is_not_computed(
    held: Held, sizes: Counter[int], left: int
) -> None:
    """Fault F40: no cancelled member is computed, and the remaining members are computed without the others."""
    asked, goes_on = held
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer, cost="none")(x)
    async with af.Session(graph) as session:
        runs = [asyncio.ensure_future(session.run(y, {x: np.ones(4, np.float32)})) for _ in range(4)]
        await asked.wait()
        for run in runs[left:]:
            run.cancel()
        await asyncio.wait(runs[left:])
        goes_on.set()
        await asyncio.wait(runs)
        await others_end()
        assert sizes == Counter({left: 1} if left else {})
        await session.run(y, {x: np.ones(4, np.float32)})


async def test_a_deadline_that_passes_while_it_waits(held: Held, sizes: Counter[int]) -> None:
    """Fault F45: such a member is not computed."""
    asked, goes_on = held
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer)(x)
    async with af.Session(graph) as session:
        first = asyncio.ensure_future(session.run(y, {x: np.ones(4, np.float32)}))
        await asked.wait()
        with pytest.raises(af.DeadlineExceeded):
            await session.run(y, {x: np.ones(4, np.float32)}, timeout=0.01)
        goes_on.set()
        await first
    assert sizes == Counter({1: 1})


async def test_a_delay_ends_before_a_deadline(open_session: OpenSession, sizes: Counter[int]) -> None:
    """Fault F45: a member that would wait for others beyond it is computed without them."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = af.batched(lambda x: x * 2, max_size=4, max_delay_s=1e6)(x)
    found: list[Any] = []
    async with open_session(graph) as session:
        for timeout in DEADLINES_S:
            sizes.clear()
            runs = (session.run(y, {x: k}, timeout=timeout) for k in range(3))
            found = await asyncio.gather(*runs, return_exceptions=True)
            if not any(isinstance(each, af.DeadlineExceeded) for each in found):
                break
        assert found == [0, 2, 4]
    assert sum(size * count for size, count in sizes.items()) == 3


def doubled_until(limit: af.Tensor) -> af.Tensor:
    """Ends at once for a limit that is not positive, or else never."""
    return af.while_loop(lambda i: i < limit, lambda i: i * 2, 0.0)


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a call of a batched function goes on beside the event loop's other work."""
    found = asyncio.Event()
    compute = Batches._compute

    def noted(self: Batches, call: BatchCall[Any], plan: Any) -> None:
        compute(self, call, plan)
        if self._runs_of:
            found.set()

    monkeypatch.setattr(Batches, "_compute", noted)
    return found


async def test_a_member_that_never_ends_leaves_the_others_to_end(under_way: asyncio.Event) -> None:
    """Fault F20, F40: the other members of its call end, and so do members that come while it goes on."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = af.batched(doubled_until)(x)
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        watched: list[serving.ObservedBatch] = []
        observer = Mock(spec=serving.Metrics)  # which has the methods of an observer
        observer.batch_ended = watched.append
        session.observe(observer)
        bad, *good = [asyncio.ensure_future(session.run(y, {x: limit})) for limit in (5.0, -1.0, -2.0, 0.0)]
        await under_way.wait()
        later = asyncio.ensure_future(session.run(y, {x: -3.0}))
        bad.cancel()
        assert await asyncio.gather(*good, later) == [0.0] * 4
        assert bad.cancelled()
        assert await session.run(y, {x: -1.0}) == 0.0
        (counts,) = session.statistics().batches.values()
        assert (len(watched), sum(each.error is not None for each in watched)) == (counts.calls, counts.failed)
        assert counts.failed >= 1, "the call that is computed again in halves"


async def test_a_call_that_all_members_have_left_has_not_failed(
    under_way: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault F20: a call that is being stopped, and is overdue meanwhile, counts as no failure."""
    has_left = lambda call: all(member.is_gone for member in call.members)  # noqa: E731
    monkeypatch.setattr(BatchCall, "overdue_ns", lambda call: call.started_ns if has_left(call) else inf)
    left, stop = Batches.left, Run.stop
    stops: list[Callable[[], None]] = []

    def noted(self: Batches, place: Any) -> None:
        with monkeypatch.context() as held:  # a pass comes before the stopped call ends, as if it was on a thread
            held.setattr(Run, "stop", lambda run, status: stops.append(partial(stop, run, status)))
            left(self, place)
            self.flush(is_idle=False)
        while stops:
            stops.pop()()

    monkeypatch.setattr(Batches, "left", noted)
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = af.batched(doubled_until)(x)
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        runs = [asyncio.ensure_future(session.run(y, {x: limit})) for limit in (5.0, 6.0)]
        await under_way.wait()
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)
        assert await session.run(y, {x: -1.0}) == 0.0
        (counts,) = session.statistics().batches.values()
        assert counts.failed == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_a_call_of_others_goes_on_where_it_may_not_be_done_again(under_way: asyncio.Event) -> None:
    """Fault F20, F40: a user's function is called once for each member; later members are not held up."""
    calls: list[int] = []
    has_begun = threading.Event()

    @af.op(outputs=af.spec("float64", ()))
    def noted(i: Any) -> Any:
        calls.append(np.size(i))
        has_begun.set()
        return i * 2

    def loop(limit: af.Tensor) -> af.Tensor:
        return af.while_loop(lambda i: i < limit, noted, 0.0)

    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = af.batched(loop)(x)
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        bad, stays = [asyncio.ensure_future(session.run(y, {x: limit})) for limit in (5.0, 6.0)]
        await under_way.wait()
        assert await asyncio.to_thread(has_begun.wait, PATIENCE_S / 2)
        bad.cancel()
        assert await session.run(y, {x: -3.0}, timeout=PATIENCE_S / 2) == 0.0
        assert not stays.done()
        stays.cancel()
        await asyncio.wait([bad, stays])
        assert set(calls) == {1}


async def test_of_several_late_members_only_the_endless_one_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F45: a call that takes too much of the time of its members is divided, until the others have ended."""
    monkeypatch.setattr(BatchCall, "overdue_ns", lambda call: call.started_ns + 1_000_000)
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = af.batched(doubled_until)(x)
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        limits = (-1.0, -4.0, 5.0, -2.0, -3.0)
        runs = [asyncio.ensure_future(session.run(y, {x: limit}, timeout=PATIENCE_S)) for limit in limits]
        late = runs.pop(2)
        assert await asyncio.gather(*runs) == [0.0] * 4
        assert not late.done()
        late.cancel()
        await asyncio.wait([late])


async def test_members_have_deadline_and_priority_of_their_run(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault F45: by it, a call is cut so that it is met."""
    offered: list[tuple[int, float, int]] = []
    offer = Batcher.offer

    def noted(self: Batcher[Any], signature: Any, costs: Any, policy: Any, member: Any, label: str) -> None:
        offered.append((member.priority, member.deadline_ns, member.offered_ns))  # its inputs are not to be kept
        offer(self, signature, costs, policy, member, label)

    monkeypatch.setattr(Batcher, "offer", noted)
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer)(x)
    async with open_session(graph) as session:
        await session.run(y, {x: np.ones(4, np.float32)}, timeout=3600)
        await session.run(y, {x: np.ones(4, np.float32)}, priority=3)
    (first, first_deadline_ns, first_offered_ns), (second, second_deadline_ns, _) = offered
    assert (first, second) == (0, 3)
    assert 3.5e12 < first_deadline_ns - first_offered_ns <= 3.6e12
    assert second_deadline_ns == float("inf")


@pytest.mark.usefixtures("work")
async def test_little_memory_makes_small_calls() -> None:
    """A call that does not fit into memory is computed in parts, and the session learns how many members fit."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (10_000,), name="x")
        y = af.batched(lambda x: af.sum(af.sort(x * 2) + 1), cost="none")(x)
    async with af.Session(graph, memory_limit=1_000_000) as session:
        for _ in range(3):
            found = await asyncio.gather(*(session.run(y, {x: np.full(10_000, float(k))}) for k in range(16)))
            assert found == [10_000 * (2 * k + 1) for k in range(16)]
        counts = session.statistics().batches["batched"]
    assert counts.largest == 16
    assert counts.failed <= 6


@pytest.mark.parametrize("seed", range(4))
async def test_members_of_any_fate(open_session: OpenSession, seed: int) -> None:
    """Fault F20, F38, F40, F42, F45: whoever is cancelled, late or at fault changes no other result."""

    @af.op(outputs=af.spec("int64", ()), rows=True, pure=True)
    def checked(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if (x >= 700).any():
            raise ValueError("700")
        return x

    step = af.batched(lambda s, i: checked(s) * 3 + i, max_size=5)
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="n")
        _, y = af.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, step(s, i) % 1000), (0, x))
        z = af.batched(lambda y: y + 1)(y)
    rng = np.random.default_rng(seed)

    def by_hand(start: int, count: int) -> int | None:
        for k in range(count):
            if start >= 700:
                return None
            start = (start * 3 + k) % 1000
        return start + 1

    async with open_session(graph, debug=seed % 2 == 1) as session:

        async def request() -> str:
            start, count = int(rng.integers(0, 999)), int(rng.integers(0, 5))
            fate, turns = rng.choice(["stays", "stays", "cancelled", "late"]), int(rng.integers(0, 12))
            timeout = float(rng.choice([1e-9, 1e-4, 1e-3])) if fate == "late" else None
            for _ in range(int(rng.integers(0, 6))):
                await asyncio.sleep(0)
            work = session.run(z, {x: start, n: count}, timeout=timeout, priority=int(rng.integers(0, 3)))
            run = asyncio.ensure_future(work)
            for _ in range(turns if fate == "cancelled" else 0):
                await asyncio.sleep(0)
            if fate == "cancelled":
                run.cancel()
            await asyncio.wait([run])
            expected = by_hand(start, count)
            if run.cancelled():
                assert fate == "cancelled"
                return "cancelled"
            error = run.exception()
            if isinstance(error, af.DeadlineExceeded):
                assert fate == "late"
                return "late"
            if error is not None:
                assert expected is None, error
                assert isinstance(error.__cause__, ValueError), error
                return "at fault"
            assert run.result() == expected
            return "stays"

        fates = await asyncio.gather(*(request() for _ in range(30)))
        assert {"stays", "at fault"} <= set(fates)
        assert await session.run(z, {x: 1, n: 1}) == 4
        for _ in range(100_000):
            if not session.statistics().runs:
                break
            await asyncio.sleep(0)
        assert session.statistics().runs == 0


async def test_clients_that_ask_again_stay_together(held: Held, sizes: Counter[int]) -> None:
    """A member that comes while a call is computed waits for its members to ask again, and then all share calls."""
    asked, goes_on = held
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer, cost="none")(x)
    async with af.Session(graph) as session:

        async def client(requests: int) -> None:
            for _ in range(requests):
                await session.run(y, {x: np.ones(4, np.float32)})

        others = [asyncio.ensure_future(client(4)) for _ in range(5)]
        await asked.wait()
        late = asyncio.ensure_future(client(3))
        for _ in range(5):
            await asyncio.sleep(0)
        goes_on.set()  # the call of the five ends while the late one waits
        await asyncio.gather(late, *others)
    assert sizes == {5: 1, 6: 3}


async def test_a_member_due_a_moment_after_its_request_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for clients that were just answered ends, also if its time has come before a timer is set for it."""
    until: list[float] = []

    def a_moment(returns: Returns, costs: CallCosts, waiting: int, most: int, now_ns: int) -> float:
        until.append(now_ns + 1)
        return until[0] if now_ns < until[0] else -inf

    monkeypatch.setattr(Returns, "waits_until_ns", a_moment)
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer)(x)
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        value = np.ones(4, np.float32)
        np.testing.assert_allclose(await session.run(y, {x: value}), layer_of(value)[0], rtol=1e-5, atol=1e-6)
    assert len(until) > 1


async def test_a_member_waits_while_an_abandoned_call_is_compiled(held: Held) -> None:
    """Fault F20: all members of a call leave before it has a plan, and the next call is made nevertheless."""
    asked, goes_on = held
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, _ = af.batched(layer)(x)
    value = np.ones(4, np.float32)
    async with asyncio.timeout(PATIENCE_S), af.Session(graph) as session:
        leaving = asyncio.ensure_future(session.run(y, {x: value}))
        await asked.wait()
        waiting = [asyncio.ensure_future(session.run(y, {x: value})) for _ in range(3)]
        for _ in range(100):  # until they are in line
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        goes_on.set()
        for found in await asyncio.gather(*waiting):
            np.testing.assert_allclose(found, layer_of(value)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize(("times", "less"), [(1, 1), (2, 0)])
async def test_a_function_that_gives_other_rows(open_session: OpenSession, times: int, less: int, runs: int) -> None:
    """Fault F41: a function that returns too few or too many rows fails with the expected number, also for one
    member.
    """

    @af.op(outputs=af.spec("float32", ()), rows=True, pure=True)
    def other(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.tile(x.sum(axis=1), times)[less:]

    with af.Graph() as graph:
        x = af.placeholder("float32", (2,), name="x")
        y = af.batched(other, cost="none")(x)
    async with open_session(graph) as session:
        found = await asyncio.gather(
            *(session.run(y, {x: np.full(2, k, np.float32)}) for k in range(runs)), return_exceptions=True
        )
        for result in found:
            assert isinstance(result, af.KernelError)
            assert f"results have [{times - less}] rows, and 1 were given; return one for each" in str(result)
            assert "test_batched.py" in str(result)
        del found, result


async def test_functions_of_users_get_all_rows_at_once(open_session: OpenSession) -> None:
    seen: list[int] = []

    @af.op(outputs=af.spec("float32", ()), rows=True)
    def total(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append(len(x))
        if (x < 0).any():
            raise ValueError("negative")
        return x.sum(axis=1)

    with af.Graph() as graph:
        x = af.placeholder("float32", (2,), name="x")
        y = af.batched(total, cost="none")(x)
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: np.full(2, k, np.float32)}) for k in range(8)))
        assert found == [2 * k for k in range(8)]
        assert max(seen) > 1
        # It is not said to be pure, so it is not called again, and all that shared the call fail.
        rows = [np.array([k, -1 if k == 2 else 0], np.float32) for k in range(4)]
        failed = await asyncio.gather(*(session.run(y, {x: row}) for row in rows), return_exceptions=True)
        assert isinstance(failed[2], af.KernelError)
        del failed


async def test_functions_of_users_give_numbers(open_session: OpenSession) -> None:
    """A card leaves a number that the host has made there, though a call would have its results stay on the card."""

    @af.op(outputs=af.spec("float64", ()), batch=af.Batch(2))
    def more(x: Any) -> Any:
        return x + 1.0

    with af.Graph() as graph:
        x = af.placeholder("float64", (2,), name="x")
        y = more(x[0]) * more(x[1])
    async with open_session(graph) as session:
        assert await session.run(y, {x: [1.0, 2.0]}) == 6.0


async def test_ops_of_users_share_calls(open_session: OpenSession) -> None:
    """`@op(batch=)` takes rows; static arguments are the same for all members of a call."""
    seen: list[int] = []

    @af.op(outputs=af.spec("int64", ()), batch=af.Batch(16, cost="none"), pure=True)
    def powers(x: np.ndarray[Any, Any], *, to: int = 1) -> np.ndarray[Any, Any]:
        seen.append(len(x))
        return x**to

    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        square, cube = powers(x, to=2), powers(x, to=3)
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run([square, cube], {x: k}) for k in range(9)))
        squares, cubes = (session.statistics().batches[power.node.name] for power in (square, cube))
    assert found == [[k**2, k**3] for k in range(9)]
    assert sum(seen) == 18
    assert max(seen) == max(squares.largest, cubes.largest) > 1
    assert squares.members == cubes.members == 9
    with pytest.raises(af.GraphError, match="batch= of f is an"):
        af.op(outputs=af.spec("int64", ()), name="f", batch=3)(lambda x: x)  # type: ignore[call-overload]
    for batch in (af.Batch(), af.Batch(ragged="packed")):
        with pytest.raises(af.GraphError, match="is a coroutine function; batch= is for functions that do not await"):
            af.op(outputs=af.spec("int64", ()), batch=batch)(asyncio.sleep)


async def test_a_share_of_the_calls_is_checked(open_session: OpenSession, caplog: pytest.LogCaptureFixture) -> None:
    """Rows that depend on one another, which they must not, are found; sound ones are not complained of."""

    @af.op(outputs=af.spec("float32", ()), rows=True, pure=True)
    def centred(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x - x.mean()

    with af.Graph() as graph:
        x = af.placeholder("float32", (), name="x")
        sound, wrong = af.batched(lambda x: af.sin(x) * 3, cost="none")(x), af.batched(centred, cost="none")(x)
    async with open_session(graph) as session:
        session.check_batches(1.0)
        await asyncio.gather(*(session.run(sound, {x: np.float32(k)}) for k in range(6)))
        await others_end()
        # On a busy machine the guard of the event loop may have a word to say.
        assert not any("differs for member" in message for message in caplog.messages)
        await asyncio.gather(*(session.run(wrong, {x: np.float32(k)}) for k in range(6)))
        await others_end()
        assert any(
            "result 0 of centred differs for member " in message and "(arguments float32[])" in message
            for message in caplog.messages
        )
        for share in (2, "x", None, True):
            with pytest.raises(ValueError, match="from 0 to 1"):
                session.check_batches(share)  # type: ignore[arg-type]


@settings(max_examples=15)
@given(st.data())
async def test_random_requests(data: st.DataObject) -> None:
    """Fault F42: random sizes, arrivals and cancels; results that are exact are equal bit for bit."""
    with af.Graph() as graph:
        x = af.placeholder("int64", (None,), name="x")
        steps = af.placeholder("int64", (), name="steps")
        fn = af.batched(lambda x, n: af.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, s * 3 + i), (0, x))[1])
        y = fn(x, steps)
    requests = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 3)), max_size=12))
    seed = data.draw(st.integers(0, 99))
    async with af.Session(graph, seed=seed) as session:

        async def request(extent: int, count: int, turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            expected = np.arange(extent)
            for k in range(count):
                expected = expected * 3 + k
            run = asyncio.ensure_future(session.run(y, {x: np.arange(extent), steps: count}))
            if turns == 3:
                await asyncio.sleep(0)
                run.cancel()
                await asyncio.wait([run])
            else:
                np.testing.assert_array_equal(await run, expected)

        await asyncio.gather(*(request(*each) for each in requests))
        for _ in range(100_000):
            if not session.statistics().runs:
                break
            await asyncio.sleep(0)  # a call that nobody wants any more is being stopped
        assert session.statistics().runs == 0


@pytest.mark.parametrize("pool", [None, af.Pool(4)])
async def test_runs_in_flight_end_while_a_session_closes(pool: af.Pool | None) -> None:
    """A session that closes gives its runs time to end, and their shared calls and steps are parts of them."""
    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        step = af.batched(lambda s: s + 1) if pool is None else lambda s: s + 1
        y = af.while_loop(lambda s: s < 20, step, x, pool=pool)
    async with af.Session(graph) as session:
        runs = [asyncio.ensure_future(session.run(y, {x: k})) for k in range(6)]
        await asyncio.sleep(0)
        await session.aclose(PATIENCE_S)
    assert await asyncio.gather(*runs) == [20] * 6


async def test_strings_are_members(open_session: OpenSession) -> None:
    with af.Graph() as graph:
        x = af.placeholder("string", (), name="x")
        shared = af.batched(lambda s: (s, af.equal(s, "w2")), cost="none")
        twice, flag = shared(shared(x)[0])
        _, pooled = af.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s), (0, x), pool=af.Pool(4))
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run([twice, flag, pooled], {x: f"w{k}"}) for k in range(5)))
    for k, (word, is_two, same) in enumerate(found):
        assert (str(word), bool(is_two), str(same)) == (f"w{k}", k == 2, f"w{k}")
        assert word.dtype == same.dtype == np.dtypes.StringDType()


@pytest.mark.parametrize("lift", [True, False])
async def test_rows_and_arrays_within_members(open_session: OpenSession, lift: bool) -> None:
    """A batched function may map over rows of its own, keep a TensorArray, and give gradients of both."""

    def fn(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        cubes = af.map_fn(lambda row: af.sum(row * row * row), x, lift=lift)
        return cubes, af.gradients(af.sum(cubes), x)

    with af.Graph() as graph:
        x = af.placeholder("float64", (3, 2), name="x")
        fetches = af.batched(fn, cost="none")(x)
    values = np.random.default_rng(5).normal(size=(6, 3, 2))
    async with open_session(graph) as session:
        found = [await session.run(fetches, {x: values[0]})]  # alone
        found += await asyncio.gather(*(session.run(fetches, {x: value}) for value in values[1:]))
    for value, (cubes, gradient) in zip(values, found, strict=True):
        np.testing.assert_allclose(cubes, (value**3).sum(1))
        np.testing.assert_allclose(gradient, 3 * value**2)


async def test_a_check_says_what_fails_alone(open_session: OpenSession, caplog: pytest.LogCaptureFixture) -> None:
    # All three wait for one another: how far each has come when the first is ready is for the machine to say.
    together = af.Batch(max_size=3, max_delay_s=PATIENCE_S, cost="none")

    @af.op(outputs=af.spec("float32", ()), batch=together, pure=True)
    def sociable(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if len(x) == 1:
            raise ValueError("nobody else is there")
        return x + 1

    with af.Graph() as graph:
        x = af.placeholder("float32", (), name="x")
        y = sociable(x)
    async with open_session(graph) as session:
        session.check_batches(1.0)
        assert await asyncio.gather(*(session.run(y, {x: np.float32(k)}) for k in range(3))) == [1, 2, 3]
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})  # calls that fail may be among them
    assert sum("fails alone" in message and "nobody else" in message for message in caplog.messages) == 3


def test_its_graph_has_no_text_and_says_why() -> None:
    with af.Graph() as graph:
        af.batched(lambda x: x * 2)(af.placeholder("float32", (4,)))
    with pytest.raises(af.GraphError, match="the function of a batched call is code of this process"):
        print_graph(graph)


def _drawn_on(x: af.Tensor) -> Any:
    return af.while_loop(lambda y: y < af.random.uniform((), dtype="float64", seed=8), lambda y: y + 0.25, (x,))


async def test_random_numbers_do_not_depend_on_other_members_of_a_call(open_session: OpenSession) -> None:
    """Nor on being batched at all: each member draws what its run draws by itself, or its own seed says."""

    def noisy(x: af.Tensor, seed: af.Tensor) -> af.Tensor:
        def again(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, y + af.random.gamma(alpha=2.0, seed=3) * af.random.integers(high=9, seed=(seed, 4))

        x = af.while_loop(lambda i, _: i < 2, again, (0, x))[1]
        x = af.cond(x > 12, lambda: x + af.random.normal(seed=5), lambda: x - af.random.uniform(seed=(seed, 6)))
        x = x + af.sum(af.vmap(lambda y: _drawn_on(y)[0])(af.stack([x / 19, x / 9])))
        return x + af.sum(af.vmap(lambda y: y * af.random.normal(seed=7))(af.ones(3)))

    with af.Graph(seed=1) as graph:
        x, seed = af.placeholder("float64", ()), af.placeholder("int64", ())
        shared = af.batched(noisy)
        pairs = [
            af.while_loop(lambda i, _: i < 2, lambda i, y, f=f: (i + 1, f(y, seed)), (0, f(x, seed)))[1]
            for f in (noisy, shared)
        ]
    async with open_session(graph) as session:
        feeds = [{x: float(k), seed: k % 3} for k in range(7)]
        for alone, together in await asyncio.gather(*(session.run(pairs, each) for each in feeds)):
            # A card adds up three numbers in another order than a CPU.
            np.testing.assert_allclose(together, alone, rtol=1e-12)
        (counts,) = {counts.largest > 1 for counts in session.statistics().batches.values()}
        assert counts


def test_what_cannot_be_batched_is_named() -> None:
    total = af.Variable(0.0, name="total")
    with af.Graph():
        x = af.placeholder("float64", (), name="x")
        array = af.TensorArray("float64", 1).write(0, x)
        for fn, message in [
            (total.assign_add, "total/assign_add"),
            (lambda x: (), "it gives nothing"),
            (lambda x: x + array.read(0), "captures, is a TensorArray or RowStore"),
            (lambda x: af.batched(lambda y: af.nonzero(af.reshape(y, (1,)))[0])(x) + 1, "nonzero"),
        ]:
            with pytest.raises(af.GraphError, match=message) as caught:
                af.batched(fn)(x)
            assert "test_batched.py" in str(caught.value)
        with pytest.raises(af.GraphError, match="no gradient goes"):
            af.gradients(af.batched(lambda x: x * 2)(x), x)
        with pytest.raises(af.GraphError, match="takes a function"):
            af.batched(3)  # type: ignore[arg-type]
        with pytest.raises(af.GraphError, match="max_size is an integer of at least 1; got 0"):
            af.batched(lambda x: x, 0)
        assert af.map_fn(af.batched(lambda x: x * 2), af.ones(3)).shape == (3,)
    assert af.batched(lambda x: x * 2)(3) == 6
