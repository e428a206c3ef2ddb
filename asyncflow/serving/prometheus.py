"""Metrics for the library ``prometheus-client``, which the extra ``prometheus`` brings.

`prometheus_collector` hands them to a scrape of one process. `PrometheusWorker` writes the metrics of one of several
worker processes to files. The library's multiprocess mode adds them up, whichever worker a scrape reaches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol, Self

from asyncflow.errors import brief
from asyncflow.runtime.calls.options import as_seconds

if TYPE_CHECKING:
    from prometheus_client.core import Metric as PrometheusMetric

    from asyncflow.serving.metrics import Metric, Metrics

_ANSWER_S: Final = 5.0
_DIRECTORY: Final = "PROMETHEUS_MULTIPROC_DIR"
_log: Final = logging.getLogger("asyncflow.serving")


class PrometheusCollector:
    """A collector of ``prometheus-client``; made by `prometheus_collector`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[PrometheusMetric]:
        """The metrics as they are now, asked for in any thread."""
        yield from map(_family, self._metrics.snapshot_threadsafe(_ANSWER_S))


def prometheus_collector(metrics: Metrics) -> PrometheusCollector:
    """A collector for ``prometheus_client.REGISTRY.register(...)``, or a ``CollectorRegistry`` of your own.

    Each scrape reads a snapshot on the session's event loop; a slow or failing scrape delays no run.

    Raises:
        ImportError: ``prometheus-client`` is not installed.
        TypeError: `metrics` is something else, such as a session: ``prometheus_collector(Metrics(session))``.
    """
    import prometheus_client  # noqa: F401 - here, and not in the middle of a scrape

    _check_metrics(metrics, "prometheus_collector")
    return PrometheusCollector(metrics)


def _check_metrics(metrics: object, name: str) -> None:
    if not hasattr(metrics, "snapshot_threadsafe"):
        raise TypeError(f"{name} takes a serving.Metrics(session); got {brief(metrics)}")


class _SharedValue(Protocol):
    """A number in a file of ``prometheus-client``."""

    def set(self, value: float) -> None:
        """Write the value."""


class PrometheusWorker:
    """Writes the metrics of one of several worker processes for the multiprocess mode of ``prometheus-client``.

    Works while it is entered with ``async with``: `lifespan` takes it behind `metrics` as one of ``beside``. The
    environment variable ``PROMETHEUS_MULTIPROC_DIR`` names a directory that is empty when the server starts. Each
    worker then answers a scrape for all, by ``MultiProcessCollector``. Counts and histograms are sums over all workers
    since the start. Gauges are sums over running workers; of the event loops' lags, the largest counts.

    Args:
        metrics: of the worker's session; one in a process.
        every_s: seconds between two writes.

    Raises:
        ImportError: ``prometheus-client`` is not installed.
        RuntimeError: it was imported without the variable, or the variable names no directory.
        TypeError, ValueError: an argument is not that.
    """

    def __init__(self, metrics: Metrics, *, every_s: float = 1.0) -> None:
        from prometheus_client import values

        _check_metrics(metrics, "PrometheusWorker")
        self._every_s = as_seconds(every_s, "every_s", may_be_zero=False)
        directory = os.environ.get(_DIRECTORY, "")
        if not os.path.isdir(directory) or not values.ValueClass._multiprocess:
            raise RuntimeError(f"set {_DIRECTORY} to an existing directory, before Python starts; it is {directory!r}")
        self._metrics = metrics
        self._make = values.ValueClass
        self._values: dict[tuple[str, tuple[str, ...]], tuple[_SharedValue, float]] = {}
        """Values by key, each with the number last written."""
        self._gauges: set[_SharedValue] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_warned = False

    async def __aenter__(self) -> Self:
        self._write(self._metrics.snapshot())
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Writes for the last time; gauges are 0 from then on."""
        if self._timer is not None:
            self._timer.cancel()
        self._try_write(self._metrics.snapshot())
        for value in self._gauges:
            value.set(0.0)

    def _tick(self) -> None:
        self._try_write(self._metrics.snapshot())
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)

    def _try_write(self, metrics: tuple[Metric, ...]) -> None:
        try:
            self._write(metrics)
        except OSError:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("metrics could not be written to %s; this is said once", _DIRECTORY, exc_info=True)

    def _write(self, metrics: tuple[Metric, ...]) -> None:
        for metric in metrics:
            name = metric.name.removesuffix("_total")
            for labels, value, buckets in metric.samples:
                names, found = tuple(labels), tuple(labels.values())
                if metric.kind != "histogram":
                    self._set(metric, name, metric.name, names, found, value)
                    continue
                self._set(metric, name, f"{name}_sum", names, found, value)
                below = 0
                for bound, count in buckets:  # the library adds up the buckets
                    at = (*found, _bound(bound))
                    self._set(metric, name, f"{name}_bucket", (*names, "le"), at, count - below)
                    below = count

    def _set(
        self, metric: Metric, name: str, series: str, labels: tuple[str, ...], found: tuple[str, ...], number: float
    ) -> None:
        known = self._values.get((series, found))
        if known is None:
            mode = "livemax" if name.endswith("_lag_seconds") else "livesum"
            value: _SharedValue = self._make(metric.kind, name, series, labels, found, metric.documentation, mode)
            if metric.kind == "gauge":
                self._gauges.add(value)
        elif known[1] == number:
            return
        else:
            value = known[0]
        value.set(number)
        self._values[series, found] = value, number


def _bound(bound: float) -> str:
    return "+Inf" if bound == math.inf else repr(bound)


def _family(metric: Metric) -> PrometheusMetric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names = tuple(metric.samples[0].labels) if metric.samples else ()
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.documentation, labels=names)
        for labels, value, buckets in metric.samples:
            written = [(_bound(bound), count) for bound, count in buckets]
            histogram.add_metric(tuple(labels.values()), written, sum_value=value)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name.removesuffix("_total"), metric.documentation, labels=names)
    for labels, value, _ in metric.samples:
        family.add_metric(tuple(labels.values()), value)
    return family
