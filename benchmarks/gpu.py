"""On a card: launches, chains, layers, trivial loops, a pipeline over logical devices, and an LSTM's training step.

Beside CuPy by hand, PyTorch and JAX on the same card, all of which give their results to the host. Products are of
float32 in every system, not of TF32.
"""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.profiler import save
from benchmarks import loop_overhead, parallel_iterations
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare, timed, timed_await
from benchmarks.lstm import TOLERANCE, AsyncflowStep, looped, random_model, timed_step, timed_step_await
from benchmarks.lstm_peers import jax_scan, torch_loop, torch_module
from benchmarks.lstm_training import TORCH_MODULE
from benchmarks.peers import JAX, NO_PEERS, TORCH, Peers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

CARD: Final = "cuda:0"
CUPY: Final = "cupy"
INTERPRETED: Final = f"{ASYNCFLOW}, interpreted"
OPERATION_TIME: Final = Figure("time an operation", "µs")
RUN_TIME: Final = Figure("time a run", "µs")
ITERATION_RATE: Final = Figure("rate", "iterations/s", higher_is_better=True)

LAUNCHES, CHAIN, LAYERS = "gpu_launches", "gpu_chain", "gpu_layers"
LOOP, DECISIONS, RUN = "gpu_loop", "gpu_decisions", "gpu_run"
PIPELINE, LSTM = "gpu_pipeline", "gpu_lstm_training"
PIPELINE_SIZES: Final = {"layers": 4, "size": 512, "iterations": 100}
LAYER_SIZES: Final = {"layers": 16, "batch": 64, "hidden": 512}
LSTM_SIZES: Final = {"steps": 100, "batch": 64, "hidden": 512}


class Program(NamedTuple):
    """A program: its graph, what to fetch, and what to feed."""

    graph: af.Graph
    fetches: Any
    feeds: dict[af.Tensor, Any]


# -- launches ------------------------------------------------------------------------------------------------------


def _products(x: Any, w: Any, operations: int) -> Any:
    """Each on the result of the one before, and nothing that could be fused."""
    for _ in range(operations):
        x = x @ w
    return x


def build_products(operations: int) -> Program:
    """A chain of tiny products."""
    fed, weight = np.ones((8, 8), np.float32), np.eye(8, dtype=np.float32)
    with af.Graph() as graph:
        x = af.placeholder("float32", fed.shape)
        y = _products(x, af.constant(weight), operations)
    return Program(graph, y, {x: fed})


async def measure_launches(peers: Peers = NO_PEERS, *, repeats: int = 7, operations: int = 1000) -> list[Result]:
    """µs of one of many tiny products, from the call until the last result is on the host."""
    graph, y, feeds = build_products(operations)
    (fed,), weight = feeds.values(), np.eye(8, dtype=np.float32)
    scale = 1e6 / operations
    systems = {ASYNCFLOW: True, INTERPRETED: False}
    sessions = {name: af.Session(graph, devices=[CARD], regions=regions) for name, regions in systems.items()}
    trials: dict[str, Trial] = {
        name: timed_await(OPERATION_TIME, scale, partial(session.run, y, feeds)) for name, session in sessions.items()
    }
    trials[CUPY] = timed(OPERATION_TIME, scale, _by_hand(fed, weight, operations))
    if peers.torch is not None:
        torch = peers.torch
        on_card = torch.from_numpy(weight).to(CARD)
        trials[TORCH] = timed(
            OPERATION_TIME, scale, lambda: _products(torch.from_numpy(fed).to(CARD), on_card, operations).cpu().numpy()
        )
    try:
        return await compare(LAUNCHES, f"{operations:,} products of 8x8", trials, repeats=repeats, tolerance=1e-6)
    finally:
        for session in sessions.values():
            await session.aclose()


def _by_hand(fed: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], operations: int) -> Callable[[], Any]:
    cupy = cuda_backend().cupy
    on_card = cupy.asarray(weight)
    return lambda: _products(cupy.asarray(fed), on_card, operations).get()


# -- chains: fused, and captured ----------------------------------------------------------------------------------


def _chain(xp: Any, x: Any, scale: Any, rounds: int) -> Any:
    """Three elementwise operations and a mean, so often."""
    for _ in range(rounds):
        x = xp.tanh(x * scale + 0.5)
        x = x - xp.mean(x)
    return xp.mean(x * x)


