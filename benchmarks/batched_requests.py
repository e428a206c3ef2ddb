"""Requests for one model, each by itself or as rows of shared calls: LSTM steps, one vector each.

A request that is alone has to cost as much as without batches, so that users need not choose. With PyTorch, a module of
its own is measured, too, beside an op that calls it for all rows by hand.
"""

from __future__ import annotations

import asyncio
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncflow.runtime.calls.calls import Prepared

    Array = np.ndarray[Any, Any]

THROUGHPUT = Figure("throughput", "requests/s", higher_is_better=True)
MEDIAN = Figure("latency p50", "ms")
CPU = Figure("CPU time a request", "us")
ALONE = "each by itself"
MAPPED, CALLED, BY_HAND = "mapped by torch.vmap", "a call of the module a request", "an op of rows, by hand"


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    hidden: int = 512,
    steps: int = 8,
    clients: tuple[int, ...] = (1, 32),
    requests: int = 320,
    workload: str = "batched_requests",
    by_hand: Mapping[str, Callable[[Array, Array, int], Trial]] | None = None,
    **options: Any,
) -> list[Result]:
    """Measure requests per second, and their latencies, with batches and without.

    Args:
        peers: PyTorch, for its module.
        repeats: measured trials of each way.
        hidden: extent of states.
        steps: of each request.
        clients: numbers of clients at once.
        requests: of all of them.
        workload: as results name it.
        by_hand: other ways, from weights, the requests, and how many clients there are.
        options: of the session.
    """
    random = np.random.default_rng(0)
    weights = (random.normal(size=(2 * hidden, 4 * hidden)) / hidden**0.5).astype(np.float32)
    asked = random.normal(size=(requests, hidden)).astype(np.float32)
    with af.Graph() as graph:
        x = af.placeholder("float32", (hidden,))
        alone, batched = lstm(x, weights, steps), af.batched(lambda x: lstm(x, weights, steps))(x)
    found = []
    async with af.Session(graph, **options) as session:
        for count in clients:
            trials: dict[str, Trial] = {
                ASYNCFLOW: trial_of(session.prepare(batched, [x]), asked, count),
                ALONE: trial_of(session.prepare(alone, [x]), asked, count),
            }
            trials |= {name: way(weights, asked, count) for name, way in (by_hand or {}).items()}
            case = f"{steps} steps, hidden {hidden}, {requests} requests, {count} at a time"
            found += await compare(workload, case, trials, repeats=repeats, tolerance=1e-4)
    if peers.torch is not None and not options:
        found += await _measure_module(peers.torch, workload, asked, max(clients), repeats)
    return found


async def _measure_module(torch: Any, workload: str, asked: Array, clients: int, repeats: int) -> list[Result]:
    """The same for two layers of PyTorch's, as a batched function."""
    hidden = asked.shape[1]
    torch.manual_seed(0)
    layers = torch.nn.Linear(hidden, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 8)
    module = torch.nn.Sequential(*layers).eval()

    @af.op(outputs=af.spec("float32", (8,)), rows=True, pure=True)
    def by_hand(rows: Array) -> Array:
        with torch.no_grad():
            found: Array = module(torch.from_numpy(rows.copy())).numpy()
            return found

    ways: dict[str, Callable[[af.Tensor], Any]] = {
        ASYNCFLOW: af.from_torch(module, rows=True),
        MAPPED: af.from_torch(module),
        CALLED: af.from_torch(module, rows=False),
        BY_HAND: by_hand,
    }
    with af.Graph() as graph:
        x = af.placeholder("float32", (hidden,))
        fetches = {name: af.batched(way)(x) for name, way in ways.items()}
    async with af.Session(graph) as session:
        trials = {name: _with_cpu(trial_of(session.prepare(y, [x]), asked, clients)) for name, y in fetches.items()}
        case = f"a module of PyTorch's, hidden {hidden}, {len(asked)} requests, {clients} at a time"
        return await compare(workload, case, trials, repeats=repeats, tolerance=1e-4)


def _with_cpu(trial: Trial) -> Trial:
    async def run() -> Sample:
        started = process_time()
        sample = await trial()
        answers: Any = sample.answer
        return Sample({**sample.figures, CPU: (process_time() - started) / len(answers) * 1e6}, answers)

    return run


def lstm(x: af.Tensor, weights: Array, steps: int) -> af.Tensor:
    """Return the last of `steps` states, for the same input in every step; both are [hidden]."""
    start = np.zeros(weights.shape[0] // 2, np.float32)

    def step(i: af.Tensor, h: af.Tensor, c: af.Tensor) -> tuple[af.Tensor, ...]:
        into, forget, candidate, out = af.split(af.concat([x, h]) @ weights, 4)
        c = af.sigmoid(forget) * c + af.sigmoid(into) * af.tanh(candidate)
        return i + 1, af.sigmoid(out) * af.tanh(c), c

    last: af.Tensor = af.while_loop(lambda i, *_: i < steps, step, (0, start, start))[1]
    return last


def trial_of(run: Prepared, requests: Array, clients: int) -> Trial:
    """Clients that ask for one after the other."""

    async def trial() -> Sample:
        left = iter(enumerate(requests))
        answers: list[Any] = [None] * len(requests)
        latencies: list[float] = []

        async def client() -> None:
            for number, x in left:
                began = perf_counter()
                answers[number] = await run(x)
                latencies.append(perf_counter() - began)

        started = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        elapsed = perf_counter() - started
        median = float(np.median(latencies)) * 1e3
        return Sample({THROUGHPUT: len(requests) / elapsed, MEDIAN: median}, np.array(answers))

    return trial
