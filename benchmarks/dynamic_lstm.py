"""An LSTM over a sequence: as a loop of a length known only in the run, against the same cells written out.

The forward pass; all outputs are kept. Every system runs one cell on weights of its own type.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Trial, compare, timed, timed_await
from benchmarks.lstm import Model, cell, joined_cell, random_model
from benchmarks.peers import JAX, NO_PEERS, NUMPY, TENSORFLOW_1, TORCH, Peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.peers import TensorFlow

TIME = Figure("time a sequence", "ms")
JOINED: Final = f"{ASYNCFLOW}, concat"
UNROLLED: Final = "asyncflow unrolled"
TENSORFLOW_UNROLLED: Final = f"{TENSORFLOW_1} unrolled"
TOLERANCE = 1e-4


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 5, steps: int = 100, batch: int = 64, hidden: int = 512
) -> list[Result]:
    """ms per sequence: asyncflow in three ways, NumPy by hand, TensorFlow in both ways, PyTorch, JAX."""
    model = random_model(steps, batch, hidden)
    with af.Graph() as graph:
        xs = af.placeholder("float32", (None, batch, hidden), name="xs")
        known = af.placeholder("float32", (steps, batch, hidden), name="known")
        length = af.astype(af.shape(xs)[0], "int32")
        dynamic = _dynamic(af, model.map(af.constant), xs, length)
        weights = model.map(af.constant)
        joined_weights = af.concat([weights.w_x, weights.w_h], axis=0)
        joined = _dynamic(af, weights, xs, length, partial(joined_cell, af, joined_weights, weights.bias))
        unrolled = _unrolled(af, model.map(af.constant), af.unstack(known))

    async with af.Session(graph) as session:
        trials: dict[str, Trial] = {
            ASYNCFLOW: timed_await(TIME, 1e3, lambda: session.run(dynamic, {xs: model.xs})),
            JOINED: timed_await(TIME, 1e3, lambda: session.run(joined, {xs: model.xs})),
            UNROLLED: timed_await(TIME, 1e3, lambda: session.run(unrolled, {known: model.xs})),
            NUMPY: timed(TIME, 1e3, lambda: _by_hand(model)),
        }
        for system, work in _peers_work(model, peers).items():
            trials[system] = timed(TIME, 1e3, work)
        case = f"hidden {hidden}, batch {batch}, {steps} steps"
        return await compare("dynamic_lstm", case, trials, repeats=repeats, tolerance=TOLERANCE)


def _dynamic(system: Any, model: Model, xs: Any, steps: Any, step: Callable[..., Any] | None = None) -> Any:
    """The loop, in asyncflow and TensorFlow; `step` is the cell if it is not the ready one."""
    step = step or partial(cell, system, model)
    shape = model.h.shape
    inputs = system.TensorArray("float32", size=steps, element_shape=shape).unstack(xs)
    outputs = system.TensorArray("float32", size=steps, element_shape=shape)

    def body(t: Any, h: Any, c: Any, outputs: Any) -> Any:
        h, c = step(inputs.read(t), h, c)
        return t + 1, h, c, outputs.write(t, h)

    start = (np.int32(0), model.h, model.c, outputs)
    return system.while_loop(lambda t, *_: t < steps, body, start)[-1].stack()


def _unrolled(system: Any, model: Model, xs: Any) -> Any:
    """The cells one after the other, in asyncflow and TensorFlow."""
    h, c = model.h, model.c
    outputs = []
    for x in xs:
        h, c = cell(system, model, x, h, c)
        outputs.append(h)
    return system.stack(outputs)


def _by_hand(model: Model) -> Any:
    """Into buffers made once."""
    h, c = model.h.copy(), model.c.copy()
    outputs = np.empty_like(model.xs)
    gates = np.empty((*h.shape[:-1], 4 * h.shape[-1]), h.dtype)
    recurrent = np.empty_like(gates)
    into, forget, candidate, out = np.split(gates, 4, axis=-1)
    for t, x in enumerate(model.xs):
        np.matmul(x, model.w_x, out=gates)
        np.matmul(h, model.w_h, out=recurrent)
        gates += recurrent
        gates += model.bias
        for gate in (into, forget, out):
            # sigmoid(x) = tanh(x / 2) / 2 + 1 / 2
            gate *= 0.5
            np.tanh(gate, out=gate)
            gate *= 0.5
            gate += 0.5
        np.tanh(candidate, out=candidate)
        c *= forget
        into *= candidate
        c += into
        np.tanh(c, out=h)
        h *= out
        outputs[t] = h
    return outputs


def _peers_work(model: Model, peers: Peers) -> dict[str, Callable[[], Any]]:
    work: dict[str, Callable[[], Any]] = {}
    if peers.tensorflow is not None:
        work |= _tensorflow(model, peers.tensorflow)
    if peers.torch is not None:
        work[TORCH] = _torch(model, peers.torch)
    if peers.jax is not None:
        work[JAX] = _jax(model, peers.jax)
    return work


def _tensorflow(model: Model, tensorflow: TensorFlow) -> dict[str, Callable[[], Any]]:
    v1 = tensorflow.v1
    with tensorflow.graph() as graph:
        xs = v1.placeholder(v1.float32, (None, *model.xs.shape[1:]))
        known = v1.placeholder(v1.float32, model.xs.shape)
        dynamic = _dynamic(v1, model.map(v1.constant), xs, v1.shape(xs)[0])
        unrolled = _unrolled(v1, model.map(v1.constant), v1.unstack(known))
    session = tensorflow.session(graph, threads=1)
    return {
        TENSORFLOW_1: lambda: session.run(dynamic, {xs: model.xs}),
        TENSORFLOW_UNROLLED: lambda: session.run(unrolled, {known: model.xs}),
    }


def _torch(model: Model, torch: Any) -> Callable[[], Any]:
    tensors = model.map(torch.from_numpy)

    def work() -> Any:
        with torch.inference_mode():
            return _unrolled(torch, tensors, tensors.xs).numpy()

    return work


def _jax(model: Model, jax: Any) -> Callable[[], Any]:
    arrays = model.map(jax.numpy.asarray)

    class Functions:
        sigmoid, tanh = staticmethod(jax.nn.sigmoid), staticmethod(jax.numpy.tanh)

    @jax.jit  # type: ignore[untyped-decorator]
    def function(xs: Any, steps: Any) -> Any:
        def body(t: Any, state: Any) -> Any:
            h, c, outputs = state
            h, c = cell(Functions, arrays, xs[t], h, c)
            return h, c, outputs.at[t].set(h)

        start = (arrays.h, arrays.c, jax.numpy.zeros_like(xs))
        return jax.lax.fori_loop(0, steps, body, start)[-1]

    steps = np.int32(len(model.xs))
    return lambda: np.asarray(function(arrays.xs, steps))
