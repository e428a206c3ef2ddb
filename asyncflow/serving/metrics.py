"""`Metrics`: counts and times of all that a session does, by Prometheus' conventions.

Nothing here knows Prometheus: a snapshot is plain data, in base units (seconds, bytes). `prometheus_collector` hands
it to the library of that name.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Self, TypeVar

from asyncflow.runtime.executor.kernels.limited_calls import LimitStatistics
from asyncflow.runtime.session.session import Session
from asyncflow.runtime.session.session_statistics import SessionStatistics
from asyncflow.runtime.watch.observer import ObservedBatch, ObservedRun
from asyncflow.serving.arguments import check_count, check_kind
from asyncflow.serving.responses import status_code

SECONDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the buckets of times."""
_SIZES: Final = tuple(2.0**power for power in range(11))
# A blocked loop is noticed within this time; four callbacks a second cost nothing that can be measured.
_TICK_S: Final = 0.25
_OTHER: Final = "other"
_LIMIT_COUNTS: Final = {
    "calls": "Calls of functions with limits.",
    "attempts": "Attempts of these calls.",
    "retries": "Attempts after a failed one.",
    "timeouts": "Attempts that took longer than timeout=.",
    "failed": "Calls that failed for good.",
}


Counts = TypeVar("Counts")


class Sample(NamedTuple):
    """One value of a metric.

    Attributes:
        labels: which one it is.
        value: the number; of a histogram, the sum of the observed values.
        buckets: of a histogram: upper bounds, the last of which is infinite, and how many observations are within each.
    """

    labels: Mapping[str, str]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()


