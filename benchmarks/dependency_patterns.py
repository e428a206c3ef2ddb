"""A loop over n simulated devices whose iterations depend on each other in three ways (EuroSys '18, fig. 10).

On each device an iteration is one matrix product. *Independent*: it needs the device's own last result. *Ring*: also a
neighbour's. *Barrier*: also the results of all devices, whose sum is made on the first. Kernels and copies vary by a
tenth, so a barrier waits for the slowest of all in every iteration, a ring for the slower of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import asyncflow as af
from benchmarks.harness import Result
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.plots import Chart, Timeline, draw_charts, draw_timelines
from benchmarks.simulation import (
    DRIVERS,
    ITERATION_RATE,
    Curve,
    Outcome,
    as_results,
    by_host,
    devices,
    driven_by,
    host_note,
    in_thread,
    simulate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAME = "dependency_patterns"
LINK = "nvlink2"
PATTERNS = ("independent", "ring", "barrier")
COUNTS = (1, 2, 4, 8)
ROWS, SIZE, ITERATIONS = 256, 2048, 100
JITTER = 0.1


def build(pattern: str, count: int, *, rows: int, size: int, iterations: int) -> tuple[af.Graph, list[af.Tensor]]:
    """The loop, and one number of each device's last state, which is quickly fetched."""
    names = devices(count)
    with af.Graph() as graph:
        weights = []
        for device in names:
            with af.device(device):
                weights.append(af.constant(np.zeros((size, size), np.float32)))

        def body(step: af.Tensor, *states: af.Tensor) -> tuple[af.Tensor, ...]:
            after = []
            for device, x, weight in zip(names, inputs(pattern, states), weights, strict=True):
                with af.device(device):
                    after.append(af.matmul(x, weight))
            return step + 1, *after

        start = (np.int32(0), *[af.constant(np.zeros((rows, size), np.float32)) for _ in names])
        _, *last = af.while_loop(lambda step, *_: step < iterations, body, start)
        numbers = []
        for device, state in zip(names, last, strict=True):
            with af.device(device):
                numbers.append(state[0, 0])
    return graph, numbers


def inputs(pattern: str, states: Sequence[af.Tensor]) -> list[af.Tensor]:
    """Return the operand of each device, made from the states of the iteration before."""
    names = devices(len(states))
    if pattern == "barrier":
        with af.device(names[0]):
            total = states[0]
            for state in states[1:]:
                total = total + state
        return [total] * len(states)
    if pattern == "independent" or len(states) == 1:
        return list(states)
    mixed = []
    for index, device in enumerate(names):
        with af.device(device):
            mixed.append(states[index] + states[index - 1])
    return mixed


def run(
    pattern: str,
    count: int,
    *,
    rows: int = ROWS,
    size: int = SIZE,
    iterations: int = ITERATIONS,
    traced: bool = False,
) -> Outcome:
    """The loop."""
    _, numbers = build(pattern, count, rows=rows, size=size, iterations=iterations)
    machine = f"{count} x v100, {LINK}"
    return simulate(machine, lambda session: session.run(numbers), jitter=JITTER, traced=traced)


def curves(
    counts: Sequence[int] = COUNTS, *, rows: int = ROWS, size: int = SIZE, iterations: int = ITERATIONS
) -> dict[str, Curve]:
    """Iterations/s by the number of devices."""
    return {
        pattern: {
            count: iterations / run(pattern, count, rows=rows, size=size, iterations=iterations).seconds
            for count in counts
        }
        for pattern in PATTERNS
    }


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 1,
    counts: Sequence[int] = COUNTS,
    rows: int = ROWS,
    size: int = SIZE,
    iterations: int = ITERATIONS,
) -> list[Result]:
    """Iterations/s of virtual time, which no repeat would change."""
    found = await in_thread(lambda: by_host(lambda: curves(counts, rows=rows, size=size, iterations=iterations)))
    return as_results(NAME, found, ITERATION_RATE, f"{rows}x{size} matmul, {{curve}}, v100: {{x}}")


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The rates, and a timeline of each pattern."""
    chart = Chart(
        title=f"One {ROWS}x{SIZE} matmul a device and iteration, simulated v100, {LINK}",
        x="devices",
        y="iterations/s of virtual time",
        curves=by_host(curves),
    )
    timelines = [
        Timeline(
            title=f"{DRIVERS[host]}, {pattern} (colour, number: iteration; thin: copies)",
            trace=_trace(pattern, host),
            window_ms=(0.0, until_ms),
        )
        for host, pattern, until_ms in (*(("c++", pattern, 2.5) for pattern in PATTERNS), ("asyncflow", "ring", 10.0))
    ]
    return [
        draw_charts(folder / "dependency_patterns.png", [chart], note=host_note()),
        draw_timelines(folder / "dependency_patterns_timeline.png", timelines, note=host_note()),
    ]


def _trace(pattern: str, host: str) -> af.Trace:
    with driven_by(host):
        return run(pattern, 4, iterations=20, traced=True).trace
