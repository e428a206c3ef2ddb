"""A loop with a trivial body over 1 to 64 simulated machines, with and without a barrier (EuroSys '18, fig. 11).

Every machine counts, from a number of its own: equal counters would be one. Without a barrier it needs only the
predicate, which one of them sends to all. With a barrier, its next count needs the counts of all machines: they meet on
the first, and the sum goes back.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import asyncflow as af
from benchmarks.harness import Result
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.plots import Chart, draw_charts
from benchmarks.simulation import (
    ITERATION_RATE,
    PAPER,
    Curve,
    as_results,
    by_host,
    devices,
    host_note,
    in_thread,
    require_bodies,
    simulate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAME = "distributed_loop"
LINK = "ethernet10"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
ITERATIONS = 100
PAPERS_RATE = replace(ITERATION_RATE, name="rate, real time")
PAPERS = {"without a barrier": {1: 20_581.0, 64: 2_014.0}, "with a barrier": {1: 20_581.0, 64: 809.0}}


def build(count: int, *, barrier: bool, iterations: int) -> tuple[list[af.Tensor], list[af.Tensor]]:
    """Build the loop over `count` devices: their first numbers, and their counts."""
    with af.Graph():
        starts = [af.placeholder("int32", ()) for _ in range(count)]

        def body(step: af.Tensor, *counts: af.Tensor) -> tuple[af.Tensor, ...]:
            before = counts
            if barrier:
                with af.device("sim:0"):
                    total = counts[0]
                    for other in counts[1:]:
                        total = total + other
                before = (total,) * count
            after = []
            for device, value in zip(devices(count), before, strict=True):
                with af.device(device):
                    after.append(value + 1)
            return step + 1, *after

        _, *counted = af.while_loop(lambda step, *_: step < iterations, body, (np.int32(0), *starts))
    return starts, counted


def curves(counts: Sequence[int] = COUNTS, *, iterations: int = ITERATIONS) -> dict[str, Curve]:
    """Iterations/s by the number of machines."""
    found: dict[str, Curve] = {name: {} for name in PAPERS}
    for curve, barrier in zip(found.values(), (False, True), strict=True):
        for count in counts:
            starts, counted = build(count, barrier=barrier, iterations=iterations)
            curve[count] = iterations / simulate(f"{count} x k40, {LINK}", partial(_run, starts, counted)).seconds
    return found


async def _run(starts: list[af.Tensor], counted: list[af.Tensor], session: af.Session) -> None:
    if len(starts) > 1:
        require_bodies(session.plan(counted, starts), devices(len(starts)))
    await session.run(counted, {start: np.int32(index) for index, start in enumerate(starts)})


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 1, counts: Sequence[int] = COUNTS, iterations: int = ITERATIONS
) -> list[Result]:
    """Iterations/s of virtual time, which no repeat would change, and what the paper has."""
    found = await in_thread(lambda: by_host(lambda: curves(counts, iterations=iterations)))
    case = "{curve}, machines: {x}"
    return [
        *as_results(NAME, found, ITERATION_RATE, case),
        *as_results(NAME, PAPERS, PAPERS_RATE, case, system=PAPER),
    ]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The rates beside the paper's."""
    chart = Chart(
        title=f"Loop with a trivial body, one simulated k40 a machine, {LINK}",
        x="machines",
        y="iterations/s of virtual time",
        curves=by_host(curves),
        paper=PAPERS,
        is_log=True,
    )
    return [draw_charts(folder / "distributed_loop.png", [chart], note=host_note())]
