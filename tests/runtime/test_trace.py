"""Records of a trace: all of its own runs, also while another trace records, and nothing of other runs."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.scheduler.frame import Iteration
from asyncflow.runtime.watch.trace import Firing, MemorySample
from asyncflow.testing import virtual_clock
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def value(graph: af.Graph) -> af.Tensor:
    return af.constant(1.0) + af.placeholder("float64", (), name="x")


async def run(session: af.Session, value: af.Tensor, trace: af.Trace | str | None = None) -> None:
    await session.run(value, {value.node.inputs[1]: 1.0}, trace=trace)


async def test_inner_block(session: af.Session, value: af.Tensor) -> None:
    with af.Trace() as outer:
        await run(session, value)
        with af.Trace() as inner:
            await run(session, value)
        await run(session, value)
    assert (len(outer.runs), len(inner.runs)) == (3, 1)
    assert inner.runs[0] in outer.runs
    assert {firing.run for firing in outer.firings} == {span.run for span in outer.runs}
    assert len(outer.memory) == len(outer.firings)


async def test_trace_of_one_run(session: af.Session, value: af.Tensor, tmp_path: Path) -> None:
    with af.Trace() as outer:
        await run(session, value, one := af.Trace())
        await run(session, value, str(tmp_path / "two.json"))
    assert len(one.runs) == 1
    assert len(outer.runs) == 2
    assert (tmp_path / "two.json").exists()


async def test_three_deep_and_entered_again(session: af.Session, value: af.Tensor) -> None:
    outer = af.Trace()
    for _ in range(2):
        with outer, af.Trace(), af.Trace():
            await run(session, value)
    assert [span.status for span in outer.runs] == ["ok", "ok"]


async def test_capacity_holds_for_added_records(session: af.Session, value: af.Tensor) -> None:
    with af.Trace(capacity=1) as outer, af.Trace() as inner:
        await run(session, value)
        await run(session, value)
    assert len(outer.firings) == 1
    assert outer.dropped == len(inner.firings) - 1


@pytest.mark.parametrize("launches", ["regions", "nodes"])
def test_a_full_trace_counts_what_a_device_does(launches: Any) -> None:
    """Two runs on a simulated card, the second of which finds the trace full: all but a few firings are dropped."""

    def traced(capacity: int) -> af.Trace:
        trace = af.Trace(detail="region", capacity=capacity)

        async def main() -> None:
            with af.Graph() as graph:
                x = af.placeholder("float32", (64,))
                y = af.while_loop(lambda i, _: i < 4, lambda i, v: (i + 1, af.tanh(v)), (0, x))[1]
            async with af.Session(graph) as session:
                for _ in range(2):
                    await session.run(y, {x: np.ones(64, np.float32)}, trace=trace)

        with virtual_clock(launches=launches) as clock:
            clock.run(main())
        return trace

    complete, short = traced(1_000), traced(3)
    assert [each._replace(run=0, location="") for each in short.firings] == [
        each._replace(run=0, location="") for each in complete.firings[:3]
    ]
    assert short.memory == complete.memory[:3]
    assert (complete.dropped, short.dropped) == (0, len(complete.firings) - 3)


def test_records_of_launched_work_are_made_when_they_are_read() -> None:
    made: list[int] = []
    trace = af.Trace(capacity=3)

    def records(run: int) -> tuple[list[Firing], list[MemorySample]]:
        made.append(run)
        firing = Firing(run, "a", "a", "", "sim:0", "compute", 0, 1, 2, "", "ok", "")
        return [firing], [MemorySample("sim:0", run, 8)]

    for run in range(2):
        trace._add_later(1, partial(records, run))
    assert (trace.count, made, repr(trace)) == (2, [], "<Trace: 0 runs, 2 firings, 0 transfers, detail 'node'>")
    assert [sample.time_ns for sample in trace.memory] == [0, 1]
    trace._add_later(1, partial(records, 2))
    assert [firing.run for firing in trace.firings] == [0, 1, 2]
    assert (trace.count, made) == (3, [0, 1, 2])


def test_a_firing_that_is_recorded_makes_no_earlier_records() -> None:
    """To make the records of a simulation while its program runs would take a fifth of its time."""
    made: list[int] = []
    trace = af.Trace()

    def records() -> tuple[list[Firing], list[MemorySample]]:
        made.append(1)
        return [firing._replace(run=1)], []

    firing = Firing(0, "a", "a", "", "cpu:0", "async", 0, 1, 2, "", "ok", "")
    trace._add_one(firing, [MemorySample("cpu:0", 2, 8)])
    trace._add_later(1, records)
    trace._add_one(firing._replace(run=2), [MemorySample("cpu:0", 3, 8)])
    assert (made, trace.count) == ([], 3)
    assert [each.run for each in trace.firings] == [0, 1, 2]
    assert [sample.time_ns for sample in trace.memory] == [2, 3]
    assert (made, trace.count) == ([1], 3)


def test_records_that_come_while_others_are_made_are_counted() -> None:
    """A thread that reads the records may pause at any call, and a run of another thread adds its records then."""
    trace = af.Trace()
    firing = Firing(0, "a", "a", "", "sim:0", "compute", 0, 1, 2, "", "ok", "")

    class Interrupted(list[Firing]):
        def __len__(self) -> int:
            trace._add_later(1, lambda: ([firing], []))
            return super().__len__()

    trace._add_later(1, lambda: (Interrupted([firing]), []))
    added = len(trace.firings)
    assert (added > 1, trace.count) == (True, added)
    trace._add_later(1, lambda: ([firing], []))
    assert len(trace.firings) == trace.count == added + 1


def test_a_finalizer_that_reads_the_trace_whose_records_are_made_does_not_wait() -> None:
    """The finalizer sees the records made so far, and another trace as a whole."""
    trace, other = af.Trace(), af.Trace()
    firing = Firing(0, "a", "a", "", "sim:0", "compute", 0, 1, 2, "", "ok", "")
    seen: list[int] = []

    class Finalized:
        def __del__(self) -> None:
            seen.extend([len(trace.firings), len(other.firings)])

    def records() -> tuple[list[Firing], list[MemorySample]]:
        Finalized()
        return [firing], []

    for each in (trace, trace, other):
        each._add_later(1, records if each is trace else lambda: ([firing], []))
    reader = Thread(target=lambda: trace.firings, daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert seen == [0, 1, 1, 1]
    assert len(trace.firings) == trace.count == 2


async def test_trace_made_outside_is_independent(session: af.Session, value: af.Tensor) -> None:
    independent = af.Trace()
    with af.Trace() as outer:
        await run(session, value, independent)
    assert len(independent.runs) == 1
    assert outer.runs == []


async def test_iterations_that_have_ended_are_let_go(session: af.Session, graph: af.Graph) -> None:
    """A trace remembers when firings became ready, not the iterations they were in: a long loop stays small."""
    alive: list[int] = []
    gc.collect()
    gc.freeze()  # what others have left need not be looked at

    @af.op(outputs=lambda i: i)
    def count(i: Any) -> Any:
        if i % 100 == 99:
            gc.collect()
            alive.append(sum(issubclass(type(found), Iteration) for found in gc.get_objects()))
        return i

    end = af.while_loop(lambda i: i < 300, lambda i: count(i) + 1, (0,), parallel_iterations=2)[0]
    assert await session.run(end, trace=af.Trace(capacity=10)) == 300
    assert len(alive) == 3
    assert alive[2] - alive[0] < 100  # of the 200 between


@af.op(outputs=lambda x: x)
async def slow(x: Any) -> Any:
    await asyncio.sleep(1e-3)
    return x + 1


def simulated(build: Callable[[af.Tensor], af.Tensor], *beside: Callable[[af.Tensor], af.Tensor]) -> af.Trace:
    """The trace of a run on a simulated card, with other runs beside it that are not traced."""
    trace, vector = af.Trace(), np.ones(1000, np.float32)
    with af.Graph() as graph:
        x = af.placeholder("float32", vector.shape, name="x")
        fetch, *others = [each(x) for each in (build, *beside)]

    async def main() -> None:
        async with af.Session(graph, regions=False) as session:
            runs = [session.run(other, {x: vector}) for other in others]
            await asyncio.gather(session.run(fetch, {x: vector}, trace=trace), *runs)

    with virtual_clock("v100") as clock:
        clock.run(main())
    return trace


def waiting_between(x: af.Tensor) -> af.Tensor:
    waited: af.Tensor = slow(x * 2)
    return af.exp(waited)


def test_a_coroutine_on_virtual_time() -> None:
    """The times of the coroutine are virtual too, and the copies of its values are its own."""
    trace = simulated(waiting_between)
    (span,) = trace.runs
    assert all(span.started_ns <= firing.started_ns <= firing.ended_ns <= span.ended_ns for firing in trace.firings)
    waited = [firing for firing in trace.firings if firing.node == "slow"]
    assert {firing.stream for firing in waited} == {"async", "d2h", "h2d"}
    assert [firing.stream for firing in trace.firings if firing.node == "exp"] == ["compute"]


def test_what_other_runs_do_on_the_device_is_not_in_a_trace() -> None:
    """Other runs launch while the traced run waits."""

    def alone(x: af.Tensor) -> af.Tensor:
        return af.sin(af.sin(x))

    beside = Counter((firing.node, firing.stream) for firing in simulated(waiting_between, alone, alone).firings)
    assert beside == Counter((firing.node, firing.stream) for firing in simulated(waiting_between).firings)


def test_a_trace_is_shown_in_a_line() -> None:
    trace = af.Trace(detail="region")
    assert repr(trace) == "<Trace: 0 runs, 0 firings, 0 transfers, detail 'region'>"
    trace.dropped = 2
    assert "0 firings, 2 dropped" in repr(trace)


async def test_traces_with_equal_records_are_equal(session: af.Session, value: af.Tensor) -> None:
    trace = af.Trace()
    await run(session, value, trace)
    same = af.Trace(firings=trace.firings, runs=trace.runs, memory=trace.memory, transfers=trace.transfers)
    assert trace.firings
    assert same == trace
    same.firings.pop()
    assert same != trace
    assert trace != "trace"


def test_another_detail_is_refused() -> None:
    with pytest.raises(ValueError, match="the detail of a trace is 'node' or 'region'; got 'regions'"):
        af.Trace(detail="regions")  # type: ignore[arg-type]
