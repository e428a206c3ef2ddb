"""T14: in steady state the event loop's thread makes no call that waits for the card."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.vertex.schedule import schedules
from tests.gpu import cupti
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop


class Service:
    """A loop, a branch, feeds and fetches of many sizes, gradients, state."""

    def __init__(self, *, regions: bool) -> None:
        with af.Graph() as self.graph:
            self.x = af.placeholder("float32", (None, 32))
            self.count = af.placeholder("int32", ())
            weight = af.Variable(np.eye(32, dtype=np.float32) * 0.5, name="weight")
            w = weight.read()
            last = af.while_loop(
                lambda i, _: i < self.count, lambda i, y: (i + 1, af.tanh(y @ w)), (np.int32(0), self.x)
            )[1]
            chosen = af.cond(af.sum(last) > 0, lambda: last * 2.0, lambda: -last)
            (gradient,) = af.gradients(af.sum(af.square(chosen)), [w])
            self.fetches = [af.mean(chosen), chosen, af.sum(gradient), weight.assign_sub(gradient * 1e-3)]
        self.session = af.Session(self.graph, devices=["cuda:0"], regions=regions, memory_limit=32 << 20)

    async def run(self, requests: int) -> None:
        """Some requests, of sizes up to one copied in pieces on the host's side."""
        for index in range(requests):
            rows = (1, 64, 10_000)[index % 3]
            fed = {self.x: np.full((rows, 32), 0.01, np.float32), self.count: 1 + index % 4}
            mean, chosen, *_ = await self.session.run(self.fetches, fed)
            np.testing.assert_allclose(mean, chosen.mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@on_loop
async def test_t14_the_loops_thread_never_waits_for_the_card(card: Card, regions: bool) -> None:
    service = Service(regions=regions)
    async with service.session:
        await service.run(12)
        with card.never_blocks():
            await service.run(12)


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@on_loop
async def test_t14_a_loop_over_sets_of_vertices_never_waits_for_the_card(card: Card, regions: bool) -> None:
    """The order is made on the host, and so are the numbers by which the loop goes on and rows are sliced."""
    data = af.InputGraph.batch([af.InputGraph.from_nested((("a", "b"), "c"))[0]] * 3)
    with af.Graph():
        graph, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, 2))
        (found,) = schedules(graph, arity=2)

        def body(k: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            members = found.order[found.set_starts[k] : found.set_starts[k + 1]]
            return k + 1, total + af.sum(af.take(x, members, axis=0))

        n_sets = af.size(found.set_starts) - 1
        _, total = af.while_loop(lambda k, _: k < n_sets, body, (0, np.float32(0)))
    feeds = {**graph.feeds(data), x: np.ones((data.n_vertices, 2), np.float32)}
    async with af.Session(devices=["cuda:0"], regions=regions) as session:
        assert await card.without_blocking(lambda: session.run(total, feeds)) == 2 * data.n_vertices


@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@pytest.mark.parametrize("children", [2, None], ids=["slots", "any"])
@on_loop
async def test_t14_vertex_map_never_waits_for_the_card(card: Card, children: int | None, regions: bool) -> None:
    """Sets go on by what the host knows, in training too."""
    data = af.InputGraph.batch([af.InputGraph.from_nested((("a", "b"), "c"))[0]] * 3)

    @af.vertex_function(state=af.spec("float32", (2,)), children=children)
    def total(v: Any) -> None:
        v.scatter(v.pull() + (v.gather_all() if children is None else v.gather(0) + v.gather(1)))
        v.push(af.sum(v.pull()))

    with af.Graph():
        graph, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, 2))
        found = af.vertex_map(total, graph, x)
        loss = af.sum(found.roots) + af.sum(found.pushes["y"])
        fetches = loss, af.gradients(loss, x)
    feeds = {**graph.feeds(data), x: np.ones((data.n_vertices, 2), np.float32)}
    async with af.Session(devices=["cuda:0"], regions=regions) as session:
        value, grad = await card.without_blocking(lambda: session.run(fetches, feeds))
    assert value == 4 * data.n_vertices
    assert (grad == 2.0).all()


@pytest.mark.needs("card", "torch")
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
@on_loop
async def test_t14_cupti_sees_no_wait_on_the_loops_thread(card: Card, figures: Figures, regions: bool) -> None:
    threads = cupti.thread_names()
    service = Service(regions=regions)
    async with service.session:
        await service.run(12)
        with cupti.profiled() as seen:
            card.cupy.cuda.Stream.null.synchronize()
        assert cupti.blocking_calls(seen, threads), "the check does not see a wait that was made on purpose"
        with cupti.profiled() as found:
            await service.run(30)
    calls: dict[str, int] = {}
    for record in found:
        if record.category in cupti.CALLS and record.thread in threads:
            calls[record.name] = calls.get(record.name, 0) + 1
    figures["calls_of_the_loops_thread"] = calls
    assert cupti.blocking_calls(found, threads) == [], calls


def test_t14_what_counts_as_waiting() -> None:
    """On records as torch's profiler writes them."""
    events = [
        ("cudaLaunchKernel", "cuda_runtime", 7),
        ("cudaStreamSynchronize", "cuda_runtime", 7),
        ("cudaEventSynchronize", "cuda_runtime", 8),
        ("cudaMalloc", "cuda_runtime", 7),
        ("cudaMemcpyAsync", "cuda_runtime", 7),
        ("spin", "kernel", 7),
    ]
    trace = {
        "baseTimeNanoseconds": 1000,
        "traceEvents": [
            {"ph": "X", "name": name, "cat": category, "tid": thread, "ts": 2.5, "dur": 1.0}
            for name, category, thread in events
        ]
        + [{"ph": "i", "name": "cudaFree", "cat": "cuda_runtime", "tid": 7, "ts": 0}],
    }
    found = cupti.records(trace, 5.0)
    assert len(found) == len(events)
    assert (found[0].started_ns, found[0].ended_ns) == (3505.0, 4505.0)
    assert cupti.blocking_calls(found, frozenset({7})) == ["cudaStreamSynchronize", "cudaMalloc"]


def test_t14_the_names_of_a_thread() -> None:
    """The second pair was seen on a card."""
    assert cupti.thread_names(native=739, ident=0x7F65_5BD3_7AC0) >= {739, 0x5BD3_7AC0}
    assert cupti.thread_names(native=739, ident=(0x7F65 << 32) + 2754380096) >= {739, 1540587200}
