"""Metrics: every run is counted once, in base units, under names that Prometheus' linter has nothing against."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import serving
from asyncflow.serving.metrics import Metric
from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import INT, CoroutineGate, raising, until
from tests.patience import PATIENCE_S

ONE = np.int64(1)


def values(metrics: tuple[Metric, ...], name: str, **labels: str) -> list[float]:
    (metric,) = [metric for metric in metrics if metric.name == f"asyncflow_{name}"]
    return [sample.value for sample in metric.samples if labels.items() <= sample.labels.items()]


async def test_runs_are_counted_by_how_they_ended() -> None:
    gate = CoroutineGate()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        quick, slow, bad = x + 1, gate.op(x), raising(lambda: ValueError("no"))(x)
    async with af.Session(graph, max_runs=1, max_queued=0) as session, serving.Metrics(session) as metrics:
        for _ in range(3):
            await session.run(quick, {x: ONE})
        with pytest.raises(af.FeedError):
            await session.run(quick, {x: np.float32(1)})
        with pytest.raises(af.KernelError):
            await session.run(bad, {x: ONE})
        waiting = asyncio.ensure_future(session.run(slow, {x: ONE}))
        await until(lambda: gate.started)
        assert values(metrics.snapshot(), "inflight_runs") == [1]
        with pytest.raises(af.OverloadedError):
            await session.run(slow, {x: ONE})
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        found = metrics.snapshot()
    total = {
        (sample.labels["fetch"], sample.labels["status"], sample.labels["code"]): sample.value
        for sample in found[0].samples
    }
    assert total == {
        (quick.name, "ok", "200"): 3,
        (quick.name, "invalid", "422"): 1,
        (bad.name, "error", "500"): 1,
        (slow.name, "refused", "503"): 1,
        (slow.name, "cancelled", "499"): 1,
    }
    assert (values(found, "inflight_runs"), values(found, "queue_depth")) == ([0], [0])
    assert values(found, "device_memory_bytes", kind="held") == [0]


async def test_calls_of_functions_with_limits_are_counted() -> None:
    def op_of(name: str, failures: int) -> Any:
        left = iter(range(failures))

        @af.op(name=name, outputs=INT, retries=1, backoff=0)
        async def call(x: Any) -> Any:
            if next(left, None) is not None:
                raise ConnectionError
            return x

        return call

    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        fetches = [op_of(name, failures)(x) for name, failures in (("one", 1), ("two", 0), ("three", 2))]
    async with af.Session(graph) as session, serving.Metrics(session, most_labels=2) as metrics:
        for fetch in fetches[:2]:
            await session.run(fetch, {x: ONE})
        with pytest.raises(af.KernelError):
            await session.run(fetches[2], {x: ONE})
        found = metrics.snapshot()
    assert values(found, "limited_calls_total", function="one") == [1]
    assert values(found, "limited_attempts_total", function="one") == [2]
    assert values(found, "limited_retries_total") == [1, 0, 1]
    assert values(found, "limited_failed_total", function="other") == [1]
    assert values(found, "limited_timeouts_total", function="two") == [0]
    assert values(found, "limited_now") == [0] * 12


def test_times_are_in_seconds_and_a_deadline_in_the_queue_computes_nothing() -> None:
    """Fault F45."""

    @af.op(outputs=INT)
    async def second(x: Any) -> Any:
        await asyncio.sleep(1)
        return x

    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = second(x)

    async def main() -> tuple[Metric, ...]:
        async with af.Session(graph, max_runs=1) as session, serving.Metrics(session) as metrics:
            runs = [session.run(y, {x: ONE}, timeout=limit) for limit in (None, None, 1.5)]
            found = await asyncio.gather(*runs, return_exceptions=True)
            assert [type(each) for each in found] == [np.int64, np.int64, af.DeadlineExceeded]
            return metrics.snapshot()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        found = runner.run(main())
    assert values(found, "requests_total", status="deadline", code="504") == [1]
    assert values(found, "request_duration_seconds") == [1 + 2 + 1]
    assert values(found, "queue_duration_seconds") == [0 + 1 + 1]
    assert values(found, "compute_duration_seconds") == [2]
    (buckets,) = [
        sample.buckets
        for metric in found
        if metric.name.endswith("request_duration_seconds")
        for sample in metric.samples
    ]
    assert (
        dict(buckets)[0.3] == 0 and dict(buckets)[1.0] == 2 and dict(buckets)[3.0] == dict(buckets)[float("inf")] == 3
    )


@pytest.mark.usefixtures("work")
async def test_batches_and_pools_are_counted() -> None:
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        batched = af.batched(lambda row: row * 2, cost="none")(x)
        pooled = af.while_loop(lambda i: i < 4, lambda i: i + 1, x, pool=af.Pool(4))
    async with af.Session(graph) as session, serving.Metrics(session) as metrics:
        await asyncio.gather(*(session.run(batched, {x: np.int64(n)}) for n in range(4)))
        await asyncio.gather(*(session.run(pooled, {x: np.int64(n)}) for n in (0, 2)))
        found = metrics.snapshot()
    assert values(found, "executions_total", kind="batch") == [1]
    assert values(found, "executions_total", kind="pool") == [4]
    assert values(found, "batch_size") == [4]
    assert values(found, "pool_size") == [2 + 2 + 1 + 1]
    assert values(found, "pool_rows") == [0]
    assert values(found, "batch_failures_total") == [0, 0]


@pytest.mark.usefixtures("work")
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_failed_calls_equal_the_sessions_count() -> None:
    """Of batched functions of one name in two graphs, and of vertex maps that share calls."""

    @af.op(outputs=af.spec("float64", ()), pure=True)
    def positive(x: Any) -> Any:
        if x < 0:
            raise ValueError("not positive")
        return x

    @af.vertex_function(state=af.spec("float64", ()), children=1)
    def vertex(v: Any) -> None:
        v.scatter(positive(v.pull()) + v.gather(0))

    def built() -> tuple[af.Graph, af.Tensor, af.Tensor]:
        with af.Graph() as graph:
            x = af.placeholder("float64", ())
            return graph, x, af.batched(positive, cost="none")(x)

    graphs = [built(), built()]
    with af.Graph():
        structure, rows = af.InputGraph.placeholder(), af.placeholder("float64", (None,))
        mapped = af.vertex_map(vertex, structure, rows, share=True).roots
    chain = structure.feeds(af.InputGraph.chain([2]))
    async with af.Session() as session, serving.Metrics(session) as metrics:
        runs = [session.run(y, {x: np.float64(n)}) for _, x, y in graphs for n in (1, -1, 2)]
        runs += [session.run(mapped, {**chain, rows: np.array([1.0, n])}) for n in (1, -1)]
        ends = await asyncio.gather(*runs, return_exceptions=True)
        assert sum(isinstance(each, af.KernelError) for each in ends) == 3, ends
        found, counts = metrics.snapshot(), session.statistics().batches
    assert len(counts) == 2 and all(each.failed for each in counts.values())
    for name, each in counts.items():
        assert values(found, "batch_failures_total", function=name) == [each.failed]
        assert values(found, "executions_total", function=name) == [each.calls]


@pytest.mark.parametrize("activations", [1, 3])
async def test_every_step_of_a_pool_is_counted(activations: int) -> None:
    """Several steps in one go count, too, such as the steps of an activation that is alone."""
    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        y = af.while_loop(lambda i: i < 400, lambda i: i + 1, x, pool=af.Pool(4), name="pool")
    async with af.Session(graph) as session, serving.Metrics(session) as metrics:
        await asyncio.gather(*(session.run(y, {x: 0}) for _ in range(activations)))
        found, counted = metrics.snapshot(), session.statistics().batches["pool"]
    assert values(found, "pool_size") == [400 * activations] == [counted.members]
    assert values(found, "executions_total", kind="pool") == [counted.calls]


async def test_many_fetches_share_a_label() -> None:
    with af.Graph() as graph:
        fetches = [af.constant(n) + 1 for n in range(10)]
    async with af.Session(graph) as session, serving.Metrics(session, most_labels=3) as metrics:
        for fetch in fetches:
            await session.run(fetch)
        found = metrics.snapshot()
    assert values(found, "requests_total") == [1, 1, 1, 7]
    assert values(found, "requests_total", fetch="other") == [7]


async def test_nothing_is_counted_and_no_timer_left_after_it_is_left() -> None:
    with af.Graph() as graph:
        y = af.constant(1) + 1
    async with af.Session(graph) as session:
        async with serving.Metrics(session) as metrics:
            await session.run(y)
        await session.run(y)
    assert values(metrics.snapshot_threadsafe(), "requests_total") == [1]
    assert metrics._tick is not None and metrics._tick.cancelled()


async def test_a_scrape_while_the_event_loop_is_held_ends_by_itself() -> None:
    """Fault F60."""
    async with af.Session() as session, serving.Metrics(session) as metrics:
        asked: list[object] = []

        def ask() -> None:
            try:
                metrics.snapshot_threadsafe(0.01)
            except TimeoutError as error:
                asked.append(error)

        scrape = threading.Thread(target=ask)
        scrape.start()
        scrape.join(PATIENCE_S)
        assert len(asked) == 1
