"""Costs of one run: one node and twenty, on scalars and on small arrays, one run after the other.

By `Session.run`, which looks at fetches and feeds every time, by a call prepared for them, and by an `af.function`. The
peers get a NumPy value and give one back, as asyncflow does; NumPy by hand is the same work in a Python function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, compare, timed, timed_await
from benchmarks.peers import JAX, NO_PEERS, NUMPY, TENSORFLOW_1, TORCH, Peers
from benchmarks.programs import chain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.peers import TensorFlow

TIME = Figure("time a run", "µs")
SCALE, OFFSET = np.float32(0.5), np.float32(1.0)
ROW: Final = 8
TOLERANCE: Final = 1e-6
"""XLA rounds a product and the sum after it once, the others twice."""


@dataclass(frozen=True, slots=True)
class Fed:
    """The feed of a run: the shape that the graph declares, and a value; the name stands for both in tables."""

    name: str
    shape: tuple[int | None, ...]
    value: Any


FEEDS: Final = (
    Fed("", (), np.float32(3.0)),
    Fed(f", float32[{ROW}]", (ROW,), np.arange(ROW, dtype=np.float32)),
    Fed(f", float32[{ROW}] for float32[?]", (None,), np.arange(ROW, dtype=np.float32)),
)


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 11, runs: int = 500, nodes: Sequence[int] = (1, 20)
) -> list[Result]:
    """Measure µs per run, by the number of nodes and the feed."""
    results = []
    for fed in FEEDS:
        for count in nodes:
            results += await _measure(peers, repeats, runs, count, fed)
    return results


async def _measure(peers: Peers, repeats: int, runs: int, nodes: int, fed: Fed) -> list[Result]:
    def program(x: af.Tensor) -> af.Tensor:
        return chain(x, af.constant(SCALE), af.constant(OFFSET), nodes)

    program.__annotations__["x"] = af.spec("float32", fed.shape)
    traced = af.function(program)
    with af.Graph() as graph:
        x = af.placeholder("float32", fed.shape)
        y = program(x)
    async with af.Session(graph) as session:
        prepared = session.prepare(y, [x])
        ours: dict[str, Callable[[], Awaitable[Any]]] = {
            ASYNCFLOW: lambda: session.run(y, {x: fed.value}),
            f"{ASYNCFLOW}, prepared": lambda: prepared(fed.value),
            f"{ASYNCFLOW}, function": lambda: traced(fed.value),
        }
        scale = 1e6 / runs
        trials = {system: timed_await(TIME, scale, _repeat_await(run, runs)) for system, run in ours.items()}
        for system, call in _peers(peers, nodes, fed).items():
            trials[system] = timed(TIME, scale, _repeat(call, runs))
        case = f"{nodes} node{'s' * (nodes != 1)}{fed.name}"
        return await compare("run_latency", case, trials, repeats=repeats, tolerance=TOLERANCE)


def _repeat_await(run: Callable[[], Awaitable[Any]], runs: int) -> Callable[[], Awaitable[Any]]:
    async def repeated() -> Any:
        answer = None
        for _ in range(runs):
            answer = await run()
        return answer

    return repeated


def _repeat(call: Callable[[], Any], runs: int) -> Callable[[], Any]:
    def repeated() -> Any:
        answer = None
        for _ in range(runs):
            answer = call()
        return answer

    return repeated


def _peers(peers: Peers, nodes: int, fed: Fed) -> dict[str, Callable[[], Any]]:
    """The same work by others, by name."""
    value = fed.value
    calls: dict[str, Callable[[], Any]] = {NUMPY: lambda: chain(value, SCALE, OFFSET, nodes)}
    if (torch := peers.torch) is not None:
        scale, offset = torch.tensor(SCALE), torch.tensor(OFFSET)
        calls[TORCH] = lambda: chain(torch.as_tensor(value), scale, offset, nodes).numpy()
    if peers.jax is not None:
        jitted = peers.jax.jit(lambda x: chain(x, SCALE, OFFSET, nodes))
        calls[JAX] = lambda: np.asarray(jitted(value))
    if peers.tensorflow is not None:
        calls[TENSORFLOW_1], calls[f"{TENSORFLOW_1}, prepared"] = _tensorflow(peers.tensorflow, nodes, fed)
    return calls


def _tensorflow(tensorflow: TensorFlow, nodes: int, fed: Fed) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A run by `Session.run`, and by what `Session.make_callable` prepares."""
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        x = v1.placeholder(v1.float32, fed.shape)
        y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), nodes)
    session = tensorflow.session(graph, threads=1)
    prepared = session.make_callable(y, [x])
    return lambda: session.run(y, {x: fed.value}), lambda: prepared(fed.value)
