"""The metrics for `prometheus-client`: the snapshot, in its own classes."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import values as prometheus_values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.values import MultiProcessValue

import asyncflow as af
from asyncflow import serving
from asyncflow.serving import Metric, Sample
from asyncflow.streams.beside import call_beside
from asyncflow.streams.virtual import VirtualClockLoop
from tests.faults.kernels import CoroutineGate, until


def written(*metrics: Metric) -> list[str]:
    """The lines that a scrape of these gives, but for help and types."""

    class Known:
        def snapshot_threadsafe(self, timeout_s: float) -> tuple[Metric, ...]:
            assert timeout_s > 0
            return metrics

    registry = CollectorRegistry()
    registry.register(serving.prometheus_collector(cast("serving.Metrics", Known())))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


@pytest.mark.usefixtures("work")
async def test_a_scrape_of_prometheus_reads_what_the_snapshot_has() -> None:
    registry = CollectorRegistry()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = af.batched(lambda row: row * 2, cost="none")(x)
    async with af.Session(graph) as session, serving.Metrics(session) as metrics:
        registry.register(serving.prometheus_collector(metrics))
        await asyncio.gather(*(session.run(y, {x: np.int64(n)}) for n in range(4)))
        here = generate_latest(registry).decode()
        there = (await call_beside(generate_latest, registry)).decode()  # as its own server asks, in a thread
    without_lag = [re.sub(r"(lag_seconds) .*", r"\1", text) for text in (here, there)]
    assert without_lag[0] == without_lag[1]
    families = {family.name: family for family in text_string_to_metric_families(here)}
    assert all(re.fullmatch(r"asyncflow_[a-z_]+", name) for name in families)
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for name in ("asyncflow_batch_size", "asyncflow_requests")
        for sample in families[name].samples
    }
    assert found["asyncflow_requests_total", None] == 4
    assert found["asyncflow_batch_size_sum", None] == 4 and found["asyncflow_batch_size_count", None] == 1
    assert (found["asyncflow_batch_size_bucket", "2.0"], found["asyncflow_batch_size_bucket", "+Inf"]) == (0, 1)
    assert all(family.documentation.endswith(".") for family in families.values())


def test_a_histogram_has_buckets_a_sum_and_labels() -> None:
    buckets = ((0.1, 2), (1.0, 3), (math.inf, 4))
    samples = (Sample({"priority": "0"}, 7.5, buckets), Sample({"priority": "1"}, 0.0, ((0.1, 0), (math.inf, 0))))
    found = written(Metric("asyncflow_wait_seconds", "histogram", "Waits.", samples))
    assert 'asyncflow_wait_seconds_bucket{le="0.1",priority="0"} 2.0' in found
    assert 'asyncflow_wait_seconds_bucket{le="+Inf",priority="0"} 4.0' in found
    assert 'asyncflow_wait_seconds_sum{priority="0"} 7.5' in found
    assert 'asyncflow_wait_seconds_count{priority="1"} 0.0' in found


def test_counters_and_gauges_keep_their_names() -> None:
    assert written(
        Metric("asyncflow_runs_total", "counter", "Runs.", (Sample({"outcome": "ok"}, 3.0),)),
        Metric("asyncflow_queued", "gauge", "Waiting runs.", (Sample({}, 2.0),)),
    ) == ['asyncflow_runs_total{outcome="ok"} 3.0', "asyncflow_queued 2.0"]


def test_a_metric_without_values_is_there() -> None:
    assert written(Metric("asyncflow_queued", "gauge", "Waiting runs.", ())) == []


def test_the_library_is_asked_for_where_the_collector_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError):
        serving.prometheus_collector(cast("serving.Metrics", None))


@pytest.fixture
def as_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this process another worker of the library's multiprocess mode."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return lambda name: monkeypatch.setattr(prometheus_values, "ValueClass", MultiProcessValue(lambda: name))


def scraped(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples]
    found = {(each.name, frozenset(each.labels.items())): each.value for each in samples}
    return {key: value for key, value in found.items() if "lag" not in key[0] and "memory" not in key[0]}


@pytest.mark.usefixtures("work")
async def test_a_scrape_of_one_worker_has_the_metrics_of_all(as_worker: Callable[[str], None], tmp_path: Path) -> None:
    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        y = af.batched(lambda row: row * 2, cost="none")(x)
    shared, own = CollectorRegistry(), CollectorRegistry()
    alone: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    MultiProcessCollector(shared, path=str(tmp_path))
    for number, worker in enumerate(("first", "second"), 1):
        as_worker(worker)
        metrics = serving.Metrics(session := af.Session(graph))
        async with session, metrics, serving.PrometheusWorker(metrics):
            await asyncio.gather(*(session.run(y, {x: np.int64(n)}) for n in range(3)))
            if worker == "first":
                own.register(serving.prometheus_collector(metrics))
                alone = scraped(own)
                own.unregister(next(iter(own._collector_to_names)))
        found = scraped(shared)
        assert found.keys() == alone.keys()
        for (name, labels), value in found.items():
            is_gauge = not name.endswith(("_total", "_sum", "_count", "_bucket"))
            if is_gauge:
                assert value == 0, "it has ended"
            elif "duration" not in name or name.endswith("_count"):
                assert value == number * alone[name, labels], name


def test_a_worker_writes_every_second_and_gauges_of_running_workers_are_added_up(
    as_worker: Callable[[str], None], tmp_path: Path
) -> None:
    gate = CoroutineGate()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = gate.op(x)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    running = ("asyncflow_inflight_runs", frozenset[tuple[str, str]]())

    async def main() -> None:
        async with AsyncExitStack() as stack:
            runs = []
            for worker in ("first", "second"):
                as_worker(worker)
                metrics = serving.Metrics(session := af.Session(graph))
                for each in (session, metrics, serving.PrometheusWorker(metrics)):
                    await stack.enter_async_context(each)
                runs.append(asyncio.ensure_future(session.run(y, {x: np.int64(1)})))
            await until(lambda: len(gate.started) == 2)
            assert scraped(registry)[running] == 0
            await asyncio.sleep(1.1)
            assert scraped(registry)[running] == 2
            gate.opened.set()
            await asyncio.gather(*runs)
            await asyncio.sleep(1.1)
            assert scraped(registry)[running] == 0

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(main())


async def test_a_worker_needs_the_mode_and_a_full_disk_stops_no_run(
    as_worker: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with af.Graph() as graph:
        y = af.constant(1) + 1
    metrics = serving.Metrics(session := af.Session(graph))
    with pytest.raises(RuntimeError, match="set PROMETHEUS_MULTIPROC_DIR to an existing directory"):
        serving.PrometheusWorker(metrics)  # the library was imported without it
    as_worker("first")
    with pytest.raises(TypeError, match=r"PrometheusWorker takes a serving.Metrics\(session\); got <Session"):
        serving.PrometheusWorker(cast("serving.Metrics", session))
    with pytest.raises(ValueError, match=r"every_s is .* got 0"):
        serving.PrometheusWorker(metrics, every_s=0)
    worker = serving.PrometheusWorker(metrics)

    def full(*args: object) -> None:
        raise OSError("no space left")

    async with session, metrics, worker:
        monkeypatch.setattr(worker, "_set", full)
        worker._tick()
        assert await session.run(y) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "metrics could not be written to PROMETHEUS_MULTIPROC_DIR; this is said once"
    ]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match=r"to an existing directory, .* it is '.*missing'"):
        serving.PrometheusWorker(metrics)
