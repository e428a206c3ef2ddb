"""An LSTM of eight layers, forward: cut over devices or streams, real and simulated, beside TensorFlow 1.

Time step t of a layer needs step t - 1 of the same layer and step t of the one below. On this machine's CPU: on one
device; half of the layers on each of two, for which there are two cores; and on one device with two compute streams.
Simulated: over one to eight GPUs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Trial, compare, timed, timed_await
from benchmarks.peers import NO_PEERS, NUMPY, TENSORFLOW_1, Peers
from benchmarks.plots import Chart, draw_bars, draw_charts
from benchmarks.results import quotient
from benchmarks.simulation import (
    STEPS_RATE,
    Curve,
    Outcome,
    as_results,
    by_host,
    devices,
    host_note,
    in_thread,
    simulate,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.peers import TensorFlow

NAME = "stacked_lstm"
TIME = Figure("time a step", "ms")
SPEED_UP = Figure("speed-up over one device", "x", higher_is_better=True)
TWO_DEVICES: Final = "2 devices"
TWO_STREAMS: Final = "2 streams"
TWO_THREADS: Final = "2 threads"
TOLERANCE = 1e-4
LAYERS = 8
LINK = "nvlink2"
COUNTS = (1, 2, 4, 8)
WINDOWS = (4, 32)
STEPS = 50
SIMULATED_STEPS = 20
SIZES: Final = {"batch": 64, "hidden": 512}
LARGE: Final = {"batch": 256, "hidden": 1024}
_ONE_CPU, _TWO_CPUS = ["cpu:0"], ["cpu:0", "cpu:1"]

Weights = list[tuple[Any, Any]]
"""Weights of the input and of the state, by layer, each ``(hidden, 4 * hidden)``, as arrays of any system."""


def _weights(hidden: int) -> Weights:
    random = np.random.default_rng(0)

    def normal() -> NDArray[np.float32]:
        return np.float32(hidden**-0.5) * random.standard_normal((hidden, 4 * hidden), np.float32)

    return [(normal(), normal()) for _ in range(LAYERS)]


def _converted(weights: Weights, convert: Callable[[Any], Any]) -> Weights:
    return [(convert(of_input), convert(of_state)) for of_input, of_state in weights]


def _cell(functions: Any, weights: Any, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """The next h and c; `functions` has `sigmoid` and `tanh`."""
    gates = x @ weights[0] + h @ weights[1]
    hidden = gates.shape[-1] // 4
    into, forget, candidate, out = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
    c = functions.sigmoid(forget) * c + functions.sigmoid(into) * functions.tanh(candidate)
    return functions.sigmoid(out) * functions.tanh(c), c


def _loop(
    system: Any, weights: Weights, xs: Any, steps: Any, zeros: Any, names: Sequence[str], window: int = 32
) -> Any:
    """The top layer's last output, in asyncflow and TensorFlow; layer l is on ``names[l]``."""

    def body(step: Any, *states: Any) -> Any:
        with system.device(names[0]):
            x = xs[step]
        after = []
        for layer, device in enumerate(names):
            with system.device(device):
                x, c = _cell(system, weights[layer], x, *states[2 * layer : 2 * layer + 2])
            after += [x, c]
        return step + 1, *after

    start = (np.int32(0), *[zeros] * (2 * len(names)))
    return system.while_loop(lambda step, *_: step < steps, body, start, parallel_iterations=window)[-2]


# -- simulated ---------------------------------------------------------------------------------------------------


def simulated(count: int, *, steps: int, batch: int, hidden: int, window: int = 32, traced: bool = False) -> Outcome:
    """The loop over `count` simulated GPUs, with as many layers on each and at most `window` time steps at once."""
    names = spread(LAYERS, devices(count))
    with af.Graph():
        weights: list[Any] = []
        for device in names:
            with af.device(device):
                weights.append(tuple(af.constant(np.zeros((hidden, 4 * hidden), np.float32)) for _ in range(2)))
        with af.device(names[0]):
            xs = af.constant(np.zeros((steps, batch, hidden), np.float32))
        zeros = af.constant(np.zeros((batch, hidden), np.float32))
        top = _loop(af, weights, xs, np.int32(steps), zeros, names, window)
    return simulate(f"{count} x v100, {LINK}", lambda session: session.run(top), traced=traced)


