"""T21, T22: vertex functions, and what concurrent runs share: pooled loops, batched functions, sets of vertices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from tests.gpu import cupti
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop

H = 8
RUNS, FEW_RUNS = 64, 24
"""At once, on a card and on the stand-in."""
OPTIONS: dict[str, dict[str, Any]] = {
    "regions": {},
    "interpreted": {"regions": False},
    "graphs": {"cuda_graphs": True},
}


def _weights(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=shape) / H**0.5


# -- vertex functions ------------------------------------------------------------------------------------------------


def _slotted(w: af.Tensor, u: af.Tensor) -> af.VertexFunction:
    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def slotted(v: af.Vertex) -> None:
        left, right = v.gather(0), v.gather(1)
        h = af.tanh(v.pull() @ w + left @ u - right * 0.5)
        v.scatter(h)
        v.push(af.sum(h * left) + af.sum(v.pull()))

    return slotted


def _summed(w: af.Tensor, u: af.Tensor) -> af.VertexFunction:
    part = af.spec("float64", (H,))

    @af.vertex_function(state=(part, part))
    def summed(v: af.Vertex) -> None:
        x = v.pull() @ w
        kept = v.gather_all(lambda child: af.sigmoid(x + child[0] @ u) * child[1])
        c = kept + af.tanh(x + v.gather_all(lambda child: child[0], reduce="mean"))
        v.scatter((af.tanh(c), c))
        v.push(af.sum(c))

    return summed


FUNCTIONS = {"slotted": _slotted, "summed": _summed}
POLICIES = ("breadth_first", "depth", "agenda")


def _forest(seed: int, samples: int) -> af.InputGraph:
    """Trees, chains among them, of 1 to 20 vertices, none of which has more than two children."""
    random, found = np.random.default_rng(seed), []
    for number in range(samples):
        parents, room = [-1], [2]
        for vertex in range(1, int(random.integers(1, 21))):
            free = [place for place, left in enumerate(room) if left]
            parents.append(free[-1] if number % 3 == 1 else int(random.choice(free)))
            room[parents[vertex]] -= 1
            room.append(2)
        found.append(af.InputGraph.from_parents(parents))
    return af.InputGraph.batch(found)


class _Vertices:
    """A vertex function in a graph: its results, a loss of them, and its gradients."""

    def __init__(self, make: Callable[..., af.VertexFunction], policy: str = "breadth_first") -> None:
        with af.Graph() as self.graph:
            self._fed, self._x = af.InputGraph.placeholder(), af.placeholder("float64", (None, H))
            w, u = (af.Variable(_weights(seed, H, H)).read() for seed in (1, 2))
            found = af.vertex_map(make(w, u), self._fed, self._x, policy=policy)
            roots = found.roots[0] if isinstance(found.roots, tuple) else found.roots
            loss = af.sum(af.square(found.pushes["y"])) + af.sum(roots)
            self.fetches = [found.pushes["y"], roots, loss, *af.gradients(loss, [self._x, w, u])]

    def feeds(self, data: af.InputGraph) -> dict[Any, Any]:
        return {**self._fed.feeds(data), self._x: _weights(3, data.n_vertices, H)}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "options"), list(zip(POLICIES, OPTIONS.values(), strict=True)), ids=OPTIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
@on_loop
async def test_t21_the_card_gives_what_the_host_gives(
    card: Card, function: str, policy: str, options: dict[str, Any]
) -> None:
    """Forward and gradients; batches of several structures, one of them often enough to be captured."""
    program = _Vertices(FUNCTIONS[function], policy)
    structures = [_forest(seed, samples) for seed, samples in enumerate((5, 1))]
    async with (
        af.Session(program.graph, devices=["cpu:0"]) as on_host,
        af.Session(program.graph, devices=["cuda:0"], **options) as on_card,
    ):
        for data in (*structures, *[structures[0]] * (WARM_UPS + 2)):
            wanted = await on_host.run(program.fetches, program.feeds(data))
            found = await on_card.run(program.fetches, program.feeds(data))
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


NO_KERNELS = ("eventRecord", "streamWaitEvent", "memcpyAsync", "poison")


async def _kernels(card: Card, run: Callable[[], Awaitable[object]]) -> list[str]:
    """The names of the kernels that a run launches."""
    if card.fake is not None:
        card.fake.engine.launches.clear()
        await run()
        return [name for _, name in card.fake.engine.launches if name not in NO_KERNELS]
    with cupti.profiled() as records:
        await run()
    return [record.name for record in records if record.category == "kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
@on_loop
async def test_t21_kernels_of_a_set_do_not_depend_on_the_batch(card: Card, figures: Figures, function: str) -> None:
    """In training, of a complete tree; on a card PyTorch's profiler counts."""
    program = _Vertices(FUNCTIONS[function])
    tree = af.InputGraph.from_parents([-1, *((vertex - 1) // 2 for vertex in range(1, 31))])
    n_sets = 5
    counts = {}
    async with af.Session(program.graph, devices=["cuda:0"]) as session:
        for batch in (1, 8, 16, card.choose(256, 32)):
            feeds = program.feeds(af.InputGraph.batch([tree] * batch))
            await session.run(program.fetches, feeds)  # which compiles
            counts[batch] = await _kernels(card, lambda feeds=feeds: session.run(program.fetches, feeds))  # type: ignore[misc]
            figures[f"kernels_a_set_batch_{batch}"] = len(counts[batch]) / n_sets
    alone, least, *others = map(len, counts.values())
    assert least >= 2 * n_sets, "forward and backward have kernels for each set"
    # Products of weights are summed for several sets at once where their rows are few: then other kernels do it.
    assert abs(least - alone) <= n_sets, "sets of one row are summed elsewhere"
    # cuBLAS, CUB and CuPy choose by the shape how many kernels a product, a sum or a copy takes.
    figures.below("most_by_least", max(least, *others) / min(least, *others), 1.15)
    assert card.is_real or max(least, *others) - min(least, *others) <= n_sets


# -- what concurrent runs share --------------------------------------------------------------------------------------


class _Shared(NamedTuple):
    """Something that concurrent runs share, and a request of each number."""

    graph: af.Graph
    fetches: Any
    request: Callable[[int], dict[Any, Any]]


def _decoder() -> _Shared:
    """A pooled loop of 0 to 20 steps."""
    w = _weights(4, H, H)
    with af.Graph() as graph:
        x, n = af.placeholder("float64", (H,)), af.placeholder("int64", ())
        fetches = af.while_loop(
            lambda i, _: i < n, lambda i, s: (i + 1, af.tanh(s @ w + x)), (0, np.zeros(H)), pool=af.Pool(16)
        )
    return _Shared(graph, fetches, lambda k: {x: _weights(k, H), n: k * 7 % 21})


def _layer() -> _Shared:
    """A batched function with two layers."""
    w = _weights(5, H, H)
    with af.Graph() as graph:
        x = af.placeholder("float64", (H,))
        fetches = af.batched(lambda x: (af.tanh(af.tanh(x @ w) @ w), af.sum(x)))(x)
    return _Shared(graph, fetches, lambda k: {x: _weights(k, H)})


def _sets() -> _Shared:
    """Sets of a vertex function."""
    with af.Graph() as graph:
        fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, H))
        w, u = (af.constant(_weights(seed, H, H)) for seed in (1, 2))
        found = af.vertex_map(_slotted(w, u), fed, x, share=True)
        fetches = found.pushes["y"], found.roots

    def request(k: int) -> dict[Any, Any]:
        data = _forest(k, 1)
        return {**fed.feeds(data), x: _weights(k, data.n_vertices, H)}

    return _Shared(graph, fetches, request)


SHARED = {"pool": _decoder, "batched": _layer, "vertices": _sets}
shared = pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@shared
@on_loop
async def test_t22_concurrent_runs_give_what_each_gives_alone(
    card: Card, figures: Figures, make: Callable[[], _Shared], options: dict[str, Any]
) -> None:
    """Compare runs on the host, one after the other, with all runs at once on the card, some of them never awaited."""
    program, count = make(), card.choose(RUNS, FEW_RUNS)
    async with af.Session(program.graph, devices=["cpu:0"]) as on_host:
        wanted = [await on_host.run(program.fetches, program.request(k)) for k in range(count)]
    async with af.Session(program.graph, devices=["cuda:0"], **options) as on_card:
        for _ in range(WARM_UPS + 1):
            runs = [asyncio.ensure_future(on_card.run(program.fetches, program.request(k))) for k in range(count)]
            await asyncio.sleep(0)
            for run in runs[5::16]:
                run.cancel()
            found: list[Any] = await asyncio.gather(*runs, return_exceptions=True)
            for k, (answer, expected) in enumerate(zip(found, wanted, strict=True)):
                if k % 16 == 5 and isinstance(answer, asyncio.CancelledError):
                    continue
                for one, other in zip(answer, expected, strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
        (counts,) = on_card.statistics().batches.values()
        figures["rows_a_call"] = counts.members / counts.calls
        assert counts.largest > 1, "nothing was shared"


async def _all_at_once(session: af.Session, program: _Shared, count: int) -> None:
    await asyncio.gather(*(session.run(program.fetches, program.request(k)) for k in range(count)))


@pytest.mark.slow
@shared
@on_loop
async def test_t22_no_call_waits_for_the_card(card: Card, make: Callable[[], _Shared]) -> None:
    program = make()
    async with af.Session(program.graph, devices=["cuda:0"], memory_limit=32 << 20) as session:
        await card.without_blocking(lambda: _all_at_once(session, program, card.choose(RUNS, FEW_RUNS)))


@pytest.mark.needs("card", "torch")
@shared
@on_loop
async def test_t22_cupti_sees_no_wait_on_the_loops_thread(
    card: Card, figures: Figures, make: Callable[[], _Shared]
) -> None:
    program, threads = make(), cupti.thread_names()
    async with af.Session(program.graph, devices=["cuda:0"], memory_limit=32 << 20) as session:
        for _ in range(5):
            await _all_at_once(session, program, RUNS)
        with cupti.profiled() as found:
            await _all_at_once(session, program, RUNS)
    calls: dict[str, int] = {}
    for record in found:
        if record.category in cupti.CALLS and record.thread in threads:
            calls[record.name] = calls.get(record.name, 0) + 1
    figures["calls_of_the_loops_thread"] = calls
    assert cupti.blocking_calls(found, threads) == [], calls