def build_chain(size: int, rounds: int) -> Program:
    """The chain, over `size` numbers."""
    with af.Graph() as graph:
        scale = af.placeholder("float32", (1,))
        y = _chain(af, af.constant(np.linspace(-1, 1, size, dtype=np.float32)), scale, rounds)
    return Program(graph, y, {scale: np.full(1, 1.5, np.float32)})


CHAIN_WAYS: Final[dict[str, dict[str, Any]]] = {
    ASYNCFLOW: {},
    f"{ASYNCFLOW}, not fused": {"fusion": False},
    f"{ASYNCFLOW}, CUDA graph": {"cuda_graphs": True},
    f"{ASYNCFLOW}, CUDA graph, not fused": {"cuda_graphs": True, "fusion": False},
    INTERPRETED: {"regions": False},
}
"""Options of the session by the name of the row."""


async def measure_chain(
    peers: Peers = NO_PEERS, *, repeats: int = 7, rounds: int = 25, sizes: Sequence[int] = (1_000, 1_000_000)
) -> list[Result]:
    """µs an operation of elementwise ones and reductions: fused or not, captured as a CUDA graph or not."""
    results = []
    for size in sizes:
        graph, y, feeds = build_chain(size, rounds)
        numbers, (fed,) = np.linspace(-1, 1, size, dtype=np.float32), feeds.values()
        unit = 1e6 / (5 * rounds + 2)
        trials = {}
        async with AsyncExitStack() as stack:
            for name, options in CHAIN_WAYS.items():
                session = await stack.enter_async_context(af.Session(graph, devices=[CARD], **options))
                trials[name] = timed_await(OPERATION_TIME, unit, partial(session.run, y, feeds))
            for name, run in _chains_by_hand(peers, numbers, fed, rounds).items():
                trials[name] = timed(OPERATION_TIME, unit, run)
            case = f"{rounds} times four operations and a mean of {size:,} numbers"
            # A graph is captured once a region has run a few times.
            first = WARM_UPS + 2
            results += await compare(CHAIN, case, trials, repeats=repeats, warm_ups=first, lead_ins=1, tolerance=1e-4)
    return results


def _chains_by_hand(peers: Peers, numbers: Any, fed: Any, rounds: int) -> dict[str, Callable[[], Any]]:
    cupy = cuda_backend().cupy
    on_card = cupy.asarray(numbers)
    ways: dict[str, Callable[[], Any]] = {CUPY: lambda: _chain(cupy, on_card, cupy.asarray(fed), rounds).get()}
    if peers.torch is not None:
        torch = peers.torch
        tensor = torch.from_numpy(numbers).to(CARD)
        ways[TORCH] = lambda: _chain(torch, tensor, torch.from_numpy(fed).to(CARD), rounds).cpu().numpy()
    return ways


# -- layers: products of matrices in between -------------------------------------------------------------------------


def _layered(xp: Any, x: Any, layers: Sequence[tuple[Any, Any]]) -> Any:
    for weights, bias in layers:
        x = xp.tanh(x @ weights + bias)
    return x


async def measure_layers(
    peers: Peers = NO_PEERS, *, repeats: int = 7, sizes: dict[str, int] | None = None
) -> list[Result]:
    """µs of a layer of a network, launched one by one, and as one CUDA graph, from the feed to the last on the host."""
    chosen = LAYER_SIZES | (sizes or {})
    hidden, random = chosen["hidden"], np.random.default_rng(0)
    numbers = [
        (
            random.standard_normal((hidden, hidden), np.float32) / np.float32(hidden**0.5),
            np.full(hidden, 0.1, np.float32),
        )
        for _ in range(chosen["layers"])
    ]
    fed, unit = random.standard_normal((chosen["batch"], hidden), np.float32), 1e6 / chosen["layers"]
    with af.Graph() as graph:
        x = af.placeholder("float32", fed.shape)
        y = _layered(af, x, [(af.constant(weights), af.constant(bias)) for weights, bias in numbers])
    trials: dict[str, Trial] = {}
    async with AsyncExitStack() as stack:
        for name, graphs in ((ASYNCFLOW, False), (f"{ASYNCFLOW}, CUDA graph", True)):
            session = await stack.enter_async_context(af.Session(graph, devices=[CARD], cuda_graphs=graphs))
            trials[name] = timed_await(OPERATION_TIME, unit, partial(session.run, y, {x: fed}))
        cupy = cuda_backend().cupy
        on_card = [(cupy.asarray(weights), cupy.asarray(bias)) for weights, bias in numbers]
        trials[CUPY] = timed(OPERATION_TIME, unit, lambda: _layered(cupy, cupy.asarray(fed), on_card).get())
        if peers.torch is not None:
            torch = peers.torch
            tensors = [
                (torch.from_numpy(weights).to(CARD), torch.from_numpy(bias).to(CARD)) for weights, bias in numbers
            ]
            trials[TORCH] = timed(
                OPERATION_TIME, unit, lambda: _layered(torch, torch.from_numpy(fed).to(CARD), tensors).cpu().numpy()
            )
        case = f"{chosen['layers']} layers of {hidden}, a batch of {chosen['batch']}"
        return await compare(LAYERS, case, trials, repeats=repeats, warm_ups=WARM_UPS + 2, lead_ins=1, tolerance=1e-4)