def curves(counts: Sequence[int] = COUNTS, *, steps: int, batch: int, hidden: int) -> dict[str, Curve]:
    """Time steps/s by the number of devices, for every window."""
    return {
        f"{window} steps at once": {
            count: steps / simulated(count, steps=steps, batch=batch, hidden=hidden, window=window).seconds
            for count in counts
        }
        for window in WINDOWS
    }


# -- real --------------------------------------------------------------------------------------------------------


class _Functions:
    """Functions for `_cell`, by hand in NumPy."""

    tanh = staticmethod(np.tanh)

    @staticmethod
    def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.float32(1) / (np.float32(1) + np.exp(-x))


class _Numpy:
    """The loop by hand, on one thread or with half of the layers on each of two: how much the machine has to give."""

    def __init__(self, weights: Weights, batch: int) -> None:
        self._weights = weights
        self._zeros = np.zeros((batch, weights[0][0].shape[0]), np.float32)

    def alone(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        """On one thread."""
        return self._pass(self._weights, iter(xs))[-1]

    def threads(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        """On two threads."""
        half = len(self._weights) // 2
        between: SimpleQueue[NDArray[np.float32]] = SimpleQueue()
        with ThreadPoolExecutor(1) as other:
            upper = other.submit(self._pass, self._weights[half:], (between.get() for _ in xs))
            self._pass(self._weights[:half], iter(xs), between.put)
            return upper.result()[-1]

    def _pass(
        self,
        weights: Weights,
        xs: Iterator[NDArray[np.float32]],
        put: Callable[[NDArray[np.float32]], None] = lambda _: None,
    ) -> list[NDArray[np.float32]]:
        h, c = [self._zeros] * len(weights), [self._zeros] * len(weights)
        for x in xs:
            for layer, pair in enumerate(weights):
                x, c[layer] = _cell(_Functions, pair, x, h[layer], c[layer])
                h[layer] = x
            put(x)
        return h


class _Asyncflow:
    """The loop on CPU devices of this machine, in a session that is open while its trials last."""

    def __init__(self, weights: Weights, batch: int, names: Sequence[str], compute_streams: int) -> None:
        hidden = weights[0][0].shape[0]
        with af.Graph() as graph:
            self._xs = af.placeholder("float32", (None, batch, hidden), name="xs")
            steps = af.astype(af.shape(self._xs)[0], "int32")
            zeros = af.constant(np.zeros((batch, hidden), np.float32))
            constants = _converted(weights, af.constant)
            self._top = _loop(af, constants, self._xs, steps, zeros, spread(LAYERS, names))
        self.session = af.Session(graph, devices=names, compute_streams=compute_streams)

    async def run(self, xs: NDArray[np.float32]) -> Any:
        return await self.session.run(self._top, {self._xs: xs})


def _tensorflow(tensorflow: TensorFlow, weights: Weights, batch: int, names: Sequence[str], threads: int) -> Any:
    """The loop in TensorFlow 1, with a logical CPU device for each name and `threads` threads between ops."""
    v1 = tensorflow.v1
    hidden = weights[0][0].shape[0]
    with tensorflow.graph() as graph:
        xs = v1.placeholder(v1.float32, (None, batch, hidden))
        zeros = v1.zeros((batch, hidden))
        on = [f"/{name}" for name in spread(LAYERS, names)]
        top = _loop(v1, _converted(weights, v1.constant), xs, v1.shape(xs)[0], zeros, on)
    config = v1.ConfigProto(
        device_count={"CPU": len(names)},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=threads,
        use_per_session_threads=True,
    )
    session = v1.Session(graph=graph, config=config)
    return lambda values: session.run(top, {xs: values})


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    steps: int = STEPS,
    batch: int = SIZES["batch"],
    hidden: int = SIZES["hidden"],
    counts: Sequence[int] = COUNTS,
    simulated_steps: int = SIMULATED_STEPS,
) -> list[Result]:
    """ms per time step on this CPU, the speed-up of two devices and of two streams; steps/s of virtual time."""
    weights = _weights(hidden)
    xs = np.random.default_rng(1).standard_normal((steps, batch, hidden)).astype(np.float32)
    ours = {
        ASYNCFLOW: _Asyncflow(weights, batch, _ONE_CPU, 1),
        f"{ASYNCFLOW}, {TWO_DEVICES}": _Asyncflow(weights, batch, _TWO_CPUS, 1),
        f"{ASYNCFLOW}, {TWO_STREAMS}": _Asyncflow(weights, batch, _ONE_CPU, 2),
    }
    trials: dict[str, Trial] = {
        system: timed_await(TIME, 1e3 / steps, lambda model=model: model.run(xs))  # type: ignore[misc]
        for system, model in ours.items()
    }
    by_hand = _Numpy(weights, batch)
    trials[NUMPY] = timed(TIME, 1e3 / steps, lambda: by_hand.alone(xs))
    trials[f"{NUMPY}, {TWO_THREADS}"] = timed(TIME, 1e3 / steps, lambda: by_hand.threads(xs))
    if (tensorflow := peers.tensorflow) is not None:
        for system, names, threads in (
            (TENSORFLOW_1, _ONE_CPU, 1),
            (f"{TENSORFLOW_1}, {TWO_DEVICES}", _TWO_CPUS, 2),
            (f"{TENSORFLOW_1}, {TWO_THREADS}", _ONE_CPU, 2),
        ):
            run = _tensorflow(tensorflow, weights, batch, names, threads)
            trials[system] = timed(TIME, 1e3 / steps, lambda run=run: run(xs))  # type: ignore[misc]
    case = f"{LAYERS} layers, hidden {hidden}, batch {batch}, {steps} steps"
    try:
        results = await compare(NAME, case, trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE)
    finally:
        for model in ours.values():
            await model.session.aclose()
    found = await in_thread(lambda: by_host(lambda: curves(counts, steps=simulated_steps, batch=batch, hidden=hidden)))
    case = f"{LAYERS} layers, hidden {hidden}, batch {batch}, {simulated_steps} steps, v100: {{x}}, {{curve}}"
    return [*results, *speed_ups(results), *as_results(NAME, found, STEPS_RATE, case)]


def speed_ups(results: Sequence[Result]) -> list[Result]:
    """Of two devices, streams or threads over one."""
    by_system = {result.system: result for result in results}
    return [
        replace(quotient(SPEED_UP, by_system[alone], result), system=system)
        for system, result in by_system.items()
        if (alone := system.partition(",")[0]) != system
    ]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The measured speed-ups, and the simulated rates."""
    bars = {
        result.system: (result.median, result.worst, result.best)
        for result in results
        if result.workload == NAME and result.figure == SPEED_UP
    }
    charts = [
        Chart(
            title=f"hidden {size['hidden']}, batch {size['batch']}",
            x="devices",
            y="time steps/s of virtual time",
            curves=by_host(lambda size=size: curves(steps=SIMULATED_STEPS, batch=size["batch"], hidden=size["hidden"])),  # type: ignore[misc]
        )
        for size in (SIZES, LARGE)
    ]
    note = f"{LAYERS}-layer LSTM, forward, {SIMULATED_STEPS} time steps, simulated v100, {LINK}\n{host_note()}"
    paths = [draw_charts(folder / "stacked_lstm_simulated.png", charts, note=note)]
    if bars:
        title = f"{LAYERS}-layer LSTM, forward, hidden {SIZES['hidden']}, batch {SIZES['batch']}, two cores"
        paths.append(draw_bars(folder / "stacked_lstm.png", title, SPEED_UP.name, bars))
    return paths
