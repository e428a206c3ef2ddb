"""A stack of recurrent layers cut over devices, which work on different time steps at the same time.

A layer needs its own state of the time step before, and the result of the layer below in this one. So while the upper
half of the layers works on one time step, the lower half, on another device, is at the next. The loop does not say so:
it is written as for one device. `af.device` places each layer, and the runtime sends values between devices.

On this machine's CPU, over two devices with a core for each:

    python examples/pipeline.py --output demo-out

On eight GPUs, which need not be there:

    asyncflow simulate examples/pipeline.py:main --devices "8 x v100, nvlink2" -o pipeline.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import asyncflow as af

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Model:
    """Layers of ``h = tanh(x @ w_x + h @ w_h)``.

    Attributes:
        w_x: by layer, ``(size, size)``.
        w_h: by layer, ``(size, size)``.
    """

    w_x: list[Array]
    w_h: list[Array]


def make_model(layers: int, size: int) -> Model:
    """Random weights, the same each time."""
    random = np.random.default_rng(0)
    drawn = (random.standard_normal((2 * layers, size, size)) * size**-0.5).astype(np.float32)
    return Model(list(drawn[:layers]), list(drawn[layers:]))


def build(model: Model, xs: Array, devices: Sequence[str], parallel_iterations: int = 32) -> af.Tensor:
    """The top layer's outputs, ``(steps, batch, size)``, for the inputs `xs` of the same shape."""
    layers = len(model.w_x)
    on = [devices[layer * len(devices) // layers] for layer in range(layers)]
    with af.device(on[0]):
        inputs = af.TensorArray("float32", size=len(xs)).unstack(af.constant(xs))
    with af.device(on[-1]):
        outputs = af.TensorArray("float32", size=len(xs), element_shape=xs.shape[1:])

    def step(t: af.Tensor, outputs: af.TensorArray, *states: af.Tensor) -> tuple[object, ...]:
        with af.device(on[0]):
            x = inputs.read(t)
        after = []
        for layer, h in enumerate(states):
            with af.device(on[layer]):
                x = af.tanh(x @ model.w_x[layer] + h @ model.w_h[layer])
            after.append(x)
        with af.device(on[-1]):
            outputs = outputs.write(t, x)
        return t + 1, outputs, *after

    zeros = [af.constant(np.zeros(xs.shape[1:], np.float32))] * layers
    _, outputs, *_ = af.while_loop(
        lambda t, *_: t < len(xs), step, (0, outputs, *zeros), parallel_iterations=parallel_iterations, name="rnn"
    )
    top: af.Tensor = outputs.stack()
    return top


def compute_directly(model: Model, xs: Array) -> Array:
    """The same in NumPy."""
    states = [np.zeros(xs.shape[1:], np.float32) for _ in model.w_x]
    outputs = []
    for x in xs:
        for layer, h in enumerate(states):
            x = states[layer] = np.tanh(x @ model.w_x[layer] + h @ model.w_h[layer])
        outputs.append(x)
    return np.stack(outputs)


async def run(model: Model, xs: Array) -> tuple[Array, af.Trace, str]:
    """Return the outputs, the trace, and the reason for the device of each node."""
    # In a simulation, a session has all of the machine's devices.
    async with af.Session() as session:
        devices = [device.name for device in session.devices]
    if devices == ["cpu:0"]:
        devices.append("cpu:1")
    with af.Graph() as graph:
        top = build(model, xs, devices)
    async with af.Session(graph, devices=devices) as session:
        plan = session.plan(top)
        await session.run(top)
        trace = af.Trace()
        outputs = await session.run(top, trace=trace)
    return outputs, trace, plan.placement.explain()


def main(argv: Sequence[str] | None = None) -> int:
    """Gives 0 if the outputs agree with NumPy's, else 1."""
    parser = argparse.ArgumentParser(description="A stack of recurrent layers, pipelined over devices.")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=512, help="units of a layer")
    parser.add_argument("--explain", action="store_true", help="say of each node why it is where it is")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)

    model = make_model(options.layers, options.size)
    shape = options.steps, options.batch, options.size
    xs = np.random.default_rng(1).standard_normal(shape, np.float32)
    outputs, trace, plan = af.run(run(model, xs))
    for line in plan.splitlines():
        if options.explain or not line.startswith(" "):
            print(line)
    path = options.output / "pipeline.html"
    af.profiler.save(trace, path)
    print(f"timeline: {path.resolve().as_uri()}")
    sent = sum(transfer.nbytes for transfer in trace.transfers)
    wall_ms = af.profiler.summarize(trace).wall_ns / 1e6
    print(f"{len(trace.transfers)} transfers of {sent / 2**20:.1f} MiB between devices, {wall_ms:.1f} ms in all")

    agreed = np.allclose(outputs, compute_directly(model, xs), atol=1e-4)
    print(f"{'PASS' if agreed else 'FAIL'}: {options.steps} time steps of {options.layers} layers, checked with NumPy")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
