"""A training step of an LSTM of eight layers, cut over devices, real and simulated (EuroSys '18, fig. 15).

Backward, time step t of a layer needs step t + 1 of the same layer and step t of the one above, so layers on different
devices work at different steps, as they do forward. The weights of a layer live on its device and are updated there.
The loss is the mean of the squares of the top layer's outputs; all sequences have one length.

Two plain threads measure the gain of NumPy from two cores at this size. A call of NumPy releases the interpreter's lock
and takes it back; if another thread holds it by then, a thread has to be woken up. The elementwise calls of a time step
are as short as that takes, so two threads gain nothing in them, or lose, while they gain up to twice the speed in
matrix products.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Result, Trial, compare, timed
from benchmarks.lstm import (
    STEP_TIME,
    TOLERANCE,
    Model,
    cell,
    random_model,
    tensorflow_functions,
    timed_step,
    timed_step_await,
)
from benchmarks.lstm_by_hand import ByHand
from benchmarks.peers import NO_PEERS, NUMPY, TENSORFLOW_1, Peers
from benchmarks.plots import Chart, Timeline, draw_bars, draw_charts, draw_timelines
from benchmarks.results import curves_of
from benchmarks.simulation import (
    DRIVERS,
    PAPER,
    Curve,
    Outcome,
    as_results,
    by_host,
    devices,
    driven_by,
    host_note,
    in_thread,
    simulate,
    spread,
    with_host,
)
from benchmarks.stacked_lstm import COUNTS, LAYERS, LINK, SPEED_UP, TWO_DEVICES, TWO_THREADS, speed_ups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.lstm import Step
    from benchmarks.peers import TensorFlow

NAME = "stacked_lstm_training"
SEPARATE_LAYERS: Final = f"{NUMPY} separate layers"
SIMULATED_SPEED_UP = replace(SPEED_UP, name=f"{SPEED_UP.name}, virtual time")
PAPERS_SPEED_UP = replace(SPEED_UP, name=f"{SPEED_UP.name}, real time")
PAPERS: Final[dict[str, Curve]] = {"speed-up": {8: 5.5}}
STEPS, HIDDEN = 20, 512
TIMELINE_STEPS = 8
BATCHES = (64, 512)
WIDTHS = (512, 1024, 2048)
CPU_SIZES: Final = {"steps": 20, "batch": 64, "hidden": 256}
LEARNING_RATE = np.float32(1e-3)
_ONE_CPU, _TWO_CPUS = ["cpu:0"], ["cpu:0", "cpu:1"]

Layers = list[SimpleNamespace]
"""By layer, its ``w_x``, ``w_h`` and ``bias``, as arrays of any system."""


def _total(system: Any, layers: Layers, xs: Any, steps: Any, zeros: Any, names: Sequence[str], window: int = 32) -> Any:
    """The sum of the squares of the top layer's outputs, in asyncflow and TensorFlow; layer l is on ``names[l]``."""

    def body(step: Any, total: Any, *states: Any) -> Any:
        with system.device(names[0]):
            x = xs[step]
        after = []
        for index, (layer, device) in enumerate(zip(layers, names, strict=True)):
            with system.device(device):
                # TensorFlow keeps values for the gradient where they are made, and cannot use them elsewhere.
                x = system.identity(x)
                x, c = cell(system, layer, x, *states[2 * index : 2 * index + 2])
            after += [x, c]
        with system.device(names[-1]):
            total = total + system.sum(system.square(x))
        return step + 1, total, *after

    start = (np.int32(0), np.float32(0), *[zeros] * (2 * len(names)))
    return system.while_loop(lambda step, *_: step < steps, body, start, parallel_iterations=window)[1]


# -- simulated ---------------------------------------------------------------------------------------------------


def build(count: int, *, steps: int, batch: int, hidden: int, window: int = 32) -> Callable[[af.Session], Any]:
    """One step over `count` simulated GPUs, with as many layers on each and at most `window` time steps at once."""
    names = spread(LAYERS, devices(count))
    shapes = (hidden, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,)
    with af.Graph():
        length = af.placeholder("int32", ())
        variables = []
        for device in names:
            with af.device(device):
                variables.append([af.Variable(np.zeros(shape, np.float32)) for shape in shapes])
        with af.device(names[0]):
            xs = af.constant(np.zeros((steps, batch, hidden), np.float32))
        zeros = af.constant(np.zeros((batch, hidden), np.float32))
        layers = [_layer([variable.read() for variable in of_layer]) for of_layer in variables]
        loss = _total(af, layers, xs, length, zeros, names, window) * np.float32(1 / (steps * batch * hidden))
        found = af.gradients(loss, variables)
        updates = []
        for device, of_layer, grads in zip(names, variables, found, strict=True):
            with af.device(device):
                for variable, grad in zip(of_layer, grads, strict=True):
                    updates.append(variable.assign_sub(grad * LEARNING_RATE))
        step = af.group(*updates)
    return lambda session: session.run(step, {length: steps})


def simulated(count: int, *, traced: bool = False, **sizes: int) -> Outcome:
    """The step on v100 cards; see `build`."""
    return simulate(f"{count} x v100, {LINK}", build(count, **sizes), traced=traced)


