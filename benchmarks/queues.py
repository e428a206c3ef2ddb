"""Costs of handing an element over: within a run, between two runs, and between coroutines, beside `asyncio.Queue`.

``python -m benchmarks.queues``: microseconds for an enqueue and the dequeue of it, the best of several times. Figures
of loops hold an iteration of each; the time of such iterations without a queue, interpreted, is measured too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import numpy as np

import asyncflow as af

COUNT = 5_000
REPEATS = 5


async def best(act: Callable[[], Awaitable[object]]) -> float:
    """Microseconds for each of `COUNT`."""
    found = []
    for _ in range(REPEATS):
        began = perf_counter()
        await act()
        found.append(perf_counter() - began)
    return min(found) / COUNT * 1e6


async def peer() -> float:
    """Two coroutines and an `asyncio.Queue`."""
    queue: asyncio.Queue[Any] = asyncio.Queue(100)
    value = np.float32(1)

    async def put() -> None:
        for _ in range(COUNT):
            await queue.put(value)

    async def get() -> None:
        for _ in range(COUNT):
            await queue.get()

    return await best(lambda: asyncio.gather(put(), get()))


def straight(queue: af.Queue, count: int, *, waits: bool) -> Any:
    """Return `count` enqueues and dequeues, each behind the last, and the final size.

    Args: queue: to hand over. count: how many. waits: dequeues come first, and wait for elements, as each element is
    the previous one and an addition, which is in the figure; else they are served at once.
    """
    with af.Graph() as graph:
        x = af.placeholder("float32", ())
        given = x if waits else af.constant(np.float32(1))
        pairs = []
        for _ in range(count):
            pairs.append((queue.enqueue(given), queue.dequeue()))
            given = pairs[-1][1] + x if waits else given
        with af.control_dependencies([node for put, taken in pairs for node in (put, taken.node)]):
            last = x + 0
    return graph, x, last


async def main() -> dict[str, float]:
    """The figures, by name."""
    queue = af.FIFOQueue(100, af.spec("float32", ()), name="queue")
    with af.Graph() as graph:
        one = af.constant(np.float32(1))

        def fill(i: Any) -> Any:
            queue.enqueue(one)
            return i + 1

        def drain(i: Any, s: Any) -> Any:
            return i + 1, s + queue.dequeue()

        filled = af.while_loop(lambda i: i < COUNT, fill, (0,))[0]
        counted = af.while_loop(lambda i: i < COUNT, lambda i: i + 1, (0,))[0]
        summed = af.while_loop(lambda i, s: i < COUNT, lambda i, s: (i + 1, s + one), (0, np.float32(0)))[1]
        drained = af.while_loop(lambda i, s: i < COUNT, drain, (0, np.float32(0)))[1]
    pairs = 500
    found: dict[str, float] = {}
    for name, waits in (("served at once", False), ("the take waits", True)):
        unrolled, x, last = straight(queue, pairs, waits=waits)
        async with af.Session(unrolled) as session:
            feeds = {x: np.float32(1)}
            each = await best(lambda: session.run(last, feeds))  # noqa: B023 - called here
            found[f"node to node, {name}"] = each * COUNT / pairs
    async with af.Session(graph) as session:
        found["two loops in one run"] = await best(lambda: session.run((filled, drained)))
        found["two loops in two runs"] = await best(lambda: asyncio.gather(session.run(filled), session.run(drained)))

        async def put() -> None:
            for _ in range(COUNT):
                await queue.put(np.float32(1))

        async def get() -> None:
            for _ in range(COUNT):
                await queue.get()

        found["two coroutines"] = await best(lambda: asyncio.gather(put(), get()))
    async with af.Session(graph, regions=False) as session:
        found["the two loops without a queue"] = await best(lambda: session.run((counted, summed)))
    found["two coroutines, asyncio.Queue"] = await peer()
    return found


if __name__ == "__main__":
    for name, microseconds in af.run(main()).items():
        print(f"{name:32} {microseconds:6.2f} us")