# -- loops ---------------------------------------------------------------------------------------------------------


def build_decisions(iterations: int, size: int) -> Program:
    """A loop that goes on while an array says so."""
    with af.Graph() as graph:
        x, factor = af.placeholder("float32", (size,)), af.placeholder("float32", (1,))
        y = af.while_loop(lambda y: af.max(y) > 1.0, lambda y: y * factor, x)
        last = af.max(y)
    shrink = np.full(1, 2.0 ** (-1 / iterations), np.float32)
    return Program(graph, last, {x: np.linspace(1, 2, size, dtype=np.float32), factor: shrink})


async def measure_decisions(
    peers: Peers = NO_PEERS, *, repeats: int = 7, iterations: int = 1000, size: int = 1000
) -> list[Result]:
    """µs an iteration of a loop that goes on while an array says so: by the host, and by the card."""
    graph, last, fed = build_decisions(iterations, size)
    (numbers, shrink), scale = fed.values(), 1e6 / iterations
    trials: dict[str, Trial] = {}
    async with AsyncExitStack() as stack:
        for name, on_card in ((ASYNCFLOW, False), (f"{ASYNCFLOW}, decided on the card", True)):
            session = await stack.enter_async_context(af.Session(graph, devices=[CARD], device_while=on_card))
            trials[name] = timed_await(OPERATION_TIME, scale, partial(session.run, last, fed))
        for name, run in _decisions_by_hand(peers, numbers, shrink).items():
            trials[name] = timed(OPERATION_TIME, scale, run)
        case = f"about {iterations:,} iterations over {size:,} numbers"
        return await compare(DECISIONS, case, trials, repeats=repeats, lead_ins=2, tolerance=1e-4)


def _decisions_by_hand(peers: Peers, numbers: Any, shrink: Any) -> dict[str, Callable[[], Any]]:
    cupy = cuda_backend().cupy

    def loop(y: Any, factor: Any) -> Any:
        while y.max() > 1.0:
            y = y * factor
        return y.max()

    ways: dict[str, Callable[[], Any]] = {CUPY: lambda: loop(cupy.asarray(numbers), cupy.asarray(shrink)).get()}
    if peers.torch is not None:
        torch = peers.torch
        ways[TORCH] = lambda: loop(*(torch.from_numpy(a).to(CARD) for a in (numbers, shrink))).cpu().numpy()
    if peers.jax is not None and (cards := _cards_of(peers.jax)):
        jax = peers.jax

        def last(y: Any, factor: Any) -> Any:
            return jax.lax.while_loop(lambda y: y.max() > 1.0, lambda y: y * factor, y).max()

        compiled = jax.jit(last)
        ways[JAX] = lambda: np.asarray(compiled(*(jax.device_put(a, cards[0]) for a in (numbers, shrink))))
    return ways


async def measure_run(peers: Peers = NO_PEERS, *, repeats: int = 7, runs: int = 200, size: int = 1000) -> list[Result]:
    """µs of a run of one kernel by itself, one run after the other: fed and fetched, or all on the card."""
    numbers = np.linspace(-1, 1, size, dtype=np.float32)
    results = []
    for residence in ("fed", "resident"):
        async with AsyncExitStack() as stack:
            trials = {}
            for name, graphs in ((ASYNCFLOW, False), (f"{ASYNCFLOW}, CUDA graph", True)):
                work = await _runs_of_ours(stack, numbers, residence, runs, cuda_graphs=graphs)
                trials[name] = timed_await(RUN_TIME, 1e6 / runs, work)
            for name, by_hand in _runs_by_hand(peers, numbers, residence, runs).items():
                trials[name] = timed(RUN_TIME, 1e6 / runs, by_hand)
            case = f"one kernel on {size:,} numbers, {residence}"
            results += await compare(RUN, case, trials, repeats=repeats, lead_ins=1, tolerance=1e-5)
    return results


