"""Spans of runs and batches for OpenTelemetry, which the extra ``opentelemetry`` brings: `Spans`."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from asyncflow.runtime.session.session import Session
from asyncflow.serving.arguments import check_kind
from asyncflow.streams.loop import clock_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from asyncflow.runtime.watch.observer import ObservedBatch, ObservedRun

_MOST_PENDING: Final = 10_000
_FLUSH_S: Final = 5.0
_log: Final = logging.getLogger("asyncflow.serving")


class Spans:
    """OpenTelemetry spans: one for each run, child of its caller's span, and one for each batched call, linked to its
    runs.

    Works while it is entered with ``async with``. The span of a run is the current one in its coroutines. Spans end on
    a thread of their own, where exporters work; a slow exporter delays no run. Spans that would have to wait behind
    10,000 others are dropped, and counted. A run costs some 20 µs more.

    Args:
        session: open before this is entered: `lifespan` takes it as one of ``beside``.
        tracer: of OpenTelemetry; None for that of the global provider.

    Attributes:
        dropped: how many there were no room for.

    Raises:
        ImportError: ``opentelemetry-api`` is not installed.
        TypeError: `session` is none.
    """

    def __init__(self, session: Session, tracer: Tracer | None = None) -> None:
        from opentelemetry import trace

        check_kind(session, Session, "Spans")
        self.dropped = 0
        self._session = session
        self._tracer = trace.get_tracer("asyncflow") if tracer is None else tracer
        self._spans: dict[ObservedRun, Span] = {}
        self._pending: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._epoch_ns = 0
        self._remove: Callable[[], None] | None = None
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._epoch_ns = time.time_ns() - clock_of(loop)()
        threading.Thread(target=self._export, args=(loop,), name="asyncflow:spans", daemon=True).start()
        self._remove = self._session.observe(self)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Wait up to 5 s for the remaining exports."""
        if self._remove is not None:
            self._remove()
        for run, span in self._spans.items():  # runs still in flight
            self._hand_over(partial(span.end, end_time=self._ns(run.asked_s)))
        self._spans.clear()
        self._pending.put(None)
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._ended.wait()
        except TimeoutError:
            _log.warning("spans were still being exported after %s s; the rest is left to a thread", _FLUSH_S)

    # -- calls of the observer -----------------------------------------------------------------------------------

    def run_began(self, run: ObservedRun) -> None:
        """Starts the span of a run."""
        run.context.run(self._start, run)

    def run_ended(self, run: ObservedRun) -> None:
        """End the span of a run."""
        from opentelemetry.trace import Status, StatusCode

        assert run.ended_s is not None
        span = self._spans.pop(run, None)
        if span is None:  # the run began before this was entered
            return
        span.set_attribute("asyncflow.status", run.status)
        if run.started_s is not None:
            span.set_attribute("asyncflow.queue_s", run.started_s - run.asked_s)
        if run.retries:
            span.set_attribute("asyncflow.retries", run.retries)
        if run.status == "error" and run.error is not None:
            span.record_exception(run.error)
            span.set_status(Status(StatusCode.ERROR, type(run.error).__name__))
        self._hand_over(partial(span.end, end_time=self._ns(run.ended_s)))

    def batch_ended(self, batch: ObservedBatch) -> None:
        """Makes the span of a batch."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link

        links = [Link(self._spans[run].get_span_context()) for run in batch.runs if run in self._spans]

        def make() -> None:
            span = self._tracer.start_span(
                "asyncflow.batch",
                context=Context(),  # no parent: the call belongs to several runs
                links=links,
                start_time=self._ns(batch.started_s),
                attributes={"asyncflow.function": batch.function, "asyncflow.batch_size": batch.size},
            )
            if batch.error is not None:
                span.record_exception(batch.error)
            span.end(end_time=self._ns(batch.ended_s))

        self._hand_over(make)

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        """Do nothing: steps are too short and too many."""

    # -- exporting -----------------------------------------------------------------------------------------------

    def _start(self, run: ObservedRun) -> None:
        from opentelemetry import context, trace

        span = self._tracer.start_span(
            "asyncflow.run", start_time=self._ns(run.asked_s), attributes={"asyncflow.fetch": run.label}
        )
        self._spans[run] = span
        context.attach(trace.set_span_in_context(span))

    def _ns(self, now_s: float) -> int:
        """A time that is observed as nanoseconds of the epoch."""
        return self._epoch_ns + int(now_s * 1e9)

    def _hand_over(self, work: Callable[[], object]) -> None:
        if self._pending.qsize() < _MOST_PENDING:
            self._pending.put(work)
        else:
            self.dropped += 1

    def _export(self, loop: asyncio.AbstractEventLoop) -> None:
        has_warned = False
        while (work := self._pending.get()) is not None:
            try:
                work()
            except Exception:
                if not has_warned:
                    has_warned = True
                    _log.warning("a span could not be exported; this is said once, and runs go on", exc_info=True)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended.set)
