"""Four ways to train or run a model on several simulated GPUs (TensorFlow white paper, §7).

*Data parallel*: replicas of a linear model compute gradients on shards of one batch; the parameters live on a device
of their own. *Synchronous*: the sum of all gradients is one update, and a step. *Asynchronous*: each replica has a
client that updates with its own gradient and does not wait for others; as many updates as there are replicas count as
a step. *Model parallel*: the layers of an LSTM on different devices. *Concurrent steps*: several runs of one model,
cut over devices, in flight at once, so that one works where another waits.

Kernels and copies vary by a tenth.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

import asyncflow as af
from benchmarks import stacked_lstm
from benchmarks.harness import Result
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.plots import Chart, Timeline, draw_charts, draw_timelines
from benchmarks.simulation import (
    DRIVERS,
    STEPS_RATE,
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
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

NAME = "white_paper_pipelines"
LINK = "nvlink2"
COUNTS = (1, 2, 4, 8)
JITTER = 0.1
STEPS = 20
BATCH, FEATURES = 32_768, 1024
LEARNING_RATE = 1e-3
LAYERS, LAYER_DEVICES = 8, 4
WINDOW = 4
"""Time steps at once in the LSTM: no more than fill the pipeline. With more, early steps queue behind late ones."""

SYNCHRONOUS: Final = "data parallel, synchronous"
ASYNCHRONOUS: Final = "data parallel, asynchronous"
MODEL: Final = "model parallel"
CONCURRENT: Final = "concurrent steps"


Data: TypeAlias = "tuple[NDArray[np.float32], NDArray[np.float32]]"
"""Inputs and targets, each ``(batch, features)``."""


class Training:
    """A linear model with one replica a device, and its parameters on ``sim:0``.

    Attributes:
        weights: the parameters.
        synchronous: the step of all replicas together.
        compute: by replica, makes its gradient with the parameters as they are, and keeps it there.
        apply: by replica, sends that gradient to the parameters and updates them.
    """

    def __init__(
        self, replicas: int, *, batch: int = BATCH, features: int = FEATURES, data: Data | None = None
    ) -> None:
        parameters, *names = devices(replicas + 1)
        x, y = data or (np.zeros((batch, features), np.float32),) * 2
        with af.Graph() as self.graph:
            with af.device(parameters):
                self.weights = af.Variable(np.zeros((features, features), np.float32), name="weights")
                weights = self.weights.read()
            gradients, kept = [], []
            shards = zip(names, np.split(x, replicas), np.split(y, replicas), strict=True)
            for index, (device, inputs, targets) in enumerate(shards):
                with af.device(device):
                    shard = af.constant(inputs)
                    # Of half the squared error: x^T (x w - y).
                    error = af.matmul(shard, weights) - targets
                    gradients.append(af.matmul(af.permute_dims(shard, (1, 0)), error))
                    kept.append(af.Variable(np.zeros((features, features), np.float32), name=f"gradient_{index}"))
            with af.device(parameters):
                self.synchronous = af.group(self._update(sum(gradients[1:], gradients[0]), batch))
            self.compute, self.apply = [], []
            for device, gradient, keep in zip(names, gradients, kept, strict=True):
                with af.device(device):
                    self.compute.append(af.group(keep.assign(gradient)))
                    sent = keep.read()
                with af.device(parameters):
                    self.apply.append(af.group(self._update(sent, batch)))

    def _update(self, gradient: af.Tensor, batch: int) -> af.Tensor:
        return self.weights.assign_sub(gradient * np.float32(LEARNING_RATE / batch))


def synchronous(
    replicas: int, *, steps: int = STEPS, traced: bool = False, batch: int = BATCH, features: int = FEATURES
) -> Outcome:
    """Steps one after the other."""
    training = Training(replicas, batch=batch, features=features)

    async def work(session: af.Session) -> None:
        for _ in range(steps):
            await session.run(training.synchronous)

    return simulate(_cluster(replicas), work, jitter=JITTER, traced=traced)


def asynchronous(
    replicas: int, *, steps: int = STEPS, traced: bool = False, batch: int = BATCH, features: int = FEATURES
) -> Outcome:
    """A client for each replica."""
    training = Training(replicas, batch=batch, features=features)

    async def client(session: af.Session, compute: af.Node, apply: af.Node) -> None:
        for _ in range(steps):
            # Two runs. In one, the next client's read would be launched behind this update, and wait for it.
            await session.run(compute)
            await session.run(apply)

    async def work(session: af.Session) -> None:
        await asyncio.gather(*map(client, [session] * replicas, training.compute, training.apply))

    return simulate(_cluster(replicas), work, jitter=JITTER, traced=traced)


def _cluster(replicas: int) -> str:
    return f"{replicas + 1} x v100, {LINK}"


def concurrent(
    clients: int, *, steps: int = STEPS, traced: bool = False, batch: int = 256, features: int = 2048
) -> Outcome:
    """As many runs in flight as there are clients, each with its share of the steps."""
    with af.Graph():
        x = output = af.placeholder("float32", (batch, features))
        for device in spread(LAYERS, devices(LAYER_DEVICES)):
            with af.device(device):
                output = af.relu(af.matmul(output, af.constant(np.zeros((features, features), np.float32))))
        with af.device(devices(LAYER_DEVICES)[-1]):
            score = af.sum(output)
    fed = np.zeros((batch, features), np.float32)

    async def client(session: af.Session, runs: int) -> None:
        for _ in range(runs):
            await session.run(score, {x: fed})

    async def work(session: af.Session) -> None:
        shares = [steps // clients + (index < steps % clients) for index in range(clients)]
        await asyncio.gather(*(client(session, runs) for runs in shares))

    return simulate(f"{LAYER_DEVICES} x v100, {LINK}", work, jitter=JITTER, traced=traced)


def model_parallel(count: int, *, steps: int = STEPS, traced: bool = False, **sizes: int) -> Outcome:
    """The layers of an LSTM, as `stacked_lstm` has it, over `count` devices."""
    return stacked_lstm.simulated(
        count, steps=steps, traced=traced, **({"window": WINDOW} | stacked_lstm.LARGE | sizes)
    )


PIPELINES: Final[dict[str, Callable[..., Outcome]]] = {
    SYNCHRONOUS: synchronous,
    ASYNCHRONOUS: asynchronous,
    MODEL: model_parallel,
    CONCURRENT: concurrent,
}
_VARIED = {SYNCHRONOUS: "replicas", ASYNCHRONOUS: "replicas", MODEL: "devices", CONCURRENT: "runs in flight"}


def curve(pipeline: str, counts: Sequence[int] = COUNTS, *, steps: int = STEPS, **sizes: int) -> Curve:
    """Steps/s by the number of replicas, devices or runs in flight."""
    return {count: steps / PIPELINES[pipeline](count, steps=steps, **sizes).seconds for count in counts}


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 1,
    counts: Sequence[int] = COUNTS,
    steps: int = STEPS,
    sizes: dict[str, dict[str, Any]] | None = None,
) -> list[Result]:
    """Steps/s of virtual time, which no repeat would change; `sizes` of each pipeline by its name."""
    results = []
    for pipeline, varied in _VARIED.items():
        chosen = (sizes or {}).get(pipeline, {})
        found = await in_thread(
            lambda name=pipeline, chosen=chosen: by_host(lambda: {name: curve(name, counts, steps=steps, **chosen)})
        )
        results += as_results(NAME, found, STEPS_RATE, f"{{curve}}, {varied}: {{x}}")
    return results


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """The rates of all, and timelines."""
    parallel = by_host(lambda: {"synchronous": curve(SYNCHRONOUS), "asynchronous": curve(ASYNCHRONOUS)})
    charts = [
        Chart(
            title=f"Data parallel: linear model, batch {BATCH:,}",
            x="replicas",
            y="steps/s of virtual time",
            curves=parallel,
        ),
        Chart(
            title="Model parallel: 8-layer LSTM",
            x="devices",
            y="time steps/s of virtual time",
            curves=by_host(lambda: {"": curve(MODEL)}),
        ),
        Chart(
            title=f"Concurrent steps: {LAYERS} layers on {LAYER_DEVICES} devices",
            x="runs in flight",
            y="runs/s of virtual time",
            curves=by_host(lambda: {"": curve(CONCURRENT)}),
        ),
    ]
    training = [
        _timeline(SYNCHRONOUS, 4, 4, "4 replicas; colour, number: run", 10.0),
        _timeline(ASYNCHRONOUS, 4, 4, "4 replicas; colour, number: run, two a step", 10.0),
        _timeline(SYNCHRONOUS, 4, 4, "4 replicas; colour, number: run", 20.0, "asyncflow"),
    ]
    pipelines = [
        _timeline(CONCURRENT, 1, 6, "1 run in flight; colour, number: run", 3.0),
        _timeline(CONCURRENT, 4, 12, "4 runs in flight; colour, number: run", 3.0),
        _timeline(CONCURRENT, 4, 12, "4 runs in flight; colour, number: run", 12.0, "asyncflow"),
    ]
    layers = [
        _timeline(MODEL, 2, 12, "2 devices; colour, number: time step", 8.0),
        _timeline(MODEL, 8, 12, "8 devices; colour, number: time step", 8.0),
        _timeline(MODEL, 8, 12, "8 devices; colour, number: time step", 40.0, "asyncflow"),
    ]
    return [
        draw_charts(folder / "white_paper_pipelines.png", charts, note=f"simulated v100, {LINK}\n{host_note()}"),
        draw_timelines(folder / "data_parallel_timeline.png", training, note=host_note()),
        draw_timelines(folder / "concurrent_steps_timeline.png", pipelines, note=host_note()),
        draw_timelines(folder / "model_parallel_timeline.png", layers, note=host_note()),
    ]


def _timeline(pipeline: str, count: int, steps: int, legend: str, until_ms: float, host: str = "c++") -> Timeline:
    with driven_by(host):
        trace = PIPELINES[pipeline](count, steps=steps, traced=True).trace
    colours = "iteration" if pipeline == MODEL else "run"
    title = f"{DRIVERS[host]}, {pipeline}: {legend}; thin: copies"
    return Timeline(title=title, trace=trace, window_ms=(0.0, until_ms), colours=colours)
