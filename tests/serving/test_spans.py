"""OpenTelemetry: a span a run, one a batch with links; an exporter that raises or blocks touches no run (F60)."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import StatusCode

import asyncflow as af
from asyncflow import serving
from asyncflow.serving import spans as spans_module
from tests.faults.kernels import INT, raising
from tests.patience import PATIENCE_S

ONE = np.int64(1)


class Collected(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.threads: set[str] = set()

    def on_end(self, span: ReadableSpan) -> None:
        self.threads.add(threading.current_thread().name)
        self.spans.append(span)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def tracer(processor: SpanProcessor) -> Any:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider.get_tracer("test")


@pytest.mark.real_time
async def test_a_run_is_a_child_of_its_caller_and_a_parent_of_its_coroutines() -> None:
    collected = Collected()
    traced = tracer(collected)
    began_s = asyncio.get_running_loop().time()

    @af.op(outputs=INT)
    async def asks(x: Any) -> Any:
        with traced.start_as_current_span("inside"):
            return x

    refusals = iter([ConnectionError("busy")])

    @af.op(outputs=INT, retries=1, backoff=0)
    async def busy_once(x: Any) -> Any:
        for error in refusals:
            raise error
        return x

    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y, bad = asks(x), raising(lambda: ValueError("no"))(x)
        again = busy_once(x)
    async with af.Session(graph) as session:
        async with serving.Spans(session, traced):
            await session.run(again, {x: ONE})
            with traced.start_as_current_span("request") as request:
                await session.run(y, {x: ONE})
                assert trace.get_current_span() is request
                with pytest.raises(af.KernelError):
                    await session.run(bad, {x: ONE})
        await session.run(y, {x: ONE})
    retried, good, failed = collected.named("asyncflow.run")
    assert retried.attributes is not None and retried.attributes["asyncflow.retries"] == 1
    inside = collected.named("inside")[0]
    assert good.parent is not None and good.parent.span_id == request.get_span_context().span_id
    assert inside.parent is not None and inside.parent.span_id == good.context.span_id
    assert good.attributes is not None and failed.attributes is not None
    assert "asyncflow.retries" not in good.attributes
    assert good.attributes["asyncflow.fetch"] == y.name and good.attributes["asyncflow.status"] == "ok"
    assert good.start_time is not None and good.end_time is not None
    assert inside.start_time is not None and inside.end_time is not None
    # The clocks of the wall and of the event loop, which counts milliseconds, are read one after the other.
    slack_ns = (asyncio.get_running_loop().time() - began_s + 2e-3) * 1e9
    assert good.start_time - slack_ns <= inside.start_time <= inside.end_time <= good.end_time + slack_ns
    assert failed.status.status_code is StatusCode.ERROR and failed.attributes["asyncflow.status"] == "error"
    assert [event.name for event in failed.events] == ["exception"]


@pytest.mark.usefixtures("work")
async def test_a_batch_has_links_to_its_runs() -> None:
    collected = Collected()
    with af.Graph() as graph:
        x = af.placeholder("int64", ())
        y = af.batched(lambda row: row * 2, cost="none")(x)
    async with af.Session(graph) as session, serving.Spans(session, tracer(collected)):
        await asyncio.gather(*(session.run(y, {x: np.int64(n)}) for n in range(4)))
    (batch,) = collected.named("asyncflow.batch")
    runs = collected.named("asyncflow.run")
    assert {link.context.span_id for link in batch.links} == {run.context.span_id for run in runs} and len(runs) == 4
    assert batch.parent is None and batch.attributes is not None
    assert batch.attributes["asyncflow.batch_size"] == 4
    assert collected.threads == {"asyncflow:spans"}


async def test_an_exporter_that_raises_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fault F60."""

    class Raises(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise OSError("the collector is gone")

    with af.Graph() as graph:
        y = af.constant(1) + 1
    with caplog.at_level(logging.WARNING):
        async with af.Session(graph) as session, serving.Spans(session, tracer(Raises())):
            assert [await session.run(y) for _ in range(10)] == [2] * 10
    assert len(caplog.records) == 1 and "the collector is gone" in str(caplog.records[0].exc_info)


async def test_an_exporter_that_blocks_holds_up_its_own_thread_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault F60."""
    monkeypatch.setattr(spans_module, "_MOST_PENDING", 10)
    monkeypatch.setattr(spans_module, "_FLUSH_S", 0.01)
    opened = threading.Event()

    class Blocks(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            assert opened.wait(PATIENCE_S)

    with af.Graph() as graph:
        y = af.constant(1) + 1
    try:
        async with af.Session(graph) as session:
            async with serving.Spans(session, tracer(Blocks())) as spans:
                assert [await session.run(y) for _ in range(50)] == [2] * 50
                assert 50 - 10 - 1 <= spans.dropped <= 50 - 10  # one may be with the exporter
            assert await session.run(y) == 2
        assert "still being exported" in caplog.text
    finally:
        opened.set()