def curves(
    counts: Sequence[int] = COUNTS, batches: Sequence[int] = BATCHES, *, steps: int = STEPS, hidden: int = HIDDEN
) -> dict[str, Curve]:
    """The speed-up over one device by the number of devices, for every batch size."""
    found = {}
    for batch in batches:
        seconds = {
            count: simulated(count, steps=steps, batch=batch, hidden=hidden).seconds
            for count in dict.fromkeys([1, *counts])
        }
        found[f"batch {batch}"] = {count: seconds[1] / seconds[count] for count in counts}
    return found


def widths(hidden: Sequence[int] = WIDTHS, *, count: int = COUNTS[-1], steps: int = STEPS) -> dict[str, Curve]:
    """The speed-up of `count` devices over one by the units of a layer, with this runtime's host."""
    host, batch = next(iter(DRIVERS)), BATCHES[-1]
    with driven_by(host):
        found = {width: curves((count,), (batch,), steps=steps, hidden=width) for width in hidden}
    return {with_host(name, host): {width: found[width][name][count] for width in hidden} for name in found[hidden[0]]}


# -- real --------------------------------------------------------------------------------------------------------


def _random_layers(hidden: int) -> Layers:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> NDArray[np.float32]:
        return np.float32(hidden**-0.5) * random.standard_normal(shape, np.float32)

    return [_layer([normal(hidden, 4 * hidden), normal(hidden, 4 * hidden), normal(4 * hidden)]) for _ in range(LAYERS)]


def _layer(weights: Sequence[Any]) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(("w_x", "w_h", "bias"), weights, strict=True)))


def _weights(layers: Layers) -> list[Any]:
    return [weight for layer in layers for weight in (layer.w_x, layer.w_h, layer.bias)]


class _Asyncflow:
    """The step on CPU devices of this machine, in a session that opens with the first and has to be closed."""

    def __init__(self, layers: Layers, xs: NDArray[np.float32], names: Sequence[str]) -> None:
        _, batch, hidden = xs.shape
        on = spread(LAYERS, names)
        with af.Graph() as graph:
            fed = af.placeholder("float32", (None, batch, hidden))
            steps = af.astype(af.shape(fed)[0], "int32")
            built = []
            for device, layer in zip(on, layers, strict=True):
                with af.device(device):
                    built.append(_layer([af.Variable(weight).read() for weight in _weights([layer])]))
            zeros = af.constant(np.zeros((batch, hidden), np.float32))
            loss = _total(af, built, fed, steps, zeros, on) * np.float32(1 / xs.size)
            self._fetches = loss, af.gradients(loss, _weights(built))
        self._feeds = {fed: xs}
        self.session = af.Session(graph, devices=names)

    async def run(self) -> Step:
        step: Step = await self.session.run(self._fetches, self._feeds)
        return step


class _SeparateLayers:
    """The step of every layer by hand, each by itself: no layer waits for another.

    Not the same work as the stack's: all layers get the same inputs, and have no gradients of them.
    """

    def __init__(self, layers: Layers, xs: NDArray[np.float32]) -> None:
        zeros = np.zeros(xs.shape[1:], np.float32)
        self._steps = [ByHand(Model(xs, layer.w_x, layer.w_h, layer.bias, zeros, zeros)) for layer in layers]

    def alone(self) -> None:
        """On one thread."""
        self._run(self._steps)

    def threads(self) -> None:
        """Half of the layers on each of two threads."""
        half = len(self._steps) // 2
        with ThreadPoolExecutor(1) as other:
            upper = other.submit(self._run, self._steps[half:])
            self._run(self._steps[:half])
            upper.result()

    def _run(self, steps: Sequence[ByHand]) -> None:
        for step in steps:
            step()