class Metric(NamedTuple):
    """A metric with all its samples.

    Attributes:
        name: such as ``asyncflow_request_duration_seconds``.
        kind: of its numbers: a counter only grows.
        documentation: a sentence.
        samples: one for each set of labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    samples: tuple[Sample, ...]


@dataclass(slots=True)
class _Histogram:
    bounds: Sequence[float]
    sum: float = 0.0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.sum += value * times
        # Here each observation counts in one bucket. Prometheus buckets are cumulative: `sample` adds the smaller ones.
        self.counts[bisect_left(self.bounds, value)] += times

    def sample(self, labels: Mapping[str, str]) -> Sample:
        bounds = (*self.bounds, float("inf"))
        return Sample(labels, self.sum, tuple(zip(bounds, accumulate(self.counts), strict=True)))


@dataclass(slots=True)
class _FetchCounts:
    """Runs that fetch one thing."""

    ended: dict[tuple[str, int], int] = field(default_factory=dict)
    duration: _Histogram = field(default_factory=lambda: _Histogram(SECONDS))
    queue: _Histogram = field(default_factory=lambda: _Histogram(SECONDS))
    compute: _Histogram = field(default_factory=lambda: _Histogram(SECONDS))


@dataclass(slots=True)
class _FunctionCounts:
    """Calls of one batched function, or steps of one pooled loop."""

    last: int = 0
    sizes: _Histogram = field(default_factory=lambda: _Histogram(_SIZES))
    duration: _Histogram = field(default_factory=lambda: _Histogram(SECONDS))


class Metrics:
    """Count the runs of a session, by `Session.observe`, while this is entered with ``async with``.

    A run costs some microseconds more then. Runs are told apart by the name of the first thing that they fetch.

    Args:
        session: open before this is entered: `lifespan` takes it as one of ``beside``.
        most_labels: of more fetches, or functions, the others are counted as ``other``, since monitoring keeps a series
            of each.

    Raises:
        TypeError, ValueError: an argument is not that.
    """

    def __init__(self, session: Session, *, most_labels: int = 100) -> None:
        check_kind(session, Session, "Metrics")
        check_count(most_labels, "most_labels")
        self._session = session
        self._most_labels = most_labels
        self._fetches: dict[str, _FetchCounts] = {}
        self._batched: dict[str, _FunctionCounts] = {}
        self._pooled: dict[str, _FunctionCounts] = {}
        self._lag_s = 0.0
        self._remove: Callable[[], None] | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0

    async def __aenter__(self) -> Self:
        self._remove = self._session.observe(self)
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._ticks(self._loop, None)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._remove is not None:
            self._remove()
        if self._tick is not None:
            self._tick.cancel()
        self._loop = None

    def _ticks(self, loop: asyncio.AbstractEventLoop, due_s: float | None) -> None:
        now = loop.time()
        # The delay of a callback is the time for which another callback, or the garbage collector, held the loop.
        self._lag_s = 0.0 if due_s is None else max(0.0, now - due_s)
        self._tick = loop.call_later(_TICK_S, self._ticks, loop, now + _TICK_S)

    # -- observing -----------------------------------------------------------------------------------------------

    def run_began(self, run: ObservedRun) -> None:
        """Do nothing: a run is counted when it ends."""

    def run_ended(self, run: ObservedRun) -> None:
        """Count a run."""
        assert run.ended_s is not None
        fetch = _labelled(self._fetches, run.label, self._most_labels, _FetchCounts)
        end = (run.status, status_code(run.error))
        fetch.ended[end] = fetch.ended.get(end, 0) + 1
        fetch.duration.observe(run.ended_s - run.asked_s)
        # A run that was refused, or left the queue, only waited, and did not compute.
        fetch.queue.observe((run.ended_s if run.started_s is None else run.started_s) - run.asked_s)
        if run.started_s is not None:
            fetch.compute.observe(run.ended_s - run.started_s)

    def batch_ended(self, batch: ObservedBatch) -> None:
        """Count a call of a batched function."""
        function = _labelled(self._batched, batch.function, self._most_labels, _FunctionCounts)
        function.sizes.observe(batch.size)
        function.last = batch.size
        if batch.error is None:  # a call that fails at once would make the function look fast
            function.duration.observe(batch.ended_s - batch.started_s)

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        """Count steps of a pooled loop."""
        pool = _labelled(self._pooled, function, self._most_labels, _FunctionCounts)
        pool.sizes.observe(size, steps)
        pool.last = size

    # -- reading -------------------------------------------------------------------------------------------------

    def snapshot_threadsafe(self, timeout_s: float = 5.0) -> tuple[Metric, ...]:
        """`snapshot` in any thread.

        Raises:
            TimeoutError: the event loop has not answered in time.
        """
        # Counts change only on the event loop, without locks, so the loop also reads them. The loop's own thread must
        # not wait for the loop: it would deadlock.
        if self._loop is None or self._thread_id == threading.get_ident():
            return self.snapshot()
        return asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop).result(timeout_s)

    async def _snapshot(self) -> tuple[Metric, ...]:
        return self.snapshot()

    def snapshot(self) -> tuple[Metric, ...]:
        """Return all metrics as of now; on the event loop's thread."""
        now = self._session.statistics()
        return (*self._of_runs(), *self._of_batches(now), *self._of_limits(now), *self._of_session(now))

    def _of_runs(self) -> Iterator[Metric]:
        fetches = self._fetches.items()
        yield Metric(
            "asyncflow_requests_total",
            "counter",
            "Runs that have ended, how, and as which HTTP status: 499 for callers that have gone.",
            tuple(
                Sample({"fetch": label, "status": status, "code": str(code)}, count)
                for label, fetch in fetches
                for (status, code), count in fetch.ended.items()
            ),
        )
        durations = {label: fetch.duration for label, fetch in fetches}
        queued = {label: fetch.queue for label, fetch in fetches}
        computed = {label: fetch.compute for label, fetch in fetches}
        yield _histogram("request_duration_seconds", "From asking for a run to its end.", "fetch", durations)
        yield _histogram("queue_duration_seconds", "From asking for a run to its start.", "fetch", queued)
        yield _histogram("compute_duration_seconds", "From the start of a run to its end.", "fetch", computed)

    def _of_batches(self, now: SessionStatistics) -> Iterator[Metric]:
        batched, pooled = self._batched.items(), self._pooled.items()
        executions = tuple(
            Sample({"function": label, "kind": kind}, sum(each.sizes.counts))
            for kind, functions in (("batch", batched), ("pool", pooled))
            for label, each in functions
        )
        yield Metric(
            "asyncflow_executions_total",
            "counter",
            "Calls of batched functions, and steps of pooled loops.",
            executions,
        )
        # The session's counts since its start, of functions and loops that share calls in any way.
        failed: dict[str, int] = {}
        for name, counts in now.batches.items():
            label = _label_in(failed, name, self._most_labels)
            failed[label] = failed.get(label, 0) + counts.failed
        failures = tuple(Sample({"function": label}, count) for label, count in failed.items())
        text = "Calls that several runs shared, and that failed."
        yield Metric("asyncflow_batch_failures_total", "counter", text, failures)
        sizes = {label: each.sizes for label, each in batched}
        steps = {label: each.sizes for label, each in pooled}
        durations = {label: each.duration for label, each in batched}
        yield _histogram("batch_size", "Members of a call of a batched function.", "function", sizes)
        yield _histogram("batch_duration_seconds", "Times of calls of batched functions.", "function", durations)
        yield _histogram("pool_size", "Activations in a step of a pooled loop.", "function", steps)
        # A pool makes no step after its last activations have ended, so its own count of rows never falls to 0.
        idle = now.runs == 0
        rows = tuple(Sample({"function": label}, 0 if idle else each.last) for label, each in pooled)
        yield Metric("asyncflow_pool_rows", "gauge", "Activations in the latest step of a pooled loop.", rows)

    def _of_limits(self, now: SessionStatistics) -> Iterator[Metric]:
        found: dict[str, LimitStatistics] = {}
        for name, counts in now.limits.items():
            label = _label_in(found, name, self._most_labels)
            found[label] = found.get(label, LimitStatistics()).plus(counts)
        for count, documentation in _LIMIT_COUNTS.items():
            samples = tuple(Sample({"function": label}, getattr(each, count)) for label, each in found.items())
            yield Metric(f"asyncflow_limited_{count}_total", "counter", documentation, samples)
        states = tuple(
            Sample({"function": label, "state": state}, getattr(each, state))
            for label, each in found.items()
            for state in ("running", "left_behind", "waiting", "backing_off")
        )
        text = "Calls of functions with limits now: under way, left behind by a timeout, and waiting."
        yield Metric("asyncflow_limited_now", "gauge", text, states)

    def _of_session(self, now: SessionStatistics) -> Iterator[Metric]:
        yield _gauge("inflight_runs", "Runs in flight.", now.runs)
        yield _gauge("queue_depth", "Runs that wait for their turn.", now.queued)
        refused = (Sample(MappingProxyType({}), now.refused),)
        text = "Runs that were not started, and requests that were refused before they were read."
        yield Metric("asyncflow_refused_total", "counter", text, refused)
        yield _gauge("queue_bytes", "Feeds of queued runs, in bytes.", now.queued_bytes)
        yield _gauge("plans", "Compiled plans that are kept.", now.plans)
        yield _gauge(
            "event_loop_lag_seconds", "How late the event loop was, the last time it was looked at.", self._lag_s
        )
        kinds = ("held", "peak", "saved", "host", "disk")
        memory = tuple(
            Sample({"device": name, "kind": kind}, getattr(device, kind))
            for name, device in now.memory.items()
            for kind in kinds
        )
        text = (
            "Bytes of a device's memory: held, the most at a time, and saved values: there, on the host, and on disk."
        )
        yield Metric("asyncflow_device_memory_bytes", "gauge", text, memory)
        swapped = tuple(
            Sample({"device": name, "direction": direction}, nbytes)
            for name, device in now.memory.items()
            for direction, nbytes in (("out", device.moved_out), ("in", device.moved_in))
        )
        yield Metric(
            "asyncflow_swap_bytes_total", "counter", "Bytes of saved values that moved away, and back.", swapped
        )


def _labelled(found: dict[str, Counts], label: str, most: int, make: Callable[[], Counts]) -> Counts:
    """The counts of a label, or of all others, if there are too many."""
    counts = found.get(label)
    if counts is None:
        counts = found.setdefault(_label_in(found, label, most), make())
    return counts


def _label_in(found: Mapping[str, object], label: str, most: int) -> str:
    """Return the label under which to count: itself, or `_OTHER` if there are too many others."""
    # A label that was counted by itself goes on so: a counter that fell would look like a restart of the process.
    return label if label in found or len(found) < most else _OTHER


def _histogram(name: str, documentation: str, label: str, found: Mapping[str, _Histogram]) -> Metric:
    samples = tuple(each.sample({label: value}) for value, each in found.items())
    return Metric(f"asyncflow_{name}", "histogram", documentation, samples)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return Metric(f"asyncflow_{name}", "gauge", documentation, (Sample(MappingProxyType({}), value),))
