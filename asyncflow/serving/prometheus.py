"""`prometheus_collector`: metrics for the library ``prometheus-client``, which the extra ``prometheus`` brings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from asyncflow.errors import brief

if TYPE_CHECKING:
    from prometheus_client.core import Metric as PrometheusMetric

    from asyncflow.serving.metrics import Metric, Metrics

_ANSWER_S: Final = 5.0


class PrometheusCollector:
    """A collector of ``prometheus-client``; made by `prometheus_collector`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[PrometheusMetric]:
        """The metrics as they are now, asked for in any thread."""
        yield from map(_family, self._metrics.snapshot_threadsafe(_ANSWER_S))


def prometheus_collector(metrics: Metrics) -> PrometheusCollector:
    """A collector for ``prometheus_client.REGISTRY.register(...)``, or a ``CollectorRegistry`` of your own.

    Each scrape reads a snapshot on the session's event loop; one that takes long, or fails, holds up no run.

    Raises:
        ImportError: ``prometheus-client`` is not installed.
        TypeError: `metrics` is something else, such as a session: ``prometheus_collector(Metrics(session))``.
    """
    import prometheus_client  # noqa: F401 - here, and not in the middle of a scrape

    if not hasattr(metrics, "snapshot_threadsafe"):
        raise TypeError(f"prometheus_collector takes a serving.Metrics(session); got {brief(metrics)}")
    return PrometheusCollector(metrics)


def _family(metric: Metric) -> PrometheusMetric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names = tuple(metric.samples[0].labels) if metric.samples else ()
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.documentation, labels=names)
        for labels, value, buckets in metric.samples:
            written = [("+Inf" if bound == math.inf else repr(bound), count) for bound, count in buckets]
            histogram.add_metric(tuple(labels.values()), written, sum_value=value)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name.removesuffix("_total"), metric.documentation, labels=names)
    for labels, value, _ in metric.samples:
        family.add_metric(tuple(labels.values()), value)
    return family
