"""On a card: vertex functions (Cavs, fig. 8), a pooled loop that decodes, and requests that share calls.

Beside CuPy and PyTorch on the same card, batched by hand. In every system, inputs of training steps are on the card
from the start, requests come from the host, and results go to it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from asyncflow.devices.cuda.backend import cuda_backend
from benchmarks import batched_requests, pooled_loop
from benchmarks.gpu import CARD, CUPY
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare, timed
from benchmarks.lstm_by_hand import ByHand
from benchmarks.lstm_peers import torch_loop, torch_module
from benchmarks.peers import NO_PEERS, TORCH, Peers
from benchmarks.sequences import OfVertices, Sequences
from benchmarks.trees import (
    STEP,
    OfAsyncflow,
    timed_sample,
    torch_step,
    tree_fc,
    tree_lstm,
)
from benchmarks.vertex_models import (
    BY_LEVEL,
    MODELS,
    SIZES,
    TOLERANCE,
    TORCH_MODULE,
    OfTrees,
    Sizes,
    case,
    weights_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

VERTICES, POOL, BATCHED = "gpu_vertex_models", "gpu_pooled_loop", "gpu_batched"
GRAPHS: Final = f"{ASYNCFLOW}, CUDA graphs"
SAMPLES: Final = Figure("throughput", "samples/s", higher_is_better=True)
TOKENS: Final = Figure("throughput", "tokens/s", higher_is_better=True)


# -- vertex functions ------------------------------------------------------------------------------------------------


async def measure_vertices(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    models: Sequence[str] = MODELS,
    batches: Sequence[int] = (1, 16, 64, 256),
    hidden: int = 512,
    sizes: Sizes = SIZES,
) -> list[Result]:
    """Training steps: us a sample, and samples/s, which the batch is to multiply."""
    results: list[Result] = []
    for model in models:
        for batch in batches:
            samples = sizes.samples(model, batch, hidden)
            ours = _ours(model, samples, hidden)
            works = {ASYNCFLOW: ours.step, **_by_hand(peers, samples, hidden)}
            answer_of = partial(weights_of, samples) if isinstance(samples, Sequences) else None
            trials = {name: _per_second(timed_sample(batch, work, answer_of)) for name, work in works.items()}
            del works
            async with ours.session:
                # The first steps compile.
                results += await compare(
                    VERTICES, case(model, batch, hidden), trials, repeats=repeats, warm_ups=2, tolerance=TOLERANCE
                )
            del ours, trials
    return results


def _ours(model: str, samples: OfTrees | Sequences, hidden: int) -> OfAsyncflow | OfVertices:
    if isinstance(samples, Sequences):
        ours: OfAsyncflow | OfVertices = OfVertices(samples, devices=[CARD])
    else:
        ours = OfAsyncflow(samples.trees, (tree_fc if model == "Tree-FC" else tree_lstm)(hidden), devices=[CARD])
    cupy = cuda_backend().cupy
    rows = samples.rows if isinstance(samples, Sequences) else samples.trees.xs
    ours.feeds = {x: cupy.asarray(value) if value is rows else value for x, value in ours.feeds.items()}
    return ours


def _by_hand(peers: Peers, samples: OfTrees | Sequences, hidden: int) -> dict[str, Callable[[], Any]]:
    """A step in CuPy, and in PyTorch."""
    cupy, torch = cuda_backend().cupy, peers.torch
    if torch is not None:
        # cuDNN's LSTM takes TF32 by default.
        torch.backends.cudnn.allow_tf32 = False
    if isinstance(samples, Sequences):
        model, outputs = samples.model, samples.outputs
        counts, lengths = (None, None) if samples.is_fixed else (samples.counts.tolist(), samples.lengths.tolist())
        by_hand = ByHand(model, counts, cupy)

        def step() -> Any:
            loss, grads = by_hand()
            return loss.get(), [grad.get() for grad in grads]

        works: dict[str, Callable[[], Any]] = {CUPY: step}
        if torch is not None:
            works[BY_LEVEL] = torch_loop(torch, model, outputs, counts, place=CARD)
            works[TORCH_MODULE] = torch_module(torch, model, outputs, lengths, place=CARD)
        return works
    trees, on_host = samples
    on_card = type(on_host)(trees, hidden, cupy)
    works = {CUPY: lambda: tuple(each.get() for each in on_card.step())}
    if torch is not None:
        works[BY_LEVEL] = torch_step(torch, trees, on_host, place=CARD)
    return works


def _per_second(trial: Trial) -> Trial:
    async def measured() -> Sample:
        found = await trial()
        return Sample({**found.figures, SAMPLES: 1e6 / found.figures[STEP]}, found.answer)

    return measured


# -- pooled loops ----------------------------------------------------------------------------------------------------


async def measure_pool(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    hidden: int = 512,
    rows: int = 256,
    lengths: Sequence[tuple[int, int]] = ((64, 64), (20, 120), (512, 512)),
) -> list[Result]:
    """Measure tokens/s of requests that are all there at once, each with its own number of GRU steps.

    By hand, all lengths are known in advance: rows stand in the order of their lengths, and none is ever moved.
    """
    results: list[Result] = []
    random = np.random.default_rng(0)
    weights = (random.normal(size=(hidden, 3 * hidden)) / hidden**0.5).astype(np.float32)
    xs = random.normal(size=(rows, 3 * hidden)).astype(np.float32)
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3 * hidden,)), af.placeholder("int64", ())
        last = pooled_loop.gru(x, n, weights, af.Pool(rows))
    async with AsyncExitStack() as stack:
        sessions = {
            name: await stack.enter_async_context(af.Session(graph, devices=[CARD], cuda_graphs=captures))
            for name, captures in ((ASYNCFLOW, False), (GRAPHS, True))
        }
        for least, most in lengths:
            counts = random.integers(least, most, rows, endpoint=True)
            asked = [(row, int(count)) for row, count in zip(xs, counts, strict=True)]
            scale = float(counts.sum())
            trials = {
                name: _tokens(scale, pooled_loop.trial_of(session.prepare(last, [x, n]), asked, rows))
                for name, session in sessions.items()
            }
            for name, run in _decoders(peers, weights, xs, counts).items():
                trials[name] = _tokens(scale, timed(pooled_loop.TIME, 1e3, run))
            named = f"{rows} requests of {least} to {most} steps at once, {hidden} wide"
            results += await compare(POOL, named, trials, repeats=repeats, warm_ups=3, tolerance=1e-3)
    return results


def _tokens(scale: float, trial: Trial) -> Trial:
    async def measured() -> Sample:
        found = await trial()
        return Sample({**found.figures, TOKENS: 1e3 * scale / found.figures[pooled_loop.TIME]}, found.answer)

    return measured


def _decoders(peers: Peers, weights: Array, xs: Array, counts: Array) -> dict[str, Callable[[], Any]]:
    """The same by hand: all rows that go on are stepped at once."""
    order = np.argsort(-counts, kind="stable")
    live = np.sum(counts > np.arange(counts.max())[:, None], axis=1).tolist()
    places = np.argsort(order)
    cupy = cuda_backend().cupy
    w = cupy.asarray(weights)
    functions = _functions(cupy)
    ways: dict[str, Callable[[], Any]] = {
        CUPY: lambda: _decoded(functions, w, cupy.asarray(xs[order]), live).get()[places]
    }
    if (torch := peers.torch) is not None:
        on_card = torch.from_numpy(weights).to(CARD)

        def run() -> Any:
            with torch.no_grad():
                found = _decoded(torch, on_card, torch.from_numpy(xs[order]).to(CARD), live)
                return found.cpu().numpy()[places]

        ways[TORCH] = run
    return ways


def _functions(cupy: Any) -> Any:
    """Functions that PyTorch has, too, a kernel each."""
    sigmoid = cupy.ElementwiseKernel("T x", "T y", "y = 1 / (1 + exp(-x))", "sigmoid_by_hand")
    return SimpleNamespace(sigmoid=sigmoid, tanh=cupy.tanh, zeros_like=cupy.zeros_like)


def _decoded(functions: Any, weights: Any, xs: Any, live: Sequence[int]) -> Any:
    """Return the last states; `live` has the number of rows that go on in each step."""
    width = weights.shape[0]
    states = functions.zeros_like(xs[:, :width])
    for count in live:
        x, state = xs[:count], states[:count]
        gates = state @ weights
        both = functions.sigmoid(gates[:, : 2 * width] + x[:, : 2 * width])
        candidate = functions.tanh(x[:, 2 * width :] + both[:, width:] * gates[:, 2 * width :])
        state += both[:, :width] * (candidate - state)
    return states


# -- batched functions -----------------------------------------------------------------------------------------------


async def measure_batched(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    hidden: int = 512,
    steps: int = 8,
    clients: Sequence[int] = (1, 32),
    requests: int = 320,
) -> list[Result]:
    """Requests per second and their latencies, beside calls of CuPy that have as many rows as there are clients."""
    cupy = cuda_backend().cupy
    functions = _functions(cupy)

    def by_hand(weights: Array, asked: Array, count: int) -> Trial:
        on_card = cupy.asarray(weights)
        parts = [asked[first : first + count] for first in range(0, len(asked), count)]

        async def trial() -> Sample:
            started = perf_counter()
            answers = np.concatenate([_stepped(cupy, functions, on_card, part, steps) for part in parts])
            rate = len(asked) / (perf_counter() - started)
            return Sample({batched_requests.THROUGHPUT: rate}, answers)

        return trial

    return await batched_requests.measure(
        peers,
        repeats=repeats,
        hidden=hidden,
        steps=steps,
        clients=tuple(clients),
        requests=requests,
        workload=BATCHED,
        by_hand={CUPY: by_hand},
        devices=[CARD],
    )


def _stepped(cupy: Any, functions: Any, weights: Any, asked: Array, steps: int) -> Array:
    x = cupy.asarray(asked)
    h, c = cupy.zeros_like(x), cupy.zeros_like(x)
    width = x.shape[1]
    for _ in range(steps):
        gates = cupy.concatenate([x, h], axis=1) @ weights
        into, forget, candidate, out = (gates[:, k * width : (k + 1) * width] for k in range(4))
        c = functions.sigmoid(forget) * c + functions.sigmoid(into) * functions.tanh(candidate)
        h = functions.sigmoid(out) * functions.tanh(c)
    found: Array = h.get()
    return found
