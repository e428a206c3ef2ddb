"""More requests than can be served: answers in time, times until refusals, and important requests.

Requests come at random, whether or not earlier ones have been answered. An answer is of use within ten times the time
of one request alone; one request in twenty-five is important. The first case computes, as many at a time as there are
cores; the second waits for a database, which serves eight at a time. By hand, a semaphore lets as many in, and as many
may wait.

In the cases of batches a call takes 20 ms and 4 ms for each member, and a request is of use within 200 ms. By hand, a
call has the next 22 members that it can answer in time, which is the best size.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from random import Random
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Ask = Callable[[int, float | None], Awaitable[object]]

GOODPUT: Final = Figure("answers in time, of what can be done", "%", higher_is_better=True)
P99: Final = Figure("latency p99 of those", "ms")
IMPORTANT: Final = Figure("latency p99 of important ones", "ms")
REFUSAL: Final = Figure("p90 until a refusal is known", "µs")
SEMAPHORE: Final = "semaphore"
OF_22: Final = "calls of 22"
CALL_MS, MEMBER_MS, USEFUL_S = 20.0, 4.0, 0.2
DEFAULT: Final = "asyncflow, max_runs='auto'"
UNLIMITED: Final = "asyncflow, no limit"
PATIENCE: Final = 10
"""Multiple of the time of one request alone within which an answer is of use."""
QUEUED: Final = 2
"""Number of runs that may wait for each run in flight."""
IMPORTANT_PART: Final = 0.04


@dataclass(slots=True)
class _Log:
    """Ends of the requests of one trial, in seconds."""

    latencies: dict[int, list[float]] = field(default_factory=lambda: {0: [], 1: []})
    refusals: list[float] = field(default_factory=list)


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    seconds: float = 2.0,
    times: Sequence[float] = (0.8, 5.0),
    extent: int = 1200,
    wait_ms: float = 20.0,
    alone: int = 40,
    rates: Sequence[float] = (260.0, 400.0),
) -> list[Result]:
    """Measure goodput and latencies at `times` the capacity, by admission, by its default, by hand, and without a
    limit.

    The capacity is measured by `alone` requests a client.
    """
    cores, connections = os.cpu_count() or 1, asyncio.Semaphore(8)
    with af.Graph() as graph:
        x = af.placeholder("float32", (extent, extent))
        product = af.sum(x @ x)

        @af.op(outputs=af.spec("float64", ()))
        async def wait(milliseconds: Any) -> Any:
            async with connections:
                await asyncio.sleep(float(milliseconds) / 1e3)
            return milliseconds

        waited = wait(af.constant(wait_ms, "float64"))
    fed = np.full((extent, extent), 1e-3, np.float32)
    fed.flags.writeable = False
    results = []
    for name, servers, fetch, feeds in (
        (f"a product of {extent}, {cores} at a time", cores, product, {x: fed}),
        (f"{wait_ms:g} ms of waiting, 8 at a time", 8, waited, {}),
    ):
        async with (
            af.Session(graph, max_runs=servers, max_queued=QUEUED * servers) as limited,
            af.Session(graph) as default,
            af.Session(graph, max_runs=None) as unlimited,
        ):

            def ask(session: af.Session, fetch: Any = fetch, feeds: Any = feeds) -> Ask:
                return lambda priority, timeout: session.run(fetch, feeds, priority=priority, timeout=timeout)

            alone_s, capacity = await _calibrated(ask(limited), servers, alone)
            asks = {
                ASYNCFLOW: ask(limited),
                DEFAULT: ask(default),
                SEMAPHORE: _by_hand(ask(unlimited), servers),
                UNLIMITED: ask(unlimited),
            }
            for each in times:
                trials = {
                    system: _trial(call, each * capacity, alone_s, capacity, seconds) for system, call in asks.items()
                }
                results += await compare("overload", f"{name}, {each:g}x", trials, repeats=repeats)
    for rate in rates:
        results += await _batches(rate, repeats, seconds)
    return results


async def _batches(rate: float, repeats: int, seconds: float) -> list[Result]:
    """Answers in time of requests that share calls, without a bound on runs."""
    with af.Graph() as graph:
        x = af.placeholder("float64", ())

        @af.op(outputs=lambda spec: spec, rows=True, cost=1e12)
        def slow(rows: Any) -> Any:
            sleep((CALL_MS + MEMBER_MS * len(rows)) / 1e3)
            return rows

        answer = af.batched(slow, max_size=64)(x)
    async with af.Session(graph) as session:
        asks: dict[str, Ask] = {
            ASYNCFLOW: lambda _, timeout: session.run(answer, {x: np.float64(1)}, timeout=timeout),
            OF_22: _calls_by_hand(22),
        }
        most = 22 / (CALL_MS + MEMBER_MS * 22) * 1e3
        trials = {name: _trial(ask, rate, USEFUL_S / PATIENCE, most, seconds) for name, ask in asks.items()}
        return await compare("overload", f"batches, {rate:g} requests/s", trials, repeats=repeats)


def _calls_by_hand(most: int) -> Ask:
    """Make one call at a time for up to `most` waiting requests, first come first served."""
    waiting: deque[tuple[float, asyncio.Future[None]]] = deque()
    is_busy = False

    async def call() -> None:
        nonlocal is_busy
        is_busy = True
        while waiting:
            taken_s = (CALL_MS + MEMBER_MS * min(most, len(waiting))) / 1e3
            while waiting and waiting[0][0] < perf_counter() + taken_s:
                waiting.popleft()[1].cancel()
            members = [waiting.popleft()[1] for _ in range(min(most, len(waiting)))]
            if members:
                await asyncio.to_thread(sleep, (CALL_MS + MEMBER_MS * len(members)) / 1e3)
            for member in members:
                member.set_result(None)
        is_busy = False

    async def ask(_: int, timeout: float | None) -> None:
        answered = asyncio.get_running_loop().create_future()
        waiting.append((perf_counter() + (timeout or 0.0), answered))
        working = None if is_busy else asyncio.create_task(call())
        try:
            await answered
        except asyncio.CancelledError:
            raise TimeoutError from None  # it would have been late
        finally:
            del working

    return ask


async def _calibrated(ask: Ask, servers: int, each: int) -> tuple[float, float]:
    """Return the time of one request alone, and the number of requests a second, from `each` requests a client."""
    for _ in range(3):
        await ask(0, None)
    began = perf_counter()
    for _ in range(each):
        await ask(0, None)
    alone_s = (perf_counter() - began) / each

    async def client() -> None:
        for _ in range(each):
            await ask(0, None)

    began = perf_counter()
    await asyncio.gather(*(client() for _ in range(servers)))
    return alone_s, servers * each / (perf_counter() - began)


def _by_hand(ask: Ask, servers: int) -> Ask:
    """The same limits, as a handler would have them."""
    free = asyncio.Semaphore(servers)
    waiting = 0

    async def limited(priority: int, timeout: float | None) -> None:
        nonlocal waiting
        if waiting >= QUEUED * servers:
            raise af.OverloadedError("too many wait")
        waiting += 1
        is_waiting = True
        try:
            async with asyncio.timeout(timeout), free:
                waiting, is_waiting = waiting - 1, False
                await ask(priority, None)
        finally:
            waiting -= is_waiting

    return limited


def _trial(ask: Ask, rate: float, alone_s: float, capacity: float, seconds: float) -> Trial:
    async def trial() -> Sample:
        log = _Log()
        dice = Random(1)

        async def request(priority: int) -> None:
            asked = perf_counter()
            try:
                await ask(priority, PATIENCE * alone_s)
                log.latencies[priority].append(perf_counter() - asked)
            except af.OverloadedError:
                log.refusals.append(perf_counter() - asked)
            except TimeoutError:
                pass  # asyncflow's is one too; it counts as not answered

        began = due = perf_counter()
        async with asyncio.TaskGroup() as group:
            while due < began + seconds:
                due += dice.expovariate(rate)
                await asyncio.sleep(max(0.0, due - perf_counter()))
                group.create_task(request(int(dice.random() > IMPORTANT_PART)))
        return _sample(log, capacity * (perf_counter() - began))

    return trial


def _sample(log: _Log, possible: float) -> Sample:
    both = log.latencies[0] + log.latencies[1]
    figures = {GOODPUT: 100 * len(both) / possible}
    for figure, scale, part, values in (
        (P99, 1e3, 0.99, both),
        (IMPORTANT, 1e3, 0.99, log.latencies[0]),
        (REFUSAL, 1e6, 0.9, log.refusals),  # a few had waited, and gave way to important ones
    ):
        if values:
            figures[figure] = scale * float(np.quantile(values, part))
    return Sample(figures)
