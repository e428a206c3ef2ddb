"""A training step of an LSTM layer, as a loop and with its steps written out, by batch size (EuroSys '18, fig. 14).

The paper's layer has 512 units and 200 steps, and runs on one GPU: here that is simulated. On this machine's CPU a
smaller one is measured, beside TensorFlow 1. The weights are updated in the simulated step only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Trial, compare
from benchmarks.lstm import (
    TOLERANCE,
    AsyncflowStep,
    Model,
    looped,
    random_model,
    tensorflow_step,
    timed_step,
    timed_step_await,
    unrolled,
)
from benchmarks.peers import NO_PEERS, TENSORFLOW_1, Peers
from benchmarks.plots import Chart, draw_charts
from benchmarks.results import curves_of, quotient
from benchmarks.simulation import DRIVERS, Curve, as_results, by_host, host_note, in_thread, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAME = "dynamic_unrolling"
UNROLLED: Final = " unrolled"
SLOWDOWN = Figure("time of the loop over unrolled", "x")
SIMULATED_SLOWDOWN = replace(SLOWDOWN, name=f"{SLOWDOWN.name}, virtual time")
MACHINE = "1 x v100, nvlink2"
BATCHES = (64, 128, 256, 512)
SIZES: Final = {"steps": 50, "hidden": 512}
CPU_BATCHES = (8, 16, 32, 64)
CPU_SIZES: Final = {"steps": 50, "hidden": 128}
LEARNING_RATE = np.float32(1e-3)


# -- simulated ---------------------------------------------------------------------------------------------------


def simulated(batch: int, *, steps: int, hidden: int, dynamic: bool) -> float:
    """Seconds of virtual time of one step."""
    with af.Graph(), af.device("sim:0"):
        weights = [
            af.Variable(np.zeros(shape, np.float32))
            for shape in ((hidden, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,))
        ]
        state = af.constant(np.zeros((batch, hidden), np.float32))
        xs = af.constant(np.zeros((steps, batch, hidden), np.float32))
        w_x, w_h, bias = (weight.read() for weight in weights)
        model = Model(xs, w_x, w_h, bias, state, state)
        total = looped(af, model, np.int32(steps)) if dynamic else unrolled(af, model)
        found = af.gradients(total * np.float32(1 / (steps * batch * hidden)), list(model.weights))
        step = af.group(*(weight.assign_sub(grad * LEARNING_RATE) for weight, grad in zip(weights, found, strict=True)))
    return simulate(MACHINE, lambda session: session.run(step)).seconds


def curve(batches: Sequence[int] = BATCHES, *, steps: int, hidden: int) -> Curve:
    """The time of the loop over that of the steps written out, by batch size."""
    return {
        batch: simulated(batch, steps=steps, hidden=hidden, dynamic=True)
        / simulated(batch, steps=steps, hidden=hidden, dynamic=False)
        for batch in batches
    }


# -- real --------------------------------------------------------------------------------------------------------


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    batches: Sequence[int] = CPU_BATCHES,
    steps: int = CPU_SIZES["steps"],
    hidden: int = CPU_SIZES["hidden"],
    simulated_batches: Sequence[int] = BATCHES,
    simulated_sizes: dict[str, int] = SIZES,
) -> list[Result]:
    """ms per training step on this CPU, and what the loop costs over writing its steps out, here and simulated."""
    results = []
    for batch in batches:
        found = await _compare(batch, steps, hidden, peers, repeats)
        results += [*found, *_slowdowns(found)]
    found = await in_thread(lambda: by_host(lambda: {"": curve(simulated_batches, **simulated_sizes)}))
    return [*results, *as_results(NAME, found, SIMULATED_SLOWDOWN, _case("{x}", **simulated_sizes) + ", {curve}")]


async def _compare(batch: int, steps: int, hidden: int, peers: Peers, repeats: int) -> list[Result]:
    model = random_model(steps, batch, hidden)
    outputs = model.xs.size
    fed = [np.array(steps, np.int32)]
    ours = {
        ASYNCFLOW: AsyncflowStep(model, looped, outputs, fed),
        ASYNCFLOW + UNROLLED: AsyncflowStep(model, unrolled, outputs, length=steps),
    }
    trials: dict[str, Trial] = {system: timed_step_await(outputs, step.run) for system, step in ours.items()}
    if (tensorflow := peers.tensorflow) is not None:
        dynamic = tensorflow_step(tensorflow, model, looped, outputs, fed)
        static = tensorflow_step(tensorflow, model, unrolled, outputs, length=steps)
        trials[TENSORFLOW_1] = timed_step(outputs, dynamic)
        trials[TENSORFLOW_1 + UNROLLED] = timed_step(outputs, static)
    case = _case(batch, steps, hidden)
    try:
        return await compare(NAME, case, trials, repeats=repeats, tolerance=TOLERANCE)
    finally:
        for step in ours.values():
            await step.session.aclose()


def _case(batch: int | str, steps: int, hidden: int) -> str:
    return f"{_size(steps, hidden)}, batch {batch}"


def _size(steps: int, hidden: int) -> str:
    return f"hidden {hidden}, {steps} steps"


def _slowdowns(results: Sequence[Result]) -> list[Result]:
    by_system = {result.system: result for result in results}
    return [
        quotient(SLOWDOWN, dynamic, by_system[system + UNROLLED])
        for system, dynamic in by_system.items()
        if system + UNROLLED in by_system
    ]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The slowdown by batch size, simulated and measured."""
    simulated_curves = {}
    for label in DRIVERS.values():
        cases = {batch: f"{_case(batch, **SIZES)}, {label}" for batch in BATCHES}
        if found := curves_of(results, SIMULATED_SLOWDOWN, cases):
            simulated_curves[label] = found[ASYNCFLOW]
    measured = curves_of(results, SLOWDOWN, {batch: _case(batch, **CPU_SIZES) for batch in CPU_BATCHES})
    note = "training step of an LSTM layer: time of the loop over time of the same steps written out"
    paths = []
    for name, machine, curves, sizes, driven in (
        ("dynamic_unrolling_simulated", "simulated v100", simulated_curves, SIZES, f"\n{host_note()}"),
        ("dynamic_unrolling", "this CPU, one thread", measured, CPU_SIZES, ""),
    ):
        if curves:
            chart = Chart(title=f"{machine}: {_size(**sizes)}", x="batch", y="loop ÷ unrolled", curves=curves)
            paths.append(draw_charts(folder / f"{name}.png", [chart], note=note + driven))
    return paths