def _one_kernel(xp: Any, x: Any) -> Any:
    return xp.tanh(x)


async def _runs_of_ours(
    stack: AsyncExitStack, numbers: Any, residence: Literal["fed", "resident"], runs: int, **options: Any
) -> Callable[[], Awaitable[Any]]:
    with af.Graph() as graph:
        x = af.placeholder("float32", numbers.shape)
        y = _one_kernel(af, x)
    session = await stack.enter_async_context(af.Session(graph, devices=[CARD], **options))
    there = residence == "resident"
    prepared = session.prepare(af.on_device(y) if there else y, [x])
    fed = await session.run(af.on_device(x), {x: numbers}) if there else numbers

    async def work() -> Any:
        found = None
        for _ in range(runs):
            found = await prepared(fed)
            if there:
                await session.devices[0].compute.record().wait()
        return _on_host(found)

    return work


def _runs_by_hand(
    peers: Peers, numbers: Any, residence: Literal["fed", "resident"], runs: int
) -> dict[str, Callable[[], Any]]:
    """Runs of CuPy, PyTorch and JAX, each awaited by the thread."""
    cupy, there = cuda_backend().cupy, residence == "resident"

    def repeated(fed: Any, put: Callable[[Any], Any], compute: Callable[[Any], Any], wait: Callable[[Any], Any]) -> Any:
        def work() -> Any:
            found = None
            for _ in range(runs):
                found = compute(fed if there else put(fed))
                found = wait(found) if there else _on_host(found)
            return _on_host(found)

        return work

    def waited(found: Any) -> Any:
        cupy.cuda.get_current_stream().synchronize()
        return found

    ways = {
        CUPY: repeated(cupy.asarray(numbers) if there else numbers, cupy.asarray, partial(_one_kernel, cupy), waited)
    }
    if peers.torch is not None:
        torch = peers.torch

        def put(array: Any) -> Any:
            return torch.from_numpy(array).to(CARD)

        def synchronized(found: Any) -> Any:
            torch.cuda.synchronize()
            return found

        ways[TORCH] = repeated(put(numbers) if there else numbers, put, partial(_one_kernel, torch), synchronized)
    if peers.jax is not None and (cards := _cards_of(peers.jax)):
        jax = peers.jax
        compiled, place = jax.jit(partial(_one_kernel, jax.numpy)), partial(jax.device_put, device=cards[0])
        ways[JAX] = repeated(place(numbers) if there else numbers, place, compiled, jax.block_until_ready)
    return ways


async def measure_loop(peers: Peers = NO_PEERS, *, repeats: int = 7, iterations: int = 10_000) -> list[Result]:
    """µs of an iteration of trivial loops on the card, beside NumPy and Python on the host."""
    return await loop_overhead.measure(repeats=repeats, iterations=iterations, devices=[CARD], workload=LOOP)


# -- a pipeline over logical devices (EuroSys '18, fig. 12) ----------------------------------------------------------


