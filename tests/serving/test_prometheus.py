"""What `prometheus-client` is given: the snapshot, in its own classes."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from typing import cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import asyncflow as af
from asyncflow import serving
from asyncflow.serving import Metric, Sample
from asyncflow.streams.beside import call_beside


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
