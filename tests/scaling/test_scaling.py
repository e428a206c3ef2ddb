"""Size is no obstacle: no recursion limit, time per node and memory per iteration that do not grow with the program."""

from __future__ import annotations

import gc
import itertools
import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af

SIZES = (1_000, 10_000, 100_000)
MOST_GROWTH = 4.0
"""Time per node may grow so much when a graph gets ten times larger: caches and the collector cost a factor of two,
anything quadratic one of ten."""
ATTEMPTS = 3
"""Attempts to measure growth, which shows each time. On a busy, shared machine a processor may be half as fast for a
while.
"""


# -- graphs of n nodes -----------------------------------------------------------------------------------------------


def chain(n: int) -> tuple[Any, Any]:
    x = one = af.identity(af.constant(np.int64(1)))
    for _ in range(n):
        x = x + one
    return x, n + 1


def wide(n: int) -> tuple[Any, Any]:
    """All on one node, and one on all."""
    one = af.identity(af.constant(np.int64(1)))
    ends = [one + one for _ in range(n)]
    return (af.group(*ends), ends[-1]), (None, 2)


def random_dag(n: int) -> tuple[Any, Any]:
    """Each pair of nodes on two of the fifty pairs before it."""
    random = Random(n)
    symbolic: list[Any] = [af.identity(af.constant(np.int64(k))) for k in range(2)]
    plain = [0, 1]
    for _ in range(n // 2):
        a, b = (random.randrange(max(0, len(plain) - 50), len(plain)) for _ in range(2))
        symbolic.append(af.bitwise_xor(symbolic[a], -symbolic[b]))
        plain.append(plain[a] ^ -plain[b])
    return symbolic[-1], plain[-1]


def random_tree(leaves: int) -> tuple[Any, Any]:
    """Pairs of neighbours, joined at random until one is left."""
    random = Random(leaves)
    symbolic: list[Any] = [af.identity(af.constant(np.int64(k))) for k in range(leaves)]
    while len(symbolic) > 1:
        at = random.randrange(len(symbolic) - 1)
        symbolic[at : at + 2] = [symbolic[at] + symbolic[at + 1]]
    return symbolic[0], leaves * (leaves - 1) // 2


def deep_no_ops(n: int) -> tuple[Any, Any]:
    last = af.group()
    for _ in range(n - 1):
        last = af.group(last)
    return last, None


def wide_no_ops(n: int) -> tuple[Any, Any]:
    return af.group(*(af.group() for _ in range(n))), None


# -- loops -----------------------------------------------------------------------------------------------------------


def counter(trips: int, parallel_iterations: int = 32) -> tuple[Any, Any]:
    count, total = af.while_loop(
        lambda i, total: i < trips,
        lambda i, total: (i + 1, total + i),
        (0, 0),
        parallel_iterations=parallel_iterations,
    )
    return (count, total), (trips, trips * (trips - 1) // 2)


def nested_frames(depth: int, twice: frozenset[int] = frozenset()) -> tuple[Any, Any]:
    """Loops in loops, one trip each, but two at the depths in `twice`."""

    def level(at: int, total: Any) -> Any:
        if at == depth:
            return total + 1
        trips = 2 if at in twice else 1
        return af.while_loop(lambda i, s: i < trips, lambda i, s: (i + 1, level(at + 1, s)), (0, total))[1]

    return level(0, af.constant(np.int64(0))), 2 ** len(twice)


@pytest.mark.parametrize(
    ("build", "size"),
    [
        pytest.param(random_tree, 4096, id="random tree of 4096 leaves"),
        pytest.param(deep_no_ops, 8192, id="8192 no-ops in a chain"),
        pytest.param(wide_no_ops, 8192, id="8192 no-ops side by side"),
        pytest.param(counter, 10_000, id="10000 iterations"),
        pytest.param(lambda trips: counter(trips, 1), 10_000, id="10000 iterations, one at a time"),
        pytest.param(nested_frames, 100, id="100 frames in one another"),
        pytest.param(lambda depth: nested_frames(depth, frozenset((0, 99))), 100, id="100 frames, two of two trips"),
    ],
)
@pytest.mark.parametrize("regions", [False, True], ids=["interpreted", "regions"])
@pytest.mark.slow
async def test_size_is_no_obstacle(
    build: Callable[[int], tuple[Any, Any]], size: int, regions: bool, graph: af.Graph
) -> None:
    fetches, expected = build(size)
    async with af.Session(graph, regions=regions) as session:
        assert await session.run(fetches) == expected


# -- time ------------------------------------------------------------------------------------------------------------
# Processor time of this process, because others run beside it; medians, because the first of anything is slow.


class Times(NamedTuple):
    """Microseconds a node."""

    build: float
    compile: float
    run: float


async def timed(build: Callable[[int], tuple[Any, Any]], size: int) -> Times:
    seconds: list[float] = []
    with phase(seconds), af.Graph() as graph:
        fetches, expected = build(size)
    async with af.Session(graph, regions=False) as session:
        with phase(seconds):
            session.plan(fetches)
        with phase(seconds):
            assert await session.run(fetches) == expected
    return Times(*(1e6 * spent / size for spent in seconds))


@contextmanager
def phase(seconds: list[float]) -> Iterator[None]:
    """Adds the time it takes, without that of collecting what earlier phases left."""
    gc.collect()
    started = process_time()
    yield
    seconds.append(process_time() - started)


def median_times(build: Callable[[int], tuple[Any, Any]], size: int) -> Times:
    measured = [af.run(timed(build, size)) for _ in range(5 if size < SIZES[-1] else 1)]
    return Times(*(statistics.median(column) for column in zip(*measured, strict=True)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("build", [chain, wide, random_dag], ids=lambda build: build.__name__)
def test_time_per_node_does_not_grow(build: Callable[[int], tuple[Any, Any]]) -> None:
    """100 000 nodes cost about 100 times what 1 000 do, whether building, compiling or running."""
    attempts: list[list[str]] = []
    while len(attempts) < ATTEMPTS and all(attempts):
        times = {size: median_times(build, size) for size in SIZES}
        print("µs a node:", times)
        attempts.append(
            [
                f"{phase} of {larger} nodes: {times}"
                for smaller, larger in itertools.pairwise(SIZES)
                for phase, before, after in zip(Times._fields, times[smaller], times[larger], strict=True)
                if after >= MOST_GROWTH * max(before, 1.0)
            ]
        )
    assert not all(attempts), attempts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_time_per_iteration_does_not_grow() -> None:
    growths: list[float] = []
    while len(growths) < ATTEMPTS and min(growths, default=MOST_GROWTH) >= MOST_GROWTH:
        short, long = (median_times(counter, trips).run for trips in (1_000, 20_000))
        growths.append(long / short)
    assert min(growths) < MOST_GROWTH, growths


# -- memory ----------------------------------------------------------------------------------------------------------


async def peak_bytes_of_run(build: Callable[[int], tuple[Any, Any]], trips: int) -> int:
    """Most bytes held during a second run, when caches are warm, over those held before it."""
    with af.Graph() as graph:
        fetches, expected = build(trips)
    async with af.Session(graph, regions=False) as session:
        await session.run(fetches)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            assert await session.run(fetches) == expected
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("parallel_iterations", [1, 32])
async def test_memory_does_not_grow_with_iterations(parallel_iterations: int) -> None:
    def loop(trips: int) -> tuple[Any, Any]:
        return counter(trips, parallel_iterations)

    short, long = [await peak_bytes_of_run(loop, trips) for trips in (1_000, 20_000)]
    assert long < short + 20_000, (short, long)  # a single byte kept per iteration would come to as much
