"""A client with long kernels beside a client with short ones: the time of the short runs.

NumPy does the same work in `asyncio.to_thread`, whose pool has a few threads more than there are cores. Both have two
cases: the small runs alone, and beside the large ones, which go on until the small client has done all of its runs.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, NUMPY, Peers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MEDIAN = Figure("latency p50", "ms")
P99 = Figure("latency p99", "ms")
LAYERS = 3
TOLERANCE = 1e-4


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 5, large: int = 2_200, small: int = 256, runs: int = 300
) -> list[Result]:
    """Latencies of runs of three small products, alone and beside runs of one large product."""
    heavy, light = _inputs(large), _inputs(small)
    with af.Graph() as graph:
        x = af.placeholder("float32", heavy.shape)
        product = af.sum(af.tanh(x @ x))
        y = after = af.placeholder("float32", light.shape)
        for _ in range(LAYERS):
            after = af.tanh(after @ after)

    async with af.Session(graph) as session:

        async def by_session() -> Any:
            return await session.run(after, {y: light})

        async def by_numpy() -> Any:
            return await asyncio.to_thread(_small, light)

        beside: dict[str, Trial] = {
            ASYNCFLOW: _trial(by_session, lambda: session.run(product, {x: heavy}), runs),
            NUMPY: _trial(by_numpy, lambda: asyncio.to_thread(_large, heavy), runs),
        }
        alone: dict[str, Trial] = {ASYNCFLOW: _trial(by_session, None, runs), NUMPY: _trial(by_numpy, None, runs)}
        case = f"{LAYERS} products of {small}"
        return [
            *await compare("small_beside_large", f"{case}, alone", alone, repeats=repeats, tolerance=TOLERANCE),
            *await compare(
                "small_beside_large", f"{case}, beside {large}", beside, repeats=repeats, tolerance=TOLERANCE
            ),
        ]


def _inputs(extent: int) -> np.ndarray[Any, Any]:
    made = np.random.default_rng(0).standard_normal((extent, extent), dtype=np.float32) / np.float32(extent**0.5)
    made.flags.writeable = False  # nobody has to copy it
    return made


def _small(x: np.ndarray[Any, Any]) -> Any:
    for _ in range(LAYERS):
        x = np.tanh(x @ x)
    return x


def _large(x: np.ndarray[Any, Any]) -> Any:
    return np.tanh(x @ x).sum()


def _trial(small: Callable[[], Awaitable[Any]], large: Callable[[], Awaitable[Any]] | None, runs: int) -> Trial:
    async def trial() -> Sample:
        is_over = False

        async def go_on() -> None:
            while large is not None and not is_over:
                await large()

        answer = await small()
        beside = asyncio.ensure_future(go_on())
        latencies = []
        try:
            for _ in range(runs):
                await asyncio.sleep(0)
                began = perf_counter()
                answer = await small()
                latencies.append(perf_counter() - began)
        finally:
            is_over = True
            await beside
        median, p99 = np.percentile(latencies, (50, 99)) * 1e3
        return Sample({MEDIAN: float(median), P99: float(p99)}, answer)

    return trial
