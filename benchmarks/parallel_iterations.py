"""A stacked RNN on eight simulated GPUs, by how many iterations may run at once (EuroSys '18, fig. 12).

A layer is one product of 1024x1024 matrices: its own state of the iteration before, and what the layer below gave in
this one. So iteration t of a layer can run beside iteration t+1 of the layer below, if `parallel_iterations` allows.
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

NAME = "parallel_iterations"
LINK = "nvlink2"
WINDOWS = (1, 2, 4, 8, 16, 32)
LAYERS, SIZE, ITERATIONS = 8, 1024, 400


def build(
    window: int, *, layers: int, size: int, iterations: int, names: Sequence[str] | None = None
) -> tuple[af.Graph, af.Tensor]:
    """The loop, one layer a device, and the last layer's state after it; `names` for devices that are not simulated."""
    names = devices(layers) if names is None else names
    with af.Graph() as graph:

        def body(step: af.Tensor, *states: af.Tensor) -> tuple[af.Tensor, ...]:
            below, after = states[0], []
            for device, state in zip(names, states, strict=True):
                with af.device(device):
                    below = af.matmul(below, state)
                after.append(below)
            return step + 1, *after

        zeros = [af.constant(np.zeros((size, size), np.float32)) for _ in range(layers)]
        start = (np.int32(0), *zeros)
        after = af.while_loop(lambda step, *_: step < iterations, body, start, parallel_iterations=window)
    return graph, after[-1]


def run(
    window: int, *, layers: int = LAYERS, size: int = SIZE, iterations: int = ITERATIONS, traced: bool = False
) -> Outcome:
    """The loop with at most `window` iterations at once."""
    _, top = build(window, layers=layers, size=size, iterations=iterations)
    return simulate(f"{layers} x v100, {LINK}", lambda session: session.run(top), traced=traced)


def curve(
    windows: Sequence[int] = WINDOWS, *, layers: int = LAYERS, size: int = SIZE, iterations: int = ITERATIONS
) -> Curve:
    """Iterations/s by `parallel_iterations`."""
    return {
        window: iterations / run(window, layers=layers, size=size, iterations=iterations).seconds for window in windows
    }


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 1,
    windows: Sequence[int] = WINDOWS,
    layers: int = LAYERS,
    size: int = SIZE,
    iterations: int = ITERATIONS,
) -> list[Result]:
    """Iterations/s of virtual time, which no repeat would change."""
    found = await in_thread(
        lambda: by_host(lambda: {"": curve(windows, layers=layers, size=size, iterations=iterations)})
    )
    case = f"{layers} layers of {size}x{size} on {layers} x v100, parallel_iterations {{x}}, {{curve}}"
    return as_results(NAME, found, ITERATION_RATE, case)


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The rates, and two timelines that show why."""
    curves = by_host(lambda: {"": curve()})
    chart = Chart(
        title=f"{LAYERS} layers of one {SIZE}x{SIZE} matmul, simulated {LAYERS} x v100",
        x="parallel_iterations",
        y="iterations/s of virtual time",
        curves=curves,
    )
    timelines = [
        Timeline(
            title=f"{DRIVERS[host]}, parallel_iterations={window}: {meaning} (colour, number: iteration; thin: copies)",
            trace=_trace(window, host),
            window_ms=(0.0, 6.0),
        )
        for host, window, meaning in (
            ("c++", 1, "one device works at a time"),
            ("c++", 4, "at most four do"),
            ("c++", 8, "all do, and a copy or kernel is always next"),
            ("asyncflow", 8, "the devices wait for the host"),
        )
    ]
    gains = (f"{name} {rates[8] / rates[1]:.1f}" for name, rates in curves.items())
    note = f"times the rate of 1 with 8 at once: {', '.join(gains)}\n{host_note()}"
    return [
        draw_charts(folder / "parallel_iterations.png", [chart], note=note),
        draw_timelines(folder / "parallel_iterations_timeline.png", timelines, note=host_note()),
    ]


def _trace(window: int, host: str) -> af.Trace:
    with driven_by(host):
        return run(window, iterations=20, traced=True).trace