def _tensorflow(
    tensorflow: TensorFlow, layers: Layers, xs: NDArray[np.float32], names: Sequence[str]
) -> Callable[[], Step]:
    """The step in TensorFlow 1, with a logical CPU device for each name and as many threads between ops."""
    v1 = tensorflow.v1
    _, batch, hidden = xs.shape
    on = [f"/{name}" for name in spread(LAYERS, names)]
    with tensorflow.graph() as graph:
        fed = v1.placeholder(v1.float32, (None, batch, hidden))
        built = []
        for device, layer in zip(on, layers, strict=True):
            with v1.device(device):
                weights = [v1.Variable(weight, use_resource=True).read_value() for weight in _weights([layer])]
                built.append(_layer(weights))
        zeros = v1.zeros((batch, hidden))
        total = _total(tensorflow_functions(tensorflow), built, fed, v1.shape(fed)[0], zeros, on)
        loss = total * np.float32(1 / xs.size)
        # Else all of the gradient is on the first device.
        fetches = loss, v1.gradients(loss, _weights(built), colocate_gradients_with_ops=True)
        config = v1.ConfigProto(
            device_count={"CPU": len(names)},
            intra_op_parallelism_threads=1,
            inter_op_parallelism_threads=len(names),
            use_per_session_threads=True,
        )
        session = v1.Session(graph=graph, config=config)
        session.run(v1.global_variables_initializer())
    return lambda: session.run(fetches, {fed: xs})


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    steps: int = CPU_SIZES["steps"],
    batch: int = CPU_SIZES["batch"],
    hidden: int = CPU_SIZES["hidden"],
    counts: Sequence[int] = COUNTS,
    batches: Sequence[int] = BATCHES,
    simulated_steps: int = STEPS,
    simulated_hidden: int = HIDDEN,
    simulated_widths: Sequence[int] = WIDTHS,
) -> list[Result]:
    """Measure ms per training step on this CPU, speed-ups of two devices or threads, speed-ups in virtual time, and the
    paper's.
    """
    layers = _random_layers(hidden)
    xs = random_model(steps, batch, hidden).xs
    ours = {
        ASYNCFLOW: _Asyncflow(layers, xs, _ONE_CPU),
        f"{ASYNCFLOW}, {TWO_DEVICES}": _Asyncflow(layers, xs, _TWO_CPUS),
    }
    trials: dict[str, Trial] = {system: timed_step_await(xs.size, model.run) for system, model in ours.items()}
    separate = _SeparateLayers(layers, xs)
    trials[SEPARATE_LAYERS] = timed(STEP_TIME, 1e3, separate.alone)
    trials[f"{SEPARATE_LAYERS}, {TWO_THREADS}"] = timed(STEP_TIME, 1e3, separate.threads)
    # Theirs is other work.
    baselines = list(trials)[-2:]
    if (tensorflow := peers.tensorflow) is not None:
        trials[TENSORFLOW_1] = timed_step(xs.size, _tensorflow(tensorflow, layers, xs, _ONE_CPU))
        two = timed_step(xs.size, _tensorflow(tensorflow, layers, xs, _TWO_CPUS))
        trials[f"{TENSORFLOW_1}, {TWO_DEVICES}"] = two
    case = f"{LAYERS} layers, hidden {hidden}, batch {batch}, {steps} steps"
    try:
        results = await compare(
            NAME, case, trials, repeats=repeats, lead_ins=1, baselines=baselines, tolerance=TOLERANCE
        )
    finally:
        for model in ours.values():
            await model.session.aclose()
    found = await in_thread(
        lambda: by_host(lambda: curves(counts, batches, steps=simulated_steps, hidden=simulated_hidden))
    )
    by_width = await in_thread(lambda: widths(simulated_widths, count=max(counts), steps=simulated_steps))
    case = _simulated_case("{curve}", "{x}", simulated_steps, simulated_hidden)
    of_width = f"{LAYERS} layers, hidden {{x}}, {{curve}}, {simulated_steps} steps, devices: {max(counts)}"
    return [
        *results,
        *speed_ups(results),
        *as_results(NAME, found, SIMULATED_SPEED_UP, case),
        *as_results(NAME, by_width, SIMULATED_SPEED_UP, of_width),
        *as_results(NAME, PAPERS, PAPERS_SPEED_UP, f"{LAYERS} layers, devices: {{x}}", system=PAPER),
    ]


def _simulated_case(batch: str, count: int | str, steps: int, hidden: int) -> str:
    return f"{LAYERS} layers, hidden {hidden}, {batch}, {steps} steps, devices: {count}"


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The simulated speed-ups beside the paper's, how forward turns into backward, and the measured speed-ups."""
    curves = {}
    for batch in (with_host(f"batch {size}", host) for host in DRIVERS for size in BATCHES):
        cases = {count: _simulated_case(batch, count, STEPS, HIDDEN) for count in COUNTS}
        if found := curves_of(results, SIMULATED_SPEED_UP, cases):
            curves[batch] = found[ASYNCFLOW]
    paths = []
    if curves:
        chart = Chart(
            title=f"{LAYERS}-layer LSTM, training step, hidden {HIDDEN}, {STEPS} time steps",
            x="devices",
            y=SIMULATED_SPEED_UP.name,
            curves=curves,
            paper=PAPERS,
        )
        note = f"simulated v100, {LINK}\n{host_note()}"
        paths.append(draw_charts(folder / "stacked_lstm_training_simulated.png", [chart], note=note))
        timelines = []
        for host, label in DRIVERS.items():
            with driven_by(host):
                trace = simulated(COUNTS[-1], steps=TIMELINE_STEPS, batch=BATCHES[-1], hidden=HIDDEN, traced=True).trace
            title = f"{label}: {TIMELINE_STEPS} time steps, forward and backward (colour: iteration; thin: copies)"
            timelines.append(Timeline(title=title, trace=trace))
        paths.append(draw_timelines(folder / "stacked_lstm_training_timeline.png", timelines, note=note))
    bars = {
        result.system: (result.median, result.worst, result.best)
        for result in results
        if (result.workload, result.figure) == (NAME, SPEED_UP)
    }
    if bars:
        size = f"hidden {CPU_SIZES['hidden']}, batch {CPU_SIZES['batch']}"
        title = f"{LAYERS}-layer LSTM, training step, {size}, two cores"
        paths.append(draw_bars(folder / "stacked_lstm_training.png", title, SPEED_UP.name, bars))
    return paths