def _pipeline(window: int, count: int, sizes: dict[str, int]) -> tuple[af.Graph, af.Tensor, list[str]]:
    """The loop with layers spread over `count` logical devices of the card."""
    devices = [f"cuda:{index}" for index in range(count)]
    names = [devices[layer * count // sizes["layers"]] for layer in range(sizes["layers"])]
    graph, top = parallel_iterations.build(window, **sizes, names=names)
    return graph, top, devices


async def measure_pipeline(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    counts: Sequence[int] = (1, 2, 4),
    windows: Sequence[int] = (1, 8),
    sizes: dict[str, int] | None = None,
) -> list[Result]:
    """Iterations/s by the number of logical devices on one card, and by how many iterations may run at once."""
    chosen = PIPELINE_SIZES | (sizes or {})
    results = []
    for count in counts:
        for window in windows:
            graph, top, devices = _pipeline(window, count, chosen)
            async with af.Session(graph, devices=devices) as session:

                async def trial(session: af.Session = session, top: af.Tensor = top) -> Sample:
                    started = perf_counter()
                    answer = await session.run(top)
                    return Sample({ITERATION_RATE: chosen["iterations"] / (perf_counter() - started)}, answer)

                case = f"{chosen['layers']} layers of {chosen['size']}x{chosen['size']}, logical devices: {count}, "
                case += f"parallel_iterations {window}"
                results += await compare(PIPELINE, case, {ASYNCFLOW: trial}, repeats=repeats)
    return results


def draw_pipeline(
    results: Sequence[Result], folder: Path, *, count: int = 4, sizes: dict[str, int] | None = None
) -> list[Path]:
    """Its timeline, from the card's events."""

    async def traced() -> af.Trace:
        graph, top, devices = _pipeline(8, count, PIPELINE_SIZES | {"iterations": 20} | (sizes or {}))
        async with af.Session(graph, devices=devices) as session:
            await session.run(top)
            trace = af.Trace()
            await session.run(top, trace=trace)
            return trace

    return saved_timeline(af.run(traced()), folder, PIPELINE)


# -- an LSTM layer ---------------------------------------------------------------------------------------------------


async def measure_lstm(
    peers: Peers = NO_PEERS, *, repeats: int = 5, sizes: dict[str, int] | None = None
) -> list[Result]:
    """ms of a training step: forward, and backward through the loop; all fed and fetched, or all on the card."""
    results = []
    for residence in ("fed", "resident"):
        results += await _measure_lstm(peers, residence, repeats, LSTM_SIZES | (sizes or {}))
    return results


async def _measure_lstm(
    peers: Peers, residence: Literal["fed", "resident"], repeats: int, chosen: dict[str, int]
) -> list[Result]:
    model = random_model(**chosen)
    outputs = model.xs.size
    ours = lstm_step(chosen)
    run = ours.run if residence == "fed" else await ours.resident()
    trials: dict[str, Trial] = {ASYNCFLOW: timed_step_await(outputs, run, _on_host)}
    if peers.torch is not None:
        # cuDNN's LSTM takes TF32 by default.
        peers.torch.backends.cudnn.allow_tf32 = False
        trials[TORCH] = timed_step(
            outputs, torch_loop(peers.torch, model, outputs, place=CARD, residence=residence), _on_host
        )
        trials[TORCH_MODULE] = timed_step(
            outputs, torch_module(peers.torch, model, outputs, place=CARD, residence=residence), _on_host
        )
    if peers.jax is not None and (cards := _cards_of(peers.jax)):
        peers.jax.config.update("jax_default_matmul_precision", "highest")
        trials[JAX] = timed_step(
            outputs, jax_scan(peers.jax, model, outputs, place=cards[0], residence=residence), _on_host
        )
    case = f"hidden {chosen['hidden']}, batch {chosen['batch']}, {chosen['steps']} steps, {residence}"
    try:
        return await compare(LSTM, case, trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE)
    finally:
        await ours.session.aclose()


def _on_host(array: Any) -> Any:
    """The array of any system as NumPy's."""
    if hasattr(array, "cpu"):
        return array.cpu()
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _cards_of(jax: Any) -> Sequence[Any]:
    """The cards that JAX was built for; it raises where there are none."""
    try:
        cards: Sequence[Any] = jax.devices("gpu")
    except RuntimeError:
        return []
    return cards


def lstm_step(sizes: dict[str, int], **options: Any) -> AsyncflowStep:
    """Make the step on the card, in a session with these options."""
    model = random_model(**sizes)
    return AsyncflowStep(model, looped, model.xs.size, [np.array(len(model.xs), np.int32)], devices=[CARD], **options)


def draw_lstm(results: Sequence[Result], folder: Path, *, sizes: dict[str, int] | None = None) -> list[Path]:
    """The timeline of a step, with its copies beside its kernels."""

    async def traced() -> af.Trace:
        step = lstm_step(LSTM_SIZES | {"steps": 20} | (sizes or {}))
        async with step.session:
            await step.run()
            with af.Trace() as trace:
                # Two at once: the inputs of one are copied while the other computes.
                await asyncio.gather(step.run(), step.run())
            return trace

    return saved_timeline(af.run(traced()), folder, LSTM)


def saved_timeline(trace: af.Trace, folder: Path, name: str) -> list[Path]:
    """Write a timeline for Perfetto, for browsers, and as a picture where there is something to draw with."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [".png"] if importlib.util.find_spec("matplotlib") else []  # which a machine with a card may lack
    paths = [folder / f"{name}{suffix}" for suffix in (".json.gz", ".html", *pictures)]
    for path in paths:
        save(trace, path)
    return paths
